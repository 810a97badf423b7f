"""Data sets: `digits`, which needs no network, and `mnist` or anything in its file format."""

import gzip
import hashlib
import math
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from aipod._misc.extras import install as _install

# Hashes of the decompressed bytes, which do not depend on how a copy was compressed.
_MNIST = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
_MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)
_REMEDY = (
    "give the folder that holds the four idx files (gzipped or not) with --data-dir or in the "
    "environment variable AIPOD_DATA"
)


# Size of MNIST's largest file, decompressed.
_LARGEST = 16 + 60_000 * 28 * 28
# The largest compression ratio of gzip.
_MOST_UNPACKED = 1032


class DataError(ValueError):
    """A data set is missing or damaged; the message says where to put the files.

    !!! example
        ```python
        try:
            data = aipod.data.mnist("an/empty/folder")
        except aipod.data.DataError as error:
            print(error)
        ```
    """


class Split(NamedTuple):
    """Images as rows of numbers in [0, 1], and their classes.

    !!! example
        ```python
        images, labels = aipod.data.digits().train
        ```
    """

    images: np.ndarray
    labels: np.ndarray


class Dataset(NamedTuple):
    """A labelled image data set with its own test set.

    !!! example
        ```python
        train, test, classes = aipod.data.digits()
        ```
    """

    train: Split
    test: Split
    classes: int


def digits() -> Dataset:
    """The 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn; a fifth is test.

    !!! example
        ```python
        images, labels = aipod.data.digits().train
        ```
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            f"the digits data set comes with scikit-learn; to add it: {_install('experiments')}"
        ) from error
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = (images[order] / 16).astype(np.float32)
    labels, cut = labels[order].astype(np.int32), len(labels) // 5
    return Dataset(Split(images[cut:], labels[cut:]), Split(images[:cut], labels[:cut]), 10)


def mnist(data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """MNIST, or any data set in its four idx files.

    Looks into `data_dir`, or else into the folder that AIPOD_DATA names, and into its subfolder
    `mnist`. The files may hold other images of the same kind, such as Fashion-MNIST. Without
    either folder, MNIST is downloaded once into the user's cache and its content is checked.

    !!! example
        ```python
        images, labels = aipod.data.mnist("path/to/folder").train
        ```
    """
    if data_dir is not None and not os.fspath(data_dir):
        raise DataError(f"data_dir is empty: {_REMEDY}.")
    named = data_dir if data_dir is not None else os.environ.get("AIPOD_DATA")
    find = _in_folder(Path(named)) if named else _in_cache()
    parts = []
    for prefix in ("train", "t10k"):
        images = _read_idx(find(f"{prefix}-images-idx3-ubyte"), axes=3)
        labels = _read_idx(find(f"{prefix}-labels-idx1-ubyte"), axes=1)
        if len(images) != len(labels):
            raise DataError(
                f"the {prefix} files hold {len(images)} images but {len(labels)} labels: they "
                f"belong to different data sets; {_REMEDY}."
            )
        flat = images.reshape(len(images), -1).astype(np.float32) / 255
        parts.append(Split(flat, labels.astype(np.int32)))
    train, test = parts
    if train.images.shape[1] != test.images.shape[1]:
        raise DataError(
            f"training images have {train.images.shape[1]} pixels, test images "
            f"{test.images.shape[1]}: they belong to different data sets; {_REMEDY}."
        )
    return Dataset(train, test, 1 + int(max(train.labels.max(), test.labels.max())))


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Returns a data set by its name on the command line.

    !!! example
        ```python
        train, test, classes = aipod.data.load("digits")
        ```
    """
    if name == "digits":
        return digits()
    if name == "mnist":
        return mnist(data_dir)
    raise DataError(f"there is no data set {name!r}: choose digits or mnist.")


