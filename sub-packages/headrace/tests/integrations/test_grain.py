"""Google's grain: shards as its sources, and loaders as its datasets and iterators."""

import doctest
import json
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from grain.checkpoint import CheckpointHandler
from grain.experimental import ThreadPrefetchIterDataset
from launching import HERE, launch

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import DistributedBatchSampler, IndexedShards, ResumableLoader, index_shards, write_tars
from headrace.webdatamodule.integrations import grain as adapter
from headrace.webdatamodule.integrations.grain import GrainDataset, GrainIterator

SAMPLES = 101
SIZES = np.random.default_rng(0).integers(5, 121, SAMPLES)


def shards_in(folder: Path, first: int = 0) -> Path:
    samples = [(f"s{number}", {"json": b"[%d]" % number}) for number in range(first, first + SAMPLES)]
    write_tars(samples, folder, n_shards=7)
    index_shards(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shards_in(tmp_path_factory.mktemp("shards"))


def numbers(samples: Any) -> list[int]:
    return [int(number) for sample in samples for number in np.ravel(sample["json"])]


def joined(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def batches_of(samples: list[Any]) -> list[int]:
    return [sample["json"][0] for sample in samples]


def loader(folder: Path, *, num_replicas: int = 1, rank: int = 0, num_workers: int = 0) -> ResumableLoader:
    sampler = DistributedSizeAwareBatchSampler(SIZES, 600, num_replicas=num_replicas, rank=rank)
    return ResumableLoader(IndexedShards(folder), sampler, collate_fn=batches_of, num_workers=num_workers)


def test_the_examples_of_the_adapter_run() -> None:
    failed, attempted = doctest.testmod(adapter)
    assert (failed, attempted) == (0, 9)


def test_shuffled_batches_of_shards_have_every_sample_once(folder: Path) -> None:
    shards = IndexedShards(folder)
    assert isinstance(shards, grain.sources.RandomAccessDataSource)
    batches = grain.MapDataset.source(shards).shuffle(seed=3).batch(10)
    read = numbers(batches[number] for number in range(len(batches)))
    assert read != list(range(SAMPLES)) == sorted(read)


def test_threads_read_one_set_of_shards_that_may_keep_few_open(folder: Path) -> None:
    source = grain.MapDataset.source(IndexedShards(folder, max_open=1)).shuffle(seed=3).repeat(5)
    read = numbers(source.to_iter_dataset(grain.ReadOptions(num_threads=16, prefetch_buffer_size=64)))
    assert sorted(read) == sorted(5 * list(range(SAMPLES)))


def test_worker_processes_of_a_dataset_read_the_shards(folder: Path) -> None:
    shards = IndexedShards(folder, transform=lambda sample: {"json": [sample["json"][0] + 1]})
    dataset = grain.MapDataset.source(shards).shuffle(seed=3).to_iter_dataset()
    read = numbers(dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=2)))
    assert sorted(read) == list(range(1, SAMPLES + 1))


