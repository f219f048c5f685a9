"""Blocks: the laws of planned batches hold where only a part of the sizes is in memory."""

import copy
import pickle
import warnings
import weakref
from collections import Counter, UserList
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies_of_sizes import Case, cases, examples
from torch.utils.data import DataLoader

from headrace.size_aware_batching import BlockwiseSizeAwareBatchSampler, DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.planning.options import TAILS, Strategy, Tail
from headrace.size_aware_batching.planning.strata import COUNTED
from headrace.size_aware_batching.testing import check_resumes

Way = tuple[Strategy, Literal["sum", "padded"]]
WAYS: list[Way] = [
    ("sequential", "sum"),
    ("sequential", "padded"),
    ("stratified", "sum"),
    ("bucketed", "sum"),
    ("bucketed", "padded"),
    ("packed", "sum"),
]
ways = st.sampled_from(WAYS)
worlds = st.integers(1, 9)
blocks = st.sampled_from([1, 7, 40, 150, 10_000])
# Where there are fewer samples than ranks, some are repeated; that this is said is tested by itself.
repeats = pytest.mark.filterwarnings("ignore:tail='split'.*:UserWarning")


class Shards:
    """Sizes cut into shards, some of them empty; counts how often each is read."""

    def __init__(self, sizes: Any, seed: int = 0) -> None:
        self.sizes = np.asarray(sizes)
        draw = np.random.default_rng(seed)
        count = int(draw.integers(1, 2 + len(self.sizes) // 4))
        self.cuts = np.sort(draw.integers(0, len(self.sizes) + 1, count - 1))
        self.cuts = np.concatenate([[0], self.cuts, [len(self.sizes)]])
        self.read: Counter[int] = Counter()

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.cuts)

    def __call__(self, shard: int) -> Any:
        self.read[shard] += 1
        return self.sizes[self.cuts[shard] : self.cuts[shard + 1]]


def make(case: Any, way: Way = ("stratified", "sum"), world: int = 1, rank: Any = 0, **more: Any) -> Any:
    sizes, budget = case
    shards = sizes if isinstance(sizes, Shards) else Shards(sizes)
    options: dict[str, Any] = {"lengths": shards.lengths, "block": 40, "strategy": way[0], "cost": way[1]} | more
    return BlockwiseSizeAwareBatchSampler(shards, budget, num_replicas=world, rank=rank, **options)


def all_ranks(case: Any, way: Way, world: int, state: Any = None, epoch: int = 0, **more: Any) -> list[list[list[int]]]:
    """Return what every rank gets, after loading a state if there is one."""
    samplers = [make(case, way, world, rank, **more) for rank in range(world)]
    for sampler in samplers:
        if state is None:
            sampler.set_epoch(epoch)
        else:
            sampler.load_state_dict(state)
    lengths = {len(sampler) if state is None else sampler.remaining for sampler in samplers[:2]}
    ranks = [list(sampler) for sampler in samplers]
    assert {len(batches) for batches in ranks} == lengths
    return ranks


def samples(ranks: list[list[list[int]]]) -> Counter[int]:
    return Counter(index for batches in ranks for batch in batches for index in batch)


def cost_of(batch: list[int], sizes: Any, cost: str) -> int:
    chosen = [int(sizes[index]) for index in batch]
    return sum(chosen) if cost == "sum" else len(chosen) * max(chosen)


@pytest.mark.slow
@examples(50)
@given(cases(), ways, blocks, st.booleans(), st.integers(0, 3))
def test_each_sample_once_and_within_the_budget(case: Case, way: Way, block: int, shuffle: bool, epoch: int) -> None:
    sampler = make(case, way, block=block, shuffle=shuffle)
    sampler.set_epoch(epoch)
    length, batches = len(sampler), list(sampler)
    assert len(batches) == length
    assert all(batches)
    assert sorted(index for batch in batches for index in batch) == list(range(len(case[0])))
    assert all(cost_of(batch, case[0], way[1]) <= case[1] for batch in batches)


@pytest.mark.slow
@repeats
@examples(40)
@given(cases(), ways, blocks, worlds, st.integers(0, 2))
def test_every_rank_has_as_many_steps_and_nothing_is_lost(
    case: Case, way: Way, block: int, world: int, epoch: int
) -> None:
    ranks = all_ranks(case, way, world, block=block, epoch=epoch)
    found, steps = samples(ranks), len(ranks[0])
    assert set(found) == set(range(len(case[0])))
    if len(case[0]) >= steps * world:  # there are samples for all batches: none is there twice
        assert set(found.values()) <= {1}
    assert all(cost_of(batch, case[0], way[1]) <= case[1] for batches in ranks for batch in batches)


@pytest.mark.slow
@repeats
@examples(40)
@given(cases(), ways, blocks, st.booleans(), worlds, worlds, st.data())
def test_resuming_at_any_step_and_any_world_size_leaves_the_exact_remainder(
    case: Case, way: Way, block: int, shuffle: bool, world: int, other: int, data: st.DataObject
) -> None:
    options: dict[str, Any] = {"block": block, "shuffle": shuffle}
    uninterrupted = all_ranks(case, way, world, **options)
    steps = len(uninterrupted[0])
    stop = data.draw(st.integers(0, steps))
    running = make(case, way, world, 0, **options)
    assert list(islice(running, stop)) == uninterrupted[0][:stop]
    state = running.state_dict()
    assert all_ranks(case, way, world, state, **options) == [rank[stop:] for rank in uninterrupted]
    delivered = samples([rank[:stop] for rank in uninterrupted])
    rest = samples(all_ranks(case, way, other, state, **options))
    everything = set(range(len(case[0])))
    if len(case[0]) >= steps * world:
        assert set(rest) == everything - set(delivered)
    assert set(rest) | set(delivered) == everything


@pytest.mark.slow
@repeats
@examples(25)
@given(cases(), ways, blocks, st.lists(st.tuples(worlds, st.integers(1, 6)), min_size=1, max_size=12))
def test_a_run_of_kills_and_worlds_delivers_each_epoch_once_and_knows_its_steps(
    case: Case, way: Way, block: int, lives: list[tuple[int, int]]
) -> None:
    shards = Shards(case[0])
    state: Any = None
    steps: list[Any] = []
    epoch, seen = 0, Counter[int]()
    for world, length in lives:
        ranks = [make((shards, case[1]), way, world, rank, block=block) for rank in range(world)]
        for sampler in ranks:
            if state is not None:
                sampler.load_state_dict(state)
            sampler.set_epoch(epoch)
        running = [iter(sampler) for sampler in ranks]
        for _ in range(length):
            step: list[Any] = [next(one, None) for one in running]
            if step[0] is None:
                assert step == [None] * world
                assert set(seen) == set(range(len(case[0])))
                if len(case[0]) >= sum(len(one) for one in steps):
                    assert set(seen.values()) <= {1}
                epoch, seen = epoch + 1, Counter()
                break
            steps.append(step)
            seen.update(index for batch in step for index in batch)
        for sampler in ranks[1:]:
            assert sampler.state_dict() == ranks[0].state_dict()
        state = ranks[0].state_dict()
    fresh = make((shards, case[1]), way, 1, 0, block=block)
    fresh.load_state_dict(state)
    if len(case[0]):
        assert [fresh.step(number) for number in range(len(steps))] == steps


@pytest.mark.slow
@repeats
@examples(40)
@given(cases(), ways, blocks, worlds, worlds, st.data())
def test_steps_are_skipped_and_ranks_change_in_the_middle_of_an_epoch(
    case: Case, way: Way, block: int, world: int, other: int, data: st.DataObject
) -> None:
    sampler = make(case, way, world, "all", block=block)
    n_steps = len(sampler) // world
    before, skipped_steps = data.draw(st.integers(0, n_steps)), data.draw(st.integers(1, 4))
    batches = iter(sampler)
    delivered = [index for batch in islice(batches, before * world) for index in batch]
    skipped = sampler.skip(skipped_steps).tolist()
    sampler.reshard(other)
    state = sampler.state_dict()
    rest = list(batches)
    assert len(rest) % other == 0
    assert state["step"] == before  # a step that was skipped is none of the run
    assert set(delivered) | set(skipped) | {index for batch in rest for index in batch} == set(range(len(case[0])))
    resumed = make(case, way, other, "all", block=block)
    resumed.load_state_dict(state)
    assert list(resumed) == rest
    if rest:
        assert resumed.step(state["step"]) == rest[:other]
    if before:
        assert sampler.step(0) == make(case, way, world, "all", block=block).step(0)


@repeats
@examples(25)
@given(cases(), ways, blocks, worlds, st.sampled_from(TAILS))
def test_each_step_is_known_beforehand_and_what_each_tail_does(
    case: Case, way: Way, block: int, world: int, tail: Tail
) -> None:
    balanced = {} if way[0] == "sequential" else {"balanced_ranks": world}
    listed = list(make(case, way, block=block, **balanced))
    options: dict[str, Any] = {"block": block, "tail": tail}
    if tail == "drop" and 0 < len(listed) < world:
        with pytest.raises(ValueError, match="tail='drop' must leave each of"):
            list(make(case, way, world, 0, **options))
        with pytest.raises(ValueError, match="tail='drop' must leave each of"):
            len(make(case, way, world, 0, **options))
        return
    ranks = all_ranks(case, way, world, **options)
    dealt = [ranks[rank][step] for step in range(len(ranks[0])) for rank in range(world)]
    over = len(listed) % world
    if tail == "drop":
        assert dealt == listed[: len(listed) - over]
    elif tail == "pad":
        again = [listed[len(listed) - over + place % over] for place in range(-len(listed) % world)] if over else []
        assert dealt == listed + again
    asked = make(case, way, world, 0, **options)
    for step in reversed(range(len(ranks[0]))):
        assert asked.step(step) == [batches[step] for batches in ranks]
    if ranks[0]:
        asked.set_epoch(1)
        coming = make(case, way, world, 0, **options)
        assert coming.step(len(ranks[0]), rank=0) == next(iter(asked))
    else:
        with pytest.raises(IndexError, match="must be a step of the run"):
            asked.step(0)


@pytest.mark.slow
@examples(8)
@given(cases(), ways, blocks, st.sampled_from(["skip", "own_batch"]), worlds, st.data())
def test_samples_over_the_budget_are_skipped_or_alone_and_positions_go_on_behind_them(
    case: Case, way: Way, block: int, oversize: str, world: int, data: st.DataObject
) -> None:
    sizes = np.concatenate([case[0], np.full(20, case[1] + 1), case[0]])
    sizes = sizes[np.random.default_rng(1).permutation(len(sizes))]
    over = set(np.flatnonzero(sizes > case[1]).tolist())
    options: dict[str, Any] = {"block": block, "oversize": oversize}
    if oversize == "skip" and len(over) == len(sizes):
        with pytest.raises(ValueError, match="oversize='skip' must leave samples to train on"):
            all_ranks((sizes, case[1]), way, world, tail="pad", **options)
        return
    with pytest.warns(UserWarning, match="left out") if oversize == "skip" else _quiet():
        ranks = all_ranks((sizes, case[1]), way, world, tail="pad", **options)
    found = samples(ranks)
    if oversize == "skip":
        assert set(found) == set(range(len(sizes))) - over
    else:
        assert set(found) == set(range(len(sizes)))
        assert all(
            len(batch) == 1 or not over.intersection(batch) or not case[0].all() for one in ranks for batch in one
        )
    stop = data.draw(st.integers(0, len(ranks[0])))
    running = make((sizes, case[1]), way, world, 1 % world, tail="pad", **options)
    with _quiet():
        assert list(islice(running, stop)) == ranks[1 % world][:stop]
        assert all_ranks((sizes, case[1]), way, world, running.state_dict(), tail="pad", **options) == [
            rank[stop:] for rank in ranks
        ]


def _quiet() -> Any:
    return warnings.catch_warnings(action="ignore")


SIZES = np.random.default_rng(0).integers(1, 100, 203)
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "packed": {"way": ("packed", "sum")},
    "padded": {"way": ("bucketed", "padded")},
    "in order": {"way": ("sequential", "sum"), "shuffle": False},
    "shuffled order": {"way": ("sequential", "sum")},
    "a rank of four": {"world": 4, "rank": 1},
    "dropped tail": {"world": 8, "rank": 7, "tail": "drop"},
    "padded tail": {"world": 8, "rank": 7, "tail": "pad"},
    "skipped": {"budget": 80, "oversize": "skip"},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*left out as larger.*:UserWarning")
@pytest.mark.parametrize("cuts", [2, pytest.param(50, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("case", CASES)
def test_it_resumes_everywhere(case: str, cuts: int) -> None:
    options = {"block": 80} | CASES[case]
    budget = options.pop("budget", 300)
    check_resumes(lambda: make((SIZES, budget), **options), most_cuts=cuts)


def test_a_rank_that_stands_for_all_gives_the_steps_of_all_and_resumes_inside_one() -> None:
    ranks = all_ranks((SIZES, 300), ("stratified", "sum"), 3, tail="pad")
    dealt = [batch for step in zip(*ranks, strict=True) for batch in step]
    for stop in (6, 7):
        together = make((SIZES, 300), world=3, rank="all", tail="pad")
        assert len(together) == len(dealt)
        assert list(islice(together, stop)) == dealt[:stop]
        resumed = make((SIZES, 300), world=3, rank="all", tail="pad")
        resumed.load_state_dict(together.state_dict())
        rest = list(resumed)
        assert rest[: len(dealt) - stop] == dealt[stop:]  # from inside a step the last one is filled up again
        assert {index for batch in [*dealt[:stop], *rest] for index in batch} == set(range(len(SIZES)))


def test_only_the_block_of_the_position_is_read_and_one_plan_is_held() -> None:
    held: list[Any] = []

    class Watched(Shards):
        def __call__(self, shard: int) -> Any:
            assert all(one() is None for one in held)  # no plan is there while the next one is made
            return super().__call__(shard)

    shards = Watched(np.arange(2000) % 50 + 1)
    sampler = make((shards, 300), block=200)
    assert sampler.n_blocks == 10
    batches = iter(sampler)
    next(batches)
    read = set(shards.read)
    assert sum(shards.lengths[list(read)]) < 200 + max(shards.lengths)
    held.append(weakref.ref(sampler._planner.planned.lists))
    for _ in batches:
        if sampler._planner.planned.lists is not held[-1]():
            held.append(weakref.ref(sampler._planner.planned.lists))
        assert sum(one() is not None for one in held) == 1
    assert len(held) == 10
    assert set(shards.read.values()) == {1}


def test_a_resume_plans_the_block_of_its_position_alone() -> None:
    shards = Shards(np.arange(2000) % 50 + 1)
    running = make((shards, 300), block=200)
    list(islice(running, 90))
    other = Shards(shards.sizes)
    resumed = make((other, 300), block=200)
    resumed.load_state_dict(running.state_dict())
    assert not other.read
    next(iter(resumed))
    assert sum(other.lengths[list(other.read)]) < 200 + max(other.lengths)


@pytest.mark.parametrize("way", WAYS)
def test_batches_are_counted_without_a_plan_as_they_are_planned(way: Way) -> None:
    rng = np.random.default_rng(3)
    for sizes in (
        SIZES,
        rng.integers(0, 9, 500),
        rng.integers(1, COUNTED + 9, 300),
        SIZES / 7,
        rng.integers(1, 9, (99, 2)),
    ):
        if way[1] == "padded" and sizes.ndim > 1:
            continue
        budget: Any = [40, 50] if sizes.ndim > 1 else int(sizes.max()) * 3
        counted, planned = (make((sizes, budget), way, block=100) for _ in range(2))
        assert len(counted) == len(list(planned)) == len(planned)


def test_in_order_it_gives_the_batches_of_one_plan_of_all() -> None:
    whole = DistributedSizeAwareBatchSampler(SIZES, 300, strategy="sequential", shuffle=False)
    assert list(make((SIZES, 300), ("sequential", "sum"), shuffle=False, block=10**8)) == list(whole)


def test_epochs_differ_in_the_order_of_blocks_and_of_samples() -> None:
    shards = Shards(np.arange(2000) % 50 + 1)
    sampler = make((shards, 300), block=200)
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.append([index for batch in sampler for index in batch])
    block = sampler._planner.blocks
    number = [np.searchsorted(block.starts, _places(block)[order], side="right") - 1 for order in orders]
    sequences = [np.array(list(dict.fromkeys(one.tolist()))) for one in number]
    assert len({tuple(one) for one in sequences}) == 3
    assert all(sorted(one) == list(range(10)) for one in sequences)
    for first in range(10):
        inside = [np.array(order)[one == first] for order, one in zip(orders, number, strict=True)]
        assert {tuple(sorted(one)) for one in inside} == {tuple(sorted(inside[0]))}
        assert len({tuple(one) for one in inside}) == 3


def _places(blocks: Any) -> Any:
    samples_of = blocks.samples(np.arange(blocks.starts[-1]))
    places = np.empty_like(samples_of)
    places[samples_of] = np.arange(len(samples_of))
    return places


@examples(40)
@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 100), st.booleans())
def test_blocks_hold_every_shard_once_and_none_is_longer_than_asked_by_more_than_a_shard(
    lengths: list[int], block: int, shuffle: bool
) -> None:
    sampler = BlockwiseSizeAwareBatchSampler(
        lambda shard: np.ones(lengths[shard], np.int64), 9, lengths=lengths, block=block, shuffle=shuffle
    )
    found = sampler._planner.blocks
    assert sampler.n_samples == sum(lengths) == found.starts[-1]
    assert sorted(found.samples(np.arange(sampler.n_samples)).tolist()) == list(range(sampler.n_samples))
    assert all(np.diff(found.starts) > 0)
    assert all(np.diff(found.starts) < block + max(lengths, default=0) + 1)
    held = [shard for number in range(len(found)) for shard in found.shards(number).tolist()]
    assert {shard for shard, length in enumerate(lengths) if length} <= set(held)
    assert len(held) == len(set(held))


def test_a_loader_with_workers_reads_its_batches() -> None:
    sampler = make((SIZES, 300), world=2, rank=1)
    loader: DataLoader[Any] = DataLoader(torch.arange(203), batch_sampler=sampler, num_workers=2)  # type: ignore[arg-type]  # any sequence
    assert [batch.tolist() for batch in loader] == list(make((SIZES, 300), world=2, rank=1))


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_goes_on_where_the_original_is(made: Any) -> None:
    sampler = make((SIZES, 300))
    batches = iter(sampler)
    list(islice(batches, 11))
    other = made(sampler)
    assert list(other) == list(batches)


@pytest.mark.parametrize("kind", [list, tuple, UserList])
def test_sizes_may_be_lists_maps_floats_and_columns(kind: Any) -> None:
    parts = kind([[3, 4], torch.tensor([5, 1]), np.array([2.5, 0.5])])
    sampler = BlockwiseSizeAwareBatchSampler(parts, 6, block=3, strategy="sequential", shuffle=False)
    assert sampler.n_samples == 6
    assert sorted(index for batch in sampler for index in batch) == list(range(6))
    columns = BlockwiseSizeAwareBatchSampler([[[1, 2], [3, 4]], [[5, 6]]], (8, 9), block=1)
    assert sorted(index for batch in columns for index in batch) == [0, 1, 2]


def test_nothing_at_all_is_an_empty_epoch() -> None:
    for lengths in ([], [0, 0]):
        sampler = BlockwiseSizeAwareBatchSampler(lambda _: [], 9, lengths=lengths, num_replicas=3, rank=1)
        assert (len(sampler), sampler.remaining, list(sampler), sampler.n_blocks) == (0, 0, [], 0)
        sampler.load_state_dict(sampler.state_dict())


def state_of(**options: Any) -> dict[str, Any]:
    sampler = make((SIZES, 300), **options)
    list(islice(sampler, 3))
    state: dict[str, Any] = sampler.state_dict()
    return state


def test_a_state_is_small_and_plain() -> None:
    state = state_of()
    assert set(state) == {"version", "seed", "epoch", "position", "fingerprint", "sizes", "step", "starts", "run"}
    assert len(repr(state)) < 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 50}, r"differs in block \(here 50\)"),
        ({"seed": 1}, "construct the sampler with seed=0"),
        ({"way": ("packed", "sum")}, "differs in strategy"),
        ({"tail": "pad"}, "differs in tail"),
        ({"max_length": 50}, "differs in max_length"),
        ({"balanced_ranks": 8}, r"differs in balanced_ranks \(here 8\)"),
    ],
)
def test_a_state_of_other_options_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make((SIZES, 300), **options).load_state_dict(state_of())


