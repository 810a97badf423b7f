"""A client's secret, from which the noise of its messages comes."""

import os
import secrets
from pathlib import Path

from aipod._misc.files import private_folder, read_private, write_bytes

_LENGTH = 32


def secret_of(path: Path) -> bytes:
    """The 32 bytes in a file that only the client can read; made when they are first needed."""
    private_folder(path.parent)
    if not os.path.lexists(path):
        write_bytes(path, secrets.token_bytes(_LENGTH), private=True)
    found = read_private(path)
    if len(found) != _LENGTH:
        raise ValueError(
            f"the secret {path} holds {len(found)} bytes in place of {_LENGTH}: bring it back from "
            "a backup. Without one remove it, and count what this client sent so far twice."
        )
    return found
