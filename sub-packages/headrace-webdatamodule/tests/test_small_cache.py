"""A cache of whole shards with room for a part of them keeps that part; the other shards are read by ranges."""

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from shard_server import COUNT, QUICK, Site, numbers, served, served_own, write

from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedShards,
    Remote,
    ResumableLoader,
    ShardError,
    index_shards,
    write_tars,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


site = pytest.fixture(served_own)


def loader(dataset: Any, **options: Any) -> ResumableLoader:
    batches = DistributedBatchSampler(len(dataset), 4, num_replicas=1, rank=0)
    return ResumableLoader(dataset, batches, collate_fn=numbers, **options)


def kept(cache: Path) -> dict[str, int]:
    """The shards in a cache, and the file that each is: another one where it was written again."""
    return {path.name: path.stat().st_ino for path in cache.glob("*.tar")}


def nbytes(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.iterdir() if not path.name.startswith("."))


def room_for(site: Site, shards: int) -> int:
    """Bytes of so many shards, the largest ones, with all indexes."""
    sizes = sorted((path.stat().st_size for path in site.folder.glob("*.tar")), reverse=True)
    return sum(sizes[:shards]) + sum(path.stat().st_size for path in site.folder.glob("*.hr*")) + sizes[-1] // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "context"),
    [(0, None), (2, None), (2, "forkserver"), pytest.param(2, "spawn", marks=pytest.mark.nightly)],
)
def test_what_fits_is_kept_and_the_rest_is_read_by_ranges(
    site: Site, tmp_path: Path, workers: int, context: str | None
) -> None:
    cache, limit = tmp_path / "cache", room_for(site, 2)
    made = loader(
        site.dataset(cache, cache_bytes=limit, cache_unit="shard"), num_workers=workers, multiprocessing_context=context
    )
    expected, fetched = loader(IndexedShards(site.folder)), []
    for epoch in range(3):
        made.set_epoch(epoch)
        expected.set_epoch(epoch)
        site.faults.asked.clear()
        assert list(made) == list(expected)
        assert nbytes(cache) <= limit
        fetched.append({name for name, span in site.faults.asked if span and name.endswith(".tar")})
        if not epoch:
            first = kept(cache)
    made.close()
    assert len(first) == 2
    assert kept(cache) == first  # none was written again
    assert len(fetched[1]) == len(fetched[2]) == 2  # the other two shards


def test_bytes_are_those_of_the_shards_that_do_not_fit(site: Site, tmp_path: Path) -> None:
    far = site.dataset(tmp_path / "cache", cache_bytes=room_for(site, 2), cache_unit="shard")
    made = loader(far, num_workers=1)
    list(made)
    before = made.report().remote
    site.faults.asked.clear()
    made.set_epoch(1)
    list(made)
    after = made.report().remote
    made.close()
    assert before is not None
    assert after is not None
    read = {name for name, _ in site.faults.asked if name.endswith(".tar")}
    assert len(read) == 2
    near, used = IndexedShards(site.folder, decode=None), 0
    for index, sample in enumerate(near):
        if Path(near.shard_of(index)).name in read:
            used += len(sample["bin"]) + len(sample["json"])
    asked = after.fetched - before.fetched
    assert used <= asked <= used * 1.02 + COUNT * 1100  # a header and padding within each sample


@pytest.mark.slow
def test_sets_of_one_process_share_the_room(site: Site, tmp_path: Path) -> None:
    """Each of two sources in a mixture would evict the other's shards, again and again."""
    other = tmp_path / "other"
    write(other, seed=1)
    with served(other) as second:
        cache, limit = tmp_path / "cache", room_for(site, 3)
        options: dict[str, Any] = {"cache_bytes": limit, "cache_unit": "shard"}
        both = IndexedShards({"a": site.remote(cache, **options), "b": second.remote(cache, **options)})
        made = loader(both)
        list(made)
        first = kept(cache)
        for epoch in (1, 2):
            made.set_epoch(epoch)
            assert sorted(number for batch in made for number in batch) == sorted([*range(COUNT)] * 2)
            assert nbytes(cache) <= limit
        assert kept(cache) == first
        assert first


@pytest.mark.slow
def test_shards_of_earlier_runs_make_room(site: Site, tmp_path: Path) -> None:
    cache, limit = tmp_path / "cache", room_for(site, 4)
    earlier = tmp_path / "earlier"
    write(earlier, seed=1)
    with served(earlier) as old:
        dataset = old.dataset(cache, cache_bytes=limit, cache_unit="shard")
        list(dataset)
        before = kept(cache)
        assert len(before) == 4
        del dataset
        gc.collect()  # as when its process ends
    list(site.dataset(cache, cache_bytes=limit, cache_unit="shard"))
    assert len(kept(cache)) == 4
    assert not kept(cache).keys() & before.keys()