def test_balanced_ranks_change_the_order_of_the_batches_of_a_block_and_no_batch() -> None:
    usual, other = (make((SIZES, 300), balanced_ranks=ranks, block=len(SIZES)) for ranks in (64, 1))
    found = list(usual), list(other)
    assert found[0] != found[1]
    assert sorted(found[0]) == sorted(found[1])


def test_a_state_of_other_shards_sizes_or_classes_is_refused() -> None:
    with pytest.raises(ValueError, match="differs in lengths"):
        make((Shards(SIZES, seed=5), 300)).load_state_dict(state_of())
    changed = make((SIZES[::-1] + 0, 300))
    changed.load_state_dict(state_of())
    with pytest.raises(ValueError, match="those of the run that is resumed, got others: restore them"):
        next(iter(changed))
    read = make((SIZES[::-1] + 0, 300))
    whole = list(read)
    with pytest.raises(ValueError, match="those of the run that is resumed, got others: restore them"):
        read.load_state_dict(state_of())
    damaged = make((SIZES, 300))
    damaged.load_state_dict(state_of() | {"sizes": "1234"})
    assert damaged.state_dict()["sizes"] == "1234"
    damaged.load_state_dict(state_of())  # an earlier one leaves nothing
    assert list(damaged) == list(make((SIZES, 300)))[3:]
    assert list(read) == whole
    other = DistributedSizeAwareBatchSampler(SIZES, 300)
    with pytest.raises(ValueError, match=r"state must be one of Blockwise.*got a dict with the keys version"):
        make((SIZES, 300)).load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="got that of another class or version of headrace"):
        other.load_state_dict(state_of())
    with pytest.raises(TypeError, match="must be a dict that state_dict"):
        make((SIZES, 300)).load_state_dict([])
    for name, value in (("position", 204), ("step", -1), ("starts", [5, 1]), ("epoch", "0")):
        with pytest.raises((TypeError, ValueError)):
            make((SIZES, 300)).load_state_dict(state_of() | {name: value})


