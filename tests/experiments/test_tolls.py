"""Tolls against cvxpy, SciPy and an equilibrium in NumPy, on a network of five links."""

import cvxpy
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
import scipy.sparse.csgraph

import aipod
from aipod.experiments.tasks import tolls
from aipod.experiments.tasks.roads import Roads, equilibrium, sioux_falls, without_rare

OPTIONS = tolls.Options(days=20, batch_size=5, spread=3.0, elasticity=0.05)
DAYS = tolls.day_factors(OPTIONS)


def braess():
    """Braess's square with its bridge 1 -> 2; drivers from 0 and 1 to 3, and from 0 to 2."""
    trips = np.zeros((4, 4))
    trips[0, 3], trips[1, 3], trips[0, 2] = 4.0, 1.0, 2.0
    return Roads(
        senders=np.array([0, 0, 1, 1, 2]),
        receivers=np.array([1, 2, 2, 3, 3]),
        capacity=np.array([3.0, 4.0, 2.0, 4.0, 3.0]),
        free_time=np.array([2.0, 5.0, 1.0, 5.0, 2.0]),
        trips=trips,
        places=np.array([[0.0, 0.5], [0.5, 1.0], [0.5, 0.0], [1.0, 0.5]]),
    )


@pytest.fixture(scope="module")
def roads():
    return braess()


@pytest.fixture(scope="module")
def task(roads):
    return tolls.build_on(roads, OPTIONS)


@pytest.fixture(scope="module")
def point(task):
    return task.problem.upper_set.project(jnp.array([1.0, -0.5, 0.8, 0.2, -0.4]))


def made(roads, x):
    """The trips at these tolls."""
    table = np.zeros((4, 4))
    table[tuple(roads.pairs.T)] = roads.trips[tuple(roads.pairs.T)] * np.exp(
        -OPTIONS.elasticity * roads.routes(roads.present_times) @ x
    )
    return table


def units(roads):
    return np.sqrt(roads.trips.sum(axis=0)[roads.arcs[0]])


def objective(roads, x):
    """F in NumPy, by the equilibrium on the host."""
    flows = equilibrium(roads, OPTIONS.spread, DAYS, x, made(roads, x))
    v = np.bincount(roads.arcs[1], flows, 5)
    before = equilibrium(roads, OPTIONS.spread, DAYS, np.zeros(5), roads.trips)
    v0 = np.bincount(roads.arcs[1], before, 5)
    ratio = v / roads.capacity
    time = np.mean([s * v @ (roads.free_time * (1 + 0.15 * (s * ratio) ** 4)) for s in DAYS])
    routes = roads.routes(roads.present_times)
    charge = routes @ x
    worth = routes @ roads.times(v0) + 1 / OPTIONS.elasticity
    trips = roads.trips[tuple(roads.pairs.T)]
    value = np.sum(made(roads, x)[tuple(roads.pairs.T)] * (worth + charge)) - trips @ worth
    return time - value + 0.5 * OPTIONS.reluctance * v0 @ x**2


def test_the_facts_of_sioux_falls():
    roads = sioux_falls()
    assert (roads.nodes, len(roads.capacity)) == (24, 76)
    np.testing.assert_allclose(roads.trips.sum(), 360.6)
    # Every road has both directions.
    ends = set(zip(roads.senders, roads.receivers, strict=True))
    assert ends == {(b, a) for a, b in ends}


def test_present_times_are_near_the_published_user_equilibrium():
    """Beckmann's objective at the best known flows is 42.31335 hundred thousand, says the source;
    200 successive averages come within one per cent of it."""
    roads = sioux_falls()
    ratio = ((roads.present_times / roads.free_time - 1) / 0.15) ** 0.25
    flows = ratio * roads.capacity
    beckmann = np.sum(roads.free_time * flows * (1 + 0.15 / 5 * ratio**4))
    assert 4231.335 < beckmann < 1.01 * 4231.335


def test_drivers_come_nearer_with_every_arc_and_all_of_them_arrive():
    roads = sioux_falls()
    flows = equilibrium(roads, 3.0, np.ones(1), np.zeros(76), roads.trips)
    fewer = without_rare(roads, flows, 1e-3)
    rest = scipy.sparse.csgraph.dijkstra(roads.graph(roads.present_times))
    for network in (roads, fewer):
        destination, link = network.arcs
        assert np.all(
            rest[roads.receivers[link], destination] < rest[roads.senders[link], destination]
        )
        found = equilibrium(network, 3.0, np.ones(1), np.zeros(76), roads.trips)
        tail, head = network.union()
        kept = np.bincount(head, found, 24 * 24) - np.bincount(tail, found, 24 * 24)
        np.testing.assert_allclose(kept, roads.demand(roads.trips), atol=1e-9)
        assert found.min() > 0
    assert 0.9 * len(roads.arcs[0]) < len(fewer.arcs[0]) < len(roads.arcs[0])


def test_the_days_are_as_asked():
    days = tolls.day_factors(tolls.Options(days=5000, variation=0.2))
    assert days.mean() == pytest.approx(1.0)
    assert abs(days.std() - 0.2) < 0.01  # 5 standard errors of 5,000 days


