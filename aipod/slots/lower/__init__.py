"""How y follows x: one algorithm in each file."""

from aipod.slots.lower._augmented import AugmentedLagrangian as AugmentedLagrangian
from aipod.slots.lower._base import AbstractLower as AbstractLower
from aipod.slots.lower._growing import GrowingSGD as GrowingSGD
from aipod.slots.lower._one_round import OneRound as OneRound
from aipod.slots.lower._projected import ProjectedSGD as ProjectedSGD
from aipod.slots.lower._proxskip import ProxSkip as ProxSkip
from aipod.slots.lower._simultaneous import SimultaneousLower as SimultaneousLower
from aipod.slots.lower._simultaneous import settles as settles
from aipod.slots.lower._svrg import SVRG as SVRG
from aipod.slots.lower._told import ToldLower as ToldLower
