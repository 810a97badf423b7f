"""Tolls on a road network whose drivers choose their own routes.

    min over <v0, x> = 0 of   F(x) = E[travel time] - value of the trips made + reluctance / 2 x^2
    y*(x) = argmin of  sum over links of (E[integral of the travel time] + x v) + eps entropy(y)
            over       flow conservation for each destination, with the trips D(x)

x are tolls on links, in units of time, negative where a link is subsidised; at present flows v0
they are revenue-neutral. y are the flows of the drivers to each destination (see `roads.py`), and
their sum v slows a link down by the usual formula t0 (1 + 0.15 (v / capacity)^4). The entropy
spreads drivers over routes (a perturbed utility: Fosgerau, Paulsen and Rasmussen, 2022; at a
crossing the shares of the links are a logit model) and keeps flows positive. Trips respond to the
tolls on their route, D_od(x) = D_od exp(-elasticity toll_od): the constraint moves with x. From day
to day all demand varies by a random factor.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from aipod.experiments.base import Experiment, Metric, Panel, Picture, Task, option, varied
from aipod.experiments.limits import (
    NOT_NEGATIVE,
    POSITIVE,
    Limit,
    at_least,
    check_limits,
)
from aipod.experiments.tasks.entropy import entropy
from aipod.experiments.tasks.roads import (
    GROWTH,
    POWER,
    Roads,
    equilibrium,
    sioux_falls,
    without_rare,
)
from aipod.experiments.tasks.roads_picture import draw_roads
from aipod.problem import Bilevel, Minibatches
from aipod.sets import Bounded, Budget, Flow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Shares of a destination's drivers: arcs below the first are left out, and the entropy is extended
# below the second.
_RARE, _FLOOR = 1e-3, 1e-4


_BELOW_ONE = Limit("be 0 or more and below 1", lambda value: 0 <= value < 1)


@dataclasses.dataclass(frozen=True)
class Options:
    spread: float = option(
        3.0, "eps, how freely drivers deviate from the quickest route, in time", POSITIVE
    )
    bounded: bool = option(
        False, "flows of at least 0 and a ridge in place of the entropy; slow on many roads"
    )
    elasticity: float = option(
        0.02, "how many trips a unit of toll on their route takes away", POSITIVE
    )
    reluctance: float = option(
        0.05, "how much the city dislikes high tolls and subsidies", NOT_NEGATIVE
    )
    variation: float = option(
        0.1, "standard deviation of a day's demand, as a share of the mean", _BELOW_ONE
    )
    days: int = option(250, "days that are known", at_least(1))
    batch_size: int = option(64, "days in a minibatch", at_least(1))
    problem_seed: int = option(0, "seed of the days", at_least(0))

    def __post_init__(self) -> None:
        check_limits(self)


def day_factors(options: Options) -> np.ndarray:
    """Draws the demand of each day relative to the mean day, from a lognormal distribution."""
    width = np.sqrt(np.log1p(options.variation**2))
    rng = np.random.default_rng(options.problem_seed)
    factors = rng.lognormal(-(width**2) / 2, width, size=options.days)
    return factors / factors.mean()


def build(options: Options) -> Task:
    days = day_factors(options)
    roads = sioux_falls()
    free = np.zeros(len(roads.capacity))
    flows = equilibrium(roads, options.spread, days, free, roads.trips)
    return build_on(without_rare(roads, flows, _RARE), options)


def build_on(roads: Roads, options: Options) -> Task:
    """Builds the task for any roads."""
    days = day_factors(options)
    links, (destination, link) = len(roads.capacity), roads.arcs
    present = equilibrium(roads, options.spread, days, np.zeros(links), roads.trips)
    # y counts the drivers to a destination in units of the square root of their number. The entropy
    # then has similar curvature for all destinations: the condition number becomes its root.
    number = roads.trips.sum(axis=0)
    unit = jnp.asarray(np.sqrt(number[destination]), float)
    flows_before = np.bincount(link, present, links)
    present_flows = jnp.asarray(flows_before, float)
    capacity, free_time = (jnp.asarray(part, float) for part in (roads.capacity, roads.free_time))
    routes = jnp.asarray(roads.routes(roads.present_times), float)
    trips = jnp.asarray(roads.trips[tuple(roads.pairs.T)], float)
    present_cost = routes @ jnp.asarray(roads.times(flows_before), float)

    def link_flows(y: Array) -> Array:
        return jax.ops.segment_sum(unit * y, jnp.asarray(link), links)

    def made(x: Array) -> Array:
        """The trips that are made at these tolls."""
        return trips * jnp.exp(-options.elasticity * (routes @ x))

    def demand(x: Array) -> Array:
        """The net inflow of each node in each destination's graph, in its units."""
        table = jnp.zeros((roads.nodes, roads.nodes)).at[tuple(roads.pairs.T)].set(made(x))
        arriving = jnp.diag(jnp.sum(table, axis=0)) - table.T
        chosen = arriving / jnp.sqrt(jnp.asarray(number, float))[:, None]
        return chosen[roads.destinations].ravel()

    def lower(x: Array, y: Array, factors: Array) -> Array:
        v = link_flows(y)
        # The mean over days of the travel time at a flow of s v.
        growth = GROWTH * jnp.mean(factors**POWER) / (POWER + 1)
        # Between projections a flow may be negative; the link is then as quick as when empty.
        congestion = growth * (jnp.maximum(v, 0.0) / capacity) ** POWER
        time = free_time * v * (1 + congestion)
        # With s = y / sqrt(D), the share of the destination's drivers: D s log(s).
        disorder = 0.5 * jnp.sum(y**2)
        if not options.bounded:
            disorder = jnp.sum(unit**2 * entropy(y / unit, _FLOOR))
        return jnp.sum(time + x * v) + options.spread * disorder

    def travel_time(y: Array, factors: Array) -> Array:
        v = link_flows(y)
        growth = GROWTH * jnp.mean(factors ** (POWER + 1))
        return jnp.sum(free_time * v * (1 + growth * (v / capacity) ** POWER))

    def upper(x: Array, y: Array, factors: Array) -> Array:
        # The value of the trips is the area under the demand curve.
        worth = present_cost + 1 / options.elasticity
        value = jnp.sum(made(x) * (worth + routes @ x)) - jnp.sum(trips * worth)
        dislike = 0.5 * options.reluctance * jnp.sum(present_flows * x**2)
        return travel_time(y, factors) - value + dislike

    def shortfall(x: Array) -> Array:
        return demand(jnp.zeros(links)) - demand(x)

    tail, head = roads.union()
    flow = Flow(tail, head, demand(jnp.zeros(links)), coupling=shortfall)
    problem = Bilevel(
        upper=upper,
        lower=lower,
        upper_set=Budget(0.0, present_flows),
        lower_set=Bounded(flow, lower=0.0) if options.bounded else flow,
        upper_samples=Minibatches(jnp.asarray(days, float), options.batch_size),
        lower_samples=Minibatches(jnp.asarray(days, float), options.batch_size),
    )
    y0 = jnp.asarray(present, float) / unit
    all_days = jnp.asarray(days, float)
    before = upper(jnp.zeros(links), y0, all_days)

    def record(x: Array, y: Array) -> dict[str, Array]:
        y = problem.lower_set.project(y, x)
        objective = upper(x, y, all_days)
        slope = jax.grad(lower, argnums=1)(x, y, all_days)
        if options.bounded:
            unrest = y - problem.lower_set.project(y - slope, x)
        else:
            unrest = problem.lower_set.tangent(slope)
        return {
            "saved": 100 * (before - objective) / before,
            "time": travel_time(y, all_days),
            "trips": 100 * jnp.sum(made(x)) / jnp.sum(trips),
            "smallest_share": jnp.min(y / unit),
            "unrest": jnp.sqrt(jnp.mean((unrest / unit) ** 2)),
        }

    def draw(figure: "Figure", x: Array, y: Array) -> None:
        draw_roads(figure, roads, flows_before, np.asarray(link_flows(y)), np.asarray(x))

    return Task(problem, jnp.zeros(links), y0, record, picture=Picture(draw, _CAPTION, (9.6, 4.6)))


