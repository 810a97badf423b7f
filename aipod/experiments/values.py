"""Plain values, as a command line or a TOML file holds them, and the objects they stand for."""

import ast
import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from aipod.slots.upper import fading_adam
from aipod.stepsize import Curvature

# The largest whole number that JAX counts with.
LARGEST = 2**31 - 1

# What a configuration file can hold for one name.
Plain = bool | int | float | str

_OPTIMIZERS = ("adabelief", "adagrad", "adam", "adamw", "lion", "nadam", "rmsprop", "sgd", "yogi")


def whole(value: Any, name: str) -> int:
    number = _number(value)
    if number is None or number != number // 1:
        raise ValueError(f"{name} must be a whole number, got {shown(value)}.")
    if abs(number) > LARGEST:
        raise ValueError(f"{name} must be at most {LARGEST}, got {shown(value)}.")
    return int(number)


def within(value: Any, name: str, least: int, most: int = LARGEST) -> int:
    """A whole number between two others."""
    number = whole(value, name)
    if number < least:
        raise ValueError(f"{name} must be a whole number, at least {least}, got {number}.")
    if number > most:
        raise ValueError(f"{name} must be a whole number, at most {most}, got {number}.")
    return number


def number(value: Any, name: str) -> float:
    number = _number(value)
    if number is None:
        raise ValueError(f"{name} must be a number, got {shown(value)}.")
    return float(number)


def flag(value: Any, name: str) -> bool:
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    known = value if isinstance(value, bool) else words.get(str(value).lower())
    if known is None:
        raise ValueError(f"{name} must be true or false, got {shown(value)}.")
    return known


def text(value: Any, name: str) -> str:
    return str(value)


def choice(*allowed: str) -> Callable[[Any, str], str]:
    """A check that the value is one of these words."""

    def one_of(value: Any, name: str) -> str:
        if value not in allowed:
            raise ValueError(
                f"{name} must be one of {', '.join(allowed)}, got {shown(value)}."
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
    remedy = f"{name} must be a number, curvature or curvature(0.5), got {shown(value)}."
    word, arguments, named = _call(value, remedy)
    if word != "curvature":
        raise ValueError(remedy)
    return _apply(Curvature, arguments, named, remedy)


def make_optimizer(value: Plain, name: str) -> Any:
    remedy = (
        f"{name} must be an optimiser with its step size, such as adam(0.003) or "
        f"sgd(0.1, momentum=0.9), got {shown(value)}; known: fading_adam, "
        f"{', '.join(_OPTIMIZERS)}."
    )
    word, arguments, named = _call(value, remedy)
    known = {name: getattr(optax, name) for name in _OPTIMIZERS} | {"fading_adam": fading_adam}
    if word not in known:
        raise ValueError(remedy)
    # The step size comes first, by whatever name; only E3-AiPOD's own optimiser has a default.
    first = [*arguments, *(named[key] for key in ("learning_rate", "rate") if key in named)][:1]
    if (first and (first[0] <= 0 or isinstance(first[0], bool))) or (
        not first and word != "fading_adam"
    ):
        raise ValueError(remedy)
    made = _apply(known[word], arguments, named, remedy)
    try:
        # Optax says what is wrong with an argument when it is used; nothing is computed here.
        jax.eval_shape(lambda x: made.update(x, made.init(x), x), jnp.zeros(1))
    except Exception as error:
        raise ValueError(f"{remedy} ({type(error).__name__}: {error})") from error
    return made


def make_probability(value: Plain, name: str) -> Any:
    """An array for the same reason as in `make_step_size`."""
    return jnp.asarray(number(value, name), float)


def suggestion(name: str, known: Iterable[str]) -> str:
    """' Did you mean x?', or nothing when no name is near."""
    near = difflib.get_close_matches(name[:100], list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def shown(value: Any) -> str:
    """A value as somebody gave it, cut short where it is very long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} characters)"


def _number(value: Any) -> int | float | None:
    if isinstance(value, bool):
        return None
    try:
        return value if isinstance(value, int) and abs(value) <= LARGEST else float(value)
    except (TypeError, ValueError):
        return None
    except OverflowError:
        return math.inf


def _call(value: Any, remedy: str) -> tuple[str, list[Any], dict[str, Any]]:
    """`name(1, key=2)` taken apart, without evaluating anything but literals."""
    try:
        tree = ast.parse(str(value).strip(), mode="eval").body
        if isinstance(tree, ast.Name):
            return tree.id, [], {}
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
            arguments = [ast.literal_eval(part) for part in tree.args]
            pairs = [(str(part.arg), ast.literal_eval(part.value)) for part in tree.keywords]
            named = dict(pairs)
            if len(named) == len(pairs) and all(map(_is_finite, [*arguments, *named.values()])):
                return tree.func.id, arguments, named
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        pass
    raise ValueError(remedy)


def _is_finite(value: Any) -> bool:
    """Whether a literal is a number to compute with, or true or false."""
    return isinstance(value, bool | int | float) and math.isfinite(value)


def _apply(make: Callable[..., Any], arguments: list[Any], named: dict[str, Any], why: str) -> Any:
    try:
        return make(*arguments, **named)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{why} ({error})") from error
