"""For loops of others: the batches of all ranks, the state inside a loader's state, and what a guard refuses.

The loops themselves run in ``headrace/tests/integrations``, with the real libraries.
"""

import time
from collections import Counter
from contextlib import nullcontext, suppress
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from doors import sampler_with
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.integrations import (
    NoSamplerStateError,
    PreparedBatchSampler,
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

    with pytest.raises(NoSamplerStateError):
        sampler_state(state(batch_size=4))
    with pytest.raises(ValueError, match=r"got one that is 1 batches behind: .*snapshot_every_n_steps=1"):
        sampler_state(state(batch_sampler=of_rank(0), num_workers=1, snapshot_every_n_steps=3))
    with pytest.raises(TypeError, match="loader_state must be a dict that state_dict"):
        sampler_state([])  # type: ignore[arg-type]  # as users may


class PreparedLoader:
    """As accelerate makes one: of the batches of all ranks it gives one rank's, and it reads ahead."""

    def __init__(self, batches: Any, rank: int, world: int) -> None:
        self.batches, self.rank, self.world = batches, rank, world
        self.batch_sampler = SimpleNamespace(num_processes=world)

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


def loader_of(batch_sampler: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), batch_sampler=batch_sampler, collate_fn=numbers)


def test_a_trainer_finds_set_epoch_where_it_looks() -> None:
    sampler = of_rank(0)
    loader: Any = loader_of(sampler)
    loader.batch_sampler.batch_sampler.set_epoch(3)
    assert sampler.epoch == 3
