"""How x moves: one algorithm in each file."""