def network_of(roads):
    """The matrices that add flows up on links, and at nodes."""
    link = roads.arcs[1]
    sums = np.zeros((5, len(link)))
    sums[link, np.arange(len(link))] = 1
    tail, head = roads.union()
    incidence = np.zeros((8, len(link)))
    np.add.at(incidence, (head, np.arange(len(link))), 1)
    np.add.at(incidence, (tail, np.arange(len(link))), -1)
    return sums, incidence


def test_the_lower_level_is_the_convex_program_of_cvxpy(roads, task, point):
    destination, link = roads.arcs
    sums, incidence = network_of(roads)
    size = roads.trips.sum(axis=0)[destination]
    y = cvxpy.Variable(len(link))
    v = sums @ y
    growth = 0.15 * np.mean(DAYS**4) / 5 * roads.free_time / roads.capacity**4
    time = (roads.free_time + np.asarray(point)) @ v + growth @ cvxpy.power(v, 5)
    program = cvxpy.Problem(
        cvxpy.Minimize(time + OPTIONS.spread * cvxpy.sum(cvxpy.rel_entr(y, size))),
        [incidence @ y == roads.demand(made(roads, np.asarray(point)))],
    )
    program.solve(solver=cvxpy.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10)
    found = aipod.exact_lower(task.problem, point, task.y0) * units(roads)
    np.testing.assert_allclose(found, y.value, atol=1e-5)
    own = equilibrium(
        roads, OPTIONS.spread, DAYS, np.asarray(point), made(roads, np.asarray(point))
    )
    np.testing.assert_allclose(found, own, atol=1e-9)


def test_the_hypergradient_is_that_of_the_equilibrium_in_numpy(roads, task, point):
    found = aipod.exact_hypergradient(task.problem, point, task.y0)
    x, steps = np.asarray(point), 1e-4 * np.eye(5)
    expected = [(objective(roads, x + s) - objective(roads, x - s)) / 2e-4 for s in steps]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    batch = task.problem.upper_samples.expected()
    best = aipod.exact_lower(task.problem, point, task.y0)
    np.testing.assert_allclose(task.problem.upper(point, best, batch), objective(roads, x))


def test_a_run_finds_the_tolls_that_scipy_finds(roads, task):
    days = aipod.FullBatch(jnp.asarray(DAYS))
    problem = aipod.Bilevel(
        task.problem.upper,
        task.problem.lower,
        task.problem.upper_set,
        task.problem.lower_set,
        days,
        days,
    )
    solver = aipod.AiPOD(upper_optimizer=optax.adam(0.05), lower_steps=50, adjoint_steps=100)
    solution = aipod.solve(problem, solver, task.x0, task.y0, steps=400, key=jax.random.key(0))
    x, _ = solution.feasible()
    weights = np.asarray(task.problem.upper_set.weights)
    best = scipy.optimize.minimize(
        lambda x: objective(roads, x),
        np.zeros(5),
        method="SLSQP",
        constraints={"type": "eq", "fun": lambda x: weights @ x, "jac": lambda x: weights},
        options={"ftol": 1e-10},
    )
    assert best.success
    assert best.fun < objective(roads, np.zeros(5)) - 0.1  # there is something to gain
    np.testing.assert_allclose(objective(roads, np.asarray(x)), best.fun, rtol=1e-6)
    np.testing.assert_allclose(x, best.x, atol=0.02)
    assert abs(weights @ np.asarray(x)) < 1e-9


@pytest.mark.parametrize(
    "change",
    [{"spread": 0.0}, {"elasticity": -1.0}, {"reluctance": -1.0}, {"variation": 1.0}, {"days": 0}],
)
def test_impossible_options_are_refused(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))} must be"):
        tolls.Options(**change)


def test_flows_of_at_least_zero_without_the_entropy(roads):
    """Roads that are too slow are left empty, and the flows are those of a convex program."""
    options = tolls.Options(days=20, batch_size=5, spread=0.1, elasticity=0.05, bounded=True)
    task = tolls.build_on(roads, options)
    x = jnp.array([0.0, 0.0, 9.0, 0.0, 0.0])
    found = aipod.exact_lower(task.problem, x, task.y0) * units(roads)
    sums, incidence = network_of(roads)
    y = cvxpy.Variable(sums.shape[1])
    v = sums @ y
    growth = 0.15 * np.mean(DAYS**4) / 5 * roads.free_time / roads.capacity**4
    time = (roads.free_time + np.asarray(x)) @ v + growth @ cvxpy.power(v, 5)
    ridge = cvxpy.sum_squares(cvxpy.multiply(y, 1 / units(roads)))
    demand = roads.demand(made(roads, np.asarray(x)))
    program = cvxpy.Problem(
        cvxpy.Minimize(time + 0.5 * options.spread * ridge), [incidence @ y == demand, y >= 0]
    )
    program.solve(solver=cvxpy.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10)
    np.testing.assert_allclose(found, y.value, atol=1e-5)
    assert jnp.all(found >= 0)
    # Nobody takes the bridge at this toll.
    np.testing.assert_allclose(found[roads.arcs[1] == 2], 0.0, atol=1e-12)
    measured = task.record(x, found / units(roads))
    assert measured["unrest"] < 1e-6
