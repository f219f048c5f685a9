"""The laws of a store, over each class; and those of what readers use, which repeats, compares and names."""

import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer
from processes import SERVER
from shard_server import Site, served

from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedShards,
    Remote,
    ResumableLoader,
    RetryPolicy,
    ShardError,
    Store,
    index_shards,
    write_tars,
)
from headrace.webdatamodule.shards.stores.checked import CheckedStore
from headrace.webdatamodule.shards.stores.fsspec import FsspecStore
from headrace.webdatamodule.shards.stores.local import LocalStore
from headrace.webdatamodule.shards.stores.obstore import ObstoreStore
from headrace.webdatamodule.shards.stores.store import StoreError, UnboundedBodyError, merge

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
FILES = {"a.tar": np.random.default_rng(0).bytes(20_000), "b c#1.tar": b"xyz" * 1000, "empty": b""}
RANGES = [("a.tar", 900, 2000), ("b c#1.tar", 0, 9), ("a.tar", 0, 1000), ("a.tar", 19_999, 20_000), ("a.tar", 5, 5000)]
QUICK = RetryPolicy(max_attempts=3, backoff=0.0)
KEY = {"key": "key", "secret": "hush-hush"}


class FolderStore(Store):
    """A user's own store: the least that is asked for."""

    def __init__(self, folder: Path) -> None:
        self.url, self._folder = "folder://corpus", folder

    def read(self, name: str, limit: int) -> bytes:
        return (self._folder / name).read_bytes()[: limit + 1]

    def size(self, name: str) -> int:
        return (self._folder / name).stat().st_size

    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> Sequence[bytes | BaseException]:
        return [(self._folder / name).read_bytes()[start:stop] for name, start, stop in wanted]


class SpawnedStore(Store):
    """Another store in a process of its own, as obstore needs: nothing may be forked from one that has used it."""

    def __init__(self, inner: Store) -> None:
        self.url, self.retries, self.inner = inner.url, inner.retries, inner
        self._pool = ProcessPoolExecutor(1, mp_context=SERVER, initializer=keep, initargs=(inner,))

    def read(self, name: str, limit: int) -> bytes:
        got: bytes = self._pool.submit(ask, "read", name, limit).result()
        return got

    def size(self, name: str) -> int | None:
        got: int | None = self._pool.submit(ask, "size", name).result()
        return got

    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> Sequence[bytes | BaseException]:
        got: Sequence[bytes | BaseException] = self._pool.submit(ask, "ranges", wanted).result()
        return got

    def close(self) -> None:
        self._pool.shutdown()


_kept = list[Store]()


def keep(store: Store) -> None:
    _kept.append(store)


def ask(method: str, *arguments: Any) -> Any:
    return getattr(_kept[0], method)(*arguments)


@pytest.fixture(scope="module")
def obstores(site: Site, s3: dict[str, Any]) -> Iterator[dict[str, SpawnedStore]]:
    key = {
        "access_key_id": "key",
        "secret_access_key": "hush-hush",
        "region": "us-east-1",
        "endpoint": s3["endpoint_url"],
    }
    options = {**key, "client_options": {"allow_http": True}}
    made = {
        "obstore http": SpawnedStore(ObstoreStore(site.url, {}, 10.0, 2)),
        "obstore s3": SpawnedStore(ObstoreStore("s3://corpus/train", options, 10.0, 2)),
    }
    yield made
    for store in made.values():
        store.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("files")
    for name, data in FILES.items():
        (made / name).write_bytes(data)
    return made


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Site]:
    with served(folder) as made:
        yield made


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    options = {**KEY, "endpoint_url": f"http://{host}:{port}"}
    system = import_module("s3fs").S3FileSystem(**options)
    system.mkdir("corpus")
    for name, data in FILES.items():
        system.pipe(f"corpus/train/{name}", data)
    yield options
    server.stop()


SLOW = ["s3", "obstore http", "obstore s3"]