def _in_folder(folder: Path) -> Callable[[str], Path]:
    def find(name: str) -> Path:
        for parent in (folder, folder / "mnist"):
            for candidate in (name, f"{name}.gz", name.replace("-idx", ".idx")):
                if (parent / candidate).is_file():
                    return parent / candidate
        raise DataError(f"{folder} holds no file {name} or {name}.gz: {_REMEDY}.")

    return find


def _open(path: Path) -> BinaryIO:
    """Opens a file, decompressing it if it is gzipped."""
    with open(path, "rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path)) if zipped else open(path, "rb")


def _read_idx(path: Path, axes: int) -> np.ndarray:
    """Reads an array in the idx format: a magic number, the shape, the bytes."""
    head = 4 + 4 * axes
    try:
        with _open(path) as file:
            begin = file.read(head)
            if len(begin) < head or begin[:4] != bytes((0, 0, 8, axes)):
                raise DataError(
                    f"{path.name} is not an idx file of bytes with {axes} axes; {_REMEDY}."
                )
            shape = struct.unpack(f">{axes}I", begin[4:])
            size = math.prod(shape)
            # Reads at most what the header announces, in case a small archive decompresses to
            # far more, and nothing if the header announces more than the file can hold.
            fits = size <= _MOST_UNPACKED * path.stat().st_size
            content = file.read(size + 1) if fits else b""
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path.name} is damaged (it does not decompress: {error}): fetch it again, then "
            f"{_REMEDY}."
        ) from error
    shown = " x ".join(map(str, shape))
    if len(content) != size:
        holds = "less" if len(content) < size else "more"
        raise DataError(
            f"{path.name} is truncated or damaged: it should hold {shown} bytes, but holds "
            f"{holds}: fetch it again, then {_REMEDY}."
        )
    if size == 0:
        raise DataError(f"{path.name} holds no data ({shown} bytes); {_REMEDY}.")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _in_cache() -> Callable[[str], Path]:
    try:
        import pooch
        import rich.progress  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"downloading MNIST needs {error.name}: {_REMEDY}, or add what is missing: "
            f"{_install('experiments')}"
        ) from error
    cache = Path(pooch.os_cache("aipod")) / "mnist"

    def find(name: str) -> Path:
        path, wanted = cache / f"{name}.gz", _MNIST[name]
        if path.is_file() and _digest(path) == wanted:
            return path
        problems = []
        for mirror in _MIRRORS:
            try:
                _fetch(pooch, f"{mirror}{name}.gz", path, wanted)
            except (OSError, DataError, ValueError) as error:
                problems.append(f"{mirror}: {str(error).splitlines()[0][:120]}")
                continue
            return path
        raise DataError(
            f"{name} could not be downloaded ({'; '.join(problems)}): check the network, or "
            f"{_REMEDY}; the data set digits needs no download."
        )

    return find


def _digest(path: Path) -> str:
    """Hash of the decompressed bytes; empty if the file is damaged or larger than MNIST's."""
    try:
        with _open(path) as file:
            content = file.read(_LARGEST + 1)
    except (OSError, EOFError, zlib.error):
        return ""
    return hashlib.sha256(content).hexdigest() if len(content) <= _LARGEST else ""


def _fetch(pooch: Any, url: str, path: Path, wanted: str) -> None:
    """Downloads to a temporary file, and moves it to `path` if its content is right."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".part{os.getpid()}")
    try:
        pooch.HTTPDownloader(progressbar=_Bar(path.name), timeout=60)(url, str(temporary), None)
        if _digest(temporary) != wanted:
            raise DataError(f"{path.name} from {url} does not have the content of MNIST.")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class _Bar:
    """The progress bar that pooch expects, shown by Rich."""

    def __init__(self, name: str) -> None:
        from rich.progress import Progress

        self.total = 0
        self._name, self._progress = name, Progress(transient=True)
        self._task: Any = None

    def update(self, amount: int) -> None:
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(f"downloading {self._name}", total=self.total)
        self._progress.update(self._task, advance=amount)

    def reset(self) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=0)

    def close(self) -> None:
        self._progress.stop()
