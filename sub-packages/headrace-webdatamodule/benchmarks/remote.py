"""What fetching announced batches ahead gives with remote shards: `lookahead` against 0, from a server with latency.

    python benchmarks/remote.py
    python benchmarks/remote.py --latency 100 --step 20

A web server of this machine, a process of its own, answers each request after a latency. A loop takes batches from 2
workers and sleeps for each step, as a GPU would work. Loaders with and without look-ahead, and one of the same shards
on disk, take turns, an epoch each. Printed are medians: the speed relative to the disk, the steps that waited more than
5 ms for a batch, and the bytes and requests of a step. `obstore` is look-ahead
with that library, `cache` look-ahead with a cache that has room for a part of the shards.
"""

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

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


def same(samples: list[Any]) -> list[Any]:
    return samples


def loader(source: Any) -> ResumableLoader:
    dataset = IndexedShards(source, decode=None)
    batches = DistributedBatchSampler(len(dataset), BATCH, num_replicas=1, rank=0)
    return ResumableLoader(dataset, batches, num_workers=WORKERS, prefetch_factor=2, collate_fn=same)


def epoch(one: ResumableLoader, step: float) -> tuple[float, float, float, float]:
    """Seconds, the fraction of steps that waited, bytes fetched for each one used, and requests a step."""
    before = one.report().remote or RemoteReads(0, 0, 0, 0)
    begin, waited, batches = time.perf_counter(), 0, iter(one)
    for _ in range(len(one)):
        asked = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - asked > WAITED
        time.sleep(step)
    passed = time.perf_counter() - begin
    requests, fetched, used, _ = (b - a for a, b in zip(before, one.report().remote or before, strict=True))
    return passed, waited / len(one), fetched / max(used, 1), requests / len(one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=30, help="milliseconds")
    parser.add_argument("--step", type=float, default=10, help="milliseconds")
    parser.add_argument("--bytes", type=int, default=4096, help="of a sample")
    parser.add_argument("--steps", type=int, default=200, help="of an epoch")
    parser.add_argument("--room", type=float, default=0.2, help="of the shards that fit into the cache")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    count = BATCH * options.steps
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as cache:
        folder, noise = Path(root), np.random.default_rng(0)
        write_tars([(f"s{i:06d}", {"bin": noise.bytes(options.bytes)}) for i in range(count)], folder, n_shards=SHARDS)
        index_shards(folder)
        here, there = multiprocessing.Pipe()
        server = multiprocessing.Process(target=run, args=(folder, options.latency / 1e3, there), daemon=True)
        server.start()
        url = f"http://127.0.0.1:{here.recv()}"
        loaders = {"disk": loader(folder), "lookahead=0": loader(Remote(url, lookahead=0)), "lookahead": loader(url)}
        loaders["obstore"] = loader(Remote(url, obstore={}))
        shards = sum(path.stat().st_size for path in folder.glob("*.tar"))
        indexes = sum(path.stat().st_size for path in folder.glob("*.hr*"))
        loaders["cache"] = loader(Remote(url, cache_dir=Path(cache), cache_bytes=indexes + int(shards * options.room)))
        found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in loaders}
        for turn in range(options.runs + 1):
            for name, one in loaders.items():
                one.set_epoch(turn)
                measured = epoch(one, options.step / 1e3)
                if turn:  # the first one starts the workers
                    found[name].append(measured)
        for one in loaders.values():
            one.close()
        server.kill()
    disk = median(one[0] for one in found["disk"])
    for name, runs in found.items():
        passed, waited, fetched, requests = (median(column) for column in zip(*runs, strict=True))
        print(
            f"{name:12} {disk / passed:5.2f} x the disk's speed, {waited:4.0%} of the steps waited, "
            f"{fetched:5.2f} bytes fetched for each one used, {requests:5.1f} requests a step"
        )
    for name in ("lookahead", "obstore"):
        pairs = zip(found[name], found["lookahead=0"], strict=True)
        print(f"{name}: {median(before[0] / ahead[0] for ahead, before in pairs):.2f} times as fast as lookahead=0")


if __name__ == "__main__":
    main()
