import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule import ShardError, write_tars
from headrace.webdatamodule.options import shuffles
from headrace.webdatamodule.pipeline import Recipe, SplitData, check_readers
from headrace.webdatamodule.streaming import resumable

KEEP = {"collate_fn": lambda sample: sample}


def untuple(source: Any) -> Any:
    return (sample for (sample,) in source)


def recipe(place: Path, n: int, batch: int = 1, **options: Any) -> Recipe:
    batched = [wds.batched(batch, collation_fn=None)]
    given = {"name": "train", "begin_again": True, "stages_wds": [untuple], "stages_wld": batched, **options}
    return Recipe(place=str(place), prefix="w", keys=("json",), n_samples=n, global_batch_size=batch, **given)


def write(place: Path, n: int, n_shards: int) -> Path:
    write_tars([(f"s{i}", {"json": b"%d" % i}) for i in range(n)], place, n_shards=n_shards, prefix="w")
    return place


def flat(batches: Any) -> list[int]:
    return [sample for batch in batches for sample in batch]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("n", "batch"), [(20, 4), (21, 4), (1, 4), (20, 1)])
def test_an_epoch_is_every_sample_once(tmp_path: Path, n: int, batch: int, workers: int) -> None:
    write(tmp_path, n, min(n, 3))
    options = {"num_workers": min(workers, n - 1)}
    loader = SplitData(recipe(tmp_path, n, batch, kwargs_wld=options)).loader()
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == len(loader) == -(-n // batch)
        assert sorted(flat(batches)) == list(range(n))
        assert [len(b) for b in batches[:-1]] == [batch] * (len(batches) - 1)


@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 5), st.booleans())
def test_laws_of_an_epoch(
    tmp_path_factory: pytest.TempPathFactory, n: int, batch: int, n_shards: int, shuffle: bool
) -> None:
    place = write(tmp_path_factory.mktemp("shards"), n, min(n, n_shards))
    loader = SplitData(recipe(place, n, batch, kwargs_wds={"shardshuffle": shuffle})).loader()
    batches = list(loader)
    assert len(batches) == len(loader)
    assert sorted(flat(batches)) == list(range(n))
    assert shuffle or flat(batches) == list(range(n))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["shards", "samples"])
def test_epochs_differ_and_repeat_themselves(tmp_path: Path, workers: int, how: str, persistent: bool) -> None:
    write(tmp_path, 40, 10)
    stages = [untuple, *([wds.shuffle(40, initial=40, rng=random.Random(5))] if how == "samples" else [])]
    kwargs_wds = {"shardshuffle": how == "shards", "seed": 3}
    options = {"num_workers": workers, "persistent_workers": persistent and workers > 0}
    made = recipe(tmp_path, 40, 4, stages_wds=stages, kwargs_wds=kwargs_wds, kwargs_wld=options)
    loader = SplitData(made).loader()
    epochs = [flat(loader) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(40))] * 3
    assert len(set(map(tuple, epochs))) == 3
    again = SplitData(made).loader()
    assert [flat(again) for _ in range(2)] == epochs[:2]
    assert flat(SplitData(made).loader(first_epoch=2)) == epochs[2]
    again.set_epoch(1)
    assert flat(again) == epochs[1]


def shuffled(where: str, stage: dict[str, Any], seed_in: str) -> dict[str, Any]:
    """Options that shuffle samples at one of the four places where a user can."""
    batched = wds.batched(4, collation_fn=None)
    made = wds.shuffle(40, 40, None, stage["seed"]) if seed_in == "place" else wds.shuffle(40, initial=40, **stage)
    return {
        "stages_wds": {"stages_wds": [untuple, made]},
        "stages_wld": {"stages_wld": [made, batched]},
        "invoke_wds": {"invoke_wds": [("shuffle", {"size": 40, "initial": 40, **stage})]},
        "invoke_wld": {
            "stages_wld": [],
            "invoke_wld": [("shuffle", {"size": 40, **stage}), ("listed", {"batchsize": 4})],
        },
    }[where]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", ["stages_wds", "stages_wld", "invoke_wds", "invoke_wld"])
@pytest.mark.parametrize("seed_in", ["name", "place", "rng"])
def test_a_seed_of_shuffle_gives_each_epoch_its_order(tmp_path: Path, where: str, seed_in: str, workers: int) -> None:
    write(tmp_path, 40, 4)

    def loader(seed: int, first_epoch: int = 0) -> Any:
        stage = {"rng": random.Random(seed)} if seed_in == "rng" else {"seed": seed}
        options = {"kwargs_wld": {"num_workers": workers}, **shuffled(where, stage, seed_in)}
        return SplitData(recipe(tmp_path, 40, 4, **options)).loader(first_epoch)

    first = loader(0)
    epochs = [tuple(flat(first)) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(40))] * 3
    assert len(set(epochs)) == 3
    assert tuple(flat(loader(0, first_epoch=2))) == epochs[2]
    assert tuple(flat(loader(1))) != epochs[0]


