"""How y follows x: one algorithm in each file."""
