import contextlib
import errno
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_tar import made_by_tarfile, write_tar

from headrace.webdatamodule.shards import (
    IndexedShards,
    Manifest,
    ManifestError,
    ShardError,
    index_shards,
    open_column,
    verify_shards,
)
from headrace.webdatamodule.shards.format.files import StagedFile, StoppedError
from headrace.webdatamodule.shards.format.tar import MOST_MEMBER_BYTES, tar_end, ustar_header
from headrace.webdatamodule.shards.index.build import build_index, fitting_index
from headrace.webdatamodule.shards.writing import executor as running
from headrace.webdatamodule.shards.writing.executor import InProcessWarning
from headrace.webdatamodule.shards.writing.plan import bounds_by_bytes, bounds_of
from headrace.webdatamodule.shards.writing.shard_task import remove_parts
from headrace.webdatamodule.shards.writing.write import write_shards

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("shard_writer.py")
Samples = list[tuple[str, dict[str, bytes]]]

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="./\0"), min_size=1, max_size=12)
KEY = st.lists(TEXT, min_size=1, max_size=3).map("/".join).filter(lambda key: not key.startswith("__"))
SUFFIX = TEXT.filter(lambda suffix: suffix.lower() not in ("__key__", "__url__", "__local_path__"))
MEMBERS = st.dictionaries(SUFFIX, st.binary(max_size=1200), min_size=1, max_size=3).filter(
    lambda members: len({suffix.lower() for suffix in members}) == len(members)
)
SAMPLES = st.dictionaries(KEY, MEMBERS, min_size=1, max_size=12).map(lambda made: list(made.items()))


def some(count: int, nbytes: int = 600) -> Samples:
    return [(f"s{i:04d}", {"txt": b"%d" % i, "bin": bytes([i % 256]) * nbytes}) for i in range(count)]


def tars(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tar"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def parts(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".part")]


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in tars(folder)}


def by_webdataset(path: Path) -> Samples:
    with path.open("rb") as stream:
        files = wds.tariterators.tar_file_expander([{"url": str(path), "stream": stream}])
        samples = list(wds.tariterators.group_by_keys(files))
    return [(s["__key__"], {k: v for k, v in s.items() if not k.startswith("__")}) for s in samples]