def test_the_same_sizes_in_another_type_are_no_others() -> None:
    resumed = make((SIZES.astype(np.float64), 300))
    resumed.load_state_dict(state_of())
    assert list(resumed) == list(make((SIZES, 300)))[3:]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (({"sizes": SIZES}), TypeError, "for one array use DistributedSizeAwareBatchSampler"),
        (({"lengths": None}), ValueError, "lengths must be given beside a function"),
        (({"sizes": [[1], [2]], "lengths": [1]}), ValueError, "one number for each of 2 shards, got 1"),
        (({"lengths": [1.5]}), ValueError, "lengths must be whole numbers, got 1.5 for shard 0"),
        (({"lengths": [-1]}), ValueError, "lengths must hold numbers >= 0"),
        (({"block": 0}), ValueError, "block must be an int >= 1, got 0"),
        (({"oversize": "split"}), ValueError, "oversize must be one of raise, skip, own_batch, got 'split'"),
        (({"rank": "some"}), ValueError, 'rank must be an int >= 0 or "all"'),
        (({"curriculum": 5}), TypeError, "unexpected keyword argument 'curriculum'"),
        (({"shapes": 5}), TypeError, "unexpected keyword argument 'shapes'"),
    ],
)
def test_arguments_are_checked_at_once(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"sizes": lambda _: [1], "max_total_size": 9, "lengths": [1]} | arguments
    with pytest.raises(error, match=message):
        BlockwiseSizeAwareBatchSampler(**given)


