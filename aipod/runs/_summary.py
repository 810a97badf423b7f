"""What `summary.json` must hold for a report to be made of it."""

from collections.abc import Callable, Mapping
from typing import Any

_Check = Callable[[Any], bool]


def check_summary(summary: Any) -> None:
    """Raises `ValueError` unless a summary is that of a run, a comparison or a study."""
    if not isinstance(summary, dict):
        raise ValueError("it does not hold one JSON object")
    for name, check in _KINDS.get(_kind(summary), {}).items():
        if name not in summary:
            raise ValueError(f"it has no {name!r}")
        if not check(summary[name]):
            raise ValueError(f"its {name!r} is not what a run writes")
    if _kind(summary) == "comparison":
        shown = {variant for panel in summary["panels"] for variant in panel["variants"]}
        if not shown <= set(summary["folders"]):
            raise ValueError("it shows variants that have no folder")


def _kind(summary: Mapping[str, Any]) -> str:
    return str(summary.get("kind"))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _number(value: Any) -> bool:
    # NaN and infinity are written as null.
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_number, value.values()))


def _table(value: Any) -> bool:
    return isinstance(value, dict)


def _metric(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and {"name", "label", "log", "better"} <= set(value)
        and _text(value["name"])
        and _text(value["label"])
    )


def _panel(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _text(value.get("title"))
        and _texts(value.get("variants"))
        and len(value["variants"]) > 0
    )


def _some(check: _Check) -> _Check:
    return lambda value: isinstance(value, list) and len(value) > 0 and all(map(check, value))


_KINDS: dict[str, dict[str, _Check]] = {
    "run": {
        "experiment": _text,
        "solver": _text,
        "seed": lambda value: isinstance(value, int) and not isinstance(value, bool),
        "result": _text,
        "seconds": _number,
        "last": _numbers,
        "config": _table,
        "metrics": _some(_metric),
        "axes": _some(_text),
        "environment": _table,
    },
    "comparison": {
        "panels": _some(_panel),
        "folders": lambda value: isinstance(value, dict) and all(map(_text, value.values())),
    },
}
