import gc
import io
import json
import pickle
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from headrace.webdatamodule import (
    DecodeError,
    IndexedShards,
    ShardError,
    UnsafePickleError,
    decode_member,
    index_shards,
    write_tars,
)


class WrongError(Exception):
    pass


def make(folder: Path, bad: bytes | None = None) -> Path:
    samples = [
        (f"s{i}", {"json": json.dumps([i]).encode(), "Cls": b"%d" % i, "pkl": pickle.dumps({i}), "raw": b"%d" % i})
        for i in range(10)
    ]
    if bad is not None:
        samples[7][1]["json"] = bad
    write_tars(samples, folder, n_shards=2)
    index_shards(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("set"))


def test_members_are_decoded_by_extension(folder: Path) -> None:
    dataset = IndexedShards(folder)
    expected = [{"__key__": f"s{i}", "json": [i], "cls": i, "pkl": {i}, "raw": b"%d" % i} for i in range(10)]
    assert dataset.__getitems__(range(10)) == list(dataset) == [dataset[i] for i in range(10)] == expected
    assert IndexedShards(folder, ["cls"])[3] == {"__key__": "s3", "cls": 3}


def test_none_leaves_bytes(folder: Path) -> None:
    assert IndexedShards(folder, ["json", "cls"], decode=None)[3] == {"__key__": "s3", "json": b"[3]", "cls": b"3"}


def test_a_function_gets_key_and_bytes(folder: Path) -> None:
    dataset = IndexedShards(folder, ["cls", "raw"], decode=lambda key, data: (key, data))
    assert dataset[2] == {"__key__": "s2", "cls": ("cls", b"2"), "raw": ("raw", b"2")}


