"""The paper's two federated tasks, on few clients and small networks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aipod
from aipod import federated
from aipod.experiments import load
from aipod.experiments.config import resolve
from aipod.experiments.execute import prepare
from aipod.experiments.tasks import hyper_representation, images, loss_tuning

SMALL = {"clients": 5, "hidden": 6, "batch_size": 8}


def relu_network(x, y, inputs):
    (W, b), (V, c) = x, y
    return np.maximum(inputs @ np.asarray(W) + np.asarray(b), 0) @ np.asarray(V) + np.asarray(c)


def cross_entropy(logits, labels):
    shifted = logits - logits.max(axis=1, keepdims=True)
    scores = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return -scores[np.arange(len(labels)), labels]


@pytest.fixture(scope="module")
def representation():
    options = hyper_representation.Options(**SMALL)
    return options, hyper_representation.build(options)


def test_the_representation_task_is_the_papers(representation):
    """f and g summed over clients, from each client's own images, by NumPy."""
    options, task = representation
    clients = images.deal(options)
    x, y = (jax.tree.map(lambda leaf: leaf[0], tree) for tree in (task.x0, task.y0))
    penalty = 0.05 * sum(np.sum(np.asarray(leaf) ** 2) for leaf in y)
    expected = task.problem.expected()
    for objective, parts, samples, extra in (
        (expected.upper, clients.validation, expected.upper_samples, 0.0),
        (expected.lower, clients.train, expected.lower_samples, penalty),
    ):
        wanted = sum(
            cross_entropy(relu_network(x, y, inputs), labels).mean() + extra
            for inputs, labels in parts
        )
        found = objective(task.x0, task.y0, samples(None))
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_the_recorded_accuracy_is_that_of_the_mean_model(representation):
    options, task = representation
    test = images.deal(options).test
    rng = np.random.default_rng(0)
    shaken = [
        jax.tree.map(lambda leaf: leaf + 0.1 * rng.normal(size=leaf.shape), tree)
        for tree in (task.x0, task.y0)
    ]
    x, y = (federated.average(tree) for tree in shaken)
    logits = relu_network(x, y, test.images)
    found = task.record(*shaken)
    np.testing.assert_allclose(found["accuracy"], np.mean(logits.argmax(axis=1) == test.labels))
    np.testing.assert_allclose(
        found["test_loss"], cross_entropy(logits, test.labels).mean(), rtol=1e-5
    )


def test_clients_have_few_classes_and_a_fifth_for_validation(representation):
    clients = images.deal(representation[0])
    for (_, train), (_, validation) in zip(clients.train, clients.validation, strict=True):
        assert len(set(train) | set(validation)) <= 4  # two shards of sorted labels
        assert 0.15 < len(validation) / (len(train) + len(validation)) < 0.25
    pixels = np.concatenate([inputs for inputs, _ in clients.train + clients.validation])
    assert abs(pixels.mean()) < 1e-5
    assert abs(pixels.std() - 1) < 1e-5


def test_e3_learns_the_representation(representation):
    _, task = representation
    solution = aipod.solve(
        task.problem,
        aipod.E3AiPOD(),
        task.x0,
        task.y0,
        30,
        key=jax.random.key(0),
        record=task.record,
        every=30,
    )
    before = float(task.record(task.x0, task.y0)["accuracy"])
    assert solution.history["accuracy"][-1] > before + 0.3
    assert solution.ledger.rounds == 30
    size = 65 * 6 + 2 * (7 * 10)  # x, y and u of one client
    item = task.x0[0].dtype.itemsize
    assert solution.ledger.bytes_up == 30 * item * size


