"""States of the mixture of streams: resuming gives the exact remainder."""

import copy
import json
import pickle
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sources_of_items import IGNORE_SKIPS, KINDS, Again, Item, Kind, Plain, StatefulSource, make
from torch.utils.data import DataLoader

from headrace.weighted_sampler import InterleavedDataset, Stopping, WeightedDistributedSampler
from headrace.weighted_sampler._stopping import STOP_RULES

SEEDS = st.integers(0, 2**64 - 1)
# torchdata 0.11 calls what torch 2.13 has deprecated; nobody here can act on it.
IGNORE_TORCHDATA = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@pytest.mark.slow
@IGNORE_SKIPS
@given(st.data(), st.sampled_from(list(STOP_RULES)), SEEDS, st.integers(0, 5), st.booleans())
def test_a_state_saved_anywhere_gives_the_exact_remainder(
    data: st.DataObject, stopping: Stopping, seed: int, epoch: int, through_iterator: bool
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    count = len(sizes)
    weights = data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=count, max_size=count))
    first, unbroken = (make(kinds, sizes, weights, stopping, seed) for _ in range(2))
    first.set_epoch(epoch)
    unbroken.set_epoch(epoch)
    whole = list(islice(unbroken, 300))
    cut = data.draw(st.integers(0, len(whole)))
    stream = iter(first)
    assert list(islice(stream, cut)) == whole[:cut]
    state = json.loads(json.dumps(stream.state_dict() if through_iterator else first.state_dict()))
    assert state["position"] == cut
    second = make(kinds, sizes, weights, stopping, seed)
    if through_iterator:
        again = iter(second)
        again.load_state_dict(state)
    else:
        second.load_state_dict(state)
        assert second.epoch == epoch
        again = iter(second)
    assert list(islice(again, len(whole) - cut)) == whole[cut:]
    assert again.state_dict() == _state_at(make(kinds, sizes, weights, stopping, seed), epoch, len(whole))


def _state_at(dataset: InterleavedDataset[Item], epoch: int, position: int) -> Mapping[str, Any]:
    dataset.set_epoch(epoch)
    stream = iter(dataset)
    for _ in islice(stream, position):
        pass
    return stream.state_dict()


@pytest.mark.slow
@IGNORE_SKIPS
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.sampled_from(KINDS))
def test_resuming_again_and_again_gives_the_whole(steps: list[int], kind: Kind) -> None:
    whole = list(islice(make([kind] * 3, [7, 20, 11], [1, 2, 3], "endless"), sum(steps)))
    out: list[Item] = []
    state: Mapping[str, Any] | None = None
    for step in steps:
        dataset = make([kind] * 3, [7, 20, 11], [1, 2, 3], "endless")
        if state is not None:
            dataset.load_state_dict(state)
        out += islice(dataset, step)
        state = dataset.state_dict()
    assert out == whole


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_begun_before_the_first_item_is_asked_for(kind: Kind) -> None:
    dataset = make([kind] * 2, [5, 5], [1, 1], "endless")
    sources = dataset._mixture.sources
    assert isinstance(sources[0], Plain)
    assert isinstance(sources[1], Plain)
    stream = iter(dataset)
    dataset.load_state_dict(dataset.state_dict())
    dataset.load_state_dict(stream.state_dict())
    iter(dataset).load_state_dict(stream.state_dict())
    assert (sources[0].begun, sources[1].begun) == (0, 0)
    next(stream)
    assert sources[0].begun + sources[1].begun == 1


def mixed(kind: Kind = "both") -> InterleavedDataset[Item]:
    return make([kind] * 2, [9, 4], [1, 1], "endless")


@IGNORE_SKIPS
@pytest.mark.parametrize("kind", KINDS)
def test_an_iterator_that_has_delivered_nothing_begins_where_the_dataset_was_put(kind: Kind) -> None:
    first = mixed(kind)
    whole = list(islice(first, 60))
    stream = iter(first)
    list(islice(stream, 17))
    second = mixed(kind)
    unused, running = iter(second), iter(second)
    second.load_state_dict(first.state_dict())
    assert [one.position for one in (unused, running)] == [17, 17]
    copies = [copy.copy(running), copy.deepcopy(running), pickle.loads(pickle.dumps(running))]
    assert list(islice(running, 20)) == whole[17:37]
    assert second.state_dict() == _state_at(mixed(kind), 0, 37)
    assert unused.position == 0, "the state is that of one iteration"
    for one in copies:
        assert list(islice(one, 20)) == whole[17:37]