def test_a_mapping_replaces_the_decoders_of_some_members(folder: Path) -> None:
    dataset = IndexedShards(folder, decode={"raw": float, "CLS": None})
    assert dataset[2] == {"__key__": "s2", "json": [2], "cls": b"2", "pkl": {2}, "raw": 2.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode": {"jsn": float}}, r"decode names \['jsn'\], but the members are \['cls', 'json'"),
        ({"decode": {"raw": float}, "keys": ["cls"]}, r"but the members are \['cls'\]"),
        ({"decode": "json"}, "decode must be a function"),
        ({"decode": None, "allowed_classes": ["a.B"]}, "allowed_classes is for the default decoding"),
        ({"allowed_classes": ["nodots"]}, r"module\.QualifiedName"),
        ({"allowed_classes": "a.B"}, "must be a list of classes"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IndexedShards(folder, **options)


def test_a_transform_makes_what_the_dataset_gives(folder: Path) -> None:
    dataset = IndexedShards(folder, transform=lambda sample: sample["cls"] * 2)
    assert (list(dataset), dataset[4], dataset.__getitems__([9, 0])) == (list(range(0, 20, 2)), 8, [18, 0])
    assert IndexedShards(folder, ["raw"], decode=None, transform=len)[0] == 2


def test_pickles_use_only_what_is_allowed(tmp_path: Path) -> None:
    write_tars([("s0", {"pkl": pickle.dumps(Fraction(1, 3))})], tmp_path, n_shards=1)
    index_shards(tmp_path)
    with pytest.raises(UnsafePickleError, match=r"fractions\.Fraction.*sample 's0', member 's0\.pkl', offset 0"):
        IndexedShards(tmp_path)[0]
    allowed = IndexedShards(tmp_path, allowed_classes=[Fraction])
    assert pickle.loads(pickle.dumps(allowed))[0]["pkl"] == Fraction(1, 3)
    assert IndexedShards(tmp_path, decode={}, allowed_classes=["fractions.Fraction"])[0] == allowed[0]


def reads(dataset: IndexedShards) -> list[Any]:
    return [lambda: dataset[7], lambda: dataset.__getitems__([0, 7]), lambda: list(dataset.iterate(5))]


def refuse(data: bytes) -> Any:
    raise WrongError("no")


@pytest.mark.parametrize(
    ("decode", "cause", "message"),
    [
        (decode_member, json.JSONDecodeError, "these bytes are no json"),
        ({"json": refuse}, WrongError, "the decoder of 'json' failed with WrongError: no"),
        (lambda key, data: refuse(data) if b"{" in data else data, WrongError, "the decoder of 'json' failed"),
    ],
)
def test_a_member_that_cannot_be_decoded_is_named(tmp_path: Path, decode: Any, cause: Any, message: str) -> None:
    dataset = IndexedShards(make(tmp_path, b"{"), decode=decode)
    expected = (str(tmp_path / "wdshards-000001.tar"), "s7", "s7.json", 2 * 8 * 512)
    if isinstance(decode, dict):
        expected = (*expected[:1], "s5", "s5.json", 0)
    index = int(expected[1][1:])
    for read in (lambda: dataset[index], lambda: dataset.__getitems__([index]), lambda: list(dataset.iterate(5))):
        with pytest.raises(DecodeError, match=message) as caught:
            read()
        error = caught.value
        assert (error.shard, error.sample, error.member, error.offset) == expected
        assert isinstance(error.__cause__, cause)


@pytest.mark.parametrize("kind", [WrongError, IndexError, StopIteration, KeyError])
def test_an_error_of_a_transform_stays_what_it_is_and_is_placed(folder: Path, kind: type[Exception]) -> None:
    def transform(sample: dict[str, Any]) -> Any:
        if sample["__key__"] == "s7":
            raise kind("here")
        return sample

    dataset = IndexedShards(folder, transform=transform)
    for read in reads(dataset)[:2]:
        with pytest.raises(kind, match="here") as caught:
            read()
        assert "sample 's7' of shard" in caught.value.__notes__[0]
    # Not the end of the iteration, which IndexError and StopIteration could be taken for.
    with pytest.raises(RuntimeError if kind is StopIteration else kind):
        list(dataset)


def test_a_shard_error_of_a_transform_gets_its_place(folder: Path) -> None:
    def transform(sample: dict[str, Any]) -> Any:
        raise ShardError("bad sample")

    with pytest.raises(ShardError, match=r"bad sample \(shard .*, sample 's7'\)"):
        IndexedShards(folder, transform=transform)[7]


def read_in_a_worker(dataset: Any) -> list[Any]:
    running: Any = iter(DataLoader(dataset, batch_size=5, num_workers=1))
    try:
        return list(running)
    finally:
        running._shutdown_workers()  # left to the garbage collection, it takes 5 seconds


def test_a_worker_tells_where_it_was(tmp_path: Path) -> None:
    dataset: Any = IndexedShards(make(tmp_path, b"{"), ["json"])
    with pytest.raises(
        DecodeError, match=r"no json.*wdshards-000001\.tar', sample 's7', member 's7\.json', offset 8192"
    ):
        read_in_a_worker(dataset)


def fail(sample: Any) -> Any:
    raise WrongError("no")


def test_a_worker_tells_where_a_transform_was(folder: Path) -> None:
    dataset: Any = IndexedShards(folder, transform=fail)
    with pytest.raises(WrongError, match="in transform, with sample 's0' of shard"):
        read_in_a_worker(dataset)


def test_arrays_are_decoded_in_workers(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.save(stream, np.arange(3))
    write_tars([(f"s{i}", {"npy": stream.getvalue()}) for i in range(4)], tmp_path, n_shards=1)
    index_shards(tmp_path)
    dataset: Any = IndexedShards(tmp_path)
    (batch,) = DataLoader(dataset, batch_size=4, num_workers=1)
    assert batch["npy"].tolist() == [[0, 1, 2]] * 4
    assert batch["__key__"] == ["s0", "s1", "s2", "s3"]


def test_a_warm_batch_of_small_samples_takes_few_calls(tmp_path: Path) -> None:
    samples = [(f"s{i}", {"json": b'{"id": %d}' % i, "cls": b"%d" % i, "raw": bytes(360)}) for i in range(256)]
    write_tars(samples, tmp_path, n_shards=2)
    index_shards(tmp_path)
    dataset, calls = IndexedShards(tmp_path), list[str]()
    batch = [(i * 37) % 256 for i in range(64)]
    expected = dataset.__getitems__(batch)
    gc.disable()  # a collection calls the callbacks of other tests' garbage, and hypothesis's own
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        again = dataset.__getitems__(batch)
        of_batch = len(calls)
        alone = dataset[batch[0]]
    finally:
        sys.setprofile(None)
        gc.enable()
    assert again == expected
    assert alone == expected[0]
    assert of_batch <= 64 * 3 + 20  # to read a sample, to decode it, and its JSON
    assert len(calls) - of_batch <= 6


@pytest.mark.parametrize(
    ("key", "data"),
    [(key, data) for key in ("json", "cls") for data in (b"", b"\xff", b"{", b"x\0")] + [("txt", b"\xff")],
)
def test_a_small_damaged_member_is_explained_as_decode_member_does(tmp_path: Path, key: str, data: bytes) -> None:
    with pytest.raises(DecodeError) as alone:
        decode_member(key, data)
    write_tars([("s", {key: data})], tmp_path, n_shards=1)
    index_shards(tmp_path)
    with pytest.raises(DecodeError) as caught:
        IndexedShards(tmp_path)[0]
    assert (caught.value.message, caught.value.sample) == (alone.value.message, "s")
    assert type(caught.value.__cause__) is type(alone.value.__cause__)
