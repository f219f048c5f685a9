"""Workers fetch the samples of announced batches while earlier ones are used."""

import copy
import gc
import multiprocessing
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from shard_server import (
    COUNT,
    FAULTS,
    QUICK,
    Handler,
    Site,
    numbers,
    served,
    served_own,
    served_shared,
    settle,
    until,
    written_once,
)

from headrace.webdatamodule import (
    DamagedShardError,
    DistributedBatchSampler,
    IndexedShards,
    LoaderReport,
    Remote,
    ResumableLoader,
    RetryPolicy,
    ShardError,
    ShardIndex,
    StaleIndexError,
    index_shards,
    write_tars,
)
from headrace.webdatamodule.loading.batch_reading import Request, announced
from headrace.webdatamodule.loading.stage_report import RemoteReads
from headrace.webdatamodule.shards.stores.store import merge

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
SIZE = 4
LIMIT = 60.0  # seconds, far more than anything here takes


folder = pytest.fixture(scope="module")(written_once)
site = pytest.fixture(served_shared)
own_site = pytest.fixture(served_own)


def flat(batches: Iterable[list[int]]) -> list[int]:
    return [*chain.from_iterable(batches)]


def loader(dataset: Any, *, shuffle: bool = True, workers: int = 1, **options: Any) -> ResumableLoader:
    batches = DistributedBatchSampler(len(dataset), SIZE, num_replicas=1, rank=0, shuffle=shuffle)
    return ResumableLoader(dataset, batches, num_workers=workers, **{"collate_fn": numbers, **options})


def held(dataset: IndexedShards) -> int:
    """Bytes that are fetched ahead, or being fetched."""
    assert dataset._fetcher is not None
    assert dataset._fetcher.ahead is not None
    return dataset._fetcher.ahead.held


def asked_bytes(site: Site) -> int:
    spans = [span.removeprefix("bytes=").split("-") for span in site.faults.ranges()]
    return sum(int(last) - int(first) + 1 for first, last in spans)


def place(dataset: IndexedShards, index: int) -> tuple[str, int, int]:
    """The shard, offset and number of bytes of a sample's last member."""
    shard = dataset.shard_of(index)
    opened = ShardIndex.open(shard)
    at = opened.span(opened.find(dataset.key(index)))[1] - 1
    return Path(shard).name, int(opened.offsets[at]), int(opened.sizes[at])


def is_asked(site: Site, where: tuple[str, int, int]) -> bool:
    shard, begin, nbytes = where
    spans = [span.removeprefix("bytes=").split("-") for name, span in list(site.faults.asked) if span and name == shard]
    return any(int(first) <= begin and begin + nbytes - 1 <= int(last) for first, last in spans)


def test_announced_batches_are_fetched_while_an_earlier_one_is_used(site: Site) -> None:
    near, far = IndexedShards(site.folder), site.dataset()
    made = loader(far, shuffle=False, prefetch_factor=1)
    batches = iter(made)
    first = next(batches)  # and only now is the worker asked for the second one
    until(lambda: all(is_asked(site, place(near, index)) for index in range(4 * SIZE)))
    assert made.steps == 1
    rest = list(batches)
    assert sorted(flat([first, *rest])) == list(range(COUNT))
    made.close()


def test_without_look_ahead_a_worker_fetches_what_it_is_asked_for(site: Site) -> None:
    made = loader(site.dataset(lookahead=0), shuffle=False, prefetch_factor=1)
    next(iter(made))
    made.close()
    assert not is_asked(site, place(IndexedShards(site.folder), 3 * SIZE))


