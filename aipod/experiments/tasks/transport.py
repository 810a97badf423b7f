"""Learning the cost of an optimal transport problem from the journeys that people make.

    min over (C, u) of   F = - (mean over observed journeys i -> j of) log Y_ij,   Y = Y*(C, u)
    Y*(C, u) = argmin of <C, Y> + eps sum Y log Y   over   Y 1 = softmax(u),  Y'1 = jobs
    with C 1 = 0, C'1 = 0 and 1'u = 0

The lower level is entropic optimal transport (Cuturi, 2013): how many of the people in each home
district i work in district j. Both marginals are equality constraints, of which one row is
redundant, and that of the homes depends on x. The upper level finds the cost C of a journey, here a
distance plus the cost of crossing a river. Adding a_i + b_j to C changes no journey, so the upper
constraints select the cost whose rows and columns sum to zero. The best fit is known: it is
C = -eps log(observed shares), centred in the same way.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from aipod.experiments.base import Experiment, Metric, Panel, Picture, Task, option, varied
from aipod.experiments.limits import NOT_NEGATIVE, POSITIVE, at_least, check_limits
from aipod.experiments.tasks.entropy import entropy, logarithm
from aipod.experiments.tasks.measures import exactly
from aipod.problem import Bilevel, Minibatches
from aipod.sets import Affine, Budget, Product

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Share of all journeys below which the entropy is extended; all true shares are far above it.
_FLOOR = 1e-4


@dataclasses.dataclass(frozen=True)
class Options:
    homes: int = option(8, "home districts", at_least(2))
    works: int = option(8, "districts to work in", at_least(2))
    journeys: int = option(20_000, "observed journeys", at_least(1))
    temperature: float = option(
        8.0, "eps, how freely people deviate from the cheapest, in minutes", POSITIVE
    )
    river: float = option(10.0, "what crossing the river costs, in minutes", NOT_NEGATIVE)
    batch_size: int = option(2000, "journeys in a minibatch", at_least(1))
    problem_seed: int = option(0, "seed of the map and of the journeys", at_least(0))

    def __post_init__(self) -> None:
        check_limits(self)


class City(NamedTuple):
    """Home and work districts, the costs of journeys, and the observed journeys."""

    homes: np.ndarray  # (homes, 2); those west of the river come first
    works: np.ndarray
    distance: np.ndarray  # in minutes
    crosses: np.ndarray  # whether a journey crosses the river
    cost: np.ndarray
    journeys: np.ndarray  # (journeys, 2): home and work

    @property
    def shares(self) -> np.ndarray:
        """The share of each pair among the observed journeys."""
        counts = np.zeros(self.cost.shape)
        np.add.at(counts, tuple(self.journeys.T), 1)
        return counts / len(self.journeys)


def city(options: Options) -> City:
    """Makes a square city, 20 minutes wide, with a river through the middle."""
    rng = np.random.default_rng(options.problem_seed)
    homes, works = (_districts(rng, count) for count in (options.homes, options.works))
    distance = 20 * np.linalg.norm(homes[:, None] - works[None], axis=-1)
    crosses = (homes[:, None, 0] < 0.5) != (works[None, :, 0] < 0.5)
    cost = distance + options.river * crosses
    masses = [rng.dirichlet(np.full(count, 20.0)) for count in distance.shape]
    plan = sinkhorn(cost / options.temperature, *masses)
    chosen = rng.choice(plan.size, size=options.journeys, p=plan.ravel() / plan.sum())
    pairs = np.stack(np.unravel_index(chosen, plan.shape), axis=1)
    return City(homes, works, distance, crosses, cost, pairs)


def _districts(rng: np.random.Generator, count: int) -> np.ndarray:
    places = rng.uniform(size=(count, 2))
    # Half of them on each bank.
    bank = np.arange(count) >= count // 2
    places[:, 0] = 0.46 * places[:, 0] + 0.54 * bank
    return places


def sinkhorn(cost: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Computes the entropic plan for a cost in units of eps by Sinkhorn's algorithm."""
    kernel, scale = np.exp(-cost), np.ones(len(columns))
    with np.errstate(all="ignore"):
        for _ in range(2000):
            left = rows / (kernel @ scale)
            scale = columns / (kernel.T @ left)
        plan = left[:, None] * kernel * scale
    if not np.all(np.isfinite(plan)):
        raise ValueError(
            "no transport plan was found, since exp(-cost / temperature) vanishes: take a higher "
            "temperature, or a smaller river."
        )
    return plan


def marginals(rows: int, columns: int) -> np.ndarray:
    """The matrix that maps a raveled table to its row sums and then its column sums."""
    ones = (np.ones((1, columns)), np.ones((1, rows)))
    return np.vstack([np.kron(np.eye(rows), ones[0]), np.kron(ones[1], np.eye(columns))])


def centred(table: Array) -> Array:
    """Subtracts the row and column means, which the journeys do not determine."""
    rows = table - jnp.mean(table, axis=1, keepdims=True)
    return rows - jnp.mean(rows, axis=0, keepdims=True)


