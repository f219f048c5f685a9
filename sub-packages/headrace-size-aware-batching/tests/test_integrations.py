"""For loops of others: the batches of all ranks, the state inside a loader's state, and what a guard refuses.

The loops themselves run in ``headrace/tests/integrations``, with the real libraries.
"""

import json
import time
from collections import Counter
from contextlib import nullcontext, suppress
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from doors import sampler_with
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.integrations import (
    PreparedBatchSampler,
    TrainerGuard,
    TrainerLoader,
    sampler_state,
)
from headrace.size_aware_batching.planning.options import STRATEGIES, TAILS, Strategy, Tail

SIZES = np.array([1 + (37 * number) % 211 for number in range(403)])


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, index: int) -> int:
        return index


def numbers(batch: list[int]) -> list[int]:
    return batch


def of_rank(rank: Any, world: int = 3, **options: Any) -> Any:
    return sampler_with(SIZES, 500, cost="sum", num_replicas=world, rank=rank, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("world", [1, 3, 8])
def test_the_batches_of_all_ranks_come_step_by_step(strategy: Strategy, tail: Tail, world: int) -> None:
    own = [list(of_rank(rank, world, strategy=strategy, tail=tail)) for rank in range(world)]
    sampler = of_rank("all", world, strategy=strategy, tail=tail)
    assert sampler.rank == "all"
    both = list(sampler), list(chain.from_iterable(zip(*own, strict=True)))
    if tail == "split" and strategy != "sequential":  # the ranks share out the samples of the last steps by work
        steps = [
            [sorted(chain.from_iterable(batches[n : n + world])) for n in range(0, len(batches), world)]
            for batches in both
        ]
        assert steps[0] == steps[1]
        both = both[0][: -2 * world], both[1][: -2 * world]
    assert both[0] == both[1]
    assert len(sampler) == world * len(own[0])
    assert sampler.remaining == 0


def test_the_batches_of_all_ranks_resume_at_every_one_of_them() -> None:
    whole, sampler = list(of_rank("all")), of_rank("all")
    for done, _ in enumerate(sampler, 1):
        resumed = of_rank("all")
        resumed.load_state_dict(sampler.state_dict())
        remaining, rest = resumed.remaining, list(resumed)
        assert remaining == len(rest)
        # Between two steps it goes on as if nothing had happened; else what is left makes steps of its own.
        assert rest == whole[done:] or done % 3
        assert Counter(chain.from_iterable(whole[:done] + rest)) == Counter(range(len(SIZES)))


def test_a_rank_that_is_neither_a_number_nor_all_is_refused() -> None:
    with pytest.raises(ValueError, match="rank must be an int >= 0 or \"all\", got 'every'"):
        of_rank("every")
    with pytest.raises(ValueError, match="mesh and rank='all' were both given"):
        DistributedSizeAwareBatchSampler(SIZES, 500, rank="all", mesh=SimpleNamespace(size=int, get_local_rank=int))


@pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")  # torchdata calls it in its constructor
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on machines with fewer cores
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 1), pytest.param(3, 2, marks=pytest.mark.nightly)])
def test_a_stateful_loader_goes_on_with_another_number_of_workers(before: int, after: int) -> None:
    def loader(workers: int, sampler: DistributedSizeAwareBatchSampler) -> StatefulDataLoader[Any]:
        return StatefulDataLoader(Numbers(), batch_sampler=sampler, collate_fn=numbers, num_workers=workers)

    whole = list(of_rank(1))
    interrupted = loader(before, of_rank(1))
    batches = iter(interrupted)
    begun = [next(batches) for _ in range(5)]
    state = interrupted.state_dict()
    del batches
    sampler = of_rank(1)
    sampler.load_state_dict(sampler_state(state))
    assert begun + list(loader(after, sampler)) == whole


class Waiting(Numbers):
    """Each batch waits for the file of its number: the order of the files is the order of the workers."""

    def __init__(self, batches: list[list[int]], released: Path) -> None:
        self.number_of = {index: number for number, batch in enumerate(batches) for index in batch}
        self.released = released

    def __getitem__(self, index: int) -> int:
        while not (self.released / str(self.number_of[index])).exists():
            time.sleep(0.01)
        return index


# Every order in which two workers can deliver two batches each: one has batches 0 and 2, the other 1 and 3.
ORDERS = [(0, 1, 2, 3), (0, 1, 3, 2), (0, 2, 1, 3), (1, 0, 2, 3), (1, 0, 3, 2), (1, 3, 0, 2)]


@pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("order", ORDERS)
def test_a_state_of_batches_out_of_order_is_refused(tmp_path: Path, order: tuple[int, ...]) -> None:
    whole = list(of_rank(1))
    loader = StatefulDataLoader(
        Waiting(whole, tmp_path), batch_sampler=of_rank(1), collate_fn=numbers, num_workers=2, in_order=False
    )
    batches = iter(loader)
    for done, number in enumerate(order, 1):
        (tmp_path / str(number)).touch()
        assert next(batches) == whole[number]
        seen, first, state = order[:done], tuple(range(done)), loader.state_dict()
        if set(seen) == set(first):
            # Where the first ones came in another order, torchdata's state may be too old, or be exact.
            with nullcontext() if seen == first else suppress(ValueError):
                sampler = of_rank(1)
                sampler.load_state_dict(sampler_state(state))
                assert list(sampler) == whole[done:]
        else:
            with pytest.raises(ValueError, match=r"in_order=True"):
                sampler_state(state)
    for number in range(len(whole)):  # lets the workers end
        (tmp_path / str(number)).touch()
    del batches


class Damaged(Numbers):
    """A batch of it is an error."""

    def __init__(self, batch: list[int]) -> None:
        self.batch = set(batch)

    def __getitem__(self, index: int) -> int:
        if index in self.batch:
            raise RuntimeError(f"sample {index} is damaged")
        return index


@pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
# After an error torchdata waits five seconds for each worker to end.
@pytest.mark.parametrize("workers", [0, 1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_state_of_a_loop_that_went_on_after_an_error_is_refused(workers: int) -> None:
    whole = list(of_rank(1))
    loader = StatefulDataLoader(
        Damaged(whole[1]), batch_sampler=of_rank(1), collate_fn=numbers, num_workers=workers, in_order=True
    )
    batches = iter(loader)
    assert next(batches) == whole[0]
    with pytest.raises(RuntimeError, match="is damaged"):
        next(batches)
    assert next(batches) == whole[2]
    with pytest.raises(ValueError, match=r"after an error of the dataset: .* lose"):
        sampler_state(loader.state_dict())
    del batches


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")
def test_a_state_without_the_samplers_is_refused() -> None:
    def state(**options: Any) -> dict[str, Any]:
        loader = StatefulDataLoader(Numbers(), **options)
        batches = iter(loader)
        next(batches)
        found: dict[str, Any] = loader.state_dict()
        return found

    with pytest.raises(ValueError, match="loader_state must be that of a StatefulDataLoader over a sampler of"):
        sampler_state(state(batch_size=4))
    with pytest.raises(ValueError, match=r"got one that is 1 batches behind: .*snapshot_every_n_steps=1"):
        sampler_state(state(batch_sampler=of_rank(0), num_workers=1, snapshot_every_n_steps=3))
    with pytest.raises(TypeError, match="loader_state must be a dict that state_dict"):
        sampler_state([])  # type: ignore[arg-type]  # as users may


class PreparedLoader:
    """As accelerate makes one: of the batches of all ranks it gives one rank's, and it reads ahead."""

    def __init__(self, batches: Any, rank: int, world: int) -> None:
        self.batches, self.rank, self.world = batches, rank, world

    def __iter__(self) -> Any:
        batches, read = iter(self.batches), list[Any]()
        while step := list(islice(batches, self.world)):
            read.append(step[self.rank])
            if len(read) > 3:
                yield read.pop(0)
        yield from read


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (4, 2)])
@pytest.mark.parametrize("options", [{}, {"tokens_per_step": 4000}], ids=["", "tokens_per_step"])
def test_a_prepared_loader_goes_on_with_other_processes(before: int, after: int, options: dict[str, Any]) -> None:
    def batches_of(world: int) -> PreparedBatchSampler:
        return PreparedBatchSampler(of_rank("all", world, **options))

    whole = len(batches_of(before)) // before
    for done in (1, 2, whole // 2, whole - 1, whole):
        seen = Counter[int]()
        for rank in range(before):
            batches = batches_of(before)
            batches.set_epoch(1)
            for batch in islice(batches.delivered(PreparedLoader(batches, rank, before)), done):
                seen.update(batch)
            state = batches.state_dict()
            assert batches.run_steps == state["step"] == done
        for rank in range(after):
            resumed = batches_of(after)
            resumed.load_state_dict(state)
            resumed.sampler.set_epoch(resumed.epoch)
            for batch in resumed.delivered(PreparedLoader(resumed, rank, after)):
                seen.update(batch)
            assert resumed.epoch == 1
            resumed.sampler.set_epoch(2)
            assert resumed.state_dict()["position"] == 0
            assert len(list(resumed.delivered(PreparedLoader(resumed, rank, after)))) == len(resumed) // after
        assert seen == Counter(range(len(SIZES)))


def test_a_prepared_loader_whose_batches_nobody_counts_has_no_state() -> None:
    batches = PreparedBatchSampler(of_rank("all", 2))
    next(iter(PreparedLoader(batches, 0, 2)))
    with pytest.raises(RuntimeError, match=r"the loop must iterate over delivered\(loader\)"):
        batches.state_dict()
    next(iter(batches.delivered(PreparedLoader(batches, 0, 2))))
    assert batches.state_dict()["position"] > 0
    with pytest.raises(ValueError, match=r'sampler must have rank="all", .* with rank=0: construct it with rank="all"'):
        PreparedBatchSampler(of_rank(0))


def test_a_loader_for_a_trainer_must_be_resumable() -> None:
    with pytest.raises(TypeError, match="loader must be a ResumableLoader, got DataLoader without"):
        TrainerLoader(loader_of(of_rank(0)))


def begin(
    guard: TrainerGuard,
    loader: Any,
    world_size: int = 3,
    saved: Any = None,
    epochs: int = 2,
    skip: bool = False,
    accumulated: int = 1,
) -> Any:
    """What a trainer does when its training begins, or goes on from a checkpoint."""
    state = SimpleNamespace(
        global_step=0 if saved is None else 7, stateful_callbacks={}, num_train_epochs=epochs, epoch=0.0
    )
    if saved:
        state.stateful_callbacks["headrace"] = saved
    arguments = SimpleNamespace(world_size=world_size, ignore_data_skip=skip, gradient_accumulation_steps=accumulated)
    guard.on_train_begin(arguments, state, None, train_dataloader=loader)
    return state


def loader_of(batch_sampler: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), batch_sampler=batch_sampler, collate_fn=numbers)