@pytest.mark.slow
def test_another_process_finds_what_is_kept(site: Site, tmp_path: Path) -> None:
    cache, limit = tmp_path / "cache", room_for(site, 2)
    list(site.dataset(cache, cache_bytes=limit, cache_unit="shard"))
    first = kept(cache)
    site.faults.asked.clear()
    again = IndexedShards(Remote(site.url, cache_dir=cache, cache_bytes=limit, cache_unit="shard", retry=QUICK))
    assert list(again) == list(IndexedShards(site.folder))
    assert kept(cache) == first
    assert len({name for name, _ in site.faults.asked if name.endswith(".tar")}) == 2


def test_on_a_full_disk_a_warning_says_so_and_the_rest_is_read_by_ranges(site: Site, tmp_path: Path) -> None:
    script = """
import resource, sys, warnings
from headrace.webdatamodule import IndexedShards, Remote
dataset = IndexedShards(Remote(sys.argv[1], cache_dir=sys.argv[2]))
dataset[0]  # of a shard that is kept
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))  # as if the disk were full
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        assert [sample["json"] for sample in dataset.__getitems__(range(len(dataset)))] == [
            [number] for number in range(len(dataset))
        ]
        dataset.close()
print([str(one.message) for one in caught])
"""
    cache = tmp_path / "cache"
    done = subprocess.run(
        [sys.executable, "-c", script, site.url, str(cache)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no more shards are kept in") == 1
    assert "File too large), so they are read by ranges: make room there, or give another cache_dir" in done.stdout
    assert len(kept(cache)) == 1
    assert not list(cache.glob("*.part"))


def test_downloads_of_whole_files_are_reported(tmp_path: Path) -> None:
    write_tars([("large", {"bin": bytes(9 << 20)})], tmp_path / "site", n_shards=1)  # more than one request of ranges
    index_shards(tmp_path / "site")
    with served(tmp_path / "site") as site:
        site.faults.kind, site.faults.times = "no ranges", 10**6
        made = ResumableLoader(site.dataset(tmp_path / "cache"), [[0]], collate_fn=len)
        assert list(made) == [1]
    report = made.report().remote
    assert report is not None
    assert report.fetched >= 9 << 20
    assert report.used == 9 << 20


def test_a_server_without_ranges_needs_room_for_all(site: Site, tmp_path: Path) -> None:
    site.faults.kind, site.faults.times = "no ranges", 10**6
    roomy = site.dataset(tmp_path / "roomy")
    assert list(roomy) == list(IndexedShards(site.folder))
    site.faults.times = 0
    tight = site.dataset(tmp_path / "tight", cache_bytes=room_for(site, 2), cache_unit="shard")
    site.faults.times = 10**6
    with pytest.raises(ShardError, match=r"does not read ranges.*cache_bytes as large as all shards"):
        list(tight)


def test_a_server_without_ranges_is_refused_at_opening_where_the_cache_is_too_small(site: Site, tmp_path: Path) -> None:
    site.faults.kind, site.faults.times = "no ranges", 10**6
    total = sum(path.stat().st_size for path in site.folder.glob("*.tar"))
    with pytest.raises(ShardError, match=rf"does not read ranges, and the shards have {total} bytes.*cache_bytes"):
        site.dataset(tmp_path / "tight", cache_bytes=room_for(site, 2), cache_unit="shard")
    assert len(site.faults.ranges()) == 1


def test_a_server_without_ranges_is_asked_for_ranges_once(site: Site, tmp_path: Path) -> None:
    site.faults.kind, site.faults.times = "no ranges", 10**6
    dataset = site.dataset(tmp_path / "cache")
    dataset[0]
    asked = len(site.faults.ranges())
    assert list(dataset) == list(IndexedShards(site.folder))
    assert len(site.faults.ranges()) == asked


@pytest.mark.slow
@pytest.mark.parametrize("keys", [None, ["json"]])
def test_without_workers_a_cache_that_is_too_small_fetches_few_bytes_beside_those_used(
    tmp_path: Path, keys: list[str] | None
) -> None:
    samples = [(f"s{i:04d}", {"json": b"[%d]" % i, "bin": bytes([i % 251]) * 2000}) for i in range(800)]
    write_tars(samples, tmp_path / "site", n_shards=4)
    index_shards(tmp_path / "site")
    with served(tmp_path / "site") as site:
        remote = Remote(
            site.url, cache_dir=tmp_path / "cache", cache_bytes=room_for(site, 1), cache_unit="shard", retry=QUICK
        )
        dataset = IndexedShards(remote, keys)
        batches = [[(i * 97 + 13 * place) % 800 for place in range(8)] for i in range(40)]
        expected = IndexedShards(tmp_path / "site", keys)
        for number in range(4):  # one shard is kept from here on
            dataset[200 * number]
        dataset.take_traffic()
        for batch in batches:
            assert dataset.__getitems__(batch) == expected.__getitems__(batch)
        traffic = dataset.take_traffic()
    assert traffic is not None
    # Members that follow one another, with their headers between them, count as one.
    assert traffic.fetched <= (1.02 if keys is None else 3) * traffic.used + 1536 * 320
