"""Writing files: all of a file or nothing of it, and for its owner alone where that matters.

A file is written under a temporary name beside its place, flushed to the disk, and then renamed.
So a crash, a full disk or an interrupt leaves either the old file or the new one.
"""

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PathLike = str | os.PathLike[str]

FILE, FOLDER = 0o600, 0o700  # modes for the owner alone

# Windows lacks the first two, and needs the third.
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_NO_WAITING = getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_TEMPORARY = re.compile(r".+\.tmp\d+-[0-9a-f]{8}")


@contextlib.contextmanager
def atomic(path: PathLike, *, private: bool = False) -> Iterator[BinaryIO]:
    """A binary file that becomes `path` at the end of the block, unless the block raises.

    Whatever the block raises, nothing is left behind. A symbolic link at `path` is replaced; the
    file it points to is not touched.

    **Arguments:**

    - `path`: where the file goes; its folder must exist.
    - `private`: readable and writable for the owner alone, whatever the umask and whatever the mode
        of the file that was there.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}-{secrets.token_hex(4)}")
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS | _BINARY
    handle = os.open(temporary, new, FILE if private else 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            if private:
                _set_mode(handle, FILE)
            yield file
            file.flush()
            os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_bytes(path: PathLike, content: bytes, *, private: bool = False) -> None:
    """Writes a whole file, as `atomic` does."""
    with atomic(path, private=private) as file:
        file.write(content)


def write_text(path: PathLike, text: str, *, private: bool = False) -> None:
    """Writes a whole file in UTF-8, as `atomic` does."""
    write_bytes(path, text.encode(), private=private)


def write_between_marks(page: Path, name: str, text: str) -> None:
    """Puts a text between the two marks of this name, which are comments of a Markdown page."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no marks {begin.strip()} and {end}: add both, in this order.")
    write_text(page, f"{before}{begin}{text}\n{end}{after}")


def sync_folder(folder: PathLike) -> None:
    """Makes renames in a folder durable, on systems that can open folders."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_leftovers(folder: PathLike, names: str) -> None:
    """Removes the temporary files that killed processes left in a folder.

    **Arguments:**

    - `folder`: where to look.
    - `names`: the files they were to become, as a pattern such as `step-*.npz`.
    """
    for path in Path(folder).glob(f"{names}.tmp*"):
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def private_folder(path: PathLike) -> Path:
    """Makes a folder that only its owner can enter, also when it exists with a wider mode.

    Missing parents are made the same way; parents that exist are left as they are.
    """
    path = Path(path)
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link: remove it, or choose another folder.")
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        folder.mkdir(mode=FOLDER, exist_ok=True)
        # The umask may have taken even the owner's rights away.
        os.chmod(folder, FOLDER)
    return path


def read_private(path: PathLike) -> bytes:
    """The content of a file that only its owner may read; a wider mode is narrowed first."""
    handle = _open_private(path, os.O_RDONLY)
    with os.fdopen(handle, "rb") as file:
        return file.read()


def append_private(path: PathLike) -> BinaryIO:
    """A binary file to write at the end of, for its owner alone: for logs."""
    return os.fdopen(_open_private(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def narrow(path: PathLike) -> None:
    """Lets only the owner read a file that exists."""
    os.close(_open_private(path, os.O_RDONLY))


def narrow_files(folder: PathLike) -> None:
    """Lets only the owner read the files of a folder; links and subfolders are left alone."""
    for entry in os.scandir(folder):
        if entry.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):
                os.chmod(entry.path, FILE)


def _open_private(path: PathLike, flags: int) -> int:
    # Without waiting: a pipe in place of the file would hold the process up for ever.
    flags |= _NO_LINKS | _NO_WAITING | _BINARY
    if Path(path).is_symlink():
        raise ValueError(f"{path} is a symbolic link: remove it, or put the file itself there.")
    handle = os.open(path, flags, FILE)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{path} is not a regular file: remove it.")
        _set_mode(handle, FILE)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _set_mode(handle: int, mode: int) -> None:
    if hasattr(os, "fchmod"):
        os.fchmod(handle, mode)
