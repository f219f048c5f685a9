"""Several sets of shards as one dataset."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule import IndexedShards, add_column, index_shards, write_tars
from headrace.webdatamodule.loading.sample_places import describe_sample, find_sources

COUNTS = {"first": 7, "empty": 0, "second": 12, "third": 1}
TOTAL = sum(COUNTS.values())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, count in COUNTS.items():
        made[name] = tmp_path_factory.mktemp(name)
        samples = [(f"{name}{i}", {"json": b"%d" % i}) for i in range(max(count, 1))]
        write_tars(samples, made[name], n_shards=min(3, max(count, 1)))
        index_shards(made[name])
    return made


@pytest.fixture(scope="module")
def sources(folders: dict[str, Path]) -> IndexedShards:
    return IndexedShards({name: folder for name, folder in folders.items() if COUNTS[name]})


def keys() -> list[str]:
    return [f"{name}{i}" for name, count in COUNTS.items() for i in range(count)]


def test_samples_come_source_after_source(sources: IndexedShards) -> None:
    assert len(sources) == TOTAL
    assert sources.names == ("first", "second", "third")
    assert list(sources.cumulative_sizes) == [7, 19, 20]
    assert [sources[i]["__key__"] for i in range(TOTAL)] == [sources.key(i) for i in range(TOTAL)] == keys()


@given(st.lists(st.integers(0, TOTAL - 1)))
def test_a_batch_comes_in_the_order_of_its_indices(sources: IndexedShards, indices: list[int]) -> None:
    given_: Any
    for given_ in (indices, np.array(indices, np.int64)):
        assert [sample["__key__"] for sample in sources.__getitems__(given_)] == [keys()[i] for i in indices]
    found = find_sources(sources, np.array(indices, np.int64)).tolist()
    assert all(keys()[i].startswith(sources.names[source]) for i, source in zip(indices, found, strict=True))


def test_one_source_reads_alike(folders: dict[str, Path]) -> None:
    only = IndexedShards({"only": folders["second"]})
    assert [sample["json"] for sample in only.__getitems__([11, 0, 11])] == [11, 0, 11]
    assert describe_sample(only, 11) == f"sample 'second11' in shard {only.shard_of(11)!r}"


def test_a_place_names_sample_source_and_shard(sources: IndexedShards) -> None:
    assert [sources.source_of(index) for index in (6, 7, -1)] == ["first", "second", "third"]
    told = describe_sample(sources, 19)
    assert told.startswith("sample 'third0' of source 'third' in shard ")
    assert sources.shard_of(19) in told


@pytest.mark.parametrize("index", [TOTAL, -TOTAL - 1, 10**9])
def test_there_is_no_such_sample(sources: IndexedShards, index: int) -> None:
    with pytest.raises(IndexError):
        sources.__getitems__([index])
    with pytest.raises((IndexError, ValueError)):
        sources[index]


def test_names_and_bytes_make_the_fingerprint(folders: dict[str, Path]) -> None:
    one, two = folders["first"], folders["second"]
    several = ({"a": one, "b": two}, {"a": two, "b": one}, {"a": one, "c": two})
    prints = {IndexedShards(places).fingerprint for places in (one, two, *several)}
    assert len(prints) == 5
    both = IndexedShards(several[0])
    assert both.fingerprint == IndexedShards(several[0]).fingerprint == pickle.loads(pickle.dumps(both)).fingerprint


def test_the_name_of_an_only_source_decides_nothing(folders: dict[str, Path]) -> None:
    """So a state of a run over a directory fits a data module, which names it after the split, and a second source."""
    alone, named = IndexedShards(folders["first"]), IndexedShards({"a": folders["first"]})
    assert (alone.names, named.names, alone.source_of(0), named.source_of(0)) == ((), ("a",), None, None)
    assert alone.fingerprint == named.fingerprint
    both = IndexedShards({"b": folders["first"], "c": folders["second"]})
    assert both.prefix_fingerprint(len(alone)) == alone.fingerprint
    assert both.prefix_fingerprint(len(both)) == both.fingerprint


def test_its_text_is_that_of_the_same_sources(folders: dict[str, Path], sources: IndexedShards) -> None:
    same = pickle.loads(pickle.dumps(sources))
    assert repr(same) == repr(sources)
    counts = "20 samples in 7 shards of first, second, third"
    assert repr(sources) == f"<IndexedShards: {counts}, fingerprint {sources.fingerprint}, members: json>"


def test_columns_leave_the_fingerprint(folders: dict[str, Path]) -> None:
    places = {name: folders[name] for name in ("second", "third")}
    before = IndexedShards(places).fingerprint
    add_column(folders["second"], "tokens", np.arange(12))
    assert IndexedShards(places).columns == ()
    add_column(folders["third"], "tokens", [3])
    after = IndexedShards(places)
    assert after.fingerprint == before
    assert after.columns == ("tokens",)
    assert after.column("tokens").tolist() == [*range(12), 3]


def test_closed_sources_open_again(sources: IndexedShards) -> None:
    sources.close()
    assert sources[19]["json"] == 0


def test_no_source_is_refused() -> None:
    with pytest.raises(ValueError, match="source must name a place"):
        IndexedShards({})
