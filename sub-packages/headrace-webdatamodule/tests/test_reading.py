import pickle
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds

from headrace.webdatamodule import DecodeError, ShardError, UnsafePickleError, write_tars
from headrace.webdatamodule.reading import Extract, OpenLocal, check_whole


class Mine:
    pass


def sample(**members: bytes) -> dict[str, Any]:
    return {"__key__": "s0", "__url__": "a.tar", **members}


def test_members_are_decoded_in_the_order_asked_for() -> None:
    samples = [sample(json=b"[1]", bytes=b"\0", pyd=pickle.dumps({1: 2}))]
    assert list(Extract(["pyd", "bytes", "json"], ())(samples)) == [({1: 2}, b"\0", [1])]


def test_one_key_gives_tuples_of_one() -> None:
    assert list(Extract(["json"], ())([sample(json=b"5")])) == [(5,)]


def test_the_case_of_keys_does_not_matter_as_for_webdataset() -> None:
    assert list(Extract(["Mine.JSON"], ())([{**sample(), "mine.json": b"5"}])) == [(5,)]


def test_a_missing_member_names_sample_shard_and_what_is_there() -> None:
    message = r"no member 'png', only \['json', 'txt'\].*suffix_keys_wds.*shard 'a.tar', sample 's0'"
    with pytest.raises(ShardError, match=message):
        list(Extract(["png"], ())([sample(txt=b"", json=b"1")]))


def test_a_class_is_refused_unless_allowed() -> None:
    samples = [sample(pyd=pickle.dumps(Mine()))]
    with pytest.raises(UnsafePickleError, match=r"Mine.*allowed_classes.*shard 'a.tar', sample 's0', member 'pyd'"):
        list(Extract(["pyd"], ())(samples))
    [(thing,)] = Extract(["pyd"], [Mine])(samples)
    assert type(thing) is Mine


def test_damage_names_the_place() -> None:
    with pytest.raises(DecodeError, match=r"shard 'a.tar', sample 's0', member 'json'"):
        list(Extract(["json"], ())([sample(json=b"{")]))


@pytest.mark.parametrize("cut", [1, 512, 9000])
def test_a_shard_that_was_cut_is_not_taken_for_whole(tmp_path: Path, cut: int) -> None:
    [path] = write_tars([(f"s{i}", {"x": b"a" * 700}) for i in range(20)], tmp_path, n_shards=1)
    check_whole(str(path))
    data = path.read_bytes()
    padding = len(data) - len(data.rstrip(b"\0"))
    path.write_bytes(data[: len(data) - padding + 1024 - cut])
    with pytest.raises(ShardError, match="cut off"):
        check_whole(str(path))


def test_an_empty_file_is_no_shard(tmp_path: Path) -> None:
    (tmp_path / "a.tar").touch()
    with pytest.raises(ShardError, match="empty file"):
        list(OpenLocal(wds.reraise_exception)([{"url": str(tmp_path / "a.tar")}]))


def test_the_handler_may_skip_a_shard_aloud(tmp_path: Path) -> None:
    (tmp_path / "a.tar").touch()
    good = write_tars([("s", {"x": b""})], tmp_path, n_shards=1)[0]
    opener = OpenLocal(wds.warn_and_continue)
    with pytest.warns(UserWarning, match="empty file"):
        opened = [item["url"] for item in opener([{"url": str(tmp_path / "a.tar")}, {"url": str(good)}])]
    assert opened == [str(good)]
    assert list(OpenLocal(wds.ignore_and_stop)([{"url": str(tmp_path / "a.tar")}, {"url": str(good)}])) == []


def test_shards_are_closed(tmp_path: Path) -> None:
    good = write_tars([("s", {"x": b""})], tmp_path, n_shards=1)[0]
    [item] = OpenLocal(wds.reraise_exception)([{"url": str(good)}])
    assert item["stream"].closed
