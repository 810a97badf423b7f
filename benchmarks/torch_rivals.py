"""The PyTorch libraries that torch_libraries.py runs: the data, and an outer step with each."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

EXAMPLES, BATCH, INPUTS, CLASSES = 5000, 256, 784, 10
INNER, TERMS = 10, 10
LR, UPPER_LR, RIDGE = 0.05, 10.0, 0.01

# The number of outer steps -> x after them.
Run = Callable[[int], np.ndarray]


def data() -> tuple[np.ndarray, ...]:
    """Training and validation examples: two clouds' worth of pixels, 30 % of the labels wrong."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(CLASSES, INPUTS))
    labels = rng.integers(0, CLASSES, 2 * EXAMPLES)
    images = (0.1 * centres[labels] + rng.normal(size=(len(labels), INPUTS))) / np.sqrt(INPUTS / 10)
    wrong = rng.random(EXAMPLES) < 0.3
    given = np.where(wrong, rng.integers(0, CLASSES, EXAMPLES), labels[:EXAMPLES])
    images = images.astype(np.float32)
    return images[:EXAMPLES], given, images[EXAMPLES:], labels[EXAMPLES:]


# --- what the PyTorch libraries share ----------------------------------------------------------


class Torch:
    """The data as tensors, both losses, and the random batches."""

    def __init__(self, fixed: bool) -> None:
        import torch

        torch.manual_seed(0)
        self.torch, self.fixed = torch, fixed
        self.images, self.given, self.val_images, self.val_labels = map(torch.from_numpy, data())

    def index(self) -> Any:
        torch = self.torch
        return torch.arange(BATCH) if self.fixed else torch.randint(EXAMPLES, (BATCH,))

    def lower_batch(self) -> tuple[Any, ...]:
        index = self.index()
        return self.images[index], self.given[index], index

    def upper_batch(self) -> tuple[Any, ...]:
        index = self.index()
        return self.val_images[index], self.val_labels[index]

    def linear(self) -> Any:
        model = self.torch.nn.Linear(INPUTS, CLASSES)
        for parameter in model.parameters():
            self.torch.nn.init.zeros_(parameter)
        return model

    def losses(self, params: Any, images: Any, labels: Any) -> Any:
        functional = self.torch.nn.functional
        return functional.cross_entropy(
            functional.linear(images, *params), labels, reduction="none"
        )

    def upper(self, params: Any, batch: Any) -> Any:
        return self.losses(params, *batch).mean()

    def lower(self, params: Any, x: Any, batch: Any) -> Any:
        images, labels, index = batch
        weighted = (self.torch.sigmoid(x[index]) * self.losses(params, images, labels)).mean()
        return weighted + 0.5 * RIDGE * sum((part**2).sum() for part in params)


def weights_module(common: Torch) -> Any:
    """x as a module, which Betty and BOAT want."""
    module = common.torch.nn.Module()
    module.register_parameter("x", common.torch.nn.Parameter(common.torch.zeros(EXAMPLES)))
    return module


# --- the libraries -----------------------------------------------------------------------------


def betty_run(fixed: bool) -> Run:
    from betty.configs import Config, EngineConfig
    from betty.engine import Engine
    from betty.problems import ImplicitProblem

    common = Torch(fixed)

    class Batches:
        """Without an end, as a DataLoader that is always asked for one more."""

        def __init__(self, draw: Callable[[], tuple[Any, ...]]) -> None:
            self.draw = draw

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> tuple[Any, ...]:
            return self.draw()

    class Upper(ImplicitProblem):
        def training_step(self, batch: Any) -> Any:
            return common.upper(tuple(self.inner.module.parameters()), batch)

    class Lower(ImplicitProblem):
        def training_step(self, batch: Any) -> Any:
            return common.lower(tuple(self.module.parameters()), self.outer.module.x, batch)

    def run(steps: int) -> np.ndarray:
        weights, model = weights_module(common), common.linear()
        sgd = common.torch.optim.SGD
        upper = Upper(
            name="outer",
            module=weights,
            optimizer=sgd(weights.parameters(), UPPER_LR),
            train_data_loader=Batches(common.upper_batch),
            config=Config(),
        )
        lower = Lower(
            name="inner",
            module=model,
            optimizer=sgd(model.parameters(), LR),
            train_data_loader=Batches(common.lower_batch),
            # Its series has a term more than iterations.
            config=Config(
                type="neumann",
                unroll_steps=INNER,
                neumann_iterations=TERMS - 1,
                neumann_alpha=LR,
            ),
        )
        links = {"u2l": {upper: [lower]}, "l2u": {lower: [upper]}}
        config = EngineConfig(train_iters=INNER * steps, valid_step=10**9)
        Engine(config=config, problems=[upper, lower], dependencies=links).run()
        return weights.x.detach().numpy()

    return run


