"""Files are whole or absent, private ones are private, and links lead nowhere."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading

import pytest

from aipod._misc import files


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o777])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_file_is_written_and_replaced(tmp_path):
    path = tmp_path / "a.txt"
    for text in ("first\n", "zweitens: ü\n"):
        files.write_text(path, text)
        assert path.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_whatever_is_raised_the_old_file_stays_and_nothing_else(tmp_path, error):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def write():
        with files.atomic(path) as file:
            file.write(b"half of the new")
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_fills_up_leaves_nothing_partial(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_the_way_is_told_and_nothing_is_left(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="a"):
        files.write_bytes(tmp_path / "a", b"new")
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_private_files_are_private_under_every_umask(tmp_path, umask):
    path = tmp_path / "key"
    files.write_bytes(path, b"1", private=True)
    assert mode(path) == 0o600
    path.chmod(0o666)
    files.write_bytes(path, b"2", private=True)
    assert mode(path) == 0o600
    with files.append_private(tmp_path / "log") as file:
        file.write(b"line\n")
    assert mode(tmp_path / "log") == 0o600


def test_other_files_follow_the_umask(tmp_path, umask):
    files.write_bytes(tmp_path / "a", b"1")
    assert mode(tmp_path / "a") == 0o666 & ~umask


def test_it_is_private_from_the_first_moment_on(tmp_path):
    before = os.umask(0)
    try:
        with files.atomic(tmp_path / "key", private=True):
            (temporary,) = tmp_path.iterdir()
            assert mode(temporary) == 0o600
    finally:
        os.umask(before)


def test_private_folders_are_private_under_every_umask(tmp_path, umask):
    made = files.private_folder(tmp_path / "a" / "b")
    assert [mode(folder) for folder in (made, made.parent)] == [0o700, 0o700]
    made.chmod(0o755)
    outside = mode(tmp_path)
    files.private_folder(made)
    assert mode(made) == 0o700
    assert mode(tmp_path) == outside


def test_links_are_replaced_or_refused_and_never_followed(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"not yours")
    target.chmod(0o644)
    link.symlink_to(target)
    with pytest.raises(ValueError, match="symbolic link"):
        files.read_private(link)
    with pytest.raises(ValueError, match="symbolic link"):
        files.append_private(link)
    files.write_bytes(link, b"mine", private=True)
    assert not link.is_symlink()
    assert link.read_bytes() == b"mine"
    assert target.read_bytes() == b"not yours"
    (tmp_path / "folder").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "folder")
    with pytest.raises(ValueError, match="symbolic link"):
        files.private_folder(tmp_path / "other")
    (tmp_path / "folder" / "inside").symlink_to(target)
    files.narrow_files(tmp_path / "folder")
    assert mode(target) == 0o644


def test_reading_a_private_file_narrows_its_mode(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"x")
    path.chmod(0o644)
    assert files.read_private(path) == b"x"
    assert mode(path) == 0o600


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with a name")
def test_a_pipe_in_place_of_a_file_is_refused_and_nobody_waits(tmp_path):
    os.mkfifo(tmp_path / "secret")
    with pytest.raises(ValueError, match="not a regular file"):
        files.read_private(tmp_path / "secret")


def test_the_files_of_a_folder_are_narrowed(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "a").chmod(0o644)
    (tmp_path / "inner").mkdir(mode=0o755)
    inner = mode(tmp_path / "inner")
    files.narrow_files(tmp_path)
    assert mode(tmp_path / "a") == 0o600
    assert mode(tmp_path / "inner") == inner


def test_threads_that_write_the_same_file_do_not_mix(tmp_path):
    path = tmp_path / "a"
    texts = [bytes([65 + index]) * 200_000 for index in range(8)]

    def write(text):
        for _ in range(5):
            files.write_bytes(path, text)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in texts
    assert list(tmp_path.iterdir()) == [path]


# Writes the same file over and over again, and says when it has begun.
WRITER = """
import sys
from aipod._misc import files
text = b"x" * 5_000_000
files.write_bytes(sys.argv[1], text)
print("begun", flush=True)
while True:
    files.write_bytes(sys.argv[1], text)
"""


def test_a_killed_writer_leaves_a_whole_file_and_its_leftovers_can_be_removed(tmp_path):
    path = tmp_path / "a"
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, env=os.environ
        )
        child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert path.stat().st_size == 5_000_000
    (tmp_path / "a.tmp.txt").write_text("somebody's own")
    (tmp_path / f"a.tmp{os.getpid()}-0123abcd").write_text("left behind")
    (tmp_path / f"b.tmp{os.getpid()}-0123abcd").write_text("of another file")
    files.remove_leftovers(tmp_path, "[a]")
    kept = ["a", "a.tmp.txt", f"b.tmp{os.getpid()}-0123abcd"]
    assert sorted(p.name for p in tmp_path.iterdir()) == kept


def test_a_text_between_marks_is_replaced_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- one: begin -->\nold\n<!-- one: end -->\nb\n<!-- two: end -->\n")
    for text in ("new", "newer\nlines"):
        files.write_between_marks(page, "one", text)
        expected = f"a\n<!-- one: begin -->\n{text}\n<!-- one: end -->\nb\n<!-- two: end -->\n"
        assert page.read_text() == expected
    with pytest.raises(ValueError, match=r"has no marks .*two: begin"):
        files.write_between_marks(page, "two", "lost")
    assert page.read_text() == expected
