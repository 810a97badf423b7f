"""Checks plain values from the command line or a file, and makes objects from them."""

import ast
import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from aipod.slots import restarted_momentum
from aipod.slots.estimators import SAGA, SARAH, STORM, LooplessSVRG
from aipod.slots.upper import fading_adam, paced_adam
from aipod.stepsize import Curvature

# The largest 32-bit integer, which is JAX's default.
LARGEST = 2**31 - 1

# The estimators of derivatives, by their names in the command.
ESTIMATORS: dict[str, Any] = {"saga": SAGA, "svrg": LooplessSVRG, "sarah": SARAH, "storm": STORM}

# The values that a configuration file can hold.
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
    """A whole number from `least` to `most`."""
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
    """Returns a check that the value is one of these words."""

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
    """Makes the step size that a plain value describes.

    A number becomes an array, which is an argument of the compiled program, so that runs with
    different step sizes share one program.
    """
    plain = _number(value)
    if plain is not None:
        return jnp.asarray(plain, float)
    remedy = f"{name} must be a number, curvature or curvature(0.5), got {shown(value)}."
    word, arguments, named = _call(value, remedy)
    if word != "curvature":
        raise ValueError(remedy)
    return _apply(Curvature, arguments, named, remedy)


_OWN_OPTIMIZERS: dict[str, Any] = {
    "paced_adam": paced_adam,
    "fading_adam": fading_adam,
    "restarted_momentum": restarted_momentum,
}


def make_estimator(value: Plain, name: str) -> Any:
    return ESTIMATORS[str(value)]()


def make_optimizer(value: Plain, name: str) -> Any:
    remedy = (
        f"{name} must be an optimiser with its step size, such as adam(0.003) or "
        f"sgd(0.1, momentum=0.9), got {shown(value)}; known: "
        f"{', '.join(_OWN_OPTIMIZERS)}, {', '.join(_OPTIMIZERS)}."
    )
    word, arguments, named = _call(value, remedy)
    known = {name: getattr(optax, name) for name in _OPTIMIZERS} | _OWN_OPTIMIZERS
    if word not in known:
        raise ValueError(remedy)
    # The step size is the first argument, or has one of two names; ours need none.
    first = [*arguments, *(named[key] for key in ("learning_rate", "rate") if key in named)][:1]
    if (first and (first[0] <= 0 or isinstance(first[0], bool))) or (
        not first and word not in _OWN_OPTIMIZERS
    ):
        raise ValueError(remedy)
    made = _apply(known[word], arguments, named, remedy)
    if word == "paced_adam":
        return made
    try:
        # Optax checks some arguments only when they are used; this traces without computing.
        jax.eval_shape(lambda x: made.update(x, made.init(x), x), jnp.zeros(1))
    except Exception as error:
        raise ValueError(f"{remedy} ({type(error).__name__}: {error})") from error
    return made


def make_probability(value: Plain, name: str) -> Any:
    """Makes an array, for the same reason as `make_step_size`."""
    return jnp.asarray(number(value, name), float)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns ' Did you mean x?', or an empty string if no name is similar."""
    near = difflib.get_close_matches(name[:100], list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def shown(value: Any) -> str:
    """The repr of a value, shortened if it is very long."""
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
    """Parses `name(1, key=2)`; only literals are evaluated."""
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
    """Whether a literal is a finite number or a bool."""
    return isinstance(value, bool | int | float) and math.isfinite(value)


def _apply(make: Callable[..., Any], arguments: list[Any], named: dict[str, Any], why: str) -> Any:
    try:
        return make(*arguments, **named)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{why} ({error})") from error