def torchopt_run(fixed: bool) -> Run:
    import torchopt

    common = Torch(fixed)
    torch = common.torch
    series = torchopt.linear_solve.solve_inv(ns=True, maxiter=TERMS - 1, alpha=LR)

    class Lower(torchopt.nn.ImplicitMetaGradientModule, linear_solve=series):
        def __init__(self, x: Any, start: list[Any]) -> None:
            super().__init__()
            # What requires a gradient and comes as an argument is a meta-parameter.
            self.x = x
            self.params = torch.nn.ParameterList([part.clone() for part in start])

        def objective(self, batch: Any) -> Any:
            return common.lower(tuple(self.parameters()), self.x, batch)

        def solve(self, batch: Any) -> "Lower":
            params = tuple(self.parameters())
            optimizer = torch.optim.SGD(params, LR)
            with torch.enable_grad():
                for step in range(INNER):
                    # The last batch is the one that the series is about, as in the others.
                    own = batch if step == INNER - 1 else common.lower_batch()
                    optimizer.zero_grad()
                    self.objective(own).backward(inputs=params)
                    optimizer.step()
            return self

    def run(steps: int) -> np.ndarray:
        x = torch.zeros(EXAMPLES, requires_grad=True)
        params = [part.detach() for part in common.linear().parameters()]
        outer = torch.optim.SGD([x], UPPER_LR)
        for _ in range(steps):
            solved = Lower(x, params).solve(common.lower_batch())
            outer.zero_grad()
            common.upper(tuple(solved.parameters()), common.upper_batch()).backward()
            outer.step()
            params = [part.detach() for part in solved.parameters()]
        return x.detach().numpy()

    return run


def hypertorch_run(fixed: bool) -> Run:
    import hypergrad

    common = Torch(fixed)
    torch = common.torch

    def run(steps: int) -> np.ndarray:
        x = torch.zeros(EXAMPLES, requires_grad=True)
        params = [part.detach().requires_grad_() for part in common.linear().parameters()]
        outer = torch.optim.SGD([x], UPPER_LR)
        for _ in range(steps):
            for _ in range(INNER):
                batch = common.lower_batch()
                slopes = torch.autograd.grad(common.lower(params, x.detach(), batch), params)
                params = [
                    (part - LR * slope).detach().requires_grad_()
                    for part, slope in zip(params, slopes, strict=True)
                ]
            descent = hypergrad.GradientDescent(
                lambda params, hparams, batch=batch: common.lower(params, hparams[0], batch), LR
            )
            val_batch = common.upper_batch()
            outer.zero_grad()
            hypergrad.fixed_point(
                params,
                [x],
                TERMS,
                descent,
                lambda params, hparams, batch=val_batch: common.upper(params, batch),
                tol=0.0,
            )
            outer.step()
        return x.detach().numpy()

    return run


def boat_lower(feed: Any, weights: Any, model: Any, params: Any = None) -> Any:
    """BOAT finds its losses by name."""
    params = tuple(model.parameters()) if params is None else params
    return feed["common"].lower(params, weights.x, feed["batch"])


def boat_upper(feed: Any, weights: Any, model: Any, params: Any = None) -> Any:
    params = tuple(model.parameters()) if params is None else params
    return feed["common"].upper(params, feed["batch"])


def boat_run(fixed: bool) -> Run:
    from boat_torch.boat_opt import Problem

    common = Torch(fixed)
    sgd = common.torch.optim.SGD

    def run(steps: int) -> np.ndarray:
        weights, model = weights_module(common), common.linear()
        problem = Problem(
            {
                "fo_op": None,
                "gm_op": ["NGD"],
                "na_op": ["NS"],
                "lower_level_model": model,
                "upper_level_model": weights,
                "lower_level_var": list(model.parameters()),
                "upper_level_var": list(weights.parameters()),
                "lower_level_opt": sgd(model.parameters(), LR),
                "upper_level_opt": sgd(weights.parameters(), UPPER_LR),
                "lower_iters": INNER,
                "device": "cpu",
                "loss_log_path": os.devnull,
                "accumulate_grad": False,
                "return_grad": False,
                "copy_last_param": True,
                # Its series too has a term more than k.
                "CG": {"tolerance": 0.0, "k": TERMS - 1},
                "GDA": {"alpha_init": 0.0, "alpha_decay": 0.5},
                "RGT": {"truncate_iter": 0},
            },
            {
                "lower_level_loss": {"function": f"{__name__}.boat_lower"},
                "upper_level_loss": {"function": f"{__name__}.boat_upper"},
            },
        )
        problem.build_ll_solver()
        problem.build_ul_solver()
        for step in range(steps):
            lower = {"common": common, "batch": common.lower_batch()}
            upper = {"common": common, "batch": common.upper_batch()}
            problem.run_iter(lower, upper, current_iter=step)
        return weights.x.detach().numpy()

    return run
