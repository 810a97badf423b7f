"""What one outer step hands to the next."""

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from aipod.algorithms._packed import PackedWatch
from aipod.slots._cost import Counts
from aipod.stepsize import CurvatureState


class State(eqx.Module):
    """Everything that one outer step hands to the next.

    - `x`, `y`: the iterates.
    - `lower`, `adjoint`, `upper`: what each slot keeps.
    - `curvature`: the estimate behind `Curvature` steps; None without them.
    - `step`: outer steps made so far.
    - `counts`: what they spent, since `solve` last moved it into the ledger.
    - `watch`: what was seen of the convergence.
    - `moves`: the last move of x and of y, for upper slots that need it.
    - `estimates`: what the estimators of the three slots keep, and how many draws were made.

    !!! example
        ```python
        state = solver.init(problem, x0, y0)
        state = solver.step(problem, state, key=jax.random.key(0))
        state.x, state.y, state.step
        ```
    """

    x: PyTree
    y: PyTree
    lower: PyTree
    adjoint: PyTree
    upper: PyTree
    curvature: CurvatureState | None
    step: Array
    counts: Counts
    watch: PackedWatch
    moves: tuple[PyTree, PyTree] | None = None
    estimates: PyTree = None


def in_rows_of(like: PyTree, tree: PyTree) -> PyTree:
    """One row of a tree where another is kept once; else the tree."""

    def one(kept: Array, leaf: Array) -> Array:
        return leaf if kept.shape == leaf.shape else leaf[:1]

    return jax.tree.map(one, like, tree)
