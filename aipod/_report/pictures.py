"""Pictures of a run folder, embedded in the page, whose security policy loads no files."""

import base64
from html import escape
from pathlib import Path

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Larger than any figure that aipod draws.
_MOST_BYTES = 20_000_000


def picture(folder: Path, name: str, words: str) -> str:
    """Returns figures/<name>.png as HTML with a caption, or an empty string.

    The folder may come from somebody else, so a link to a file outside of it, or a file that is
    not a PNG, is left out.
    """
    file = folder / "figures" / f"{name}.png"
    if not file.is_file() or not file.resolve().is_relative_to(folder.resolve()):
        return ""
    with open(file, "rb") as opened:
        content = opened.read(_MOST_BYTES + 1)
    if not content.startswith(_SIGNATURE) or len(content) > _MOST_BYTES:
        return ""
    source = "data:image/png;base64," + base64.b64encode(content).decode("ascii")
    return (
        f'<figure><img src="{source}" alt="{escape(words)}">'
        f"<figcaption>{escape(words)}</figcaption></figure>"
    )
