"""Compiled programs, kept so that the next seed of a problem compiles nothing.

A run is always traced anew, which takes a fraction of the time of compiling: a global that has
changed, an objective that was edited or an array that was written into would otherwise go
unnoticed. A program is found again by what was traced, not by the functions behind it. Two
functions that compute the same share a program, and their arrays are its arguments.
"""

import collections
import threading
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.digest import digest_arrays, digest_text
from aipod._misc.keys import to_numpy
from aipod.algorithms import State
from aipod.solving._chunk import Chunk, Limits, run_chunk
from aipod.solving._compile import compile_lowered, compile_options

# Few, since a program with callbacks keeps the user's functions alive.
_KEPT = 4
_PROGRAMS: collections.OrderedDict[Any, Any] = collections.OrderedDict()
_LOCK = threading.Lock()


class Program:
    """The compiled chunk of one run. Arrays that user functions captured are its arguments.

    Captured arrays would otherwise be constants of the program, which costs compile time and
    memory in proportion to the data.
    """

    def __init__(self, static: PyTree, arguments: tuple[PyTree, ...]) -> None:
        def chunk(arrays: PyTree, state: State, key: PRNGKeyArray, limits: Limits) -> Chunk:
            problem, solver, record, keeping = eqx.combine(arrays, static)
            return run_chunk(problem, solver, record, keeping, state, key, limits)

        closed, shapes = jax.make_jaxpr(chunk, return_shape=True)(*arguments)
        self.captured = closed.consts
        self._structure = jax.tree.structure(shapes)
        # The state of one chunk is the argument of the next one: it stays spread as it is.
        kept = [_sharding(leaf) for leaf in jax.tree.leaves(arguments[1])]
        many = next((one for one in kept if one is not None), None)
        everywhere = None if many is None else NamedSharding(many.mesh, PartitionSpec())
        rest = [everywhere] * (len(jax.tree.leaves(shapes)) - len(kept))
        out = [*kept, *rest] if many is not None else None
        self.compiled = _compiled(closed, self.captured, jax.tree.leaves(arguments), out)

    def __call__(self, *arguments: PyTree) -> Chunk:
        found = self.compiled(self.captured, *jax.tree.leaves(arguments))
        return jax.tree.unflatten(self._structure, found)


def _compiled(
    closed: Any, captured: list[Array], leaves: list[Array], out: list[Any] | None
) -> Any:
    """The executable of a traced chunk, compiled unless it is at hand.

    `out`: how its results are spread over devices; None where that is not asked for.
    """
    constants: list[Any] = []
    callbacks: list[int] = []
    _look_inside(closed.jaxpr, constants, callbacks)
    name = (
        digest_text(str(closed.jaxpr)),
        digest_arrays(("", to_numpy(constant)) for constant in constants),
        tuple(callbacks),
        tuple((jax.typeof(leaf), _sharding(leaf)) for leaf in [*captured, *leaves]),
        jax.default_backend(),
        str(compile_options()),
    )
    with _LOCK:
        found = _PROGRAMS.pop(name, None)
        if found is not None:
            _PROGRAMS[name] = found
            return found[0]

    def flat(captured: list[Array], *leaves: Array) -> list[Array]:
        return jax.core.eval_jaxpr(closed.jaxpr, captured, *leaves)

    jitted = jax.jit(flat) if out is None else jax.jit(flat, out_shardings=out)
    compiled = compile_lowered(jitted.lower(captured, *leaves))
    with _LOCK:
        # With the traced program: what a callback's number stands for must not be freed.
        _PROGRAMS[name] = (compiled, closed.jaxpr if callbacks else None)
        while len(_PROGRAMS) > _KEPT:
            _PROGRAMS.popitem(last=False)
    return compiled


def _sharding(leaf: Array) -> Any:
    """How an array is spread over several devices; None on one."""
    sharding = getattr(leaf, "sharding", None)
    return None if sharding is None or len(sharding.device_set) == 1 else sharding


def _look_inside(jaxpr: Any, constants: list[Any], callbacks: list[int]) -> None:
    """Collects what the text of a traced program does not tell: inner constants, and callbacks."""
    for equation in jaxpr.eqns:
        is_callback = "callback" in equation.primitive.name
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            if is_callback and callable(value):
                callbacks.append(id(value))
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                constants += [
                    constant
                    for constant in getattr(value, "consts", ())
                    if isinstance(constant, jax.Array | np.ndarray)
                ]
                _look_inside(inner, constants, callbacks)
