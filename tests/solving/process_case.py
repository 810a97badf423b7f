"""One process of a run that several make together: see test_processes.py."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

CLIENTS = 5


def lower(x, y, batch):
    return 0.5 * jnp.mean((batch[0] @ (x * y) - batch[1]) ** 2) + 0.5 * jnp.sum(y**2)


def upper(x, y, batch):
    return lower(x, y, batch) + 0.01 * jnp.sum(x**2)


def main(index, processes, port, folder, steps, out):
    jax.config.update("jax_enable_x64", True)
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{port}", processes, index, heartbeat_timeout_seconds=10
        )
    import aipod
    from aipod import federated

    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(CLIENTS, 8, 3)), rng.normal(size=(CLIENTS, 8))) for _ in range(2)]
    problem = federated.federate(upper, lower, *data, batch_size=4)
    mesh = jax.make_mesh((processes,), ("clients",)) if processes > 1 else None
    solution = aipod.solve(
        problem,
        aipod.E3AiPOD(lower_lr=0.1, adjoint_lr=0.1, upper_lr=0.01),
        federated.replicate(jnp.ones(3), CLIENTS),
        federated.replicate(jnp.zeros(3), CLIENTS),
        steps,
        key=jax.random.key(1),
        record=lambda x, y: {"square": jnp.sum(x**2)},
        every=max(1, steps // 4),
        checkpoint=folder,
        checkpoint_seconds=0.2,
        resume=True,
        progress=lambda report: print("step", report.step, flush=True),
        mesh=mesh,
    )
    x, y, r = solution.x, solution.y, solution.state.lower.correction
    np.savez(f"{out}-{index}.npz", x=x, y=y, r=r, **solution.history)


if __name__ == "__main__":
    given = sys.argv[1:]
    main(int(given[0]), int(given[1]), given[2], given[3], int(given[4]), given[5])
