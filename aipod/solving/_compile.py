"""How programs are compiled: XLA's options, behind one setting."""

import os
from typing import Any

import jax

from aipod._misc.maps import make_room

# Set to 0 in the environment, it leaves XLA's own defaults alone.
SETTING = "AIPOD_TUNED_XLA"

# What XLA does better on a CPU than by default, with jaxlib 0.10:
# - one piece of code for each core; its 32 pieces take longer to compile on few cores;
# - matrix products by Eigen, at 82 GFLOP/s on one core where the YNN library reaches 65.
_CPU_OPTIONS: dict[str, Any] = {
    "xla_cpu_parallel_codegen_split_count": os.cpu_count() or 1,
    "xla_cpu_experimental_ynn_fusion_type": "",
}


def compile_options() -> dict[str, Any] | None:
    """The options of programs on this backend; None for XLA's defaults."""
    tuned = os.environ.get(SETTING, "1") != "0"
    return _CPU_OPTIONS if tuned and jax.default_backend() == "cpu" else None


def compile_lowered(lowered: Any) -> Any:
    """Compiles, without our options where this jaxlib does not know them."""
    make_room()
    options = compile_options()
    if options is None:
        return lowered.compile()
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return lowered.compile()
