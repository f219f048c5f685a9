"""Which samples go to which shard, and whose shards are replaced."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run
from hypothesis import given
from hypothesis import strategies as st
from plain_tar import write_tar
from written_sets import by_webdataset, contents, inodes, some, tars

from headrace.webdatamodule import (
    IndexedShards,
    Manifest,
    ManifestError,
    ShardError,
    index_shards,
    verify_shards,
    write_shards,
)
from headrace.webdatamodule.shards.format.tar import tar_end
from headrace.webdatamodule.shards.writing.plan import (
    bounds_by_bytes,
    bounds_of,
    shard_bounds,
    shard_paths,
    shards_of_prefix,
)
from headrace.webdatamodule.utils import pickles_to_tars

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize(
    "size", [{}, {"n_shards": 0}, {"n_shards": 4}, {"n_shards": 1, "samples_per_shard": 1}, {"bytes_per_shard": 1.5}]
)
def test_sizes_of_shards_that_are_not_allowed(tmp_path: Path, size: dict[str, Any]) -> None:
    kind = TypeError if size.get("bytes_per_shard") == 1.5 else ValueError
    with pytest.raises(kind, match=r"n_shards|bytes_per_shard must be an int >= 1, got 1.5"):
        write_shards(some(3), tmp_path / "new", **size)
    assert not (tmp_path / "new").exists()


class Keyed(list[tuple[str, dict[str, bytes]]]):
    def keys(self) -> list[str]:
        return [key for key, _ in self]


LONG = "k" * 101


@pytest.mark.parametrize("key", [LONG, "k" * 99, f"{'d' * 156}/{'k' * 90}", f"{'d' * 90}/{LONG}"])
def test_names_that_no_header_holds_are_refused_before_anything_is_written(tmp_path: Path, key: str) -> None:
    samples, out = [*some(30), (key, {"bin": b""})], tmp_path / "out"
    writers: dict[str, Callable[[], object]] = {
        "keys()": lambda: write_shards(Keyed(samples), out, n_shards=3, workers=1),
        "measured": lambda: write_shards(samples, out, bytes_per_shard=20_000, workers=1),
        "measured for packs": lambda: write_shards(samples, out, bytes_per_shard=20_000, bytes_per_pack=9, workers=1),
    }
    for writer in writers.values():
        with pytest.raises(ShardError, match=r"name of .*100 bytes \(255 with directories\): shorten") as caught:
            writer()
        assert caught.value.sample == key
        assert not out.exists()


@pytest.mark.parametrize("member", ["m" * 97, "x.TXT", "__url__", "hrpack"])
def test_members_that_no_reader_would_give_back_are_refused_before_anything_is_written(
    tmp_path: Path, member: str
) -> None:
    samples = [*some(30), ("last", {"txt": b"", "x.txt": b"", member: b""})]
    with pytest.raises(ShardError, match=r"100 bytes|cannot be stored|readers use"):
        write_shards(samples, tmp_path / "out", bytes_per_shard=20_000, workers=1)
    source = tmp_path / "in"
    source.mkdir()
    for key, members in samples:
        for name, data in members.items():
            (source / f"{key}.{name}").write_bytes(data)
    suffixes = ["txt", "x.txt", member]
    with pytest.raises(ShardError, match=r"100 bytes|cannot be stored|readers use"):
        pickles_to_tars(source, ["last"], suffixes, tmp_path / "out", "p")
    assert not (tmp_path / "out").exists()
    done = run("pack", source, tmp_path / "out", "--n-shards", "3")
    assert done.returncode == 2
    assert b"(shard" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_shards_without_a_plan_are_not_touched(tmp_path: Path) -> None:
    write_shards(some(4), tmp_path, n_shards=2)
    (tmp_path / "shard.plan.json").unlink()
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(FileExistsError, match=r"another plan, first shard-000000.tar: none is noted"):
        write_shards(some(4), tmp_path, n_shards=2)


@pytest.mark.parametrize("options", [{"n_shards": 3}, {"n_shards": 4, "prefix": "other"}])
def test_shards_of_another_plan_are_not_touched(tmp_path: Path, options: dict[str, Any]) -> None:
    write_shards(some(40), tmp_path, n_shards=4)
    (tmp_path / "manifest.json").unlink()
    data = contents(tmp_path)
    with pytest.raises(FileExistsError, match=r"beside the [34] shards|shards? of another plan"):
        write_shards(some(40), tmp_path, **options)
    assert contents(tmp_path) == data


@pytest.mark.parametrize("name", ["other-000000.tar", "shard-000009.tar", "shard-000009.tar.hri"])
def test_a_directory_with_something_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(FileExistsError, match=name):
        write_shards(some(4), tmp_path, n_shards=2)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_shards_of_others_are_not_taken_for_our_own(tmp_path: Path) -> None:
    write_tar(tmp_path / "shard-000000.tar", some(2))
    with pytest.raises(FileExistsError, match=r"1 shard of another plan.*none is noted"):
        write_shards(some(4), tmp_path, n_shards=2)
    index_shards(tmp_path)
    with pytest.raises(FileExistsError, match=r"finished set.*another directory.*overwrite=.*fingerprint="):
        write_shards(some(4), tmp_path, n_shards=2)


def test_a_finished_set_needs_a_fingerprint_or_overwrite(tmp_path: Path) -> None:
    before = write_shards(some(40), tmp_path, n_shards=4)
    data = contents(tmp_path)
    for samples in (some(40), iter(some(40))):
        with pytest.raises(FileExistsError, match=r"finished set.*another directory.*overwrite=.*fingerprint="):
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


@given(st.integers(1, 300), st.data())
def test_bounds_cover_all_samples_in_even_shares(n_samples: int, data: st.DataObject) -> None:
    n_shards = data.draw(st.integers(1, n_samples))
    bounds = shard_bounds(n_samples, n_shards)
    shares = [b - a for a, b in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(shares)) == (0, n_samples, n_shards)
    assert min(shares) >= 1
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("prefix", ["", ".a", "a/b", "..", "a\\b", "a\0"])
def test_a_prefix_is_a_plain_name(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix must be"):
        shard_paths(tmp_path, prefix, 1)


def test_a_prefix_is_taken_literally(tmp_path: Path) -> None:
    (tmp_path / "ab-000000.tar").touch()
    assert shards_of_prefix(tmp_path, "a[b]") == []
    assert shards_of_prefix(tmp_path, "a*") == []
    assert len(shards_of_prefix(tmp_path, "ab")) == 1


def test_bounds_of_known_sets() -> None:
    assert bounds_of(5, None, ("samples_per_shard", 2)) == [0, 1, 3, 5]
    assert bounds_by_bytes(np.array([4096, 4096, 4096, 20480, 512]), 10240) == [0, 2, 3, 4, 5]
    assert shard_bounds(10, 4) == [0, 2, 5, 7, 10]
