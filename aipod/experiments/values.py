"""Plain values, as a command line or a TOML file holds them, and the objects they stand for."""

import ast
import difflib
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import optax

from aipod.slots.upper import fading_adam
from aipod.stepsize import Curvature

# What a configuration file can hold for one name.
Plain = bool | int | float | str

_OPTIMIZERS = ("adabelief", "adagrad", "adam", "adamw", "lion", "nadam", "rmsprop", "sgd", "yogi")


def whole(value: Any, name: str) -> int:
    number = _number(value)
    if number is None or number != number // 1:
        raise ValueError(f"{name} must be a whole number, got {value!r}.")
    return int(number)


def number(value: Any, name: str) -> float:
    number = _number(value)
    if number is None:
        raise ValueError(f"{name} must be a number, got {value!r}.")
    return float(number)


def flag(value: Any, name: str) -> bool:
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    known = value if isinstance(value, bool) else words.get(str(value).lower())
    if known is None:
        raise ValueError(f"{name} must be true or false, got {value!r}.")
    return known


def text(value: Any, name: str) -> str:
    return str(value)


def choice(*allowed: str) -> Callable[[Any, str], str]:
    """A check that the value is one of these words."""

    def one_of(value: Any, name: str) -> str:
        if value not in allowed:
            raise ValueError(
                f"{name} must be one of {', '.join(allowed)}, got {value!r}."
                + suggestion(str(value), allowed)
            )
        return str(value)

    return one_of


def step_size(value: Any, name: str) -> float | str:
    """A number, or `curvature`, `curvature(0.5)`, `curvature(safety=0.5, cap=2)` as written."""
    plain = _number(value)
    if plain is not None:
        return float(plain)
    make_step_size(value, name)
    return str(value)


def optimizer(value: Any, name: str) -> str:
    """An Optax optimiser as written, such as `adam(0.003)` or `sgd(0.1, momentum=0.9)`."""
    make_optimizer(value, name)
    return str(value)


def make_step_size(value: Plain, name: str) -> Any:
    """The step size that a plain value stands for.

    A number becomes an array, an argument of the compiled program: one program then serves every
    step size, and a comparison of several compiles once.
    """
    plain = _number(value)
    if plain is not None:
        return jnp.asarray(plain, float)
    remedy = f"{name} must be a number, curvature or curvature(0.5), got {value!r}."
    word, arguments, named = _call(value, remedy)
    if word != "curvature":
        raise ValueError(remedy)
    return _apply(Curvature, arguments, named, remedy)


def make_optimizer(value: Plain, name: str) -> Any:
    remedy = (
        f"{name} must be an optimiser with its step size, such as adam(0.003) or "
        f"sgd(0.1, momentum=0.9), got {value!r}; known: fading_adam, "
        f"{', '.join(_OPTIMIZERS)}."
    )
    word, arguments, named = _call(value, remedy)
    if word == fading_adam.__name__:
        return _apply(fading_adam, arguments, named, remedy)
    if word not in _OPTIMIZERS or not (arguments or named):
        raise ValueError(remedy)
    return _apply(getattr(optax, word), arguments, named, remedy)


def make_probability(value: Plain, name: str) -> Any:
    """An array for the same reason as in `make_step_size`."""
    return jnp.asarray(number(value, name), float)


def suggestion(name: str, known: Iterable[str]) -> str:
    """' Did you mean x?', or nothing when no name is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _number(value: Any) -> int | float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _call(value: Any, remedy: str) -> tuple[str, list[Any], dict[str, Any]]:
    """`name(1, key=2)` taken apart, without evaluating anything but literals."""
    try:
        tree = ast.parse(str(value).strip(), mode="eval").body
        if isinstance(tree, ast.Name):
            return tree.id, [], {}
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
            arguments = [ast.literal_eval(part) for part in tree.args]
            named = {str(part.arg): ast.literal_eval(part.value) for part in tree.keywords}
            return tree.func.id, arguments, named
    except (SyntaxError, ValueError):
        pass
    raise ValueError(remedy)


def _apply(make: Callable[..., Any], arguments: list[Any], named: dict[str, Any], why: str) -> Any:
    try:
        return make(*arguments, **named)
    except TypeError as error:
        raise ValueError(f"{why} ({error})") from error