def test_an_iterator_that_was_made_and_not_used_leaves_a_loaded_position() -> None:
    first, second = mixed(), mixed()
    stream = iter(first)
    list(islice(stream, 17))
    second.load_state_dict(first.state_dict())
    iter(second)
    assert second.state_dict()["position"] == 17
    assert list(islice(second, 9)) == list(islice(stream, 9))


def test_an_iterator_that_has_delivered_nothing_is_of_the_epoch_that_is_chosen() -> None:
    dataset, other = mixed(), mixed()
    running = iter(dataset)
    for one in (dataset, other):
        one.set_epoch(2)
    assert list(islice(running, 9)) == list(islice(other, 9))
    assert dataset.state_dict() == other.state_dict()


@pytest.mark.filterwarnings("ignore:an iteration of epoch 0 .* continues after load_state_dict")
def test_an_iteration_that_is_under_way_goes_on_and_the_next_one_has_the_state() -> None:
    first, second = mixed(), mixed()
    whole = list(islice(first, 60))
    stream, running = iter(first), iter(second)
    list(islice(stream, 17))
    assert list(islice(running, 3)) == whole[:3]
    second.load_state_dict(first.state_dict())
    assert list(islice(running, 5)) == whole[3:8]
    assert list(islice(second, 5)) == whole[17:22]


def test_loading_twice_is_loading_once() -> None:
    first = make(["both", "iterator"], [9, 4], [1, 1], "endless")
    whole = list(islice(first, 60))
    stream = iter(first)
    list(islice(stream, 17))
    state = stream.state_dict()
    second = make(["both", "iterator"], [9, 4], [1, 1], "endless")
    second.load_state_dict(state)
    again = iter(second)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert list(islice(again, 43)) == whole[17:]


def test_a_state_saved_before_a_source_is_restored_is_the_loaded_one() -> None:
    first = make(["iterator", "iterator"], [50, 50], [100, 1], "first_exhausted")
    stream = iter(first)
    list(islice(stream, 30))
    state = stream.state_dict()
    second = make(["iterator", "iterator"], [50, 50], [100, 1], "first_exhausted")
    second.load_state_dict(state)
    next(iter(second))  # one source is restored now, the other perhaps not
    third = make(["iterator", "iterator"], [50, 50], [100, 1], "first_exhausted")
    third.load_state_dict(second.state_dict())
    assert list(third) == list(first)[31:]


def test_what_is_drawn_and_dropped_is_named_with_its_number() -> None:
    first = InterleavedDataset({"a": Again(range(100))}, {"a": 1})
    list(islice(first, 12))
    second = InterleavedDataset({"a": Again(range(100))}, {"a": 1})
    second.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match=r"sources\['a'\] has no state .* first 12 items are reread and discarded"):
        assert list(second) == list(range(12, 100))


@IGNORE_SKIPS
def test_a_source_that_has_become_shorter_is_named() -> None:
    first = InterleavedDataset({"a": Again(range(100))}, {"a": 1})
    list(islice(first, 12))
    second = InterleavedDataset({"a": Again(range(5))}, {"a": 1})
    second.load_state_dict(first.state_dict())
    with pytest.raises(RuntimeError, match=r"sources\['a'\] ended after 5 items, but 12 had been drawn"):
        next(iter(second))


def test_a_source_that_has_lost_its_load_state_dict_is_named() -> None:
    first = make(["iterator"], [10], [1], "endless")
    list(islice(first, 3))
    second = make(["plain"], [10], [1], "endless")
    second.load_state_dict(first.state_dict())
    with pytest.raises(RuntimeError, match=r"sources\['s0'\], which has no load_state_dict"):
        next(iter(second))


