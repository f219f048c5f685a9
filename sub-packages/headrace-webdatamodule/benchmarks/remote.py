"""What fetching announced batches ahead, and keeping samples, give with remote shards, from a server with latency.

    python benchmarks/remote.py
    python benchmarks/remote.py --bytes 20000 --step 20
    python benchmarks/remote.py --nodes 4

A web server of this machine answers each request after a latency, at a limited rate: `range_server.c`, which the C
compiler of the machine makes, or one in Python where there is none. A loop takes batches from 2 workers and sleeps for
each step, as a GPU would work. Loaders with and without look-ahead, and one of the same shards on disk, take turns, an
epoch each. Printed are medians: the speed relative to the disk, the steps that waited more than 5 ms for a batch, the
bytes and requests of a step. `obstore` is look-ahead with that library, `cache` the same with a cache that has room for
a part of the samples. Before them comes the time to the first batch of a dataset that was never opened, in round trips.

With `--nodes` nothing is timed: the first of so many nodes reads some epochs through a cache, in steps without a pause.
"""

import argparse
import asyncio
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

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
WAITED = 0.005  # seconds
RATE, OWN_RATE = 100, 20  # MB a second, of all connections and of one


class Server(asyncio.Protocol):
    """Answers ranges of files after a latency; one for each connection."""

    def __init__(self, files: dict[str, bytes], latency: float) -> None:
        self.files, self.latency, self.head = files, latency, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        *heads, self.head = (self.head + data).split(b"\r\n\r\n")
        for head in heads:
            asyncio.get_running_loop().call_later(self.latency, self.transport.write, self.answer(head))

    def answer(self, head: bytes) -> bytes:
        data = self.files.get(head.split(b" ", 2)[1].decode())
        if data is None:
            return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
        status, extra, body = "200 OK", "", data
        asked = head.lower().partition(b"\r\nrange: bytes=")[2]
        if asked:
            first, _, last = asked.partition(b"\r\n")[0].decode().partition("-")
            body = data[int(first) : int(last) + 1]
            status, extra = "206 Partial Content", f"Content-Range: bytes {first}-{last}/{len(data)}\r\n"
        return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{extra}\r\n".encode() + body


async def serve(folder: Path, latency: float, told: Connection) -> None:
    files = {f"/{path.name}": path.read_bytes() for path in folder.iterdir()}
    server = await asyncio.get_running_loop().create_server(
        lambda: Server(files, latency), "127.0.0.1", 0, backlog=1024
    )
    told.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def run(folder: Path, latency: float, told: Connection) -> None:
    asyncio.run(serve(folder, latency, told))


@contextmanager
def served(folder: Path, latency: float) -> Iterator[str]:
    """The URL of a folder on a server whose latency is in milliseconds."""
    compiler = shutil.which("cc")
    if compiler is None:
        print("no C compiler: the server is one in Python, which takes a good part of a core", file=sys.stderr)
        here, there = multiprocessing.Pipe()
        process = multiprocessing.Process(target=run, args=(folder, latency / 1e3, there), daemon=True)
        process.start()
        yield f"http://127.0.0.1:{here.recv()}"
        process.kill()
        process.join()
        return
    with tempfile.TemporaryDirectory() as made:
        program, source = Path(made) / "range_server", Path(__file__).with_name("range_server.c")
        subprocess.run([compiler, "-O2", "-pthread", "-o", program, source], check=True)
        command = [str(program), str(folder), *map(str, (latency, RATE, OWN_RATE))]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
            server.communicate("")


def same(samples: list[Any]) -> list[Any]:
    return samples


def loader(source: Any, nodes: int = 1) -> ResumableLoader:
    dataset = IndexedShards(source, decode=None)
    batches = DistributedBatchSampler(len(dataset), BATCH, num_replicas=nodes, rank=0)
    return ResumableLoader(dataset, batches, num_workers=WORKERS, prefetch_factor=2, collate_fn=same)


class Epoch(NamedTuple):
    """What an epoch took."""

    seconds: float
    waited: float  # the share of steps
    fetched: float  # bytes for each one used
    requests: float  # of a step


