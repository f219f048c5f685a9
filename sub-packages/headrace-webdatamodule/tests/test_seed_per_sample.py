"""The same augmentation everywhere: a sample's random numbers depend on the seed, the epoch and the sample alone."""

import json
import random
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import augmented
import numpy as np
import pytest
import torch
from augmented import EPOCHS, Augmented, InBatches, augment, decode_randomly, draw_all
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders import COUNT, Bare
from processes import LIMIT, SERVER, Meeting
from torch.utils.data import BatchSampler, ConcatDataset, Subset, TensorDataset, WeightedRandomSampler

from headrace.webdatamodule import (
    DecodeError,
    DistributedBatchSampler,
    IndexedShards,
    MapDataModule,
    Remote,
    ResumableLoader,
    index_shards,
    sample_rng,
    write_tars,
)
from headrace.webdatamodule.loading.sample_random import is_plain

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:the last step has:UserWarning"),
]
Draws = dict[tuple[int, int], tuple[Any, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_tars([(f"s{i:02d}", {"json": b"%d" % i}) for i in range(COUNT)], folder, n_shards=3)
    index_shards(folder)
    return folder


def parts(folder: Path) -> Any:
    """The samples of two sources, of which the second has other numbers."""
    both: list[Any] = [IndexedShards(folder, transform=augment), Augmented(4)]
    return ConcatDataset(both)


class Globals(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([random.random(), np.random.rand(), torch.rand(())])  # noqa: NPY002 - what is seeded


class Wrapped(IndexedShards):
    """A user's own, which draws after it was read."""

    def __getitems__(self, indices: Any) -> list[Any]:
        return [draw_all(sample["json"]) for sample in super().__getitems__(indices)]


DATASETS: dict[str, Any] = {
    "own shards": lambda folder: Wrapped(folder, transform=dict),
    "torch": lambda folder: Augmented(),
    "in batches": lambda folder: InBatches(),
    "subset": lambda folder: Subset(Augmented(2 * COUNT), range(COUNT, 2 * COUNT)),
    "transform": lambda folder: IndexedShards(folder, transform=augment),
    "few files": lambda folder: IndexedShards(folder, transform=augment, max_open=1),
    "decoder": lambda folder: IndexedShards(folder, decode=decode_randomly),
    "concatenated": parts,
    "sources": lambda folder: IndexedShards({"a": folder, "b": folder}, transform=augment),
    "remote": lambda folder: IndexedShards(Remote(folder.as_uri()), transform=augment),
}


def stack(samples: list[Any]) -> torch.Tensor:
    return torch.stack([sample["json"] if isinstance(sample, dict) else sample for sample in samples])


def loader(dataset: Any, ranks: tuple[int, int] = (1, 0), batches: Any = None, **options: Any) -> ResumableLoader:
    if batches is None:
        batches = DistributedBatchSampler(
            len(dataset), options.pop("batch_size", 4), num_replicas=ranks[0], rank=ranks[1]
        )
    return ResumableLoader(
        dataset,
        batches,
        **{"collate_fn": stack, "seed_per": "sample", "check_ranks": False, "seed": 5, **options},
    )


def noted(batches: Any, epoch: int, indices: Any) -> Draws:
    """The draws of each sample, by epoch and index."""
    return {
        (epoch, index): tuple(row.tolist()) for batch in batches for index, row in zip(indices(), batch, strict=True)
    }


def draws_of(dataset: Any, world: int = 1, **options: Any) -> Draws:
    found: Draws = {}
    for rank in range(world):
        one = loader(dataset, (world, rank), **options)
        for epoch in range(EPOCHS):
            one.set_epoch(epoch)
            found |= noted(one, epoch, lambda one=one: one.indices)
        one.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", DATASETS)
def test_a_sample_has_the_same_random_numbers_everywhere(folder: Path, kind: str) -> None:
    dataset = DATASETS[kind](folder)
    whole = draws_of(dataset)
    assert len(whole) == EPOCHS * len(dataset)
    assert len({row[1:] for row in whole.values()}) == len(whole)  # each sample and epoch has its own
    assert draws_of(dataset, 2, batch_size=3) == whole
    assert draws_of(dataset, 4, num_workers=0, batch_size=5) == whole
    assert draws_of(dataset, 1, num_workers=3, prefetch_factor=1) == whole
    assert draws_of(dataset, 2, num_workers=1, batch_size=1) == whole


def test_of_another_seed_they_are_others() -> None:
    assert not set(draws_of(Augmented()).values()) & set(draws_of(Augmented(), seed=6).values())


@pytest.mark.slow
def test_by_step_they_depend_on_step_and_rank() -> None:
    """So what is compared above does differ without it."""
    dataset = Globals()
    whole = draws_of(dataset, num_workers=1, seed_per="step")
    assert draws_of(dataset, 1, num_workers=3, seed_per="step") == whole
    assert draws_of(dataset, 2, num_workers=1, seed_per="step") != whole
    assert draws_of(dataset, 1, num_workers=1, seed_per="step", batch_size=3) != whole
    assert draws_of(dataset, num_workers=1, seed_per="sample", batch_size=3) == draws_of(dataset)


def test_the_generator_of_a_sample_is_one_and_the_same() -> None:
    class Asking(Augmented):
        def __getitem__(self, index: int) -> torch.Tensor:
            assert sample_rng() is sample_rng()
            return torch.from_numpy(sample_rng().random(3))

    with pytest.raises(RuntimeError, match=r"sample_rng\(\) is the generator of the sample that a loader with"):
        sample_rng()
    with pytest.raises(RuntimeError, match="give seed_per='sample' to the loader"):
        next(iter(loader(Asking(), seed_per="step")))
    rows = torch.cat(list(loader(Asking())))
    assert len(torch.unique(rows)) == 3 * COUNT
    with pytest.raises(RuntimeError, match="sample_rng"):
        sample_rng()


@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.parametrize("workers", [(0, 3), (3, 0)])
def test_a_resumed_run_sees_the_same_crops(cut: int, workers: tuple[int, int]) -> None:
    whole = draws_of(Augmented())
    first = loader(Augmented(), num_workers=workers[0])
    first.set_epoch(1)
    found = noted(islice(first, cut), 1, lambda: first.indices)
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    for rank in range(2):
        rest = loader(Augmented(), (2, rank), num_workers=workers[1])
        rest.load_state_dict(state)
        found |= noted(rest, 1, lambda rest=rest: rest.indices)
        rest.close()
    assert found == {where: row for where, row in whole.items() if where[0] == 1}


@settings(max_examples=30)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(0, 30),
    st.integers(0, 2**64 - 1),
)
@pytest.mark.slow
def test_for_any_ranks_batches_and_cut_the_law_holds(
    world: int, after: int, size: int, batch: int, cut: int, seed: int
) -> None:
    """Without workers, so that many are tried; the other tests have workers."""
    whole = draws_of(Augmented(), batch_size=7, seed=seed)
    found: Draws = {}
    states = []
    for rank in range(world):
        one = loader(Augmented(), (world, rank), batch_size=size, seed=seed)
        found |= noted(islice(one, min(cut, len(one))), 0, lambda one=one: one.indices)
        states.append(one.state_dict())
    for rank in range(after):
        one = loader(Augmented(), (after, rank), batch_size=size, seed=seed)
        one.load_state_dict(states[0])
        found |= noted(one, 0, lambda one=one: one.indices)
    assert found == {where: row for where, row in whole.items() if where[0] == 0}


def generators() -> tuple[Any, ...]:
    legacy = np.random.get_state()  # noqa: NPY002 - what is seeded
    return (
        random.getstate(),
        [part.tolist() if hasattr(part, "tolist") else part for part in legacy],
        torch.get_rng_state().tolist(),
    )


def noisy_stack(samples: list[Any]) -> torch.Tensor:
    return stack(samples) + torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002


@pytest.mark.parametrize("kind", DATASETS)
def test_reading_in_this_process_leaves_its_generators_alone(folder: Path, kind: str) -> None:
    before = generators()
    batches = iter(loader(DATASETS[kind](folder), collate_fn=noisy_stack))
    next(batches)
    assert generators() == before
    dropout = torch.rand(3)  # between two batches, as a training step does
    torch.manual_seed(9)
    after = generators()
    list(batches)
    assert generators() == after
    assert len(torch.unique(dropout)) == 3


class Failing(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        draw_all(index)
        raise OSError("no such luck")


def test_an_error_leaves_the_generators_alone_too() -> None:
    before = generators()
    with pytest.raises(OSError, match="no such luck"):
        next(iter(loader(Failing())))
    assert generators() == before
    with pytest.raises(RuntimeError, match="sample_rng"):
        sample_rng()


def test_collation_draws_by_the_samples_of_the_batch(folder: Path) -> None:
    """So the same batch is padded and masked alike, whichever rank and worker it comes from."""

    def rows(world: int, workers: int) -> dict[tuple[int, ...], list[float]]:
        found = {}
        for rank in range(world):
            batches = [[i, i + 1] for i in range(0, 12, 2)][rank::world]
            one = loader(IndexedShards(folder), (world, rank), batches, collate_fn=draws_of_batch, num_workers=workers)
            found.update({tuple(one.indices): batch for batch in one})
            one.close()
        return found

    whole = rows(1, 0)
    assert len({tuple(row) for row in whole.values()}) == 6
    assert rows(2, 0) == rows(1, 2) == rows(3, 1) == whole


def draws_of_batch(samples: list[Any]) -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002


PLAIN: dict[str, Any] = {
    "list": lambda folder: [torch.zeros(1)] * COUNT,
    "tensors": lambda folder: TensorDataset(torch.zeros(COUNT, 1)),
    "subset": lambda folder: Subset(TensorDataset(torch.zeros(COUNT, 1)), range(COUNT)),
    "shards": lambda folder: IndexedShards(folder),
    "bytes": lambda folder: IndexedShards(folder, decode=None),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_data_without_a_transform_are_not_seeded(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("seeded")

    monkeypatch.setattr(random, "seed", refuse)
    assert len(list(loader(PLAIN[kind](folder), collate_fn=None))) == 6
    with pytest.raises(AssertionError, match="seeded"):
        list(loader(Augmented()))


class Twice:
    """An order in which each sample comes twice, with slices."""

    fingerprint, epoch_length = "twice", 2 * COUNT

    def take(self, start: int, stop: int) -> Any:
        return np.array([i % COUNT if i < COUNT else (i * 7) % COUNT for i in range(start, stop)])

    def __iter__(self) -> Iterator[int]:
        return iter(self.take(0, 2 * COUNT).tolist())


def rows_by_sample(world: int, batches: Any, **options: Any) -> dict[int, list[Any]]:
    """The sorted draws of all times that a sample came."""
    found: dict[int, list[Any]] = {}
    for rank in range(world):
        one = loader(Augmented(), (world, rank), batches(world, rank), **options)
        for batch in one:
            for row in batch.tolist():
                found.setdefault(int(row[0]), []).append(row)
        one.close()
    return {index: sorted(rows) for index, rows in found.items()}


def test_a_sample_that_comes_twice_has_other_random_numbers_each_time() -> None:
    def mixed(size: int) -> Any:
        return lambda world, rank: DistributedBatchSampler(COUNT, size, sampler=Twice(), num_replicas=world, rank=rank)

    whole = rows_by_sample(1, mixed(4))
    assert all(len(rows) == 2 and rows[0][1:] != rows[1][1:] for rows in whole.values())
    assert rows_by_sample(2, mixed(3)) == rows_by_sample(4, mixed(2), num_workers=1) == whole


class Repeating(Bare):
    """Somebody's batch sampler without a state or `draws`, with repeats in a batch and between batches."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 0], [2, 0, 1], [3, 3, 3]])

    def __len__(self) -> int:
        return 3


def test_repeats_of_a_batch_sampler_that_says_nothing_are_counted() -> None:
    def batches(world: int, rank: int) -> Any:
        return Repeating()

    whole = rows_by_sample(1, batches)
    assert {index: len({tuple(row) for row in rows}) for index, rows in whole.items()} == {0: 3, 1: 2, 2: 1, 3: 3}
    first = loader(Augmented(), batches=Repeating())
    found = [batch.tolist() for batch in islice(first, 1)]
    rest = loader(Augmented(), batches=Repeating(), num_workers=1)
    rest.load_state_dict(first.state_dict())
    found += [batch.tolist() for batch in rest]
    rest.close()
    assert found == [batch.tolist() for batch in loader(Augmented(), batches=Repeating())]


class Misnamed(Repeating):
    """Whose `draws` are something else."""

    def draws(self) -> None:
        raise AssertionError("not what is asked for")


class Counting(DistributedBatchSampler):
    @property  # type: ignore[override]
    def draws(self) -> int:
        return 3

    @draws.setter
    def draws(self, value: Any) -> None:
        pass


def test_draws_that_mean_something_else_are_left_alone() -> None:
    expected = [batch.tolist() for batch in loader(Augmented(), batches=Repeating())]
    assert [batch.tolist() for batch in loader(Augmented(), batches=Misnamed())] == expected
    found = noted(one := loader(Augmented(), batches=Counting(COUNT, 4)), 0, lambda: one.indices)
    assert found == {where: row for where, row in draws_of(Augmented()).items() if where[0] == 0}


def test_torchs_weighted_sampler_repeats_no_crop() -> None:
    order = WeightedRandomSampler([1.0] * 4, 32, generator=torch.Generator().manual_seed(1))
    rows = torch.cat(list(loader(Augmented(4), batches=BatchSampler(order, 8, drop_last=False))))
    assert len(torch.unique(rows, dim=0)) == 32


def test_workers_that_persist_follow_the_epoch() -> None:
    one = loader(Augmented(), num_workers=2)
    found: Draws = {}
    for epoch in (0, 1):
        one.set_epoch(epoch)
        found |= noted(one, epoch, lambda: one.indices)
    one.close()
    assert found == draws_of(Augmented())


def test_damaged_samples_leave_the_others_as_they_are(folder: Path) -> None:
    def sometimes(sample: dict[str, Any]) -> torch.Tensor:
        if sample["json"] % 5 == 0:
            raise DecodeError("no such luck")
        return augment(sample)

    whole = draws_of(IndexedShards(folder, transform=augment))
    with pytest.warns(UserWarning, match="skipped a sample"):
        found = draws_of(IndexedShards(folder, transform=sometimes), on_error="skip")
    assert found == {where: row for where, row in whole.items() if where[1] % 5}


def test_seed_per_is_checked() -> None:
    with pytest.raises(ValueError, match="seed_per must be 'sample' or 'step', got 'worker'"):
        loader(Augmented(), seed_per="worker")


@pytest.mark.parametrize("seed_per", ["sample", "step"])
def test_a_data_module_refuses_a_checkpoint_of_the_other_kind(seed_per: Any) -> None:
    def module(seed_per: Any) -> MapDataModule:
        made = MapDataModule({"train": Globals()}, batch_size=3, seed_per=seed_per, collate_fn=torch.stack)
        made.setup("fit")
        return made

    saved = module(seed_per)
    next(iter(saved.train_dataloader()))
    other = module("step" if seed_per == "sample" else "sample")
    other.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=f"does not fit: checkpoint has seed_per='{seed_per}', got seed_per="):
        other.train_dataloader()


def test_a_hugging_face_dataset_is_seeded_if_it_has_a_transform() -> None:
    datasets = pytest.importorskip("datasets")
    plain = datasets.Dataset.from_dict({"number": list(range(COUNT))})
    assert is_plain(plain)
    one = loader(plain, collate_fn=len)
    plain.set_transform(lambda rows: {"drawn": [draw_all(number) for number in rows["number"]]})
    assert not is_plain(plain)  # also where it is set later
    one.close()

    def stacked(samples: list[Any]) -> torch.Tensor:
        return torch.stack([sample["drawn"] for sample in samples])

    assert draws_of(plain, 2, collate_fn=stacked, batch_size=3) == draws_of(Augmented())


# Under a trainer, in processes of their own that are forked from a server which has imported torch and Lightning


def run(world: int, *arguments: Any) -> list[int | None]:
    """Exit codes of the ranks."""
    meeting = Meeting(world) if world > 1 else None
    environment = meeting.environment if meeting else {}
    ranks = [SERVER.Process(target=augmented.train, args=(rank, environment, *arguments)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(LIMIT)
    return [rank.exitcode for rank in ranks]


def rows_of(out: Path, name: str, done: int | None = None) -> Draws:
    """The draws by epoch and index of all ranks, in the first `done` steps."""
    found: Draws = {}
    for path in out.glob(f"{name}?.jsonl"):
        for epoch, rows in map(json.loads, path.read_text().splitlines()[:done]):
            found |= {(epoch, int(row[0])): tuple(row) for row in rows}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("map", marks=pytest.mark.nightly), "shards"])
def test_a_fit_that_was_killed_sees_the_same_crops_with_other_ranks_and_workers(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    expected = draws_of(Augmented())
    assert run(1, kind, folder, tmp_path, "whole", 0) == [0], (tmp_path / "whole0.err").read_text()
    assert rows_of(tmp_path, "whole") == expected
    assert run(1, kind, folder, tmp_path, "first", 3, 14) == [-signal.SIGKILL], (tmp_path / "first0.err").read_text()
    before = rows_of(tmp_path, "first", 12)
    assert run(2, kind, folder, tmp_path, "rest", 0, -1, tmp_path / "first.ckpt") == [0, 0]
    after = rows_of(tmp_path, "rest")
    assert (len(before), len(after)) == (COUNT + 12, COUNT - 12)
    assert before | after == expected


def test_one_process_alone_finds_every_step_of_a_run_on_several_ranks() -> None:
    """A notebook with the last checkpoint before the step that is looked for: in this epoch, or a later one."""
    ranks = [loader(Augmented(), (3, rank), collate_fn=noisy_stack) for rank in range(3)]
    steps, indices, state = list[Any](), list[Any](), dict[str, Any]()
    for _ in range(3):
        for step in zip(*ranks, strict=True):
            steps.append(step)
            indices.append([list(one.indices) for one in ranks])
            state = state or ranks[0].state_dict()
    alone = loader(Augmented(), (1, 0), collate_fn=noisy_stack)
    alone.load_state_dict(state)
    for number, step in enumerate(steps):
        assert alone.step(number) == indices[number]
        assert {row["rank"] for row in alone.samples_of_step(number)} == {0, 1, 2}
        assert all(torch.equal(alone.replay(number, rank=rank), batch) for rank, batch in enumerate(step))
    next(iter(alone))  # from here on the run has one rank
    assert len(alone.step(1)) == len(alone.step(2)) == 1


@pytest.mark.parametrize("workers", [(0, 2), (2, 0)])
def test_a_step_that_is_replayed_is_the_batch_that_was_trained_on(workers: tuple[int, int]) -> None:
    """Bit by bit, after a resume with other workers, whichever rank asks."""
    trained: dict[tuple[int, int], Any] = {}
    state: Any = {}
    for rank in range(2):
        one = loader(Augmented(), (2, rank), num_workers=workers[0], collate_fn=noisy_stack)
        for epoch in range(2):
            one.set_epoch(epoch)
            for batch in islice(one, 2 if epoch else None):
                trained[(one.run_steps or 0) - 1, rank] = batch
        state = json.loads(json.dumps(one.state_dict()))
        one.close()
    for rank in range(2):
        one = loader(Augmented(), (2, rank), num_workers=workers[1], collate_fn=noisy_stack)
        one.load_state_dict(state)
        coming = {(number, r): one.replay(number, rank=r) for number in range(5, 9) for r in range(2)}
        for epoch in range(one.epoch, 3):
            one.set_epoch(epoch)
            for batch in one:
                number = (one.run_steps or 0) - 1
                trained[number, rank] = batch
                assert torch.equal(one.replay(number), batch)
        assert all(torch.equal(coming[where], trained[where]) for where in coming if where[1] == rank)
        for (number, r), batch in trained.items():
            assert torch.equal(one.replay(number, rank=r), batch), (number, r)
        one.close()
    assert len(trained) == 9 * 2
