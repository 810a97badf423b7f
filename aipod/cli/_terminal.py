"""Output to terminals without Unicode, and to pipes that are closed early."""

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
    """Makes the output spell characters that its encoding lacks, instead of raising an error."""
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
    """ASCII for one character: from the table, or without accents, or a question mark."""
    bare = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return _SPELLED.get(character) or bare or "?"


def forget_output() -> None:
    """Sends further output to the null device, because nobody reads it any more."""
    with open(os.devnull, "wb") as nowhere:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                os.dup2(nowhere.fileno(), stream.fileno())
