"""A write that was killed, and the next one."""

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from written_sets import begun, check_whole, contents, group, inodes, parts, script, some, tars

from headrace.webdatamodule import ManifestError, ShardError, index_shards, verify_shards, write_shards
from headrace.webdatamodule.shards.index.build import build_index, fitting_index

pytestmark = pytest.mark.slow


def test_a_rerun_keeps_what_is_whole(tmp_path: Path) -> None:
    manifest = write_shards(some(40), tmp_path, n_shards=4, fingerprint="1")
    before, data = inodes(tmp_path), contents(tmp_path)
    assert write_shards(some(40), tmp_path, n_shards=4, fingerprint="1") == manifest
    assert inodes(tmp_path) == before
    harms: list[Callable[[Path], object]] = [
        lambda path: path.unlink(),
        lambda path: path.with_name(f"{path.name}.hri").unlink(),
        lambda path: os.truncate(path, 5120),
        lambda path: path.write_bytes(b"x" * path.stat().st_size),
        lambda path: path.with_name(f"{path.name}.hri").write_bytes(b""),
    ]
    for number, harm in enumerate(harms):
        path = tars(tmp_path)[number % 4]
        before = inodes(tmp_path)
        harm(path)
        assert write_shards(some(40), tmp_path, n_shards=4, fingerprint="1") == manifest
        after = inodes(tmp_path)
        assert {name for name in after if after[name] != before[name]} <= {path.name}
        assert contents(tmp_path) == data


def test_a_shard_of_zero_bytes_is_written_again(tmp_path: Path) -> None:
    manifest = write_shards(some(8), tmp_path, n_shards=2, fingerprint="1")
    path, data = tars(tmp_path)[1], contents(tmp_path)
    times = path.stat()
    os.truncate(path, 0)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a disk that was full may leave it
    assert fitting_index(path) is None
    assert write_shards(some(8), tmp_path, n_shards=2, fingerprint="1") == manifest
    assert contents(tmp_path) == data


class Broken(list[Any]):
    def __getitem__(self, number: Any) -> Any:
        raise KeyError("gone")


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([("k", {"x": 3})], r"must be bytes, got int.*shard-000000\.tar', sample 'k', member 'k\.x'"),
        ([("k", {"x": "\0\0\0"})], "must be bytes, got str"),
        ([("k", {1: b"\0\0\0"})], "member key 1 cannot be stored"),
        ([("k", [b"\0\0\0"])], "must be a pair of a text"),
        (["k"], "failed to read sample 0: ValueError"),
        (lambda: Broken([1]), "failed to read sample 0: KeyError: 'gone'"),
    ],
)
def test_a_rerun_refuses_what_a_first_run_does(tmp_path: Path, samples: Any, message: str) -> None:
    write_shards([("k", {"x": bytes(3)})], tmp_path / "set", n_shards=1, workers=1)
    (tmp_path / "set" / "manifest.json").unlink()  # as after a run that was stopped
    for folder in ("new", "set"):
        with pytest.raises(ShardError, match=message):
            write_shards(samples, tmp_path / folder, n_shards=1, workers=1)


def test_a_rerun_takes_the_same_bytes_in_another_form(tmp_path: Path) -> None:
    manifest = write_shards([("k", {"X": bytes(8)})], tmp_path, n_shards=1, workers=1)
    (tmp_path / "manifest.json").unlink()
    before, samples = inodes(tmp_path), [("k", {"x": np.zeros(1).data})]
    assert write_shards(samples, tmp_path, n_shards=1, workers=1) == manifest  # type: ignore[arg-type] # allowed beyond the type
    assert inodes(tmp_path) == before


@pytest.mark.parametrize("changed", [10, 15, 19])
def test_shards_of_other_samples_are_not_touched(tmp_path: Path, changed: int) -> None:
    write_shards(some(40), tmp_path, n_shards=4)
    (tmp_path / "manifest.json").unlink()  # as after a run that was stopped before its end
    data = contents(tmp_path)
    for sample in (
        ("other", {"x": b""}),
        (f"s{changed:04d}", {"txt": b"", "bin": b""}),
        (f"s{changed:04d}", {"txt": b"9"}),
    ):
        samples: Any = [*some(40)[:changed], sample, *some(40)[changed + 1 :]]
        with pytest.raises(FileExistsError, match=r"shard-000001.tar is whole, but holds other samples"):
            write_shards(samples, tmp_path, n_shards=4)
    assert contents(tmp_path) == data


