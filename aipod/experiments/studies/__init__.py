"""Measurements of the paper's complexity claims: rates (`rates.py`) and Table 1 (`table1.py`)."""
