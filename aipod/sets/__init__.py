"""Constraint sets: affine subspaces of pytrees, `{y : A y + h(x) = c}`.

Every set answers `project`, `tangent`, `anchor` and `residual`, under jit, vmap and grad.
With P the projection on Ker A and A^+ the pseudo-inverse,

    project(v, x) = P v + anchor(x),     tangent(v) = P v,     anchor(x) = A^+ (c - h(x)).

Bad input raises `ValueError` when the set is made, before anything is compiled.
"""

from aipod.sets._affine import Affine as Affine
from aipod.sets._base import AbstractSet as AbstractSet
from aipod.sets._base import Free as Free
from aipod.sets._budget import Budget as Budget
from aipod.sets._consensus import Consensus as Consensus
from aipod.sets._flow import Flow as Flow
from aipod.sets._product import Product as Product
