"""The same augmentation everywhere, in a mixture whose sources repeat, with batches by size."""

from functools import partial
from typing import Any

import pytest
import torch

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, OptimizerStepBatchSampler
from headrace.webdatamodule import MapDataModule
from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler


class Cropped(torch.utils.data.Dataset[torch.Tensor]):
    """Samples with a random transform."""

    fingerprint = "crops"

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(self.first + index), float(torch.rand(()))])


def module(world: int, rank: int, workers: int, **options: Any) -> MapDataModule:
    data = NamedConcatDataset({"large": Cropped(0, 40), "small": Cropped(40, 6)})
    return MapDataModule(
        {"train": data},
        sampler=partial(WeightedDistributedSampler, weights={"large": 1, "small": 1}),
        num_workers=workers,
        num_replicas=world,
        rank=rank,
        seed=3,
        collate_fn=torch.stack,
        seed_per="sample",
        **options,
    )


def crops(world: int, workers: int = 0, **options: Any) -> set[tuple[float, ...]]:
    """The crops that all ranks see in an epoch."""
    found = []
    for rank in range(world):
        made = module(world, rank, workers, **options)
        made.setup("fit")
        loader = made.train_dataloader()
        loader._check_ranks = False  # there are no other processes
        found += [tuple(row) for batch in loader for row in batch.tolist()]
        loader.close()
    assert len(set(found)) == len(found) == 46
    return set(found)


BATCHES: dict[str, dict[str, Any]] = {
    "counted": {"batch_size": 3},
    "by size": {
        "batch_sampler": partial(DistributedSizeAwareBatchSampler, max_total_size=20, balanced_ranks=6),
        "sizes": [1 + i * 7 % 9 for i in range(46)],
    },
    "by tokens": {
        "batch_sampler": partial(OptimizerStepBatchSampler, max_total_size=20, tokens_per_step=80),
        "sizes": [1 + i * 7 % 9 for i in range(46)],
    },
}


@pytest.mark.parametrize("kind", BATCHES)
def test_each_draw_of_a_mixture_has_its_own_crop_on_any_ranks_and_workers(kind: str) -> None:
    whole = crops(1, **BATCHES[kind])
    assert len({row[0] for row in whole}) < 46  # samples of the small source come several times
    assert crops(2, **BATCHES[kind]) == crops(3, 1, **BATCHES[kind]) == whole
