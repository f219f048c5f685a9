"""Streams of Hugging Face's datasets as sources of `InterleavedDataset`, with the real library: they resume exactly."""

import json
import warnings
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from headrace.size_aware_batching import bucketed_batching, size_aware_batching
from headrace.weighted_sampler import InterleavedDataset

datasets = pytest.importorskip("datasets")
distributed = pytest.importorskip("datasets.distributed")
Mixture = InterleavedDataset[dict[str, int]]

SIZE, BUFFER = 200, 32
READ_AGAIN = r"sources\['[ab]'\] has a shuffle buffer, which its own state omits: .* reread and discarded"
IGNORE_READ_AGAIN = pytest.mark.filterwarnings("ignore:.*are reread and discarded:UserWarning")


def stream(begin: int, seed: int | None = None, shuffled: bool = True, buffer: int = BUFFER) -> Any:
    """Numbers from ``begin`` on, in two shards."""
    table = datasets.Dataset.from_dict({"number": list(range(begin, begin + SIZE))})
    numbers = table.to_iterable_dataset(num_shards=2)
    return numbers.shuffle(seed=seed, buffer_size=buffer) if shuffled else numbers


def mixture(stopping: Any = "drop_exhausted", seed: int | None = 3, shuffled: bool = True) -> Mixture:
    sources = {"a": stream(0, seed, shuffled), "b": stream(1000, seed, shuffled)}
    return InterleavedDataset(sources, {"a": 1, "b": 1}, seed=1, stopping=stopping)


def numbers(items: Iterable[dict[str, int]], most: int | None = None) -> list[int]:
    return [item["number"] for item in islice(items, most)]


@pytest.mark.parametrize("cut", [1, 150, 399])
@pytest.mark.parametrize("epoch", [0, 2])
def test_a_shuffled_stream_resumes_exactly_by_reading_again(cut: int, epoch: int) -> None:
    first = mixture()
    first.set_epoch(epoch)
    whole = numbers(first)
    assert len(set(whole)) == 2 * SIZE
    assert numbers(first, cut) == whole[:cut]
    state = json.loads(json.dumps(first.state_dict()))
    second = mixture()
    second.load_state_dict(state)
    with pytest.warns(UserWarning, match=READ_AGAIN) as caught:
        assert numbers(second) == whole[cut:]
    assert len(caught) == sum(source["drawn"] > 0 for source in state["sources"].values())


@IGNORE_READ_AGAIN
def test_a_stream_that_was_shuffled_without_a_seed_is_refused() -> None:
    first = mixture(seed=None)
    numbers(first, 150)
    second = mixture(seed=None)
    second.load_state_dict(first.state_dict())
    with pytest.raises(RuntimeError, match=r"sources\['[ab]'\] is shuffled in another order .* shuffle\(seed=\.\.\.,"):
        numbers(second)


@pytest.mark.parametrize("make", ["map", "interleave", "concatenate", "take", "batch"])
@IGNORE_READ_AGAIN
def test_the_buffer_is_found_wherever_the_shuffle_stands(make: str) -> None:
    def build() -> Mixture:
        shuffled, other = stream(0, seed=3), stream(1000, shuffled=False)
        source = {
            "map": lambda: shuffled.map(lambda item: {"number": 2 * item["number"]}),
            "interleave": lambda: datasets.interleave_datasets([other, shuffled]),
            "concatenate": lambda: datasets.concatenate_datasets([shuffled, other]),
            "take": lambda: shuffled.take(150),
            "batch": lambda: shuffled.batch(3),
        }[make]()
        return InterleavedDataset({"a": source}, {"a": 1}, seed=1)

    whole = [item["number"] for item in build()]
    first = build()
    list(islice(first, 40))
    second = build()
    second.load_state_dict(first.state_dict())
    assert [item["number"] for item in second] == whole[40:]


