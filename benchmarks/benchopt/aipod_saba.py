"""SABA as aipod has it."""

from typing import Any

from benchmark_utils.aipod_common import AipodSolver

import aipod


class Solver(AipodSolver):
    """SABA as aipod has it."""

    name = "aipod-SABA"

    def method(self, lower: float, upper: float) -> Any:
        return aipod.SABA(upper_lr=upper, lower_lr=lower, adjoint_lr=lower)
