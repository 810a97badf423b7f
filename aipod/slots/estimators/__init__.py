"""How derivatives are estimated from minibatches: one estimator in each file."""

from aipod.slots.estimators._base import AbstractEstimator as AbstractEstimator
from aipod.slots.estimators._base import Estimate as Estimate
from aipod.slots.estimators._base import Oracle as Oracle
from aipod.slots.estimators._each import EstimatorLike as EstimatorLike
from aipod.slots.estimators._each import Estimators as Estimators
from aipod.slots.estimators._each import for_each as for_each
from aipod.slots.estimators._each import or_plain as or_plain
from aipod.slots.estimators._heavy_ball import HeavyBall as HeavyBall
from aipod.slots.estimators._saga import SAGA as SAGA
from aipod.slots.estimators._sarah import SARAH as SARAH
from aipod.slots.estimators._storm import STORM as STORM
from aipod.slots.estimators._svrg import LooplessSVRG as LooplessSVRG
