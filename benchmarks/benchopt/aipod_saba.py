"""SABA as aipod has it."""

from typing import Any, ClassVar

from benchmark_utils.stochastic_jax_solver import StochasticJaxSolver
from benchopt import safe_import_context

with safe_import_context() as import_ctx:
    from benchmark_utils.aipod_common import Run, problem_of

    import aipod


class Solver(StochasticJaxSolver):
    """SABA as aipod has it."""

    name = "aipod-SABA"
    requirements: ClassVar = ["jax", "pip::aipod"]
    parameters: ClassVar = {
        "step_size": [0.3],
        "outer_ratio": [1.0],
        "batch_size": [64],
        **StochasticJaxSolver.parameters,
    }

    def init(self) -> None:
        lower, upper = self.step_size, self.step_size / self.outer_ratio
        solver = aipod.SABA(upper_lr=upper, lower_lr=lower, adjoint_lr=lower)
        examples = (self.n_inner_samples, self.n_outer_samples)
        problem = problem_of(self.f_inner, self.f_outer, examples, self.batch_size)
        self.inner_var, self.outer_var = self.inner_var0, self.outer_var0
        self.going = Run(solver, problem, self.outer_var, self.inner_var, self.random_state)

    def get_step(self, inner_sampler: Any, outer_sampler: Any) -> Any:
        # The base class compiles a step of its own kind; aipod's is compiled in `Run`.
        return lambda carry, _: (carry, None)

    def run(self, callback: Any) -> None:
        self.init()
        while callback():
            self.going.advance(self.eval_freq)
            self.inner_var, self.outer_var = self.going.state.y, self.going.state.x
