"""VR-AiPOD: E3-AiPOD with SAGA's tables."""

from typing import Any

from benchmark_utils.aipod_common import AipodSolver

import aipod


class Solver(AipodSolver):
    """VR-AiPOD: E3-AiPOD with SAGA's tables."""

    name = "aipod-VR"

    def method(self, lower: float, upper: float) -> Any:
        return aipod.VRAiPOD(upper_lr=upper, lower_lr=lower, adjoint_lr=lower, upper_steps=2)
