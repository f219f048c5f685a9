"""What fetching announced batches ahead, and keeping samples, give with remote shards, from a server with latency.

    python benchmarks/remote.py
    python benchmarks/remote.py --bytes 20000 --step 20
    python benchmarks/remote.py --litdata
    python benchmarks/remote.py --moto --steps 40 --bytes 200000 --step 600
    python benchmarks/remote.py --nodes 4

A web server of this machine answers each request after a latency, at a limited rate: `range_server.c`, which the C
compiler of the machine makes. A loop takes batches from 2 workers and sleeps for each step, as a GPU would work.
Loaders with and without look-ahead, and one of the same shards on disk, take turns: each is made anew, and goes
through two epochs. Printed are medians: the speed relative to the disk's in the same turn, the steps that waited more
than 5 ms for a batch, and the bytes and requests of a step. `obstore` is look-ahead with that library, `cache` the same
with a cache that has room for a part of the samples. Before them comes the time to the first batch of a dataset that
was never opened, in round trips.

With `--litdata` that library reads the same bytes from the same server: with its own shuffle and a cache with room for
all or for the same part, and in a full shuffle, of which a few steps are timed. With `--moto` the server is one of S3.
With `--nodes` nothing is timed: the first of so many nodes reads some epochs through a cache, in steps without a pause;
with `--by-size` in batches of headrace-size-aware-batching, whose samples have made-up sizes.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import mean, median
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, Dataset

from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedShards,
    Remote,
    ResumableLoader,
    index_shards,
    write_tars,
)
from headrace.webdatamodule.loading.stage_report import RemoteReads

BATCH, SHARDS, WORKERS = 64, 16, 2
CHUNKS = 128  # of litdata, which stands still where a worker's chunks do not fit into its cache
FEW = 6  # steps of an epoch that takes long
SET, LIT = "shards", "bucket/litdata"  # folders
KEY = {"key": "key", "secret": "secret"}
WAITED = 0.005  # seconds
RATE, OWN_RATE = 100, 20  # MB a second, of all connections and of one


class Server:
    """A server that runs, and what it has sent."""

    def __init__(self, url: str, process: "subprocess.Popen[str]") -> None:
        self.url, self._process = url, process

    def sent(self) -> tuple[int, int]:
        """Requests, and the bytes of their answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        requests, nbytes = self._process.stdout.readline().split()
        return int(requests), int(nbytes)


@contextmanager
def served(folder: Path, latency: float) -> Iterator[Server]:
    """Serve a folder; the latency is in milliseconds."""
    with tempfile.TemporaryDirectory() as made:
        program, source = Path(made) / "range_server", Path(__file__).with_name("range_server.c")
        subprocess.run(["cc", "-O2", "-pthread", "-o", program, source], check=True)
        command = [str(program), str(folder), *map(str, (latency, RATE, OWN_RATE))]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                yield Server(f"http://127.0.0.1:{server.stdout.readline().strip()}", server)
            finally:
                server.kill()  # workers that were forked hold its input, so that it would not end with this process


@contextmanager
def moto_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Serve the files of a folder as `s3://bucket/`, by moto in a process of its own; yields options of s3fs."""
    command = [sys.executable, "-m", "moto.server", "-p", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines = iter(server.stderr.readline, "")
        url = next(line.split()[-1] for line in lines if "Running on" in line)
        Thread(target=lambda: [None for _ in lines], daemon=True).start()  # the log of its requests
        try:
            files = import_module("s3fs").S3FileSystem(endpoint_url=url, **KEY)
            files.mkdir("bucket")
            for path in folder.iterdir():
                files.put_file(str(path), f"bucket/{path.name}")
            yield {"endpoint_url": url, **KEY}
        finally:
            server.kill()


def same(samples: list[Any]) -> list[Any]:
    return samples


def loader(source: Any, nodes: int = 1, *, by_size: bool = False) -> ResumableLoader:
    dataset = IndexedShards(source, decode=None)
    batches: Any = DistributedBatchSampler(len(dataset), BATCH, num_replicas=nodes, rank=0)
    if by_size:
        sizes = np.random.default_rng(0).integers(5, 60, len(dataset))
        budget = int(sizes.mean()) * BATCH
        batches = import_module("headrace.size_aware_batching").DistributedSizeAwareBatchSampler(
            sizes, budget, num_replicas=nodes, rank=0
        )
    return ResumableLoader(dataset, batches, num_workers=WORKERS, prefetch_factor=2, collate_fn=same)


class LitDataset(Dataset[Any]):
    """litdata's dataset, a sample at a time: torch refuses a batch sampler for one that is iterable."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> bytes:
        return bytes(self._dataset[index])


def copied(samples: list[Any]) -> list[bytes]:
    return list(map(bytes, samples))  # litdata's are parts of a map, which cannot be sent


