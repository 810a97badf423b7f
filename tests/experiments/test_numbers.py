"""How numbers are written for people, and what an option must keep to."""

import dataclasses
import math

import pytest

from aipod.experiments import numbers, values
from aipod.experiments.base import option
from aipod.experiments.limits import NOT_NEGATIVE, POSITIVE, SHARE, at_least, check_limits


@pytest.mark.parametrize(
    ("value", "digits", "words"),
    [
        (0.012345, 3, "0.0123"),
        (999.4, 3, "999"),
        (1234.5, 3, "1,234"),
        (1234.5, 4, "1234"),
        (12345.6, 4, "12,346"),
        (-20_000.0, 4, "-20,000"),
        (1_000_000, 3, "1,000,000"),
        (7, 3, "7"),
        (0.0, 3, "0"),
        (12.7, 0, "13"),
        (None, 3, "not finite"),
        (math.nan, 3, "not finite"),
        (-math.inf, 4, "not finite"),
    ],
)
def test_a_number(value, digits, words):
    assert numbers.number(value, digits) == words


def test_other_ways_to_write_one():
    assert numbers.percent(0.1) == "10 %"
    assert numbers.percent(0.00123) == "0.123 %"
    assert numbers.percent(12.5) == "1,250 %"
    assert numbers.percent(None) == numbers.ratio(None) == ""
    assert numbers.ratio(2) == "2.00"
    assert numbers.interval(1.234, 2) == "1.23 to 2.00"
    assert numbers.setting(0.10) == "0.1"
    assert numbers.setting("curvature") == "curvature"
    assert numbers.rounded(1234.5) == "1,200"
    assert numbers.rounded(None) == "not reached"
    assert [numbers.short(cost) for cost in (None, 12.3, 2700, 99_600, 1.5e6)] == [
        "–",
        "12",
        "2.7k",
        "100k",
        "1.5M",
    ]
    assert [numbers.tick(value) for value in (0.5, 20, 2e6)] == ["0.5", "20", "2 M"]


def test_a_table_in_markdown():
    assert numbers.markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |\n"


@dataclasses.dataclass(frozen=True)
class Options:
    size: int = option(1, "", at_least(1))
    weight: float = option(1.0, "", POSITIVE)
    noise: float = option(0.0, "", NOT_NEGATIVE)
    share: float | None = option(None, "", SHARE)
    free: float = option(-1.0, "")

    def __post_init__(self) -> None:
        check_limits(self)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("size", 0, "size must be at least 1, got 0."),
        ("weight", 0.0, "weight must be a positive number"),
        ("weight", math.inf, "weight must be a positive number"),
        ("weight", math.nan, "weight must be a positive number"),
        ("noise", -0.1, "noise must be 0 or more"),
        ("share", 1.1, r"share must lie in \(0, 1\]"),
    ],
)
def test_an_option_outside_its_limit_is_refused(name, value, words):
    with pytest.raises(ValueError, match=words):
        Options(**{name: value})


def test_the_limits_themselves_are_inside():
    assert Options(size=1, noise=0.0, share=1.0, free=math.nan).share == 1.0
    assert Options().share is None


def test_a_very_long_value_is_cut_short():
    assert values.shown("a") == "'a'"
    assert values.shown("x" * 1000) == f"'{'x' * 59}... (1,002 characters)"


@pytest.mark.parametrize(
    "text", ["adam(0.1)", "sgd(0.1, momentum=0.9, nesterov=True)", "fading_adam"]
)
def test_optimisers_are_tried_before_they_are_used(text):
    assert values.make_optimizer(text, "upper_optimizer").init