def data_loader(shards: Any, workers: int) -> Any:
    sampler = grain.samplers.IndexSampler(SAMPLES, shuffle=True, seed=1, num_epochs=1)
    return iter(grain.DataLoader(data_source=shards, sampler=sampler, worker_count=workers))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_of_grain_resumes_over_the_same_shards_alone(folder: Path, workers: int, tmp_path: Path) -> None:
    first = data_loader(IndexedShards(folder), workers)
    read = numbers(islice(first, 40))
    state = first.get_state()
    resumed = data_loader(IndexedShards(folder), workers)
    resumed.set_state(state)
    assert sorted(read + numbers(resumed)) == list(range(SAMPLES))

    other = data_loader(IndexedShards(shards_in(tmp_path, first=1000)), workers)
    with pytest.raises(ValueError, match="DataSource in checkpoint does not match"):
        other.set_state(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_resumes_exactly_from_a_checkpoint_of_grain(folder: Path, workers: int, tmp_path: Path) -> None:
    first = GrainIterator(loader(folder, num_workers=workers), num_epochs=2)
    seen = [batch for _, batch in zip(range(4), first, strict=False)]
    CheckpointHandler().save(tmp_path, item=first)
    whole = seen + list(first)
    resumed = GrainIterator(loader(folder, num_workers=2 - workers), num_epochs=2)
    CheckpointHandler().restore(tmp_path, item=resumed)
    assert seen + list(resumed) == whole
    assert sorted(joined(whole)) == sorted(2 * list(range(SAMPLES)))
    assert list(resumed) == []
    first.close()
    resumed.close()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_a_state_of_one_rank_resumes_all_of_another_number(folder: Path, before: int, after: int) -> None:
    ranks = [GrainIterator(loader(folder, num_replicas=before, rank=rank), num_epochs=1) for rank in range(before)]
    seen = [number for rank in ranks for _ in range(2) for number in next(rank)]
    states = [json.dumps(rank.get_state()) for rank in ranks]
    assert len(set(states)) == 1
    for rank in range(after):
        resumed = GrainIterator(loader(folder, num_replicas=after, rank=rank), num_epochs=1)
        resumed.set_state(json.loads(states[0]))
        seen += joined(resumed)
    assert sorted(seen) == list(range(SAMPLES))


def test_a_run_that_was_changed_resumes_from_text(folder: Path) -> None:
    first = GrainIterator(loader(folder), num_epochs=1)
    seen = list(next(first))
    left_out = [number for number in range(SAMPLES) if number not in seen][:5]
    first.loader.exclude(left_out)
    seen += next(first)
    skipped = first.loader.skip(1).tolist()
    state = json.loads(json.dumps(first.get_state()))
    resumed = GrainIterator(loader(folder), num_epochs=1)
    resumed.set_state(state)
    rest = joined(resumed)
    assert rest == joined(first)
    assert sorted(seen + left_out + skipped + rest) == list(range(SAMPLES))


def test_a_state_may_be_of_another_budget_if_it_is_accepted(folder: Path) -> None:
    first = GrainIterator(loader(folder), num_epochs=1)
    seen = list(next(first))
    sampler = DistributedSizeAwareBatchSampler(SIZES, 300)
    resumed = GrainIterator(ResumableLoader(IndexedShards(folder), sampler, collate_fn=batches_of), num_epochs=1)
    with pytest.raises(ValueError, match="max_total_size"):
        resumed.set_state(first.get_state())
    resumed.set_state(first.get_state(), accept={"max_total_size"})
    assert sorted(seen + joined(resumed)) == list(range(SAMPLES))


def test_an_iterator_goes_back_in_its_own_run(folder: Path) -> None:
    batches = GrainIterator(loader(folder, num_workers=1), num_epochs=1)
    next(batches)
    state = batches.get_state()
    rest = list(batches)
    batches.set_state(state)
    assert list(batches) == rest
    batches.close()


def test_a_state_before_the_first_batch_is_that_of_the_first_batch(folder: Path) -> None:
    looked_at = loader(folder)
    next(iter(looked_at))  # at the shape of a batch, say
    batches = GrainIterator(looked_at, num_epochs=1)
    state = batches.get_state()
    whole = list(batches)
    assert sorted(joined(whole)) == list(range(SAMPLES))
    resumed = GrainIterator(loader(folder), num_epochs=1)
    resumed.set_state(state)
    assert list(resumed) == whole


def test_without_num_epochs_it_does_not_end(folder: Path) -> None:
    batches = GrainIterator(loader(folder))
    length = len(batches.loader)
    seen = joined(islice(batches, 3 * length))
    assert sorted(seen) == sorted(3 * list(range(SAMPLES)))
    assert batches.loader.epoch == 2
    resumed = GrainIterator(loader(folder))  # at the end of an epoch
    resumed.set_state(batches.get_state())
    assert next(resumed) == next(batches)


def test_a_loader_without_batches_ends_at_once() -> None:
    assert list(GrainIterator(ResumableLoader([1, 2], []))) == []


def test_an_evaluation_is_the_same_each_time() -> None:
    evaluation = ResumableLoader(list("abc"), [[0, 1], [2]], collate_fn="".join, fixed_epoch=True)
    for _ in range(2):
        assert list(GrainIterator(evaluation, num_epochs=1)) == ["ab", "c"]
    with pytest.raises(ValueError, match="num_epochs must be 1 or None for a loader with fixed_epoch=True, got 2"):
        GrainIterator(evaluation, num_epochs=2)


@pytest.mark.parametrize(("made", "number"), [(GrainIterator, 0), (GrainDataset, -1)])
def test_arguments_that_cannot_be_are_refused(made: Any, number: int) -> None:
    batches = ResumableLoader([1], [[0]])
    with pytest.raises(ValueError, match=f"num_epochs must be an int >= 1, got {number}"):
        made(batches, number)
    with pytest.raises(TypeError, match="loader must be a ResumableLoader, got list"):
        made([[1]])


class Flaky:
    """A dataset whose sample 5 fails once."""

    failed = False

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5 and not self.failed:
            self.failed = True
            raise ConnectionError("the store is away")
        return index


def test_after_an_error_the_same_batch_comes() -> None:
    batches = GrainIterator(
        ResumableLoader(Flaky(), DistributedBatchSampler(8, 2, shuffle=False), collate_fn=list), num_epochs=1
    )
    assert [next(batches), next(batches)] == [[0, 1], [2, 3]]
    with pytest.raises(ConnectionError):
        next(batches)
    assert list(batches) == [[4, 5], [6, 7]]


def test_a_closed_iterator_refuses_and_has_ended_its_workers(folder: Path) -> None:
    batches = GrainIterator(loader(folder, num_workers=2))
    next(batches)
    workers = batches.loader._iterator._workers
    batches.close()
    assert all(worker.exitcode is not None for worker in workers)
    with pytest.raises(ValueError, match="closed iterator"):
        next(batches)


def test_an_iterator_that_is_forgotten_leaves_the_workers_to_another_one(folder: Path) -> None:
    shared = loader(folder, num_workers=1)
    forgotten = GrainIterator(shared, num_epochs=1)
    state = forgotten.get_state()
    next(forgotten)
    batches = GrainIterator(shared, num_epochs=1)
    batches.set_state(state)
    seen = list(next(batches))
    del forgotten
    assert sorted(seen + joined(batches)) == list(range(SAMPLES))
    batches.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_is_mapped_and_read_ahead_and_resumes(folder: Path, workers: int) -> None:
    def dataset(workers: int) -> Any:
        mapped = GrainDataset(loader(folder, num_workers=workers), num_epochs=2).map(tuple)
        return iter(ThreadPrefetchIterDataset(mapped, prefetch_buffer_size=8))

    first = dataset(workers)
    seen = list(islice(first, 4))
    state = json.loads(json.dumps(first.get_state()))
    rest = list(first)
    first.set_state(state)
    assert list(first) == rest
    resumed = dataset(2 - workers)
    resumed.set_state(state)
    assert list(resumed) == rest
    assert sorted(number for batch in seen + rest for number in batch) == sorted(2 * list(range(SAMPLES)))
    first.close()
    resumed.close()


def test_the_iterators_of_a_dataset_are_independent(folder: Path) -> None:
    dataset = GrainDataset(loader(folder), num_epochs=1)
    first, second = iter(dataset), iter(dataset)
    begun = [next(first), next(first)]
    assert [next(second), next(second)] == begun
    assert list(first) == list(second)


def test_a_dataset_is_read_in_one_process_of_grain_and_not_in_several(folder: Path) -> None:
    dataset = GrainDataset(loader(folder), num_epochs=1)
    inside = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=1))
    assert sorted(joined(inside)) == list(range(SAMPLES))
    several = iter(dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=2)))
    with pytest.raises(Exception, match="Cannot slice"):
        next(several)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_that_read_ahead_in_threads_do_not_wait_for_one_another(tmp_path: Path) -> None:
    command = ["torchrun", "--standalone", "--nproc-per-node=2", str(HERE / "grain_threads.py")]
    done = launch(command, tmp_path, {})
    assert done.code == 0, done.output
    assert done.output.count("every sample once in each epoch") == 1, done.output
