"""Pictures of a run folder, put into the page: its policy fetches nothing, not even a file."""

import base64
from html import escape
from pathlib import Path

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# More than any figure that is drawn here has.
_MOST_BYTES = 20_000_000


def picture(folder: Path, name: str, words: str) -> str:
    """A PNG from the folder's figures, with words below; nothing where there is no such picture.

    A folder may come from somebody else: a link out of it, or a file that is no PNG, is not shown.
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
