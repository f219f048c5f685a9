"""Laws of the mixture of streams: its order, its end, its epochs, and what it refuses."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import examples
from sources_of_items import Again, Item, Plain

from headrace.weighted_sampler import InterleavedDataset, Stopping
from headrace.weighted_sampler._mixture import StreamOrder
from headrace.weighted_sampler._mixture_arguments import parse_streams
from headrace.weighted_sampler._stopping import STOP_RULES
from headrace.weighted_sampler.schedule import Stage

T = TypeVar("T")
SEEDS = st.integers(0, 2**64 - 1)
EPOCHS = st.integers(0, 2**62)


@st.composite
def weight_lists(draw: st.DrawFn, most: int = 8) -> list[Fraction]:
    ordinary = st.fractions(Fraction(1, 1000), 1000, max_denominator=1000)
    weights = draw(st.lists(st.one_of(ordinary, st.just(Fraction(0))), min_size=1, max_size=most))
    return weights if any(weights) else [*weights, Fraction(1)]


def turns(dataset: InterleavedDataset[Any], stages: Sequence[Stage], seed: int, epoch: int = 0) -> Iterator[int]:
    """The sources of the first rank's stream, in the main process."""
    order = StreamOrder(stages, seed, epoch, rank=0, worker=0)
    position = 0
    while True:
        yield order.source_at(position)
        position += 1


@pytest.mark.slow
@examples(40)
@given(weight_lists(), SEEDS, EPOCHS)
def test_an_endless_stream_keeps_its_shares_at_every_window_end(weights: list[Fraction], seed: int, epoch: int) -> None:
    sources = [Again([place]) for place in range(len(weights))]
    dataset = InterleavedDataset(sources, weights, seed=seed, stopping="endless")
    dataset.set_epoch(epoch)
    stream, counts, total = iter(dataset), Counter[int](), sum(weights)
    for window in range(1, 5):
        counts.update(islice(stream, 1024))
        for place, weight in enumerate(weights):
            assert abs(counts[place] - window * 1024 * weight / total) <= Fraction(3, 2)


@pytest.mark.slow
@examples(40)
@given(weight_lists(), SEEDS)
def test_the_order_in_which_a_mapping_is_written_does_not_matter(weights: list[Fraction], seed: int) -> None:
    names = [f"source {place}" for place in range(len(weights))]
    sources = {name: Again([name]) for name in names}
    shares = dict(zip(names, weights, strict=True))
    one = InterleavedDataset(sources, shares, seed=seed, stopping="endless")
    two = InterleavedDataset(
        dict(reversed(sources.items())), dict(reversed(shares.items())), seed=seed, stopping="endless"
    )
    assert list(islice(one, 1500)) == list(islice(two, 1500))
    assert one.fingerprint == two.fingerprint


@pytest.mark.parametrize("weights", [np.array([0.25, 0.75]), torch.tensor([1, 3]), torch.ones(2).bfloat16() / 4 * 3])
def test_weights_may_be_an_array_or_a_tensor(weights: Any) -> None:
    numbers = [float(weight) for weight in weights]
    one, two = (InterleavedDataset([["a"], ["b"]], given, stopping="endless") for given in (weights, numbers))
    assert list(islice(one, 1100)) == list(islice(two, 1100))


@pytest.mark.slow
@given(SEEDS, EPOCHS)
def test_sources_of_weight_zero_are_never_touched_and_change_nothing(seed: int, epoch: int) -> None:
    class Forbidden(Again[str]):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("begun")

        def set_epoch(self, epoch: int) -> None:
            raise AssertionError("told")

    sources = {"a": Again(["a"]), "b": Again(["b"])}
    one = InterleavedDataset(sources, {"a": 1, "b": 2}, seed=seed, stopping="endless")
    two = InterleavedDataset({"aa": Forbidden([]), **sources}, {"aa": 0, "a": 1, "b": 2}, seed=seed, stopping="endless")
    one.set_epoch(epoch)
    two.set_epoch(epoch)
    assert list(islice(one, 1100)) == list(islice(two, 1100))


@given(
    st.lists(st.tuples(SEEDS, EPOCHS, st.integers(0, 2**40), st.integers(0, 64)), min_size=2, max_size=2, unique=True)
)
def test_streams_of_different_seeds_epochs_ranks_and_workers_agree_by_chance_only(
    streams: list[tuple[int, int, int, int]],
) -> None:
    one, two = (StreamOrder([Stage(0, (1, 1, 1, 1))], *stream) for stream in streams)
    same = sum(one.source_at(position) == two.source_at(position) for position in range(1024))
    assert abs(same - 256) <= 120  # the deviation by chance is 14


