"""A cache of samples: what was read is kept as far as there is room, and whatever happens to it, samples are right."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from shard_server import (
    COUNT,
    QUICK,
    Site,
    keep,
    numbers,
    served,
    served_own,
    served_shared,
    settle,
    until,
    write,
    written_once,
)

from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedShards,
    Remote,
    ResumableLoader,
    ShardError,
    StaleIndexError,
    index_shards,
    write_shards,
    write_tars,
)
from headrace.webdatamodule.loading import next_use
from headrace.webdatamodule.shards.remote import sample_cache

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

folder = pytest.fixture(scope="module")(written_once)
site = pytest.fixture(served_shared)
own_site = pytest.fixture(served_own)


def remote(site: Site, cache: Path, **options: Any) -> Remote:
    return Remote(site.url, cache_dir=cache, retry=QUICK, cache_unit="sample", **options)


def loader(dataset: Any, workers: int = 0, batch_size: int = 4, **options: Any) -> ResumableLoader:
    batches = DistributedBatchSampler(len(dataset), batch_size, num_replicas=1, rank=0)
    return ResumableLoader(dataset, batches, num_workers=workers, **{"collate_fn": keep, **options})


def nbytes(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.rglob("*") if path.is_file() and not path.name.startswith("."))


def payload(site: Site) -> list[int]:
    """The bytes of each sample's members."""
    near = IndexedShards(site.folder, decode=None)
    return [len(sample["json"]) + len(sample["bin"]) for sample in near]


def room_for(site: Site, share: float) -> int:
    """Bytes for the indexes, the table, and a share of the samples."""
    indexes = sum(path.stat().st_size for path in site.folder.glob("*.hrs"))
    return indexes + 8 * (COUNT + 1) + int(share * sum(size + 8 for size in payload(site)))


