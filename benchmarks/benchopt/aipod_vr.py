"""VR-AiPOD: E3-AiPOD with SAGA's tables."""

from typing import Any, ClassVar

from benchmark_utils.aipod_common import AipodSolver

import aipod


class Solver(AipodSolver):
    """VR-AiPOD: E3-AiPOD with SAGA's tables."""

    name = "aipod-VR"
    parameters: ClassVar = {"lower_steps": [1], "upper_steps": [1], **AipodSolver.parameters}

    def method(self, lower: float, upper: float) -> Any:
        return aipod.VRAiPOD(
            upper_lr=upper,
            lower_lr=lower,
            adjoint_lr=lower,
            lower_steps=self.lower_steps,
            upper_steps=self.upper_steps,
        )