def test_a_loaded_state_holds_for_one_iteration_only() -> None:
    first = make(["iterator"], [10], [1], "first_exhausted")
    list(islice(first, 3))
    second = make(["iterator"], [10], [1], "first_exhausted")
    second.load_state_dict(first.state_dict())
    assert [len(list(second)), len(list(second))] == [7, 10]


def test_the_state_of_an_ended_stream_resumes_as_ended_once_and_another_epoch_is_whole() -> None:
    first = make(["plain"], [10], [1], "first_exhausted")
    list(first)
    second = make(["plain"], [10], [1], "first_exhausted")
    second.load_state_dict(first.state_dict())
    assert [len(list(second)), len(list(second))] == [0, 10]
    second.load_state_dict(first.state_dict())
    second.set_epoch(0)  # the epoch it is in: the state holds
    assert list(second) == []
    second.load_state_dict(first.state_dict())
    second.set_epoch(1)
    assert len(list(second)) == 10


def test_two_iterations_at_once_do_not_disturb_each_other() -> None:
    dataset = make(["plain", "iterator"], [40, 40], [1, 1], "first_exhausted")
    whole = list(dataset)
    one, two = iter(dataset), iter(dataset)
    mixed = [(next(one), next(two)) for _ in range(20)]
    assert [item for item, _ in mixed] == [item for _, item in mixed] == whole[:20]
    list(islice(two, 5))
    assert (one.state_dict()["position"], two.state_dict()["position"]) == (20, 25)
    assert list(one) == whole[20:]
    assert list(two) == whole[25:]


def test_mixtures_of_mixtures_resume() -> None:
    def build() -> InterleavedDataset[Item]:
        inner = make(["iterator", "both"], [5, 8], [1, 2], "all_exhausted", seed=1)
        return InterleavedDataset(
            {"inner": inner, "z": StatefulSource("z", 9)}, {"inner": 2, "z": 1}, stopping="endless"
        )

    whole = list(islice(build(), 200))
    for cut in (0, 1, 57, 130):
        first = build()
        list(islice(first, cut))
        second = build()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert list(islice(second, 200 - cut)) == whole[cut:]


def test_a_loaded_position_outlives_a_state_of_an_older_epoch() -> None:
    def state_at(epoch: int, position: int) -> Mapping[str, Any]:
        return _state_at(make(["iterator"], [10], [1], "first_exhausted"), epoch, position)

    dataset = make(["iterator"], [10], [1], "first_exhausted")
    dataset.load_state_dict(state_at(2, 6))
    dataset.set_epoch(2)
    dataset.load_state_dict(state_at(0, 3))
    assert (dataset.epoch, dataset.state_dict()["position"]) == (2, 6)
    assert [number for _, number in dataset] == [2006, 2007, 2008, 2009]


STATE = make(["plain", "plain"], [5, 5], [1, 2], "endless").state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "state has version 2, this release reads version 1"),
        ({"seed": 4}, "construct it with seed=4"),
        ({"fingerprint": STATE["fingerprint"][:16] + 16 * "0"}, "other weights or another stopping rule"),
        (
            {"fingerprint": STATE["fingerprint"][:16]},
            r"state\['fingerprint'\] must be 32 hex digits, got '[0-9a-f]{16}'",
        ),
        ({"sources": {"s0": None, "x": None}}, "sources 's0', 'x', this dataset draws from 's0', 's1' there"),
        ({"sources": {"s0": {}, "s1": {}}}, r"state\['sources'\]\['s0'\] lacks"),
        ({"stream": {"rank": 0}}, r"state\['stream'\] lacks \['num_replicas', 'num_workers', 'worker'\]"),
        ({"position": -1}, r"state\['position'\] must be an int from 0"),
        ({"epoch": 2**64}, r"state\['epoch'\] must be an int from 0"),
    ],
)
def test_a_state_that_does_not_belong_is_refused(change: dict[str, Any], message: str) -> None:
    dataset = make(["plain", "plain"], [5, 5], [1, 2], "endless")
    with pytest.raises(ValueError, match=message):
        dataset.load_state_dict({**STATE, **change})
    with pytest.raises(ValueError, match=message):
        iter(dataset).load_state_dict({**STATE, **change})


