"""Constraint sets: affine subspaces of pytrees, `{y : A y + h(x) = c}`.

Every set answers `project`, `tangent`, `anchor` and `residual`, under jit, vmap and grad; see
`AbstractSet`, from which sets of one's own derive.

Bad input raises `ValueError` when the set is made, before anything is compiled.
"""

from aipod.sets._affine import Affine as Affine
from aipod.sets._budget import Budget as Budget
from aipod.sets._consensus import Consensus as Consensus
from aipod.sets._flow import Flow as Flow
from aipod.sets._free import Free as Free
from aipod.sets._product import Product as Product
from aipod.sets._set import AbstractSet as AbstractSet
