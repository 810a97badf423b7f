"""Step sizes: a number, an Optax schedule of the outer step, or the lower level's curvature."""

from aipod.stepsize._checks import as_number as as_number
from aipod.stepsize._checks import check_at_least_one as check_at_least_one
from aipod.stepsize._checks import check_not_negative as check_not_negative
from aipod.stepsize._checks import check_positive as check_positive
from aipod.stepsize._checks import check_probability as check_probability
from aipod.stepsize._checks import check_share as check_share
from aipod.stepsize._checks import check_steps as check_steps
from aipod.stepsize._curvature import HASTY as HASTY
from aipod.stepsize._curvature import Curvature as Curvature
from aipod.stepsize._curvature import CurvatureState as CurvatureState
from aipod.stepsize._curvature import curvature_draws as curvature_draws
from aipod.stepsize._curvature import curvature_heard as curvature_heard
from aipod.stepsize._curvature import curvature_init as curvature_init
from aipod.stepsize._curvature import curvature_iterations as curvature_iterations
from aipod.stepsize._curvature import curvature_update as curvature_update
from aipod.stepsize._power import beside as beside
from aipod.stepsize._power import power_iteration as power_iteration
from aipod.stepsize._rules import rule as rule
from aipod.stepsize._rules import theory as theory
from aipod.stepsize._stepsize import Rates as Rates
from aipod.stepsize._stepsize import StepSize as StepSize
from aipod.stepsize._stepsize import adapts as adapts
from aipod.stepsize._stepsize import check_lr as check_lr
from aipod.stepsize._stepsize import smaller as smaller
from aipod.stepsize._tempering import agreement as agreement
from aipod.stepsize._tempering import tempered as tempered
