"""Step sizes: a number, an Optax schedule of the outer step, or the lower level's curvature."""

from aipod.stepsize._rules import rule as rule
from aipod.stepsize._stepsize import Curvature as Curvature
from aipod.stepsize._stepsize import Rates as Rates
from aipod.stepsize._stepsize import StepSize as StepSize
from aipod.stepsize._stepsize import theory as theory
