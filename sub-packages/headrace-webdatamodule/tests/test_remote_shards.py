import contextlib
import gzip
import json
import os
import pickle
import re
import ssl
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer
from shard_server import (
    COUNT,
    FAULTS,
    QUICK,
    WRONG,
    Handler,
    Site,
    keep,
    served,
    served_own,
    served_shared,
    until,
    written_once,
)
from torch.utils.data import DataLoader

from headrace.webdatamodule import (
    DamagedIndexError,
    DamagedShardError,
    DistributedBatchSampler,
    IndexedShards,
    ManifestError,
    Remote,
    ResumableLoader,
    RetryPolicy,
    ShardError,
    ShardIndex,
    StaleIndexError,
    add_column,
    index_shards,
    write_tars,
)
from headrace.webdatamodule.shards.remote.fetcher import windows
from headrace.webdatamodule.shards.remote.remote_set import most_index_bytes

fsspec, s3fs = import_module("fsspec"), import_module("s3fs")  # they ship no type information


folder = pytest.fixture(scope="module")(written_once)
site = pytest.fixture(served_shared)
own_site = pytest.fixture(served_own)


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small shards take several."""
    monkeypatch.setattr("headrace.webdatamodule.shards.remote.cache._REQUEST", 7000)
    monkeypatch.setattr("headrace.webdatamodule.shards.remote.fetcher._WINDOW", 9000)


@pytest.fixture(params=["pieces", "cache"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "cache" if request.param == "cache" else None


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """A real S3 server, and how to reach it."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        options = {"key": "test", "secret": "test", "client_kwargs": {"region_name": "eu-west-1"}}
        yield {**options, "endpoint_url": f"http://{host}:{port}"}
    finally:
        server.stop()


@pytest.fixture(scope="module")
def bucket(s3: dict[str, Any], folder: Path) -> str:
    system = s3fs.S3FileSystem(**s3)
    system.mkdir("bucket")
    for path in folder.iterdir():
        system.put_file(str(path), f"bucket/some/train/{path.name}")
    return "s3://bucket/some/train"


def same(far: IndexedShards, near: IndexedShards) -> None:
    assert len(far) == len(near)
    assert list(far) == list(near)
    chance = np.random.default_rng(1)
    for size in (1, 7, 40):
        batch = chance.integers(-COUNT, COUNT, size).tolist()
        assert far.__getitems__(batch) == near.__getitems__(batch)
    assert far[-1] == near[-1]
    assert list(far.iterate(13, 40)) == list(near.iterate(13, 40))
    assert list(far.keys) == list(near.keys)
    assert far.find("s033") == 33
    assert far.sizes("bin").tolist() == near.sizes("bin").tolist()


@pytest.mark.slow
def test_http_reads_what_is_read_from_the_disk(site: Site, cache: Path | None) -> None:
    far, near = site.dataset(cache), IndexedShards(site.folder)
    same(far, near)
    assert far.fingerprint == near.fingerprint
    assert far.columns == ("tokens",)
    assert far.column("tokens").tolist() == near.column("tokens").tolist()
    with pytest.raises(ManifestError, match="no column 'lengths'"):
        far.column("lengths")


def test_a_column_of_wide_rows_is_read(own_site: Site) -> None:
    rows = np.arange(COUNT * 8192, dtype=np.float32).reshape(COUNT, 8192)
    add_column(own_site.folder, "embeddings", rows)
    assert np.array_equal(own_site.dataset().column("embeddings"), rows)


@pytest.mark.slow
@pytest.mark.parametrize("check", ["open", "none"])
def test_s3_reads_what_is_read_from_the_disk(
    s3: dict[str, Any], bucket: str, folder: Path, cache: Path | None, check: Any
) -> None:
    far = IndexedShards(Remote(bucket, s3, cache, retry=QUICK), verify=check)
    same(far, IndexedShards(folder))
    assert far.column("tokens").tolist() == [3 * i for i in range(COUNT)]


@pytest.mark.slow
def test_s3_lacks_a_bucket_or_a_shard(s3: dict[str, Any], bucket: str) -> None:
    with pytest.raises(ManifestError, match="no manifest"):
        IndexedShards(Remote("s3://nothing/here", s3, retry=QUICK))
    system = s3fs.S3FileSystem(**s3)
    system.copy("bucket/some/train", "bucket/other", recursive=True)
    shard = next(name for name in system.find("bucket/other") if name.endswith("0.tar"))
    system.rm_file(shard)
    with pytest.raises(ShardError, match="FileNotFoundError") as caught:
        IndexedShards(Remote("s3://bucket/other", s3, retry=QUICK))[0]
    assert caught.value.shard == f"s3://{shard}"


