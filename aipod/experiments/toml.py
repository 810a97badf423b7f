"""Writes the TOML that configuration files need; the standard library can only read TOML."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def header(verb: str) -> str:
    return f"# This file repeats what is beside it: aipod {verb} --config config.toml\n\n"


def dump(values: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {_value(value)}\n" for name, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML string, except that JSON does not escape this control character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"{type(value).__name__} has no place in a configuration file.")