def test_what_is_wrong_in_a_shard_is_said_with_its_number_when_it_is_read() -> None:
    short = BlockwiseSizeAwareBatchSampler(lambda _: [1], 9, lengths=[2], shuffle=False)
    with pytest.raises(ValueError, match="sizes of shard 0 must be 2 numbers, as lengths has it, got 1"):
        next(iter(short))
    mixed = BlockwiseSizeAwareBatchSampler([[1], [[1, 2]]], 9, shuffle=False)
    with pytest.raises(ValueError, match="sizes of all shards must have the same columns"):
        next(iter(mixed))
    large = BlockwiseSizeAwareBatchSampler([[1, 2], [3, 99]], 9, block=2, shuffle=False)
    batches = iter(large)
    assert sorted(next(batches)) == [0, 1]
    with pytest.raises(ValueError, match=r"sample 3 has size 99\): cut them in the collate function"):
        list(large)
    with pytest.raises(ValueError, match="cannot exclude samples, got"):
        large.exclude([1])
    large.exclude([])


def test_an_error_at_the_beginning_leaves_the_position() -> None:
    broken = [False]
    shards = Shards(SIZES)

    def sizes(shard: int) -> Any:
        if broken[0]:
            raise OSError("the disk is away")
        return shards(shard)

    def made() -> Any:
        return BlockwiseSizeAwareBatchSampler(sizes, 300, lengths=shards.lengths, block=40)

    whole = list(made())
    resumed, running = made(), made()
    list(islice(running, 9))
    resumed.load_state_dict(running.state_dict())
    broken[0] = True
    with pytest.raises(OSError, match="the disk is away"):
        next(iter(resumed))
    broken[0] = False
    assert list(resumed) == whole[9:]


