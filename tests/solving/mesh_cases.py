"""Runs on eight devices, in a process of its own: see test_mesh.py. Raises where they differ."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import aipod
from aipod import federated
from aipod.solving import _programs
from aipod.stepsize import _pauses

KEY = jax.random.key(0)
FIXED = {"lower_lr": 0.1, "adjoint_lr": 0.1, "upper_lr": 0.05}
COLLECTIVES = r"= (.*?) (all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter)\("


def lower(x, y, batch):
    fit = jnp.tanh(batch[0] @ x["w"]) @ y - batch[1]
    return 0.5 * jnp.mean(fit**2) + 0.05 * jnp.sum(y**2)


def upper(x, y, batch):
    return lower(x, y, batch) + 0.01 * jnp.sum(x["w"] ** 2)


def federation(clients, *, unequal=False, weighted=False, **options):
    rng = np.random.default_rng(clients)

    def data():
        if unequal:
            return [
                (rng.normal(size=(2 + i % 5, 4)), rng.normal(size=2 + i % 5))
                for i in range(clients)
            ]
        return rng.normal(size=(clients, 9, 4)), rng.normal(size=(clients, 9))

    weights = rng.uniform(0.5, 2, clients) if weighted else None
    options = {"batch_size": 4, "weights": weights, **options}
    problem = federated.federate(upper, lower, data(), data(), **options)
    x0 = federated.replicate({"w": jnp.asarray(rng.normal(size=(4, 3)))}, clients)
    return problem, x0, federated.replicate(jnp.asarray(rng.normal(size=3)), clients)


def collectives():
    """The collectives of the newest program: their operands' types, those outside a step last."""
    text = next(reversed(_programs._PROGRAMS.values()))[0].as_text()
    return [(m[1], m[2]) for line in text.splitlines() if (m := re.search(COLLECTIVES, line))]


def same(name, problem, solver, x0, y0, mesh, steps=6):
    def record(x, y):
        return {"x": jnp.sum(x["w"] ** 2), "y": jnp.sum(y**2)}

    arguments = (problem, solver, x0, y0, steps)
    alone = aipod.solve(*arguments, key=KEY, record=record, every=2)
    spread = aipod.solve(*arguments, key=KEY, record=record, every=2, mesh=mesh)
    np.testing.assert_allclose(spread.x["w"], alone.x["w"], atol=1e-12, err_msg=name)
    np.testing.assert_allclose(spread.y, alone.y, atol=1e-12, err_msg=name)
    for a, b in zip(jax.tree.leaves(spread.state), jax.tree.leaves(alone.state), strict=True):
        assert a.shape == b.shape, name
    for column in alone.history:
        np.testing.assert_allclose(
            spread.history[column], alone.history[column], rtol=1e-9, atol=1e-12
        )
    assert spread.ledger == alone.ledger, name
    assert spread.converged == alone.converged, name
    print("same:", name, flush=True)
    return spread


def federations(mesh):
    default = aipod.E3AiPOD()
    same("e3, weights, 13 clients", *_with(federation(13, weighted=True), default), mesh)
    found = collectives()
    # In the step: one all-reduce of vectors, and one of a scalar, the largest curvature. After a
    # stride of steps one more, of truth values: whether all numbers are finite.
    assert all(kind == "all-reduce" for _, kind in found), found
    vectors = [types for types, _ in found if re.search(r"\[\d", types)]
    scalars = [types for types, _ in found if not re.search(r"\[\d", types) and "pred" not in types]
    assert len(vectors) == 1, found
    assert len(scalars) == 1, found
    assert len(found) == 3, found
    same("e3, 16 bits", *_with(federation(13), aipod.E3AiPOD(**FIXED, compression="float16")), mesh)
    some = federation(20, participation=0.5, weighted=True)
    same("e3, half of 20 clients", *_with(some, aipod.E3AiPOD(**FIXED)), mesh)
    short = aipod.E3AiPOD(**FIXED, compression="float8")
    same("e3, half of 20 clients, 8 bits", *_with(some, short), mesh)
    unequal = federation(13, unequal=True, weighted=True)
    same("e-aipod, unequal clients", *_with(unequal, aipod.EAiPOD(**FIXED)), mesh)
    twice = aipod.E2AiPOD(**FIXED, upper_steps=2)
    same("e2-aipod, T = 2", *_with(federation(5), twice), mesh)
    nest = aipod.FedNest(lower_lr=0.1, adjoint_lr=0.1, upper_lr=0.05, upper_steps=2)
    same("fednest", *_with(federation(9, weighted=True), nest), mesh, 3)
    # A row that fills up a device must not count in what a move promised.
    single = aipod.FedF2SA(lower_lr=0.05, adjoint_lr=0.05, local_steps=2)
    same("f2sa, paced", *_with(federation(9), single), mesh, 3)
    with pytest.raises(ValueError, match=r"cannot hand a vector.*leave the mesh"):
        aipod.solve(*_with(federation(9), aipod.FedMBO(upper_lr=0.1)), 1, key=KEY, mesh=mesh)
    # As if 13 clients were many: most outer steps do not look at the curvature.
    _pauses._MANY, _pauses._ALWAYS = 13, 2
    full = federation(13, batch_size=None, weighted=True)
    same("e3, pauses between looks", *_with(full, default), mesh, 14)


