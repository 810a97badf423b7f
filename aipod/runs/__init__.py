"""The folder of a run: written by `aipod run` and by Flower, read by the report."""
