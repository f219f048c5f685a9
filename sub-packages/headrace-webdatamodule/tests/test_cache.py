import contextlib
import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from headrace.webdatamodule import Remote, ShardError
from headrace.webdatamodule.shards.remote.cache import Cache

# A process that makes files in a cache and reads them back; each one's content follows from its number.
WORKER = """
import sys, time, random
from filelock import FileLock
from headrace.webdatamodule.shards.remote.cache import Cache
directory, most, files, rounds, seed, pause = sys.argv[1], *map(int, sys.argv[2:6]), float(sys.argv[6])
cache, chance, made = Cache(directory, most), random.Random(seed), 0
def content(number):
    return bytes([number]) * (1000 + number)
for _ in range(rounds):
    number = chance.randrange(files)
    name = f"{number:032x}.tar"
    def fill(file):
        global made
        made += 1
        for part in (content(number)[:500], content(number)[500:]):
            file.write(part)
            file.flush()
            time.sleep(pause)
    file = cache.find(name) or cache.put(name, len(content(number)), fill)
    with file:
        file.seek(0)
        assert file.read() == content(number), number
    with FileLock(cache.directory / ".lock"):
        nbytes = sum(path.stat().st_size for path in cache.directory.iterdir() if path.name[0] != ".")
    assert nbytes <= most, nbytes
print(made)
"""


def name(number: int) -> str:
    return f"{number:032x}.tar"


def put(cache: Cache, number: int, nbytes: int, fill: Callable[[BinaryIO], None]) -> BinaryIO:
    file = cache.put(name(number), nbytes, fill)
    assert file is not None
    return file


def filled(cache: Cache, number: int, data: bytes) -> None:
    put(cache, number, len(data), lambda file: file.writelines([data])).close()


def held(cache: Cache) -> list[int]:
    return sorted(int(path.name[:32], 16) for path in cache.directory.glob("*.tar"))


def workers(directory: Path, count: int, *arguments: object) -> list[int]:
    command = [sys.executable, "-c", WORKER, str(directory)]
    started = [
        subprocess.Popen(
            [*command, *map(str, (*arguments[:3], seed, arguments[3]))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(count)
    ]
    ended = [(process.communicate(), process.returncode) for process in started]
    assert [code for _, code in ended] == [0] * count, ended
    return [int(out) for (out, _), _ in ended]


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EROFS])
def test_a_cache_that_cannot_be_written_to_is_read(
    tmp_path: Path, reason: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path, 100)
    filled(cache, 1, b"abc")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(reason, "not here")

    monkeypatch.setattr(os, "utime", refuse)  # as on a disk that is mounted read-only
    file = cache.find(name(1))
    assert file is not None
    with file:
        assert file.read() == b"abc"


@pytest.mark.parametrize("place", ["s3://bucket/cache", Path("s3://bucket/cache"), "https://u:hunter2@h/c?hunter2"])
def test_a_cache_at_a_url_is_refused(place: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for wrong in (place, Path(place)):
        with pytest.raises(ValueError, match=r"cache_dir must be a local one, got '(s3|https):/") as caught:
            Remote("s3://bucket/train", cache_dir=wrong)
        assert "hunter2" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_found_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "new" / "cache", 100)
    assert cache.find(name(1)) is None
    filled(cache, 1, b"abc")
    file = cache.find(name(1))
    assert file is not None
    with file:
        assert file.read() == b"abc"
    cache.drop(name(1))
    assert cache.find(name(1)) is None


def test_what_was_not_used_for_the_longest_time_goes_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 30)
    for number in (1, 2, 3):
        filled(cache, number, bytes(10))
        os.utime(tmp_path / name(number), ns=(number, number))
    file = cache.find(name(1))
    assert file is not None
    file.close()
    filled(cache, 4, bytes(10))
    assert held(cache) == [1, 3, 4]
    filled(cache, 5, bytes(20))
    assert 5 in held(cache)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 30
    with pytest.raises(ShardError, match=r"31 bytes does not fit into a cache of 30 bytes.*cache_bytes"):
        filled(cache, 6, bytes(31))