@pytest.mark.slow
def test_places(site: Site) -> None:
    near = IndexedShards(site.folder)
    tars = [f"{site.url}/{path.name}" for path in sorted(site.folder.glob("*.tar"))]
    memory = fsspec.filesystem("memory")
    memory.put(str(site.folder), "/headrace/train", recursive=True)
    for place in (
        site.url,
        f"{site.url}/",
        f"{site.url}/manifest.json",
        tars,
        site.folder.as_uri(),
        Remote(site.folder.as_uri()),
        "memory://headrace/train",
    ):
        same(IndexedShards(place), near)
    assert list(IndexedShards(tars[0])) == list(near.iterate(0, COUNT // 4))
    memory.rm("/headrace", recursive=True)


@pytest.mark.parametrize("name", ["a b#1.tar", "50%?x=1.tar", "\u00e9\u5024.tar"])
@pytest.mark.slow
def test_odd_names(tmp_path: Path, s3: dict[str, Any], name: str) -> None:
    write_tars([("one", {"txt": b"1"})], tmp_path, n_shards=1)[0].rename(tmp_path / name)
    index_shards(tmp_path)
    with served(tmp_path) as site:
        assert site.dataset()[0]["txt"] == "1"
    system = s3fs.S3FileSystem(**s3)
    with contextlib.suppress(FileExistsError):
        system.mkdir("odd")
    for path in tmp_path.iterdir():
        system.pipe_file(f"odd/dir/{path.name}", path.read_bytes())
    assert IndexedShards(Remote("s3://odd/dir", s3))[0]["txt"] == "1"


@pytest.mark.parametrize("source", [["http://h/a.tar", "b.tar"], Path("http://h")])
def test_urls_and_paths_are_not_mixed(source: Any) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=r"url must be one or more|there is no"):
        IndexedShards(source)


def test_members_close_together_come_in_one_request(site: Site) -> None:
    dataset = site.dataset()
    dataset[0]
    site.faults.asked.clear()
    dataset.__getitems__([3, 4, 6, 5])
    assert len(site.faults.ranges()) == 1
    site.faults.asked.clear()
    dataset.__getitems__([1, 9])
    assert len(site.faults.ranges()) >= 2


def test_the_manifest_and_the_index_come_first(site: Site) -> None:
    site.dataset()[0]
    names = [name for name, _ in site.faults.asked]
    assert names[0] == "manifest.json"
    assert names[1] == "manifest.hrs"
    assert all(name.endswith("000000.tar") for name in names[2:])
    assert all(span or name.endswith((".json", ".hrs")) for i, (name, span) in enumerate(site.faults.asked))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
def test_what_goes_wrong_for_a_while_does_no_harm(site: Site, cache: Path | None, fault: str) -> None:
    near = list(IndexedShards(site.folder))
    dataset = site.dataset(cache)
    site.faults.kind, site.faults.times = fault, 1
    assert dataset.__getitems__(range(12)) == near[:12]
    assert site.faults.times == 0
    site.faults.times = 1
    assert list(dataset.iterate(10, 50)) == near[10:50]
    assert site.faults.times == 0


@pytest.mark.parametrize("name", ["manifest.json", "manifest.hrs"])
@pytest.mark.parametrize("fault", ["500", "cut"])
def test_small_files_are_asked_for_again(site: Site, cache: Path | None, name: str, fault: str) -> None:
    site.faults.kind, site.faults.times, site.faults.name = fault, 3, name
    assert site.dataset(cache)[3]["json"] == [3]
    assert site.faults.times == 0


def read_small_file(site: Site, cache: Path | None, name: str) -> None:
    """Open shards, and read what takes this small file."""
    dataset = site.dataset(cache)
    assert dataset[3]["json"] == [3]
    if name == ".npy":
        assert dataset.column("tokens").tolist() == [3 * i for i in range(COUNT)]


@pytest.mark.parametrize("name", ["manifest.json", "manifest.hrs", "000000.tar.hri", ".npy"])
@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.slow
def test_one_wrong_answer_for_a_small_file_does_no_harm(
    own_site: Site, cache: Path | None, name: str, fault: str
) -> None:
    if name.endswith(".hri"):
        (own_site.folder / "manifest.hrs").unlink()
    own_site.faults.kind, own_site.faults.times, own_site.faults.name = fault, 1, name
    read_small_file(own_site, cache, name)
    assert own_site.faults.times == 0
    assert [asked for asked, _ in own_site.faults.asked if asked.endswith(name)] != []
    others = [asked for asked, _ in own_site.faults.asked if asked.endswith(".hri") and not asked.endswith(name)]
    assert others == []  # no other file takes the place of one that came damaged once


@pytest.mark.parametrize("check", ["read", "none"])
@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.slow
def test_one_wrong_answer_for_the_index_of_a_listed_shard_does_no_harm(
    site: Site, cache: Path | None, fault: str, check: Any
) -> None:
    urls = [f"{site.url}/wdshards-{number:06d}.tar" for number in range(4)]
    site.faults.kind, site.faults.times, site.faults.name = fault, 1, "000002.tar.hri"
    dataset = IndexedShards(Remote(urls, cache_dir=cache, retry=QUICK), verify=check)
    assert list(dataset) == list(IndexedShards(site.folder))
    assert site.faults.times == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [("manifest.json", ManifestError), ("000000.tar.hri", DamagedIndexError), (".npy", ManifestError)],
)
@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.slow
def test_a_small_file_that_stays_wrong_is_said_to_come_from_the_server(
    own_site: Site, cache: Path | None, name: str, kind: type[ShardError], fault: str
) -> None:
    if name.endswith(".hri"):
        (own_site.folder / "manifest.hrs").unlink()
    own_site.faults.kind, own_site.faults.times, own_site.faults.name = fault, 10**6, name
    with pytest.raises(kind) as caught:
        read_small_file(own_site, cache, name)
    asked = [asked for asked, _ in own_site.faults.asked if asked.endswith(name)]
    assert len(asked) == 2
    message = str(caught.value)
    assert f"{own_site.url}/{asked[0]}" in message
    assert "after 2 attempts" in message
    assert "index the" not in message.partition("Compare")[0]
    if fault == "web page":
        assert "<!DOCTYPE html><title>Please log in" in message
        assert "login" in message
        assert "proxy" in message
        assert "storage_options" in message
    else:
        assert "bytes" in message
        assert "Compare" in message
    assert len(message) < 1000