def test_a_guard_refuses_what_a_checkpoint_was_not_saved_with() -> None:
    sampler = of_rank(0)
    saved = begin(TrainerGuard(sampler), loader_of(sampler)).stateful_callbacks["headrace"]
    begin(TrainerGuard(sampler), loader_of(sampler), saved=saved)
    with pytest.raises(ValueError, match=r"world_size must be 3, as in the checkpoint, got 2: .*; resume with 3"):
        begin(TrainerGuard(sampler), loader_of(sampler), world_size=2, saved=saved)
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps must be 1, as in the checkpoint, got 2: "):
        begin(TrainerGuard(sampler), loader_of(sampler), saved=saved, accumulated=2)
    begin_again_with_tokens_per_step()
    other = of_rank(0, seed=1)
    with pytest.raises(ValueError, match=r"the checkpoint is of other batches: .*construct it as then"):
        begin(TrainerGuard(other), loader_of(other), saved=saved)
    with pytest.warns(UserWarning, match="was saved without a TrainerGuard"):
        begin(TrainerGuard(sampler), loader_of(sampler), saved={})
    with pytest.raises(ValueError, match="ignore_data_skip must be False, got True"):
        begin(TrainerGuard(sampler), loader_of(sampler), saved=saved, skip=True)


def begin_again_with_tokens_per_step() -> None:
    """Its steps are the same on any number of processes, with the accumulated batches of these."""
    before, after = (of_rank(0, world, tokens_per_step=4000, tail="drop") for world in (3, 1))
    assert before.accumulate < after.accumulate
    saved = begin(TrainerGuard(before), loader_of(before), accumulated=before.accumulate).stateful_callbacks["headrace"]
    begin(TrainerGuard(after), loader_of(after), 1, saved=saved, accumulated=after.accumulate)
    with pytest.raises(ValueError, match=f"gradient_accumulation_steps must be {after.accumulate}, as an optimizer"):
        begin(TrainerGuard(after), loader_of(after), 1, saved=saved, accumulated=before.accumulate)


def test_a_guard_refuses_loaders_that_lose_or_repeat_batches() -> None:
    class Shard(BatchSampler):
        """As accelerate makes it."""

        def __init__(self, batch_sampler: Any) -> None:
            self.batch_sampler, self.num_processes = batch_sampler, 3

    sampler, of_all = of_rank(0), of_rank("all")
    begin(TrainerGuard(of_all), loader_of(Shard(of_all)))
    with pytest.raises(ValueError, match=r'2 of 3 batches would be lost: .*rank="all"'):
        begin(TrainerGuard(sampler), loader_of(Shard(sampler)))
    with pytest.raises(ValueError, match="every process would train on all batches"):
        begin(TrainerGuard(of_all), loader_of(of_all))
    for other in (of_rank(0), BatchSampler(SequentialSampler(SIZES), 4, drop_last=False)):
        with pytest.raises(ValueError, match="sampler must be that of the trainer's loader, got another one"):
            begin(TrainerGuard(sampler), loader_of(other))
    with pytest.raises(TypeError, match="sampler must be a sampler of headrace, got list without"):
        TrainerGuard([[0]])