def test_requests_of_several_batches_are_under_way_at_the_same_time(site: Site) -> None:
    """Of some requests the server answers none before three are there; one at a time, they would wait for ever."""
    together, take = threading.Barrier(3), site.faults.take
    seen: list[str] = []

    def held(name: str, span: str, agent: str) -> str:
        if name.endswith(".tar"):
            seen.append(span)
            if 3 < len(seen) <= 6:
                together.wait(LIMIT)
        return str(take(name, span, agent))

    object.__setattr__(site.faults, "take", held)
    batches = [[i] for i in range(0, COUNT, 6)]
    made = ResumableLoader(site.dataset(), batches, num_workers=1, prefetch_factor=1, collate_fn=numbers)
    assert list(made) == batches
    assert not together.broken
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 5000, 20_000, 1 << 20])
def test_memory_in_flight_stays_below_the_limit(site: Site, limit: int) -> None:
    near, far = IndexedShards(site.folder), site.dataset(lookahead=limit)
    sizes = near.sizes("bin").tolist()
    batches = [[*range(first, COUNT, 12)] for first in range(12)]
    far[0]
    site.faults.asked.clear()
    far.announce(batches, restart=True)
    most = 0
    for number, batch in enumerate(batches):
        settle()
        ahead = sum(sizes[index] for later in batches[number:] for index in later if is_asked(site, place(near, index)))
        assert ahead <= limit
        most = max(most, ahead)
        assert far.__getitems__(batch) == near.__getitems__(batch)
        assert held(far) <= limit
        if limit == 1 << 20:  # which all of them fit into, so that the one in use counts with those that came
            coming = [index for later in batches[number:] for index in later if is_asked(site, place(near, index))]
            settle()
            assert held(far) >= sum(sizes[index] for index in coming) > 0
    assert most > 0 if limit > 10_000 else most < limit
    far.announce([], restart=True)
    assert held(far) == 0


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1 << 20, 20_000])
def test_little_more_is_fetched_than_is_used(site: Site, limit: int) -> None:
    far = site.dataset(lookahead=limit)
    far[0]
    site.faults.asked.clear()
    made = loader(far)
    wanted = sum(len(sample["bin"]) for sample in IndexedShards(site.folder, decode=None))
    list(made)
    made.close()
    assert wanted <= asked_bytes(site) <= wanted * 1.02 + COUNT * 1100  # a header and padding within each sample


@pytest.mark.parametrize(("workers", "lookahead"), [(0, 1 << 20), (2, 0), (2, 1 << 20)])
def test_a_report_tells_what_was_fetched(site: Site, workers: int, lookahead: int) -> None:
    far = site.dataset(lookahead=lookahead)
    made = loader(far, workers=workers)
    used = sum(len(s["bin"]) + len(s["json"]) for s in IndexedShards(site.folder, decode=None))
    assert made.report().remote is None
    list(made)
    report = made.report()
    assert report.remote is not None
    assert report.remote.used == used
    assert report.remote.requests == len(site.faults.ranges())
    assert report.remote.fetched == asked_bytes(site)
    assert 0 <= report.remote.waited <= report.batches
    assert f"\n  fetched: {asked_bytes(site):,} bytes in {len(site.faults.ranges())} requests" in str(report)
    assert copy.copy(made).report().remote is None
    made.close()
    assert loader(IndexedShards(site.folder), workers=0).report().remote is None


def test_the_reads_of_all_sources_are_added_up(site: Site) -> None:
    both = IndexedShards({"a": site.remote(), "b": site.remote(), "c": site.folder})
    made = loader(both, workers=1)
    list(made)
    made.close()
    report = made.report()
    assert report.remote is not None
    assert (report.remote.requests, report.remote.fetched) == (len(site.faults.ranges()), asked_bytes(site))


def test_a_report_of_remote_reads_reads_well() -> None:
    told = str(LoaderReport("train", 40, {"a": 3000}, None, remote=RemoteReads(1200, 1_050_000, 1_000_000, 3)))
    assert "  fetched: 1,050,000 bytes in 1,200 requests, 1.05 for each byte that was used" in told
    assert "  waited: 3 of 40 batches came more than 5 ms late" in told
    assert "0 bytes in 0 requests\n" in str(LoaderReport("val", 0, {"a": 0}, None, remote=RemoteReads(0, 0, 0, 0)))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*FAULTS, "damaged"])
def test_a_false_answer_is_asked_for_again(site: Site, fault: str) -> None:
    far = site.dataset()
    expected = list(loader(IndexedShards(site.folder), workers=0))
    site.faults.kind, site.faults.times = fault, 3
    made = loader(far)
    assert list(made) == expected
    assert site.faults.times == 0
    made.close()


