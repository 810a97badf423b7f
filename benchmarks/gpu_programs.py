"""How many programs of its own an outer step runs on a GPU, counted without one.

    pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12   # of jax's own version
    python benchmarks/gpu_programs.py --clients 5000 --participation 1 0.05

Where arrays are small each of them takes about two microseconds, however little it computes, and
together they are the time of a step. XLA compiles the chunk of `benchmarks/scale.py` for an H200
from its description alone, and the compiled text is counted: bodies of loops as often as they run
where that is known, else once; both branches of a condition. What happens in some of the steps
alone, as at the end of a block of the watch, stands in lines of its own.
"""

import argparse
import collections
import importlib
import importlib.util
import os
import re
from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from scale import CLASSES, PIXELS, federation

from aipod import Alternating, federated
from aipod.experiments.solvers import make
from aipod.experiments.tasks.images import layer
from aipod.solving._chunk import Limits, run_chunk

# What XLA wants to know of an H200.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 patch: 0 } device_description_str: "NVIDIA H200"
"""
# In place of the curvature, of the pace of x and of the damping that is looked for.
GIVEN = {"lower_lr": 0.1, "adjoint_lr": 0.1, "upper_lr": 0.1, "damping": 0.0}
# What takes no program.
_NOTHING = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"}


def device() -> jax.sharding.Sharding:
    """Where the program would run."""
    if not all(importlib.util.find_spec(name) for name in ("jax_plugins", "nvidia")):
        raise SystemExit("this needs JAX's CUDA plugin; the first lines of this file say which.")
    compiler = next(iter(importlib.import_module("nvidia").__path__)) + "/cuda_nvcc"
    flags = f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={compiler}"
    # XLA reads them when it is first used.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    jax.config.update("jax_platforms", "cpu")
    try:
        importlib.import_module("jax_plugins.xla_cuda12").initialize()
    except jax.errors.JaxRuntimeError as error:
        # JAX has loaded it by itself.
        if "ALREADY_EXISTS" not in str(error):
            raise
    described = topologies.get_topology_desc(
        platform="cuda", topology_name="one", target_config=H200, topology="1x1x1"
    )
    mesh = topologies.make_mesh(described, (1,), ("one",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def compiled(
    solver: Alternating, clients: int, participation: float, place: jax.sharding.Sharding
) -> str:
    """The text of the compiled chunk."""
    problem, _ = federation(clients, 24, 0, participation, 1)
    rng = np.random.default_rng(1)
    points = layer(rng, PIXELS, 200), layer(rng, 200, CLASSES)
    state, keeping = solver.init_kept(problem, *(federated.replicate(one, 1) for one in points))
    end = jnp.asarray(100, jnp.int32)
    limits = Limits(end, end, end, jnp.asarray(2**30, jnp.int32), {}, None)
    parts = (problem, solver, keeping, state, jax.random.key(2), limits)
    arrays, rest = eqx.partition(parts, eqx.is_array)

    def chunk(arrays: object) -> object:
        problem, solver, keeping, state, key, limits = eqx.combine(arrays, rest)
        return run_chunk(problem, solver, None, keeping, state, key, limits)

    def shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    shapes = jax.tree.map(shape, arrays)
    # The step is written for where it runs.
    jax.default_backend = lambda: "gpu"
    lowered = jax.jit(chunk, in_shardings=place, out_shardings=place).lower(shapes)
    return str(lowered.compile().as_text())


def instructions(text: str) -> tuple[str, dict[str, list[str]]]:
    """The name of the program where all begins, and the instructions of each."""
    found: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if begins := re.match(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{", line):
            name = begins[2]
            found[name] = []
            entry = name if begins[1] else entry
        elif name and not line.startswith("}"):
            found[name].append(re.sub(r"/\*.*?\*/", "", line.strip()))
    return entry, found


def programs(
    name: str, of: dict[str, list[str]], times: int = 1, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], int]]:
    """(the loops around it, how often it runs) for each program."""
    for line in of[name]:
        seen = re.match(r"^(?:ROOT )?%?([\w.-]+) = (?:\([^=]*?\)|\S+) ([\w-]+)\(", line)
        if seen is None or seen[2] in _NOTHING:
            continue
        if seen[2] == "while":
            body, condition = (
                re.search(rf"{part}=%?([\w.-]+)", line)[1] for part in ("body", "condition")
            )
            known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            turns = int(known[1]) if known else 1
            yield from programs(body, of, times * turns, (*path, f"{seen[1]} x{turns}"))
            if not known:
                yield from programs(condition, of, times, (*path, seen[1]))
        elif seen[2] == "conditional":
            for branch in re.findall(r"(?:branch_computations=\{|_computation=)([^,}]+)", line):
                yield from programs(branch.strip().lstrip("%"), of, times, (*path, seen[1]))
        elif seen[2] in ("call", "async-start"):
            called = re.search(r"(?:to_apply|calls)=%?([\w.-]+)", line)[1]
            yield from programs(called, of, times, path)
        else:
            yield path, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--solver", default="e3-aipod")
    parser.add_argument("--clients", type=int, default=5_000)
    parser.add_argument("--participation", type=float, nargs="+", default=[1.0, 0.05])
    parser.add_argument("--given", action="store_true", help="step sizes that are numbers")
    chosen = parser.parse_args()
    place = device()
    solver = make(chosen.solver, GIVEN if chosen.given else {})
    for share in chosen.participation:
        entry, of = instructions(compiled(solver, chosen.clients, share, place))
        counted: collections.Counter[tuple[str, ...]] = collections.Counter()
        for path, times in programs(entry, of):
            counted[path] += times
        # Steps are the third loop: rows to record, strides, steps.
        steps = {path[2:]: n for path, n in counted.items() if len(path) >= 3}
        print(f"{chosen.clients:,} clients, share {share:g}: {sum(steps.values())} in a step")
        for path, n in steps.items():
            print(f"{n:6} {' / '.join(path)}")


if __name__ == "__main__":
    main()