def logs(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.samples/*.log"))


def tars(site: Site) -> list[tuple[str, str]]:
    return [(name, span) for name, span in site.faults.asked if name.endswith(".tar")]


@pytest.fixture
def small_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are written a few at a time, as in sets that are a thousand times as large."""
    monkeypatch.setattr(sample_cache, "_TOGETHER", 8192)


# What is kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "context"),
    [(0, None), (2, None), (2, "forkserver"), pytest.param(2, "spawn", marks=pytest.mark.nightly)],
)
def test_what_fits_is_kept_and_only_the_rest_is_fetched(
    site: Site, tmp_path: Path, workers: int, context: str | None
) -> None:
    cache, limit = tmp_path / "cache", room_for(site, 0.5)
    made = loader(IndexedShards(remote(site, cache, cache_bytes=limit)), workers, multiprocessing_context=context)
    near, fetched, kept = loader(IndexedShards(site.folder)), [], []
    for epoch in range(4):
        made.set_epoch(epoch)
        near.set_epoch(epoch)
        assert list(made) == list(near)
        assert nbytes(cache) <= limit
        report = made.report().remote
        assert report is not None
        fetched.append(report.fetched)
        kept.append({path: path.stat().st_mtime_ns for path in logs(cache)})
    made.close()
    total = sum(payload(site))
    later = [after - before for before, after in pairwise(fetched)]
    assert total <= fetched[0] <= total + COUNT * 1100  # a header and padding within each sample
    assert kept[1] == kept[2] == kept[3]  # none is evicted for another
    # Half of the bytes, but for a sample that no longer fitted, and headers within a sample.
    assert max(later[1:]) <= 0.5 * total + 3000 + COUNT // 2 * 1100
    assert report is not None
    assert report.cached >= 3 * 0.4 * total
    share = made.report().cache_room
    assert share is not None
    assert share == pytest.approx(0.5, abs=0.02)
    assert report.cached <= 3 * share * total  # the first epoch finds nothing
    assert f"of those used; it has room for {share:.1%} of the data" in str(made.report())


def test_with_room_for_all_nothing_is_fetched_twice(site: Site, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    made = loader(IndexedShards(remote(site, cache)))
    first = sorted(numbers(chain.from_iterable(made)))
    assert first == list(range(COUNT))
    site.faults.asked.clear()
    for epoch in (1, 2):
        made.set_epoch(epoch)
        assert sorted(numbers(chain.from_iterable(made))) == first
    made.close()
    assert tars(site) == []
    report = made.report().remote
    assert report is not None
    assert report.cached == 2 * sum(payload(site))
    assert f"from the cache: {report.cached:,} bytes, 66.7% of those used; it has room for 100.0%" in str(made.report())


def test_the_first_batch_waits_for_its_own_bytes_only(site: Site, tmp_path: Path) -> None:
    dataset = IndexedShards(remote(site, tmp_path / "cache"))
    dataset.__getitems__([0, 17, 40])
    traffic = dataset.take_traffic()
    assert traffic is not None
    assert traffic.fetched <= 3 * (3000 + 1100)
    whole_shards = IndexedShards(Remote(site.url, cache_dir=tmp_path / "other", retry=QUICK))
    whole_shards.__getitems__([0, 17, 40])
    assert len(list((tmp_path / "other").glob("*.tar"))) == 3  # which "auto" is where all shards fit


def test_auto_keeps_samples_where_the_shards_do_not_fit(site: Site, tmp_path: Path) -> None:
    total = sum(path.stat().st_size for path in site.folder.glob("*.tar"))
    for limit, kept in ((total, False), (total - 1, True)):
        dataset = IndexedShards(Remote(site.url, cache_dir=tmp_path / str(limit), cache_bytes=limit, retry=QUICK))
        dataset.__getitems__(range(COUNT))
        dataset.close()
        assert bool(logs(tmp_path / str(limit))) is kept


@pytest.mark.parametrize("listed", [False, True])
def test_another_process_finds_what_is_kept(site: Site, tmp_path: Path, listed: bool) -> None:
    cache = tmp_path / "cache"
    IndexedShards(remote(site, cache)).__getitems__(range(COUNT))  # which is written when the process ends
    del cache
    script = """
import sys
from headrace.webdatamodule import IndexedShards, Remote
dataset = IndexedShards(Remote(sys.argv[1], cache_dir=sys.argv[2], cache_unit="sample"))
assert [sample["json"] for sample in dataset.__getitems__(range(len(dataset)))] == [[i] for i in range(len(dataset))]
print(dataset.take_traffic().fetched)
"""
    url = f"{site.url}/wdshards-{{000000..000003}}.tar" if listed else site.url
    fetched = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", script, url, str(tmp_path / "own")], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        fetched.append(int(done.stdout))
    assert fetched[0] >= sum(payload(site))
    assert fetched[1] == 0


def test_reading_in_a_row_keeps_samples_and_finds_them(site: Site, tmp_path: Path) -> None:
    near = list(IndexedShards(site.folder))
    dataset = IndexedShards(remote(site, tmp_path / "cache"))
    dataset.__getitems__([5, 6, 40])
    dataset.take_traffic()
    assert list(dataset) == near
    dataset.close()
    site.faults.asked.clear()
    assert list(dataset) == near
    assert dataset.__getitems__([1, 59]) == [near[1], near[59]]
    assert tars(site) == []


def test_samples_of_packs_and_without_members_are_kept(tmp_path: Path) -> None:
    samples: list[Any] = [(f"p{i:02d}", {"txt": b"%d" % i * (i % 7), "cls": b"%d" % i}) for i in range(50)]
    samples += [(f"q{i:02d}", {"txt": b"" if i % 2 else bytes(5000)}) for i in range(10)]
    write_shards(samples, tmp_path / "site", n_shards=2, bytes_per_pack=1000)
    near = IndexedShards(tmp_path / "site")
    everything = range(len(near))
    with served(tmp_path / "site") as site:
        dataset = IndexedShards(remote(site, tmp_path / "cache"))
        for _ in range(2):
            assert dataset.__getitems__([*everything][::-1]) == near.__getitems__([*everything][::-1])
            assert list(dataset) == list(near)
            dataset.close()
        site.faults.asked.clear()
        assert dataset.__getitems__(everything) == near.__getitems__(everything)
        assert tars(site) == []


def test_other_members_are_kept_apart(site: Site, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    both, one = IndexedShards(remote(site, cache)), IndexedShards(remote(site, cache), ["json"])
    turned = IndexedShards(remote(site, cache), ["json", "bin"])
    for _ in range(2):
        for dataset in (both, one, turned):
            assert numbers(dataset.__getitems__(range(COUNT))) == list(range(COUNT))
            dataset.close()
    assert len(list(cache.glob("*.samples"))) == 3
    assert one[3].keys() == {"__key__", "json"}


def test_a_sample_that_comes_twice_in_a_batch_is_kept_once(site: Site, tmp_path: Path) -> None:
    dataset = IndexedShards(remote(site, tmp_path / "cache"), ["bin"])
    samples = dataset.__getitems__([7, 7, 7])
    dataset.close()
    assert samples[0] == samples[1] == samples[2]
    [log] = logs(tmp_path / "cache")
    assert log.stat().st_size == 8 + len(samples[0]["bin"])


# Room


@pytest.mark.slow
@pytest.mark.usefixtures("small_writes")
def test_sets_of_one_process_share_the_room(own_site: Site, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_tars([(f"o{i:03d}", {"json": b"[%d]" % i, "bin": bytes([i]) * 900}) for i in range(40)], other, n_shards=2)
    index_shards(other)
    with served(other) as second:
        cache, limit = tmp_path / "cache", room_for(own_site, 0.7)
        sources = {"a": own_site, "b": second}
        both = IndexedShards({name: remote(one, cache, cache_bytes=limit) for name, one in sources.items()})
        made, sizes = loader(both), []
        for epoch in range(3):
            made.set_epoch(epoch)
            found = sorted(numbers(chain.from_iterable(made)))
            assert found == sorted([*range(COUNT), *range(40)])
            assert nbytes(cache) <= limit
            sizes.append({path: path.stat().st_size for path in logs(cache)})
        made.close()
    assert len(sizes[1]) == 2
    assert sizes[1] == sizes[2]


def test_a_remote_that_is_opened_twice_keeps_the_samples_of_both(site: Site, tmp_path: Path) -> None:
    cache, limit = tmp_path / "cache", room_for(site, 0.6)
    shared = remote(site, cache, cache_bytes=limit)
    first = IndexedShards(shared)
    first.__getitems__(range(20))
    first.close()
    [log] = logs(cache)
    kept = log.stat().st_ino
    second = IndexedShards(shared, ["bin"])
    for _ in range(2):  # more than there is room for
        second.__getitems__(range(COUNT))
        second.close()
    assert log.exists()
    assert log.stat().st_ino == kept
    assert nbytes(cache) <= limit


def test_a_full_cache_has_no_room_for_a_table_either(own_site: Site, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_tars([(f"o{i:03d}", {"json": b"[%d]" % i}) for i in range(40)], other, n_shards=2)
    index_shards(other)
    with served(other) as second:
        cache = tmp_path / "cache"
        limit = room_for(own_site, 1) + (other / "manifest.hrs").stat().st_size + 100  # a table of 40 takes 328
        first, last = (IndexedShards(remote(one, cache, cache_bytes=limit)) for one in (own_site, second))
        last.find("o000")  # its indexes are kept
        for dataset in (first, last):
            assert numbers(dataset.__getitems__(range(len(dataset)))) == list(range(len(dataset)))
            dataset.close()
        assert limit - 328 < nbytes(cache) <= limit


def test_samples_and_shards_of_earlier_runs_make_room(own_site: Site, tmp_path: Path) -> None:
    cache, limit = tmp_path / "cache", room_for(own_site, 1.0)
    earlier = tmp_path / "earlier"
    write_tars([(f"o{i:03d}", {"json": b"[%d]" % i, "bin": bytes(900)}) for i in range(40)], earlier, n_shards=2)
    index_shards(earlier)
    script = """
import sys
from headrace.webdatamodule import IndexedShards, Remote
for unit in ("sample", "shard"):
    dataset = IndexedShards(Remote(sys.argv[1], cache_dir=sys.argv[2], cache_unit=unit))
    dataset.__getitems__(range(len(dataset)))
"""
    with served(earlier) as old:
        done = subprocess.run([sys.executable, "-c", script, old.url, str(cache)], timeout=120, check=False)
        assert done.returncode == 0
    before = {path.name for path in cache.iterdir() if not path.name.startswith(".")}
    assert {path.partition(".")[2] for path in before} >= {"samples", "tar"}
    dataset = IndexedShards(remote(own_site, cache, cache_bytes=limit))
    dataset.__getitems__(range(COUNT))
    dataset.close()
    assert nbytes(cache) <= limit
    own_site.faults.asked.clear()
    dataset.__getitems__(range(COUNT))
    assert tars(own_site) == []
    assert not {path for path in before if path.endswith((".samples", ".tar"))} <= {one.name for one in cache.iterdir()}


def test_a_folder_that_others_evict_is_made_anew(site: Site, tmp_path: Path) -> None:
    cache, near = tmp_path / "cache", IndexedShards(site.folder)
    dataset = IndexedShards(remote(site, cache))
    for part in (range(20), range(20, 40)):
        assert dataset.__getitems__(part) == near.__getitems__(part)
        dataset.announce([], restart=True)  # as at the beginning of an epoch
        [evicted] = cache.glob("*.samples")
        shutil.rmtree(evicted)
    for _ in range(2):
        assert dataset.__getitems__(range(COUNT)) == near.__getitems__(range(COUNT))
        dataset.close()
    site.faults.asked.clear()
    assert dataset.__getitems__(range(COUNT)) == near.__getitems__(range(COUNT))
    assert tars(site) == []


@pytest.mark.parametrize("unit", ["samples", "", None])
def test_a_wrong_unit_is_named(unit: Any) -> None:
    with pytest.raises(ValueError, match=r"cache_unit must be one of 'auto', 'shard', 'sample', got"):
        Remote("https://host/train", cache_unit=unit)


@pytest.mark.parametrize("options", [{"cache_bytes": 5 << 20}, {"cache_unit": "sample"}])
def test_a_cache_without_a_directory_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"cache_bytes and cache_unit need cache_dir, got none: give a directory"):
        Remote("https://host/train", **options)


# Damage


def filled(site: Site, cache: Path) -> list[Any]:
    """Fill a cache; returns the samples."""
    dataset = IndexedShards(remote(site, cache))
    samples = dataset.__getitems__(range(COUNT))
    dataset.close()
    return samples


def check_mended(site: Site, cache: Path, samples: list[Any]) -> None:
    """All samples are right, and what was damaged is fetched once."""
    dataset = IndexedShards(remote(site, cache))
    assert dataset.__getitems__(range(COUNT)) == samples
    dataset.close()
    site.faults.asked.clear()
    again = IndexedShards(remote(site, cache))
    assert again.__getitems__(range(COUNT)) == samples
    assert tars(site) == []


def test_a_flipped_byte_anywhere_costs_one_sample(site: Site, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    samples = filled(site, cache)
    [log] = logs(cache)
    table, chance = log.parent / "table", random.Random(0)
    places = [(log, at) for at in chance.sample(range(log.stat().st_size), 40)]
    places += [(table, at) for at in range(0, 8 * COUNT, 7)]
    costly = 0
    for path, at in places:
        data = bytearray(path.read_bytes())
        data[at] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        dataset = IndexedShards(remote(site, cache))
        assert dataset.__getitems__(range(COUNT)) == samples
        traffic = dataset.take_traffic()
        assert traffic is not None
        assert traffic.fetched <= 3000 + 1100
        costly += traffic.fetched > 0  # a place in the log may be that of a sample that was damaged before
        dataset.close()
    assert costly > 0.9 * len(places)
    check_mended(site, cache, samples)


def test_what_is_damaged_after_it_was_planned_is_fetched_together(site: Site, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    dataset = IndexedShards(remote(site, cache))
    batch = list(range(14))
    samples = dataset.__getitems__(batch)
    dataset.close()
    dataset.announce([[*batch, 14]], restart=True)  # the last one is fetched, of the same shard
    until(lambda: bool(tars(site)))
    settle()
    [log] = logs(cache)
    noise(log)
    site.faults.asked.clear()
    assert dataset.__getitems__([*batch, 14])[:-1] == samples
    assert 1 <= len(tars(site)) <= 3  # not one for each member


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def noise(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(path.stat().st_size))


def gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [cut, emptied, noise, gone])
@pytest.mark.parametrize("file", ["table", "*.log"])
@pytest.mark.parametrize("under_way", [False, True])
def test_a_file_that_is_damaged_as_a_whole_is_made_anew(
    site: Site, tmp_path: Path, damage: Callable[[Path], None], file: str, under_way: bool
) -> None:
    cache = tmp_path / "cache"
    samples = filled(site, cache)
    dataset = IndexedShards(remote(site, cache))
    if under_way:  # what is open stays open
        dataset[0]
    [path] = cache.glob(f"*.samples/{file}")
    damage(path)
    for _ in range(2):
        assert dataset.__getitems__(range(COUNT)) == samples
        dataset.close()
    check_mended(site, cache, samples)


def test_what_was_damaged_on_its_way_is_not_kept(own_site: Site, tmp_path: Path) -> None:
    near = IndexedShards(own_site.folder).__getitems__(range(COUNT))
    own_site.faults.kind, own_site.faults.times = "damaged", 1
    dataset = IndexedShards(remote(own_site, tmp_path / "cache"), verify="none")
    assert dataset.__getitems__(range(COUNT)) == near
    dataset.close()
    own_site.faults.asked.clear()
    assert dataset.__getitems__(range(COUNT)) == near
    assert tars(own_site) == []


def test_a_shard_that_was_replaced_is_an_error_and_not_kept_under_its_old_name(own_site: Site, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    dataset = IndexedShards(remote(own_site, cache))
    dataset.__getitems__(range(10))
    dataset.close()
    shutil.rmtree(own_site.folder)
    write_tars(
        [(f"n{i:03d}", {"json": b"[%d]" % i, "bin": bytes(50)}) for i in range(COUNT)], own_site.folder, n_shards=4
    )
    index_shards(own_site.folder)
    with pytest.raises((StaleIndexError, ShardError)):
        dataset.__getitems__(range(30, 40))
    new = IndexedShards(remote(own_site, cache))
    assert new.__getitems__(range(COUNT)) == IndexedShards(own_site.folder).__getitems__(range(COUNT))
    new.close()
    assert len(list(cache.glob("*.samples"))) == 2


def test_writes_that_fail_are_a_warning_and_training_goes_on(site: Site, tmp_path: Path) -> None:
    script = """
import resource, sys, warnings
from headrace.webdatamodule import IndexedShards, Remote
dataset = IndexedShards(Remote(sys.argv[1], cache_dir=sys.argv[2], cache_unit="sample"))
expected = [[i] for i in range(len(dataset))]
dataset[0]  # the indexes are kept
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))  # as if the disk were full
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        assert [sample["json"] for sample in dataset.__getitems__(range(len(dataset)))] == expected
        dataset.announce([], restart=True)
print([str(one.message) for one in caught])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, site.url, str(tmp_path / "cache")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no more samples are kept in") == 1
    assert "give another cache_dir" in done.stdout
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY  # of this process, which goes on


def test_a_cache_on_a_disk_that_is_read_only_is_read(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    samples = filled(site, cache)
    open_ = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if ".samples" in str(path) and flags & os.O_RDWR:
            raise PermissionError(13, "not here", str(path))
        return open_(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    site.faults.asked.clear()
    assert IndexedShards(remote(site, cache)).__getitems__(range(COUNT)) == samples
    assert tars(site) == []


# Several processes


WORKER = """
import os, random, sys
from headrace.webdatamodule import IndexedShards, Remote, RetryPolicy
from headrace.webdatamodule.shards.remote import sample_cache
url, cache, most, seed, rounds = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
sample_cache._TOGETHER = 2000
dataset = IndexedShards(Remote(url, cache_dir=cache, cache_bytes=most, cache_unit="sample"))
chance = random.Random(seed)
for _ in range(rounds):
    some = chance.choices(range(len(dataset)), k=6)
    assert [sample["json"][0] for sample in dataset.__getitems__(some)] == some
    print(end=".", flush=True)
dataset.close()
"""


def started(site: Site, cache: Path, most: int, seed: int, rounds: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WORKER, site.url, str(cache), *map(str, (most, seed, rounds))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_processes_share_a_cache_and_never_exceed_it(site: Site, tmp_path: Path) -> None:
    cache, limit = tmp_path / "cache", room_for(site, 0.6)
    processes = [started(site, cache, limit, seed, 60) for seed in range(3)]
    most, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.001):
            if cache.exists():
                with FileLock(cache / ".lock"):
                    most = max(most, nbytes(cache))

    watcher = threading.Thread(target=watch)
    watcher.start()
    results = [(process.communicate(timeout=200), process.returncode) for process in processes]
    ended.set()
    watcher.join()
    assert [code for _, code in results] == [0, 0, 0], results
    assert limit * 0.8 < most <= limit


@pytest.mark.slow
@pytest.mark.parametrize("times", [6, pytest.param(80, marks=pytest.mark.nightly)])
def test_processes_that_are_killed_leave_a_cache_that_is_right(site: Site, tmp_path: Path, times: int) -> None:
    cache, limit, chance = tmp_path / "cache", room_for(site, 0.8), random.Random(0)
    for seed in range(times):
        process = started(site, cache, limit, seed, 10**6)
        assert process.stdout is not None
        for _ in range(chance.randrange(1, 25)):
            assert process.stdout.read(1) == b"."
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
    dataset = IndexedShards(remote(site, cache, cache_bytes=limit))
    for _ in range(2):
        assert numbers(dataset.__getitems__(range(COUNT))) == list(range(COUNT))
        dataset.close()
    traffic = dataset.take_traffic()
    assert traffic is not None
    assert traffic.cached > 0
    assert nbytes(cache) <= limit


# Kept by the time of the next use: a node that gets a part of the samples in each epoch


def shares_fetched(site: Site, cache: Path, limit: int, epochs: int, workers: int = 0) -> list[float]:
    """For each epoch of a node of four, the bytes fetched for each one used; samples are compared."""
    dataset = IndexedShards(remote(site, cache, cache_bytes=limit), decode=None)
    near = IndexedShards(site.folder, decode=None)
    batches = DistributedBatchSampler(len(dataset), 4, num_replicas=4, rank=1)
    made = ResumableLoader(dataset, batches, num_workers=workers, collate_fn=keep)
    found, before = [], (0, 0)
    for epoch in range(epochs):
        made.set_epoch(epoch)
        for batch, indices in zip(made, batches_of(len(dataset), epoch), strict=True):
            assert batch == near.__getitems__(indices)
        assert nbytes(cache) <= limit
        report = made.report().remote
        assert report is not None
        found.append((report.fetched - before[0]) / (report.used - before[1]))
        before = report.fetched, report.used
    made.close()
    return found


def batches_of(n: int, epoch: int) -> list[list[int]]:
    sampler = DistributedBatchSampler(n, 4, num_replicas=4, rank=1)
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.slow
@pytest.mark.usefixtures("small_writes")
def test_a_node_of_four_keeps_what_it_needs_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for a fifth, .51 of the bytes are fetched where what is needed last is evicted, and .80 elsewhere."""
    count, size = 16 * 100, 100
    monkeypatch.setattr(next_use, "_LEAST", 2)  # fifty windows an epoch
    monkeypatch.setattr(sample_cache, "_TOGETHER", 1024)
    write_tars([(f"s{i:05d}", {"bin": b"%d " % i * (size // 6)}) for i in range(count)], tmp_path / "site", n_shards=8)
    index_shards(tmp_path / "site")
    total = sum(len(sample["bin"]) + 8 for sample in IndexedShards(tmp_path / "site", decode=None))
    indexes = sum(path.stat().st_size for path in (tmp_path / "site").glob("*.hrs"))
    limit = indexes + 8 * (count + 1) + total // 5
    shares = {}
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for local in ("", "1"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        with served(tmp_path / "site") as site:
            epochs = shares_fetched(site, tmp_path / f"cache{local}", limit, 4)
            shares[local] = sum(epochs[2:]) / len(epochs[2:])
    assert 0.75 < shares[""] < 0.85
    assert shares["1"] < 0.60


@pytest.mark.slow
@pytest.mark.usefixtures("small_writes")
@pytest.mark.parametrize("local", ["", "1", "2"])
def test_workers_keep_by_the_next_use_as_well(
    site: Site, tmp_path: Path, local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    shares = shares_fetched(site, tmp_path / "cache", room_for(site, 0.6), 6, workers=2)
    assert min(shares[2:]) < 1


class PlannedBatches:
    """A batch sampler of another package, which plans its epochs."""

    fingerprint, num_replicas, rank = "planned", 4, 1

    def __init__(self, n: int) -> None:
        self.sizes, self.epoch, self.reading = np.ones(n), 0, False

    def plan(self, epoch: int) -> SimpleNamespace:
        assert not self.reading, "other epochs are planned before the batches of one are read"
        n = len(self.sizes)
        return SimpleNamespace(indices=np.random.default_rng(epoch).permutation(n), offsets=np.arange(0, n + 1, 4))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        own = self.plan(self.epoch).indices.reshape(-1, 4)[1::4].tolist()
        self.reading = True
        yield from own
        self.reading = False

    def __len__(self) -> int:
        return len(self.sizes) // 16


@pytest.mark.usefixtures("small_writes")
def test_batches_that_are_planned_elsewhere_have_next_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(next_use, "_LEAST", 2)
    count = 16 * 50
    write_tars([(f"s{i:05d}", {"bin": b"%d " % i * 16}) for i in range(count)], tmp_path / "site", n_shards=4)
    index_shards(tmp_path / "site")
    near = IndexedShards(tmp_path / "site")
    total = int(near.sizes("bin").sum()) + 8 * count
    limit = sum(path.stat().st_size for path in (tmp_path / "site").glob("*.hrs")) + 8 * (count + 1) + total // 5
    cached = {}
    for local in ("", "1"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        with served(tmp_path / "site") as site:
            far = IndexedShards(remote(site, tmp_path / f"cache{local}", cache_bytes=limit))
            made = ResumableLoader(far, PlannedBatches(count), collate_fn=keep, check_ranks=False)
            for epoch in range(6):
                made.set_epoch(epoch)
                for batch in made:
                    assert batch == near.__getitems__(made.indices)
            report = made.report().remote
            made.close()
        assert report is not None
        cached[local] = report.cached / report.used
    assert cached["1"] > 1.5 * cached[""] > 0


@pytest.mark.usefixtures("small_writes")
def test_few_open_logs_are_enough(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that was closed is never written to: its number may be that of another file by then."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(next_use, "_LEAST", 1)
    monkeypatch.setattr(sample_cache, "_OPEN", 2)
    few = shares_fetched(site, tmp_path / "few", 1 << 30, 6)
    monkeypatch.setattr(sample_cache, "_OPEN", 128)
    assert few == shares_fetched(site, tmp_path / "many", 1 << 30, 6)
    assert len(logs(tmp_path / "few")) > 4


@pytest.mark.usefixtures("small_writes")
def test_sources_of_a_mixture_are_kept_by_their_own_next_uses(
    own_site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    write(tmp_path / "second")
    with served(tmp_path / "second") as second:
        both = IndexedShards({name: remote(one, tmp_path / "cache") for name, one in (("a", own_site), ("b", second))})
        batches = DistributedBatchSampler(len(both), 4, num_replicas=2, rank=0)
        made = ResumableLoader(both, batches, collate_fn=numbers)
        seen = []
        for epoch in range(5):
            made.set_epoch(epoch)
            seen += [number for batch in made for number in batch]
        made.close()
    report = made.report().remote
    assert report is not None
    assert len(seen) == 5 * COUNT
    # Half of the samples come again in the next epoch, and there is room for all: they are all found.
    assert report.cached > 0.6 * report.used
