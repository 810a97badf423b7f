"""Terminals that cannot show every character, and readers that go away."""

import codecs
import io
import os
import sys
import unicodedata

_SPELLED = {
    "‖": "||",
    "∇": "grad ",
    "→": "->",
    "−": "-",
    "–": "-",
    "α": "alpha",
    "β": "beta",
    "δ": "delta",
    "ε": "eps",
    "ρ": "rho",
    "σ": "sigma",
    "τ": "tau",
    "²": "^2",
}


def spell_out() -> None:
    """Lets the output spell what its encoding does not have, where it would raise an error."""
    codecs.register_error("aipod.spelled", _spelled)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="aipod.spelled")


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(map(_plain, characters)), error.end


def _plain(character: str) -> str:
    """In letters of ASCII: by the table, else without its accents, else a question mark."""
    bare = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return _SPELLED.get(character) or bare or "?"


def forget_output() -> None:
    """After the reader has gone: what is still to be written goes nowhere, instead of raising."""
    with open(os.devnull, "wb") as nowhere:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                os.dup2(nowhere.fileno(), stream.fileno())
