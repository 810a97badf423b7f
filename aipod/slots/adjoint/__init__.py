"""How z = (P G P)^+ P grad_y f is found: one algorithm in each file."""

from aipod.slots.adjoint._base import AbstractAdjoint as AbstractAdjoint
from aipod.slots.adjoint._conjugate import ConjugateGradient as ConjugateGradient
from aipod.slots.adjoint._conjugate import solve_projected as solve_projected
from aipod.slots.adjoint._direct import Direct as Direct
from aipod.slots.adjoint._direct import Zero as Zero
from aipod.slots.adjoint._health import Health as Health
from aipod.slots.adjoint._joint import JointSteps as JointSteps
from aipod.slots.adjoint._neumann import Neumann as Neumann
from aipod.slots.adjoint._one_round import OneRoundAdjoint as OneRoundAdjoint
from aipod.slots.adjoint._passed import PassedSeries as PassedSeries
from aipod.slots.adjoint._penalised import PenalisedSteps as PenalisedSteps
from aipod.slots.adjoint._perturbed import PerturbedLower as PerturbedLower
from aipod.slots.adjoint._proxskip import ProxSkipAdjoint as ProxSkipAdjoint
from aipod.slots.adjoint._recursive import RecursiveSteps as RecursiveSteps
from aipod.slots.adjoint._restarted import Restarted as Restarted
from aipod.slots.adjoint._simultaneous import SimultaneousAdjoint as SimultaneousAdjoint