@pytest.mark.slow
def test_an_index_of_a_set_that_stays_wrong_is_done_without(site: Site, cache: Path | None) -> None:
    site.faults.kind, site.faults.times, site.faults.name = "web page", 10**6, "manifest.hrs"
    assert list(site.dataset(cache)) == list(IndexedShards(site.folder))
    assert [asked for asked, _ in site.faults.asked].count("manifest.hrs") == 2


def test_who_asks_once_gets_a_wrong_answer_once(site: Site) -> None:
    site.faults.kind, site.faults.times, site.faults.name = "web page", 10**6, "manifest.json"
    with pytest.raises(ManifestError, match="web page"):
        IndexedShards(Remote(site.url, retry=RetryPolicy(max_attempts=1)))
    assert len(site.faults.asked) == 1


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("500", "500"),
        ("cut", "Payload"),
        ("short", "bytes came, not"),
        ("no ranges", "does not read ranges"),
        ("wrong range", "other bytes came"),
        ("404", "FileNotFoundError"),
    ],
)
def test_what_stays_wrong_names_url_offset_and_reason(site: Site, cache: Path | None, fault: str, told: str) -> None:
    dataset = site.dataset(cache)
    if cache is None:
        dataset[0]
    elif fault == "no ranges":  # a cache takes whole files
        site.faults.kind, site.faults.times = fault, 10**6
        assert dataset[1]["json"] == [1]
        return
    site.faults.kind, site.faults.times = fault, 10**6
    with pytest.raises(ShardError, match=told) as caught:
        dataset.__getitems__([1, 7])
    assert str(caught.value.shard).startswith(f"{site.url}/")
    assert caught.value.__cause__ is not None
    if cache is None:
        assert isinstance(caught.value.offset, int)
        spans = site.faults.ranges()
        assert spans.count(spans[-1]) == (1 if fault in ("no ranges", "404") else QUICK.max_attempts)


def test_bytes_of_another_range_are_not_taken(site: Site) -> None:
    dataset = site.dataset()
    dataset[0]
    site.faults.kind, site.faults.times = "wrong range", 10**6
    with pytest.raises(ShardError, match="other bytes came") as caught:
        dataset[2]
    assert caught.value.offset is not None


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_given_up(site: Site) -> None:
    dataset = site.dataset(timeout=0.3)
    dataset[0]
    release = threading.Event()
    take = site.faults.take
    object.__setattr__(site.faults, "take", lambda *asked: (release.wait(5), take(*asked))[1])
    try:
        with pytest.raises(ShardError, match=r"after 4 attempts: no answer within 0\.3 seconds"):
            dataset[1]
    finally:
        release.set()


