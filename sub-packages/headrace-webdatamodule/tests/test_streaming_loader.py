"""Epochs of the promised length, which resume exactly where they were left, and several sources in one stream."""

import itertools
import json
import random
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st
from streams import flat, loader, module, number, quietly, untuple, write

from headrace.webdatamodule import Split, WebDataModule, index_shards

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("n", "batch"), [(21, 4), (20, 4), (1, 4)])
def test_an_epoch_is_every_sample_once(tmp_path: Path, n: int, batch: int, workers: int) -> None:
    if workers and n == 20:
        pytest.skip("21 says the same")
    write(tmp_path, [1] * min(n, 2) + [n - min(n, 2)] * (n > 2))
    made = loader(tmp_path, n, batch, kwargs_wld={"num_workers": min(workers, n - 1)})
    for _ in range(2):
        batches = list(made)
        assert len(batches) == len(made) == -(-n // batch)
        assert sorted(flat(batches)) == list(range(n))
        assert [len(b) for b in batches[:-1]] == [batch] * (len(batches) - 1)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_an_epoch_has_the_promised_length(
    tmp_path_factory: pytest.TempPathFactory,
    promised: int,
    there: int,
    batch: int,
    training: bool,
    shuffle: bool,
    indexed: bool,
) -> None:
    place = write(tmp_path_factory.mktemp("shards"), [there // 2, there - there // 2])
    if indexed:
        index_shards(place)
    split = Split.train if training else Split.val
    made = loader(place, promised, batch, split=split, kwargs_wds={"shardshuffle": shuffle})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = list(made)
        again = list(made)
    batches_there, length = -(-there // batch), -(-promised // batch)
    assert len(batches) == (length if training else min(length, batches_there))
    assert len(again) == len(made) == len(batches)
    assert training or again == batches
    if length == batches_there:
        assert sorted(flat(batches)) == list(range(there))
    if not shuffle and length <= batches_there:
        assert flat(batches) == list(range(there))[: length * batch]
    expected = {1: ["ran out"], 0: [], -1: ["remain"]}[(length > batches_there) - (length < batches_there)]
    messages = [str(one.message) for one in caught]
    assert [word in message for message, word in zip(messages, expected, strict=True)] == [True] * len(expected)


def test_the_warnings_hold_the_numbers_and_the_cure(tmp_path: Path) -> None:
    write(tmp_path, [5, 5])
    made = loader(tmp_path, 16, 4)
    with pytest.warns(
        UserWarning, match=r"train: the shards ran out after 10 samples in 3 batches, before the 4"
    ) as said:
        batches = list(made)
    assert "read again, so samples repeat. Set n_samples['train']" in str(said[0].message)
    assert (len(said), Counter(flat(batches))) == (1, Counter(range(10)) + Counter(range(4)))
    assert len(list(made)) == 4  # said once
    with pytest.warns(UserWarning, match="the epoch ends early"):
        assert flat(loader(tmp_path, 16, 4, split=Split.val)) == list(range(10))
    message = r"samples remain after the 2 batches of an epoch \(n_samples=8, global_batch_size=4\)"
    with pytest.warns(UserWarning, match=message):
        assert flat(loader(tmp_path, 8, 4)) == list(range(8))


def test_endless_samples_always_remain_and_an_epoch_left_early_says_nothing(tmp_path: Path) -> None:
    write(tmp_path, [5, 5])
    assert len(flat(loader(tmp_path, 64, 4, kwargs_wds={"resampled": True}))) == 64
    assert next(iter(loader(tmp_path, 8, 4))) == [0, 1, 2, 3]


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_batch_at_all_is_an_error_and_no_endless_loop(tmp_path: Path, ranks: int) -> None:
    write(tmp_path, [5, 5])
    made = loader(tmp_path, 10, 1, ranks, pipeline_wds=[lambda source: iter(())], num_replicas=ranks, rank=0)
    with pytest.raises(ValueError, match=r"no batch came out of the shards \(0 samples"):
        list(made)


def test_shards_that_go_away_between_laps_are_an_error(tmp_path: Path) -> None:
    stages: list[Any] = [untuple, lambda source: iter(())]
    once = iter(stages)
    made = loader(write(tmp_path, [2]), 4, pipeline_wds=lambda source: next(once)(source))
    with pytest.warns(UserWarning, match="ran out"), pytest.raises(ValueError, match="when read again"):
        list(made)


@pytest.mark.parametrize("split", [Split.val, Split.test, Split.predict])
def test_evaluation_loaders_deliver_the_same_every_time(tmp_path: Path, split: Split) -> None:
    index_shards(write(tmp_path, [4] * 5))
    made = loader(tmp_path, 20, 4, split=split, kwargs_wds={"shardshuffle": True})
    first = list(made)
    made.set_epoch(3)
    assert list(made) == list(made) == first
    assert sorted(flat(first)) == list(range(20))


BATCHED = wds.batched(3, collation_fn=None)
PIPELINES: dict[str, tuple[Any, Any]] = {
    "outside": (number, BATCHED),
    "inside": ([number, BATCHED], None),
    "both": ([number, BATCHED], wds.map(sorted)),
    "whole": (number, wds.batched(3, collation_fn=None, partial=False)),
    "own": (untuple, BATCHED),
    "shuffled": ([number, wds.shuffle(7, initial=7, rng=random.Random(2))], BATCHED),
    "drops": (wds.map(lambda sample: None if sample[0] % 5 == 0 else sample[0]), BATCHED),
}


def stream(place: Path, pipeline: str, n: int, ranks: int = 1, workers: int = 0, **options: Any) -> Any:
    inside, outside = PIPELINES[pipeline]
    default: dict[str, Any] = {
        "pipeline_wds": inside,
        "pipeline_prebatch_wld": outside,
        "kwargs_wds": {"shardshuffle": True, "seed": 3},
        "kwargs_wld": {"num_workers": workers},
    }
    return loader(place, n, 3, ranks, **{**default, **options})


def check_resumed(make: Any, at: int, epochs: int = 3) -> None:
    """Take some batches, keep the state as a checkpoint would, resume in a new loader."""
    whole, first = quietly(make(), epochs), make()
    length = len(first)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "train: ")
        taken = [batch for _ in range(at // length) for batch in first]
        running = iter(first)
        taken += list(islice(running, at % length))
        state = json.loads(json.dumps(first.state_dict()))
    assert (state["epoch"], state["position"]) == divmod(at, length)
    resumed = make()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert (len(resumed), resumed.remaining) == (length, length - at % length)
    assert taken + quietly(resumed, epochs - at // length) == whole


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_at_every_batch(tmp_path: Path, pipeline: str) -> None:
    index_shards(write(tmp_path, [4, 9, 1, 6]))
    for at in range(2 * 7 + 1):
        check_resumed(lambda: stream(tmp_path, pipeline, 20), at)


MANY = [pytest.param(50, seed, id=f"many {seed}", marks=pytest.mark.nightly) for seed in range(4)]


@pytest.mark.parametrize(("points", "seed"), [pytest.param(5, 9, id="few"), *MANY])
def test_at_random_points_of_random_layouts(tmp_path: Path, points: int, seed: int) -> None:
    draw = random.Random(seed)
    for point in range(points):
        counts = [draw.randrange(1, 15) for _ in range(draw.randrange(1, 7))]
        place, n = write(tmp_path / str(point), counts), sum(counts)
        if indexed := draw.random() < 0.8:
            index_shards(place)
        ranks = draw.randint(1, 16 if indexed else len(counts))
        rank, workers, pipeline = draw.randrange(ranks), draw.randint(0, 3), draw.choice(list(PIPELINES))
        if pipeline in ("whole", "drops") and (not indexed or -(-n // ranks) < 3):
            pipeline = "outside"  # some rank would not have a whole batch, which is an error
        promised = draw.choice([n, n, draw.randint(1, 2 * n)])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "train: ")  # padding, idle workers

            def make() -> Any:
                return stream(place, pipeline, promised, ranks, workers, num_replicas=ranks, rank=rank)  # noqa: B023

            check_resumed(make, draw.randrange(2 * len(make()) + 1))


@pytest.mark.parametrize("calls", [[("with_epoch", {"nbatches": 17})], [("repeat", {"nepochs": 2})]])
def test_epochs_that_a_method_made(tmp_path: Path, calls: Any) -> None:
    index_shards(write(tmp_path, [4, 9, 1, 6]))
    for at in (1, 7, 8, 14, 16, 20):
        check_resumed(lambda: stream(tmp_path, "outside", 20, invoke_wld=calls), at)


def test_one_worker_or_none_is_the_same_order(tmp_path: Path) -> None:
    index_shards(write(tmp_path, [10, 10]))
    whole, first, resumed = (stream(tmp_path, "shuffled", 20, workers=workers) for workers in (0, 0, 1))
    taken = list(islice(first, 3))
    resumed.load_state_dict(first.state_dict())
    assert taken + list(resumed) == list(whole)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iteration_whose_workers_were_ended_repeats_nothing(tmp_path: Path, persistent: bool) -> None:
    write(tmp_path, [100, 100])
    made = loader(tmp_path, 200, 4, kwargs_wld={"num_workers": 1, "persistent_workers": persistent})
    running = iter(made)
    taken = [next(running), next(running)]
    made.close()
    with pytest.raises(RuntimeError, match="the train loader was closed while it was iterated: iterate it again"):
        taken += list(running)
    assert made.state_dict()["position"] == len(taken) == 2
    made.load_state_dict(made.state_dict())
    assert flat(taken) + flat(made) == list(range(200))


def test_a_state_is_resumed_by_the_loader_that_there_is(tmp_path: Path) -> None:
    index_shards(write(tmp_path, [10, 10]))
    first, second = (module(tmp_path, 20, 2) for _ in range(2))
    whole = list(first.train_dataloader())
    first.train_dataloader().set_epoch(0)
    begun = iter(first.train_dataloader())
    assert [next(begun) for _ in range(3)] == whole[:3]
    made = second.train_dataloader()
    running = iter(made)  # which has delivered nothing yet
    second.load_state_dict(first.state_dict())
    assert [next(running) for _ in range(2)] == whole[3:5]
    assert second.state_dict()["train"]["position"] == 5
    assert second.train_dataloader() is made
    assert list(running) == whole[5:]


def test_loaders_of_one_module_do_not_disturb_one_another(tmp_path: Path) -> None:
    index_shards(write(tmp_path, [10, 10]))
    options: Any = {"kwargs_wds": {"shardshuffle": True}, "kwargs_wld": {"num_workers": 2, "persistent_workers": True}}
    data = module(tmp_path, 20, 4, **options)
    whole = list(data.train_dataloader())
    first, second = data.train_dataloader(), data.train_dataloader()
    pairs = list(zip(first, second, strict=True))
    assert [one for one, _ in pairs] == [other for _, other in pairs] == whole


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"kwargs_wds": {"shardshuffle": True, "seed": 4}}, "checkpoint has seed=3, got seed=4"),
        ({"kwargs_wds": {"seed": 3}}, "checkpoint has shardshuffle=True, got shardshuffle=False"),
        (
            {"pipeline_prebatch_wld": wds.batched(4, collation_fn=None)},
            r"has pipeline_prebatch_wld=batched\(batchsize=3",
        ),
        ({"n": 19}, "checkpoint has n_samples=20, got n_samples=19"),
        ({"ranks": 2}, "checkpoint has global_batch_size=3, got global_batch_size=6"),
        (
            {"exact": False, "kwargs_wds": {"shardshuffle": True, "seed": 3, "resampled": True}},
            "has kwargs_wds={}, got kwargs",
        ),
        ({"exact": False}, "checkpoint has exact=True, got exact=False"),
        ({"workers": 2}, "checkpoint has num_workers=0, got num_workers=2: it is at batch 1.*IndexedWebDataModule"),
        ({"num_replicas": 2, "rank": 0}, "checkpoint has num_replicas=1, got num_replicas=2: it is at batch 1 of an"),
    ],
)
def test_a_state_of_another_order_is_refused(tmp_path: Path, options: dict[str, Any], part: str) -> None:
    index_shards(write(tmp_path, [10, 10]))
    made, other = stream(tmp_path, "outside", 20), stream(tmp_path, "outside", **{"n": 20, **options})
    next(iter(made))

    def resume() -> None:
        other.load_state_dict(made.state_dict())
        next(iter(other))  # ranks are asked for when an epoch begins

    with pytest.raises(ValueError, match=f"train: .*{part}"):
        resume()
    same = {"pipeline_prebatch_wld", "workers", "num_replicas"} & set(options)
    assert (made.fingerprint == other.fingerprint) == bool(same - {"pipeline_prebatch_wld"})


def test_between_epochs_batches_ranks_and_workers_may_change(tmp_path: Path) -> None:
    index_shards(write(tmp_path, [10, 10]))
    made = stream(tmp_path, "outside", 20)
    list(made)
    state = made.state_dict()
    batched = wds.batched(2, collation_fn=None)
    seen: list[int] = []
    for rank in range(2):
        other = stream(tmp_path, "outside", 20, workers=1, pipeline_prebatch_wld=batched, num_replicas=2, rank=rank)
        other.load_state_dict(state)
        assert other.state_dict()["epoch"] == 1
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "train: ")
            seen += flat(islice(other, 5))
    assert sorted(seen) == list(range(20))


@pytest.mark.parametrize("indexed", [True, False])
def test_other_shards_are_refused_and_moved_ones_are_not(tmp_path: Path, indexed: bool) -> None:
    places = [write(tmp_path / name, counts) for name, counts in [("a", [10, 10]), ("b", [10, 10]), ("c", [9, 11])]]
    for place in places if indexed else []:
        index_shards(place)
    state = stream(places[0], "outside", 20).state_dict()
    stream(places[1], "outside", 20).load_state_dict(state)
    with pytest.raises(ValueError, match="checkpoint has shards="):
        stream(places[2], "outside", 20).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": 8}, "checkpoint is at batch 8 of an epoch of 7"),
        ({"version": 2}, "version=2, this release reads 1"),
        ({"position": -1}, r"state\['position'\] must be an int from 0 to"),
        ({"epoch": True}, r"state\['epoch'\] must be an int from 0"),
        *(({name: 10**30}, f"{name}'. must be .*damaged") for name in ("epoch", "position", "num_replicas", "version")),
        ({"options": "ab"}, "must be a mapping"),
        ({"more": 1}, "state must be what state_dict.. returned, with version, seed"),
    ],
)
def test_states_that_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    made = stream(write(tmp_path, [10, 10]), "outside", 20)
    with pytest.raises((TypeError, ValueError), match=f"train: .*{message}"):
        made.load_state_dict({**made.state_dict(), **change})
    with pytest.raises(TypeError, match="got list"):
        made.load_state_dict([])
    for epoch in (-1, 10**30):
        with pytest.raises(ValueError, match="train: epoch must be an int"):
            made.set_epoch(epoch)
    assert len(list(made)) == 7


