"""Several sets of shards as one dataset."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule import IndexedShards, add_column, index_shards, write_tars
from headrace.webdatamodule.loading.concat_shards import ConcatShards, describe_sample, find_sources

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
def sources(folders: dict[str, Path]) -> ConcatShards:
    parts = {name: IndexedShards(folder) for name, folder in folders.items() if COUNTS[name]}
    return ConcatShards(parts)


def keys() -> list[str]:
    return [f"{name}{i}" for name, count in COUNTS.items() for i in range(count)]


def test_samples_come_source_after_source(sources: ConcatShards) -> None:
    assert len(sources) == TOTAL
    assert sources.names == ("first", "second", "third")
    assert list(sources.cumulative_sizes) == [7, 19, 20]
    assert [sources[i]["__key__"] for i in range(TOTAL)] == [sources.key(i) for i in range(TOTAL)] == keys()


@given(st.lists(st.integers(0, TOTAL - 1)))
def test_a_batch_comes_in_the_order_of_its_indices(sources: ConcatShards, indices: list[int]) -> None:
    given_: Any
    for given_ in (indices, np.array(indices, np.int64)):
        assert [sample["__key__"] for sample in sources.__getitems__(given_)] == [keys()[i] for i in indices]
    found = find_sources(sources, np.array(indices, np.int64)).tolist()
    assert all(keys()[i].startswith(sources.names[source]) for i, source in zip(indices, found, strict=True))


def test_one_source_reads_alike(folders: dict[str, Path]) -> None:
    only = ConcatShards({"only": IndexedShards(folders["second"])})
    assert [sample["json"] for sample in only.__getitems__([11, 0, 11])] == [11, 0, 11]
    assert describe_sample(only, 11) == f"sample 'second11' in shard {str(only.parts[0].shard_of(11))!r}"


def test_a_place_names_sample_source_and_shard(sources: ConcatShards) -> None:
    assert sources.locate(7) == (1, 0)
    told = describe_sample(sources, 19)
    assert told.startswith("sample 'third0' of source 'third' in shard ")
    assert sources.parts[2].shard_of(0) in told


@pytest.mark.parametrize("index", [TOTAL, -TOTAL - 1, 10**9])
def test_there_is_no_such_sample(sources: ConcatShards, index: int) -> None:
    with pytest.raises(IndexError):
        sources.__getitems__([index])
    with pytest.raises((IndexError, ValueError)):
        sources[index]


def test_names_and_bytes_make_the_fingerprint(folders: dict[str, Path]) -> None:
    one, two = (IndexedShards(folders[name]) for name in ("first", "second"))
    prints = {
        ConcatShards(parts).fingerprint
        for parts in ({"a": one}, {"b": one}, {"a": two}, {"a": one, "b": two}, {"a": two, "b": one})
    }
    assert len(prints) == 5
    again = ConcatShards({"a": IndexedShards(folders["first"])})
    assert again.fingerprint == ConcatShards({"a": one}).fingerprint == pickle.loads(pickle.dumps(again)).fingerprint


def test_its_text_is_that_of_the_same_sources(folders: dict[str, Path], sources: ConcatShards) -> None:
    same = pickle.loads(pickle.dumps(sources))
    assert repr(same) == repr(sources)
    assert repr(sources) == f"<ConcatShards: 20 samples of first, second, third, fingerprint {sources.fingerprint}>"


def test_columns_leave_the_fingerprint(folders: dict[str, Path]) -> None:
    before = ConcatShards({"a": IndexedShards(folders["third"])}).fingerprint
    add_column(folders["third"], "tokens", [3])
    assert ConcatShards({"a": IndexedShards(folders["third"])}).fingerprint == before


def test_closed_sources_open_again(sources: ConcatShards) -> None:
    sources.close()
    assert sources[19]["json"] == 0


def test_no_source_is_refused() -> None:
    with pytest.raises(ValueError, match="no source: name at least one"):
        ConcatShards({})
