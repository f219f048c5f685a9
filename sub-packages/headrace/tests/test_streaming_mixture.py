"""Shards of several directories, mixed by weight into one stream by a WebDataModule, and resumed in it."""

import functools
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds

from headrace.webdatamodule import Split, WebDataModule, index_shards, write_tars
from headrace.weighted_sampler import InterleavedDataset

SIZES = {"web": 60, "books": 20, "code": 5}
WEIGHTS = {"web": 0.5, "books": 0.25, "code": 0.25}
FIRST = {"web": 0, "books": 1000, "code": 2000}
N, BATCH = 2048, 32  # shares are exact after each 1,024 samples of a reader


@pytest.fixture(scope="module", params=[True, False], ids=["indexed", "plain"])
def places(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    for name, n in SIZES.items():
        write_tars(
            [(f"s{i:04}", {"json": b"%d" % i}) for i in range(FIRST[name], FIRST[name] + n)],
            folder / name,
            n_shards=4,
        )
        if request.param:
            index_shards(folder / name)
    return {name: folder / name for name in SIZES}


WORKERS = pytest.mark.parametrize(
    ("places", "workers"),
    [(True, 0), (False, 0), (True, 2), pytest.param(False, 2, marks=pytest.mark.nightly)],
    indirect=["places"],
    ids=["indexed-0", "plain-0", "indexed-2", "plain-2"],
)


def module(
    places: dict[str, Path], workers: int = 0, ranks: int = 1, rank: int = 0, seed: int = 0, weights: Any = WEIGHTS
) -> WebDataModule:
    return WebDataModule(
        {Split.train: N},
        "json",
        {Split.train: places},
        BATCH,
        pipeline_wds={Split.train: wds.map(lambda sample: sample[0])},
        pipeline_prebatch_wld={Split.train: wds.batched(BATCH // ranks, collation_fn=None)},
        kwargs_wds={Split.train: {"shardshuffle": True, "seed": seed}},
        kwargs_wld={Split.train: {"num_workers": workers}},
        mix={Split.train: functools.partial(InterleavedDataset, weights=weights, stopping="endless")},
        num_replicas=ranks,
        rank=rank,
    )


def counted(batches: Iterable[list[int]]) -> Counter[str]:
    names = list(FIRST)
    return Counter(names[sample // 1000] for batch in batches for sample in batch)


@pytest.mark.slow
@WORKERS
def test_an_epoch_has_the_weights_and_the_promised_length(places: dict[str, Path], workers: int) -> None:
    data = module(places, workers)
    data.setup("fit")
    loader = data.train_dataloader()
    epochs = [list(loader) for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [len(loader)] * 2 == [N // BATCH] * 2
    for epoch in epochs:
        shares = counted(epoch)
        assert all(abs(shares[name] - weight * N) <= 2 * max(1, workers) for name, weight in WEIGHTS.items())
        # A source that begins again gives each of its samples equally often: in each worker, its share of them.
        often = Counter(sample for batch in epoch for sample in batch)
        code = [often[FIRST["code"] + i] for i in range(SIZES["code"])]
        assert min(code) > 0
        if workers == 0:
            assert max(code) - min(code) <= 1
    assert epochs[0] != epochs[1]


def test_ranks_step_together(places: dict[str, Path]) -> None:
    ranks = [list(module(places, ranks=2, rank=rank).train_dataloader()) for rank in range(2)]
    assert [len(rank) for rank in ranks] == [N // BATCH] * 2
    assert all(abs(counted(rank)[name] - weight * N / 2) <= 2 for rank in ranks for name, weight in WEIGHTS.items())
    # In each pass over a source, the ranks share it.
    web = [[sample for batch in rank for sample in batch if sample < 1000] for rank in ranks]
    half = SIZES["web"] // 2
    for begin in (0, half):
        assert sorted(web[0][begin : begin + half] + web[1][begin : begin + half]) == list(range(SIZES["web"]))


@pytest.mark.slow
@WORKERS
def test_a_mixture_goes_on_where_it_was_left(places: dict[str, Path], workers: int) -> None:
    loader = module(places, workers).train_dataloader()
    whole = [*loader, *loader]
    first, resumed = module(places, workers), module(places, workers)
    running = first.train_dataloader()
    begun = [*running, *islice(running, 21)]
    resumed.load_state_dict(first.state_dict())
    assert begun + list(resumed.train_dataloader()) == whole


def test_another_order_is_refused(places: dict[str, Path]) -> None:
    first: Any = module(places).train_dataloader()
    with pytest.raises(ValueError, match=r"checkpoint has mix=InterleavedDataset.*'web': 0.5.*, got mix=.*'web': 0.25"):
        module(places, weights={**WEIGHTS, "web": 0.25}).train_dataloader().load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="checkpoint has seed=0, got seed=1"):
        module(places, seed=1).train_dataloader().load_state_dict(first.state_dict())
