"""Data sets from files: what is read, and what a damaged file gets."""

import functools
import gzip
import hashlib
import http.server
import struct
import threading
import tracemalloc

import numpy as np
import pytest

from aipod import data


def idx(array: np.ndarray) -> bytes:
    head = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.tobytes()


@pytest.fixture
def files() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    made = {}
    for prefix, count in (("train", 30), ("t10k", 10)):
        made[f"{prefix}-images-idx3-ubyte"] = idx(rng.integers(0, 256, (count, 4, 5), np.uint8))
        made[f"{prefix}-labels-idx1-ubyte"] = idx((np.arange(count) % 3).astype(np.uint8))
    return made


def write(folder, files, *, zipped=True):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(content) if zipped else content)
    return folder


@pytest.mark.parametrize("zipped", [True, False], ids=["gzipped", "plain"])
@pytest.mark.parametrize("subfolder", ["", "mnist"])
def test_idx_files_are_read_as_they_are(tmp_path, files, zipped, subfolder):
    write(tmp_path / subfolder, files, zipped=zipped)
    found = data.mnist(tmp_path)
    assert found.train.images.shape == (30, 20)
    assert found.test.labels.tolist() == [i % 3 for i in range(10)]
    raw = np.frombuffer(files["train-images-idx3-ubyte"][16:], np.uint8).reshape(30, 20)
    np.testing.assert_allclose(found.train.images, raw / 255, rtol=1e-6)
    assert found.classes == 3


def test_the_environment_names_the_folder(tmp_path, files, monkeypatch):
    write(tmp_path / "mnist", files)
    monkeypatch.setenv("AIPOD_DATA", str(tmp_path))
    assert len(data.load("mnist").train.labels) == 30


def test_digits_come_along():
    found = data.load("digits")
    assert found.train.images.shape[1] == 64
    assert len(found.train.labels) + len(found.test.labels) == 1797
    assert 0 <= found.train.images.min() <= found.train.images.max() <= 1


def head(*shape: int) -> bytes:
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape)


NAME = "train-images-idx3-ubyte"
DAMAGE = {
    "missing": (None, "holds no file train-images-idx3-ubyte.*--data-dir.*AIPOD_DATA"),
    "truncated": (lambda raw: gzip.compress(raw[:-7]), "truncated or damaged.*should hold"),
    "cut archive": (lambda raw: gzip.compress(raw)[:-20], "does not decompress"),
    "flipped bits": (lambda raw: gzip.compress(raw)[:60] + b"\xff" * 40, "does not decompress"),
    "wrong kind": (lambda raw: b"\x89PNG" + raw, "not an idx file"),
    "empty": (lambda raw: b"", "not an idx file"),
    "no images": (lambda raw: idx(np.zeros((0, 4, 5), np.uint8)), "holds no data"),
    "no pixels": (lambda raw: idx(np.zeros((30, 0, 5), np.uint8)), "holds no data"),
    "larger than its file": (lambda raw: head(30, 4, 6) + raw[16:], "holds less"),
    "far larger than its file": (lambda raw: head(2**32 - 1, 2**32 - 1, 9) + raw, "holds less"),
    # 2^64 bytes, which is 0 in 64 bits.
    "a length that wraps": (lambda raw: head(2**31, 2**31, 4), "holds less"),
    "smaller than its file": (lambda raw: head(30, 4, 4) + raw[16:], "holds more"),
    "other length": (
        lambda raw: gzip.compress(idx(np.zeros((29, 4, 5), np.uint8))),
        "29 images but 30 labels",
    ),
    "other size": (
        lambda raw: gzip.compress(idx(np.zeros((30, 2, 2), np.uint8))),
        "4 pixels, test images 20",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_named_with_a_remedy(tmp_path, files, kind):
    damage, message = DAMAGE[kind]
    write(tmp_path, files)
    path = tmp_path / f"{NAME}.gz"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(files[NAME]))
    with pytest.raises(data.DataError, match=message):
        data.mnist(tmp_path)


@pytest.mark.parametrize("shape", [(30, 4, 5), (2**32 - 1, 2**32 - 1, 2**32 - 1)])
def test_an_archive_is_unpacked_no_further_than_its_header_says(tmp_path, files, shape):
    """50 MB of nothing in 50 kB; a liar of a header unpacks nothing at all."""
    write(tmp_path, files)
    bomb = gzip.compress(head(*shape) + bytes(50_000_000), compresslevel=9)
    (tmp_path / f"{NAME}.gz").write_bytes(bomb)
    tracemalloc.start()
    with pytest.raises(data.DataError, match="truncated or damaged"):
        data.mnist(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5_000_000


def test_a_cached_copy_that_unpacks_to_more_than_mnist_is_fetched_again(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(60_000_000), compresslevel=9))
    assert data._digest(path) == ""


def test_classes_are_those_of_both_parts(tmp_path, files):
    files["t10k-labels-idx1-ubyte"] = idx(np.full(10, 7, np.uint8))
    assert data.mnist(write(tmp_path, files)).classes == 8


def test_an_empty_name_is_no_folder():
    with pytest.raises(data.DataError, match="data_dir is empty"):
        data.mnist("")


def test_an_unknown_name():
    with pytest.raises(data.DataError, match="choose digits or mnist"):
        data.load("cifar")


@pytest.fixture
def mirror(tmp_path, files):
    """A server on this machine that stands for the public mirrors."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    folder = write(tmp_path / "mirror", files)
    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


def test_downloads_are_checked_and_nothing_is_half_written(tmp_path, files, mirror, monkeypatch):
    folder, address = mirror
    cache = tmp_path / "cache"
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    monkeypatch.delenv("AIPOD_DATA", raising=False)
    monkeypatch.setattr("pooch.os_cache", lambda _: cache)
    monkeypatch.setattr(data, "_MNIST", sums)
    monkeypatch.setattr(data, "_MIRRORS", (address + "nowhere/", address))
    assert len(data.mnist().train.labels) == 30
    assert sorted(p.name for p in (cache / "mnist").iterdir()) == sorted(f"{n}.gz" for n in files)
    # A damaged copy in the cache is fetched again; a mirror that lies leaves nothing behind.
    (cache / "mnist" / f"{NAME}.gz").write_bytes(b"broken")
    assert len(data.mnist().train.labels) == 30
    (cache / "mnist" / f"{NAME}.gz").unlink()
    (folder / f"{NAME}.gz").write_bytes(gzip.compress(idx(np.ones((30, 4, 5), np.uint8))))
    with pytest.raises(data.DataError, match=r"could not be downloaded.*--data-dir.*digits"):
        data.mnist()
    assert not [p for p in (cache / "mnist").iterdir() if NAME in p.name]