_CAPTION = (
    "Flows on the roads of Sioux Falls without tolls and with the tolls that were found: wider "
    "lines carry more vehicles, redder ones are fuller. Right: the tolls; blue links are "
    "subsidised."
)


def panels(options: Options) -> tuple[Panel, ...]:
    return (Panel("How often flows are projected", varied("e-aipod:lower_prob", (1, 0.5, 0.2))),)


# A shorter series is biased: with 100 terms the tolls reach only three quarters of the gain.
_SHARED: dict[str, Any] = {
    "upper_optimizer": "adam(0.1)",
    "lower_lr": "curvature(0.5)",
    "lower_steps": 40,
    "adjoint_steps": 1000,
}

EXPERIMENT = Experiment(
    name="tolls",
    options=Options,
    build=build,
    panels=panels,
    metrics=(
        Metric("saved", "social cost saved (%)", log=False, better="larger"),
        Metric("trips", "trips made (%)", log=False, better="larger"),
        Metric("time", "travel time (thousands)", log=False),
        Metric("unrest", "distance from equilibrium (time)"),
        Metric("smallest_share", "smallest share of an arc", log=False),
    ),
    axes=("lower_projections", "step"),
    # E-AiPOD starts without a correction and overshoots with large steps.
    arguments={"aipod": _SHARED, "e-aipod": _SHARED | {"lower_prob": 0.5}},
    steps=200,
    every=10,
)
