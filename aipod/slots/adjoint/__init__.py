"""How z = (P G P)^+ P grad_y f is found: one algorithm in each file."""