def test_what_is_open_stays_readable_when_it_is_let_go(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10)
    with put(cache, 1, 10, lambda file: file.writelines([b"0123456789"])) as file:
        filled(cache, 2, bytes(10))
        assert held(cache) == [2]
        file.seek(0)
        assert file.read() == b"0123456789"


def test_files_of_others_in_the_directory_are_let_be(tmp_path: Path) -> None:
    (tmp_path / "precious.tar").write_bytes(bytes(50))
    (tmp_path / "notes.part").write_bytes(bytes(50))
    cache = Cache(tmp_path, 10)
    for number in range(3):
        filled(cache, number, bytes(10))
    assert (tmp_path / "precious.tar").exists()
    assert (tmp_path / "notes.part").exists()


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt()])
def test_what_fails_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    cache = Cache(tmp_path, 100)

    def fill(file: BinaryIO) -> None:
        file.write(b"abc")
        raise error

    with pytest.raises(type(error)):
        cache.put(name(1), 10, fill)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".lock")] == []
    filled(cache, 1, b"abc")
    assert held(cache) == [1]


def test_threads_that_want_the_same_file_make_it_once(tmp_path: Path) -> None:
    cache, made = Cache(tmp_path, 1000), []

    def fill(file: BinaryIO) -> None:
        made.append(threading.get_ident())
        time.sleep(0.05)
        file.write(b"abc")

    def get(_: int) -> bytes:
        with put(cache, 1, 3, fill) as file:
            file.seek(0)
            return file.read()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(get, range(8))) == [b"abc"] * 8
    assert len(made) == 1


@pytest.mark.slow
def test_processes_that_want_the_same_file_make_it_once(tmp_path: Path) -> None:
    assert sum(workers(tmp_path, 4, 10_000, 1, 3, 0.05)) == 1
    assert held(Cache(tmp_path, 10_000)) == [0]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [60, pytest.param(1500, marks=pytest.mark.nightly)])
def test_processes_in_a_cache_too_small_for_all(tmp_path: Path, rounds: int) -> None:
    workers(tmp_path, 4, 3100, 9, rounds, 0.001)
    assert not list(tmp_path.glob("*.part"))
    for path in tmp_path.glob("*.tar"):
        number = int(path.name[:32], 16)
        assert path.read_bytes() == bytes([number]) * (1000 + number)


def begun(directory: Path) -> set[tuple[int, int]]:
    """The files that are being written, or were when their writer was killed."""
    found = set()
    for path in directory.glob("*.part"):
        with contextlib.suppress(FileNotFoundError):  # it has its name now
            found.add((path.stat().st_ino, path.stat().st_mtime_ns))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("times", [4, pytest.param(50, marks=pytest.mark.nightly)])
def test_writers_that_are_killed_leave_nothing_that_looks_whole(tmp_path: Path, times: int) -> None:
    for seed in range(times):
        command = [sys.executable, "-c", WORKER, str(tmp_path), "4000", "9", "100000", str(seed), "0.002"]
        before = begun(tmp_path)  # what the one before has left does not count
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 60
            try:
                while begun(tmp_path) <= before:
                    assert process.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
                time.sleep(int(hashlib.sha256(bytes([seed])).hexdigest()[:2], 16) / 256 * 0.03)
            finally:
                process.kill()
            assert process.wait() == -signal.SIGKILL
        for path in tmp_path.glob("*.tar"):
            number = int(path.name[:32], 16)
            assert path.read_bytes() == bytes([number]) * (1000 + number)
    # What was left unfinished is taken up, or cleared away for want of room; empty ones take none.
    cache = Cache(tmp_path, 4000)
    filled(cache, 100, bytes(4000))
    assert held(cache) == [100]
    assert not [path for path in tmp_path.glob("*.part") if path.stat().st_size]


def test_no_room_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cache_bytes must be an int >= 1"):
        Cache(tmp_path, 0)