def one_after_the_other(sources: Mapping[str, Iterable[Any]]) -> Iterator[Any]:
    return itertools.chain(*sources.values())


class InTurn:
    """One of each in turn, without end; a source that has run out begins again."""

    def __init__(self, sources: Mapping[str, Iterable[Any]]) -> None:
        self.sources = sources

    def __iter__(self) -> Iterator[Any]:
        endless = [self.again(source) for source in self.sources.values()]
        return (sample for turn in zip(*endless, strict=True) for sample in turn)

    @staticmethod
    def again(source: Iterable[Any]) -> Iterator[Any]:
        while True:
            yield from source


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """12 samples "a" of 0 to 11, and 4 samples "b" of 0 to 3."""
    return {"a": write(tmp_path / "a", [3] * 4), "b": write(tmp_path / "b", [1] * 4)}


def mixture(places: Any, mix: Any, n: int = 16, workers: int = 0, **options: Any) -> Any:
    shuffled = {"shardshuffle": True}
    return module(places, n, 4, mix=mix, kwargs_wds=shuffled, kwargs_wld={"num_workers": workers}, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("indexed", [False, True])
def test_sources_one_after_the_other(places: dict[str, Path], workers: int, indexed: bool) -> None:
    for place in places.values() if indexed else []:
        index_shards(place)
    made = mixture(places, one_after_the_other, workers=workers).train_dataloader()
    first, second = flat(made), flat(made)
    assert sorted(first) == sorted(second) == sorted([*range(12), *range(4)])
    assert first != second


@pytest.mark.parametrize("indexed", [False, True])
def test_a_source_that_begins_again_has_another_order(places: dict[str, Path], indexed: bool) -> None:
    for place in places.values() if indexed else []:
        index_shards(place)
    made = mixture(places, InTurn, 160).train_dataloader()
    assert len(made) == 40
    samples = flat(made)
    rare = samples[1::2]
    assert Counter(rare) == dict.fromkeys(range(4), 20)
    passes = [tuple(rare[i : i + 4]) for i in range(0, 80, 4)]
    assert len(set(passes)) > 5
    assert flat(made) != samples
    assert flat(mixture(places, InTurn, 160).train_dataloader()) == samples


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mixture_resumes(places: dict[str, Path], workers: int) -> None:
    whole = list(mixture(places, InTurn, workers=workers).train_dataloader())
    data = mixture(places, InTurn, workers=workers)
    running = iter(data.train_dataloader())
    first = [next(running), next(running)]
    resumed = mixture(places, InTurn, workers=workers)
    resumed.load_state_dict(data.state_dict())
    assert first + list(resumed.train_dataloader()) == whole


def test_each_reader_gets_some_of_each_source(places: dict[str, Path]) -> None:
    ranks: Any = {"num_replicas": 3, "workers": 2}
    message = r"train, source 'a': 4 shards .* 6 readers .*lower num_workers.*at least 6 shards"
    with pytest.raises(ValueError, match=message):
        mixture(places, InTurn, rank=0, **ranks).setup("fit")
    for place in places.values():
        index_shards(place)
    seen = [set[int](), set[int]()]
    for rank in range(3):
        batches = list(mixture(places, InTurn, 240, rank=rank, **ranks).train_dataloader())
        assert len(batches) == 60
        seen[0] |= set(flat(batches)[::2])
        seen[1] |= set(flat(batches)[1::2])
    assert seen[0] | seen[1] == set(range(12))


def test_the_orders_of_sources_do_not_depend_on_where_they_lie(places: dict[str, Path], tmp_path: Path) -> None:
    state = mixture(places, InTurn).train_dataloader().state_dict()
    moved = {name: place.rename(tmp_path / f"moved {name}") for name, place in places.items()}
    mixture(moved, InTurn).train_dataloader().load_state_dict(state)
    with pytest.raises(ValueError, match="checkpoint has shards of 'a'="):
        mixture({"a": moved["b"], "b": moved["a"]}, InTurn).train_dataloader().load_state_dict(state)


def test_a_mix_that_returns_nothing(places: dict[str, Path]) -> None:
    with pytest.raises(TypeError, match="mix must return an iterable of samples, got None"):
        list(mixture(places, lambda sources: None).train_dataloader())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mix": {}}, r"names 2 sources: add mix=\{'train': a callable"),
        ({"mix": {Split.train: 5}}, r"mix\['train'\] must be a callable"),
        ({"mix": {Split.train: InTurn, Split.val: InTurn}}, "mix has 'val', but"),
        ({"dirs_tars_wds": {Split.train: {}}}, "is empty: name at least one source"),
        ({"dirs_tars_wds": {Split.train: {3: "x"}}}, "names of sources must be text, got 3"),
        ({"dirs_tars_wds": {Split.train: {"a": "pipe:cat"}}}, r"dirs_tars_wds\['train'\]\['a'\] is 'pipe:cat'"),
        ({"dirs_tars_wds": {Split.train: "one"}}, r"mix has 'train', but dirs_tars_wds\['train'\] is not"),
    ],
)
def test_arguments_that_do_not_fit_together(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "n_samples": {Split.train: 5},
        "suffix_keys_wds": "json",
        "dirs_tars_wds": {Split.train: {"a": "x", "b": "y"}},
        "global_batch_size": 4,
        "mix": {Split.train: InTurn},
    }
    WebDataModule(**good)
    with pytest.raises((TypeError, ValueError), match=message):
        WebDataModule(**{**good, **change})