def test_samples_that_are_skipped_are_named_once_a_block() -> None:
    large = BlockwiseSizeAwareBatchSampler([[1, 2], [3, 99]], 9, block=2, shuffle=False, oversize="skip")
    with pytest.warns(UserWarning, match="1 sample is left out as larger than max_total_size=9: 3"):
        assert sorted(index for batch in large for index in batch) == [0, 1, 2]
    assert large.skipped_indices.tolist() == [3]
    assert large.excluded_indices.tolist() == []


@pytest.mark.parametrize("way", [way for way in WAYS if way[1] == "sum"])
def test_work_of_the_last_step_is_balanced(way: Way) -> None:
    ranks = all_ranks((SIZES, 1500), way, 4)
    if way[0] != "sequential":
        sums = [int(SIZES[batch].sum()) for batches in ranks for batch in batches[-1:]]
        assert max(sums) < 1.35 * np.mean(sums)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_and_later_runs_share_the_counting(way: Way, tmp_path: Path) -> None:
    shards = [Shards(np.arange(2000) % 50 + 1) for _ in range(5)]
    options: dict[str, Any] = {"block": 200, "plan_cache": tmp_path}
    made = [make((one, 300), way, 5, rank, **options) for rank, one in enumerate(shards)]
    for turn in range(made[0].n_blocks):  # side by side
        for rank, sampler in enumerate(made):
            numbers = np.roll(np.arange(10), -2 * rank)
            sampler._planner.count(0, int(numbers[turn]))
    assert len({len(sampler) for sampler in made}) == 1
    assert len(made[0]) == len(list(made[0])) == len(make((shards[0], 300), way, 5, block=200))
    if way[0] == "sequential":
        assert not list(tmp_path.iterdir())
        return
    assert all(sum(one.read.values()) < 900 for one in shards[1:])
    counted = [sum(one.lengths[list(one.read)]) for one in shards[1:]]
    assert max(counted) < 700
    later = Shards(shards[0].sizes)
    assert len(make((later, 300), way, 5, **options)) == len(made[0])
    assert sum(later.read.values()) == 1, "a shard that tells these sizes from others"
    assert len(make((later, 301), way, 5, **options)) > 0
    assert later.read
    other = make((Shards(shards[0].sizes[::-1] + 0), 300), way, 5, **options)
    assert len(other) == len(list(other)), "it has notes of its own"
    changed = shards[0].sizes.copy()
    changed[-1] -= 1
    other = make((Shards(changed), 300), way, 5, **options)
    len(other)
    with pytest.raises(ValueError, match="must be the same each time they are read"):
        list(other)