def test_damage_surfaces_at_its_batch_and_only_there(own_site: Site) -> None:
    near = IndexedShards(own_site.folder)
    shard, begin, nbytes = place(near, 42)
    assert nbytes
    key = near.key(42)
    path = own_site.folder / shard
    data = bytearray(path.read_bytes())
    data[begin] ^= 1
    path.write_bytes(data)
    made = loader(own_site.dataset(), shuffle=False)
    came: list[list[int]] = []
    with pytest.raises(DamagedShardError) as caught:
        came.extend(made)
    assert came == [list(range(first, first + SIZE)) for first in range(0, 40, SIZE)]
    assert caught.value.sample == key
    assert caught.value.shard == f"{own_site.url}/{shard}"
    own_site.faults.asked.clear()
    skipping = loader(own_site.dataset(), shuffle=False, on_error="skip")
    with pytest.warns(UserWarning, match=key):
        batches = list(skipping)
    assert flat(batches) == [index for index in range(COUNT) if index != 42]
    skipping.close()


def test_a_server_that_fails_for_one_shard_surfaces_at_its_first_batch(site: Site) -> None:
    near = IndexedShards(site.folder)
    shard = Path(near.shard_of(COUNT - 1)).name
    first = next(index for index in range(COUNT) if Path(near.shard_of(index)).name == shard)
    site.faults.kind, site.faults.times, site.faults.name = "500", 10**6, shard
    came: list[list[int]] = []
    made = loader(site.dataset(), shuffle=False)
    with pytest.raises(ShardError, match="500") as caught:
        came.extend(made)
    assert flat(came) == list(range(first // SIZE * SIZE))
    assert caught.value.shard == f"{site.url}/{shard}"


def test_an_answer_that_is_wrong_no_more_when_its_batch_comes_does_no_harm(site: Site) -> None:
    far = site.dataset()
    far[0]
    site.faults.kind, site.faults.times = "404", 10**6
    far.announce([[1, 2], [3, 4]], restart=True)
    settle()
    site.faults.times = 0
    assert numbers(far.__getitems__([1, 2])) == [1, 2]
    assert numbers(far.__getitems__([3, 4])) == [3, 4]


def test_a_shard_that_was_replaced_is_stale(own_site: Site) -> None:
    made = loader(own_site.dataset(), shuffle=False, prefetch_factor=1)
    last = sorted(own_site.folder.glob("*.tar"))[-1]
    last.write_bytes(bytes(last.stat().st_size + 512))
    with pytest.raises(StaleIndexError) as caught:
        list(made)
    assert caught.value.shard == f"{own_site.url}/{last.name}"
    assert made.steps == COUNT * 3 // 4 // SIZE


def test_a_server_that_is_killed_is_named_at_the_batch_that_lacks(folder: Path) -> None:
    script = """
import sys
from pathlib import Path
from shard_server import served
with served(Path(sys.argv[1])) as site:
    print(site.url, flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", script, str(folder)]
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **paths}
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        dataset = IndexedShards(Remote(url, retry=QUICK, lookahead=9000))
        made = loader(dataset, shuffle=False, workers=2, prefetch_factor=1)
        batches = iter(made)
        came = [next(batches)]
        server.kill()
        assert server.wait() == -9
    with pytest.raises(ShardError) as caught:
        came.extend(batches)
    assert str(caught.value.shard).startswith(url)
    assert "after 4 attempts" in str(caught.value)
    assert "to wait longer for the server, give Remote(retry=RetryPolicy(max_attempts=12))" in str(caught.value)
    assert flat(came) == list(range(len(came) * SIZE))
    assert not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_an_abandoned_epoch_leaves_nothing_behind(site: Site, workers: int) -> None:
    expected = loader(IndexedShards(site.folder), workers=0)
    made = loader(site.dataset(lookahead=5000), workers=workers)
    for epoch in range(3):
        made.set_epoch(epoch)
        expected.set_epoch(epoch)
        for _ in zip(range(2 + epoch), made, strict=False):
            pass
    made.set_epoch(3)
    expected.set_epoch(3)
    assert list(made) == list(expected)
    made.set_epoch(4)
    next(iter(made))
    made.close()
    assert not multiprocessing.active_children()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("look-ahead")]


def test_what_nobody_reads_is_fetched_no_further(site: Site) -> None:
    """The answers of a server for batches that a loop has abandoned begin nothing more."""
    far = site.dataset()
    far[0]
    site.faults.asked.clear()
    release, take = threading.Event(), site.faults.take
    object.__setattr__(site.faults, "take", lambda *asked: (release.wait(LIMIT), take(*asked))[1])
    far.announce([[i] for i in range(COUNT)], restart=True)
    settle("look-ahead plan")
    release.set()
    settle()
    assert len(site.faults.asked) == 8  # small batches, which are asked for at once
    assert [numbers(far.__getitems__([number])) for number in range(COUNT)] == [[number] for number in range(COUNT)]
    assert len(site.faults.asked) == COUNT


@pytest.mark.parametrize("options", [{}, {"lookahead": 0}, {"obstore": {}}])
def test_a_process_has_few_connections(site: Site, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if "obstore" in options:
        pytest.importorskip("obstore")
    get, clients = Handler.do_GET, set[Any]()

    def noted(self: Handler, head: bool = False) -> None:
        clients.add(self.client_address)
        get(self, head)

    monkeypatch.setattr(Handler, "do_GET", noted)
    far = IndexedShards(Remote(site.url, max_connections=2, retry=QUICK, **options))
    assert len(far.key(0)) == 4  # the indexes are here
    clients.clear()
    batches = [list(range(first, COUNT, 5)) for first in range(5)]
    script = partial(read_all, far, batches)
    if "obstore" in options:  # never in the main process
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(script) == batches
    else:
        assert script() == batches
    # A process of its own has more for the indexes, and obstore opens one while another is given back.
    assert 1 <= len(clients) <= (6 if "obstore" in options else 2)


def read_all(far: IndexedShards, batches: list[list[int]]) -> list[list[int]]:
    far.announce(batches, restart=True)
    return [numbers(far.__getitems__(batch)) for batch in batches]


def test_a_wrong_number_of_connections_is_named() -> None:
    with pytest.raises(ValueError, match="max_connections must be an int >= 1, got 0: 1 reads one range after another"):
        Remote("https://host/train", max_connections=0)


def draw(sample: dict[str, Any]) -> float:
    return random.random()


@pytest.mark.parametrize("seed_per", ["step", "sample"])
def test_retries_leave_the_random_numbers_of_transforms_alone(site: Site, seed_per: Any) -> None:
    def drawn() -> list[Any]:
        far = IndexedShards(Remote(site.url, retry=QUICK), transform=draw)
        made = loader(far, seed_per=seed_per, collate_fn=list)
        came = list(made)
        made.close()
        return came

    expected = drawn()
    site.faults.kind, site.faults.times = "500", 12
    assert drawn() == expected
    assert site.faults.times == 0


def test_what_is_dropped_is_asked_for_no_more(site: Site) -> None:
    far = site.dataset(lookahead=1 << 20)
    far[0]
    site.faults.asked.clear()
    release, take = threading.Event(), site.faults.take
    object.__setattr__(site.faults, "take", lambda *asked: (release.wait(LIMIT), take(*asked))[1])
    far.announce([[i] for i in range(COUNT)], restart=True)
    far.announce([], restart=True)
    release.set()
    settle()
    assert len(site.faults.asked) < COUNT
    assert held(far) == 0
    assert numbers(far.__getitems__([5, 6])) == [5, 6]


@pytest.mark.parametrize("at", [0, 1, 7, 14])
def test_a_resume_equals(site: Site, at: int) -> None:
    near, far = loader(IndexedShards(site.folder), workers=0), loader(site.dataset(), workers=2)
    batches = iter(far)
    expected = iter(near)
    assert [next(batches) for _ in range(at)] == [next(expected) for _ in range(at)]
    state = far.state_dict()
    assert {**state, "fingerprint": ""} == {**near.state_dict(), "fingerprint": ""}
    far.close()
    again = loader(site.dataset(), workers=1)
    again.load_state_dict(state)
    assert list(again) == list(expected)
    again.close()


def test_a_running_loop_goes_on_after_samples_are_excluded(site: Site) -> None:
    near, far = loader(IndexedShards(site.folder), workers=0), loader(site.dataset(), workers=2)
    came: list[list[Any]] = []
    for made in (near, far):
        came.append([])
        for step, batch in enumerate(made):
            came[-1] += [batch, made.run_steps, made.remaining, made.step(0, rank=0), made.step(8, rank=0)]
            if step == 2:
                made.exclude(range(20, 30))
            if step == 5:
                made.reshard(2, 1)
    assert came[0] == came[1]
    far.close()


def test_each_source_of_a_mixture_reads_ahead(site: Site, tmp_path: Path) -> None:
    write_tars([(f"t{i}", {"json": b"[%d]" % (100 + i)}) for i in range(30)], tmp_path / "other", n_shards=2)
    index_shards(tmp_path / "other")
    near = IndexedShards({"a": site.folder, "b": tmp_path / "other"})
    with served(tmp_path / "other") as other:
        far = IndexedShards({"a": site.remote(), "b": other.remote()})
        mixed = IndexedShards({"a": site.remote(), "b": tmp_path / "other"})
        expected = list(loader(near, workers=0))
        for dataset in (far, mixed):
            made = loader(dataset, workers=2, prefetch_factor=1)
            assert list(made) == expected
            made.close()
        later = [place(near, 3), place(near, COUNT + 3)]
        batches = [[index, COUNT + index] for index in range(30)]
        made = ResumableLoader(far, batches, num_workers=1, prefetch_factor=1, collate_fn=numbers)
        del site.faults.asked[:], other.faults.asked[:]
        next(iter(made))  # and then the worker is asked for the second one
        until(lambda: is_asked(other, later[1]) and is_asked(site, later[0]))
        made.close()


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_workers_that_are_forked_and_spawned(site: Site, start: str) -> None:
    far = site.dataset()
    far[0]  # connections and their thread exist before the workers do
    made = loader(far, workers=2, multiprocessing_context=start)
    expected = loader(IndexedShards(site.folder), workers=0)
    assert [list(made) for _ in range(3)] == [list(expected) for _ in range(3)]
    made.close()


def test_without_workers_there_is_no_thread(site: Site) -> None:
    seen: set[str] = set()

    def note(samples: list[Any]) -> list[int]:
        seen.update(thread.name for thread in threading.enumerate())
        return numbers(samples)

    made = loader(site.dataset(), workers=0, collate_fn=note)
    assert sorted(flat(made)) == list(range(COUNT))
    assert not [name for name in seen if name.startswith("look-ahead")]


def test_a_file_system_without_an_event_loop(folder: Path) -> None:
    made = loader(IndexedShards(Remote(folder.as_uri())), workers=2, seed_per="sample")
    assert list(made) == list(loader(IndexedShards(folder), workers=0, seed_per="sample"))
    made.close()


def test_a_cache_needs_noannounce(site: Site, tmp_path: Path) -> None:
    made = loader(site.dataset(tmp_path / "cache"), workers=2)
    assert list(made) == list(loader(IndexedShards(site.folder), workers=0))
    made.close()
    assert not site.dataset(tmp_path / "cache").looks_ahead
    assert not site.dataset(lookahead=0).looks_ahead
    assert not IndexedShards(site.folder).looks_ahead


def test_too_large_members_and_wrong_indices_are_errors_of_their_batch(site: Site) -> None:
    dataset = IndexedShards(Remote(site.url), max_bytes=2500)
    large = next(i for i, size in enumerate(IndexedShards(site.folder).sizes("bin").tolist()) if size > 2500)
    small = [i for i, size in enumerate(IndexedShards(site.folder).sizes("bin").tolist()) if size <= 2500]
    batches = [small[:2], [large], small[2:4], [COUNT], small[4:6]]
    made = ResumableLoader(dataset, batches, num_workers=1, collate_fn=numbers, on_error="raise")
    came: list[list[int]] = []
    with pytest.raises(ShardError, match="max_bytes=2500"):
        came.extend(made)
    assert came == batches[:1]
    del batches[1]
    made = ResumableLoader(dataset, batches, num_workers=1, collate_fn=numbers)
    came = []
    with pytest.raises(IndexError, match=str(COUNT)):
        came.extend(made)
    assert came == batches[:2]


def test_a_forked_copy_begins_anew(site: Site) -> None:
    far = site.dataset()
    far.announce([[1, 2], [3, 4]], restart=True)
    settle()

    def read() -> None:
        assert numbers(far.__getitems__([1, 2])) == [1, 2]
        os._exit(7)

    child = multiprocessing.get_context("fork").Process(target=read)
    child.start()
    child.join(LIMIT)
    assert child.exitcode == 7


@pytest.mark.parametrize("workers", [1, 3])
def test_each_worker_is_told_its_batches_once_and_in_order(workers: int) -> None:
    told: dict[int, list[list[int]]] = {worker: [] for worker in range(workers)}
    pulled = 0

    def requests() -> Iterator[Request]:
        nonlocal pulled
        for number in range(200):
            pulled += 1
            yield Request([number], None, number)  # type: ignore[arg-type]  # not looked at

    for number, request in enumerate(announced(requests(), workers)):
        assert request.indices == [number]
        assert request.ahead is not None
        assert request.ahead.restart == (number < workers)
        told[number % workers] += map(list, request.ahead.batches)
        assert [number] in told[number % workers]
        assert pulled <= number + 1 + 32 * workers
    for worker, batches in told.items():
        assert batches == [[number] for number in range(worker, 200, workers)]


def test_an_error_of_the_batch_sampler_comes_after_the_batches_before_it() -> None:
    def requests() -> Iterator[Request]:
        for number in range(5):
            yield Request([number], None, number)  # type: ignore[arg-type]  # not looked at
        raise ValueError("no more")

    came: list[int] = []
    with pytest.raises(ValueError, match="no more"):
        came.extend(request.step for request in announced(requests(), 2))
    assert came == list(range(5))


def test_ranges_are_merged_within_a_bound_on_waste() -> None:
    wanted = {0: [(0, 50_000), (52_000, 100_000), (100_100, 100_200)], 1: [(0, 1000), (8000, 9000), (0, 1000)]}
    assert merge(wanted, max_gap=1023, waste=0.0) == {0: [(0, 50_000), (52_000, 100_200)], 1: [(0, 1000), (8000, 9000)]}
    assert merge(wanted, max_gap=1023, waste=0.02) == {0: [(0, 100_200)], 1: [(0, 1000), (8000, 9000)]}
    assert merge(wanted, max_gap=1023, waste=0.2) == {0: [(0, 100_200)], 1: [(0, 9000)]}
    assert merge({3: [(5, 5)]}, max_gap=1023, waste=0.5) == {3: []}


@pytest.mark.parametrize("value", [-1, True, 2.5])
def test_lookahead_is_checked(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="lookahead must be"):
        Remote("s3://a", lookahead=value, retry=RetryPolicy())


def collected(samples: list[Any]) -> list[int]:
    gc.collect()  # as happens by itself in a worker that reads more
    return numbers(samples)


SERVER = """
import sys
from pathlib import Path
from shard_server import served
with served(Path(sys.argv[1])) as site:
    print(site.url, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.parametrize("lookahead", [0, 1 << 20])
def test_connections_of_the_main_process_outlive_its_forked_workers(folder: Path, lookahead: int) -> None:
    """A worker that cleans up connections that it inherited takes them out of the epoll that it shares."""
    command = [sys.executable, "-c", SERVER, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        remote = Remote(url, timeout=4, retry=RetryPolicy(max_attempts=1), lookahead=lookahead)
        made = IndexedShards(remote)
        assert made[0]["json"] == [0]  # over a connection that is kept
        loading = loader(made, multiprocessing_context="fork", collate_fn=collected)
        assert sorted(flat(loading)) == list(range(COUNT))
        loading.close()
        assert made[3]["json"] == [3]
    finally:
        server.communicate("")  # which ends it
    assert server.returncode == 0