def test_another_seed_is_another_order(tmp_path: Path) -> None:
    write(tmp_path, 40, 20)
    orders = {
        tuple(flat(SplitData(recipe(tmp_path, 40, kwargs_wds={"shardshuffle": 5, "seed": seed})).loader()))
        for seed in (0, 1)
    }
    assert len(orders) == 2


def test_too_large_a_promise_begins_the_shards_again(tmp_path: Path) -> None:
    loader = SplitData(recipe(write(tmp_path, 10, 2), 16, 4)).loader()
    with pytest.warns(UserWarning, match=r"ran dry after 10 samples in 3 batches, before the 4 batches") as said:
        batches = list(loader)
    assert Counter(flat(batches)) == Counter(range(10)) + Counter(range(4))
    assert len(said) == 1
    assert len(list(loader)) == 4


def test_too_large_a_promise_ends_an_evaluation(tmp_path: Path) -> None:
    loader = SplitData(recipe(write(tmp_path, 10, 2), 16, 4, begin_again=False)).loader()
    with pytest.warns(UserWarning, match="the epoch ends early"):
        assert flat(loader) == list(range(10))


def test_too_small_a_promise_is_told(tmp_path: Path) -> None:
    loader = SplitData(recipe(write(tmp_path, 10, 2), 8, 4)).loader()
    with pytest.warns(UserWarning, match="samples remain after the 2 batches"):
        assert flat(loader) == list(range(8))


def test_shards_without_samples_are_an_error(tmp_path: Path) -> None:
    write(tmp_path, 10, 2)
    loader = SplitData(recipe(tmp_path, 10, stages_wds=[lambda source: iter(())])).loader()
    with pytest.raises(ValueError, match=r"no batch came out of the shards \(0 samples"):
        list(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_key_that_no_sample_has(tmp_path: Path, workers: int) -> None:
    write(tmp_path, 4, 2)
    made = Recipe("train", str(tmp_path), "w", ("png",), 4, 1, True, kwargs_wld={"num_workers": workers})
    with pytest.raises(ShardError, match=r"no member 'png', only \['json'\]"):
        list(SplitData(made).loader())


def test_a_cut_shard_stops_the_reading(tmp_path: Path) -> None:
    write(tmp_path, 4, 1)
    path = tmp_path / "w-000000.tar"
    path.write_bytes(path.read_bytes()[:2048])
    with pytest.raises(ShardError, match="cut off"):
        list(SplitData(recipe(tmp_path, 4)).loader())


@pytest.mark.parametrize(("workers", "world"), [(0, 1), (3, 1), (0, 3), (1, 3)])
def test_each_reader_has_a_shard(tmp_path: Path, workers: int, world: int) -> None:
    check_readers(recipe(tmp_path, 3, kwargs_wld={"num_workers": workers}), 3, world)


@pytest.mark.parametrize(("workers", "world"), [(0, 4), (2, 4)])
def test_each_rank_needs_a_shard(tmp_path: Path, workers: int, world: int) -> None:
    message = (
        rf"3 shards .* {world * max(1, workers)} readers \({world} ranks with num_workers={workers}\).*index_shards"
    )
    with pytest.raises(ValueError, match=message):
        check_readers(recipe(tmp_path, 3, kwargs_wld={"num_workers": workers}), 3, world)


def test_each_reader_of_a_mixture_needs_a_shard(tmp_path: Path) -> None:
    made = recipe(tmp_path, 3, kwargs_wld={"num_workers": 2}, mix=dict)
    with pytest.raises(ValueError, match=r"source 'a': 3 shards .* 4 readers .*lower num_workers.*at least 4 shards"):
        check_readers(made, 3, 2, "a")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_without_a_shard_idle(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="2 shards cannot be shared by 3 readers.*1 workers or more idle"):
        loader = SplitData(recipe(write(tmp_path, 4, 2), 4, kwargs_wld={"num_workers": 3})).loader()
    assert sorted(flat(loader)) == list(range(4))


def test_more_ranks_than_shards_are_refused_at_setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="2 shards cannot be shared by 3 readers"):
        SplitData(recipe(write(tmp_path, 4, 2), 4))


@pytest.mark.parametrize(
    "options",
    [{"nodesplitter": lambda source: source}, {"nodesplitter": None}, {"workersplitter": None}, {"resampled": True}],
)
def test_own_splitters_are_trusted(tmp_path: Path, options: dict[str, Any]) -> None:
    check_readers(recipe(tmp_path, 3, kwargs_wds=options, kwargs_wld={"num_workers": 4}), 1, 2)


