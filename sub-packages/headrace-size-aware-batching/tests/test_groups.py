"""Groups: their samples come in one batch, and a group is never split."""

from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies_of_sizes import examples
from test_laws import WAYS, Way, cost_of, repeats, samples, ways
from torch.utils.data import SequentialSampler

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler

SIZES = np.random.default_rng(0).integers(1, 100, 2003)
PAIRS = np.arange(2003) // 2
UNEVEN = np.random.default_rng(1).integers(0, 500, 2003)


@st.composite
def grouped(draw: st.DrawFn) -> tuple[Any, Any, int]:
    """Sizes, a group for each, and a budget that holds every group."""
    count, key = draw(st.integers(0, 250)), draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(key)
    sizes = generator.integers(0, 100, count)
    kinds = draw(st.sampled_from(["pairs", "ones", "one", "few", "many"]))
    groups = {
        "pairs": np.arange(count) // 2,
        "ones": np.arange(count),
        "one": np.zeros(count, int),
        "few": generator.integers(0, 5, count),
        "many": generator.integers(0, max(1, count // 3), count),
    }[kinds]
    largest = max((len(own := sizes[groups == group]) * own.max() for group in set(groups.tolist())), default=1)
    return sizes, groups, int(max(largest, 100) * draw(st.sampled_from([1, 2, 10])))


def make(case: Any, way: Way, world: int = 1, rank: Any = 0, **more: Any) -> DistributedSizeAwareBatchSampler:
    sizes, groups, budget = case
    options: dict[str, Any] = {"strategy": way[0], "cost": way[1], "group_by": groups}
    return DistributedSizeAwareBatchSampler(sizes, budget, num_replicas=world, rank=rank, **options | more)


def run(case: Any, way: Way, world: int, state: Any = None, **more: Any) -> list[list[list[int]]]:
    found = []
    for rank in range(world):
        sampler = make(case, way, world, rank, **more)
        if state is not None:
            sampler.load_state_dict(state)
        left = sampler.remaining
        found.append(list(sampler))
        assert len(found[-1]) == left
    assert len({len(batches) for batches in found}) == 1
    return found


def assert_whole(batches: list[list[int]], groups: Any) -> None:
    """Check that each batch holds all samples of the groups that it has."""
    members = Counter(np.asarray(groups).tolist())
    for batch in batches:
        assert Counter(groups[index] for index in batch) == {group: members[group] for group in groups[batch].tolist()}


@examples(60)
@given(grouped(), ways, st.sampled_from([None, 20]), st.booleans(), st.sampled_from([None, 250]), st.integers(0, 3))
def test_every_group_is_whole_and_every_sample_comes_once(
    case: Any, way: Way, window: int | None, shuffle: bool, max_items: int | None, epoch: int
) -> None:
    sampler = make(case, way, window=window, shuffle=shuffle, max_items=max_items)
    sampler.set_epoch(epoch)
    length, batches = len(sampler), list(sampler)
    assert len(batches) == length
    assert sorted(index for batch in batches for index in batch) == list(range(len(case[0])))
    assert_whole(batches, case[1])
    assert all(cost_of(batch, case[0], way[1]) <= case[2] for batch in batches)
    assert [batch.tolist() for batch in sampler.plan(epoch)] == batches
    assert [sampler.batch(number) for number in range(length)] == batches
    report = sampler.report()
    assert report.samples == len(case[0])
    assert report.over_budget == 0


@pytest.mark.slow
@repeats
@examples(40)
@given(grouped(), ways, st.integers(1, 6), st.integers(1, 6), st.data())
def test_any_step_resumes_on_any_ranks_and_can_be_looked_up(
    case: Any, way: Way, world: int, other: int, data: st.DataObject
) -> None:
    uninterrupted = run(case, way, world)
    steps = len(uninterrupted[0])
    stop = data.draw(st.integers(0, steps))
    running = make(case, way, world, 0)
    assert [*islice(running, stop)] == uninterrupted[0][:stop]
    state = running.state_dict()
    assert run(case, way, world, state) == [rank[stop:] for rank in uninterrupted]
    rest, delivered = run(case, way, other, state), [rank[:stop] for rank in uninterrupted]
    for batches in rest:
        assert_whole(batches, case[1])
    assert set(samples(rest)) | set(samples(delivered)) == set(range(len(case[0])))
    if len(set(case[1].tolist())) >= steps * world:
        assert not set(samples(rest)) & set(samples(delivered))
    if steps:
        number = data.draw(st.integers(0, steps - 1))
        assert running.step(number) == [rank[number] for rank in uninterrupted]


@pytest.mark.parametrize("way", WAYS)
def test_a_change_in_mid_epoch_keeps_groups_whole(way: Way) -> None:
    case = SIZES, UNEVEN, 2000
    sampler = make(case, way)
    batches = iter(sampler)
    delivered = [index for batch in islice(batches, 4) for index in batch]
    mates = np.flatnonzero(UNEVEN[7] == UNEVEN).tolist()
    sampler.exclude([7])
    assert sampler.excluded_indices.tolist() == mates, "the samples of a group are left out together"
    assert len(sampler.skip(1))
    state = sampler.state_dict()
    changed = make((SIZES, UNEVEN, 3000), way)
    changed.load_state_dict(state, accept={"max_total_size"})
    rest = list(changed)
    assert_whole(rest, UNEVEN)
    gone = set(mates) | set(delivered)
    assert not gone & {index for batch in rest for index in batch}
    assert changed.step(2) == sampler.step(2)


def test_groups_of_one_are_as_none() -> None:
    for way in WAYS:
        alone = DistributedSizeAwareBatchSampler(SIZES, 700, strategy=way[0], cost=way[1], num_replicas=1, rank=0)
        assert list(make((SIZES, np.arange(2003), 700), way)) == list(alone)


def test_pairs_fill_batches_as_single_samples_do() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(360), 0.8, 20_000), 8, 2048).astype(int)
    pairs = np.arange(20_000) // 2
    alone = DistributedSizeAwareBatchSampler(lengths, 16384, num_replicas=8, rank=0)
    sampler = make((lengths, pairs, 16384), WAYS[2], 8)
    assert len(sampler) == len(alone)
    assert sampler.report().fill > 0.99
    assert sampler.report().imbalance < 1.003
    longest = np.repeat(lengths.reshape(-1, 2).max(axis=1), 2)  # as if both of a pair were as long
    padded = make((lengths, pairs, 16384), WAYS[4], 8).report()
    assert padded.batches <= 1.03 * DistributedSizeAwareBatchSampler(longest, 16384, cost="padded").report().batches