def test_a_state_that_is_no_state_is_refused() -> None:
    dataset = make(["plain", "plain"], [5, 5], [1, 2], "endless")
    with pytest.raises(ValueError, match="state lacks"):
        dataset.load_state_dict({})
    with pytest.raises(TypeError, match=r"state must be a mapping returned by \w+.state_dict"):
        dataset.load_state_dict([])  # type: ignore[arg-type]


def test_states_of_other_weights_rules_and_streams_are_refused() -> None:
    for other in (
        make(["plain", "plain"], [5, 5], [1, 3], "endless"),
        make(["plain", "plain"], [5, 5], [1, 2], "all_exhausted"),
    ):
        with pytest.raises(ValueError, match="other weights or another stopping rule"):
            other.load_state_dict(STATE)
    dataset = make(["plain", "plain"], [5, 5], [1, 2], "endless")
    dataset.load_state_dict({**STATE, "stream": {"rank": 1, "num_replicas": 2, "worker": 0, "num_workers": 1}})
    with pytest.raises(ValueError, match="state was saved by rank 1 of 2, worker 0 of 1, this stream is rank 0 of 1"):
        iter(dataset)


def test_a_state_loaded_in_the_main_process_is_refused_in_workers() -> None:
    dataset = make(["plain"], [5], [1], "first_exhausted")
    dataset.load_state_dict(dataset.state_dict())
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, num_workers=1)
    stream = iter(loader)
    with pytest.raises(RuntimeError, match="every worker needs its own state"):
        list(stream)
    stream._shutdown_workers()  # type: ignore[attr-defined]  # the garbage collector would wait for them for five seconds


CUTS = [0, 1, 9, 11]
LOADED = [
    pytest.param(cut, kind, workers, marks=() if workers == 0 or at == place else pytest.mark.nightly)
    for at, cut in enumerate(CUTS)
    for place, kind in enumerate(KINDS)
    for workers in (0, 2)
]


@pytest.mark.parametrize(("cut", "kind", "workers"), LOADED)
@IGNORE_SKIPS
@IGNORE_TORCHDATA
def test_the_stateful_loader_resumes(cut: int, kind: Kind, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def load() -> Any:
        dataset = make([kind, kind], [15, 31], [1, 2], "all_exhausted", seed=3)
        return stateful.StatefulDataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=list)

    whole = list(load())
    loader = load()
    stream = iter(loader)
    assert list(islice(stream, cut)) == whole[:cut]
    state = loader.state_dict()
    del stream
    again = load()
    again.load_state_dict(state)
    assert list(again) == whole[cut:]
    assert list(again) == whole  # the epoch after the resumed one


