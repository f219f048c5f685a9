"""Random layouts of shards: equal steps on every rank in every epoch, and the length that was promised."""

import random
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds

from headrace.webdatamodule import index_shards
from headrace.webdatamodule.pipeline import Recipe, SplitData

pytestmark = pytest.mark.slow

number = wds.map(lambda sample: sample[0])
# Of 1,000 layouts, a hundred at a time.
MANY = [pytest.param(100, seed, id=f"many {seed}", marks=pytest.mark.nightly) for seed in range(10)]
LAYOUTS = [pytest.param(25, 99, id="few"), *MANY]


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


def epochs_of(
    monkeypatch: pytest.MonkeyPatch, place: Path, n: int, batch: int, world: int, workers: int, **options: Any
) -> tuple[list[list[list[list[int]]]], list[str]]:
    """Batches of two epochs of each rank, and what the loaders said."""
    ranks = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rank in range(world):
            simulate(monkeypatch, rank, world)
            made = Recipe(
                "train",
                str(place),
                "w",
                ("json",),
                n,
                batch * world,
                True,
                stages_wds=[number],
                stages_wld=[wds.batched(batch, collation_fn=None)],
                kwargs_wds={"shardshuffle": True},
                kwargs_wld={"num_workers": workers},
                **options,
            )
            loader = SplitData(made).loader()
            ranks.append([list(loader) for _ in range(2)])
            assert all(len(epoch) == len(loader) for epoch in ranks[-1])
    # Torch advises on the machine's cores.
    return ranks, [str(one.message) for one in said if "worker processes in total" not in str(one.message)]


@pytest.mark.parametrize(("layouts", "seed"), LAYOUTS)
def test_indexed_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layouts: int, seed: int) -> None:
    """Every sample once an epoch, at most world - 1 of them twice, whatever the layout."""
    draw = random.Random(seed)
    for layout in range(layouts):
        counts = [draw.randrange(0, 12) for _ in range(draw.randrange(1, 9))]
        counts[0] += 1
        n, world, workers, batch = sum(counts), draw.randint(1, 16), draw.randint(0, 4), draw.randint(1, 5)
        workers = workers if world < 5 or layout % 10 == 0 else 0  # processes take their time
        place = write(tmp_path / str(layout), counts)
        index_shards(place)
        ranks, said = epochs_of(monkeypatch, place, n, batch, world, workers)
        for epoch in range(2):
            assert len({len(rank[epoch]) for rank in ranks}) == 1
            assert len({sum(map(len, rank[epoch])) for rank in ranks}) == 1
            seen = Counter(sample for rank in ranks for one in rank[epoch] for sample in one)
            assert set(seen) == set(range(n))
            assert seen.total() - n == -n % world
        assert len(said) == (n % world != 0)  # rank 0 says it once
        assert all(f"{-n % world} of them come twice" in message for message in said)


@pytest.mark.parametrize(("layouts", "seed"), LAYOUTS)
def test_shards_without_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layouts: int, seed: int) -> None:
    """Equal steps, whatever the ranks hold; fewer shards than workers do, fewer than ranks are refused."""
    draw = random.Random(seed)
    for layout in range(layouts):
        counts = [draw.randrange(1, 12) for _ in range(draw.randrange(1, 9))]
        n, world, workers, batch = sum(counts), draw.randint(1, 16), draw.randint(0, 4), draw.randint(1, 5)
        workers = workers if world < 5 or layout % 10 == 0 else 0
        place = write(tmp_path / str(layout), counts)
        if world > len(counts):
            with pytest.raises(
                ValueError, match=rf"{len(counts)} shards cannot be shared by \d+ readers \({world} ranks"
            ):
                epochs_of(monkeypatch, place, n, batch, world, workers)
            world = draw.randint(1, len(counts))
        ranks, said = epochs_of(monkeypatch, place, n, batch, world, workers)
        for epoch in range(2):
            assert {len(rank[epoch]) for rank in ranks} == {-(-n // (batch * world))}
        assert any("idle" in message for message in said) == (max(1, workers) * world > len(counts))


@pytest.mark.parametrize("workers", [0, 3])
def test_fewer_shards_than_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    place = write(tmp_path / "one", [24])
    index_shards(place)
    ranks, said = epochs_of(monkeypatch, place, 24, 2, 4, workers)
    assert said == []
    for epoch in range(2):
        assert sorted(s for rank in ranks for one in rank[epoch] for s in one) == list(range(24))


def test_ranks_differ_from_epoch_to_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write(tmp_path / "many", [3] * 8)
    index_shards(place)
    ranks, _ = epochs_of(monkeypatch, place, 24, 4, 2, 0)
    assert {s for one in ranks[0][0] for s in one} != {s for one in ranks[0][1] for s in one}


def recipe(place: Path, **options: Any) -> Recipe:
    given: dict[str, Any] = {"n_samples": 10, "global_batch_size": 2, "begin_again": True, **options}
    return Recipe("val", str(place), "w", ("json",), **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kwargs_wds": {"nodesplitter": None}}, "a splitter of your own"),
        ({"kwargs_wds": {"workersplitter": None}}, "a splitter of your own"),
        ({"kwargs_wds": {"resampled": True}}, "kwargs_wds holds resampled"),
        ({"kwargs_wds": {"select_files": len}}, "kwargs_wds holds select_files"),
        ({"kwargs_wds": {"handler": wds.ignore_and_continue}}, "a handler in kwargs_wds"),
    ],
)
def test_options_that_forbid_equal_shares(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    index_shards(write(tmp_path, [5, 5]))
    assert SplitData(recipe(tmp_path, **options)).sources == {"": None}
    with pytest.raises(ValueError, match=f"val: exact=True is not possible, because .*{message}"):
        SplitData(recipe(tmp_path, exact=True, **options))


def test_shards_that_are_not_all_indexed(tmp_path: Path) -> None:
    index_shards(write(tmp_path, [5, 5]))
    assert SplitData(recipe(tmp_path, exact=False)).sources == {"": None}
    (tmp_path / "w-000001.tar.hri").unlink()
    with pytest.warns(UserWarning, match="1 of 2 shards have no index beside them: call index_shards"):
        assert SplitData(recipe(tmp_path)).sources == {"": None}
    with pytest.raises(ValueError, match="exact=True is not possible, because 1 of 2 shards have no index"):
        SplitData(recipe(tmp_path, exact=True))


def test_too_large_a_promise_of_an_evaluation_is_seen_beforehand(tmp_path: Path) -> None:
    index_shards(write(tmp_path, [5, 5]))
    stages = {"stages_wds": [number], "stages_wld": [wds.batched(2, collation_fn=None)]}
    data = SplitData(recipe(tmp_path, n_samples=14, begin_again=False, **stages))
    with pytest.warns(UserWarning, match="10 samples for 5 batches, not the 7 batches of an epoch .*the epoch has 5"):
        loader = data.loader()
    assert len(loader) == len(list(loader)) == 5


def test_a_length_that_was_wrong_is_right_from_then_on(tmp_path: Path) -> None:
    loader = SplitData(recipe(write(tmp_path, [5, 5]), n_samples=14, begin_again=False)).loader()
    with pytest.warns(UserWarning, match="samples remain"):
        assert len(list(loader)) == 7
    few = SplitData(recipe(tmp_path, n_samples=30, begin_again=False)).loader()
    with pytest.warns(UserWarning, match="ends early"):
        assert len(list(few)) == 10
    assert len(few) == len(list(few)) == 10
