"""Data hyper-cleaning against scikit-learn, and against finite differences."""

import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import aipod
from aipod.experiments.tasks import cleaning

OPTIONS = cleaning.Options(training=60, validation=40, ridge=0.05)


@pytest.fixture(scope="module")
def data():
    return cleaning.mixture(OPTIONS)


@pytest.fixture(scope="module")
def task():
    return cleaning.build(OPTIONS)


@pytest.fixture(scope="module")
def point():
    return jnp.asarray(np.random.default_rng(0).normal(size=60))


def test_the_mixture_is_as_asked():
    data = cleaning.mixture(cleaning.Options(corrupted=0.3))
    assert len(data.truth) == 1438 - 200
    # 1,238 draws with probability 0.3: 3 standard deviations are 0.04.
    assert abs(data.wrong.mean() - 0.3) < 0.04
    moved = (data.training.labels - data.truth)[data.wrong] % 10
    assert set(moved) == set(range(1, 10))
    assert np.all(data.validation.inputs[:, -1] == 1)
    for examples in (data.training, data.validation, data.test):
        assert set(examples.labels) == set(range(10))


def test_the_lower_level_is_scikit_learns_regression(task, data, point):
    found = aipod.exact_lower(task.problem, point, task.y0)
    weights = np.asarray(jax.nn.sigmoid(point))
    model = LogisticRegression(
        C=1 / (len(weights) * OPTIONS.ridge), fit_intercept=False, tol=1e-10, max_iter=10_000
    )
    model.fit(data.training.inputs.astype(float), data.training.labels, sample_weight=weights)
    np.testing.assert_allclose(found, model.coef_.T, atol=1e-6)


def test_the_hypergradient_is_that_of_finite_differences(task, point):
    found = aipod.exact_hypergradient(task.problem, point, task.y0)
    batch = task.problem.upper_samples.expected()

    def objective(x):
        return task.problem.upper(x, aipod.exact_lower(task.problem, x, task.y0), batch)

    along = jnp.asarray(np.random.default_rng(1).normal(size=60))
    expected = (objective(point + 1e-4 * along) - objective(point - 1e-4 * along)) / 2e-4
    np.testing.assert_allclose(found @ along, expected, rtol=1e-6)


def test_the_area_under_the_curve():
    rng = np.random.default_rng(0)
    scores, positive = rng.normal(size=200), rng.uniform(size=200) < 0.3
    scores = scores + positive
    found = cleaning.area_under_curve(jnp.asarray(scores), jnp.asarray(positive))
    np.testing.assert_allclose(found, roc_auc_score(positive, scores), rtol=1e-12)


def test_a_run_finds_wrong_labels_and_learns_more_than_they_teach():
    """300 examples, half of them wrong: the AUC comes near 1, the accuracy near clean labels'."""
    options = cleaning.Options(training=300, validation=100, batch_size=64, ridge=0.005)
    task, data = cleaning.build(options), cleaning.mixture(options)
    solver = aipod.AiPOD(upper_lr=100.0, lower_steps=10, adjoint_steps=10)
    solution = aipod.solve(task.problem, solver, task.x0, task.y0, steps=200, key=jax.random.key(0))
    last = jax.tree.map(float, task.record(solution.x, solution.y))

    def untreated(chosen):
        model = LogisticRegression(C=1 / (chosen.sum() * options.ridge), fit_intercept=False)
        model.fit(data.training.inputs[chosen], data.training.labels[chosen])
        return model.score(*data.test)

    assert last["auc"] > 0.9
    assert last["accuracy"] > untreated(np.ones(300, bool)) + 0.05
    assert last["accuracy"] > untreated(~data.wrong) - 0.08


@pytest.mark.parametrize(
    "change", [{"corrupted": 1.0}, {"training": 0}, {"batch_size": 0}, {"ridge": 0.0}]
)
def test_impossible_options_are_refused(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))} must be"):
        cleaning.Options(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"validation": 2000}, "validation is 2000"), ({"training": 1}, "only one kind")],
)
def test_splits_that_leave_nothing_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        cleaning.mixture(dataclasses.replace(OPTIONS, **change))


def test_a_few_images_that_are_not_square_are_drawn_too():
    rng = np.random.default_rng(0)
    examples = cleaning.Examples(rng.uniform(size=(5, 4 * 5 + 1)), np.array([0, 1, 0, 1, 0]))
    truth = np.array([0, 1, 1, 1, 0])
    data = cleaning.Mixture(examples, truth, examples, examples, 2)
    figure = plt.figure()
    cleaning.draw_weights(figure, data, rng.uniform(size=5))
    drawn = [image.get_array().shape for axes in figure.axes for image in axes.images]
    assert drawn == [(4, 5)] * 10
    plt.close(figure)


@pytest.mark.parametrize("kind", ["box", "simplex"])
def test_weights_in_a_box_or_on_a_simplex(kind, data):
    """The wrong labels get no weight at all, most of them; the weights stay in their set."""
    task = cleaning.build(dataclasses.replace(OPTIONS, weights=kind))
    solver = aipod.AiPOD(lower_steps=10, adjoint_steps=20)
    solution = aipod.solve(task.problem, solver, task.x0, task.y0, 200, key=jax.random.key(0))
    weights = solution.x if kind == "box" else 60 * solution.x
    assert jnp.all(weights >= 0)
    if kind == "box":
        assert jnp.all(weights <= 1)
    else:
        np.testing.assert_allclose(jnp.sum(weights), 60.0, rtol=1e-6)
    assert cleaning.area_under_curve(solution.x, jnp.asarray(~data.wrong)) > 0.8
    assert jnp.mean(weights[data.wrong] == 0) > jnp.mean(weights[~data.wrong] == 0)
    figure = plt.figure()
    task.picture.draw(figure, solution.x, solution.y)
    plt.close(figure)
