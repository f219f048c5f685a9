"""`write_shards`: what is written, what is refused, generators and several writers."""

import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_tar import made_by_tarfile
from written_sets import Samples, begun, by_webdataset, group, parts, script, some, tars

from headrace.webdatamodule import (
    IndexedShards,
    Manifest,
    ManifestError,
    ShardError,
    index_shards,
    open_column,
    verify_shards,
    write_shards,
)
from headrace.webdatamodule.shards.format.tar import MOST_MEMBER_BYTES, ustar_headers
from headrace.webdatamodule.shards.index.build import build_index, fitting_index
from headrace.webdatamodule.shards.writing.plan import bounds_of

pytestmark = pytest.mark.slow


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="./\0"), min_size=1, max_size=12)

KEY = st.lists(TEXT, min_size=1, max_size=3).map("/".join).filter(lambda key: not key.startswith("__"))

SUFFIX = TEXT.filter(lambda suffix: suffix.lower() not in ("__key__", "__url__", "__local_path__"))

MEMBERS = st.dictionaries(SUFFIX, st.binary(max_size=1200), min_size=1, max_size=3).filter(
    lambda members: len({suffix.lower() for suffix in members}) == len(members)
)

SAMPLES = st.dictionaries(KEY, MEMBERS, min_size=1, max_size=12).map(lambda made: list(made.items()))


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
        (("k" * 100, {"x": b""}), r"name of 102 bytes is too long.*100 bytes"),
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
    assert ustar_headers([b"a"], [MOST_MEMBER_BYTES])[0][124:136] == b"77777777777\0"


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
    with pytest.raises(FileExistsError, match=r"shards? of another plan"):
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
        assert (other.returncode, first.wait()) == (1, 0)
    assert "FileExistsError" in other.stderr.splitlines()[-1]
    assert len(tars(tmp_path)) == 5
    assert verify_shards(tmp_path) == []
