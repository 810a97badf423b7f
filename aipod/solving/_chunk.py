"""The compiled part of a run: many outer steps in one program, with what they recorded."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod.algorithms import Alternating, Keeping, State
from aipod.algorithms._carried import Carried, Layout
from aipod.problem import Bilevel
from aipod.slots import Counts
from aipod.solving._history import scalar_columns
from aipod.solving._ledger import RECORDED

# Rows that one chunk can record before it returns to Python.
ROWS = 256
# A chunk ends when one of its 32-bit counts gets this far; one more step then cannot overflow it,
# unless that step alone spends a billion samples.
FULL = 2**30
# Outer steps between two checks for NaN; a check costs as much as several small steps.
STRIDE = 256

Record = Callable[[PyTree, PyTree], Any]


class Limits(eqx.Module):
    """Where a chunk must end. These are arrays, so that changing them does not recompile."""

    end: Array
    final: Array
    every: Array
    projections: Array
    tolerance: dict[str, Array]
    patience: Array | None


class Chunk(eqx.Module):
    """What a chunk carries along, and returns.

    - `state`: after the last step; inside the program as its loops carry it.
    - `rows`, `count`: what was recorded, and how many rows of it there are.
    - `finite`: whether all numbers of the state are.
    - `checked`: the last step after which they were seen to be.
    - `culprit`: otherwise, which of `QUANTITIES` is not.
    - `converged`, `flat`: whether a tolerance or a plateau of `Stop` was reached.
    """

    state: Any
    rows: dict[str, Array]
    count: Array
    finite: Array
    checked: Array
    culprit: Array
    converged: Array
    flat: Array


QUANTITIES = ("x", "y", "the lower level's correction", "the adjoint", "the upper optimiser")


def _parts(state: State) -> tuple[PyTree, ...]:
    return state.x, state.y, state.lower, state.adjoint, state.upper


def _finite_parts(state: State) -> Array:
    """For each of `QUANTITIES` whether it is finite."""

    def finite(tree: PyTree) -> Array:
        leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        checks = [jnp.all(jnp.isfinite(leaf)) for leaf in leaves]
        return jnp.all(jnp.stack(checks)) if checks else jnp.asarray(True)

    return jnp.stack([finite(part) for part in _parts(state)])


def measured(
    record: Record | None, state: State, keeping: Keeping | None = None
) -> dict[str, Array]:
    """One row: the step, the counts, the curvature, and what `record` returns."""
    fields = [field.name for field in dataclasses.fields(Counts)]
    row: dict[str, Any] = {"step": state.step}
    row |= {name: getattr(state.counts, name) for name in fields}
    if state.curvature is not None:
        row["curvature"] = jnp.max(state.curvature.estimate)
    metrics = {} if record is None else scalar_columns(_recorded(record, state, keeping))
    if taken := set(metrics) & {*row, *RECORDED}:
        raise ValueError(f"record(x, y) returns {sorted(taken)}, which solve itself records.")
    return row | {name: jnp.asarray(value) for name, value in metrics.items()}


def _recorded(record: Record, state: State, keeping: Keeping | None) -> Any:
    x, y = (state.x, state.y) if keeping is None else keeping.points(state)
    try:
        return record(x, y)
    except Exception as error:
        raise ValueError(
            f"record(x, y) raised {type(error).__name__}: {error} It is compiled along with the "
            "steps: use jax.numpy in it, and return a dictionary of names to arrays."
        ) from error


def run_chunk(
    problem: Bilevel,
    solver: Alternating,
    record: Record | None,
    keeping: Keeping | None,
    state: State,
    key: PRNGKeyArray,
    limits: Limits,
) -> Chunk:
    """Outer steps until a limit: a loop over rows to record, around strides of several steps.

    After each stride all numbers are checked. If one is not finite, the chunk ends there. An older
    state is not kept, since that would double the memory: who holds the state that the chunk began
    with can find the last finite one (`last_finite`).
    """

    def spent(state: State) -> Array:
        return state.counts.projections >= limits.projections

    def flat(state: State) -> Array:
        """Whether F has not decreased for as long as `Stop(patience=)` says."""
        if limits.patience is None:
            return jnp.asarray(False)
        return state.watch.idle(state.step) >= limits.patience

    def over(state: State) -> Array:
        """Whether Python must take over the counts, or one of the reasons to stop holds."""
        # Whether any count has reached FULL, a power of two: cheaper than their maximum.
        bits = functools.reduce(jnp.bitwise_or, jax.tree.leaves(state.counts))
        return spent(state) | flat(state) | (bits >= FULL)

    layout = Layout.of(state, None) if keeping is None else keeping.layout(state)

    def steps_to(target: Array, carried: Carried) -> Carried:
        def going(carried: Carried) -> Array:
            state = layout.state(carried)
            return (state.step < target) & ~over(state)

        def step(carried: Carried) -> Carried:
            return layout.carried(solver.kept_step(keeping, problem, layout.state(carried), key))

        return jax.lax.while_loop(going, step, carried)

    def to_next_row(chunk: Chunk) -> Chunk:
        began = layout.state(chunk.state)
        target = jnp.minimum(limits.end, (began.step // limits.every + 1) * limits.every)

        def going(carry: tuple[Carried, Array, Array]) -> Array:
            carried, parts, _ = carry
            state = layout.state(carried)
            return jnp.all(parts) & (state.step < target) & ~over(state)

        def advance(carry: tuple[Carried, Array, Array]) -> tuple[Carried, Array, Array]:
            old = layout.state(carry[0])
            carried = steps_to(jnp.minimum(target, old.step + STRIDE), carry[0])
            return carried, _finite_parts(layout.state(carried)), old.step

        none = jnp.ones(len(QUANTITIES), bool)
        start = (chunk.state, none, chunk.checked)
        carried, parts, before = jax.lax.while_loop(going, advance, start)
        state, finite = layout.state(carried), jnp.all(parts)
        on_grid = state.step % limits.every == 0
        last = (state.step == limits.final) | spent(state) | flat(state)
        due = finite & (on_grid | last) & (state.step > began.step)
        before_row = (chunk.rows, chunk.converged)
        rows, converged = jax.lax.cond(
            due, write, lambda *_: before_row, chunk.rows, chunk.count, carried
        )
        return Chunk(
            state=carried,
            rows=rows,
            count=chunk.count + due,
            finite=finite,
            checked=jnp.where(finite, state.step, before),
            culprit=jnp.argmin(parts).astype(jnp.int32),
            converged=converged,
            flat=flat(state),
        )

    def write(
        rows: dict[str, Array], count: Array, carried: Carried
    ) -> tuple[dict[str, Array], Array]:
        row = measured(record, layout.state(carried), keeping)
        rows = {name: buffer.at[count].set(row[name]) for name, buffer in rows.items()}
        within = [row[name] <= value for name, value in limits.tolerance.items()]
        return rows, jnp.all(jnp.stack(within)) if within else jnp.asarray(False)

    def going(chunk: Chunk) -> Array:
        state = layout.state(chunk.state)
        live = (state.step < limits.end) & ~over(state)
        return live & chunk.finite & ~chunk.converged & (chunk.count < ROWS)

    shapes = jax.eval_shape(lambda s: measured(record, s, keeping), state)
    rows = {name: jnp.zeros((ROWS, *s.shape), s.dtype) for name, s in shapes.items()}
    if unknown := set(limits.tolerance) - set(rows):
        raise ValueError(
            f"Stop(tolerance=) names {sorted(unknown)}, but only {sorted(rows)} are recorded: let "
            "record(x, y) return it."
        )
    # Counts restart in each chunk, so that 32 bits suffice; Python keeps the totals.
    state = eqx.tree_at(lambda s: s.counts, state, Counts.zero())
    zero = jnp.zeros((), jnp.int32)
    chunk = Chunk(
        state=layout.carried(state),
        rows=rows,
        count=zero,
        finite=jnp.asarray(True),
        checked=state.step,
        culprit=zero,
        converged=jnp.asarray(False),
        flat=flat(state),
    )
    chunk = jax.lax.while_loop(going, to_next_row, chunk)
    return dataclasses.replace(chunk, state=layout.state(chunk.state))


def last_finite(
    run: Callable[[State, int, int], Chunk], start: State, failed: Chunk
) -> tuple[Chunk, Chunk]:
    """The chunk from `start` to the last finite state, and one that ends a single step later.

    `run(state, end, final)` makes the steps from a state to the step `end`, in a run whose last
    step is `final`. `failed` is a chunk from `start` that is not finite at its end. Steps do not
    depend on where a chunk ends, so that they can be made again.
    """
    good, bad = int(failed.checked), int(failed.state.step)
    never = bad + 1
    near = start if good == int(start.step) else run(start, good, never).state
    while bad - good > 1:
        tried = run(near, (good + bad) // 2, never)
        if bool(tried.finite):
            good = int(tried.state.step)
        else:
            good, bad, failed = int(tried.checked), int(tried.state.step), tried
    kept = run(start, good, good)
    # On some devices sums depend on the order in which threads finish: then back to the start.
    return kept if bool(kept.finite) else run(start, int(start.step), good), failed