def gossip(mesh):
    solver = aipod.E3AiPOD(**FIXED, lower_steps=4)
    same("grid", *_with(federation(16, graph="grid"), solver), mesh)
    found = collectives()
    kinds = {kind for types, kind in found if re.search(r"\[\d", types)}
    assert kinds == {"collective-permute"}, found
    failing = aipod.Gossip("erdos-renyi", 16, key=KEY, participation=0.5)
    same("random graph, failing links", *_with(federation(16, graph=failing), solver), mesh)
    with pytest.raises(ValueError, match="divides 12"):
        aipod.solve(*_with(federation(12, graph="ring"), solver), 2, key=KEY, mesh=mesh)


def _with(case, solver):
    problem, x0, y0 = case
    return problem, solver, x0, y0


def batches(devices):
    rng = np.random.default_rng(1)
    data = rng.normal(size=(64, 4)), rng.normal(size=64)
    x0, y0 = {"w": jnp.ones((4, 3))}, jnp.ones(3)
    solver = aipod.AiPOD(**FIXED)

    def problem(data):
        samples = aipod.Minibatches(data, 16)
        return aipod.Bilevel(upper, lower, upper_samples=samples, lower_samples=samples)

    mesh = jax.make_mesh((devices,), ("batch",))
    same("batches", problem(data), solver, x0, y0, mesh)
    assert any(kind == "all-reduce" for _, kind in collectives())
    alone = aipod.solve(problem(data), solver, x0, y0, 6, key=KEY)
    # Spread by the user, and no mesh given: taken as it is.
    rows = NamedSharding(mesh, PartitionSpec("batch"))
    spread = tuple(jax.device_put(part, rows) for part in data)
    found = aipod.solve(problem(spread), solver, x0, y0, 6, key=KEY)
    np.testing.assert_allclose(found.y, alone.y, atol=1e-12)


def refusals(mesh):
    def refused(words, problem, mesh):
        with pytest.raises(ValueError, match=words):
            aipod.solve(*_with(problem, aipod.AiPOD(**FIXED)), 2, key=KEY, mesh=mesh)

    def square(x, y, _):
        return jnp.sum((y - x["w"][0, 0]) ** 2)

    plain = (aipod.Bilevel(square, square), {"w": jnp.ones((4, 3))}, jnp.ones(3))
    refused("no clients that can be spread", plain, mesh)
    refused("mesh must be a jax.sharding.Mesh", plain, 8)
    odd = jax.make_mesh((len(jax.devices()),), ("model",))
    refused("mesh must have an axis 'clients'", plain, odd)
    batch = jax.make_mesh((len(jax.devices()),), ("batch",))
    refused("need an axis named 'clients'", federation(8), batch)


def main():
    jax.config.update("jax_enable_x64", True)
    devices = len(jax.devices())
    assert devices == 8, devices
    mesh = jax.make_mesh((devices,), ("clients",))
    parts = {
        "federations": lambda: federations(mesh),
        "gossip": lambda: gossip(mesh),
        "batches": lambda: batches(devices),
    }
    parts[sys.argv[1]]()
    if sys.argv[1] == "batches":
        refusals(mesh)
    print("done")


if __name__ == "__main__":
    main()
