"""Servers that lie: each ends in an error that names the shard, soon, in little memory, and nothing bad is kept."""

import gzip
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Sequence
from functools import cache as once
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.webdatamodule import IndexedShards, Remote, RetryPolicy, ShardError, index_shards, write_tars
from headrace.webdatamodule.shards.remote.remote_set import most_index_bytes

pytestmark = pytest.mark.slow

COUNT = 40
QUICK = RetryPolicy(max_attempts=2, backoff=0.001)


@once
def bomb() -> bytes:
    """A few hundred KB that unpack to 128 MiB."""
    return gzip.compress(bytes(1 << 27), 1)


class Liar(BaseHTTPRequestHandler):
    """Serves a directory, but tells lies about files of one suffix."""

    protocol_version = "HTTP/1.1"
    timeout = 10

    def __init__(self, *args: Any, site: "Site") -> None:
        self.site = site
        super().__init__(*args)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.send(200, self.file(), head=True)

    def file(self) -> bytes:
        return (self.site.folder / self.path.lstrip("/")).read_bytes()

    def send(self, status: int, body: bytes, *, head: bool = False, **fields: object) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **fields}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if not head:
            self.wfile.write(body)

    def endless(self, status: int, **fields: object) -> None:
        self.send_response(status)
        for name, value in {"Connection": "close", **fields}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.close_connection = True
        while not self.site.over.is_set():
            self.wfile.write(bytes(1 << 20))

    def do_GET(self) -> None:
        data, span = self.file(), self.headers.get("Range", "")
        lie = self.site.lie if self.path.endswith(self.site.suffix) else ""
        begin, end = 0, len(data)
        if span:
            first, _, last = span.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1, len(data))
        status = 206 if span else 200
        told: dict[str, Any] = {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"} if span else {}
        body = data[begin:end]
        if lie == "length too long":
            told["Content-Length"] = str(len(body) + 99)
            self.close_connection = True
        elif lie == "length too short":
            told["Content-Length"] = str(len(body) // 2)
            self.close_connection = True
        elif lie == "whole file":
            status, body, told = 200, data, {}
        elif lie == "shorter":
            body = body[:-1]
        elif lie == "longer":
            body += b"x"
        elif lie == "other bytes":
            body = bytes(byte ^ 1 for byte in body)
        elif lie == "packed":
            body = gzip.compress(body)
            told["Content-Encoding"] = "gzip"
        elif lie == "packed bomb":
            body = bomb()
            told["Content-Encoding"] = "gzip"
        elif lie == "empty":
            body = b""
        elif lie == "no http":
            self.wfile.write(b"\x00\xff" * 999)
            self.close_connection = True
            return
        elif lie.startswith("to "):
            self.send(302, b"", Location=lie.removeprefix("to ").replace("here", f"{self.path}"))
            return
        elif lie == "endless":
            self.endless(status, **told)
            return
        elif lie == "hang":
            self.site.over.wait(20)
            self.close_connection = True
            return
        elif lie == "drip":
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            while not self.site.over.wait(0.05):
                self.wfile.write(b"x")
            return
        self.send(status, body, **told)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is none of our business."""


class Site:
    """The directory, its URL, and the lie that is told about files of a suffix."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.over, self.lie, self.suffix, self.url = folder, threading.Event(), "", ".tar", ""

    def dataset(self, cache: Path | None, **options: Any) -> IndexedShards:
        options = {"timeout": 2.0, **options}
        return IndexedShards(Remote(self.url, cache_dir=cache, retry=QUICK, **options))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    chance = np.random.default_rng(0)
    made = Site(tmp_path / "site")
    write_tars([(f"s{i}", {"bin": chance.bytes(3000)}) for i in range(COUNT)], made.folder, n_shards=2)
    index_shards(made.folder)
    (made.folder / "manifest.hrs").rename(made.folder / "kept")
    with Server(("127.0.0.1", 0), partial(Liar, site=made)) as server:
        thread = threading.Thread(target=partial(server.serve_forever, 0.01))
        thread.start()
        made.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield made
        finally:
            made.over.set()
            server.shutdown()
            thread.join()


@pytest.fixture(params=["pieces", "cache"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "cache" if request.param == "cache" else None


LIES = [
    "length too long",
    "length too short",
    "whole file",
    "shorter",
    "longer",
    "other bytes",
    "packed",
    "packed bomb",
    "empty",
    "no http",
    "to file:///etc/hostname",
    "to here",
    "to ftp://127.0.0.1/a",
    "endless",
]


# Those by which a server could fill the memory, keep a reader waiting or lead it elsewhere; the others each night.
FEW = ("length too long", "whole file", "other bytes", "packed bomb", "to file:///etc/hostname", "endless", "drip")


def each(lies: Sequence[str]) -> list[Any]:
    return [lie if lie in FEW else pytest.param(lie, marks=pytest.mark.nightly) for lie in lies]


@pytest.mark.parametrize("lie", each([*LIES, "hang", "drip"]))
@pytest.mark.slow
def test_lies_about_a_shard(site: Site, cache: Path | None, lie: str) -> None:
    near = list(IndexedShards(site.folder))
    dataset = site.dataset(cache, timeout=0.5 if lie in ("hang", "drip", "endless") else 5.0)
    site.lie = lie
    if cache is not None and lie == "whole file":  # which is what a cache asks for then
        assert dataset.__getitems__([7, 3]) == [near[7], near[3]]
        return
    with pytest.raises(ShardError) as caught:
        dataset.__getitems__([7, 3])
    assert str(caught.value.shard).startswith(f"{site.url}/")
    assert str(caught.value.shard).endswith(".tar")
    assert len(str(caught.value)) < 1500
    if cache is not None:
        assert not [path for path in cache.iterdir() if path.suffix in (".tar", ".part")]
    site.lie = ""
    assert dataset.__getitems__([7, 3]) == [near[7], near[3]]


@pytest.mark.parametrize("suffix", ["manifest.json", ".hri"])
@pytest.mark.parametrize("lie", each([lie for lie in LIES if lie not in ("whole file", "to here")]))
@pytest.mark.slow
def test_lies_about_small_files(site: Site, cache: Path | None, suffix: str, lie: str) -> None:
    site.lie, site.suffix = lie, suffix
    if suffix == "manifest.json" and lie in ("other bytes", "shorter"):  # the last line break is not missed
        site.lie = "empty"
    with pytest.raises(ShardError) as caught:
        site.dataset(cache, timeout=0.5 if lie == "endless" else 5.0)[7]
    assert site.url in str(caught.value)
    site.lie = ""
    assert site.dataset(cache)[7] == IndexedShards(site.folder)[7]


@pytest.mark.parametrize("lie", each([lie for lie in LIES if lie not in ("whole file", "to here", "endless")]))
def test_lies_about_the_index_of_a_set_are_not_believed(site: Site, cache: Path | None, lie: str) -> None:
    (site.folder / "kept").rename(site.folder / "manifest.hrs")
    site.lie, site.suffix = lie, ".hrs"
    assert site.dataset(cache, timeout=5.0)[7] == IndexedShards(site.folder)[7]


SCRIPT = """
import re, sys
from pathlib import Path
from headrace.webdatamodule import IndexedShards, ShardError
from headrace.webdatamodule import Remote
from headrace.webdatamodule import RetryPolicy
def rss(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
dataset = IndexedShards(Remote(sys.argv[1], retry=RetryPolicy(2, 0.001), timeout=20.0))
dataset[0]
print('opened', flush=True)
input()
Path("/proc/self/clear_refs").write_text("5")
base = rss("VmRSS")
try:
    dataset.__getitems__([7, 30])
except ShardError as error:
    print(rss("VmHWM") - base)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux does")
@pytest.mark.parametrize("lie", ["endless", "packed bomb"])
def test_a_body_without_end_takes_little_memory(site: Site, lie: str) -> None:
    command = [sys.executable, "-c", SCRIPT, site.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "opened\n"
        site.lie = lie
        told, _ = child.communicate("\n")
        assert child.returncode == 0
    assert int(told) < 64 << 20


INDEXES = """
import re, sys
from pathlib import Path
from headrace.webdatamodule import IndexedShards, ShardError
from headrace.webdatamodule import Remote
from headrace.webdatamodule import RetryPolicy
def rss(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
places, cache, action = sys.argv[1].split(), sys.argv[2] or None, sys.argv[3]
def open_all():
    url = places if len(places) > 1 else places[0]
    return IndexedShards(Remote(url, cache_dir=cache, retry=RetryPolicy(1), timeout=20.0))
dataset = open_all() if len(places) == 1 else None
print("opened", flush=True)
input()
Path("/proc/self/clear_refs").write_text("5")
base = rss("VmRSS")
try:
    dataset = dataset or open_all()
    dataset[0] if action == "item" else dataset.sizes("bin")
except ShardError as error:
    print(rss("VmHWM") - base)
    print(error)
"""


def many(site: Site) -> list[str]:
    for path in site.folder.iterdir():
        path.unlink()
    write_tars([(f"s{i}", {"bin": bytes(100)}) for i in range(64)], site.folder, n_shards=16)
    index_shards(site.folder)
    (site.folder / "manifest.hrs").unlink()
    return [f"{site.url}/{path.name}" for path in sorted(site.folder.glob("*.tar"))]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux does")
@pytest.mark.parametrize(
    ("action", "listed"), [("item", False), ("sizes", False), pytest.param("sizes", True, marks=pytest.mark.nightly)]
)
def test_many_indexes_without_end_take_little_memory(site: Site, cache: Path | None, action: str, listed: bool) -> None:
    urls = many(site)
    command = [sys.executable, "-c", INDEXES, " ".join(urls) if listed else site.url, str(cache or ""), action]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "opened\n"
        site.lie, site.suffix = "endless", ".hri"
        told, _ = child.communicate("\n")
        assert child.returncode == 0
    grown, message = told.splitlines()
    assert "more than" in message
    most = (1 << 28) * 5 // 4 if listed else 0  # nobody tells how large an index may be: one at a time has the most
    assert int(grown) < most + (64 << 20)


def test_an_index_may_be_as_large_as_its_shard_makes_it(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for i in range(1000):
            tar.addfile(tarfile.TarInfo(f"{'k' * 900}{i * 7919 % 1000}.{chr(257) * 2000}{i}"))
    index_shards(tmp_path)
    size = (tmp_path / "a.tar.hri").stat().st_size
    assert 1 << 20 < size < most_index_bytes((tmp_path / "a.tar").stat().st_size)


class NoRanges(SimpleHTTPRequestHandler):
    """What `python -m http.server` runs."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_cache_reads_from_a_server_without_ranges(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    write_tars([(f"s{i}", {"bin": bytes([i]) * 300_000}) for i in range(40)], folder, n_shards=2)
    index_shards(folder)
    with Server(("127.0.0.1", 0), partial(NoRanges, directory=str(folder))) as server:
        thread = threading.Thread(target=partial(server.serve_forever, 0.01))
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            far = IndexedShards(Remote(url, cache_dir=tmp_path / "cache", retry=QUICK, timeout=5.0))
            assert far.__getitems__([39, 0, 20]) == IndexedShards(folder).__getitems__([39, 0, 20])
            with pytest.raises(ShardError, match="does not read ranges"):
                IndexedShards(Remote(url, retry=QUICK, timeout=5.0))[5]
            with next(folder.glob("*.tar")).open("r+b") as file:
                file.seek(5_000_000)
                file.write(b"?")
            with pytest.raises(ShardError, match="not those that were indexed"):
                list(IndexedShards(Remote(url, cache_dir=tmp_path / "other", retry=QUICK, timeout=5.0)))
            assert not list((tmp_path / "other").glob("*.part"))
        finally:
            server.shutdown()
            thread.join()