@pytest.mark.parametrize("shardshuffle", [True, 1, 100])
def test_values_that_shuffle(shardshuffle: Any) -> None:
    assert shuffles("s", shardshuffle) is True


@pytest.mark.parametrize("shardshuffle", [False, 0, None])
def test_values_that_do_not_shuffle(shardshuffle: Any) -> None:
    assert shuffles("s", shardshuffle) is False


@pytest.mark.parametrize("shardshuffle", [-1, "yes", 2.0])
def test_values_of_shardshuffle_that_are_refused(shardshuffle: Any) -> None:
    with pytest.raises(ValueError, match="s must be True, False or a number"):
        shuffles("s", shardshuffle)


@pytest.mark.parametrize("option", ["batch_size", "dataset"])
def test_options_that_the_pipeline_sets_itself(tmp_path: Path, option: str) -> None:
    write(tmp_path, 4, 2)
    with pytest.raises(ValueError, match=rf"kwargs_wld\[Split.train\] cannot hold '{option}'"):
        SplitData(recipe(tmp_path, 4, kwargs_wld={option: 4})).loader()


@pytest.mark.parametrize(
    ("calls", "length", "samples"),
    [
        ([("with_epoch", {"nbatches": 7})], 7, [*range(10), *range(4)]),
        ([("with_epoch", {"nbatches": 2})], 2, [*range(4)]),
        ([("repeat", {"nepochs": 2})], 10, [*range(10), *range(10)]),
        ([("repeat", {"nepochs": 2, "nbatches": 6})], 6, [*range(10), 0, 1]),
        ([("with_length", {"n": 3, "silent": True})], 3, [*range(10)]),
    ],
)
def test_methods_of_the_loader_come_last(
    tmp_path: Path, calls: list[tuple[str, dict[str, Any]]], length: int, samples: list[int]
) -> None:
    write(tmp_path, 10, 2)
    loader = SplitData(recipe(tmp_path, 10, 2, invoke_wld=calls)).loader()
    assert len(loader) == length
    assert [sample for batch in iter(loader) for sample in batch] == samples


def test_batches_made_by_methods_are_counted(tmp_path: Path) -> None:
    write(tmp_path, 10, 2)
    calls = [("map", {"f": lambda x: x + 1}), ("listed", {"batchsize": 4})]
    loader = SplitData(recipe(tmp_path, 10, 4, stages_wld=[], invoke_wld=calls)).loader()
    assert (list(loader), len(loader)) == ([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]], 3)


def test_an_endless_loader_has_no_length(tmp_path: Path) -> None:
    write(tmp_path, 10, 2)
    loader = SplitData(recipe(tmp_path, 10, invoke_wld=[("repeat", {})])).loader()
    with pytest.raises(TypeError, match="endless"):
        len(loader)


def test_methods_of_the_dataset_come_last(tmp_path: Path) -> None:
    write(tmp_path, 10, 2)
    calls: Any = [("map", {"f": lambda x: -x}), ("with_epoch", {"nsamples": 25})]
    loader = SplitData(recipe(tmp_path, 24, 4, invoke_wds=calls)).loader()
    assert flat(loader) == [-i for i in [*range(10), *range(10), *range(4)]]
    with pytest.raises(ValueError, match=r"invoke_wds\[Split.train\]: WebDataset has no method 'mapp'"):
        SplitData(recipe(tmp_path, 4, invoke_wds=[("mapp", {})]))


def test_resampled_shards_never_run_dry(tmp_path: Path) -> None:
    write(tmp_path, 10, 2)
    loader = SplitData(recipe(tmp_path, 64, 4, kwargs_wds={"resampled": True})).loader()
    assert len(list(loader)) == 16


def test_samples_leave_the_loader_as_torch_hands_them_over(tmp_path: Path) -> None:
    write(tmp_path, 2, 1)
    plain = recipe(tmp_path, 2, stages_wds=[], stages_wld=[])
    assert list(SplitData(plain).loader()) == [[0], [1]]
    kept = recipe(tmp_path, 2, stages_wds=[], stages_wld=[], kwargs_wld=KEEP)
    assert list(SplitData(kept).loader()) == [(0,), (1,)]


def test_spawned_workers_know_their_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """webdataset's own split asks in the worker, where a spawned process finds nothing."""
    write(tmp_path, 8, 4)
    monkeypatch.delenv("RANK", raising=False)
    options = {"num_workers": 2, "multiprocessing_context": "spawn"}
    batched = [wds.batched(2, collation_fn=None)]
    made = recipe(tmp_path, 8, 4, stages_wds=[], stages_wld=batched, kwargs_wld=options)
    read: list[int] = []
    for rank in range(2):
        monkeypatch.setattr(resumable, "rank_and_world", lambda rank=rank: (rank, 2))
        read += [sample for batch in SplitData(made).loader() for (sample,) in batch]
    assert sorted(read) == list(range(8))
