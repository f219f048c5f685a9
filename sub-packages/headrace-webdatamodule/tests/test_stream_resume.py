"""A loader goes on where it was left: what comes is what would have come."""

import json
import random
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds

from headrace.webdatamodule import index_shards
from headrace.webdatamodule.pipeline import Recipe, SplitData

number = wds.map(lambda sample: sample[0])
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


def write(place: Path, counts: list[int]) -> Path:
    """Shards of these sizes; sample `i` of all holds its number."""
    place.mkdir(exist_ok=True)
    n = 0
    for shard, count in enumerate(counts):
        with (place / f"w-{shard:06}.tar").open("wb") as file, wds.TarWriter(file, mtime=0) as writer:
            for i in range(n, n := n + count):
                writer.write({"__key__": f"s{i:05}", "json": b"%d" % i})
    return place


def simulate(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world))


def untuple(source: Any) -> Iterator[Any]:
    return (sample for (sample,) in source)


BATCHED = wds.batched(3, collation_fn=None)
# Stages in the workers and behind them, and whether a position in them can be worked out.
PIPELINES: dict[str, tuple[list[Any], list[Any], bool]] = {
    "outside": ([number], [BATCHED], True),
    "inside": ([number, BATCHED], [], True),
    "both": ([number, BATCHED], [wds.map(sorted)], True),
    "whole": ([number], [wds.batched(3, collation_fn=None, partial=False)], True),
    "own": ([untuple], [BATCHED], False),
    "shuffled": ([number, wds.shuffle(7, initial=7, rng=random.Random(2))], [BATCHED], False),
}


def loader(place: Path, pipeline: str, n: int, batch: int = 3, workers: int = 0, **options: Any) -> Any:
    inside, outside, _ = PIPELINES[pipeline]
    given: dict[str, Any] = {
        "stages_wds": inside,
        "stages_wld": outside,
        "kwargs_wds": {"shardshuffle": True, "seed": 3},
        "kwargs_wld": {"num_workers": workers},
        **options,
    }
    return SplitData(Recipe("train", str(place), "w", ("json",), n, batch, True, **given)).loader()


def run(made: Any, epochs: int) -> list[Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "train: ")  # samples that repeat or remain
        return [batch for _ in range(epochs) for batch in made]


