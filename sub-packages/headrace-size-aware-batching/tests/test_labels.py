"""Labels: every batch holds samples of one label, and every label has its share of any part of an epoch."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies_of_sizes import examples
from test_laws import Way, cost_of, samples

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.planning.labelled_lists import FEWEST_BATCHES

WAYS: list[Way] = [("stratified", "sum"), ("bucketed", "sum"), ("bucketed", "padded"), ("packed", "sum")]
ways = st.sampled_from(WAYS)
PER = ("batch", "step")
# Where there are fewer samples than ranks, some are repeated; that this is said is tested by itself.
repeats = pytest.mark.filterwarnings("ignore:(tail='split'|label_per='step').*:UserWarning")
SIZES = np.random.default_rng(0).integers(1, 100, 2003)
SOURCES = np.random.default_rng(1).choice(["text", "code", "speech"], 2003, p=[0.7, 0.28, 0.02])


class Slices:
    """An order of another library, which can be sliced and names some samples twice."""

    def __init__(self, n_samples: int) -> None:
        self.n_samples, self.epoch = n_samples, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.n_samples + self.n_samples // 4

    def take(self, start: int, stop: int) -> Any:
        return np.random.default_rng(self.epoch).integers(0, max(1, self.n_samples), len(self))[start:stop]

    def __iter__(self) -> Any:
        return iter(self.take(0, len(self)).tolist())


@st.composite
def labelled(draw: st.DrawFn) -> tuple[Any, Any, int]:
    """Sizes, a label for each, and a budget."""
    count = draw(st.integers(0, 300))
    key = draw(st.integers(0, 2**32 - 1))
    kinds = draw(st.sampled_from([1, 2, 3, 50, 1000]))
    generator = np.random.default_rng(key)
    skewed = (kinds * generator.random(count) ** draw(st.sampled_from([1, 6]))).astype(int)
    return generator.integers(0, 100, count), skewed, draw(st.sampled_from([100, 300, 1000]))


def make(case: Any, way: Way, world: int = 1, rank: Any = 0, **more: Any) -> DistributedSizeAwareBatchSampler:
    sizes, labels, budget = case
    options: dict[str, Any] = {"strategy": way[0], "cost": way[1], "by": labels}
    return DistributedSizeAwareBatchSampler(sizes, budget, num_replicas=world, rank=rank, **options | more)


def run(case: Any, way: Way, world: int, state: Any = None, **more: Any) -> list[list[list[int]]]:
    """Return the batches of each rank, after loading a state if there is one."""
    found = []
    for rank in range(world):
        sampler = make(case, way, world, rank, **more)
        if state is not None:
            sampler.load_state_dict(state)
        length = sampler.remaining
        found.append(list(sampler))
        assert len(found[-1]) == length
    assert len({len(batches) for batches in found}) == 1
    return found


def label_of(batch: Iterable[int], labels: Any) -> Any:
    """Return the label of a batch; there is only one."""
    (label,) = {labels[index] for index in batch}
    return label


@examples(60)
@given(labelled(), ways, st.sampled_from([None, 20]), st.sampled_from(PER), st.booleans(), st.integers(0, 3))
def test_every_batch_has_one_label_and_every_sample_comes_once(
    case: Any, way: Way, window: int | None, per: str, shuffle: bool, epoch: int
) -> None:
    sampler = make(case, way, window=window, label_per=per, shuffle=shuffle)
    sampler.set_epoch(epoch)
    length, batches = len(sampler), list(sampler)
    assert len(batches) == length
    assert sorted(index for batch in batches for index in batch) == list(range(len(case[0])))
    for batch in batches:
        label_of(batch, case[1])
        assert cost_of(batch, case[0], way[1]) <= case[2]
    assert [batch.tolist() for batch in sampler.plan(epoch)] == batches
    assert [sampler.batch(number) for number in range(length)] == batches


@repeats
@examples(40)
@given(labelled(), ways, st.sampled_from(PER), st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_ranks_have_as_many_steps_and_one_label_in_each_where_that_is_asked(
    case: Any, way: Way, per: str, world: int, balanced_ranks: int, ordered: bool
) -> None:
    order = Slices(len(case[0])) if ordered else None
    ranks = run(case, way, world, label_per=per, balanced_ranks=balanced_ranks, sampler=order)
    expected = set(order) if order else set(range(len(case[0])))
    assert set(samples(ranks)) == expected
    for step in zip(*ranks, strict=True):
        labels = [label_of(batch, case[1]) for batch in step]
        assert all(cost_of(batch, case[0], way[1]) <= case[2] for batch in step)
        assert per == "batch" or len(set(labels)) == 1
    counts = np.bincount(case[1], minlength=1)
    if not ordered and (per == "batch" or counts[counts > 0].min(initial=10) >= world):
        assert sum(samples(ranks).values()) <= len(case[0]) + world * len(counts)


@pytest.mark.slow
@repeats
@examples(40)
@given(labelled(), ways, st.sampled_from(PER), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.data())
def test_any_step_resumes_on_any_ranks_and_can_be_looked_up(
    case: Any, way: Way, per: str, world: int, other: int, ordered: bool, data: st.DataObject
) -> None:
    def options() -> dict[str, Any]:
        return {"label_per": per, "sampler": Slices(len(case[0])) if ordered else None, "window": data_window}

    data_window = data.draw(st.sampled_from([None, 40]))
    uninterrupted = run(case, way, world, **options())
    stop = data.draw(st.integers(0, len(uninterrupted[0])))
    running = make(case, way, world, 0, **options())
    assert [*islice(running, stop)] == uninterrupted[0][:stop]
    state = running.state_dict()
    assert run(case, way, world, state, **options()) == [rank[stop:] for rank in uninterrupted]
    rest = run(case, way, other, state, **options())
    everything = set(range(len(case[0]))) if not ordered else set(Slices(len(case[0])))
    delivered = samples([rank[:stop] for rank in uninterrupted])
    assert set(rest_of := samples(rest)) | set(delivered) == everything
    if not ordered and samples(uninterrupted).total() == len(case[0]):
        assert not set(rest_of) & set(delivered)
    for step in zip(*rest, strict=True):
        labels = [label_of(batch, case[1]) for batch in step]
        assert per == "batch" or len(set(labels)) == 1
    if uninterrupted[0]:
        number = data.draw(st.integers(0, len(uninterrupted[0]) - 1))
        assert running.step(number) == [rank[number] for rank in uninterrupted]
    resumed = make(case, way, other, 0, **options())
    resumed.load_state_dict(state)
    if rest[0]:
        number = data.draw(st.integers(0, len(rest[0]) - 1))
        assert resumed.step(stop + number) == [rank[number] for rank in rest]


@pytest.mark.slow
@repeats
@examples(25)
@given(labelled(), ways, st.sampled_from(PER), st.integers(1, 5), st.data())
def test_a_change_in_mid_epoch_keeps_the_labels_apart(
    case: Any, way: Way, per: str, world: int, data: st.DataObject
) -> None:
    sampler = make(case, way, 1, 0, label_per=per)
    batches = iter(sampler)
    delivered = [index for batch in islice(batches, data.draw(st.integers(0, 5))) for index in batch]
    gone = data.draw(st.lists(st.integers(0, max(0, len(case[0]) - 1)), max_size=5)) if len(case[0]) else []
    sampler.exclude(gone)
    state = sampler.state_dict()
    larger = case[0], case[1], 2 * case[2]
    rest = []
    for rank in range(world):
        changed = make(larger, way, world, rank, label_per=per)
        changed.load_state_dict(state, accept={"max_total_size"})
        rest.append(list(changed))
    for step in zip(*rest, strict=True):
        labels = [label_of(batch, case[1]) for batch in step]
        assert per == "batch" or len(set(labels)) == 1
    assert set(delivered) | set(samples(rest)) | set(gone) == set(range(len(case[0])))
    assert not set(samples(rest)) & (set(gone) | set(delivered))


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("shares", [(0.5, 0.3, 0.2), (0.98, 0.015, 0.005)])
def test_every_part_of_an_epoch_has_its_share_of_every_label(per: str, shares: Any) -> None:
    generator = np.random.default_rng(3)
    labels = generator.choice(3, 40_000, p=shares)
    sizes = generator.integers(1, 100, 40_000)
    sampler = make((sizes, labels, 400), ("stratified", "sum"), label_per=per, balanced_ranks=4)
    sequence = np.array([labels[batch[0]] for batch in sampler.plan()])
    unit = 4 if per == "step" else 1
    for label in range(3):
        passed = np.cumsum(sequence == label)
        asked = np.linspace(0, passed[-1], len(sequence) + 1)[1:]
        # A part of the list has as many batches as its share, to within one run of them at both of its ends.
        assert np.abs(passed - asked).max() <= max(4 * unit, FEWEST_BATCHES * shares[label])
        first = np.flatnonzero(sequence == label)[0]
        assert first < len(sequence) * (2 * unit / passed[-1] + 0.1)


def test_labels_cost_at_most_a_batch_or_two_each() -> None:
    """Awkward labels: one of 3 samples, and 1,000 of them."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(np.log(360), 0.8, 30_000), 8, 2048).astype(int)
    plain = len(DistributedSizeAwareBatchSampler(lengths, 16384, num_replicas=1, rank=0))
    few = np.where(np.arange(30_000) < 3, "few", generator.choice(["text", "code"], 30_000))
    report = make((lengths, few, 16384), WAYS[0], 8).report()
    assert report.batches <= plain + 3
    assert report.fill > 0.99
    assert report.imbalance < 1.003
    assert [each.batches for each in report.labels if each.label == "few"] == [1]
    many = generator.integers(0, 1000, 30_000)
    report = make((lengths, many, 16384), WAYS[0], 8).report()
    assert report.batches <= plain + 1000
    assert len(report.labels) == 1000