class Litdata:
    """A loader of litdata from the same server, through its interface for S3.

    Args:
        url: The server.
        cache: A new directory.
        cache_bytes: Its limit.
        everywhere: Whether each batch has samples from anywhere, which litdata reads one by one. Its own shuffle is one
            of chunks, and of the samples in each.
    """

    def __init__(self, url: str, cache: Path, cache_bytes: int, *, everywhere: bool) -> None:
        litdata, downloader = import_module("litdata"), import_module("litdata.streaming.downloader")
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # which it refuses else, and falls back to no other way
        key = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        dataset = litdata.StreamingDataset(
            import_module("litdata.streaming.resolver").Dir(path=str(cache), url=f"s3://{LIT}"),
            shuffle=not everywhere,
            drop_last=True,
            max_cache_size=cache_bytes,
            storage_options={"endpoint_url": url, **key},
        )
        options: dict[str, Any] = {"num_workers": WORKERS, "prefetch_factor": 2, "persistent_workers": True}
        self._batches: DistributedBatchSampler | None = None
        self._steps = len(dataset) // BATCH
        if everywhere:
            self._batches, self._steps = DistributedBatchSampler(len(dataset), BATCH, num_replicas=1, rank=0), FEW
            self._loader: Any = DataLoader(LitDataset(dataset), batch_sampler=self._batches, collate_fn=same, **options)
        else:
            self._loader = litdata.StreamingDataLoader(dataset, batch_size=BATCH, collate_fn=copied, **options)

    def __len__(self) -> int:
        return self._steps

    def set_epoch(self, epoch: int) -> None:
        if self._batches is not None:
            self._batches.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def close(self) -> None:
        self._loader = None


