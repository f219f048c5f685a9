"""A web server of this process that serves shards, writes down what it is asked, and fails as it is told."""

import contextlib
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest

from headrace.webdatamodule import IndexedShards, Remote, RetryPolicy, add_column, index_shards, write_tars

COUNT = 60
QUICK = RetryPolicy(max_attempts=4, backoff=0.001)
FAULTS = ["500", "503", "429", "cut", "short", "wrong range", "slow"]
WRONG = ["web page", "flipped bit", "short body"]  # with status 200, and a length that fits
PAGE = b"\xef\xbb\xbf\n<!DOCTYPE html><title>Please log in</title>"


@dataclass
class Faults:
    """What goes wrong with requests for one file: the first ones, or all."""

    kind: str = ""
    times: int = 0
    name: str = ".tar"
    secret: str = ""  # what a request has to have in its URL or as its user; "{name}" is that of the file
    agent: str = ""  # only those of clients that call themselves so
    asked: list[tuple[str, str]] = field(default_factory=list)  # (file, range)
    agents: dict[str, int] = field(default_factory=dict)  # requests of each client
    lock: threading.Lock = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)  # what "held" answers wait for

    def take(self, name: str, span: str, agent: str) -> str:
        with self.lock:
            self.asked.append((name, span))
            client = agent.partition("/")[0]
            self.agents[client] = self.agents.get(client, 0) + 1
            if self.times <= 0 or not name.endswith(self.name) or self.agent not in agent:
                return ""
            self.times -= 1
            return self.kind

    def ranges(self) -> list[str]:
        return [span for name, span in self.asked if name.endswith(".tar") and span]


def keep(samples: list[Any]) -> list[Any]:
    """Collate nothing; here, where a worker that is no fork of the test finds it without the test's imports."""
    return samples


def numbers(samples: Iterable[Any]) -> list[int]:
    return [sample["json"][0] for sample in samples]


class Handler(BaseHTTPRequestHandler):
    """Serves a directory as plain HTTP servers do, ranges included, and fails as it is told."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the client to acknowledge the head
    timeout = 10

    def __init__(self, *args: Any, folder: Path, faults: Faults) -> None:
        self.folder, self.faults = folder, faults
        super().__init__(*args)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET(head=True)

    def do_GET(self, head: bool = False) -> None:
        path = self.folder / unquote(urlsplit(self.path).path.lstrip("/"))  # as a proxy it is given a whole URL
        span = self.headers.get("Range", "")
        fault = self.faults.take(path.name, span, self.headers.get("User-Agent", ""))
        scheme, _, user = self.headers.get("Authorization", "").partition(" ")
        user = b64decode(user).decode() if scheme == "Basic" else ""
        if self.faults.secret.format(name=path.name) not in self.path + user:
            return self.answer(403, b"", head=head)
        if fault == "moved":
            return self.answer(302, b"", head=head, location=f"/moved?signature={self.faults.secret}")
        status, _, patience = fault.partition(", Retry-After: ")
        if status.isdigit() or not path.is_file():
            return self.answer(int(status or 404), b"", head=head, patience=patience)
        data = path.read_bytes()
        if fault == "slow":
            time.sleep(0.05)
        if fault == "held":
            self.faults.released.wait(60)
        if fault == "web page":
            return self.answer(200, PAGE, head=head)
        if fault == "flipped bit":
            data = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        if fault == "short body":
            data = data[: len(data) // 2]
        encoding = fault.partition("encoding: ")[2]
        if not span or fault == "no ranges":
            return self.answer(200, data, head=head, cut=fault == "cut", encoding=encoding)
        first, _, last = span.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last) + 1, len(data))
        if begin >= len(data):
            return self.answer(416, b"", head=head)
        if fault == "wrong range":
            begin, end = (begin + 512, end + 512) if end + 512 <= len(data) else (begin - 512, end - 512)
        if fault == "short":
            end = begin + (end - begin) // 2
        if fault == "damaged":
            data = data[:begin] + bytes(byte ^ 1 for byte in data[begin:end]) + data[end:]
        told = f"bytes {begin}-{end - 1}/{len(data)}"
        return self.answer(206, data[begin:end], head=head, cut=fault == "cut", told=told, encoding=encoding)

    def answer(
        self,
        status: int,
        data: bytes,
        *,
        head: bool,
        cut: bool = False,
        told: str = "",
        encoding: str = "",
        location: str = "",
        patience: str = "",
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Accept-Ranges", "bytes")
        if told:
            self.send_header("Content-Range", told)
        for name, value in {"Content-Encoding": encoding, "Location": location, "Retry-After": patience}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if not head:
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.close_connection = True


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # of connections that are opened at the same time, of which the default of 5 loses some

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is none of our business."""


@dataclass(frozen=True)
class Site:
    folder: Path
    url: str
    faults: Faults

    def remote(self, cache: Path | None = None, **options: Any) -> Remote:
        return Remote(self.url, cache_dir=cache, retry=QUICK, **options)

    def dataset(self, cache: Path | None = None, check: Any = "read", **options: Any) -> IndexedShards:
        return IndexedShards(self.remote(cache, **options), verify=check)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what a thread or a server brings about."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def settle(name: str = "look-ahead") -> None:
    """Wait until nothing more is fetched ahead in this process, or planned."""
    while threads := [thread for thread in threading.enumerate() if thread.name.startswith(name)]:
        threads[0].join(60)
        assert not threads[0].is_alive()


def write(folder: Path, seed: int = 0) -> None:
    chance = np.random.default_rng(seed)
    samples = [
        (f"s{i:03d}", {"json": b"[%d]" % i, "bin": chance.bytes(int(chance.integers(0, 3000)))}) for i in range(COUNT)
    ]
    write_tars(samples, folder, n_shards=4)
    index_shards(folder)
    add_column(folder, "tokens", np.arange(COUNT) * 3)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Site]:
    faults = Faults()
    with Server(("127.0.0.1", 0), partial(Handler, folder=folder, faults=faults)) as server:
        thread = threading.Thread(target=partial(server.serve_forever, 0.01))
        thread.start()
        try:
            yield Site(folder, f"http://127.0.0.1:{server.server_port}", faults)
        finally:
            server.shutdown()
            thread.join()


# Fixtures of the tests that read from a server: `site = pytest.fixture(served_own)`.


def written_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards that no test changes, as `folder` with scope="module"."""
    made = tmp_path_factory.mktemp("shards")
    write(made)
    return made


def served_shared(folder: Path) -> Iterator[Site]:
    """A server of its own for each test, of the shards in `folder`."""
    with served(folder) as made:
        yield made


def served_own(tmp_path: Path) -> Iterator[Site]:
    """One whose files a test may change."""
    write(tmp_path / "site")
    with served(tmp_path / "site") as made:
        yield made