def test_a_server_that_answers_late_is_named_once(site: Site) -> None:
    dataset, read = site.dataset(timeout=45, max_connections=2), list[Any]()
    assert dataset[0]["__key__"] == "s000"
    site.faults.kind, site.faults.times = "held", 99
    reader = threading.Thread(target=lambda: read.extend(dataset.__getitems__(range(20, 40))))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        # A third of the timeout would be long for a test.
        patch.setattr("headrace.webdatamodule.shards.stores.fsspec._SLOW", 0.05)
        reader.start()
        until(lambda: len(found) > 0)
        site.faults.released.set()
        reader.join()
    assert [sample["__key__"] for sample in read] == [f"s{number:03d}" for number in range(20, 40)]
    [message] = [str(one.message) for one in found]
    assert re.match(r"127.0.0.1:\d+ has not answered all of \d+ requests for 0.05 seconds, each is given up", message)
    assert "then give Remote fewer, such as max_connections=8" in message


def test_nobody_listens(tmp_path: Path) -> None:
    with served(tmp_path) as site:
        url = site.url
    with pytest.raises(ShardError, match=r"127\.0\.0\.1") as caught:
        IndexedShards(Remote(url, retry=QUICK))
    assert caught.value.shard == f"{url}/manifest.json"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damage_names_the_place(own_site: Site, cache: Path | None) -> None:
    path = sorted(own_site.folder.glob("*.tar"))[1]
    index = ShardIndex.open(path)
    at = index.n_members // 4 * 2 + 1 - index.n_members % 2
    at = next(i for i in range(at, index.n_members) if index.locate(i)[1].endswith(".bin") and index.sizes[i] > 9)
    sample, member = index.locate(at)
    flip(path, int(index.offsets[at]) + 5)
    with pytest.raises((DamagedShardError, StaleIndexError)) as caught:
        list(own_site.dataset(cache))
    if isinstance(caught.value, DamagedShardError):
        assert (caught.value.sample, caught.value.member) == (index.key(sample), member)
        assert caught.value.offset == index.offsets[at] - 512
    assert caught.value.shard == f"{own_site.url}/{path.name}"
    if cache is not None:
        assert not [path for path in cache.iterdir() if path.name.endswith(".part")]


def test_a_shard_of_another_size_is_stale(own_site: Site, cache: Path | None) -> None:
    path = sorted(own_site.folder.glob("*.tar"))[0]
    path.write_bytes(path.read_bytes() + bytes(512))
    with pytest.raises(StaleIndexError, match="when it was indexed"):
        own_site.dataset(cache, "none" if cache is None else "read")[0]


def test_a_shard_that_was_compressed_since_is_told(own_site: Site, cache: Path | None) -> None:
    path = sorted(own_site.folder.glob("*.tar"))[0]
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(StaleIndexError, match=r"compressed with gzip.*`gzip -dc") as caught:
        own_site.dataset(cache, "none" if cache is None else "read")[0]
    assert caught.value.shard == f"{own_site.url}/{path.name}"


def test_an_index_that_was_replaced_or_damaged(own_site: Site, cache: Path | None) -> None:
    dataset = own_site.dataset(cache)
    (own_site.folder / "manifest.hrs").unlink()
    indexes = sorted(own_site.folder.glob("*.hri"))
    kept = indexes[0].read_bytes()
    indexes[0].write_bytes(indexes[1].read_bytes())
    with pytest.raises(StaleIndexError):
        dataset[0]
    indexes[0].write_bytes(kept[:-8])
    with pytest.raises(DamagedIndexError) as caught:
        dataset[0]
    assert str(caught.value.shard).startswith(own_site.url)
    indexes[0].write_bytes(kept)
    assert dataset[0]["json"] == [0]


def test_a_manifest_that_lies_or_lacks(own_site: Site) -> None:
    path = own_site.folder / "manifest.json"
    table = json.loads(path.read_text())
    table["shards"][0]["name"] = "../other.tar"
    path.write_text(json.dumps(table))
    with pytest.raises(ManifestError, match="leads elsewhere") as caught:
        own_site.dataset()
    assert own_site.url in str(caught.value)
    path.unlink()
    with pytest.raises(ManifestError, match="no manifest"):
        own_site.dataset()


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(st.integers(-COUNT, COUNT - 1), max_size=30), st.sampled_from([None, ["bin"]]))
def test_any_batch(folder: Path, batch: list[int], keys: list[str] | None) -> None:
    far = IndexedShards(folder.as_uri(), keys)
    assert far.__getitems__(batch) == IndexedShards(folder, keys).__getitems__(batch)


def first(batch: Sequence[dict[str, Any]]) -> list[Any]:
    return [sample["json"] for sample in batch]