def build(options: Options) -> Task:
    data = city(options)
    shape = data.cost.shape
    sums = marginals(*shape)
    jobs = data.shares.sum(axis=0)

    def lower(x: dict[str, Array], y: Array, _: None) -> Array:
        spread = options.temperature * jnp.sum(entropy(y, _FLOOR))
        return jnp.sum(x["cost"] * y) + spread

    def upper(x: dict[str, Array], y: Array, pairs: Array) -> Array:
        return -jnp.mean(logarithm(y, _FLOOR)[pairs[:, 0], pairs[:, 1]])

    def homes(x: dict[str, Array]) -> Array:
        return jnp.concatenate([-jax.nn.softmax(x["people"]), jnp.zeros(shape[1])])

    problem = Bilevel(
        upper=upper,
        lower=lower,
        upper_set=Product({"cost": Affine(sums), "people": Budget(0.0)}),
        lower_set=Affine(sums, np.concatenate([np.zeros(shape[0]), jobs]), coupling=homes),
        upper_samples=Minibatches(data.journeys, options.batch_size),
    )
    x0 = {"cost": jnp.zeros(shape), "people": jnp.zeros(shape[0])}
    y0 = jnp.tile(jnp.asarray(jobs, float)[None, :] / shape[0], (shape[0], 1))
    truth = centred(jnp.asarray(data.cost, float))
    # The best fit of a pair without journeys is infinite; count one journey instead.
    seen = np.maximum(data.shares, 1 / options.journeys)
    fit = centred(jnp.asarray(-options.temperature * np.log(seen), float))

    def record(x: dict[str, Array], y: Array) -> dict[str, Array]:
        def distance(cost: Array) -> Array:
            return jnp.sqrt(jnp.mean((x["cost"] - cost) ** 2))

        errors = {"cost_error": distance(truth), "fit_error": distance(fit)}
        return errors | exactly(problem, x, y)[1]

    def draw(figure: "Figure", x: dict[str, Array], y: Array) -> None:
        draw_city(figure, data, np.asarray(x["cost"]))

    return Task(problem, x0, y0, record, picture=Picture(draw, _CAPTION, (9.6, 3.3)))


_CAPTION = (
    "Left: home and work districts, the river, and the observed journeys (wider: more of them). "
    "Middle: the learned cost less the distance, both centred; the blocks are the river, which the "
    "method was not told of. Right: the learned cost of every pair against the true one."
)


def draw_city(figure: "Figure", data: City, cost: np.ndarray) -> None:
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1.15, 1))
    shares, banks = data.shares, ("#0072B2", "#D55E00")
    for (i, j), share in np.ndenumerate(shares):
        ends = np.stack([data.homes[i], data.works[j]]).T
        left.plot(*ends, color=banks[int(data.crosses[i, j])], linewidth=60 * share, alpha=0.45)
    left.axvspan(0.475, 0.525, color="#56B4E9", alpha=0.4, linewidth=0)
    left.scatter(*data.homes.T, color="#000000", s=26, zorder=3, label="homes")
    left.scatter(
        *data.works.T,
        color="#000000",
        s=26,
        marker="s",
        zorder=3,
        label="work",
        facecolor="#ffffff",
    )
    left.set(xticks=[], yticks=[], aspect="equal", title="observed journeys")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2, handletextpad=0.1)

    beyond = cost - np.asarray(centred(jnp.asarray(data.distance)))
    most = float(np.abs(beyond).max())
    image = middle.imshow(beyond, cmap="RdBu_r", vmin=-most, vmax=most)
    middle.set(xlabel="work districts", ylabel="home districts", title="cost beyond distance")
    middle.set(xticks=[], yticks=[])
    middle.grid(visible=False)
    figure.colorbar(image, ax=middle, label="minutes", shrink=0.85)

    truth = np.asarray(centred(jnp.asarray(data.cost)))
    span = 1.1 * np.array([truth.min(), truth.max()])
    right.plot(span, span, color="#999999", linewidth=0.8)
    for crosses, label in ((False, "one bank"), (True, "across")):
        chosen = data.crosses == crosses
        right.scatter(truth[chosen], cost[chosen], s=14, color=banks[int(crosses)], label=label)
    right.set(
        xlabel="true cost, centred (min)", ylabel="learned cost (min)", title="cost of a pair"
    )
    right.legend(loc="upper left", handletextpad=0.1)
    right.set_axisbelow(True)


def panels(options: Options) -> tuple[Panel, ...]:
    return (
        Panel("How often the coupling is projected", varied("e-aipod:lower_prob", (1, 0.5, 0.2))),
    )


_SHARED: dict[str, Any] = {
    "upper_optimizer": "adam(0.05)",
    "lower_lr": "curvature(0.5)",
    "lower_steps": 30,
    "adjoint_steps": 60,
}

EXPERIMENT = Experiment(
    name="transport",
    options=Options,
    build=build,
    panels=panels,
    metrics=(
        Metric("cost_error", "from the true cost (minutes)"),
        Metric("fit_error", "from the best fit (minutes)"),
        Metric("stationarity", "stationarity ‖∇F(x)‖² on the upper set"),
        Metric("lower_gap", "lower gap ‖Y − Y*(x)‖²"),
        Metric("objective", "negative log-likelihood F(x)", log=False),
    ),
    axes=("lower_projections", "step"),
    arguments={"e-aipod": _SHARED | {"lower_prob": 0.3}, "aipod": _SHARED},
    steps=3000,
    every=30,
)