def test_padded_groups_of_uneven_numbers_fill_most_of_the_budget() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(360), 0.8, 20_000), 8, 2048).astype(int)
    prompts = np.random.default_rng(1).integers(0, 4000, 20_000)
    report = make((lengths, prompts, 65_536), WAYS[4], 8).report()
    assert report.fill > 0.87
    assert report.imbalance < 1.02


@pytest.mark.parametrize("way", [WAYS[2], WAYS[4]])
def test_a_group_over_the_budget_follows_oversize(way: Way) -> None:
    groups = np.where(np.arange(2003) < 40, -1, UNEVEN)  # one giant group
    case = SIZES, groups, 1500
    with pytest.raises(
        ValueError, match=r"a group must not exceed max_total_size=1500 .* got 1 of 496 groups .*\(40 with sample 0\)"
    ):
        make(case, way)
    skipping = make(case, way, oversize="skip")
    assert skipping.oversize_indices.tolist() == skipping.skipped_indices.tolist() == list(range(40))
    with pytest.warns(UserWarning, match="40 samples are left out as larger than"):
        assert sorted(index for batch in skipping for index in batch) == list(range(40, 2003))
    alone = list(make(case, way, oversize="own_batch"))
    assert sorted(batch for batch in alone if 0 in batch) == [list(range(40))]
    assert make(case, way, oversize="own_batch").report().over_budget == 1
    few = make((SIZES, PAIRS, 700), way, max_items=5)
    assert max(map(len, few)) == 4
    with pytest.raises(ValueError, match="max_total_size=99999 or max_items=5 together"):
        make((SIZES, UNEVEN, 99999), way, max_items=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_by": PAIRS[:5]}, "group_by must hold an int or a string for each of 2,003 samples, got 5"),
        ({"group_by": [None] * 2003}, "group_by must hold an int or a string for .*, got None at index 0"),
        ({"oversize": "split"}, "group_by goes with oversize='raise' or 'skip' or 'own_batch', got 'split'"),
        ({"batch_size_multiple": 8, "strategy": "bucketed"}, "group_by goes with batch_size_multiple=1, got 8"),
        ({"shapes": 4, "strategy": "bucketed", "cost": "padded"}, "group_by goes with shapes=None, got 4"),
        ({"sampler": list(range(2003))}, "group_by and sampler were both given"),
        (
            {"by": np.arange(2003) % 2},
            "by must give the samples of a group one label, got 0 for sample 0 and 1 for sampl",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make((SIZES, PAIRS, 700), WAYS[2], **options)


def test_padded_groups_have_one_column() -> None:
    two = np.stack([SIZES, SIZES], axis=1)
    with pytest.raises(ValueError, match=r"group_by goes with sizes of shape \[n\] where batches are padded"):
        make((two, PAIRS, (700, 700)), ("bucketed", "padded"))
    batches = list(make((two, PAIRS, (700, 900)), ("stratified", "sum"), max_items=10))
    assert_whole(batches, PAIRS)
    assert max(map(len, batches)) <= 10


def test_appended_samples_are_accepted_in_groups_of_their_own() -> None:
    before = make((SIZES[:1500], PAIRS[:1500], 700), WAYS[2])
    delivered = [index for batch in islice(before, 7) for index in batch]
    after = make((SIZES, PAIRS, 700), WAYS[2])
    after.load_state_dict(before.state_dict(), accept={"data"})
    rest = list(after)
    assert sorted(delivered + [index for batch in rest for index in batch]) == list(range(2003))
    assert_whole(rest, PAIRS)
    joined = make((SIZES, np.where(np.arange(2003) == 2000, 0, PAIRS), 700), WAYS[2])
    with pytest.raises(ValueError, match="group_by must leave the groups of an epoch that has begun as they are"):
        joined.load_state_dict(before.state_dict(), accept={"data"})


def test_groups_of_one_label() -> None:
    labels = PAIRS % 3
    batches = list(make((SIZES, PAIRS, 700), WAYS[2], by=labels))
    assert all(len(set(labels[batch])) == 1 for batch in batches)
    assert_whole(batches, PAIRS)
    assert repr(make((SIZES, PAIRS, 700), WAYS[2])).startswith("DistributedSizeAwareBatchSampler(1,002 groups, ")


def test_groups_stay_together_in_the_order_of_the_data() -> None:
    """As a data module gives it for evaluation."""
    batches = DistributedSizeAwareBatchSampler(
        SIZES, 700, group_by=PAIRS, sampler=SequentialSampler(range(len(SIZES))), num_replicas=1, rank=0
    )
    first = list(batches)
    batches.set_epoch(3)
    assert list(batches) == first
    assert sorted(index for batch in first for index in batch) == list(range(len(SIZES)))
    places = {index: number for number, batch in enumerate(first) for index in batch}
    together: dict[int, set[int]] = {}
    for index, group in enumerate(PAIRS):
        together.setdefault(int(group), set()).add(places[index])
    assert all(len(numbers) == 1 for numbers in together.values())