def write_litdata(samples: int, nbytes: int, folder: Path) -> None:
    folder.mkdir(parents=True)
    # A dictionary would become a row of Arrow, which litdata 0.2.76 does not read one by one from a server.
    writer = import_module("litdata.streaming.writer").BinaryWriter(str(folder), chunk_size=-(-samples // CHUNKS))
    noise = np.random.default_rng(0)
    for index in range(samples):
        writer[index] = noise.bytes(nbytes)
    writer.done()
    writer.merge()


class Epoch(NamedTuple):
    """What an epoch took."""

    seconds: float  # a step
    waited: float  # the share of steps
    fetched: float  # bytes for each one used
    requests: float  # of a step


def epoch(one: Any, step: float, nbytes: int, sent: Callable[[], tuple[int, int]]) -> Epoch:
    """One epoch of a loader of samples of `nbytes`; `sent` gives what the server has sent until now."""
    before = sent()
    begin, waited, samples, batches, steps = time.perf_counter(), 0, 0, iter(one), len(one)
    for _ in range(steps):
        asked = time.perf_counter()
        samples += len(next(batches))
        waited += time.perf_counter() - asked > WAITED
        time.sleep(step)
    passed = time.perf_counter() - begin
    requests, fetched = (now - then for then, now in zip(before, sent(), strict=True))
    return Epoch(passed / steps, waited / steps, fetched / (samples * nbytes), requests / steps)


def reported(one: ResumableLoader) -> Callable[[], tuple[int, int]]:
    """What the server of a loader has sent, as its report says."""
    return lambda: (one.report().remote or RemoteReads(0, 0, 0, 0))[:2]


def first_batch(url: str, latency: float) -> float:
    """Round trips to the first batch, from the opening of the dataset on."""
    begin = time.perf_counter()
    dataset = IndexedShards(Remote(url), decode=None)
    dataset.__getitems__(next(iter(DistributedBatchSampler(len(dataset), BATCH, num_replicas=1, rank=0))))
    return (time.perf_counter() - begin) / (latency / 1e3)


def room(folder: Path, samples: int, nbytes: int, share: float) -> int:
    """Bytes of a cache with room for indexes, the table, and a share of the samples."""
    indexes = (folder / "manifest.hrs").stat().st_size
    return indexes + 8 * (samples + 1) + int(share * samples * (nbytes + 8))


Loaders = dict[str, Callable[[Path], Any]]  # what makes each of a new directory


def time_loaders(loaders: Loaders, options: argparse.Namespace, sent: Callable[[], tuple[int, int]] | None) -> None:
    """Print what two epochs of each loader take, against those of the first one."""
    chosen = {name: make for name, make in loaders.items() if name in options.only or not options.only}
    firsts: dict[str, list[Epoch]] = {name: [] for name in chosen}
    laters: dict[str, list[Epoch]] = {name: [] for name in chosen}
    for _ in range(options.runs):
        for name, make in chosen.items():
            with tempfile.TemporaryDirectory() as cache:
                one = make(Path(cache))
                for number, found in enumerate((firsts[name], laters[name])):
                    one.set_epoch(number)
                    found.append(epoch(one, options.step / 1e3, options.bytes, sent or reported(one)))
                one.close()
    for what, epochs in (("the first epoch of a new loader", firsts), ("the second epoch", laters)):
        print(what)
        disk = epochs[next(iter(chosen))]
        for name, runs in epochs.items():
            speed = median(one.seconds / other.seconds for one, other in zip(disk, runs, strict=True))
            _, waited, fetched, requests = (median(column) for column in zip(*runs, strict=True))
            print(
                f"  {name:22} {speed:6.3f} x the disk's speed, {waited:6.1%} of the steps waited, "
                f"{fetched:5.2f} bytes fetched for each one used, {requests:6.1f} requests a step"
            )


def count_bytes(folder: Path, options: argparse.Namespace, cache_bytes: int) -> None:
    """Print the bytes that one of some nodes fetches, with and without knowing what it needs next."""
    with served(folder, 1.0) as server, tempfile.TemporaryDirectory() as cache:
        for local, what in (("1", "what is needed last is evicted"), ("", "what came first stays")):
            os.environ["LOCAL_WORLD_SIZE"] = local
            far = Remote(server.url, cache_dir=Path(cache) / f"local{local}", cache_bytes=cache_bytes)
            one = loader(far, options.nodes, by_size=options.by_size)
            shares = []
            for turn in range(options.runs + 3):
                one.set_epoch(turn)
                shares.append(epoch(one, 0, options.bytes, server.sent).fetched)
            one.close()
            steady = shares[3:]
            print(f"{what}: {mean(steady):.3f} bytes fetched for each one used, {min(steady):.3f} to {max(steady):.3f}")


def on_server(folder: Path, options: argparse.Namespace, cache_bytes: int) -> None:
    """Time the loaders on the server in C."""
    with served(folder, options.latency) as server:
        url = f"{server.url}/{SET}"
        print(f"first batch after {median(first_batch(url, options.latency) for _ in range(5)):.1f} round trips")

        def cached(cache: Path) -> ResumableLoader:
            return loader(Remote(url, cache_dir=cache, cache_bytes=cache_bytes, obstore={}))

        loaders: Loaders = {
            "disk": lambda _: loader(folder / SET),
            "lookahead=0": lambda _: loader(Remote(url, lookahead=0)),
            "lookahead": lambda _: loader(url),
            "obstore": lambda _: loader(Remote(url, obstore={})),
            "cache": cached,
        }
        if (folder / LIT).exists():
            room = {"all": 1 << 40, "a part": cache_bytes}
            loaders |= {
                f"litdata, room for {name}": partial(Litdata, server.url, cache_bytes=nbytes, everywhere=False)
                for name, nbytes in room.items()
            }
            loaders["litdata, full shuffle"] = partial(Litdata, server.url, cache_bytes=1 << 40, everywhere=True)
        time_loaders(loaders, options, server.sent)


def on_moto(folder: Path, options: argparse.Namespace, cache_bytes: int) -> None:
    """Time the loaders on an S3 server, whose speed is the limit."""
    with moto_of(folder / SET) as s3:
        store = {
            "endpoint": s3["endpoint_url"],
            "access_key_id": s3["key"],
            "secret_access_key": s3["secret"],
            "region": "us-east-1",
            "client_options": {"allow_http": True},
        }
        far = partial(Remote, "s3://bucket", s3)
        loaders: Loaders = {
            "disk": lambda _: loader(folder / SET),
            "lookahead=0": lambda _: loader(far(lookahead=0)),
            "lookahead": lambda _: loader(far()),
            "obstore": lambda _: loader(far(obstore=store)),
            "cache": lambda cache: loader(far(cache_dir=cache, cache_bytes=cache_bytes, obstore=store)),
        }
        time_loaders(loaders, options, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=30, help="milliseconds")
    parser.add_argument("--step", type=float, default=10, help="milliseconds")
    parser.add_argument("--bytes", type=int, default=4096, help="of a sample")
    parser.add_argument("--steps", type=int, default=200, help="of an epoch")
    parser.add_argument("--room", type=float, default=0.2, help="of the samples that fit into the cache")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--by-size", action="store_true", help="batches by size, with --nodes")
    parser.add_argument("--only", nargs="*", default=[], help="loaders beside the disk")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--litdata", action="store_true", help="measure litdata, too, which has to be installed")
    where.add_argument("--moto", action="store_true", help="an S3 server of the library moto in place of the one in C")
    options = parser.parse_args()
    options.only = {*options.only, "disk"} if options.only else set()
    # A thread for each range of a batch may hold a connection.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    count = BATCH * options.steps * options.nodes
    with tempfile.TemporaryDirectory() as root:
        folder, noise = Path(root), np.random.default_rng(0)
        samples = [(f"s{i:06d}", {"bin": noise.bytes(options.bytes)}) for i in range(count)]
        write_tars(samples, folder / SET, n_shards=SHARDS)
        index_shards(folder / SET)
        if options.litdata:
            write_litdata(count, options.bytes, folder / LIT)
        cache_bytes = room(folder / SET, count, options.bytes, options.room)
        if options.nodes > 1:
            count_bytes(folder / SET, options, cache_bytes)
        else:
            (on_moto if options.moto else on_server)(folder, options, cache_bytes)


if __name__ == "__main__":
    main()
