"""What every test shares: float64, strict broadcasting, and deterministic random inputs."""

import gc
import os
import signal
from collections.abc import Iterator

# Each test worker is a process of its own. On a machine with a GPU, JAX would let the first one
# reserve most of the device memory and starve the others. JAX reads this when it is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# The suite spends its time compiling small programs that run once. Without its newer emitter of
# fused loops XLA compiles them in half the time; what it makes then is a third slower. Processes
# that tests start inherit this.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)
# For the same reason, and there too. `optimised` turns this off.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# Nobody reads where each instruction of a program came from, and to write it there takes time.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

# A shell lets what it starts in the background ignore Ctrl-C, and so would all processes that tests
# start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import jax
import pytest
from jaxtyping import Array

from aipod._misc.maps import make_room

# Exactness is tested to 1e-10, which float32 cannot show.
jax.config.update("jax_enable_x64", True)
# (n,) against (n, 1) silently broadcasts to (n, n); in optimisation code that is always a mistake.
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "repeatable",
    # The first example of a test pays for compilation, so times say nothing about the test.
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    # The same examples in every run: a failure belongs to the change, not to the draw.
    derandomize=True,
    max_examples=25,
)
hypothesis.settings.register_profile(
    # `pytest --hypothesis-profile=explore` hunts for new counterexamples.
    "explore",
    hypothesis.settings.get_profile("repeatable"),
    derandomize=False,
    max_examples=500,
)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """Looks for garbage less often: to trace a program makes many small objects, few of them in
    cycles, and Python looked through all of them again and again, an eighth of the suite's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture
def optimised() -> Iterator[None]:
    """Programs compiled nearly as users have them, for tests that compare bits or run long."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def key() -> Array:
    """A fixed random key; split it when a test needs several."""
    return jax.random.key(0)


# Memory maps of a process from which on compiled programs are freed.
_MANY_MAPS = 20_000


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    yield
    make_room(_MANY_MAPS)