def test_a_damaged_note_is_counted_again_and_a_directory_that_cannot_be_is_a_warning(tmp_path: Path) -> None:
    length = len(make((SIZES, 300), plan_cache=tmp_path))
    (path,) = tmp_path.iterdir()
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0][:-3] + b"xyz", b"", b"\xff 1 2 3", *lines[2:-1], lines[1][:9]]))
    shards = Shards(SIZES)
    assert len(make((shards, 300), plan_cache=tmp_path)) == length
    assert shards.read
    assert len(make((SIZES, 300), plan_cache=tmp_path)) == length
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning, match="every process counts all blocks itself"):
        assert len(make((SIZES, 300), plan_cache=tmp_path)) == length
    with pytest.raises(TypeError, match="plan_cache must be the path of a directory"):
        make((SIZES, 300), plan_cache=5)


@pytest.mark.filterwarnings("ignore:[0-9]+ samples? (is|are) left out")
def test_blocks_that_are_all_skipped_are_refused() -> None:
    few = BlockwiseSizeAwareBatchSampler([[50], [60, 3]], 40, block=1, shuffle=False, oversize="skip")
    assert list(few) == [[2]]
    none = BlockwiseSizeAwareBatchSampler([[50], [60, 70]], 40, block=1, shuffle=False, oversize="skip")
    with pytest.raises(
        ValueError, match=r"oversize='skip' must leave samples to train on, got 3 samples that all exceed"
    ):
        list(none)
