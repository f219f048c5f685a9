"""Files: plain ones only, whole or not at all, and one writer at a time."""

import errno
import fcntl
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule import DamagedShardError, ManifestError
from headrace.webdatamodule.shards.format.files import (
    LOCK_NAME,
    FileBytes,
    atomic_write,
    directory_lock,
    expanded,
    read_plain,
    staged_file,
)
from headrace.webdatamodule.shards.index.build import open_shard_bytes

HOLD = """
import logging, sys
from pathlib import Path
from headrace.webdatamodule.shards.format.files import directory_lock
logging.basicConfig()
with directory_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(folder: Path) -> "subprocess.Popen[str]":
    command, pipe = [sys.executable, "-c", HOLD, str(folder)], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["finish", "kill"])
def test_one_writes_a_directory_at_a_time(tmp_path: Path, end: str) -> None:
    with holder(tmp_path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with holder(tmp_path) as second:
            assert second.stdout is not None
            assert second.stderr is not None
            assert "another process is writing" in second.stderr.readline()  # and says so once
            if end == "kill":
                first.kill()
            first.communicate()
            assert second.stdout.readline() == "held\n"
            assert second.communicate() == ("", "")
        assert (first.returncode, second.returncode) == (-9 if end == "kill" else 0, 0)
    with directory_lock(tmp_path):
        assert (tmp_path / LOCK_NAME).exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_nothing_can_be_locked_nobody_is_warned(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with directory_lock(tmp_path):
                atomic_write(tmp_path / "a", b"1")
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]


def test_a_link_in_place_of_the_lock_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"kept")
    (tmp_path / LOCK_NAME).symlink_to(tmp_path / "other")
    with directory_lock(tmp_path):
        pass
    assert (tmp_path / "other").read_bytes() == b"kept"


def test_a_file_is_whole_or_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a"
    atomic_write(path, b"before")

    def fail() -> None:
        with staged_file(path) as stream:
            stream.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
    atomic_write(path, b"after")
    assert path.read_bytes() == b"after"


def test_small_files_are_read_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_plain(path, ManifestError, most=5) == b"12345"
    with pytest.raises(ManifestError, match="5 bytes, more than the 4"):
        read_plain(path, ManifestError, most=4)
    with pytest.raises(ManifestError, match="a directory"):
        read_plain(tmp_path, ManifestError, most=4)


@pytest.mark.timeout(60)
def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(DamagedShardError, match="a FIFO"):
        FileBytes(tmp_path / "a")


def test_a_home_that_there_is_not_is_a_name() -> None:
    assert expanded("~") == Path.home()
    assert str(expanded("~nobody-of-this-name/a")) == "~nobody-of-this-name/a"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of some megabytes, no two pieces alike."""
    path = tmp_path_factory.mktemp("large") / "a.tar"
    path.write_bytes(np.random.default_rng(0).bytes(3_000_000))
    return path


@given(st.lists(st.tuples(st.integers(0, 3_000_000), st.integers(0, 900_000)), max_size=30))
@pytest.mark.slow
def test_an_open_file_gives_the_bytes_of_any_place(large: Path, spans: list[tuple[int, int]]) -> None:
    data, whole = open_shard_bytes(large), large.read_bytes()
    for begin, size in spans:
        assert data[begin : begin + size] == whole[begin : begin + size]
        assert data[begin + size : begin + size + 512] == whole[begin + size : begin + size + 512]
    assert data[len(whole) - 3 : len(whole) + 9] == whole[-3:]
    assert data[len(whole) + 5 : len(whole) + 9] == b""
