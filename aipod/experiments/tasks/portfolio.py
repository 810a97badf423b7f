"""A portfolio whose factor exposures and risk aversion the upper level chooses on later data.

    min over 1'x = 1'x0 of   F(x, a) = Var_validation(r'y),   y = y*(x, a)
    y*(x, a) = argmin of  e^a / 2 Var_train(r'y) - E_train(r'y) + ridge / 2 ||y||^2
               over       1'y = 1,  L'y = x

r are weekly returns of 20 shares, L their loadings on 5 factor funds, by regression on the training
weeks. The weights y add up to one and have exactly the exposures x: a coupling h(x) = (0, -x). The
sum of the exposures is fixed at that of equal weights, so that the upper level cannot reduce risk
by owning less of the market. For each a the lower solution is affine in x, and a quadratic program
gives the best x.

Long only, the weights lie between 0 and a cap. Then they cannot have any exposures, so L'y = x
becomes a term closeness / 2 ||L'y - x||^2.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from aipod._hypergradient import exact_lower
from aipod.experiments.base import Experiment, Metric, Panel, Picture, Task, option, varied
from aipod.experiments.limits import POSITIVE, Limit, at_least, check_limits
from aipod.experiments.tasks import facts
from aipod.experiments.tasks.measures import exactly
from aipod.problem import Bilevel, Minibatches
from aipod.sets import AbstractSet, Affine, Budget, CappedSimplex, Free, Product

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FACTORS, _WEEKS_A_YEAR = 5, 252 / 5
_NAMES = {
    "MTUM": "momentum",
    "QUAL": "quality",
    "SIZE": "size",
    "USMV": "low risk",
    "VLUE": "value",
}
# Five years to fit the weights, two to choose x and a, and two for the test.
_TRAIN, _VALIDATION = 252, 352


# Twenty shares must be able to add up to one.
_CAP = Limit("be between 0.06 and 1", lambda value: 0.06 <= value <= 1)


@dataclasses.dataclass(frozen=True)
class Options:
    risk_aversion: float = option(8.0, "the risk aversion e^a to start from", POSITIVE)
    ridge: float = option(0.2, "the pull of the weights towards zero", POSITIVE)
    batch_size: int = option(64, "weeks in a minibatch", at_least(1))
    long_only: bool = option(False, "weights are not negative, and come near the exposures")
    cap: float = option(0.2, "the largest weight of a share, long only", _CAP)
    closeness: float = option(5.0, "the price of other exposures, long only", POSITIVE)

    def __post_init__(self) -> None:
        check_limits(self)


class Market(NamedTuple):
    """Weekly returns in per cent, and the loadings of the shares on the factors."""

    weeks: tuple[str, ...]
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    loadings: np.ndarray  # (shares, factors)
    factors: tuple[str, ...]


def market() -> Market:
    data = facts.table("returns")
    shares, factors = data.values[:, :-_FACTORS], data.values[:, -_FACTORS:]
    regressors = np.column_stack([np.ones(_TRAIN), factors[:_TRAIN]])
    loadings = np.linalg.lstsq(regressors, shares[:_TRAIN], rcond=None)[0][1:].T
    train, validation, test = np.split(shares, [_TRAIN, _VALIDATION])
    return Market(data.rows, train, validation, test, loadings, data.columns[-_FACTORS:])


def risk(weights: Array, returns: Array, means: Array) -> Array:
    """The variance in (per cent a week)^2.

    `means` are over all weeks of a period, so that a minibatch gives an unbiased estimate.
    """
    return jnp.mean(((returns - means[None, :]) @ weights) ** 2)


def volatility(weights: Array, returns: Array) -> Array:
    """The volatility in per cent a year."""
    return jnp.sqrt(risk(weights, returns, jnp.mean(returns, axis=0)) * _WEEKS_A_YEAR)


def _weights_set(options: Options, loadings: np.ndarray) -> AbstractSet:
    if options.long_only:
        return CappedSimplex(1.0, options.cap)
    return Affine(
        np.vstack([np.ones(len(loadings)), loadings.T]),
        np.append(1.0, np.zeros(_FACTORS)),
        coupling=lambda x: jnp.concatenate([jnp.zeros(1), -x["exposures"]]),
    )


def build(options: Options) -> Task:
    data = market()
    train, validation = jnp.asarray(data.train, float), jnp.asarray(data.validation, float)
    train_means, validation_means = jnp.mean(train, axis=0), jnp.mean(validation, axis=0)
    shares, loadings = train.shape[1], jnp.asarray(data.loadings, float)

    def upper(x: dict[str, Array], y: Array, returns: Array) -> Array:
        return risk(y, returns, validation_means)

    def lower(x: dict[str, Array], y: Array, returns: Array) -> Array:
        # Risk aversion refers to returns as fractions; these are in per cent, hence the 100.
        dislike = 0.5 * jnp.exp(x["log_aversion"]) / 100 * risk(y, returns, train_means)
        value = dislike - jnp.mean(returns @ y) + 0.5 * options.ridge * jnp.sum(y**2)
        if not options.long_only:
            return value
        return value + 0.5 * options.closeness * jnp.sum((loadings.T @ y - x["exposures"]) ** 2)

    y0 = jnp.full(shares, 1 / shares)
    x0 = {
        "exposures": jnp.asarray(data.loadings.T, float) @ y0,
        "log_aversion": jnp.log(jnp.asarray(options.risk_aversion, float)),
    }
    problem = Bilevel(
        upper=upper,
        lower=lower,
        upper_set=Product({"exposures": Budget(jnp.sum(x0["exposures"])), "log_aversion": Free()}),
        lower_set=_weights_set(options, data.loadings),
        upper_samples=Minibatches(validation, options.batch_size),
        lower_samples=Minibatches(train, options.batch_size),
    )
    test = jnp.asarray(data.test, float)

    def record(x: dict[str, Array], y: Array) -> dict[str, Array]:
        best, measured = exactly(problem, x, y)
        return measured | {
            "volatility": volatility(best, validation),
            "test_volatility": volatility(best, test),
            "risk_aversion": jnp.exp(x["log_aversion"]),
        }

    def draw(figure: "Figure", x: dict[str, Array], y: Array) -> None:
        # Draws y*(x), without the noise of the last steps.
        draw_portfolio(figure, data, (x0, y0), (x, exact_lower(problem, x, y)))

    return Task(problem, x0, y0, record, picture=Picture(draw, _CAPTION, (9.6, 3.4)))


_CAPTION = (
    "Left: the exposures to five factors, of equal weights and as the upper level chose them. "
    "Middle: how much the portfolio's value varied; the weights were fitted on the training weeks "
    "and the exposures chosen on the validation weeks, so that the test weeks are the fair "
    "comparison. Right: what 100 became."
)
_COLOURS, _LABELS = ("#9aa5b1", "#0072B2"), ("equal weights", "chosen upstairs")
_PERIODS = {"training": 0.0, "validation": 0.07, "test": 0.16}


def draw_portfolio(figure: "Figure", data: Market, start: Any, end: Any) -> None:
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 0.9, 1.3))
    periods = (data.train, data.validation, data.test)
    for shift, (x, y), colour, label in zip(
        (0.2, -0.2), (start, end), _COLOURS, _LABELS, strict=True
    ):
        left.barh(np.arange(_FACTORS) + shift, np.asarray(x["exposures"]), 0.38, color=colour)
        heights = [float(volatility(y, jnp.asarray(returns))) for returns in periods]
        bars = middle.bar(np.arange(3) - shift, heights, 0.38, color=colour, label=label)
        middle.bar_label(bars, fmt="%.1f", fontsize=8, color="#444444")
    left.set_yticks(np.arange(_FACTORS), [_NAMES[name] for name in data.factors])
    left.axvline(0, color="#555555", linewidth=0.8)
    left.grid(axis="y", visible=False)
    left.set_title("exposures")
    middle.set_xticks(np.arange(3), list(_PERIODS))
    middle.grid(visible=False)
    middle.set_yticks([])
    middle.spines["left"].set_visible(False)
    middle.set_title("volatility, % a year")
    figure.legend(loc="outside lower center", ncols=2)
    for place in (left, middle):
        place.set_axisbelow(True)

    returns = np.concatenate(periods)
    years = 2014 + np.arange(len(returns) + 1) / _WEEKS_A_YEAR
    for (_, y), colour in zip((start, end), _COLOURS, strict=True):
        wealth = 100 * np.cumprod(np.append(1.0, 1 + returns @ np.asarray(y) / 100))
        right.plot(years, wealth, color=colour, linewidth=1.2)
    right.set_yscale("log")
    ticks = [100, 200, 300, 400]
    right.set_yticks(ticks, [str(tick) for tick in ticks])
    right.minorticks_off()
    edges = (0, _TRAIN, _VALIDATION, len(returns))
    for (label, shade), begin, stop in zip(_PERIODS.items(), edges[:-1], edges[1:], strict=True):
        right.axvspan(years[begin], years[stop], color="#0072B2", linewidth=0, alpha=shade)
        centre = (years[begin] + years[stop]) / 2
        right.text(
            centre,
            0.03,
            label,
            ha="center",
            fontsize=8,
            color="#444444",
            transform=right.get_xaxis_transform(),
        )
    right.set_title("wealth, from 100")


def panels(options: Options) -> tuple[Panel, ...]:
    return (
        Panel("How often the weights are projected", varied("e-aipod:lower_prob", (1, 0.3, 0.1))),
    )


_SHARED: dict[str, Any] = {
    "upper_optimizer": "adam(0.02)",
    "lower_lr": "curvature(0.2)",
    "lower_steps": 20,
    "adjoint_steps": 60,
}

EXPERIMENT = Experiment(
    name="portfolio",
    options=Options,
    build=build,
    panels=panels,
    metrics=(
        Metric("volatility", "validation volatility (% a year)", log=False),
        Metric("test_volatility", "test volatility (% a year)", log=False),
        Metric("risk_aversion", "risk aversion e^a"),
        Metric("stationarity", "stationarity ‖∇F(x)‖²"),
        Metric("lower_gap", "lower gap ‖y − y*(x)‖²"),
    ),
    axes=("lower_projections", "step"),
    arguments={"e-aipod": _SHARED | {"lower_prob": 0.3}, "aipod": _SHARED},
    steps=2000,
    every=20,
)