def test_the_steps_of_one_label_are_as_balanced_as_others() -> None:
    limits: list[tuple[Way, float]] = [(("stratified", "sum"), 1.005), (("bucketed", "padded"), 1.03)]
    for way, most in limits:
        report = make((SIZES, SOURCES, 700), way, 4, label_per="step").report()
        assert report.imbalance < most


def test_the_report_has_the_figures_of_each_label() -> None:
    sampler = make((SIZES, SOURCES, 700), WAYS[0], 4)
    report, plan = sampler.report(), sampler.plan()
    assert {each.label for each in report.labels} == {"text", "code", "speech"}
    for each in report.labels:
        own = [batch for batch in plan if SOURCES[batch[0]] == each.label]
        assert each.batches == len(own)
        assert each.samples == sum(map(len, own)) == SOURCES.tolist().count(each.label)
        assert each.fill == pytest.approx(np.mean([SIZES[batch].sum() / 700 for batch in own]))
    shown = [line.split() for line in str(report).splitlines()[-2:]]
    least = min(report.labels, key=lambda each: each.fill)
    assert shown == [["labels", "3"], ["least", "full", "label", f"{least.fill:.2%}", "'speech'"]]
    step = make((SIZES, SOURCES, 700), WAYS[0], 4, label_per="step")
    assert step.report().steps == len(step) > report.steps


