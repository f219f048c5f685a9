"""Size-aware batches for validation in a data module: every sample in every epoch."""

from functools import partial
from pathlib import Path

import pytest

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import IndexedWebDataModule, index_shards, write_tars

N, BUDGET = 300, 100


def keys(samples: list[dict[str, object]]) -> list[object]:
    return [sample["__key__"] for sample in samples]


@pytest.mark.parametrize("workers", [0, 2])
def test_sequential_validation_sees_every_sample_in_every_epoch(tmp_path: Path, workers: int) -> None:
    written = [f"s{i:03}" for i in range(N)]
    write_tars([(key, {"txt": b"x" * (1 + 17 * i % 37)}) for i, key in enumerate(written)], tmp_path, n_shards=3)
    index_shards(tmp_path)
    module = IndexedWebDataModule(
        {"val": tmp_path},
        batch_sampler=partial(DistributedSizeAwareBatchSampler, max_total_size=BUDGET, strategy="sequential"),
        sizes="txt",
        collate_fn=keys,
        num_workers=workers,
    )
    module.setup("validate")
    loader = module.val_dataloader()
    epochs = [list(loader) for _ in range(4)]
    assert len(epochs[0]) == len(loader) > 1
    assert sorted(key for batch in epochs[0] for key in batch) == written
    assert epochs[1:] == epochs[:1] * 3
    module.teardown("validate")
