"""Where shards are, who reads which of them, and every way that a text could take to a shell."""

import pickle
import random
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st
from streams import flat, loader, module, quietly, write

from headrace.webdatamodule import (
    DecodeError,
    ShardError,
    Split,
    UnsafePickleError,
    WebDataModule,
    index_shards,
    write_tars,
)
from headrace.webdatamodule.loading.equal_plan import equal_share
from headrace.webdatamodule.streaming.stream_sources import pieces, rank_share

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def read(place: Any, **options: Any) -> list[int]:
    return flat(loader(place, 4, **options))


@pytest.mark.parametrize("url", ["pipe:touch ran", "PIPE:touch ran", " pipe:touch ran", "pipe:touch ran |/"])
def test_pipes_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"dirs_tars_wds\['train'\] is .*: shards are not read from 'pipe' URLs"):
        module(url, 4)


@pytest.mark.parametrize("url", ["http://a/b", "s3://a", "gs://a", "hf://a", "ais://a", "sftp://a", "htgs://a"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="shards are not read from"):
        module(url, 4)


@pytest.mark.parametrize("place", [5, None, b"/data", ["/data"]])
def test_a_place_must_be_a_path(place: Any) -> None:
    with pytest.raises(TypeError, match="must be the path of a directory"):
        module(place, 4)


def test_urls_cannot_come_in_by_the_options(tmp_path: Path) -> None:
    write(tmp_path, [4])
    with pytest.raises(ValueError, match=r"kwargs_wds\['train'\] cannot hold 'urls'"):
        read(tmp_path, kwargs_wds={"urls": "pipe:touch ran"})


def test_names_that_look_like_urls_are_plain_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pipe:touch ran;#", "http:"):
        write(tmp_path / name, [4], prefix="pipe:touch ran; ?#")
        assert read(f"./{name}", prefix_tars_wds="pipe:touch ran; ?#") == [0, 1, 2, 3]
    monkeypatch.chdir(tmp_path / "http:")
    assert len(read(".", prefix_tars_wds="pipe:touch ran; ?#")) == 4
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize("rewrite", ["/=pipe:touch ran /", "file:=pipe:touch ran #"])
def test_the_environment_cannot_rewrite_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewrite: str) -> None:
    write(tmp_path / "data", [4])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GOPEN_REWRITE", rewrite)
    monkeypatch.setenv("WDS_REWRITE", rewrite)
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("WDS_CACHE", str(tmp_path / "cache"))
    options = {"cache_dir": str(tmp_path / "cache"), "cache_size": 10**9}
    assert len(read("data", kwargs_wds=options)) == 4
    assert len(read(tmp_path / "data")) == 4
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("options", [{"resampled": True}, {"mode": "resampled"}])
def test_resampled_shards_are_opened_as_plain_files(tmp_path: Path, options: dict[str, Any]) -> None:
    write(tmp_path / "pipe:touch ran #", [2, 2])
    assert len(read(f"{tmp_path}/pipe:touch ran #", kwargs_wds=options)) == 4


def test_this_webdataset_would_run_the_shell(tmp_path: Path) -> None:
    """The tests above would pass in vain if webdataset had stopped doing so."""
    write(tmp_path, [4])
    with wds.gopen(f"pipe:touch {tmp_path}/ran; cat {tmp_path}/wdshards-000000.tar") as stream:
        stream.read()
    assert (tmp_path / "ran").exists()


def test_file_urls_and_home_directories_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a b", [2, 2])
    monkeypatch.setenv("HOME", str(tmp_path))
    for place in ((tmp_path / "a b").as_uri(), "~/a b", tmp_path / "a b"):
        assert read(place) == [0, 1, 2, 3]