@pytest.mark.parametrize(
    ("cache", "start"),
    [
        ("pieces", "fork"),
        ("cache", "fork"),
        pytest.param("pieces", "spawn", marks=pytest.mark.nightly),
        pytest.param("cache", "spawn", marks=pytest.mark.nightly),
    ],
    indirect=["cache"],
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers(site: Site, cache: Path | None, start: str) -> None:
    dataset = site.dataset(cache)
    assert dataset[5]["json"] == [5]  # connections and their thread exist before the workers do
    order = np.random.default_rng(2).permutation(COUNT).tolist()
    batches = [order[i : i + 16] for i in range(0, COUNT, 16)]
    source: Any = dataset
    loader: DataLoader[Any] = DataLoader(
        source, batch_sampler=batches, num_workers=2, collate_fn=first, multiprocessing_context=start
    )
    assert list(loader) == [[[i] for i in batch] for batch in batches]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_on_s3(s3: dict[str, Any], bucket: str) -> None:
    dataset = IndexedShards(Remote(bucket, s3))
    assert dataset[5]["json"] == [5]
    source: Any = dataset
    batches = [[0, 59, 30], [7, 8], [45]]
    loader: DataLoader[Any] = DataLoader(
        source, batch_sampler=batches, num_workers=2, collate_fn=first, multiprocessing_context="fork"
    )
    assert list(loader) == [[[i] for i in batch] for batch in batches]


@pytest.mark.parametrize(
    ("cache", "start"),
    [
        ("pieces", "fork"),
        ("cache", "fork"),
        pytest.param("cache", "forkserver", marks=pytest.mark.slow),
        pytest.param("cache", "spawn", marks=pytest.mark.nightly),
    ],
    indirect=["cache"],
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_loader_share_one_index_of_the_set(site: Site, cache: Path | None, start: str) -> None:
    dataset = site.dataset(cache)
    loader = ResumableLoader(
        dataset, DistributedBatchSampler(COUNT, 5), collate_fn=keep, num_workers=2, multiprocessing_context=start
    )
    assert sorted(one["json"][0] for batch in loader for one in batch) == list(range(COUNT))
    assert [name for name, _ in site.faults.asked].count("manifest.hrs") == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_loader_over_several_sets_share_their_indexes(site: Site) -> None:
    with served(site.folder) as other:
        several = IndexedShards({"a": site.remote(), "b": site.folder, "c": other.remote()})
        loader = ResumableLoader(several, DistributedBatchSampler(3 * COUNT, 5), collate_fn=keep, num_workers=2)
        assert sum(len(batch) for batch in loader) == 3 * COUNT
        for one in (site, other):
            assert [name for name, _ in one.faults.asked].count("manifest.hrs") == 1


def waiting_for_a_lock() -> int:
    """How many threads of this process wait for a lock between processes."""
    calls = [list(traceback.walk_stack(frame)) for frame in sys._current_frames().values()]
    return sum(any("filelock" in frame.f_code.co_filename for frame, _ in stack) for stack in calls)


def test_ranks_that_share_a_cache_fetch_one_index_of_the_set(site: Site, tmp_path: Path) -> None:
    ranks = [site.dataset(tmp_path / "cache") for _ in range(4)]
    site.faults.kind, site.faults.times, site.faults.name = "held", 4, "manifest.hrs"
    with ThreadPoolExecutor(4) as pool:
        sizes = [pool.submit(rank.sizes, "bin") for rank in ranks]
        try:
            until(lambda: site.faults.times < 4 and waiting_for_a_lock() == 3)
        finally:
            site.faults.released.set()
        assert len({tuple(one.result(60).tolist()) for one in sizes}) == 1
    assert [name for name, _ in site.faults.asked].count("manifest.hrs") == 1


def test_a_rank_waits_for_the_download_of_another_no_longer_than_for_its_own(site: Site, tmp_path: Path) -> None:
    stuck, other = site.dataset(tmp_path / "cache", timeout=60.0), site.dataset(tmp_path / "cache", timeout=0.5)
    site.faults.kind, site.faults.times, site.faults.name = "held", 1, "manifest.hrs"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stuck.sizes, "bin")
        try:
            until(lambda: site.faults.times == 0)
            sizes = other.sizes("bin").tolist()
            assert not waiting.done()
        finally:
            site.faults.released.set()
        assert waiting.result(60).tolist() == sizes
    assert [name for name, _ in site.faults.asked].count("manifest.hrs") == 2


def test_a_worker_does_not_fetch_the_manifest_again(site: Site, cache: Path | None) -> None:
    dataset = site.dataset(cache)
    expected, sent = dataset[3], pickle.dumps(dataset)
    del site.faults.asked[:]
    assert pickle.loads(sent)[3] == expected
    assert "manifest.json" not in [name for name, _ in site.faults.asked]


def test_it_is_sent_to_workers_in_a_few_bytes(site: Site, tmp_path: Path) -> None:
    dataset = site.dataset(tmp_path / "cache")
    list(dataset)
    data = pickle.dumps(dataset)
    assert len(data) < 3000
    assert pickle.loads(data)[3] == dataset[3]


def test_a_cache_asks_once(site: Site, tmp_path: Path) -> None:
    list(site.dataset(tmp_path / "cache"))
    site.faults.asked.clear()
    assert len(list(site.dataset(tmp_path / "cache"))) == COUNT
    assert [name for name, _ in site.faults.asked] == ["manifest.json"]


@pytest.mark.parametrize("unit", ["shard", "sample"])
def test_a_cache_knows_data_again_by_their_content(site: Site, tmp_path: Path, unit: Any) -> None:
    tars = [f"{site.url}/{path.name}" for path in sorted(site.folder.glob("*.tar"))]
    kept = set[str]()
    with served(site.folder.parent) as mirror:  # the same files at another host, in another folder
        for place in (
            f"{site.url}?Signature=of-this-job",
            f"{site.url}?Signature=of-the-next-job",
            site.url.replace("://", "://somebody:password@"),
            f"{mirror.url}/{site.folder.name}",
            tars,
            [f"{tar}?Signature=of-this-tar" for tar in tars],
            site.folder.as_uri(),
        ):
            site.faults.asked.clear()
            mirror.faults.asked.clear()
            far = IndexedShards(Remote(place, cache_dir=tmp_path / "cache", cache_unit=unit, retry=QUICK))
            assert len(list(far)) == COUNT
            far.close()
            asked = site.faults.asked + mirror.faults.asked
            allowed = ".json" if isinstance(place, str) else ".hri"  # what says whether the data are here
            assert not kept or [name for name, _ in asked if not name.endswith(allowed)] == []
            found = {path.name for path in (tmp_path / "cache").iterdir() if path.suffix in (".tar", ".samples")}
            assert found == (kept or found)
            kept = found
    assert kept


def test_a_cache_smaller_than_the_shards_turns_over(site: Site, tmp_path: Path) -> None:
    largest = max(path.stat().st_size for path in site.folder.glob("*.tar"))
    dataset = site.dataset(tmp_path / "cache", cache_bytes=largest + 10_000, cache_unit="shard")
    near = IndexedShards(site.folder)
    assert dataset.__getitems__(range(COUNT)) == near.__getitems__(range(COUNT))
    assert sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()) <= largest + 10_000
    with pytest.raises(ShardError, match=r"does not fit into a cache of 9000 bytes.*cache_bytes"):
        site.dataset(tmp_path / "small", cache_bytes=9000, cache_unit="shard")[0]


