"""Batches over a WebDataset pipeline, from real tar files and through real workers."""

import gc
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from torch.utils.data import DataLoader

from headrace.size_aware_batching import BucketedBatching, PaddedCollate

BUDGET = 300
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset closes no shard itself


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Lets go of the open shards before another test would be blamed for them."""
    yield
    gc.collect()


def length_of(sample: dict[str, Any]) -> int:
    return len(sample["tokens"])


def unpacked(sample: dict[str, Any]) -> dict[str, Any]:
    return {"key": sample["__key__"], "tokens": list(sample["txt"])}


def stage() -> BucketedBatching:
    return BucketedBatching(length_of, BUDGET, buffer_size=20, collate_fn=PaddedCollate(return_lengths=True))


def keys_of(batches: Any) -> list[str]:
    keys: list[str] = []
    for batch in batches:
        assert batch["tokens"].numel() <= BUDGET
        for row, length, key in zip(batch["tokens"], batch["lengths"], batch["key"], strict=True):
            assert row[:length].tolist() == list(key.encode() * int(length))[: int(length)]
        keys += batch["key"]
    return keys


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Four shards of 25 samples; sample i is its own key, repeated until it has i + 1 bytes."""
    for shard in range(4):
        with (tmp_path / f"{shard}.tar").open("wb") as file, wds.TarWriter(file, mtime=0) as writer:
            for number in range(25 * shard, 25 * (shard + 1)):
                key = f"{number:04}"
                writer.write({"__key__": key, "txt": (key.encode() * (number + 1))[: number + 1]})
    return [str(path) for path in sorted(tmp_path.glob("*.tar"))]


def pipeline(shards: list[str], **options: Any) -> Any:
    return wds.WebDataset(shards, shardshuffle=False, **options).map(unpacked)


EVERY = [f"{number:04}" for number in range(100)]


def test_as_a_stage_of_a_pipeline(shards: list[str]) -> None:
    dataset = pipeline(shards).compose(stage())
    first = keys_of(dataset)
    assert sorted(first) == EVERY
    assert first != EVERY
    assert keys_of(dataset) == first  # a stage keeps nothing from one epoch to the next


def test_through_workers(shards: list[str]) -> None:
    dataset = pipeline(shards).compose(pickle.loads(pickle.dumps(stage())))
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    assert sorted(keys_of(loader)) == EVERY


def test_a_pipeline_without_an_end(shards: list[str]) -> None:
    loader = wds.WebLoader(pipeline(shards, resampled=True).compose(stage()), batch_size=None, num_workers=0)
    keys = keys_of(itertools.islice(loader, 200))
    assert len(keys) > 500
    assert set(keys) == set(EVERY)