def test_labels_in_any_form_make_the_same_batches() -> None:
    names = list(dict.fromkeys(SOURCES.tolist()))
    numbers = [names.index(name) for name in SOURCES.tolist()]
    forms = [
        SOURCES,
        SOURCES.tolist(),
        tuple(SOURCES.tolist()),
        numbers,
        torch.tensor(numbers),
        np.array(numbers, "u1"),
    ]
    plans = [make((SIZES, form, 700), WAYS[0]) for form in forms]
    assert all(list(plan) == list(plans[0]) for plan in plans)
    assert len({plan.fingerprint for plan in plans}) == 1
    two = DistributedSizeAwareBatchSampler([1, 1], 9, by=("0", 0), num_replicas=1, rank=0)
    assert sorted(two) == [[0], [1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": SOURCES[:5]}, "by must hold an int or a string for each of 2,003 samples, got 5"),
        ({"by": "source"}, "by must hold an int or a string for each of 2,003 samples, got 'source' of type str"),
        ({"by": [None] * 2003}, "by must hold an int or a string for .*, got None at index 0"),
        ({"by": [1.5] * 2003}, "by must hold an int or a string for .*, got 1.5 at index 0"),
        ({"label_per": "rank"}, "label_per must be one of batch, step, got 'rank'"),
        ({"label_per": None}, "label_per must be one of batch, step, got None"),
        ({"by": None, "label_per": "step"}, "label_per='step' goes with by=, the label of each sample, got by=None"),
        ({"strategy": "sequential"}, "by goes with strategy='stratified', 'packed' and 'bucketed', got 'sequential'"),
        ({"curriculum": 5}, "curriculum=5 and by were both given, .*: leave out one"),
        ({"label_per": "step", "tail": "drop"}, "label_per='step' goes with tail='split' and 'pad', got 'drop'"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make((SIZES, SOURCES, 700), WAYS[0], **options)


def test_labels_of_appended_samples_are_accepted_with_the_data() -> None:
    before = make((SIZES[:1500], SOURCES[:1500], 700), WAYS[0])
    delivered = [index for batch in islice(before, 7) for index in batch]
    labels = np.where(np.arange(2003) < 1500, SOURCES, "another")
    after = make((SIZES, labels, 700), WAYS[0])
    with pytest.raises(ValueError, match=r"differs in sizes .*, by.*accept=\['data'\]"):
        after.load_state_dict(before.state_dict())
    after.load_state_dict(before.state_dict(), accept={"data"})
    rest = list(after)
    assert sorted(delivered + [index for batch in rest for index in batch]) == list(range(2003))
    assert {label_of(batch, labels) for batch in rest} == {"text", "code", "speech", "another"}
    assert after.step(3) == before.step(3)


def test_long_samples_shapes_and_the_batches_of_all_ranks_go_with_labels() -> None:
    sizes = np.where(np.arange(2003) % 100 == 0, 2000, SIZES)
    pieces = list(make((sizes, SOURCES, 700), WAYS[0], oversize="split"))
    assert sum(map(len, pieces)) == 2003 + 2 * 21
    assert all(label_of(map(int, batch), SOURCES) for batch in pieces)
    padded = make((SIZES, SOURCES, 1400), ("bucketed", "padded"), shapes=4)
    assert padded.report().shapes <= 4
    assert sorted(index for batch in padded for index in batch) == list(range(2003))
    everything = list(make((SIZES, SOURCES, 700), WAYS[0], 3, "all", label_per="step"))
    assert all(
        len({label_of(batch, SOURCES) for batch in everything[step : step + 3]}) == 1
        for step in range(0, len(everything), 3)
    )
    with pytest.warns(UserWarning, match="plan_cache has no effect with by"):
        make((SIZES, SOURCES, 700), WAYS[0], plan_cache="plans")


def test_too_few_samples_of_a_label_for_the_ranks_are_repeated_with_one_warning() -> None:
    labels = np.arange(60) // 3
    with pytest.warns(UserWarning, match="label_per='step': the last batches of some labels") as caught:
        ranks = run((np.ones(60, int), labels, 10), WAYS[0], 4, label_per="step")
    assert len(caught) == 4
    assert set(samples(ranks)) == set(range(60))


def test_labels_are_plain_whatever_text_they_come_as() -> None:
    names = [np.str_(name) for name in ("a", "b", "a")]
    report = DistributedSizeAwareBatchSampler([1, 2, 3], 6, by=names, num_replicas=1, rank=0).report()
    assert [repr(label.label) for label in report.labels] == ["'a'", "'b'"]
