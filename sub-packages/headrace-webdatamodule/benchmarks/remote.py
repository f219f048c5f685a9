"""What fetching announced batches ahead gives with remote shards: `lookahead` against 0, from a server with latency.

    python benchmarks/remote.py
    python benchmarks/remote.py --latency 100 --step 20

A web server of this machine, a process of its own, answers each request after a latency. A loop takes batches from 2
workers and sleeps for each step, as a GPU would work. Loaders with and without look-ahead, and one of the same shards
on disk, take turns in epochs that they abandon. Printed are medians: the speed relative to the disk, the steps that
waited more than 5 ms for a batch, and the bytes and requests of a step, as the server counts them.
"""

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

import numpy as np

from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedShards,
    Remote,
    ResumableLoader,
    index_shards,
    write_tars,
)

BATCH, SHARDS, WORKERS = 64, 16, 2
WAITED = 0.005  # seconds
FILL, REST = 20, 80  # steps before and behind those that are counted


class Server:
    """Answers ranges of the files in a folder after a latency; "/count" tells the bytes it sent, and begins anew."""

    def __init__(self, folder: Path, latency: float) -> None:
        self.files = {f"/{path.name}": path.read_bytes() for path in folder.iterdir()}
        self.latency, self.sent, self.requests = latency, 0, 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                path = head.split(" ", 2)[1]
                if path == "/count":
                    status, extra, body = "200 OK", "", f"{self.requests} {self.sent}".encode()
                    self.sent = self.requests = 0
                else:
                    status, extra, body = self.find(path, head.lower())
                    await asyncio.sleep(self.latency)
                    self.sent, self.requests = self.sent + len(body), self.requests + 1
                length = f"Content-Length: {len(body)}\r\n"
                writer.write(f"HTTP/1.1 {status}\r\n{length}{extra}\r\n".encode() + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def find(self, path: str, head: str) -> tuple[str, str, bytes]:
        data = self.files.get(path)
        if data is None:
            return "404 Not Found", "", b""
        if "\r\nrange: bytes=" not in head:
            return "200 OK", "", data
        first, _, last = head.partition("\r\nrange: bytes=")[2].partition("\r\n")[0].partition("-")
        body = data[int(first) : int(last) + 1]
        return "206 Partial Content", f"Content-Range: bytes {first}-{last}/{len(data)}\r\n", body

    async def serve(self, told: Connection) -> None:
        server = await asyncio.start_server(self.answer, "127.0.0.1", 0, backlog=1024)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()


def run(folder: Path, latency: float, told: Connection) -> None:
    asyncio.run(Server(folder, latency).serve(told))


def same(samples: list[Any]) -> list[Any]:
    return samples


def loader(source: Any) -> ResumableLoader:
    dataset = IndexedShards(source, decode=None)
    batches = DistributedBatchSampler(len(dataset), BATCH, num_replicas=1, rank=0)
    return ResumableLoader(dataset, batches, num_workers=WORKERS, prefetch_factor=2, collate_fn=same)


def steps(batches: Iterator[Any], count: int, step: float) -> tuple[float, float]:
    """Seconds of some steps, and the fraction of them that waited for their batch."""
    begin, waited = time.perf_counter(), 0
    for _ in range(count):
        before = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - before > WAITED
        time.sleep(step)
    return time.perf_counter() - begin, waited / count


def counted(url: str) -> tuple[int, int]:
    with urlopen(f"{url}/count") as answer:
        requests, nbytes = answer.read().split()
    return int(requests), int(nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=30, help="milliseconds")
    parser.add_argument("--step", type=float, default=10, help="milliseconds")
    parser.add_argument("--bytes", type=int, default=4096, help="of a sample")
    parser.add_argument("--steps", type=int, default=100, help="in one turn")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    count = BATCH * (FILL + options.steps + REST)
    with tempfile.TemporaryDirectory() as root:
        folder, noise = Path(root), np.random.default_rng(0)
        write_tars([(f"s{i:06d}", {"bin": noise.bytes(options.bytes)}) for i in range(count)], folder, n_shards=SHARDS)
        index_shards(folder)
        here, there = multiprocessing.Pipe()
        server = multiprocessing.Process(target=run, args=(folder, options.latency / 1e3, there), daemon=True)
        server.start()
        url = f"http://127.0.0.1:{here.recv()}"
        loaders = {"disk": loader(folder), "lookahead=0": loader(Remote(url, lookahead=0)), "lookahead": loader(url)}
        found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in loaders}
        for turn in range(options.runs + 1):
            for name, one in loaders.items():
                one.set_epoch(turn)
                batches = iter(one)
                steps(batches, FILL, options.step / 1e3)  # the pipeline fills
                counted(url)
                passed, waited = steps(batches, options.steps, options.step / 1e3)
                requests, nbytes = counted(url)
                if turn:
                    used = options.steps * BATCH * options.bytes
                    found[name].append((passed, waited, nbytes / used, requests / options.steps))
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
    pairs = zip(found["lookahead"], found["lookahead=0"], strict=True)
    print(f"with look-ahead {median(before[0] / ahead[0] for ahead, before in pairs):.2f} times as fast as without")


if __name__ == "__main__":
    main()
