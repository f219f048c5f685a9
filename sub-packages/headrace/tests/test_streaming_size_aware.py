"""Size-aware batches inside a streaming WebDataModule, with equally many steps on all ranks."""

import functools
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds

from headrace.size_aware_batching import BucketedBatching, size_aware_batching
from headrace.webdatamodule import IndexedShards, Split, WebDataModule, index_shards, write_tars

N, BUDGET, WORLD = 200, 100, 2


def length(sample: tuple[bytes]) -> int:
    return len(sample[0])


STAGES = {
    "in order": functools.partial(size_aware_batching, sizeof=length, max_total_size=BUDGET),
    "bucketed": BucketedBatching(length, BUDGET, cost="sum", buffer_size=50),
    "padded": BucketedBatching(length, BUDGET, buffer_size=50),
}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Samples of 1 to 37 bytes, in shards that hold unequally many."""
    texts = [b"%c" % (65 + i % 26) * (1 + 17 * i % 37) for i in range(N)]
    write_tars([(f"s{i:03}", {"txt.bin": text}) for i, text in enumerate(texts)], tmp_path, n_shards=3)
    index_shards(tmp_path)
    return tmp_path


def module(shards: Path, stage: str, steps: int, workers: int, *, inside: bool = False, **ranks: Any) -> WebDataModule:
    where: Any = {"pipeline_wds" if inside else "pipeline_prebatch_wld": {Split.train: STAGES[stage]}}
    return WebDataModule(
        {Split.train: steps},  # the epoch is counted in steps ...
        "txt.bin",
        {Split.train: shards},
        1,  # ... of one batch on each rank
        **where,
        kwargs_wds={Split.train: {"shardshuffle": True}},
        kwargs_wld={Split.train: {"num_workers": workers, "collate_fn": as_it_is}},
        invoke_wds={Split.train: [("repeat", {})]},  # samples never run out before the last step
        **ranks,
    )


def as_it_is(batch: object) -> object:
    return batch


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_equal_steps_within_the_budget(shards: Path, stage: str, workers: int, inside: bool) -> None:
    steps = int(IndexedShards(shards).sizes("txt.bin").sum()) // (BUDGET * WORLD)
    cost_of = {"in order": sum, "bucketed": sum, "padded": lambda lengths: len(lengths) * max(lengths)}
    seen = []
    for rank in range(WORLD):
        ranks = {"num_replicas": WORLD, "rank": rank}
        loader = module(shards, stage, steps, workers, inside=inside, **ranks).train_dataloader()
        epochs = [list(loader) for _ in range(2)]
        assert [len(epoch) for epoch in epochs] == [len(loader)] * 2 == [steps] * 2
        assert all(cost_of[stage](list(map(length, batch))) <= BUDGET for epoch in epochs for batch in epoch)
        assert epochs[0] != epochs[1]
        seen.append(epochs[0])
    bytes_seen = sum(length(sample) for rank in seen for batch in rank for sample in batch)
    assert bytes_seen > 0.7 * BUDGET * WORLD * steps


@pytest.mark.slow
def test_it_goes_on_where_it_was_left(shards: Path) -> None:
    whole = [*(loader := module(shards, "bucketed", 30, 2).train_dataloader()), *loader]
    first, resumed = module(shards, "bucketed", 30, 2), module(shards, "bucketed", 30, 2)
    begun = list(islice(first.train_dataloader(), 11))
    resumed.load_state_dict(first.state_dict())
    loader = resumed.train_dataloader()
    assert [*begun, *loader, *loader] == whole


def test_webdataset_is_what_mixes_the_samples(shards: Path) -> None:
    """The stage is one as webdataset's are: others may come before it and after."""
    data = WebDataModule(
        {Split.train: 5},
        "txt.bin",
        {Split.train: shards},
        1,
        pipeline_prebatch_wld={Split.train: [wds.shuffle(20, seed=1), STAGES["in order"], wds.map(len)]},
        invoke_wds={Split.train: [("repeat", {})]},
    )
    assert len(list(data.train_dataloader())) == 5