@pytest.mark.parametrize("stopping", ["drop_exhausted", "all_exhausted"])
def test_a_stream_without_a_shuffle_resumes_from_its_own_state(stopping: str) -> None:
    whole = numbers(mixture(stopping, shuffled=False))
    first = mixture(stopping, shuffled=False)
    numbers(first, 150)
    second = mixture(stopping, shuffled=False)
    second.load_state_dict(first.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is read again
        assert numbers(second) == whole[150:]


def test_shards_that_are_shuffled_without_a_buffer_resume_from_the_streams_own_state() -> None:
    def build() -> Mixture:
        return InterleavedDataset({"a": stream(0, seed=3, buffer=1)}, {"a": 1})

    whole = numbers(build())
    assert whole != sorted(whole)
    first, second = build(), build()
    numbers(first, 50)
    second.load_state_dict(first.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert numbers(second) == whole[50:]


def of_table(rows: int = SIZE, column: str = "number", shards: int = 2) -> Any:
    return datasets.Dataset.from_dict({column: list(range(rows))}).to_iterable_dataset(num_shards=shards)


def of_files(folder: Path, names: str = "ab") -> Any:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.jsonl").write_text("".join(f'{{"number": {number}}}\n' for number in range(20)))
    files = [str(folder / f"{name}.jsonl") for name in names]
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=folder / "cache")


@pytest.mark.parametrize(
    "other",
    [
        lambda _: of_table(rows=20),
        lambda _: of_table(column="label"),
        lambda _: of_table(shards=4),
        lambda _: of_table().map(lambda item: item),
        lambda _: datasets.IterableDataset.from_generator(lambda: iter([{"number": 1}])),
        lambda folder: of_files(folder / "data"),
    ],
)
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_state_of_another_stream_is_refused(tmp_path: Path, other: Any, shuffled: bool) -> None:
    def build(source: Any) -> Mixture:
        source = source.shuffle(seed=3, buffer_size=BUFFER) if shuffled else source
        return InterleavedDataset({"a": source, "b": range(9)}, {"a": 1, "b": 1}, seed=1)

    first = build(of_table())
    list(islice(first, 150))
    with pytest.raises(ValueError, match="state was saved with other data in the sources"):
        build(other(tmp_path)).load_state_dict(first.state_dict())


def test_files_of_a_stream_may_lie_elsewhere_and_have_no_other_names(tmp_path: Path) -> None:
    def build(folder: str, names: str = "ab") -> Mixture:
        return InterleavedDataset({"a": of_files(tmp_path / folder, names)}, {"a": 1})

    first = build("here")
    whole = numbers(build("here"))
    numbers(first, 15)
    second = build("there")
    second.load_state_dict(first.state_dict())
    assert numbers(second) == whole[15:]
    with pytest.raises(ValueError, match="state was saved with other data in the sources"):
        build("there", "ac").load_state_dict(first.state_dict())


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("last", [None, 20])
@IGNORE_READ_AGAIN
def test_after_a_resume_iterating_again_gives_the_whole_epoch(shuffled: bool, last: int | None) -> None:
    whole = numbers(mixture(shuffled=shuffled))
    first = mixture(shuffled=shuffled)
    numbers(first, 150)
    second = mixture(shuffled=shuffled)
    second.load_state_dict(first.state_dict())
    assert numbers(second, last) == whole[150:][:last]
    assert numbers(second) == whole
    assert numbers(second) == whole


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")  # torchdata calls it in its constructor
@IGNORE_READ_AGAIN
def test_streams_resume_in_the_stateful_loader(workers: int, shuffled: bool) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def load() -> Any:
        return stateful.StatefulDataLoader(mixture(shuffled=shuffled), batch_size=None, num_workers=workers)

    whole = numbers(load())
    assert sorted(whole) == sorted(
        numbers(DataLoader(mixture(shuffled=shuffled), batch_size=None, num_workers=workers))
    )
    loader = load()
    assert numbers(loader, 150) == whole[:150]
    again = load()
    again.load_state_dict(loader.state_dict())
    assert numbers(again) == whole[150:]


def of_rank(source: Any, rank: int) -> Mixture:
    return InterleavedDataset({"a": source}, {"a": 1}, num_replicas=2, rank=rank)


READERS = {
    "interleaved": lambda source, rank: iter(of_rank(source, rank)),
    "bucketed": lambda source, rank: chain.from_iterable(bucketed_batching(source, len, 4)),
    "in order": lambda source, rank: chain.from_iterable(size_aware_batching(source, len, 4)),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_stream_that_every_rank_would_read_whole_is_warned_of(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.warns(UserWarning, match=r"each of 2 ranks reads all of .*: split it with split_dataset_by_node"):
        next(read(stream(0, shuffled=False), 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = [
            numbers(read(distributed.split_dataset_by_node(stream(0, seed=3, buffer=1), rank=rank, world_size=2), rank))
            for rank in range(2)
        ]
        assert sorted(own[0] + own[1]) == list(range(SIZE))
        whole = bucketed_batching(stream(0, shuffled=False), len, 4, num_replicas=2, rank=1)  # which the ranks share
        assert next(whole)
        monkeypatch.setenv("WORLD_SIZE", "1")
        monkeypatch.setenv("RANK", "0")
        assert next(read(stream(0, shuffled=False), 0) if read is not READERS["interleaved"] else iter(mixture()))
