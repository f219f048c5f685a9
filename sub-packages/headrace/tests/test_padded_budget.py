"""A loader sees its collated batches: one that is padded beyond a budget of sums is told of, once."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import MapDataModule, ResumableLoader

SIZES = np.random.default_rng(0).integers(5, 200, 300)
SAMPLES = [torch.ones(size) for size in SIZES.tolist()]
Collate = Callable[[list[torch.Tensor]], Any]


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(samples, batch_first=True)


def tokenized(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """As tokenizers pad, to a multiple."""
    batch = padded(samples)
    return {"ids": torch.nn.functional.pad(batch, (0, -batch.shape[1] % 8))}


def packed(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([len(sample) for sample in samples])
    return {"ids": torch.cat(samples), "lengths": lengths, "images": torch.zeros(len(samples), 3, 300)}


PADDED: dict[str, Collate] = {
    "batch first": padded,
    "length first": pad_sequence,
    "features": lambda samples: (padded(samples)[..., None].expand(-1, -1, 4), "labels"),
    "a mapping": tokenized,
}


def loader(collate_fn: Collate, num_workers: int = 0, **options: Any) -> ResumableLoader:
    batches = DistributedSizeAwareBatchSampler(SIZES, 1600, num_replicas=1, rank=0, **options)
    return ResumableLoader(SAMPLES, batches, collate_fn=collate_fn, num_workers=num_workers)


@pytest.mark.parametrize("name", list(PADDED))
def test_batches_that_are_padded_beyond_their_budget_give_one_warning(name: str) -> None:
    one = loader(PADDED[name])
    text = r"padded to \d+ x \d+ .* max_total_size=1,600 .* give the batch sampler cost='padded'"
    with pytest.warns(UserWarning, match=text) as found:
        batches = [*one, *one]
    assert (len(found), len(batches)) == (1, len(one) * 2)


def test_a_worker_or_a_data_module_changes_nothing() -> None:
    module = MapDataModule(
        {"train": SAMPLES},
        batch_sampler=partial(DistributedSizeAwareBatchSampler, max_total_size=1600),
        sizes=SIZES,
        collate_fn=padded,
    )
    module.setup("fit")
    for one in (loader(padded, num_workers=1), module.train_dataloader()):
        with pytest.warns(UserWarning, match="padded to"):
            next(iter(one))
        one.close()


@pytest.mark.parametrize(
    ("collate_fn", "options"),
    [
        (packed, {}),
        (padded, {"cost": "padded", "strategy": "bucketed"}),
        (padded, {"cost": lambda n, largest: n, "strategy": "bucketed"}),
    ],
)
def test_batches_within_their_budget_give_none(collate_fn: Collate, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(loader(collate_fn, **options))