@pytest.mark.slow
@given(SEEDS, st.lists(st.integers(0, 2**50), min_size=1, max_size=20))
def test_the_source_at_a_position_does_not_depend_on_what_was_asked_before(seed: int, positions: list[int]) -> None:
    stages = [Stage(0, (5, 3, 2)), Stage(500, (0, 1, 1))]
    order = StreamOrder(stages, seed, 0, 0, 0)
    for position in positions:
        assert order.source_at(position) == StreamOrder(stages, seed, 0, 0, 0).source_at(position)


def reference(lists: Sequence[Sequence[T]], order: Iterator[int], stopping: Stopping, most: int) -> list[T]:
    """The rules, written down as plainly as can be."""
    out: list[T] = []
    place = [0] * len(lists)
    ran_out = [False] * len(lists)
    for source in order:
        if len(out) == most:
            return out
        if place[source] == len(lists[source]):
            ran_out[source] = True
            if stopping == "first_exhausted" or (stopping == "all_exhausted" and all(ran_out)):
                return out
            place[source] = 0
        out.append(lists[source][place[source]])
        place[source] += 1
    return out


@pytest.mark.slow
@given(st.data(), st.sampled_from([rule for rule in STOP_RULES if rule != "drop_exhausted"]), SEEDS)
def test_each_rule_stops_where_a_plain_reference_does(data: st.DataObject, stopping: Stopping, seed: int) -> None:
    sizes = data.draw(st.lists(st.integers(int(stopping != "first_exhausted"), 40), min_size=1, max_size=5))
    weights = data.draw(st.lists(st.integers(1, 5), min_size=len(sizes), max_size=len(sizes)))
    lists = [[(source, number) for number in range(size)] for source, size in enumerate(sizes)]
    dataset = InterleavedDataset(lists, weights, seed=seed, stopping=stopping)
    whole = parse_streams(lists, weights, seed, stopping).stages
    expected = reference(lists, turns(dataset, whole, seed), stopping, most=2000)
    assert list(islice(dataset, 2000)) == expected
    if stopping == "all_exhausted":
        assert set(expected) == {item for part in lists for item in part}


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), min_size=1, max_size=5), SEEDS)
def test_dropped_sources_leave_the_others_whole_and_in_order(parts: list[tuple[int, int]], seed: int) -> None:
    lists = [[(source, number) for number in range(size)] for source, (size, _) in enumerate(parts)]
    dataset = InterleavedDataset(lists, [weight for _, weight in parts], seed=seed, stopping="drop_exhausted")
    items = list(dataset)
    assert [[item for item in items if item[0] == source] for source in range(len(parts))] == lists
    assert len(items) == sum(map(len, lists))


def test_the_sources_that_are_left_keep_their_proportions() -> None:
    sources = {"a": Again([0] * 10), "b": Again([1] * 6000), "c": Again([2] * 3000)}
    items = list(InterleavedDataset(sources, {"a": 7, "b": 2, "c": 1}, stopping="drop_exhausted"))
    assert abs(items[20 : 20 + 8 * 1024].count(1) - 2 / 3 * 8 * 1024) <= 20
    assert items.count(1) == 6000
    once = InterleavedDataset({"a": iter([1, 2]), "b": [3]}, {"a": 1, "b": 1}, stopping="drop_exhausted")
    assert sorted(once) == [1, 2, 3]


@given(st.sampled_from([rule for rule in STOP_RULES if rule != "endless"]))
def test_a_stream_that_has_ended_stays_so(stopping: Stopping) -> None:
    stream = iter(InterleavedDataset([[1, 2], [3]], [1, 1], stopping=stopping))
    assert list(stream)
    assert [list(stream), list(stream)] == [[], []]


def test_a_stream_that_has_ended_holds_no_source_open() -> None:
    open_now: list[str] = []

    class Shard(Again[int]):
        def __iter__(self) -> Iterator[int]:
            open_now.append("shard")
            try:
                yield from self.items
            finally:
                open_now.remove("shard")

    dataset = InterleavedDataset([Shard(range(100)), Shard(range(3))], [1, 1])
    stream = iter(dataset)
    assert list(stream)
    assert not open_now


