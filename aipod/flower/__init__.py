"""The same algorithms across real machines, on Flower."""