def check_resumed(make: Any, at: int, *, seeks: bool, epochs: int = 3) -> None:
    """Take some batches, keep the state as a checkpoint would, go on in a new loader."""
    whole, first = run(make(), epochs), make()
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
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        rest = [batch for _ in range(epochs - at // length) for batch in resumed]
    assert taken + rest == whole
    forwarded = [str(one.message) for one in said if "thrown away" in str(one.message)]
    assert len(forwarded) == (not seeks and at % length > 0)
    assert all(f"the {at % length} batches before it are read again" in message for message in forwarded)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_at_every_batch(tmp_path: Path, pipeline: str) -> None:
    index_shards(write(tmp_path, [4, 9, 1, 6]))
    for at in range(2 * 7 + 1):
        check_resumed(lambda: loader(tmp_path, pipeline, 20), at, seeks=PIPELINES[pipeline][2])


MANY = [pytest.param(50, seed, id=f"many {seed}", marks=pytest.mark.nightly) for seed in range(4)]


@pytest.mark.parametrize(("points", "seed"), [pytest.param(12, 9, id="few"), *MANY])
def test_at_random_points_of_random_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, points: int, seed: int
) -> None:
    draw = random.Random(seed)
    for point in range(points):
        counts = [draw.randrange(1, 15) for _ in range(draw.randrange(1, 7))]
        place, n = write(tmp_path / str(point), counts), sum(counts)
        if indexed := draw.random() < 0.8:
            index_shards(place)
        world = draw.randint(1, 16 if indexed else len(counts))
        simulate(monkeypatch, draw.randrange(world), world)
        workers, pipeline = draw.randint(0, 4), draw.choice(list(PIPELINES))
        if pipeline == "whole" and (not indexed or -(-n // world) < 3):
            pipeline = "outside"  # some rank would not have a whole batch, which is an error
        promised = draw.choice([n, n, draw.randint(1, 2 * n)])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "train: ")  # padding, idle workers

            def make() -> Any:
                return loader(place, pipeline, promised, 3 * world, workers)  # noqa: B023 - called at once

            at = draw.randrange(2 * len(make()) + 1)
            check_resumed(make, at, seeks=indexed and PIPELINES[pipeline][2])


@pytest.mark.parametrize("calls", [[("with_epoch", {"nbatches": 17})], [("repeat", {"nepochs": 2})]])
def test_epochs_that_a_method_made(tmp_path: Path, calls: Any) -> None:
    index_shards(write(tmp_path, [4, 9, 1, 6]))
    for at in (1, 7, 8, 14, 16, 20):
        check_resumed(lambda: loader(tmp_path, "outside", 20, invoke_wld=calls), at, seeks=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_workers_read_ahead_does_not_count(tmp_path: Path, workers: int) -> None:
    index_shards(write(tmp_path, [10, 10]))
    made = loader(tmp_path, "outside", 20, workers=workers)
    running = iter(made)
    next(running)
    assert made.state_dict()["position"] == 1


def test_persistent_workers(tmp_path: Path) -> None:
    index_shards(write(tmp_path, [4, 9, 1, 6]))
    options: Any = {"kwargs_wld": {"num_workers": 2, "persistent_workers": True}}
    check_resumed(lambda: loader(tmp_path, "outside", 20, **options), 9, seeks=True)


def few(sample: Any) -> Any:
    return None if sample[0] % 5 == 0 else sample[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_that_drops_samples_is_noticed(tmp_path: Path, workers: int) -> None:
    index_shards(write(tmp_path, [10, 10]))
    for at in (2, 5):
        check_resumed(
            lambda: loader(tmp_path, "outside", 16, workers=workers, stages_wds=[wds.map(few)]), at, seeks=False
        )


def test_no_sample_is_read_again(tmp_path: Path) -> None:
    index_shards(write(tmp_path, [10, 10]))
    read: list[int] = []

    def noted(sample: Any) -> Any:
        read.append(sample[0])
        return sample[0]

    made = loader(tmp_path, "outside", 20, stages_wds=[wds.map(noted)])
    made.load_state_dict({**made.state_dict(), "position": 5})
    batches = list(made)
    assert read == [sample for batch in batches for sample in batch]
    assert len(read) == 5


def test_another_epoch_begins_at_its_begin(tmp_path: Path) -> None:
    index_shards(write(tmp_path, [10, 10]))
    made = loader(tmp_path, "outside", 20)
    made.load_state_dict({**made.state_dict(), "epoch": 4, "position": 5})
    made.set_epoch(5)
    assert len(list(made)) == 7
    assert made.state_dict()["epoch"] == 6


def test_an_epoch_that_was_left_early(tmp_path: Path) -> None:
    index_shards(write(tmp_path, [10, 10]))
    made = loader(tmp_path, "outside", 20)
    next(iter(made))
    assert (made.state_dict()["epoch"], made.state_dict()["position"]) == (0, 1)
    made.set_epoch(1)
    assert (made.state_dict()["epoch"], made.state_dict()["position"]) == (1, 0)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"kwargs_wds": {"shardshuffle": True, "seed": 4}}, "seed was 3 in it and is 4 here"),
        ({"kwargs_wds": {}}, "seed was 3 in it and is none"),
        ({"stages_wld": [wds.batched(4, collation_fn=None)]}, "pipeline_prebatch_wld was batched"),
        ({"n": 19}, "n_samples was 20 in it and is 19 here"),
        ({"batch": 6}, "global_batch_size was 3 in it and is 6 here"),
        ({"exact": False}, r"the split was by samples \(exact=True\) in it and is by shards"),
        ({"workers": 2}, "of 1 ranks with 0 workers, here are 1 ranks with 2.*IndexedWebDataModule"),
    ],
)
def test_a_state_of_another_order_is_refused(tmp_path: Path, options: dict[str, Any], part: str) -> None:
    index_shards(write(tmp_path, [10, 10]))
    made = loader(tmp_path, "outside", 20)
    next(iter(made))
    other = loader(tmp_path, "outside", **{"n": 20, **options})
    with pytest.raises(ValueError, match=part):
        other.load_state_dict(made.state_dict())


@pytest.mark.parametrize("indexed", [True, False])
def test_other_shards_are_refused_and_moved_ones_are_not(tmp_path: Path, indexed: bool) -> None:
    places = [write(tmp_path / name, counts) for name, counts in [("a", [10, 10]), ("b", [10, 10]), ("c", [9, 11])]]
    for place in places if indexed else []:
        index_shards(place)
    state = loader(places[0], "outside", 20).state_dict()
    loader(places[1], "outside", 20).load_state_dict(state)
    with pytest.raises(ValueError, match="the fingerprint of the shards was"):
        loader(places[2], "outside", 20).load_state_dict(state)