@pytest.mark.parametrize("stopping", ["all_exhausted", "endless"])
def test_a_source_that_yields_nothing_is_named_instead_of_asked_for_ever(stopping: Stopping) -> None:
    empty: list[int] = []
    stream = iter(InterleavedDataset({"full": [1], "void": empty}, {"full": 1, "void": 1}, stopping=stopping))
    with pytest.raises(RuntimeError, match=r"sources\['void'\] is empty on this stream"):
        list(islice(stream, 100))
    with pytest.raises(RuntimeError, match=r"sources\['void'\] is empty on this stream"):
        next(stream)


def test_a_source_that_yields_nothing_the_second_time_is_named() -> None:
    class Once(Again[int]):
        left = 1

        def __iter__(self) -> Iterator[int]:
            self.left -= 1
            return iter(self.items if self.left >= 0 else ())

    stream = iter(InterleavedDataset([Once([1, 2])], [1], stopping="endless"))
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(
        RuntimeError, match=r"sources\['0'\] is empty on this stream .*stopping='endless' would restart it forever"
    ):
        next(stream)


def test_first_exhausted_ends_at_the_first_turn_of_an_empty_source() -> None:
    empty: list[int] = []
    assert len(list(InterleavedDataset([[1] * 100, empty], [1, 1]))) < 20


def test_another_epoch_is_another_order_and_is_passed_on() -> None:
    a, b = Plain("a", 500), Again([("b", 0)] * 500)
    sources: dict[str, Iterable[Item]] = {"a": a, "b": b}
    dataset = InterleavedDataset(sources, {"a": 1, "b": 1}, stopping="first_exhausted")
    before = [name for name, _ in dataset]
    dataset.set_epoch(3)
    assert (dataset.epoch, a.epoch) == (3, 3)
    after = list(dataset)
    assert [name for name, _ in after] != before
    assert ("a", 3000) in after
    dataset.set_epoch(0)
    assert [name for name, _ in dataset] == before


def test_every_pass_of_a_source_is_told_an_epoch_of_its_own() -> None:
    dataset = InterleavedDataset([Plain("a", 3)], [1], stopping="endless")
    dataset.set_epoch(5)
    assert [number for _, number in islice(dataset, 7)] == [5000, 5001, 5002, 6000, 6001, 6002, 7000]


def test_a_set_epoch_that_raises_is_named() -> None:
    class Stubborn(Plain):
        def set_epoch(self, epoch: int) -> None:
            raise OSError("no")

    dataset = InterleavedDataset({"a": Stubborn("a", 3)}, {"a": 1})
    with pytest.raises(OSError, match="no") as caught:
        dataset.set_epoch(1)
    assert caught.value.__notes__ == ["raised by set_epoch(1) of sources['a']"]


def test_an_error_of_a_source_passes_through_and_says_where() -> None:
    class Damaged(Again[int]):
        def __iter__(self) -> Iterator[int]:
            yield from self.items
            raise OSError("shard 7 is damaged")

    stream = iter(InterleavedDataset({"a": Damaged([1, 2, 3])}, {"a": 1}, stopping="endless"))
    assert list(islice(stream, 3)) == [1, 2, 3]
    with pytest.raises(OSError, match="shard 7 is damaged") as caught:
        next(stream)
    assert caught.value.__notes__ == [
        "raised by sources['a'], item 3 of its pass 0, at position 3 of epoch 0 (rank 0 of 1, worker 0 of 1)"
    ]