def test_a_guard_refuses_epochs_of_different_lengths_and_chooses_the_epoch() -> None:
    sampler = of_rank(0, 1, strategy="sequential")
    lengths = set()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        lengths.add(len(sampler))
    assert len(lengths) > 1
    begin(TrainerGuard(sampler), loader_of(sampler), 1, epochs=1)
    with pytest.raises(ValueError, match=r"all epochs must have the same number of batches, got .* num_train_epochs=1"):
        begin(TrainerGuard(sampler), loader_of(sampler), 1)
    even = of_rank(0)
    guard = TrainerGuard(even)
    state = begin(guard, loader_of(even))
    state.epoch = 1.4
    guard.on_epoch_begin(None, state, None)
    assert even.epoch == 1
    assert guard.on_evaluate(None, None, None) is None
    with pytest.raises(AttributeError, match="TrainerGuard has no of"):
        guard.of()


@pytest.mark.parametrize("steps", [3, 1_000], ids=["in an epoch", "at its end"])
def test_a_guard_keeps_the_record_of_the_run_in_the_checkpoints(steps: int) -> None:
    """A resumed run numbers its steps on, and delivers what an unbroken one does."""
    first = of_rank(0)
    guard = TrainerGuard(first)
    state = begin(guard, loader_of(first))
    guard.on_epoch_begin(None, state, None)
    for _ in islice(first, steps):
        guard.on_step_end(None, state, None)
    saved = json.loads(json.dumps(state.stateful_callbacks["headrace"]))
    length = len(first)
    assert saved["sampler"]["step"] == min(steps, length)
    resumed = of_rank(0)
    guard = TrainerGuard(resumed)
    state = begin(guard, loader_of(resumed), saved=saved)
    state.epoch = 0.3 if steps < length else 1.0
    guard.on_epoch_begin(None, state, None)
    again = list(resumed)
    guard.on_step_end(None, state, None)
    wanted = of_rank(0)
    wanted.set_epoch(int(state.epoch))
    assert again == list(wanted)
    assert state.stateful_callbacks["headrace"]["sampler"]["step"] == length * (1 + int(state.epoch))
    assert [resumed.step(number)[0] for number in range(length)] == list(of_rank(0))


def test_a_guard_resumes_with_an_order_that_keeps_no_record() -> None:
    def batches() -> Any:
        order = RandomSampler(SIZES, generator=torch.Generator().manual_seed(0))
        return DistributedSizeAwareBatchSampler(SIZES, 500, sampler=order, num_replicas=1, rank=0)

    first = batches()
    guard = TrainerGuard(first)
    state = begin(guard, loader_of(first), 1, epochs=1)
    guard.on_epoch_begin(None, state, None)
    next(iter(first))
    guard.on_step_end(None, state, None)
    resumed = batches()
    guard = TrainerGuard(resumed)
    saved = {**state.stateful_callbacks["headrace"], "fingerprint": resumed.fingerprint}
    state = begin(guard, loader_of(resumed), 1, saved=saved, epochs=1)
    guard.on_epoch_begin(None, state, None)
    assert list(resumed) == list(batches())


@pytest.mark.parametrize(
    ("change", "names"), [(lambda batches: batches.exclude([3]), "exclude"), (lambda batches: batches.skip(1), "skip")]
)
def test_a_guard_refuses_changes_of_the_run_and_checkpoints_of_other_samples(change: Any, names: str) -> None:
    sampler, refused = of_rank(0), f"{names} of the sampler must not be called in a run of a Trainer"
    guard = TrainerGuard(sampler)
    state = begin(guard, loader_of(sampler))
    guard.on_epoch_begin(None, state, None)
    batches = iter(sampler)
    next(batches)
    guard.on_step_end(None, state, None)
    change(sampler)
    with pytest.raises(ValueError, match=refused):
        guard.on_step_end(None, state, None)
    saved = json.loads(json.dumps(state.stateful_callbacks["headrace"]))
    assert saved["sampler"]["step"] == 1
    resumed = of_rank(0)
    change(resumed)
    with pytest.raises(ValueError, match=refused):
        begin(TrainerGuard(resumed), loader_of(resumed), saved=saved)


def test_a_trainer_finds_set_epoch_where_it_looks() -> None:
    sampler = of_rank(0)
    loader: Any = loader_of(sampler)
    loader.batch_sampler.batch_sampler.set_epoch(3)
    assert sampler.epoch == 3
