"""Size-aware batches for validation in a data module: every sample in every epoch."""

from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import IndexedWebDataModule, MapDataModule, Split, index_shards, write_tars

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


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_evaluation_that_would_lose_or_repeat_samples_is_refused(tail: Literal["drop", "pad"]) -> None:
    lengths = [5 + 37 * n % 90 for n in range(203)]
    batches = partial(DistributedSizeAwareBatchSampler, max_total_size=1000, tail=tail)
    data = {"train": range(203), "val": range(203)}
    module = MapDataModule(data, sizes=lengths, batch_sampler=batches, num_replicas=4, rank=0)
    module.setup("fit")
    assert len(module.train_dataloader()) > 1
    with pytest.raises(ValueError, match=rf"every sample once for evaluation, got tail='{tail}': give validation"):
        module.val_dataloader()
    whole = {"train": batches, "val": partial(batches, tail="split")}
    module = MapDataModule(data, sizes=lengths, batch_sampler=whole, num_replicas=4, rank=0)
    module.setup("fit")
    assert len(module.val_dataloader()) > 1


def test_a_curriculum_is_for_training_only() -> None:
    lengths = [5 + 37 * n % 90 for n in range(203)]
    batches = partial(DistributedSizeAwareBatchSampler, max_total_size=1000, strategy="bucketed", cost="padded")
    data, taught = {"train": range(203), "val": range(203)}, partial(batches, curriculum=10)
    module = MapDataModule(data, sizes=lengths, batch_sampler=taught, num_replicas=1, rank=0)
    module.setup("fit")
    assert len(module.train_dataloader()) > 1
    with pytest.raises(
        ValueError, match=r"batch_sampler for 'val' has curriculum=10, which orders training only: give"
    ):
        module.val_dataloader()
    split = {"train": taught, "val": batches}
    module = MapDataModule(data, sizes=lengths, batch_sampler=split, num_replicas=1, rank=0)
    module.setup("fit")
    assert len(module.val_dataloader()) > 1


def test_what_is_left_out_as_over_the_budget_is_warned_of_and_reported() -> None:
    lengths = [5 + 37 * n % 90 for n in range(203)]
    lengths[77] = 9000
    batches = partial(DistributedSizeAwareBatchSampler, max_total_size=1000, oversize="skip")
    module = MapDataModule({"train": range(203)}, sizes=lengths, batch_sampler=batches, collate_fn=list)
    module.setup("fit")
    with pytest.warns(UserWarning, match="1 sample is left out as larger than max_total_size=1000: 77") as caught:
        delivered = [sample for batch in module.train_dataloader() for sample in batch]
    assert [warned.filename for warned in caught] == [__file__]
    assert sorted(delivered) == [n for n in range(203) if n != 77]
    report = module.report()[Split.train]
    assert (report.n_over_budget, report.over_budget) == (1, ("sample 77",))
    assert "  left out as over the budget: 1 sample\n    sample 77" in str(module.report())


@pytest.mark.parametrize(("cost", "told"), [("sum", False), ("padded", True)])
def test_the_report_has_padding_only_where_batches_are_padded(cost: Literal["sum", "padded"], told: bool) -> None:
    lengths = [5 + 37 * n % 90 for n in range(203)]
    batches = partial(DistributedSizeAwareBatchSampler, max_total_size=1000, cost=cost, strategy="bucketed")
    module = MapDataModule({"train": range(203)}, sizes=lengths, batch_sampler=batches, collate_fn=list)
    module.setup("fit")
    assert sum(map(len, module.train_dataloader())) == 203
    assert ("padding: " in str(module.report())) == told