def test_all_keys_are_compared_where_they_are_known(tmp_path: Path) -> None:
    write_shards(some(40), tmp_path, bytes_per_shard=50_000)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(FileExistsError, match="it has the key 's0007'"):
        write_shards([*some(7), ("new", some(8)[7][1]), *some(40)[8:]], tmp_path, bytes_per_shard=50_000)


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_killed_write_left_is_removed_by_the_next_one(tmp_path: Path, stream: bool) -> None:
    names = ["shard-000000.tar", "shard-000000.tar.hri", "shard.plan.json", "manifest.json", "manifest.hrs"]
    column = {"length": np.arange(5)}
    write_shards(some(5), tmp_path / "other", columns=column, n_shards=2)
    names += [path.name for path in (tmp_path / "other").glob("length.*.npy")]
    assert len(names) == 6
    for name in names:
        (tmp_path / f".{name}.03c9c592.part").touch()
    write_shards(iter(some(5)) if stream else some(5), tmp_path, columns=column, samples_per_shard=3)
    assert parts(tmp_path) == []


def test_a_lock_of_a_killed_writer_is_no_obstacle(tmp_path: Path) -> None:
    with group(tmp_path, delay=0.01, workers=1) as process:
        begun(tmp_path)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert (tmp_path / ".headrace.lock").exists()
    check_whole(tmp_path)
    assert not list(tmp_path.glob(".*"))


def kill_nine(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    workers = draw.choice([1, 2])
    options = {"delay": 0.0005, "workers": workers, "count": 400, "n_shards": 16, "nbytes": 20_000}
    with group(folder, **options) as process:
        begun(folder)
        time.sleep(draw.uniform(0, 0.4 / workers))
        process.kill()
        assert process.wait() in (-signal.SIGKILL, 0)
    check_whole(folder, **options)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 5))])
def test_kill_nine_leaves_only_what_is_whole(tmp_path: Path, seed: int) -> None:
    kill_nine(tmp_path, seed)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 20))])
def test_kill_nine_of_a_generator_leaves_a_write_that_was_stopped(tmp_path: Path, seed: int) -> None:
    options: dict[str, Any] = {"stream": True, "delay": 0.0005, "count": 400, "nbytes": 20_000}
    with group(tmp_path, **options) as process:
        begun(tmp_path)
        time.sleep(random.Random(seed).uniform(0, 0.4))
        process.kill()
        assert process.wait() in (-signal.SIGKILL, 0)
    if (tmp_path / "manifest.json").exists():
        assert verify_shards(tmp_path) == []
    else:
        for path in tars(tmp_path):
            build_index(path.read_bytes())
        try:
            found = f"{index_shards(tmp_path).n_samples} samples"  # killed between the last shard and the manifest
            (tmp_path / "manifest.json").unlink()
        except (ManifestError, FileNotFoundError) as error:
            found = str(error)
        assert re.search("400 samples|a write was stopped|there are no", found)
    done = script(tmp_path, stream=True, count=400, nbytes=20_000)
    assert (done.returncode, done.stdout.strip()) == (0, "400"), done.stderr
    assert verify_shards(tmp_path) == []
    assert parts(tmp_path) == []


def test_shards_of_a_generator_without_their_manifest_are_all_there(tmp_path: Path) -> None:
    # What kill -9 leaves between the last shard and the manifest.
    written = write_shards(iter(some(20)), tmp_path, samples_per_shard=7)
    (tmp_path / "manifest.json").unlink()
    assert index_shards(tmp_path) == written
    (tmp_path / "manifest.json").unlink()
    assert write_shards(iter(some(20)), tmp_path, samples_per_shard=7) == written


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5, 55))
def test_kill_nine_fifty_times(tmp_path: Path, seed: int) -> None:
    kill_nine(tmp_path, seed)