@pytest.fixture(
    params=["local", "own", "http", "memory", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def store(request: pytest.FixtureRequest, folder: Path) -> Store:
    if request.param.startswith("obstore"):
        made: Store = request.getfixturevalue("obstores")[request.param]
        return made
    if request.param == "local":
        return LocalStore(folder)
    if request.param == "own":
        return FolderStore(folder)
    if request.param == "http":
        return FsspecStore([request.getfixturevalue("site").url], {}, 10.0)
    if request.param == "s3":
        return FsspecStore(["s3://corpus/train"], request.getfixturevalue("s3"), 10.0)
    for name, data in FILES.items():
        import_module("fsspec").filesystem("memory").pipe(f"/corpus/{name}", data)
    return FsspecStore(["memory://corpus"], {}, 10.0)


def named(store: Store, name: str) -> str:
    """As readers name files: on the web, quoted."""
    return name.replace(" ", "%20").replace("#", "%23") if store.url.startswith("http") else name


def expected(wanted: Sequence[tuple[str, int, int]]) -> list[bytes]:
    return [FILES[name][start:stop] for name, start, stop in wanted]


def asked(store: Store, wanted: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    return [(named(store, name), start, stop) for name, start, stop in wanted]


def read_in_child(store: Store, queue: Any) -> None:
    queue.put(list(store.ranges(asked(store, RANGES))))


# A store


def test_bytes_are_equal(store: Store) -> None:
    for name, data in FILES.items():
        assert store.read(named(store, name), 20_000) == data
        assert store.size(named(store, name)) == len(data)
        assert bytes(store.map(named(store, name)) or data) == data


def test_a_read_is_bounded(store: Store) -> None:
    for limit in (0, 1, 19_999):
        with suppress(UnboundedBodyError):
            assert len(store.read("a.tar", limit)) > limit


def test_ranges_come_in_their_order_and_may_overlap(store: Store) -> None:
    assert list(store.ranges(asked(store, RANGES))) == expected(RANGES)


@pytest.mark.parametrize("ask", [lambda store: store.read("c", 9), lambda store: store.size("c")])
def test_a_missing_file_is_named_so(store: Store, ask: Callable[[Store], object]) -> None:
    with pytest.raises(FileNotFoundError):
        ask(store)
    with pytest.raises(StoreError) as caught:
        CheckedStore(store, QUICK, 10.0).read(f"{store.url}/c", 9)
    assert caught.value.missing
    assert caught.value.shard == f"{store.url}/c"


def test_a_pickled_store_reads_the_same(store: Store) -> None:
    store.read("a.tar", 20_000)
    if isinstance(store, SpawnedStore):  # this one was pickled before its process was spawned
        assert vars(pickle.loads(pickle.dumps(store.inner))).keys() == vars(store.inner).keys()
    elif not isinstance(store, FsspecStore) or not store.url.startswith("memory"):
        assert list(pickle.loads(pickle.dumps(store)).ranges(asked(store, RANGES))) == expected(RANGES)


def test_a_forked_store_reads_the_same(store: Store) -> None:
    if isinstance(store, SpawnedStore):
        pytest.skip("obstore hangs in a process that is forked after its use")
    store.read("a.tar", 20_000)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=read_in_child, args=(store, queue))
    child.start()
    assert queue.get(timeout=60) == expected(RANGES)
    child.join()
    assert list(store.ranges(asked(store, RANGES))) == expected(RANGES)


def test_no_text_has_a_secret(site: Site, s3: dict[str, Any]) -> None:
    stores = [
        FsspecStore([f"{site.url}?signature=hush-hush"], {}, 10.0),
        FsspecStore([site.url.replace("//", "//me:hush-hush@")], {}, 10.0),
        FsspecStore(["s3://corpus/train"], s3, 10.0),
    ]
    for made in stores:
        with pytest.raises(StoreError) as caught:
            CheckedStore(made, QUICK, 10.0).ranges(f"{made.url}/none", [(0, 5)])
        assert "hush" not in f"{made.url} {made!r} {caught.value} {caught.value.__cause__!r}"


# What readers use


class FaultyStore(FolderStore):
    """One that fails so many times, in the way that is given."""

    def __init__(self, folder: Path, fault: Any, times: int) -> None:
        super().__init__(folder)
        self.fault, self.times, self.asked = fault, times, list[int]()

    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> Sequence[bytes | BaseException]:
        self.asked.append(len(wanted))
        made = list(super().ranges(wanted))
        if self.times > 0:
            self.times -= 1
            if self.fault == "raised":
                raise ConnectionResetError("reset")
            made[0] = self.fault(made[0])
        return made


FAULTS: list[Any] = ["raised", lambda _: TimeoutError(), lambda data: data[:-1]]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_retries_are_counted_and_bounded(folder: Path, fault: Any, times: int) -> None:
    faulty = FaultyStore(folder, fault, times)
    checked = CheckedStore(faulty, QUICK, 10.0)
    wanted = [(f"{faulty.url}/{name}", (start, stop)) for name, start, stop in RANGES]
    if times < QUICK.max_attempts:
        assert checked.ranges_of(wanted) == expected(RANGES)
    else:
        with pytest.raises(StoreError) as caught:
            checked.ranges_of(wanted)
        assert (caught.value.shard, caught.value.offset) == (wanted[0][0], 900)
        assert not caught.value.missing
        assert not caught.value.lacks_ranges
    again = len(RANGES) if fault == "raised" else 1
    assert faulty.asked == [len(RANGES), *[again] * min(times, QUICK.max_attempts - 1)]
    assert checked.traffic.take().requests == sum(faulty.asked)


@pytest.mark.parametrize("error", [FileNotFoundError("a"), PermissionError("a"), UnboundedBodyError("a")])
def test_what_asking_again_would_not_change_is_asked_once(folder: Path, error: Exception) -> None:
    faulty = FaultyStore(folder, lambda _: error, 9)
    with pytest.raises(StoreError) as caught:
        CheckedStore(faulty, QUICK, 10.0).ranges(f"{faulty.url}/a.tar", [(0, 5)])
    assert faulty.asked == [1]
    assert caught.value.missing == isinstance(error, FileNotFoundError)
    assert caught.value.lacks_ranges == isinstance(error, UnboundedBodyError)


def test_a_store_that_sends_more_lacks_ranges(folder: Path) -> None:
    faulty = FaultyStore(folder, lambda data: data + b"x", 9)
    checked = CheckedStore(faulty, QUICK, 10.0)
    with pytest.raises(StoreError) as caught:
        checked.ranges(f"{faulty.url}/a.tar", [(0, 5)])
    assert caught.value.lacks_ranges
    assert checked.sends_whole_files(f"{faulty.url}/b.tar")


def test_an_error_is_pickled_with_its_fields() -> None:
    error = StoreError("wrong", shard="s3://a/b", offset=7, missing=True, status=404, lacks_ranges=True)
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


def test_a_large_file_is_refused(store: Store) -> None:
    checked = CheckedStore(store, QUICK, 10.0)
    assert checked.read(f"{store.url}/a.tar", 20_000) == FILES["a.tar"]
    with pytest.raises(ShardError, match="more than 19999 bytes"):
        checked.read(f"{store.url}/a.tar", 19_999)


# One rule of merging


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda it: (it[0], it[0] + it[1])), max_size=12)


