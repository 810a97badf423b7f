"""Signatures that a person can read: `help(aipod.AiPOD)` says `upper_lr: StepSize | None`.

Python writes every type with the path of its module and every union member by member. The types
that checkers see are left alone; only what `inspect.signature` shows is shorter.
"""

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jaxtyping

_EMPTY = inspect.Parameter.empty
# Unions that have a name of their own.
_KNOWN = {"Key": jaxtyping.PRNGKeyArray, "ArrayLike": jaxtyping.ArrayLike}


class Words:
    """Stands in a signature for a type, and shows itself as its words without quotes."""

    def __init__(self, words: str) -> None:
        self.words = words

    def __repr__(self) -> str:
        return self.words


def make_readable(things: Iterable[Any], aliases: Mapping[str, Any]) -> None:
    """Gives classes, with their methods, and functions a signature in short names.

    **Arguments:**

    - `aliases`: more names of types that are unions, such as `StepSize`.
    """
    aliases = {**aliases, **_KNOWN}
    for thing in things:
        if inspect.isclass(thing):
            own = [base for base in thing.__mro__ if base.__module__.startswith("aipod")]
            for name, value in [pair for base in own for pair in vars(base).items()]:
                if name in ("__init__", "__new__", "__call__") or not name.startswith("_"):
                    # Equinox keeps a method inside an object of its own.
                    _describe(getattr(value, "method", getattr(value, "__func__", value)), aliases)
        else:
            _describe(thing, aliases)


def _describe(function: Any, aliases: Mapping[str, Any]) -> None:
    if not isinstance(function, types.FunctionType):
        return
    signature = inspect.signature(function)
    if isinstance(signature.return_annotation, Words):
        return  # a method that another class had from the same parent
    described: Any = function
    described.__signature__ = signature.replace(
        parameters=[
            parameter.replace(
                annotation=_short(parameter.annotation, aliases),
                default=_default(parameter.default),
            )
            for parameter in signature.parameters.values()
        ],
        return_annotation=_short(signature.return_annotation, aliases),
    )


def _default(value: Any) -> Any:
    # A default that a dataclass makes anew, or a function without a name.
    nameless = repr(value) == "<factory>" or getattr(value, "__name__", "") == "<lambda>"
    return Words("...") if nameless else value


def _short(annotation: Any, aliases: Mapping[str, Any]) -> Any:
    if annotation is _EMPTY or annotation is None or isinstance(annotation, Words):
        return annotation
    return Words(words_of(annotation, aliases))


def words_of(annotation: Any, aliases: Mapping[str, Any]) -> str:
    """A type in short names: unions by their aliases, classes without their modules."""
    if isinstance(annotation, str):
        return annotation
    if annotation is None or annotation is types.NoneType:
        return "None"
    if annotation is Ellipsis:
        return "..."
    for name, meaning in aliases.items():
        if annotation is meaning or annotation == meaning:
            return name
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, aliases)
    if origin is typing.Annotated:
        return words_of(arguments[0], aliases)
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin is Callable and arguments:
        return _callable(arguments, aliases)
    if origin is not None:
        inner = ", ".join(words_of(part, aliases) for part in arguments)
        return f"{_name(origin)}[{inner}]" if inner else _name(origin)
    return _name(annotation)


def _union(members: tuple[Any, ...], aliases: Mapping[str, Any]) -> str:
    words = []
    for name, meaning in aliases.items():
        parts = typing.get_args(meaning)
        if len(parts) > 1 and set(parts) <= set(members):
            words.append(name)
            members = tuple(member for member in members if member not in parts)
    none = types.NoneType in members
    words += [words_of(member, aliases) for member in members if member is not types.NoneType]
    return " | ".join(dict.fromkeys([*words, *(["None"] if none else [])]))


def _callable(arguments: tuple[Any, ...], aliases: Mapping[str, Any]) -> str:
    taken, given = arguments
    inside = "..." if taken is Ellipsis else f"[{', '.join(words_of(t, aliases) for t in taken)}]"
    return f"Callable[{inside}, {words_of(given, aliases)}]"


def _name(annotation: Any) -> str:
    """A name without its module; of jaxtyping's PyTree[Array] the first part, of shapes none."""
    if hasattr(annotation, "array_type"):  # Float[Array, " rows"]
        return _name(annotation.array_type)
    name = getattr(annotation, "__name__", None) or repr(annotation)
    return name.partition("[")[0].rpartition(".")[2]