def test_stop_iteration_from_a_source_s_iter_does_not_pass_for_the_end() -> None:
    class Wrong(Again[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([next(iter(()))])

    with pytest.raises(RuntimeError, match=r"sources\['a'\] raised StopIteration when it was begun"):
        list(InterleavedDataset({"a": Wrong([1])}, {"a": 1}))


ONE_TWO = {"a": [1], "b": [2]}


@pytest.mark.parametrize(
    ("sources", "weights", "error", "message"),
    [
        (ONE_TWO, {"a": 1}, ValueError, r"weights lacks 'b': every source needs a weight"),
        (
            ONE_TWO,
            {"a": 1, "b": 1, "c": 1},
            ValueError,
            r"weights names 'c', which sources does not have; it has 'a', 'b'",
        ),
        ({}, {"c": 1}, ValueError, "weights names 'c', which sources does not have; it has none"),
        (ONE_TWO, {"a": 0, "b": 0}, ValueError, "weights must hold at least one weight above 0"),
        (ONE_TWO, {"a": 1, "b": -1}, ValueError, r"weights\['b'\] must not be negative"),
        (ONE_TWO, {"a": 1, "b": float("nan")}, ValueError, r"weights\['b'\] must be finite"),
        (ONE_TWO, {"a": 1, "b": float("inf")}, ValueError, r"weights\['b'\] must be finite"),
        (ONE_TWO, {"a": 1, "b": "1"}, TypeError, r"weights\['b'\] must be an int"),
        (ONE_TWO, {"a": 1, "b": True}, TypeError, r"weights\['b'\] must be an int"),
        (ONE_TWO, [1, 1], TypeError, "weights must be a mapping"),
        ({1: [1]}, {1: 1}, TypeError, "strings as names, got 1"),
        ({}, {}, ValueError, "weights must hold at least one weight above 0"),
        ([[1], [2]], {"0": 1, "1": 1}, TypeError, "weights must be a list, as sources is one, got dict"),
        ([[1], [2]], [1], ValueError, "got 1 for 2 sources"),
        ([[1], [2]], [1, -1], ValueError, r"weights\[1\] must not be negative"),
        ([], [], ValueError, "weights must hold at least one weight above 0"),
        ([[1], [2]], torch.tensor(1.0), TypeError, r"weights must hold numbers in one dimension, .* shape \(\)"),
        ([[1], [2]], torch.ones(2, 1), TypeError, r"weights must hold numbers in one dimension, .* shape \(2, 1\)"),
        ([[1], 2], [1, 1], TypeError, r"sources\['1'\] must have __iter__ and yield samples, got int"),
        (["text", [1]], [1, 1], TypeError, r"sources\['0'\] must have __iter__ and yield samples, got str"),
        ("text", [1, 1, 1, 1], TypeError, "sources must be a mapping"),
        (Plain("a", 3), [1], TypeError, "sources must be a mapping"),
    ],
)
def test_wrong_sources_and_weights_are_refused_by_name(
    sources: Any, weights: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        InterleavedDataset(sources, weights)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"stopping": "never"},
            ValueError,
            "stopping must be one of 'first_exhausted', 'all_exhausted', ",
        ),
        ({"stopping": ["endless"]}, ValueError, "stopping must be one of"),
        ({"seed": -1}, ValueError, "seed must be an int from 0"),
        ({"seed": 1.5}, TypeError, "seed must be an int from 0"),
    ],
)
def test_wrong_options_are_refused_by_name(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        InterleavedDataset([[1]], [1], **options)


@pytest.mark.parametrize("stopping", ["all_exhausted", "endless"])
def test_iterators_are_refused_where_sources_begin_again(stopping: Stopping) -> None:
    with pytest.raises(ValueError, match=r"sources\['b'\] is an iterator \(generator\) and cannot restart"):
        InterleavedDataset({"a": [1], "b": (n for n in [1])}, {"a": 1, "b": 1}, stopping=stopping)


def test_an_iterator_is_read_once_and_its_second_reading_refused() -> None:
    dataset = InterleavedDataset([iter(range(5))], [1])
    assert list(dataset) == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match=r"sources\['0'\] is an iterator .* was begun before"):
        list(dataset)


@pytest.mark.parametrize("epoch", [-1, 2**63])
def test_epochs_out_of_range_are_refused(epoch: int) -> None:
    with pytest.raises(ValueError, match="epoch must be an int from 0"):
        InterleavedDataset([[1]], [1]).set_epoch(epoch)


class Failing:
    """Raises once it has given some items, as a stream that loses its connection."""

    def __iter__(self) -> Iterator[int]:
        yield from range(4)
        raise OSError("connection lost")


@pytest.mark.parametrize("stopping", ["first_exhausted", "all_exhausted", "endless"])
def test_after_an_error_nothing_is_left_out_in_silence(stopping: Any) -> None:
    stream = iter(InterleavedDataset({"lost": Failing()}, {"lost": 1}, stopping=stopping))
    assert [next(stream) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(OSError, match="connection lost"):
        next(stream)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="ended with an error of a source; begin a new iteration, or load a state"
        ):
            next(stream)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sources": None}, r"state\['sources'\] must be a mapping"),
        ({"sources": {"a": None}}, r"state\['sources'\]\['a'\] must be a mapping"),
        ({"stream": None}, r"state\['stream'\] must be a mapping"),
        ({"position": 2**62}, r"state\['position'\] must be an int from 0"),
    ],
)
def test_an_edited_state_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    dataset = InterleavedDataset({"a": [1, 2, 3]}, {"a": 1})
    with pytest.raises((TypeError, ValueError), match=says):
        dataset.load_state_dict({**dataset.state_dict(), **change})
