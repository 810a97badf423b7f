"""How x moves: one algorithm in each file."""

from aipod.slots.upper._averaged import MovingAverage as MovingAverage
from aipod.slots.upper._base import AbstractUpper as AbstractUpper
from aipod.slots.upper._delayed import Delayed as Delayed
from aipod.slots.upper._difference import DifferenceStep as DifferenceStep
from aipod.slots.upper._every import EveryStep as EveryStep
from aipod.slots.upper._exponentiated import ExponentiatedGradient as ExponentiatedGradient
from aipod.slots.upper._local import LocalUpper as LocalUpper
from aipod.slots.upper._optimisers import fading_adam as fading_adam
from aipod.slots.upper._paced import paced_adam as paced_adam
from aipod.slots.upper._paced import paced_unless as paced_unless
from aipod.slots.upper._periodic import Periodic as Periodic
from aipod.slots.upper._seen import Seen as Seen
from aipod.slots.upper._told import ToldUpper as ToldUpper
