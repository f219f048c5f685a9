"""What a loader delivered, counted."""

import copy
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedShards,
    LoaderReport,
    ResumableLoader,
    index_shards,
    write_tars,
)
from headrace.webdatamodule.loading.batch_reading import SkippedSample
from headrace.webdatamodule.loading.stage_report import DeliveryStats, Resumed


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> IndexedShards:
    def made(name: str, count: int) -> Path:
        folder = tmp_path_factory.mktemp(name)
        write_tars([(f"{name}{i}", {"txt": b"x" * i}) for i in range(count)], folder, n_shards=1)
        index_shards(folder)
        return folder

    return IndexedShards({name: made(name, count) for name, count in (("a", 10), ("b", 5))})


@given(st.lists(st.lists(st.integers(0, 14), max_size=6), max_size=30), st.integers(0, 30), st.booleans())
def test_counts_are_those_of_the_batches(
    sources: IndexedShards, batches: list[list[int]], asked: int, wide: bool
) -> None:
    sizes = np.arange(15) + 1
    stats = DeliveryStats("train", sources, np.stack([sizes, sizes * 0], axis=1) if wide else sizes)
    for number, batch in enumerate(batches):
        if number == asked:
            stats.report()  # to ask changes nothing
        stats.add(batch)
    report = stats.report()
    flat = [index for batch in batches for index in batch]
    assert report.batches == len(batches)
    assert report.samples == {"a": sum(i < 10 for i in flat), "b": sum(i >= 10 for i in flat)}
    padded = sum(len(batch) * (max(batch) + 1) for batch in batches if batch)
    assert report.fill == (pytest.approx(sum(i + 1 for i in flat) / padded) if padded else None)


def test_many_batches_are_counted_on_the_way(sources: IndexedShards) -> None:
    stats = DeliveryStats("train", sources, None)
    for number in range(2000):
        stats.add([number % 15, 3])
    assert stats.report().batches == 2000
    assert sum(stats.report().samples.values()) == 4000
    assert stats.report().fill is None


def test_sizes_of_zero_make_no_padding(sources: IndexedShards) -> None:
    stats = DeliveryStats("train", sources, np.zeros(15, np.int64))
    stats.add([0, 1])
    assert stats.report().fill is None


def test_a_report_reads_well(sources: IndexedShards) -> None:
    skipped = tuple(SkippedSample(number, f"sample {number} is cut") for number in range(12))
    told = str(LoaderReport("train", 1200, {"a": 3000, "b": 1000}, 0.75, 30, skipped, (4, 1)))
    assert "train, rank 1 of 4: 4,000 samples in 1,200 batches" in told
    assert "a: 3,000 samples (75.0%)" in told
    assert "padding: 25.0%" in told
    assert "skipped as damaged: 12 samples, 30 times" in told
    assert told.count("is cut") == 10
    assert "and 2 more" in told
    assert str(LoaderReport("train", 1, {"a": 1}, None, 1, skipped[:1], None, 1, ("sample 3",))).splitlines() == [
        "train: 1 sample in 1 batch",
        "  a: 1 sample (100.0%)",
        "  skipped as damaged: 1 sample",
        "    sample 0 is cut",
        "  left out as over the budget: 1 sample",
        "    sample 3",
    ]
    assert "0 samples (0.0%)" in str(LoaderReport("val", 0, {"a": 0}, None))
    assert str(LoaderReport("val", 2, {"val": 9}, None)).splitlines() == [
        "val: 9 samples in 2 batches",
        "  skipped as damaged: 0 samples",
    ]


def test_a_sample_that_is_skipped_in_every_epoch_is_named_once(sources: IndexedShards) -> None:
    stats = DeliveryStats("train", sources, None)
    assert [stats.skip(SkippedSample(3, f"epoch {epoch}")) for epoch in range(3)] == [True, False, False]
    assert (stats.report().n_skipped, [one.sample for one in stats.report().skipped]) == (3, [3])


def numbers(num_workers: int = 0) -> ResumableLoader:
    batches = DistributedBatchSampler(40, 4, num_replicas=1, rank=0)
    return ResumableLoader(list(range(40)), batches, collate_fn=list, num_replicas=1, rank=0, num_workers=num_workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_after_a_resume_a_report_says_what_it_counts_and_where_the_epoch_is(workers: int) -> None:
    killed = numbers()
    for _ in islice(killed, 3):
        pass
    assert killed.report().resumed is None
    assert "resumed" not in str(killed.report())

    resumed = numbers(workers)
    resumed.load_state_dict(killed.state_dict())
    before = resumed.report()
    assert before.resumed == Resumed(epoch=0, steps=3, now=0, delivered=3, batches=None)
    assert "resumed in epoch 0 after 3 batches, which are not counted here; of epoch 0 3 are delivered" in str(before)
    for _ in islice(resumed, 2):
        pass
    report = resumed.report()
    assert (report.batches, sum(report.samples.values())) == (2, 8)
    assert report.resumed == Resumed(epoch=0, steps=3, now=0, delivered=5, batches=10)
    told = "resumed in epoch 0 after 3 batches, which are not counted here; of epoch 0 5 of 10 are delivered"
    assert told in str(report)
    resumed.close()


def test_a_report_of_a_loader_that_resumes_itself_counts_all_of_it() -> None:
    loader = numbers()
    for _ in islice(loader, 3):
        pass
    loader.load_state_dict(loader.state_dict())
    assert len(list(loader)) == 7
    report = loader.report()
    assert report.batches == 10
    assert "resumed in epoch 0 after 3 batches; of epoch 0 10 of 10 are delivered" in str(report)


def test_the_epoch_of_a_report_goes_on_behind_a_resume() -> None:
    killed = numbers()
    for _ in islice(killed, 3):
        pass
    resumed = numbers()
    resumed.load_state_dict(killed.state_dict())
    assert len(list(resumed)) == 7
    assert len(list(resumed)) == 10
    report = resumed.report()
    assert report.batches == 17
    assert report.resumed == Resumed(epoch=0, steps=3, now=1, delivered=10, batches=10)
    assert "of epoch 1 10 of 10 are delivered" in str(report)
    for loader in (numbers(), copy.copy(numbers())):  # a state of the beginning is no resume
        loader.load_state_dict(numbers().state_dict())
        assert loader.report().resumed is None