@pytest.mark.parametrize("workers", [0, 2])
@IGNORE_TORCHDATA
def test_the_stateful_loader_begins_again_after_its_end(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def load() -> Any:
        dataset = make(["iterator", "both"], [15, 31], [1, 2], "first_exhausted")
        return stateful.StatefulDataLoader(dataset, batch_size=None, num_workers=workers)

    loader = load()
    whole = list(loader)
    again = load()
    again.load_state_dict(loader.state_dict())
    assert list(again) == whole


@IGNORE_TORCHDATA
def test_the_stateful_loader_keeps_its_place_while_another_iteration_runs() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    dataset = make(["iterator"], [30], [1], "first_exhausted")
    loader = stateful.StatefulDataLoader(dataset, batch_size=None)
    stream = iter(loader)
    list(islice(stream, 10))
    next(iter(dataset))  # a look at the first item; the dataset's latest iteration is now this one
    again = stateful.StatefulDataLoader(make(["iterator"], [30], [1], "first_exhausted"), batch_size=None)
    again.load_state_dict(loader.state_dict())
    assert [number for _, number in again] == list(range(10, 30))


# -- set_epoch and states ----------------------------------------------------------------------------------------


def at(epoch: int, position: int) -> Any:
    """A state of the streams below."""
    dataset = streams()
    dataset.set_epoch(epoch)
    list(islice(dataset, position))
    return dataset.state_dict()


def streams() -> InterleavedDataset[Item]:
    return make(["iterator", "both"], [15, 31], [1, 2], "first_exhausted", seed=3)


def whole_epoch(epoch: int) -> list[Item]:
    dataset = streams()
    dataset.set_epoch(epoch)
    return list(dataset)


def test_a_set_epoch_wins_over_a_state_of_an_older_epoch_that_is_loaded_after_it() -> None:
    dataset = streams()
    dataset.set_epoch(1)
    dataset.load_state_dict(at(0, 100))
    assert dataset.epoch == 1
    stream = iter(dataset)
    stream.load_state_dict(at(0, 20))
    assert list(stream) == whole_epoch(1)


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_state_of_the_same_or_a_newer_epoch_wins(epoch: int) -> None:
    dataset = streams()
    dataset.set_epoch(1)
    dataset.load_state_dict(at(epoch, 20))
    assert dataset.epoch == epoch
    assert list(dataset) == whole_epoch(epoch)[20:]


def test_an_epoch_that_was_iterated_no_longer_wins() -> None:
    dataset = streams()
    dataset.set_epoch(5)
    next(iter(dataset))
    dataset.load_state_dict(at(3, 20))
    assert list(dataset) == whole_epoch(3)[20:]


def test_after_a_break_the_epoch_begins_anew() -> None:
    dataset = streams()
    dataset.set_epoch(2)
    assert list(islice(dataset, 7)) == whole_epoch(2)[:7]
    assert dataset.state_dict()["position"] == 7
    assert list(dataset) == list(dataset) == whole_epoch(2)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@IGNORE_TORCHDATA
def test_after_the_state_of_an_epochs_end_set_epoch_gives_the_next_one_whole(workers: int, persistent: bool) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def load() -> Any:
        return stateful.StatefulDataLoader(
            streams(), batch_size=None, num_workers=workers, persistent_workers=persistent
        )

    loader = load()
    list(loader)
    state = loader.state_dict()
    loader.dataset.set_epoch(1)
    whole = list(loader)
    again = load()
    again.load_state_dict(state)  # kept by the loader until iter()
    again.dataset.set_epoch(1)
    assert list(again) == whole
    assert workers or [tuple(item) for item in whole] == whole_epoch(1)


@pytest.mark.parametrize("workers", [0, 2])
@IGNORE_TORCHDATA
def test_the_stateful_loader_goes_back_to_an_earlier_checkpoint(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    loader = stateful.StatefulDataLoader(streams(), batch_size=None, num_workers=workers)
    loader.dataset.set_epoch(1)
    stream = iter(loader)
    begin = list(islice(stream, 9))
    state = loader.state_dict()
    rest = list(stream)
    loader.dataset.set_epoch(2)
    list(loader)
    loader.load_state_dict(state)
    assert list(loader) == rest
    assert list(loader) == begin + rest


# -- Fingerprints and semantics ----------------------------------------------------------------------------------


def test_the_fingerprint_is_hex_and_knows_data_options_and_seed() -> None:
    class Marked(Again[int]):
        def __init__(self, fingerprint: str) -> None:
            super().__init__([1])
            self.fingerprint = fingerprint

    sources: list[Any] = [[Again([1]), [1, 2]], [Again([1]), [1, 2, 3]], [Marked("a"), [1]], [Marked("b"), [1]]]
    made = [InterleavedDataset(each, [1, 1]) for each in sources]
    made += [InterleavedDataset(sources[0], [1, 2]), InterleavedDataset(sources[0], [1, 1], seed=1)]
    made += [InterleavedDataset(sources[0], [1, 1], stopping="endless")]
    assert len({dataset.fingerprint for dataset in made}) == len(made)
    assert all(int(dataset.fingerprint, 16) for dataset in made)
    same = InterleavedDataset(sources[0], np.array([2.0, 2.0]), seed=np.int64(0))  # type: ignore[arg-type]
    assert same.fingerprint == made[0].fingerprint
    with pytest.raises(ValueError, match="state was saved with other data in the sources"):
        made[1].load_state_dict(made[0].state_dict())
    with pytest.raises(ValueError, match="state was saved with seed=1"):
        made[0].load_state_dict(made[5].state_dict())


@pytest.mark.parametrize(
    ("weights", "options", "want"),
    [
        ({"a": 3, "b": 1}, {}, {"a": 768, "b": 256}),
        ({"a": 3, "b": 1}, {"semantics": "ratio"}, {"a": 512, "b": 512}),
        ({"a": 0.5, "b": 1}, {"semantics": "ratio"}, {"a": 146, "b": 878}),
        ({"a": 1, "b": 3}, {"semantics": "temperature", "temperature": 2}, {"a": 256, "b": 768}),
    ],
)
def test_weights_are_proportions_unless_semantics_says_otherwise(
    weights: dict[str, float], options: dict[str, Any], want: dict[str, int]
) -> None:
    dataset = InterleavedDataset({"a": ["a"] * 10, "b": ["b"] * 30}, weights, stopping="endless", **options)
    counts = Counter(islice(dataset, 1024))
    assert {name: abs(counts[name] - count) <= 1 for name, count in want.items()} == {"a": True, "b": True}


def test_semantics_that_need_lengths_name_the_source_without_one() -> None:
    sources: list[Any] = [[1], Again([2])]
    with pytest.raises(TypeError, match=r"sources\['1'\] must have a length unless semantics='proportion', got Again"):
        InterleavedDataset(sources, [1, 1], semantics="ratio")
    with pytest.raises(ValueError, match=r"semantics must be one of 'proportion', 'ratio', 'temperature', got 'count'"):
        InterleavedDataset([[1]], [1], semantics="count")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="semantics='temperature' needs temperature, and other semantics do not allow it"
    ):
        InterleavedDataset([[1]], [1], temperature=2)


# -- States of other classes, and data in messages ---------------------------------------------------------------


def test_a_state_of_another_class_is_named_as_such() -> None:
    sampler = WeightedDistributedSampler(range(9), {(0, 9): 1})
    stream = InterleavedDataset({"a": [1]}, {"a": 1})
    with pytest.raises(
        ValueError, match=r"44 hex digits, .*: this is not a state of WeightedDistributedSampler; load it"
    ):
        sampler.load_state_dict(stream.state_dict())
    other = {**sampler.state_dict(), "version": 7, "fingerprint": "ab"}
    with pytest.raises(ValueError, match="this is not a state of WeightedDistributedSampler"):
        sampler.load_state_dict(other)
    with pytest.raises(ValueError, match=r"lacks .* pass what InterleavedDataset.state_dict\(\) returned"):
        stream.load_state_dict(sampler.state_dict())


def test_messages_do_not_hold_whole_datasets() -> None:
    many = list(range(10**5))
    for wrong in (
        lambda: WeightedDistributedSampler(many, [1] * len(many), many),  # type: ignore[arg-type]
        lambda: WeightedDistributedSampler(many, weight_dict=many),  # type: ignore[arg-type]
        lambda: WeightedDistributedSampler(many, [0] * len(many)),
        lambda: WeightedDistributedSampler(many, {(0, 9): many}),  # type: ignore[arg-type]
        lambda: WeightedDistributedSampler(many, [1] * len(many), semantics=many),  # type: ignore[arg-type]
        lambda: WeightedDistributedSampler(many, [1] * len(many), schedule=many),  # type: ignore[arg-type]
        lambda: WeightedDistributedSampler(many, [1] * len(many), drop_last=many),  # type: ignore[arg-type]
        lambda: WeightedDistributedSampler(many, semantics="temperature", temperature=many),  # type: ignore[arg-type]
        lambda: InterleavedDataset([many], [many]),  # type: ignore[list-item]
        lambda: InterleavedDataset({str(n): [n] for n in many[:999]}, {"a": 1}),
        lambda: InterleavedDataset([many, many], [0, 0], stopping=many),  # type: ignore[arg-type]
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            wrong()
        assert len(str(caught.value)) < 500