def epoch(one: ResumableLoader, step: float) -> Epoch:
    before = one.report().remote or RemoteReads(0, 0, 0, 0)
    begin, waited, batches = time.perf_counter(), 0, iter(one)
    for _ in range(len(one)):
        asked = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - asked > WAITED
        time.sleep(step)
    passed = time.perf_counter() - begin
    requests, fetched, used, _, _ = (b - a for a, b in zip(before, one.report().remote or before, strict=True))
    return Epoch(passed, waited / len(one), fetched / max(used, 1), requests / len(one))


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


def time_loaders(folder: Path, cache: Path, options: argparse.Namespace, cache_bytes: int) -> None:
    with served(folder, options.latency) as url:
        print(f"first batch after {median(first_batch(url, options.latency) for _ in range(5)):.1f} round trips")
        sources = {
            "disk": folder,
            "lookahead=0": Remote(url, lookahead=0),
            "lookahead": url,
            "obstore": Remote(url, obstore={}),
            "cache": Remote(url, cache_dir=cache, cache_bytes=cache_bytes, obstore={}),
        }
        loaders = {name: loader(source) for name, source in sources.items() if name in options.only or not options.only}
        found: dict[str, list[Epoch]] = {name: [] for name in loaders}
        for turn in range(options.runs + 1):
            for name, one in loaders.items():
                one.set_epoch(turn)
                measured = epoch(one, options.step / 1e3)
                if turn:  # the first one starts the workers
                    found[name].append(measured)
        for one in loaders.values():
            one.close()
    disk = median(one.seconds for one in found["disk"])
    for name, runs in found.items():
        passed, waited, fetched, requests = (median(column) for column in zip(*runs, strict=True))
        print(
            f"{name:12} {disk / passed:5.2f} x the disk's speed, {waited:5.1%} of the steps waited, "
            f"{fetched:5.2f} bytes fetched for each one used, {requests:5.1f} requests a step"
        )
    for name in {"lookahead", "obstore"} & set(found):
        pairs = zip(found[name], found.get("lookahead=0", []), strict=False)
        ratios = [before.seconds / ahead.seconds for ahead, before in pairs]
        if ratios:
            print(f"{name}: {median(ratios):.2f} times as fast as lookahead=0")


def count_bytes(folder: Path, cache: Path, options: argparse.Namespace, cache_bytes: int) -> None:
    with served(folder, 1.0) as url:
        for local, what in (("1", "what is needed last is evicted"), ("", "what came first stays")):
            os.environ["LOCAL_WORLD_SIZE"] = local
            one = loader(Remote(url, cache_dir=cache / f"local{local}", cache_bytes=cache_bytes), options.nodes)
            shares = []
            for turn in range(options.runs + 3):
                one.set_epoch(turn)
                shares.append(epoch(one, 0).fetched)
            one.close()
            steady = shares[3:]
            print(f"{what}: {mean(steady):.3f} bytes fetched for each one used, {min(steady):.3f} to {max(steady):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=30, help="milliseconds")
    parser.add_argument("--step", type=float, default=10, help="milliseconds")
    parser.add_argument("--bytes", type=int, default=4096, help="of a sample")
    parser.add_argument("--steps", type=int, default=200, help="of an epoch")
    parser.add_argument("--room", type=float, default=0.2, help="of the samples that fit into the cache")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="loaders beside the disk")
    options = parser.parse_args()
    options.only = {*options.only, "disk"} if options.only else set()
    # A thread for each range of a batch may hold a connection.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    count = BATCH * options.steps * options.nodes
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as cache:
        folder, noise = Path(root), np.random.default_rng(0)
        write_tars([(f"s{i:06d}", {"bin": noise.bytes(options.bytes)}) for i in range(count)], folder, n_shards=SHARDS)
        index_shards(folder)
        cache_bytes = room(folder, count, options.bytes, options.room)
        measure = count_bytes if options.nodes > 1 else time_loaders
        measure(folder, Path(cache), options, cache_bytes)


if __name__ == "__main__":
    main()
