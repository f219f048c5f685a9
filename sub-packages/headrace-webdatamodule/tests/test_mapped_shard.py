"""A shard that differs from its index in the bytes that are compared on opening."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.webdatamodule import (
    DamagedSampleWarning,
    IndexedShards,
    ResumableLoader,
    ShardIndex,
    StaleIndexError,
    index_shards,
    write_tars,
)

COUNT = 40


def samples(seed: int, count: int = COUNT) -> list[tuple[str, dict[str, bytes]]]:
    noise = np.random.default_rng(seed)
    return [(f"s{i:02d}", {"npy": noise.bytes(700), "cls": b"1"}) for i in range(count)]


def made(folder: Path, seed: int = 0, count: int = COUNT) -> Path:
    [path] = write_tars(samples(seed, count), folder, n_shards=1)
    index_shards(folder)
    return path


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def data_of(path: Path, sample: int) -> int:
    index = ShardIndex.open(path)
    return int(index.offsets[index.span(sample)[0]])


@pytest.mark.parametrize("sample", [0, COUNT // 2, COUNT - 1])
def test_damage_where_opening_looks_costs_that_sample_only(tmp_path: Path, sample: int) -> None:
    path = made(tmp_path)
    flip(path, data_of(path, sample) + 5)
    dataset = IndexedShards(tmp_path, decode=None)
    whole = dict(samples(0))
    for number in range(COUNT):
        if number != sample:
            assert dataset[number]["npy"] == whole[f"s{number:02d}"]["npy"]
    with pytest.raises(StaleIndexError, match=r"other content.*call verify_shards") as caught:
        dataset[sample]
    assert caught.value.shard == str(path)


def test_skipping_leaves_out_that_sample_only(tmp_path: Path) -> None:
    path = made(tmp_path)
    flip(path, data_of(path, 10) + 5)
    data = IndexedShards(tmp_path, decode=None)
    batches = [list(range(at, at + 10)) for at in range(0, COUNT, 10)]
    loader: Any = ResumableLoader(
        data, batches, on_error="skip", collate_fn=lambda batch: [one["__key__"] for one in batch]
    )
    with pytest.warns(DamagedSampleWarning, match="'s10'"):
        assert [key for batch in loader for key in batch] == [f"s{i:02d}" for i in range(COUNT) if i != 10]


@pytest.mark.parametrize("count", [1, 2, COUNT])
def test_another_shard_of_the_same_names_and_sizes_is_loud(tmp_path: Path, count: int) -> None:
    path, other = made(tmp_path / "a", 0, count), made(tmp_path / "b", 1, count)
    assert path.stat().st_size == other.stat().st_size
    path.write_bytes(other.read_bytes())
    told = "call verify_shards, which names the damage.*index it again only if you changed it on purpose"
    with pytest.raises(StaleIndexError, match=told):
        IndexedShards(tmp_path / "a", decode=None)[count - 1]


@pytest.mark.parametrize("check", ["open", "none"])
def test_damage_passes_only_where_reads_are_verified(tmp_path: Path, check: Any) -> None:
    path = made(tmp_path)
    flip(path, data_of(path, 0) + 5)
    with pytest.raises(StaleIndexError, match="other content"):
        IndexedShards(tmp_path, decode=None, verify=check)[3]