def by_tarfile(path: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        return [(one.name, tar.extractfile(one).read()) for one in tar]  # type: ignore[union-attr] # all are files


# What is written


@settings(max_examples=60)
@given(SAMPLES, st.data())
def test_every_sample_is_in_one_shard_in_order_for_all_readers(samples: Samples, data: st.DataObject) -> None:
    size: dict[str, Any] = data.draw(
        st.one_of(
            st.builds(lambda n: {"n_shards": n}, st.integers(1, len(samples))),
            st.builds(lambda n: {"samples_per_shard": n}, st.integers(1, len(samples) + 2)),
            st.builds(lambda n: {"bytes_per_shard": n}, st.integers(1, 60_000)),
        )
    )
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        manifest = write_shards(samples, folder, workers=1, **size)
        paths = tars(folder)
        assert [shard.name for shard in manifest.shards] == [path.name for path in paths]
        assert all(shard.samples for shard in manifest.shards)
        assert verify_shards(folder) == []
        members = [(f"{key}.{suffix}", data) for key, sample in samples for suffix, data in sample.items()]
        assert [member for path in paths for member in by_tarfile(path)] == members
        folded = [(key, {suffix.lower(): data for suffix, data in sample.items()}) for key, sample in samples]
        if not any(suffix.startswith("__") for _, sample in folded for suffix in sample):
            assert [sample for path in paths for sample in by_webdataset(path)] == folded
        assert [(s.pop("__key__"), s) for s in IndexedShards(folder, decode=None)] == folded
        # The index made while writing is the one that reading makes, and the tar file the one that tarfile makes.
        bounds = np.cumsum([0, *(shard.samples for shard in manifest.shards)]).tolist()
        for path, (start, stop) in zip(paths, pairwise(bounds), strict=True):
            assert Path(f"{path}.hri").read_bytes() == build_index(path.read_bytes())
            assert path.read_bytes() == made_by_tarfile(samples[start:stop])


def test_gnu_tar_reads_them(tmp_path: Path) -> None:
    samples = [("d" * 120 + "/ü", {"txt": b"1" * 700}), ("b", {"x": b"", "y.z": b"22"})]
    write_shards(samples, tmp_path, n_shards=1)
    [path] = tars(tmp_path)
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    done = subprocess.run(["tar", "-xvf", path, "-C", unpacked], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    for key, sample in samples:
        for suffix, data in sample.items():
            assert (unpacked / f"{key}.{suffix}").read_bytes() == data


@given(st.lists(st.integers(0, 40).map(lambda n: n * 512), min_size=1, max_size=40), st.integers(1, 60_000))
def test_no_shard_is_larger_than_asked_unless_one_sample_is(sizes: list[int], most: int) -> None:
    bounds = bounds_by_bytes(np.array(sizes), most)
    assert (bounds[0], bounds[-1]) == (0, len(sizes))
    for start, stop in pairwise(bounds):
        nbytes = sum(sizes[start:stop])
        assert stop == start + 1 or nbytes + len(tar_end(nbytes)) <= most
    for start, stop, after in zip(bounds, bounds[1:], bounds[2:], strict=False):  # nor smaller than need be
        nbytes = sum(sizes[start : stop + 1])
        assert after > stop
        assert nbytes + len(tar_end(nbytes)) > most


def test_measured_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    write_shards(some(100), tmp_path, bytes_per_shard=50_000)
    sizes = [path.stat().st_size for path in tars(tmp_path)]
    assert len(sizes) > 3
    assert max(sizes) <= 50_000
    given = write_shards(some(100), tmp_path / "given", bytes_per_shard=50_000, sizes=[2560] * 100)
    assert given.shards == Manifest.load(tmp_path).shards


def test_members_are_measured_by_their_bytes(tmp_path: Path) -> None:
    numbers: Any = [(f"s{i}", {"bin": np.arange(1000.0).data}) for i in range(20)]
    write_shards(numbers, tmp_path, bytes_per_shard=20_480, workers=1)
    assert len(tars(tmp_path)) == 10
    assert max(path.stat().st_size for path in tars(tmp_path)) <= 20_480
    others: list[tuple[Any, str]] = [
        ("text", r"got str: .*text\.encode\(\)"),
        (np.ones(3), r"got ndarray: numpy\.save"),
    ]
    for wrong, message in others:
        with pytest.raises(ShardError, match=rf"sample 20: .*{message}"):
            write_shards([*numbers, ("k", {"x": wrong})], tmp_path / "new", bytes_per_shard=20_480)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", [ThreadPoolExecutor, ProcessPoolExecutor])
def test_bytes_are_the_same_wherever_they_are_written(tmp_path: Path, kind: Any) -> None:
    write_shards(some(50), tmp_path / "a", n_shards=5, workers=1)
    options = {"mp_context": get_context("spawn")} if kind is ProcessPoolExecutor else {}
    with kind(2, **options) as executor:
        write_shards(some(50), tmp_path / "b", n_shards=5, executor=executor)
    write_shards(some(50), tmp_path / "c", n_shards=5, workers=3)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")


@pytest.mark.filterwarnings("default")  # what a cluster warns of is its own
def test_a_dask_cluster_of_processes_over_tcp(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    write_shards(some(50), tmp_path / "a", n_shards=5, workers=1)
    options = {"processes": True, "n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(protocol="tcp", **options) as cluster, distributed.Client(cluster) as client:
        assert cluster.scheduler_address.startswith("tcp://")
        write_shards(some(50), tmp_path / "b", n_shards=5, executor=client.get_executor())
        bad: Any = [*some(50), ("last", {"txt": "no bytes"})]
        with pytest.raises(ShardError, match=r"must be bytes, got str.*sample 'last'"):
            write_shards(bad, tmp_path / "c", n_shards=5, executor=client.get_executor())
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert parts(tmp_path / "c") == []
    assert not (tmp_path / "c" / "manifest.json").exists()


def test_a_small_set_starts_no_processes(tmp_path: Path) -> None:
    write_shards(lambda: some(50), tmp_path, n_shards=5)  # a lambda cannot be sent to one


def test_a_large_set_starts_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(some(50), tmp_path / "a", n_shards=5, workers=1)
    monkeypatch.setattr(running, "_TRIAL", 0.0)
    monkeypatch.setattr(running, "_WORTH", 0.0)
    monkeypatch.setattr(running, "cpus", lambda: 2)
    with pytest.warns(InProcessWarning, match="cannot be sent to other processes"):
        write_shards(lambda: some(50), tmp_path / "b", n_shards=5)
    write_shards(some(50), tmp_path / "c", n_shards=5)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")


def test_samples_that_cannot_be_sent_are_written_here_and_that_is_said(tmp_path: Path) -> None:
    with pytest.warns(InProcessWarning, match=r"written in this process; pass a function.*workers=1") as caught:
        write_shards(lambda: some(9), tmp_path, n_shards=3, workers=2)
    assert caught[0].filename == __file__
    assert verify_shards(tmp_path) == []


class Strange(list[Any]):
    """Texts as the keys of samples."""

    def keys(self) -> list[str]:
        return list(self)


def test_a_source_is_asked_for_its_keys_and_parts(tmp_path: Path) -> None:
    class Source(Sequence[Any]):
        asked: list[tuple[int, int]] = []  # noqa: RUF012 - one test, one list
        known = 10

        def __len__(self) -> int:
            return 10

        def __getitem__(self, number: Any) -> Any:
            raise AssertionError("only parts are to be read")

        def keys(self) -> list[str]:
            return [key for key, _ in some(self.known)]

        def part(self, start: int, stop: int) -> Samples:
            self.asked.append((start, stop))
            return some(10)[start:stop]

    write_shards(Source(), tmp_path, n_shards=2, workers=1)
    assert Source.asked == [(0, 5), (5, 10)]
    assert list(IndexedShards(tmp_path).keys) == Source().keys()
    for key in ("\ud800", "\udc80"):
        with pytest.raises(ShardError, match="cannot be written as UTF-8"):
            write_shards(Strange([key]), tmp_path / "new", n_shards=1, workers=1)
    assert not (tmp_path / "new").exists()
    Source.known = 9
    with pytest.raises(ValueError, match="gives 9 keys of 10 samples"):
        write_shards(Source(), tmp_path / "new", n_shards=2, workers=1)


def test_columns(tmp_path: Path) -> None:
    tokens = np.arange(6, dtype=np.int32)
    manifest = write_shards(some(6), tmp_path, n_shards=2, columns={"tokens": tokens})
    assert manifest == Manifest.load(tmp_path)
    assert open_column(tmp_path, manifest, "tokens").tolist() == tokens.tolist()
    assert verify_shards(tmp_path) == []
    kept = write_shards(some(6), tmp_path / "kept", n_shards=2, columns={"tokens": tokens}, fingerprint="1")
    (tmp_path / "kept" / "shard-000001.tar").unlink()
    assert write_shards(some(6), tmp_path / "kept", n_shards=2, fingerprint="1") == kept == manifest  # they stay
    columns: list[tuple[Any, Any, str]] = [
        ("tokens", [1, 2], r"columns\['tokens'\] must be plain numbers or texts of shape \[6, \.\.\.\]"),
        ("../a", range(6), "column's name must be"),
        (3, range(6), "column's name must be a part of a file name, got 3"),
        ("t", np.array([None] * 6), r"columns\['t'\] must be"),
        ("t", [[1, 2], [3]] * 3, r"columns\['t'\] must be .*one row for each sample, got .*inhomogeneous"),
    ]
    for name, wrong, message in columns:
        with pytest.raises(ValueError, match=message):
            write_shards(some(6), tmp_path / "new", n_shards=2, columns={name: wrong})
    unnamed: Any = [range(6)]
    with pytest.raises(ValueError, match=r"columns must be \{name: array\}, got list"):
        write_shards(some(6), tmp_path / "new", n_shards=2, columns=unnamed)
    assert not (tmp_path / "new").exists()


def test_columns_go_with_the_shards_that_they_belong_to(tmp_path: Path) -> None:
    columns = {"sizes-abc": range(6), "tokens": range(6)}
    write_shards(some(6), tmp_path, n_shards=2, columns=columns)
    assert len(list(tmp_path.glob("*.npy"))) == 2
    manifest = write_shards(some(6, 100), tmp_path, n_shards=2, columns={"tokens": range(6)}, overwrite=True)
    assert [column.name for column in manifest.columns] == ["tokens"]
    assert len(list(tmp_path.glob("*.npy"))) == 1
    assert verify_shards(tmp_path) == []


# What is refused


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (("a.b", {"x": b""}), "the sample key 'a.b' cannot be stored"),
        (("k" * 100, {"x": b""}), r"name of 102 does not fit.*100 bytes"),
        (("k" * 200 + "/a", {"x": b""}), "255 with directories"),
        (("k", {}), "no members"),
        (("k", {"a/b": b""}), "member key 'a/b' cannot be stored"),
        (("k", {"A": b"", "a": b""}), "cannot be stored"),
        (("k", {"__url__": b""}), "readers use for themselves"),
        (("k", {"x": "text"}), r"must be bytes, got str: .*text\.encode\(\)"),
        (("k", {"x": np.ones(3)}), r"must be bytes, got ndarray: numpy\.save.*BytesIO.*safetensors\.numpy\.save"),
        (("k", {"x": 3}), r"must be bytes, got int: .*json\.dumps"),
        (("k", {1: b""}), "the member key 1 cannot be stored"),
        (("\udc80", {"x": b""}), "UTF-8"),
        (("a\ud800", {"x": b""}), "UTF-8"),
        (("k", {"\udc80": b""}), "UTF-8"),
        (("k", [b"x"]), "must be a pair of a text"),
        ((1, {"x": b""}), "must be a pair of a text"),
        ("k", "failed to read sample 3: ValueError: not enough values"),
    ],
)
def test_samples_that_no_reader_would_give_back(tmp_path: Path, sample: Any, message: str) -> None:
    refused(tmp_path, sample, message, 1)


def test_samples_that_are_refused_in_another_process(tmp_path: Path) -> None:
    refused(tmp_path, ("a.b", {"x": b""}), "the sample key 'a.b' cannot be stored", 2)


def refused(tmp_path: Path, sample: Any, message: str, workers: int) -> None:
    with pytest.raises(ShardError, match=message) as caught:
        write_shards([*some(3), sample], tmp_path, n_shards=2, workers=workers)
    assert caught.value.shard == str(tmp_path / "shard-000001.tar")
    assert parts(tmp_path) == []
    assert not (tmp_path / "manifest.json").exists()


def test_members_of_8_gib_are_refused() -> None:
    assert MOST_MEMBER_BYTES == (8 << 30) - 1
    assert ustar_header(b"a", ord("a"), MOST_MEMBER_BYTES)[124:136] == b"77777777777\0"


def test_other_bytes_like_members_are_taken(tmp_path: Path) -> None:
    write_shards([("k", {"a": bytearray(b"1"), "b": memoryview(b"22")})], tmp_path, n_shards=1)  # type: ignore[dict-item] # allowed beyond the type
    assert by_webdataset(tars(tmp_path)[0]) == [("k", {"a": b"1", "b": b"22"})]


@pytest.mark.parametrize("n_shards", [1, 2, 4])
def test_a_key_that_occurs_twice_is_named_and_there_is_no_manifest(tmp_path: Path, n_shards: int) -> None:
    with pytest.raises(ShardError, match="'s0001' occurs twice") as caught:
        write_shards([*some(3), some(2)[1]], tmp_path, n_shards=n_shards)
    assert caught.value.sample == "s0001"
    assert not (tmp_path / "manifest.json").exists()
    with pytest.raises(ShardError, match="'s0001' occurs twice"):  # found beforehand where all are measured
        write_shards([*some(3), some(2)[1]], tmp_path / "new", bytes_per_shard=10)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "size", [{}, {"n_shards": 0}, {"n_shards": 4}, {"n_shards": 1, "samples_per_shard": 1}, {"bytes_per_shard": 1.5}]
)
def test_sizes_of_shards_that_are_not_allowed(tmp_path: Path, size: dict[str, Any]) -> None:
    kind = TypeError if size.get("bytes_per_shard") == 1.5 else ValueError
    with pytest.raises(kind, match=r"n_shards|bytes_per_shard must be an int >= 1, got 1.5"):
        write_shards(some(3), tmp_path / "new", **size)
    assert not (tmp_path / "new").exists()


def test_integers_of_numpy_are_numbers_too(tmp_path: Path) -> None:
    plain: dict[str, Any]
    numbers: dict[str, Any] = {
        "n_shards": np.int64(2),
        "samples_per_shard": np.uint8(2),
        "bytes_per_shard": np.int32(1),
    }
    for name, number in numbers.items():
        workers: Any = np.int64(1)
        given, plain = {name: number}, {name: int(number)}
        manifest = write_shards(some(3), tmp_path / name, **given, workers=workers)
        assert manifest == write_shards(some(3), tmp_path / f"{name} plain", **plain, workers=1)
    with pytest.raises(TypeError, match="n_shards must be an int >= 1, got True"):
        write_shards(some(3), tmp_path / "new", n_shards=True)


def test_other_arguments_that_are_not_allowed(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"workers": 0}, "workers must be an int >= 1"),
        ({"prefix": "a/b"}, "prefix must be"),
        ({"prefix": "a:b"}, "prefix must be"),
        ({"prefix": 3}, "prefix must be"),
        ({"executor": 3}, "executor must have a method submit"),
        ({"executor": ThreadPoolExecutor(1), "workers": 2}, "goes without workers"),
        ({"fingerprint": 1}, "fingerprint must be a text, got 1"),
        ({"sizes": [1, 2]}, r"sizes must be whole numbers of bytes, 0 or more, shape \[3\], got int64 of shape \[2\]"),
        ({"sizes": [1.0, 2.0, 3.0]}, "sizes must be"),
        ({"sizes": [1, -2, 3]}, "sizes must be"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            write_shards(some(3), tmp_path / "new", n_shards=2, **options)
    with pytest.raises(ValueError, match="samples is empty"):
        write_shards([], tmp_path / "new", n_shards=1)
    with pytest.raises(ValueError, match="directory must be a local one, got 's3://bucket/a'"):
        write_shards(some(3), "s3://bucket/a", n_shards=1)
    assert not (tmp_path / "new").exists()
    assert bounds_of(3, None, ("samples_per_shard", 2)) == [0, 1, 3]


@pytest.mark.parametrize(
    ("samples", "cure"),
    [(dict(some(3)), r"list\(samples"), (dict(enumerate(some(3))), r"list\(samples"), (3, "a list"), (len, "a list")],
)
def test_samples_of_other_kinds_are_refused(tmp_path: Path, samples: Any, cure: str) -> None:
    with pytest.raises(TypeError, match=rf"samples must be something with len\(\).*: give {cure}|len\(\) takes"):
        write_shards(samples, tmp_path / "new", n_shards=1)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("midway", [False, True])
def test_an_executor_that_is_shut_down(tmp_path: Path, midway: bool) -> None:
    executor = ThreadPoolExecutor(1)

    class Samples(list[Any]):
        def __getitem__(self, number: Any) -> Any:
            executor.shutdown(wait=False, cancel_futures=True)
            return super().__getitem__(number)

    if not midway:
        executor.shutdown()
    with pytest.raises(RuntimeError, match=r"after shutdown|executor was shut down.*before all shards were written"):
        write_shards(lambda: Samples(some(9)), tmp_path, n_shards=3, executor=executor)
    assert parts(tmp_path) == []
    assert not (tmp_path / "manifest.json").exists()
    assert write_shards(some(9), tmp_path, n_shards=3).n_samples == 9


@pytest.mark.parametrize("note", [b"\xff\xfe", b"[[1, 2], 3]", b""])
def test_a_plan_that_is_none(tmp_path: Path, note: bytes) -> None:
    (tmp_path / "shard.plan.json").write_bytes(note)
    write_shards(some(4), tmp_path, n_shards=2)
    (tmp_path / "shard.plan.json").write_bytes(note)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(FileExistsError, match=r"another plan, first shard-000000.tar: none is noted"):
        write_shards(some(4), tmp_path, n_shards=2)


# Once more


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


@pytest.mark.parametrize("options", [{"n_shards": 3}, {"n_shards": 4, "prefix": "other"}])
def test_shards_of_another_plan_are_not_touched(tmp_path: Path, options: dict[str, Any]) -> None:
    write_shards(some(40), tmp_path, n_shards=4)
    (tmp_path / "manifest.json").unlink()
    data = contents(tmp_path)
    with pytest.raises(FileExistsError, match=r"beside the [34] shards|shards of another plan"):
        write_shards(some(40), tmp_path, **options)
    assert contents(tmp_path) == data


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


@pytest.mark.parametrize("name", ["other-000000.tar", "shard-000009.tar", "shard-000009.tar.hri"])
def test_a_directory_with_something_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(FileExistsError, match=name):
        write_shards(some(4), tmp_path, n_shards=2)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_shards_of_others_are_not_taken_for_our_own(tmp_path: Path) -> None:
    write_tar(tmp_path / "shard-000000.tar", some(2))
    with pytest.raises(FileExistsError, match=r"1 shards of another plan.*none is noted"):
        write_shards(some(4), tmp_path, n_shards=2)
    index_shards(tmp_path)
    with pytest.raises(FileExistsError, match=r"holds a finished set.*fingerprint=.*overwrite=True"):
        write_shards(some(4), tmp_path, n_shards=2)


# A finished set


def test_a_finished_set_needs_a_fingerprint_or_overwrite(tmp_path: Path) -> None:
    before = write_shards(some(40), tmp_path, n_shards=4)
    data = contents(tmp_path)
    for samples in (some(40), iter(some(40))):
        with pytest.raises(FileExistsError, match=r"holds a finished set.*fingerprint=.*overwrite=True"):
            write_shards(samples, tmp_path, samples_per_shard=10)
    assert contents(tmp_path) == data
    changed = [*some(40)[:15], ("s0015", {"txt": b"changed"}), *some(40)[16:]]
    after = write_shards(changed, tmp_path, n_shards=4, overwrite=True)
    assert after != before
    assert [sample for path in tars(tmp_path) for sample in by_webdataset(path)] == changed
    assert verify_shards(tmp_path) == []


def test_the_same_fingerprint_is_nothing_to_do_and_another_one_writes_anew(tmp_path: Path) -> None:
    class Unread(list[Any]):
        def __getitem__(self, number: Any) -> Any:
            raise AssertionError("no sample is to be read")

    manifest = write_shards(some(40), tmp_path, n_shards=4, fingerprint="v1")
    before, data = inodes(tmp_path), contents(tmp_path)
    unread = Unread(some(40))
    assert write_shards(lambda: unread, tmp_path, n_shards=4, fingerprint="v1") == manifest
    assert (inodes(tmp_path), contents(tmp_path)) == (before, data)
    changed = [(key, {**sample, "txt": b"v2"}) for key, sample in some(30)]
    write_shards(changed, tmp_path, n_shards=2, fingerprint="v2")
    assert [path.name for path in tars(tmp_path)] == ["shard-000000.tar", "shard-000001.tar"]
    assert [sample for path in tars(tmp_path) for sample in by_webdataset(path)] == changed
    assert verify_shards(tmp_path) == []


def test_a_set_that_is_written_anew_and_stopped_is_not_taken_for_one(tmp_path: Path) -> None:
    write_shards(some(40), tmp_path, n_shards=4, fingerprint="v1")
    with pytest.raises(ShardError, match="failed to read sample 20"):
        write_shards(lambda: Failing(some(40)), tmp_path, n_shards=4, workers=1, fingerprint="v2")
    for use in (IndexedShards, index_shards):
        with pytest.raises(ManifestError, match="a write was stopped at 2 of 4 shards"):
            use(tmp_path)
    assert write_shards(some(40), tmp_path, n_shards=4, fingerprint="v2").n_samples == 40
    assert verify_shards(tmp_path) == []


class Failing(list[Any]):
    def __getitem__(self, number: Any) -> Any:
        if number == 20:
            raise RuntimeError("no such luck")
        return super().__getitem__(number)


# Generators


@settings(max_examples=30)
@given(SAMPLES, st.sampled_from([{"samples_per_shard": 3}, {"samples_per_shard": 100}, {"bytes_per_shard": 12_000}]))
def test_a_generator_is_written_as_it_comes(samples: Samples, size: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as root:
        manifest = write_shards(iter(samples), root, **size, columns={"n": range(len(samples))})
        folder = Path(root)
        assert manifest == Manifest.load(root)
        assert verify_shards(root) == []
        members = [(f"{key}.{suffix}", data) for key, sample in samples for suffix, data in sample.items()]
        assert [member for path in tars(folder) for member in by_tarfile(path)] == members
        counts = [shard.samples for shard in manifest.shards]
        if "samples_per_shard" in size:
            assert counts[:-1] == [size["samples_per_shard"]] * (len(counts) - 1)
        assert all(path.stat().st_size <= 20_480 or n == 1 for path, n in zip(tars(folder), counts, strict=True)) or (
            "samples_per_shard" in size
        )
        assert not list(folder.glob(".*"))


def test_what_a_generator_may_not_be_given(tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [{"n_shards": 2}, {"samples_per_shard": 2, "workers": 2}]
    for options in [*wrong, {"samples_per_shard": 2, "sizes": [1]}]:
        with pytest.raises(ValueError, match=r"samples without len\(\) are written in this process as they come"):
            write_shards(iter(some(9)), tmp_path / "new", **options)
    with pytest.raises(ValueError, match="samples is empty"):
        write_shards(iter([]), tmp_path / "empty", samples_per_shard=2)
    with pytest.raises(ShardError, match="'s0001' occurs twice"):
        write_shards(iter([*some(3), some(2)[1]]), tmp_path / "twice", samples_per_shard=2)
    with pytest.raises(ValueError, match=r"columns\['n'\] must be"):
        write_shards(iter(some(9)), tmp_path / "columns", samples_per_shard=2, columns={"n": [1]})
    for name in ("empty", "twice", "columns"):
        assert not (tmp_path / name / "manifest.json").exists()


def test_a_generator_that_fails_leaves_a_write_that_was_stopped(tmp_path: Path) -> None:
    def failing() -> Iterator[Any]:
        yield from some(25)
        raise RuntimeError("no such luck")

    for _ in range(2):
        with pytest.raises(ShardError, match=r"failed to read sample 25: RuntimeError: no such luck"):
            write_shards(failing(), tmp_path, samples_per_shard=10)
        assert (len(tars(tmp_path)), parts(tmp_path)) == (2, [])
        with pytest.raises(ManifestError, match="a write was stopped at 2 of"):
            index_shards(tmp_path)
    with pytest.raises(FileExistsError, match="shards of another plan"):
        write_shards(iter(some(30)), tmp_path, samples_per_shard=7)
    assert write_shards(lambda: iter(some(30)), tmp_path, samples_per_shard=10).n_samples == 30
    assert verify_shards(tmp_path) == []


def test_a_generator_of_the_same_fingerprint_is_not_read(tmp_path: Path) -> None:
    manifest = write_shards(iter(some(9)), tmp_path, samples_per_shard=2, fingerprint="v1")
    read = iter(some(9))
    assert write_shards(read, tmp_path, samples_per_shard=2, fingerprint="v1") == manifest
    assert next(read)[0] == "s0000"
    assert write_shards(iter(some(5)), tmp_path, samples_per_shard=2, fingerprint="v2").n_samples == 5
    assert len(tars(tmp_path)) == 3
    assert verify_shards(tmp_path) == []


def test_a_generator_of_the_same_fingerprint_still_gets_its_columns(tmp_path: Path) -> None:
    write_shards(iter(some(5)), tmp_path, samples_per_shard=2, fingerprint="v1", columns={"old": range(5)})
    read = iter(some(5))
    manifest = write_shards(read, tmp_path, samples_per_shard=2, fingerprint="v1", columns={"new": range(5, 10)})
    assert next(read)[0] == "s0000"
    assert [column.name for column in manifest.columns] == ["old", "new"]
    assert open_column(tmp_path, manifest, "new").tolist() == [5, 6, 7, 8, 9]
    with pytest.raises(ValueError, match=r"columns\['n'\] must be"):
        write_shards(read, tmp_path, samples_per_shard=2, fingerprint="v1", columns={"n": [1]})
    assert verify_shards(tmp_path) == []


def test_a_generator_of_the_same_fingerprint_is_read_where_a_shard_is_missing(tmp_path: Path) -> None:
    manifest = write_shards(iter(some(5)), tmp_path, samples_per_shard=2, fingerprint="v1")
    tars(tmp_path)[1].unlink()
    assert write_shards(iter(some(5)), tmp_path, samples_per_shard=2, fingerprint="v1") == manifest
    assert verify_shards(tmp_path) == []


@pytest.mark.parametrize("size", [{"samples_per_shard": 5}, {"bytes_per_shard": 10**6}])
@pytest.mark.parametrize("sample", [("b", 7), ("b", None), (7, {"txt": b"1"})])
def test_a_generator_of_something_else_is_named(tmp_path: Path, size: dict[str, Any], sample: Any) -> None:
    with pytest.raises(ShardError, match=r"a sample must be a pair of a text and \{member key: bytes\}, got"):
        write_shards(iter([*some(1), sample]), tmp_path, **size)


# Parts


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


def test_a_part_that_was_removed_stops_its_writer(tmp_path: Path) -> None:
    dead = tmp_path / ".shard-000001.tar.hri.aa-bb.part"
    others = [tmp_path / ".shard-x-000001.tar.aa-bb.part", tmp_path / ".shard-000001.tar.xyz-bb.part", tmp_path / "b"]
    for path in [dead, *others]:
        path.touch()
    with StagedFile(tmp_path / "shard-000000.tar", "cc") as part:
        part.write(b"1")
        remove_parts(tmp_path, "shard", "dd")
        part.write(b"2")
        remove_parts(tmp_path, "shard")
        with pytest.raises(StoppedError):
            part.write(b"3")
        with pytest.raises(StoppedError):
            part.publish()
    assert sorted(tmp_path.iterdir()) == sorted(others)


# Several writers


def test_writers_of_one_set_write_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made: list[Manifest] = []

    def write() -> None:
        made.append(write_shards(some(300, 5000), tmp_path, n_shards=20, workers=1, fingerprint="1"))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [Manifest.load(tmp_path)] * 4
    assert verify_shards(tmp_path) == []
    assert all(fitting_index(path) for path in tars(tmp_path))
    assert not list(tmp_path.glob(".*"))
    assert "another process is writing" in caplog.text


def test_writers_of_different_sets_do_not_mix_them(tmp_path: Path) -> None:
    options: dict[str, Any] = {"delay": 0.002, "workers": 1, "n_shards": 5, "fingerprint": ""}
    with group(tmp_path, **options) as first:
        begun(tmp_path)
        other = script(tmp_path, workers=1, n_shards=4, fingerprint="")
        assert (other.returncode, first.wait(timeout=60)) == (1, 0)
    assert "FileExistsError" in other.stderr.splitlines()[-1]
    assert len(tars(tmp_path)) == 5
    assert verify_shards(tmp_path) == []


def test_a_lock_of_a_killed_writer_is_no_obstacle(tmp_path: Path) -> None:
    with group(tmp_path, delay=0.01, workers=1) as process:
        begun(tmp_path)
        process.kill()
        assert process.wait(timeout=60) == -signal.SIGKILL
    assert (tmp_path / ".headrace.lock").exists()
    check_whole(tmp_path)
    assert not list(tmp_path.glob(".*"))


def mounted(below: Path) -> list[str]:
    """Where something is mounted below a folder."""
    table = Path("/proc/self/mounts")
    places = [line.split()[1] for line in table.read_text().splitlines()] if table.exists() else []
    return [place for place in places if Path(place).is_relative_to(below)]


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield
    assert mounted(tmp_path_factory.getbasetemp()) == []


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    view = tmp_path / "read-only"
    view.mkdir()

    def mount(folder: Path) -> Path:
        for words in (["--bind", str(folder), str(view)], ["-o", "remount,ro,bind", str(view)]):
            if not shutil.which("mount") or subprocess.run(["mount", *words], check=False).returncode:
                pytest.skip("nothing can be mounted here")
        return view

    yield mount
    if mounted(view):  # `is_mount` does not see what is bound to a folder of the same disk
        subprocess.run(["umount", str(view)], check=True)


def test_what_is_complete_need_not_be_writable(tmp_path: Path, read_only: Callable[[Path], Path]) -> None:
    manifest = write_shards(some(20), tmp_path / "out", n_shards=2, workers=1, fingerprint="1")
    view = read_only(tmp_path / "out")
    assert write_shards(some(20), view, n_shards=2, workers=1, fingerprint="1") == manifest
    tars(tmp_path / "out")[1].unlink()
    with pytest.raises(OSError, match=r"Read-only file system: the shard was not written.*shard-000001") as caught:
        write_shards(some(20), view, n_shards=2, workers=1, fingerprint="1")
    assert caught.value.errno == errno.EROFS


# Trouble in processes of their own


def command(folder: Path, **options: Any) -> list[str]:
    return [sys.executable, str(SCRIPT), str(folder), json.dumps(options)]


def script(folder: Path, **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(folder, **options), capture_output=True, text=True, check=False, timeout=120)


def check_whole(folder: Path, **options: Any) -> None:
    """What has its final name is whole, and nothing else is there; then a rerun completes it."""
    assert not (folder / "manifest.json").exists() or verify_shards(folder) == []
    for path in tars(folder):
        build_index(path.read_bytes())
    clean = {key: value for key, value in options.items() if key in ("count", "nbytes", "n_shards")}
    kept = inodes(folder) if folder.exists() else {}
    kept = {name: inode for name, inode in kept.items() if (folder / f"{name}.hri").exists()}
    done = script(folder, workers=1, **clean)
    assert (done.returncode, done.stdout.strip()) == (0, str(clean.get("count", 100))), done.stderr
    assert kept.items() <= inodes(folder).items()
    assert verify_shards(folder) == []
    assert parts(folder) == []


@contextlib.contextmanager
def group(folder: Path, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """Run the script in a process group of its own, of which nobody is left at the end."""
    words = command(folder, **options)
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, process_group=0)
    try:
        yield process
        process.wait(timeout=60)
        for _ in range(200):
            if not living(process.pid):
                break
            time.sleep(0.05)
        assert living(process.pid) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.stderr:
            process.stderr.close()


def living(group_id: int) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            state, _, of_group = rest.split()[:3]
            if int(of_group) == group_id and state != "Z":
                found.append(name)
    return found


def begun(folder: Path) -> None:
    for _ in range(600):
        if folder.exists() and parts(folder):
            return
        time.sleep(0.02)
    raise AssertionError("nothing was written")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        (
            "raise",
            r"failed to read sample 60: RuntimeError: no such luck .*shard-000002.tar', sample 'number 60'",
        ),
        ("unpicklable error", "failed to read sample 60: OddError: odd"),
        ("eio", r"OSError: \[Errno 5\] Input/output error"),
    ],
)
def test_an_error_in_a_sample_stops_all(tmp_path: Path, trouble: str, message: str, workers: int) -> None:
    options = {"trouble": {60: trouble}, "delay": 0.002, "workers": workers}
    with group(tmp_path, **options) as process:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1
    assert re.search(message, said), said
    assert parts(tmp_path) == []
    check_whole(tmp_path)


def test_a_process_that_ends_is_loud(tmp_path: Path) -> None:
    with group(tmp_path, trouble={"60": "exit"}, delay=0.002, workers=2) as process:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1
    assert "BrokenProcessPool: a process that wrote shards ended: it was killed" in said
    assert parts(tmp_path) == []
    check_whole(tmp_path)


def test_a_main_module_that_is_not_guarded_is_named(tmp_path: Path) -> None:
    text = SCRIPT.read_text().replace('if __name__ == "__main__":', "if True:")
    (tmp_path / "unguarded.py").write_text(text)
    words = [sys.executable, str(tmp_path / "unguarded.py"), str(tmp_path / "out"), '{"workers": 2}']
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "put what starts the work under `if __name__ == '__main__':`" in done.stderr
    assert tars(tmp_path / "out") == []


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_stops_all(tmp_path: Path, workers: int) -> None:
    with group(tmp_path, delay=0.02, workers=workers) as process:
        begun(tmp_path)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode in (-signal.SIGINT, 130)
    assert "KeyboardInterrupt" in said
    assert said.count("Traceback") == 1
    assert parts(tmp_path) == []
    check_whole(tmp_path)


def kill_nine(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    workers = draw.choice([1, 2])
    options = {"delay": 0.0005, "workers": workers, "count": 400, "n_shards": 16, "nbytes": 20_000}
    with group(folder, **options) as process:
        begun(folder)
        time.sleep(draw.uniform(0, 0.4 / workers))
        process.kill()
        assert process.wait(timeout=60) in (-signal.SIGKILL, 0)
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
        assert process.wait(timeout=60) in (-signal.SIGKILL, 0)
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


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("nbytes", [1000, 3_000_000])
def test_a_file_that_may_not_grow_is_loud(tmp_path: Path, workers: int, nbytes: int) -> None:
    options: dict[str, Any] = {"count": 8, "nbytes": nbytes, "n_shards": 2} if nbytes > 1000 else {}
    done = script(tmp_path, workers=workers, fsize=nbytes * 2 + 7, **options)
    assert done.returncode == 1
    assert f"OSError: [Errno {errno.EFBIG}] File too large: the shard was not written" in done.stderr
    assert "shard-00000" in done.stderr.splitlines()[-1]
    assert (tars(tmp_path), parts(tmp_path)) == ([], [])
    check_whole(tmp_path, **options)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_loud_and_what_is_whole_stays(small_disk: Path, workers: int) -> None:
    done = script(small_disk, workers=workers, nbytes=4000)
    assert done.returncode == 1
    assert f"[Errno {errno.ENOSPC}] No space left on device: the shard was not written" in done.stderr
    assert parts(small_disk) == []
    assert len(tars(small_disk)) < 4
    subprocess.run(["mount", "-o", "remount,size=3m", str(small_disk)], check=True)
    check_whole(small_disk, nbytes=4000)


@pytest.mark.parametrize(
    ("options", "where"), [({"files": 0}, "test_no_more"), ({"trouble": {"60": "hog"}}, "shard-000002")]
)
def test_no_more_file_descriptors_is_loud(tmp_path: Path, options: dict[str, Any], where: str) -> None:
    done = script(tmp_path, workers=1, **options)
    assert done.returncode == 1
    assert f"[Errno {errno.EMFILE}]" in done.stderr
    assert where in done.stderr.splitlines()[-1]
    assert parts(tmp_path) == []
    check_whole(tmp_path)


def test_a_disk_that_fails_is_loud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(some(20), tmp_path / "a", n_shards=1)
    folder, calls = tmp_path / "b", list[int]()

    def fail(descriptor: int) -> None:  # no disk that fails can be had here
        calls.append(descriptor)
        if len(calls) == 5:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"Input/output error: the shard was not written.*shard-00000") as caught:
        write_shards(some(20), folder, n_shards=4, workers=1)
    assert caught.value.errno == errno.EIO
    assert parts(folder) == []
    assert not (folder / "manifest.json").exists()
    monkeypatch.undo()
    write_shards(some(20), folder, n_shards=4, workers=1)
    assert verify_shards(folder) == []


@pytest.fixture
def disk_order(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What was brought to the disk, and what got its name, in the order in which that ended."""
    order, fsync, replace = list[tuple[str, str]](), os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        fsync(descriptor)
        order.append(("fsync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))

    def note_replace(source: Any, target: Any) -> None:
        order.append(("name", str(target)))
        order[order.index(("fsync", str(source)))] = ("fsync", str(target))  # whatever it was called then
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    return order


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's list of open files")
@pytest.mark.parametrize("stream", [False, True])
def test_a_name_follows_its_bytes_to_the_disk_and_the_manifest_follows_all_names(
    tmp_path: Path, stream: bool, disk_order: list[tuple[str, str]]
) -> None:
    samples = some(100)
    write_shards(iter(samples) if stream else samples, tmp_path, samples_per_shard=1, columns={"n": range(100)})
    names = [name for what, name in disk_order if what == "name"]
    assert {Path(name).name for name in names} == {path.name for path in tmp_path.iterdir()}
    for name in names:
        assert disk_order.index(("fsync", name)) < disk_order.index(("name", name))
    assert names[-1] == str(tmp_path / "manifest.json")
    shards = [name for name in names if name.endswith((".tar", ".hri"))]
    assert len(shards) == 200
    last, manifest = (disk_order.index(("name", name)) for name in (shards[-1], names[-1]))
    assert ("fsync", str(tmp_path)) in disk_order[last:manifest]
    assert disk_order[-1] == ("fsync", str(tmp_path))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's list of open files")
@pytest.mark.parametrize("stream", [False, True])
def test_the_directory_is_brought_to_the_disk_once_for_all_shards(
    tmp_path: Path, stream: bool, disk_order: list[tuple[str, str]]
) -> None:
    counts = []
    for number in (10, 100):
        folder = tmp_path / str(number)
        write_shards(iter(some(number)) if stream else some(number), folder, samples_per_shard=1)
        counts.append(disk_order.count(("fsync", str(folder))))
        assert len(list(folder.glob("*.tar"))) == number
    assert counts[0] == counts[1]
    assert sum(what == "name" and name.endswith("plan.json") for what, name in disk_order) <= 4  # twice a write


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's list of open files")
def test_the_directory_is_brought_to_the_disk_once_for_all_indexes(
    tmp_path: Path, disk_order: list[tuple[str, str]]
) -> None:
    for number, (key, sample) in enumerate(some(50)):
        write_tar(tmp_path / f"{number:02d}.tar", [(key, sample)])
    del disk_order[:]
    index_shards(tmp_path)
    names = [name for what, name in disk_order if what == "name"]
    assert len(names) == 52
    for name in names:
        assert disk_order.index(("fsync", name)) < disk_order.index(("name", name))
    indexes = disk_order.index(("name", [name for name in names if name.endswith(".hri")][-1]))
    assert ("fsync", str(tmp_path)) not in disk_order[:indexes]
    manifest = disk_order.index(("name", str(tmp_path / "manifest.json")))
    assert ("fsync", str(tmp_path)) in disk_order[indexes:manifest]
    assert disk_order[-1] == ("fsync", str(tmp_path))


def test_what_was_finished_before_an_error_gets_its_name(tmp_path: Path) -> None:
    class Failing(list[Any]):
        def __getitem__(self, number: Any) -> Any:
            if number == 29:
                raise RuntimeError("no such luck")
            return super().__getitem__(number)

    for samples in (lambda: Failing(some(40)), (Failing(some(40))[number] for number in range(40))):
        folder = tmp_path / str(callable(samples))
        with pytest.raises(ShardError, match="failed to read sample 29"):
            write_shards(samples, folder, samples_per_shard=1, workers=1)
        assert len(tars(folder)) == (29 if callable(samples) else 28)  # the last one of a stream may not be full
        assert parts(folder) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bar_counts_samples_on_a_terminal(tmp_path: Path, workers: int) -> None:
    main, other = pty.openpty()
    termios.tcsetwinsize(other, (24, 80))
    words = command(tmp_path, workers=workers)
    process = subprocess.Popen(words, stderr=other, stdout=subprocess.DEVNULL)
    os.close(other)
    said, deadline = b"", time.monotonic() + 120
    try:
        with contextlib.suppress(OSError):  # the other end was closed
            while select.select([main], [], [], max(0, deadline - time.monotonic()))[0]:
                said += os.read(main, 4096)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        os.close(main)
    assert b"100/100" in said
    assert b"sample/s" in said