@given(st.dictionaries(st.integers(0, 2), spans, max_size=3), st.integers(0, 10), st.sampled_from([0.0, 0.1, 1.0]))
def test_merged_ranges_cover_what_is_wanted_within_the_bounds(
    wanted: dict[int, list[tuple[int, int]]], max_gap: int, waste: float
) -> None:
    merged = merge(wanted, max_gap=max_gap, waste=waste)
    assert merged.keys() == wanted.keys()
    lost, total = 0, sum(end - begin for some in wanted.values() for begin, end in set(some))
    for file, parts in merged.items():
        assert parts == sorted(parts)
        for (_, end), (begin, _) in pairwise(parts):
            assert begin - end > max_gap
        used = {at for begin, end in wanted[file] for at in range(begin, end)}
        covered = {at for begin, end in parts for at in range(begin, end)}
        assert used <= covered
        gap = 0
        for at in sorted(covered - used):
            gap = gap + 1 if at - 1 in covered - used else 1
            lost += gap == max_gap + 1 and gap
            lost += gap > max_gap + 1
    assert lost <= waste * total


# A user's own store, where a URL is taken


@pytest.mark.parametrize("kind", ["ranges", "mapped", "cached"])
def test_a_dataset_reads_through_a_store(tmp_path: Path, kind: str) -> None:
    data = np.random.default_rng(1)
    write_tars([(f"s{i}", {"bin": data.bytes(3000)}) for i in range(40)], tmp_path / "train", n_shards=3)
    index_shards(tmp_path / "train")
    near = IndexedShards(tmp_path / "train")
    made: Store = LocalStore(tmp_path / "train") if kind == "mapped" else FolderStore(tmp_path / "train")
    far = IndexedShards(Remote(made, cache_dir=tmp_path / "cache") if kind == "cached" else made)
    assert far.fingerprint == near.fingerprint
    assert far.shard_of(3).startswith(f"{made.url}/")
    assert far.__getitems__([7, 39, 0, 7]) == near.__getitems__([7, 39, 0, 7])
    assert list(far) == list(near)
    batches = DistributedBatchSampler(len(near), 4, num_replicas=1, rank=0)
    loader = ResumableLoader(far, batches, num_workers=1, collate_fn=keys)
    assert list(loader) == [[near.key(at) for at in batch] for batch in batches]
    loader.close()


def keys(samples: list[Any]) -> list[str]:
    return [sample["__key__"] for sample in samples]


@pytest.mark.parametrize(
    "options", [{"storage_options": {"key": 1}}, {"obstore": {"key": 1}}, {"index_dir": "indexes"}]
)
def test_options_of_other_transports_are_refused_for_a_store(folder: Path, options: Any) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be left out for a Store"):
        Remote(FolderStore(folder), **options)
