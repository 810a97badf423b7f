"""Constraint sets: affine subspaces of pytrees, `{y : A y + h(x) = c}`, and such sets with bounds.

Every set answers `project` and `residual`, under jit, vmap and grad. An affine set answers
`tangent` and `anchor` too; a set with bounds has a `face` at each point, which does. See
`AbstractSet`, from which sets of one's own derive.

Bad input raises `ValueError` when the set is made, before anything is compiled.
"""

from aipod.sets._affine import Affine as Affine
from aipod.sets._agreed import AgreedWithin as AgreedWithin
from aipod.sets._bounded import Bounded as Bounded
from aipod.sets._box import Box as Box
from aipod.sets._budget import Budget as Budget
from aipod.sets._consensus import Consensus as Consensus
from aipod.sets._flow import Flow as Flow
from aipod.sets._free import Free as Free
from aipod.sets._gossip import Gossip as Gossip
from aipod.sets._gossip import as_gossip as as_gossip
from aipod.sets._product import Product as Product
from aipod.sets._robust import AbstractAverage as AbstractAverage
from aipod.sets._robust import ClippedMean as ClippedMean
from aipod.sets._robust import GeometricMedian as GeometricMedian
from aipod.sets._robust import RobustConsensus as RobustConsensus
from aipod.sets._robust import TrimmedMean as TrimmedMean
from aipod.sets._set import AbstractSet as AbstractSet
from aipod.sets._simplex import CappedSimplex as CappedSimplex
from aipod.sets._simplex import Simplex as Simplex