@pytest.mark.slow
def test_what_is_damaged_in_the_cache_is_fetched_again(site: Site, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    list(site.dataset(cache))
    for path in cache.glob("*.*"):
        if path.suffix in (".tar", ".hri"):
            path.write_bytes(path.read_bytes()[:-700])
    assert list(site.dataset(cache)) == list(IndexedShards(site.folder))


def test_a_cache_that_cannot_be_written_is_named(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ShardError, match=r"cache .*file.*cache_dir"):
        site.dataset(tmp_path / "file" / "cache")[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["killed", "whole"])
def test_a_download_that_was_killed_leaves_nothing_that_looks_whole(site: Site, tmp_path: Path, kind: str) -> None:
    cache = tmp_path / "cache"
    script = f"""
from headrace.webdatamodule import IndexedShards
from headrace.webdatamodule import Remote
dataset = IndexedShards(Remote({site.url!r}, cache_dir={str(cache)!r}))
print(len(dataset), flush=True)
list(dataset)
"""
    release = threading.Event()
    take = site.faults.take

    def held(name: str, span: str, agent: str) -> str:
        if kind == "killed" and list(cache.glob("*.tar.part")):
            release.wait(30)
        return take(name, span, agent)

    object.__setattr__(site.faults, "take", held)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"%d\n" % COUNT
        if kind == "killed":
            deadline = time.monotonic() + 60
            try:
                while not list(cache.glob("*.tar.part")):
                    assert child.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
            finally:
                child.kill()
        assert child.wait() == (-9 if kind == "killed" else 0)
    assert len(list(cache.glob("*.tar"))) == (0 if kind == "killed" else 4)
    release.set()
    assert list(site.dataset(cache)) == list(IndexedShards(site.folder))
    assert not list(cache.glob("*.part"))


@pytest.mark.parametrize("of_set", [True, False])
def test_keys_are_found_without_the_shards(own_site: Site, cache: Path | None, of_set: bool) -> None:
    if not of_set:
        (own_site.folder / "manifest.hrs").unlink()
    far = own_site.dataset(cache)
    assert (far.find(f"s{COUNT - 1:03d}"), far.key(-1), far.keys[0]) == (COUNT - 1, f"s{COUNT - 1:03d}", "s000")
    assert not [name for name, _ in own_site.faults.asked if name.endswith(".tar")]
    assert len(own_site.faults.asked) == (2 if of_set else 6)  # one that is not there


@pytest.mark.parametrize("of_set", [True, False])
def test_indexes_are_kept_beyond_the_shards_that_are_open(tmp_path: Path, of_set: bool) -> None:
    write_tars([(f"s{i}", {"txt": b"%d" % i}) for i in range(16)], tmp_path, n_shards=8)
    index_shards(tmp_path)
    if not of_set:
        (tmp_path / "manifest.hrs").unlink()
    with served(tmp_path) as site:
        far = IndexedShards(Remote(site.url, retry=QUICK), max_open=4)
        for _ in range(2):
            site.faults.asked.clear()
            assert [sample["txt"] for sample in far.__getitems__(range(0, 16, 2))] == [str(i) for i in range(0, 16, 2)]
        assert len(site.faults.asked) == 8
        site.faults.asked.clear()
        assert [far[i]["txt"] for i in range(1, 16, 2)] == [str(i) for i in range(1, 16, 2)]
        assert len(site.faults.asked) == 8


@pytest.mark.slow
def test_a_file_that_rots_in_the_cache_is_fetched_once_more(own_site: Site, tmp_path: Path) -> None:
    near, cache = list(IndexedShards(own_site.folder)), tmp_path / "cache"
    list(own_site.dataset(cache))
    shard = max(cache.glob("*.tar"), key=lambda path: path.stat().st_size)
    whole = shard.read_bytes()
    rotten = bytes(byte ^ 1 if 6000 < at < 20_000 else byte for at, byte in enumerate(whole))
    for read in (list, lambda far: far.__getitems__(range(COUNT)), lambda far: [far[i] for i in range(COUNT)]):
        shard.write_bytes(rotten)
        own_site.faults.asked.clear()
        assert read(own_site.dataset(cache)) == near
        assert own_site.faults.ranges()
        assert shard.read_bytes() == whole
    for path in own_site.folder.glob("*.tar"):  # rotten where it comes from, too
        path.write_bytes(bytes(path.stat().st_size))
    shard.write_bytes(rotten)
    own_site.faults.asked.clear()
    with pytest.raises((DamagedShardError, StaleIndexError)) as caught:
        list(own_site.dataset(cache))
    assert str(caught.value.shard).startswith(own_site.url)


def test_a_cache_of_another_user_can_be_read(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near, cache = list(IndexedShards(site.folder)), tmp_path / "cache"
    list(site.dataset(cache))

    def refuse(*_: object, **__: object) -> None:  # tests may run as root, to whom nothing is refused
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    assert list(site.dataset(cache)) == near


def test_signed_urls(site: Site, cache: Path | None) -> None:
    near = IndexedShards(site.folder)
    query = "?X-Amz-Signature=a.tar%2Fb&X-Amz-Expires=60"
    tars = [f"{site.url}/{path.name}{query}" for path in sorted(site.folder.glob("*.tar"))]
    for place in (f"{site.url}{query}", f"{site.url}/{query}", f"{site.url}/manifest.json{query}", tars, tars[0]):
        count = COUNT // 4 if place == tars[0] else COUNT
        far = IndexedShards(Remote(place, cache_dir=cache, retry=QUICK))
        assert far.__getitems__(range(count)) == near.__getitems__(range(count))
        assert far.shard_of(0) == tars[0].removesuffix(query)


@pytest.mark.parametrize("place", ["runs::2024", "s3::x", "runs::2024?signature=a::b", "runs::2024/manifest.json?::"])
def test_colons_in_a_path_or_a_query_are_no_chain(folder: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / place.partition("?")[0].partition("/")[0]).symlink_to(folder)
    with served(tmp_path) as site:
        far = IndexedShards(Remote(f"{site.url}/{place}", retry=QUICK))
        assert far[COUNT - 1]["json"] == [COUNT - 1]


def test_an_address_of_ipv6_is_asked(site: Site) -> None:
    with pytest.raises(ShardError, match=r"Cannot connect to host ::1:1 ") as caught:
        IndexedShards(Remote("http://[::1]:1/train", retry=RetryPolicy(1)))
    assert caught.value.shard == "http://[::1]:1/train/manifest.json"


@pytest.mark.parametrize("encoding", ["aws-chunked", "AWS-Chunked, identity"])
def test_the_name_of_an_upload_s_encoding_is_not_taken_for_compression(
    site: Site, cache: Path | None, encoding: str
) -> None:
    """Object stores keep it as it was sent with an upload in pieces."""
    site.faults.kind, site.faults.name, site.faults.times = f"encoding: {encoding}", "", 10**6
    assert list(site.dataset(cache)) == list(IndexedShards(site.folder))
    assert site.dataset(cache, check="none")[3]["json"] == [3]


def test_a_server_that_signs_for_one_method_is_not_asked_with_another(
    site: Site, cache: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = list[str]()
    monkeypatch.setattr(Handler, "log_request", lambda handler, *_: methods.append(handler.command))
    far = site.dataset(cache, check="none")
    assert far[3]["json"] == [3]
    assert far.columns == ("tokens",)
    assert set(methods) == {"GET"}


def test_an_option_that_cannot_be_sent_to_spawned_workers_is_named(site: Site) -> None:
    far = IndexedShards(Remote(site.url, {"ssl": ssl.create_default_context()}, retry=QUICK))
    assert far[3]["json"] == [3]
    with pytest.raises(TypeError, match=r"storage_options\['ssl'\] .*SSLContext.*fork.*get_client.*SSL_CERT_FILE"):
        pickle.dumps(far)


def test_a_proxy_of_the_environment_is_used(site: Site, cache: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", site.url)
    far = IndexedShards(Remote("http://elsewhere.invalid", cache_dir=cache, retry=RetryPolicy(1)))
    assert list(far) == list(IndexedShards(site.folder))
    monkeypatch.setenv("no_proxy", "elsewhere.invalid")
    direct = Remote("http://elsewhere.invalid", {"headers": {"not": "cached"}}, retry=RetryPolicy(1))
    with pytest.raises(ShardError, match=r"Cannot connect to host elsewhere\.invalid"):
        IndexedShards(direct)


def test_numbers_in_braces_are_expanded(site: Site) -> None:
    assert list(IndexedShards(f"{site.url}/wdshards-{{000000..000003}}.tar")) == list(IndexedShards(site.folder))


def test_a_relative_path_may_hold_colons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tars([("a", {"txt": b"1"})], "runs::2024/train", n_shards=1)
    index_shards("runs::2024/train")
    assert IndexedShards("runs::2024/train")[0]["txt"] == "1"
    assert IndexedShards(["runs::2024/train/wdshards-000000.tar"])[0]["txt"] == "1"


def test_secrets_are_not_shown(site: Site) -> None:
    remote = Remote(site.url, {"headers": {"Authorization": "hidden"}})
    assert "hidden" not in repr(remote)
    assert IndexedShards(remote)[0]["json"] == [0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("url", "/data"),
        ("url", []),
        ("url", None),
        ("timeout", 0),
        ("timeout", "5"),
        ("timeout", float("nan")),
        ("retry", 3),
    ],
)
def test_arguments_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*got "):
        Remote(**{"url": "s3://a", name: value})
    with pytest.raises(ValueError, match="cache_bytes must be"):
        Remote("s3://a", cache_dir="c", cache_bytes=0)


def test_an_index_that_is_missing_and_a_list_of_directories_are_told(site: Site, cache: Path | None) -> None:
    for name in ("wdshards-000009.tar", ""):
        message = r"there is no index .*\.hri' beside it, .*: call index_shards.* a list is one of tar files.*directory"
        with pytest.raises(ShardError, match=message) as caught:
            IndexedShards(Remote([f"{site.url}/{name}"] * 2, cache_dir=cache, retry=QUICK))
        assert caught.value.shard == f"{site.url}/{name}"


def test_a_protocol_that_nobody_knows() -> None:
    with pytest.raises(ShardError, match="nosuch"):
        IndexedShards(Remote("nosuch://a/b", retry=QUICK))


@pytest.mark.slow
@pytest.mark.parametrize(("blocked", "url"), [("fsspec", "memory://a"), ("s3fs", "s3://a/b")])
def test_libraries_stay_optional(blocked: str, url: str, tmp_path: Path) -> None:
    script = f"""
import sys
sys.modules[{blocked!r}] = None
from headrace.webdatamodule import IndexedShards, ShardError
try:
    IndexedShards({url!r})
except ShardError as error:
    sys.exit(0 if "headrace-webdatamodule[" in str(error) or {blocked!r} in str(error) else 4)
sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_windows_of_samples() -> None:
    assert windows(np.array([4, 4, 4, 100, 0, 1]), 8) == [(0, 2), (2, 4), (4, 6)]
    assert (most_index_bytes(10_240), most_index_bytes(1 << 40)) == (1130496, 268435456)
