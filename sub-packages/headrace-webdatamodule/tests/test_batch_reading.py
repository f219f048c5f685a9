"""Batches read in a worker: whole, without their damaged samples, or an error that names the place."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.webdatamodule import (
    DamagedSampleWarning,
    DamagedShardError,
    DecodeError,
    IndexedShards,
    ResumableLoader,
    ShardError,
    ShardIndex,
    UnsafePickleError,
    index_shards,
    write_tars,
)

BROKEN, FLIPPED, UNSAFE = 5, 14, 22
COUNT = 24


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    members: dict[int, dict[str, bytes]] = {i: {"json": b"%d" % i, "txt": b"x" * 40_000} for i in range(COUNT)}
    members[BROKEN] = {"json": b"{"}
    members[UNSAFE] = {"json": b"22", "pkl": pickle.dumps(Evil())}
    shards = write_tars([(f"s{i:02d}", own) for i, own in members.items()], folder, n_shards=3)
    index_shards(folder)
    index = ShardIndex.open(shards[1])
    at = index.span(FLIPPED - 8)[0] + 1
    with shards[1].open("r+b") as file:
        file.seek(int(index.offsets[at]) + 23_456)  # which nobody looks at before it is read
        file.write(b"y")
    return folder


def keys(samples: list[Any]) -> list[str]:
    return [sample["__key__"] for sample in samples]


def loader(folder: Path, batches: list[list[int]], **options: Any) -> ResumableLoader:
    return ResumableLoader(IndexedShards(folder), batches, **{"collate_fn": keys, **options})


def test_whole_batches_are_whole(folder: Path) -> None:
    for on_error in ("raise", "skip"):
        assert list(loader(folder, [[3, 1], [0]], on_error=on_error)) == [["s03", "s01"], ["s00"]]


@pytest.mark.parametrize("workers", [0, pytest.param(1, id="worker")])
@pytest.mark.parametrize(("sample", "kind"), [(BROKEN, DecodeError), (FLIPPED, DamagedShardError)])
def test_an_error_keeps_its_kind_and_place(folder: Path, sample: int, kind: type[ShardError], workers: int) -> None:
    damaged = loader(folder, [[0, 1], [2, sample]], num_workers=workers)
    batches = iter(damaged)
    assert next(batches) == ["s00", "s01"]
    with pytest.raises(kind) as caught:
        next(batches)
    shard = sorted(folder.glob("*.tar"))[sample // 8]
    assert (caught.value.shard, caught.value.sample) == (str(shard), f"s{sample:02d}")
    assert caught.value.member in (f"s{sample:02d}.json", f"s{sample:02d}.txt")
    assert isinstance(caught.value.offset, int)
    assert damaged.steps == 1  # the batch comes again


@pytest.mark.slow
def test_an_error_of_a_spawned_worker_keeps_its_place(folder: Path) -> None:
    damaged = loader(folder, [[0, 1], [2, FLIPPED]], num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(DamagedShardError, match="not those that were indexed") as caught:
        list(damaged)
    assert caught.value.sample == f"s{FLIPPED:02d}"
    assert isinstance(caught.value.offset, int)


@pytest.mark.parametrize("workers", [0, pytest.param(1, id="worker")])
def test_damaged_samples_are_left_out_and_counted(folder: Path, workers: int) -> None:
    batches = [[4, BROKEN, 6], [FLIPPED, 15, BROKEN, 16]]
    skipping = loader(folder, batches, on_error="skip", num_workers=workers)
    with pytest.warns(DamagedSampleWarning) as caught:
        came = [(batch, list(skipping.indices)) for batch in skipping]
    assert came == [(["s04", "s06"], [4, 6]), (["s15", "s16"], [15, 16])]
    said = [str(one.message) for one in caught]
    assert [f"'s{sample:02d}'" in message for sample, message in zip((5, 14), said, strict=True)] == [True] * 2
    assert "DecodeError" in said[0]
    assert "DamagedShardError" in said[1]
    report = skipping.report()
    assert [one.sample for one in report.skipped] == [BROKEN, FLIPPED]  # each once
    assert report.n_skipped == 3
    assert report.samples == {"train": 4}
    assert report.batches == 2
    assert "skipped as damaged: 2 samples, 3 times" in str(report)
    skipping.close()


def test_many_damaged_samples_warn_ten_times(tmp_path: Path) -> None:
    write_tars([(f"s{i:02d}", {"json": b"{" if i % 2 else b"1"}) for i in range(30)], tmp_path, n_shards=1)
    index_shards(tmp_path)
    skipping = loader(tmp_path, [[i, i + 1] for i in range(0, 30, 2)] * 2, on_error="skip")
    with pytest.warns(DamagedSampleWarning) as caught:
        list(skipping)
    assert len(caught) == 10
    assert "further ones are counted in report()" in str(caught[-1].message)
    assert (len(skipping.report().skipped), skipping.report().n_skipped) == (15, 30)


@pytest.mark.parametrize("workers", [0, pytest.param(1, id="worker")])
@pytest.mark.parametrize("batch", [[20, UNSAFE], [BROKEN, UNSAFE]])
def test_an_unsafe_pickle_is_never_skipped(folder: Path, batch: list[int], workers: int) -> None:
    with pytest.raises(UnsafePickleError, match="system") as caught:
        list(loader(folder, [batch], on_error="skip", num_workers=workers))
    assert caught.value.sample == "s22"


def test_a_batch_of_damaged_samples_alone_is_an_error(folder: Path) -> None:
    for workers in (0, 1):
        with pytest.raises(DamagedShardError, match=r"no sample of a batch of 2 can be read.*leave those samples out"):
            list(loader(folder, [[BROKEN, FLIPPED]], on_error="skip", num_workers=workers))


def test_errors_that_are_no_damage_are_raised(folder: Path) -> None:
    def fails(sample: dict[str, Any]) -> Any:
        raise KeyError("x")

    shards = IndexedShards(folder, transform=fails)
    with pytest.raises(KeyError) as caught:
        list(ResumableLoader(shards, [[0, 1]], on_error="skip"))
    assert any("sample 's00' of shard" in note for note in caught.value.__notes__)


def test_a_transform_may_call_a_sample_damaged(folder: Path) -> None:
    def picky(sample: dict[str, Any]) -> Any:
        if sample["json"] == 2:
            raise DecodeError("too short for us")
        return sample

    shards = IndexedShards(folder, transform=picky)
    skipping = ResumableLoader(shards, [[1, 2, 3]], on_error="skip", collate_fn=keys)
    with pytest.warns(DamagedSampleWarning, match="too short for us .*'s02'"):
        assert list(skipping) == [["s01", "s03"]]


def test_another_policy_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'skip', got 'ignore'"):
        loader(folder, [[0]], on_error="ignore")


def used_up(sample: dict[str, Any]) -> Any:
    return next(iter([])) if sample["__key__"] == "s04" else sample


def used_up_batch(samples: list[Any]) -> Any:
    return next(iter([])) if "s04" in keys(samples) else samples


@pytest.mark.parametrize("workers", [0, pytest.param(1, id="worker")])
@pytest.mark.parametrize("where", ["transform", "collate_fn"])
def test_a_stop_iteration_is_an_error_and_no_end(tmp_path: Path, where: str, workers: int) -> None:
    write_tars([(f"s{i:02d}", {"json": b"1"}) for i in range(8)], tmp_path, n_shards=1)
    index_shards(tmp_path)
    shards = IndexedShards(tmp_path, transform=used_up if where == "transform" else None)
    collate = used_up_batch if where == "collate_fn" else keys
    stopping = ResumableLoader(shards, [[0, 1], [3, 4], [5]], collate_fn=collate, num_workers=workers)
    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        list(stopping)
    assert "s04" in str(caught.value) + "".join(caught.value.__notes__)
    assert stopping.steps == 1


def with_lambda(samples: list[Any]) -> Any:
    return [torch.zeros(2), lambda: samples]


def with_gradients(samples: list[Any]) -> Any:
    return {"a": torch.ones(2, requires_grad=True) * len(samples)}


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("collate", "told"), [(with_lambda, ".*lambda.*"), (with_gradients, r".*detach\(\) it.*")])
def test_a_batch_that_cannot_be_sent_is_an_error_and_no_wait(
    folder: Path, collate: Any, told: str, context: str
) -> None:
    waits = loader(folder, [[0, 1], [2, 3]], collate_fn=collate, num_workers=1, multiprocessing_context=context)
    with pytest.raises(TypeError, match=rf"a batch cannot be sent from a worker {told} or use num_workers=0") as caught:
        next(iter(waits))
    assert "in collate_fn, of 2 samples: sample 's00'" in str(caught.value)
    assert len(list(loader(folder, [[0, 1], [2, 3]], collate_fn=collate))) == 2  # nothing is sent


class Answers(torch.utils.data.Dataset[dict[str, Any]]):
    """Has a way of its own to read a batch."""

    def __init__(self, answer: Any, name: Any = "s{:02d}".format) -> None:
        self.answer, self.name, self.singly = answer, name, 0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.singly += 1
        return {"__key__": f"s{index:02d}", "number": index}

    def __getitems__(self, indices: list[int]) -> Any:
        return self.answer([{"__key__": f"s{index:02d}", "number": index} for index in indices])

    def key(self, index: int) -> str:
        return str(self.name(index))


def number(sample: dict[str, Any]) -> int:
    return int(sample["number"])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda samples: samples[:-1], r"asked for 3, got 2 \(a list\)"),
        (lambda samples: samples * 2, r"asked for 3, got 6 \(a list\)"),
        (lambda samples: {"number": [1, 2, 3]}, "asked for 3, got a dict"),
        (iter, "asked for 3, got a list_iterator"),
        (lambda samples: None, "asked for 3, got a NoneType"),
        (lambda samples: torch.tensor(3), "asked for 3, got a Tensor"),
    ],
)
def test_a_batch_of_more_or_fewer_samples_than_asked_for_is_refused(answer: Any, told: str, workers: int) -> None:
    loader = ResumableLoader(Answers(answer), [[0, 3, 1]], collate_fn=list, num_workers=workers)
    expected = rf"Answers.__getitems__ must return a list with one sample for each index, in their order, {told}: "
    with pytest.raises((TypeError, ValueError), match=expected + "to leave samples out, leave them out of"):
        next(iter(loader))
    loader.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "answer",
    [
        lambda samples: sorted(samples, key=number),
        lambda samples: samples[::-1],
        lambda samples: [*samples[:-1], samples[0]],
    ],
)
def test_samples_under_other_keys_than_asked_for_are_refused(answer: Any, workers: int) -> None:
    loader = ResumableLoader(Answers(answer), [[0, 3, 1]], collate_fn=list, num_workers=workers)
    with pytest.raises(ValueError, match=r"Answers.__getitems__ must return .* in their order, index \d is 's0\d', "):
        next(iter(loader))
    loader.close()


def test_keys_of_another_form_are_left_alone() -> None:
    dataset = Answers(list, name=lambda index: f"proteins/{index}")
    loader = ResumableLoader(dataset, [[0, 3, 1], [2, 4]], collate_fn=list)
    assert [list(map(number, batch)) for batch in loader] == [[0, 3, 1], [2, 4]]
    assert dataset.singly == 1


def test_a_subset_of_such_a_dataset_is_refused_too() -> None:
    data = torch.utils.data.Subset(Answers(lambda samples: samples[:-1]), range(5))
    with pytest.raises(ValueError, match=r"Subset.__getitems__ must return .*, asked for 2, got 1 \(a list\)"):
        next(iter(ResumableLoader(data, [[0, 3]], collate_fn=list)))