@pytest.mark.parametrize("learn", [False, True])
def test_the_tuned_loss_is_the_vector_scaling_loss(learn):
    options = loss_tuning.Options(**SMALL, learn_weights=learn)
    task = loss_tuning.build(options)
    clients = images.deal(options, lambda labels: loss_tuning.imbalanced(options, labels))
    rng = np.random.default_rng(0)
    x = {name: jnp.asarray(rng.normal(size=10)) for name in task.x0}
    y = jax.tree.map(lambda leaf: leaf[0], task.y0)
    delta, tau = np.log1p(np.exp(np.asarray(x["delta"]))), np.asarray(x["tau"])
    lower_weights = np.ones(10)
    if learn:
        raw = np.exp(np.asarray(x["log_weights"]))
        lower_weights = 10 * raw / raw.sum()
    counts = np.bincount(np.concatenate([labels for _, labels in clients.train]), minlength=10)
    omega = counts.sum() / (10 * counts)
    lower = upper = 0.0
    for inputs, labels in clients.train:
        logits = delta * relu_network(*y, inputs) + tau
        lower += np.mean(lower_weights[labels] * cross_entropy(logits, labels))
    for inputs, labels in clients.validation:
        upper += np.mean(omega[labels] * cross_entropy(relu_network(*y, inputs), labels))
    expected = task.problem.expected()
    many = federated.replicate(x, options.clients)
    for objective, samples, wanted in (
        (expected.lower, expected.lower_samples, lower),
        (expected.upper, expected.upper_samples, upper),
    ):
        found = objective(many, task.y0, samples(None))
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_the_imbalance_is_the_papers():
    labels = np.repeat(np.arange(10), 7000)
    kept = loss_tuning.imbalanced(loss_tuning.Options(), labels)
    counts = np.bincount(labels[kept])
    np.testing.assert_array_equal(counts, np.ceil(6000 * 0.1 ** (np.arange(10) / 9)))
    assert len(set(kept)) == len(kept)


def test_tuning_starts_at_the_plain_loss():
    assert abs(float(loss_tuning.scale({"delta": jnp.asarray(loss_tuning.START)})) - 1) < 1e-6
    x = {"log_weights": jnp.zeros(10)}
    np.testing.assert_allclose(loss_tuning.weights(x), np.ones(10), rtol=1e-6)


def test_worst_and_balanced_accuracy():
    labels = jnp.array([0, 0, 0, 1, 1, 2])
    logits = jax.nn.one_hot(jnp.array([0, 0, 1, 1, 1, 0]), 3)
    found = images.class_accuracies(logits, labels, 3)
    np.testing.assert_allclose(found, [2 / 3, 1, 0])


@pytest.mark.parametrize("name", ["hyper-representation", "loss-tuning"])
def test_the_published_curves_belong_to_panels(name):
    experiment = load(name)
    assert experiment.references(experiment.options()) == ()
    options = experiment.options(data="mnist")
    titles = {panel.title for panel in experiment.panels(options)}
    for reference in experiment.references(options):
        assert set(reference.panels) <= titles
        assert reference.columns["accuracy"].max() > 0.6
        assert np.all(np.diff(reference.columns["rounds"]) > 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clients": 0}, "clients must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"participation": 1.5}, "participation must lie in"),
        ({"clients": 5000}, "too few for 5000 clients"),
        ({"partition": "dirichlet", "alpha": -1.0}, "alpha must be positive"),
        ({"data": "mnist", "data_dir": "/nowhere"}, "holds no file"),
    ],
)
def test_impossible_options_get_one_clear_sentence(change, message):
    with pytest.raises(ValueError, match=message):
        hyper_representation.build(hyper_representation.Options(**SMALL | change))


def test_imbalance_outside_its_range():
    with pytest.raises(ValueError, match="imbalance must lie in"):
        dataclasses.replace(loss_tuning.Options(), imbalance=0.0)


@pytest.mark.parametrize("experiment", ["hyper-representation", "loss-tuning"])
def test_every_solver_of_a_task_accepts_its_defaults(experiment):
    task = None
    for solver in load(experiment).arguments:
        given = {"experiment": experiment, "solver": solver, **SMALL}
        task = prepare(resolve(given), task).task


def test_few_examples_missing_classes_and_absent_clients_stay_finite():
    """A tenth of 20 unlike clients in each round; some have one example, none has every class."""
    options = hyper_representation.Options(
        **SMALL | {"clients": 20}, partition="dirichlet", alpha=0.02, participation=0.1
    )
    clients = images.deal(options)
    assert min(len(labels) for _, labels in clients.train) == 1
    assert max(len(set(labels)) for _, labels in clients.train) < 10
    task = hyper_representation.build(options)
    solution = aipod.solve(
        task.problem, aipod.E3AiPOD(), task.x0, task.y0, 20, key=jax.random.key(1), every=20
    )
    assert solution.result.ok
    assert solution.ledger.rounds == 20
    # The clients that took part decide, and all start the next step from the same point.
    for leaf in jax.tree.leaves((solution.x, solution.y)):
        np.testing.assert_allclose(leaf, jnp.broadcast_to(leaf[:1], leaf.shape), rtol=1e-6)
