"""Every problem of the gallery by name, with what there is to say about it."""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from aipod.experiments.gallery import (
    clients,
    features,
    hyperparameters,
    markets,
    physics,
    weights,
)
from aipod.experiments.gallery.exhibit import Exhibit, Setting
from aipod.experiments.gallery.stored import in_structure, references


class Entry(NamedTuple):
    """How a problem is made, its world, and why its lower level is strongly convex on its set.

    `starts`: how many starts near x0 the reference is the best of, where F is not convex;
    `agrees`: a second, closed form of the reference, where there is one.
    """

    make: Callable[[], Setting]
    world: str
    convex: str
    starts: int = 1
    agrees: str = ""


_RIDGE = "least squares, which are convex, plus positive penalties on all of y"
_LOGISTIC = "a convex loss plus a positive penalty on all of y"

ENTRIES: Mapping[str, Entry] = {
    "ridge": Entry(
        hyperparameters.ridge,
        "the log-penalty of a ridge regression on 60 patients (diabetes), chosen on 382 others",
        _RIDGE,
    ),
    "ridge-features": Entry(
        hyperparameters.ridge_features,
        "a log-penalty for each of ten features of a ridge regression (diabetes), batches of 32",
        _RIDGE,
        starts=3,
    ),
    "logistic": Entry(
        hyperparameters.logistic,
        "log-penalties of three groups of features of a logistic regression (breast tumours), "
        "batches of 32",
        _LOGISTIC,
        starts=3,
    ),
    "elastic": Entry(
        hyperparameters.elastic,
        "both log-penalties of a smoothed elastic net on 65 features of 120 patients (diabetes)",
        "least squares plus a convex penalty plus a positive ridge",
        starts=3,
    ),
    "kernel": Entry(
        hyperparameters.kernel,
        "lengths and noise of a Gaussian kernel in kernel ridge regression (diabetes)",
        "a kernel matrix, positive semidefinite, plus a positive noise times the identity",
        starts=3,
    ),
    "cleaning": Entry(
        weights.cleaned_digits,
        "log-odds of 300 labels of digits, half of them wrong, from 200 clean ones; batches of 64",
        "a convex loss with positive weights plus a ridge",
        starts=3,
    ),
    "reweighting": Entry(
        weights.shifted_tumours,
        "weights near 1/300 of training tumours that are smaller than those to predict; they add "
        "up to 1; batches of 32",
        "least squares plus a ridge; at and around the solution all weights are positive",
        starts=3,
    ),
    "class-weights": Entry(
        weights.class_weights,
        "weights and logit shifts of three kinds of wine, one of them rare, under two linear "
        "constraints; batches of 16",
        "a convex loss with positive weights plus a ridge",
        starts=3,
    ),
    "poisoning": Entry(
        weights.poisoned_digits,
        "changes of 20 training images that spoil a classifier of digits the most for their price",
        _LOGISTIC,
        starts=5,
    ),
    "sinusoids": Entry(
        features.sinusoids,
        "meta-learning: features and a common head for 12 sines, each with a head near it",
        "least squares plus the squared distance from the common head",
        starts=5,
    ),
    "representation": Entry(
        features.representation,
        "eight features of digits for a ridge classifier, batches of 64",
        _RIDGE,
        starts=5,
    ),
    "deblurring": Entry(
        physics.deblurring,
        "weights of a smoothness prior for blurred digits; condition number near 1,000",
        "least squares plus a positive ridge",
        starts=3,
    ),
    "control": Entry(
        physics.control,
        "inverse optimal control: the costs of a driver from three drives; laws of motion below",
        "a sum of squares with positive weights, on an affine set",
        starts=3,
    ),
    "tolls": Entry(
        physics.roads,
        "tolls in Sioux Falls with the trips to three nodes, batches of 16 days; demand moves with "
        "the tolls",
        "convex travel times plus an entropy that is extended by a quadratic",
        starts=3,
    ),
    "pricing": Entry(
        markets.pricing,
        "prices of four goods, started at 100, for a buyer whose tastes vary; batches of 8 days",
        "a quadratic with a positive definite matrix",
        agrees="(worth + cost) / 2",
    ),
    "portfolio": Entry(
        markets.shares,
        "factor exposures, in a Budget, and risk aversion of a portfolio of 20 shares; batches of "
        "64 weeks",
        "a variance plus a ridge, on an affine set",
        starts=3,
    ),
    "transport": Entry(
        markets.journeys,
        "the costs of journeys between districts, from 2,000 of them, by optimal transport; "
        "batches of 64",
        "an entropy that is extended by a quadratic",
        agrees="the entropy of the observed shares",
    ),
    "dispatch": Entry(
        markets.dispatch,
        "power traded between three regions, in MW, whose plants must meet A y + h(x) = c",
        "a sum of squares with positive weights plus linear costs",
    ),
    "federated-ridge": Entry(
        clients.ridge,
        "log-penalties for eight hospitals whose patients differ in body mass; batches of 8",
        _RIDGE,
        starts=3,
    ),
    "federated-representation": Entry(
        clients.representation,
        "eight features of digits for eight clients with few classes each; batches of 32",
        _RIDGE,
        starts=5,
    ),
    "federated-trust": Entry(
        clients.trust,
        "how far to trust the labels of eight clinics, three of which confuse many; batches of 16",
        "convex losses with positive weights plus a ridge",
        starts=3,
    ),
}

SETTINGS: Mapping[str, Callable[[], Setting]] = {n: e.make for n, e in ENTRIES.items()}


def _how(entry: Entry) -> str:
    """How the reference was found, in words."""
    words = "SciPy's L-BFGS on F, with y*(x) by dense Newton steps"
    if entry.starts > 1:
        words += f"; the best of {entry.starts} starts near x0"
    return words + (f"; equal to the closed form, {entry.agrees}" if entry.agrees else "")


def _exhibit(name: str) -> Exhibit:
    entry, known = ENTRIES[name], references()[name]
    setting = entry.make()
    return Exhibit(
        name,
        entry.world,
        entry.convex,
        *setting,
        reference=_how(entry),
        start=known.start,
        best=known.best,
        solution=in_structure(known.solution, setting),
    )


PROBLEMS: Mapping[str, Callable[[], Exhibit]] = {
    name: functools.partial(_exhibit, name) for name in ENTRIES
}