def test_no_shards(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no shard named wdshards-\*.tar.*prefix_tars_wds"):
        read(tmp_path)
    for prefix in ("a-b", "shard"):
        (tmp_path / f"{prefix}-000000.tar").touch()
        with pytest.raises(FileNotFoundError, match=rf"named wdshards-\*\.tar.*such as '{prefix}'"):
            read(tmp_path)
        (tmp_path / f"{prefix}-000000.tar").unlink()
    for name in range(7):
        (tmp_path / f"p{name}-000000.tar").touch()
    with pytest.raises(FileNotFoundError, match=r"'p0', 'p1', 'p2', 'p3', 'p4' and 2 more: pass prefix_tars_wds"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere is no directory.*dirs_tars_wds"):
        read(tmp_path / "nowhere")


COUNTS = st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any)


@given(COUNTS, st.integers(1, 16), st.integers(1, 5))
def test_shares_are_equal_and_hold_every_sample(counts: list[int], ranks: int, workers: int) -> None:
    n, seen = sum(counts), []
    for rank in range(ranks):
        start, stop = rank_share(n, ranks, rank)
        assert stop - start == -(-n // ranks)
        ends = [equal_share(start, stop, worker, workers) for worker in range(workers)]
        assert (ends[0][0], ends[-1][1]) == (start, stop)
        assert all(a[1] == b[0] for a, b in pairwise(ends))
        assert max(b - a for a, b in ends) - min(b - a for a, b in ends) <= 1
        for begin, end in ends:
            parts = list(pieces(counts, begin, end))
            assert all(0 <= first < last <= counts[shard] for shard, first, last in parts)
            seen += [(shard, one) for shard, first, last in parts for one in range(first, last)]
    every = [(shard, one) for shard, count in enumerate(counts) for one in range(count)]
    assert set(seen) == set(every)
    assert len(seen) - len(every) <= ranks - 1
    assert seen[:n] == every


def epochs_of(
    place: Path, n: int, batch: int, ranks: int, workers: int, **options: Any
) -> tuple[list[list[list[list[int]]]], list[str]]:
    """Batches of two epochs of each rank, and the warnings of the loaders."""
    epochs = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rank in range(ranks):
            given: Any = {"kwargs_wds": {"shardshuffle": True}, "kwargs_wld": {"num_workers": workers}, **options}
            made = loader(place, n, batch, ranks, num_replicas=ranks, rank=rank, **given)
            epochs.append([list(made) for _ in range(2)])
            assert all(len(epoch) == len(made) for epoch in epochs[-1])
    # Torch advises on the machine's cores.
    messages = [str(one.message) for one in caught if "worker processes in total" not in str(one.message)]
    return epochs, messages


# Of 1,000 layouts, a hundred at a time.
MANY = [pytest.param(100, seed, id=f"many {seed}", marks=pytest.mark.nightly) for seed in range(10)]
LAYOUTS = [pytest.param(8, 99, id="few"), *MANY]


@pytest.mark.slow
@pytest.mark.parametrize(("layouts", "seed"), LAYOUTS)
def test_indexed_shards(tmp_path: Path, layouts: int, seed: int) -> None:
    """Every sample once an epoch, at most ranks - 1 of them twice, equal steps everywhere, whatever the layout."""
    draw = random.Random(seed)
    for layout in range(layouts):
        counts = [draw.randrange(0, 12) for _ in range(draw.randrange(1, 9))]
        counts[0] += 1
        n, ranks, workers, batch = sum(counts), draw.randint(1, 16), draw.randint(0, 4), draw.randint(1, 5)
        workers = workers if layout % 10 == 0 else 0  # processes take their time
        place = write(tmp_path / str(layout), counts)
        index_shards(place)
        epochs, messages = epochs_of(place, n, batch, ranks, workers)
        for epoch in range(2):
            assert len({len(rank[epoch]) for rank in epochs}) == 1
            assert len({sum(map(len, rank[epoch])) for rank in epochs}) == 1
            seen = Counter(sample for rank in epochs for sample in flat(rank[epoch]))
            assert set(seen) == set(range(n))
            assert seen.total() - n == -n % ranks
        assert len(messages) == (n % ranks != 0)  # rank 0 says it once
        assert all(f"{-n % ranks} of them come twice" in message for message in messages)


@pytest.mark.slow
@pytest.mark.parametrize(("layouts", "seed"), LAYOUTS)
def test_shards_without_index(tmp_path: Path, layouts: int, seed: int) -> None:
    """Equal steps, whatever the ranks hold; fewer shards than workers do, fewer than ranks are refused."""
    draw = random.Random(seed)
    for layout in range(layouts):
        counts = [draw.randrange(1, 12) for _ in range(draw.randrange(1, 9))]
        n, ranks, workers, batch = sum(counts), draw.randint(1, 16), draw.randint(0, 4), draw.randint(1, 5)
        workers = workers if layout % 10 == 0 else 0
        place = write(tmp_path / str(layout), counts)
        if ranks > len(counts):
            refused = rf"{len(counts)} shards cannot be shared by \d+ readers \({ranks} ranks"
            with pytest.raises(ValueError, match=refused):
                epochs_of(place, n, batch, ranks, workers)
            ranks = draw.randint(1, len(counts))
        epochs, messages = epochs_of(place, n, batch, ranks, workers)
        for epoch in range(2):
            assert {len(rank[epoch]) for rank in epochs} == {-(-n // (batch * ranks))}
        assert any("idle" in message for message in messages) == (max(1, workers) * ranks > len(counts))


def test_fewer_shards_than_readers(tmp_path: Path) -> None:
    place = write(tmp_path / "one", [24])
    index_shards(place)
    epochs, messages = epochs_of(place, 24, 2, 4, 1)
    assert messages == []
    for epoch in range(2):
        assert sorted(s for rank in epochs for s in flat(rank[epoch])) == list(range(24))


def test_ranks_differ_from_epoch_to_epoch(tmp_path: Path) -> None:
    place = write(tmp_path / "many", [3] * 8)
    index_shards(place)
    epochs, _ = epochs_of(place, 24, 4, 2, 0)
    assert set(flat(epochs[0][0])) != set(flat(epochs[0][1]))


@pytest.mark.parametrize("workers", [0, 2])
def test_each_rank_needs_a_shard(tmp_path: Path, workers: int) -> None:
    write(tmp_path, [1, 1, 1])
    options: Any = {"kwargs_wld": {"num_workers": workers}, "num_replicas": 4, "rank": 0}
    message = rf"3 shards .* {4 * max(1, workers)} readers \(4 ranks with num_workers={workers}\).*index_shards"
    with pytest.raises(ValueError, match=message):
        module(tmp_path, 3, **options).setup("fit")
    with pytest.raises(ValueError, match=message):
        next(iter(loader(tmp_path, 3, **options)))


@pytest.mark.parametrize(
    "options", [{"nodesplitter": lambda source: source}, {"nodesplitter": None}, {"resampled": True}]
)
def test_own_splitters_are_trusted(tmp_path: Path, options: dict[str, Any]) -> None:
    write(tmp_path, [3])
    assert len(flat(loader(tmp_path, 3, kwargs_wds=options, num_replicas=2, rank=1))) == 3


def test_workers_without_a_shard_idle(tmp_path: Path) -> None:
    made = loader(write(tmp_path, [2, 2]), 4, kwargs_wld={"num_workers": 3})
    with pytest.warns(UserWarning, match="2 shards cannot be shared by 3 readers.*1 workers or more idle"):
        assert sorted(flat(made)) == list(range(4))


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
    module(tmp_path, 10, **options).setup("fit")
    with pytest.raises(ValueError, match=f"train: exact=True is not possible, because .*{message}"):
        module(tmp_path, 10, exact=True, **options).setup("fit")


def test_shards_that_are_not_all_indexed(tmp_path: Path) -> None:
    index_shards(write(tmp_path, [5, 5]))
    (tmp_path / "wdshards-000001.tar.hri").unlink()
    with pytest.warns(UserWarning, match="1 of 2 shards have no index beside them: call index_shards"):
        made = loader(tmp_path, 10)
    assert flat(made) == list(range(10))
    with pytest.raises(ValueError, match="exact=True is not possible, because 1 of 2 shards have no index"):
        loader(tmp_path, 10, exact=True)


def test_shards_are_shared_whole_when_asked_for(tmp_path: Path) -> None:
    index_shards(write(tmp_path, [6, 2]))
    ranks = [quietly(loader(tmp_path, 8, 1, 2, exact=False, num_replicas=2, rank=rank)) for rank in range(2)]
    assert [set(flat(rank)) for rank in ranks] == [{0, 1, 2, 3}, {6, 7}]


@pytest.mark.slow
@pytest.mark.parametrize("context", ["forkserver", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_started_workers_know_their_rank(tmp_path: Path, context: str) -> None:
    """webdataset's own split asks in the worker, where a spawned process finds nothing."""
    write(tmp_path, [2] * 4)
    started = {"num_workers": 1, "multiprocessing_context": context}
    made = loader(tmp_path, 8, 2, 2, num_replicas=2, rank=1, pipeline_wds=None, kwargs_wld=started)
    assert [sample for batch in made for (sample,) in batch] == [2, 3, 6, 7]


class Mine:
    pass


def members(place: Path, keys: Any, samples: list[dict[str, bytes]], **options: Any) -> list[Any]:
    """Samples as they leave a loader that reads some keys."""
    write_tars([(f"s{i}", sample) for i, sample in enumerate(samples)], place, n_shards=1)
    kept = {Split.test: {"collate_fn": lambda sample: sample}}
    made = WebDataModule({Split.test: len(samples)}, keys, {Split.test: place}, 1, kwargs_wld=kept, **options)
    return list(made.test_dataloader())


@pytest.fixture(params=[False, True], ids=["whole shards", "by index"])
def place(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param:
        writer = write_tars

        def indexed(samples: Any, place: Path, **options: Any) -> list[Path]:
            paths = writer(samples, place, **options)
            index_shards(place)
            return paths

        monkeypatch.setitem(globals(), "write_tars", indexed)
    return tmp_path


def test_members_are_decoded_in_the_order_asked_for(place: Path) -> None:
    sample = {"json": b"[1]", "bytes": b"\0", "pyd": pickle.dumps({1: 2})}
    assert members(place, ["pyd", "bytes", "json"], [sample]) == [({1: 2}, b"\0", [1])]


def test_one_key_gives_tuples_of_one(place: Path) -> None:
    assert members(place, "json", [{"json": b"5"}]) == [(5,)]


def test_the_case_of_keys_does_not_matter_as_for_webdataset(place: Path) -> None:
    assert members(place, ["Mine.JSON"], [{"mine.json": b"5"}]) == [(5,)]


def test_a_missing_member_names_sample_shard_and_what_is_there(place: Path) -> None:
    message = r"no member 'png', only \['json', 'txt'\].*suffix_keys_wds.*wdshards-000000.tar', sample 's0'"
    with pytest.raises(ShardError, match=message):
        members(place, ["png"], [{"txt": b"", "json": b"1"}])


def test_a_class_is_refused_unless_allowed(place: Path) -> None:
    samples = [{"pyd": pickle.dumps(Mine())}]
    with pytest.raises(UnsafePickleError, match=r"Mine.*allowed_classes.*000000.tar', sample 's0', member 'pyd'"):
        members(place, ["pyd"], samples)
    [(thing,)] = members(place, ["pyd"], samples, allowed_classes=[Mine])
    assert type(thing) is Mine


def test_damage_names_the_place(place: Path) -> None:
    with pytest.raises(DecodeError, match=r"wdshards-000000.tar', sample 's0', member 'json'"):
        members(place, ["json"], [{"json": b"{"}])


@pytest.mark.parametrize("cut", [1, 512, 1024])
def test_a_shard_that_was_cut_is_not_taken_for_complete(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path, [20]) / "wdshards-000000.tar"
    assert len(flat(loader(tmp_path, 20))) == 20
    data = path.read_bytes()
    path.write_bytes(data.rstrip(b"\0").ljust(len(data) // 512 * 512, b"\0")[: len(data.rstrip(b"\0")) + 1024 - cut])
    with pytest.raises(ShardError, match="cut off"):
        list(loader(tmp_path, 20))


def test_an_empty_file_is_no_shard_and_a_handler_may_skip_it(tmp_path: Path) -> None:
    write(tmp_path, [0, 3])
    (tmp_path / "wdshards-000000.tar").write_bytes(b"")
    with pytest.raises(ShardError, match="empty file"):
        list(loader(tmp_path, 3))
    with pytest.warns(UserWarning, match="empty file"):
        assert flat(loader(tmp_path, 3, kwargs_wds={"handler": wds.warn_and_continue})) == [0, 1, 2]
    with pytest.raises(ValueError, match="no batch came out"):
        list(loader(tmp_path, 3, kwargs_wds={"handler": wds.ignore_and_stop}))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's list of open files")
def test_shards_are_closed(tmp_path: Path) -> None:
    made = loader(write(tmp_path, [2, 2]), 4)
    assert flat(made) == [0, 1, 2, 3]
    held = [fd.readlink() for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    assert not [path for path in held if path.parent == tmp_path]
