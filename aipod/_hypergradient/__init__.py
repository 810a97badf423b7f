"""The gradient of F(x) = f(x, y*(x)), and exact reference values."""
