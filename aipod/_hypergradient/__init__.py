"""The gradient of F(x) = f(x, y*(x)), and exact reference values to hold algorithms against."""

from aipod._hypergradient._estimate import hypergradient as hypergradient
from aipod._hypergradient._exact import exact_hypergradient as exact_hypergradient
from aipod._hypergradient._exact import exact_lower as exact_lower
from aipod._hypergradient._exact import stationarity as stationarity
