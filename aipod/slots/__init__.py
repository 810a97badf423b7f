"""The three slots of every algorithm, and what they share."""
