"""Bytes from other machines through fsspec: whole files and ranges, no more than were asked for, and failed ones again.

fsspec's own HTTP reads whatever a server sends, and does not check that it is the range that was asked for.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import threading
import warnings
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, nullcontext
from copy import copy
from importlib import import_module
from itertools import starmap
from typing import Any, BinaryIO, NamedTuple, TypeVar
from urllib.parse import urlsplit

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.format.tar import BLOCK
from headrace.webdatamodule.shards.index.shard_index import SUFFIX, ShardIndex
from headrace.webdatamodule.shards.remote.retries import RetryPolicy, is_transient, retry
from headrace.webdatamodule.shards.urls import Secrets, is_web, redacted, redacted_cause

Span = tuple[int, int]
# In a process that is forked, a file system of the parent must not be cleaned up: to close its connections takes them
# out of the epoll that both share, and the parent would wait for their answers for ever.
_NEVER_COLLECTED: list[Any] = []
_Got = TypeVar("_Got")
# URLs of fsspec's that are chained, such as "simplecache::s3://bucket/a"; not [::1], and no other "::" in a path.
_CHAIN = re.compile(r"::[a-zA-Z][a-zA-Z0-9+.-]*(::|://)")
_RANGE = re.compile(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18})?")
_REASON = 500
_BEGIN = 80  # bytes of a wrong file that are shown
_BLANK = b"\xef\xbb\xbf \t\r\n"
# Files up to here are read in many threads at the same time, larger ones one after another: nobody knows which of
# them are larger than they should be before they are here.
_SMALL = 1 << 20
_WINDOW = 32 << 20
_REQUEST = 4 << 20
_SLOW = 30.0  # seconds after which a process says what it waits for, or a third of the timeout
MAX_CONNECTIONS = 128
_slow_hosts = set[str]()  # that this process has named


class UnboundedBodyError(ValueError):
    """More bytes came than were asked for: the server does not read ranges."""


class WrongBytesError(OSError):
    """A server sent other bytes than were asked for, or fewer, or compressed ones."""


class Traffic(NamedTuple):
    """Counts of remote reads: requests, bytes received, bytes of the samples that were read, and those from a cache."""

    requests: int = 0
    fetched: int = 0
    used: int = 0
    cached: int = 0

    def __add__(self, other: tuple[int, ...]) -> Traffic:  # type: ignore[override]  # the sum of each number
        return Traffic(*map(sum, zip(self, other, strict=True)))


class TrafficCounter:
    """Adds up traffic from threads; each process for itself."""

    def __init__(self) -> None:
        self._process, self._lock, self._total = os.getpid(), threading.Lock(), Traffic()

    def __reduce__(self) -> tuple[type[TrafficCounter], tuple[()]]:
        return TrafficCounter, ()

    def add(self, requests: int = 0, fetched: int = 0, used: int = 0, cached: int = 0) -> None:
        """Count some."""
        if self._process != os.getpid():
            self.__init__()  # type: ignore[misc]  # what the parent counted is the parent's
        with self._lock:
            self._total += (requests, fetched, used, cached)

    def take(self) -> Traffic:
        """The sum since this was called last."""
        self.add()
        with self._lock:
            total, self._total = self._total, Traffic()
        return total


class RemoteFiles:
    """Reads files of one file system, given by their names; see `Secrets`. Each process makes its own connections."""

    def __init__(
        self,
        urls: Sequence[str],
        options: Mapping[str, Any],
        retry: RetryPolicy,
        timeout: float,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._url, self._options, self._retry, self._timeout = urls[0], dict(options), retry, timeout
        self._secrets = {one.name: one for one in map(Secrets, urls)}
        self._max_connections = max_connections
        self._made: Any = None
        self._room: asyncio.Semaphore | None = None  # for connections
        self._process = -1
        self.traffic = TrafficCounter()  # of shards
        self._whole_only = set[str]()  # hosts that were asked for ranges and sent whole files
        # By the process: a lock may be held while another one begins.
        self._one_large: dict[int, threading.Lock] = {}
        self._turns: dict[int, threading.Lock] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": None, "_room": None, "_process": -1, "_one_large": {}, "_turns": {}}

    def read(self, url: str, most: int) -> bytes:
        """All bytes of a file; of several large ones, a process reads one at a time."""
        data = self._up_to(url, min(most, _SMALL))
        if data is None and most > _SMALL:
            with self._one_large.setdefault(os.getpid(), threading.Lock()):
                data = self._up_to(url, most)
        if data is None:
            raise ShardError(f"the file has more than {most} bytes, which no such file should have", shard=url)
        return data

    def read_as(self, url: str, most: int, make: Callable[[bytes], _Got]) -> _Got:
        """A small file as what `make` makes of all its bytes; it is fetched once more when they do not fit.

        One answer may be damaged, or the page of a proxy, though its status and its length say that all is well.
        """
        attempts = min(2, self._retry.max_attempts)
        for _ in range(attempts):
            data = self.read(url, most)
            try:
                return make(data)
            except ShardError as error:
                failed = copy(error)  # its traceback would keep the data
            nbytes, begin = len(data), data.lstrip(_BLANK)[:_BEGIN]
            del data
        tried = f"after {attempts} attempts" if attempts > 1 else "at the first attempt"
        if begin.startswith(b"<"):
            failed.message = (
                f"the server sent a web page for {url}, {tried}, beginning {begin!r}: correct the URL. Where it is"
                " a login page or that of a proxy, give credentials in storage_options, or let the proxy pass it"
            )
        else:
            failed.message += (
                f". The server sent it so for {url}, {tried}: {nbytes} bytes, beginning {begin!r}. Compare them with"
                " the file where the shards were written, and copy it again; index the shards there if it is the same"
            )
        raise failed

    def download(self, url: str, nbytes: int, file: BinaryIO) -> None:
        """Write all bytes of a file on a web server that does not read ranges into another file."""
        seconds = self._timeout * (nbytes // _WINDOW + 1)

        def read(system: Any, path: str) -> None:
            file.seek(0)
            [got] = _get_all(system, [(path, None)], nbytes, seconds, file)
            self.traffic.add(requests=1, fetched=file.tell())
            if isinstance(got, BaseException):
                raise got
            if file.tell() < nbytes:
                raise WrongBytesError(f"{file.tell()} bytes came, not {nbytes}")

        self._one(url, read)

    def size(self, url: str) -> int:
        """The bytes of a file."""

        def read(system: Any, path: str) -> Any:
            if _is_http(system):
                return import_module("fsspec.asyn").sync(system.loop, _size, system, path, self._timeout)
            return system.info(path, **self._limit(system)).get("size")

        size = self._one(url, read)
        if not isinstance(size, int):
            raise ShardError("the server does not say how large the file is: serve it with its length", shard=url)
        return size

    def sends_whole_files(self, url: str) -> bool:
        """Whether the host of a URL was asked for a range before, and sent the whole file."""
        return _host(url) in self._whole_only

    def ranges(self, url: str, spans: Sequence[Span]) -> list[bytes]:
        """Some ranges of a file, asked for at the same time."""
        return self.ranges_of([(url, span) for span in spans])

    def ranges_of(self, wanted: Sequence[tuple[str, Span]]) -> list[bytes]:
        """Some ranges of some files, asked for at the same time."""
        if not wanted:
            return []
        got = retry(self._ask, wanted, self._retry, self._attempts)
        for (url, (begin, end)), one in zip(wanted, got, strict=True):
            if isinstance(one, UnboundedBodyError):
                self._whole_only.add(_host(url))
            if isinstance(one, BaseException):
                failed = self._failed(f"bytes {begin} to {end} cannot be read", one, url, begin)
                raise failed from redacted_cause(one)
        return [one for one in got if isinstance(one, bytes)]

    def parts(self, url: str, spans: Sequence[Span], max_gap: int = 0) -> KnownParts:
        """Some ranges of a file, of which those are merged that are no more than `max_gap` bytes apart."""
        begins, ends = ([span[side] for span in spans if span[0] < span[1]] for side in (0, 1))
        merge = import_module("fsspec.utils").merge_offset_ranges
        _, begins, ends = merge([url] * len(begins), begins, ends, max_gap=max_gap, max_block=_REQUEST)
        merged = list(zip(begins, ends, strict=True))
        return KnownParts(dict(zip(merged, self.ranges(url, merged), strict=True)))

    def check_shard(self, index: ShardIndex) -> None:
        """Check by its size and three short pieces whether a shard is the one that was indexed."""
        size = self.size(index.shard)
        wanted = index.fingerprint_ranges() if size == index.shard_bytes else [(0, min(BLOCK, size))]
        parts = self.parts(index.shard, wanted)
        index.check_shard(size, lambda begin, end: parts[begin:end])

    def _ask(self, wanted: Sequence[tuple[str, Span]]) -> list[bytes | BaseException]:
        spans = [span for _, span in wanted]

        def read(system: Any) -> Any:
            known = {url: self._path(system, url) for url in dict.fromkeys(url for url, _ in wanted)}
            paths = [known[url] for url, _ in wanted]
            if _is_http(system):
                return _get_all(system, list(zip(paths, spans, strict=True)), 0, self._timeout, room=self._room)
            begins, ends = (list(bounds) for bounds in zip(*spans, strict=True))
            if not system.async_impl:  # where one fails, its connection is of no use for the others
                return system.cat_ranges(paths, begins, ends, on_error="raise")
            options = {"batch_size": self._max_connections, **self._limit(system)}
            return system.cat_ranges(paths, begins, ends, on_error="return", **options)

        try:
            got = self._use(read)
        except Exception as error:  # each file system raises its own
            return [error] * len(wanted)
        finally:
            self.traffic.add(requests=len(wanted))
        measured = [_measured(one, end - begin) for one, (begin, end) in zip(got, spans, strict=True)]
        self.traffic.add(fetched=sum(len(one) for one in measured if isinstance(one, bytes)))
        return measured

    def _up_to(self, url: str, most: int) -> bytes | None:
        def read(system: Any, path: str) -> bytes | None:
            if not _is_http(system):
                data = bytes(system.cat_file(path, start=0, end=most + 1, **self._limit(system)))
                return data if len(data) <= most else None
            [got] = _get_all(system, [(path, None)], most, self._timeout)
            if isinstance(got, UnboundedBodyError):
                return None
            if isinstance(got, BaseException):
                raise got
            return bytes(got)

        return self._one(url, read)

    def _one(self, url: str, read: Callable[[Any, str], _Got]) -> _Got:
        def ask(_: Sequence[None]) -> list[_Got | BaseException]:
            try:
                return [self._use(lambda system: read(system, self._path(system, url)))]
            except Exception as error:  # each file system raises its own
                return [error]

        [got] = retry(ask, [None], self._retry, self._attempts)
        if isinstance(got, BaseException):
            raise self._failed("the file cannot be read", got, url, None) from redacted_cause(got)
        return got

    def _failed(self, what: str, error: BaseException, url: str, offset: int | None) -> ShardError:
        if isinstance(error, ShardError):
            return error
        reason = f"{type(error).__name__}: {str(error)[:_REASON]}"  # some quote all that came
        if isinstance(error, TimeoutError) and not str(error):
            reason = f"no answer within {self._timeout:g} seconds"
        elif error.__cause__ is not None:
            reason += f" ({type(error.__cause__).__name__}: {str(error.__cause__)[:_REASON]})"
        reason = redacted(reason)
        attempts = "which asking again would not change"
        if is_transient(error):
            attempts = f"after {self._attempts()} attempts"
            if self._attempts() == self._retry.max_attempts:  # else a file system has retries of its own
                more = max(12, self._attempts() + 5)
                reason += f"; to wait longer for the server, give Remote(retry=RetryPolicy(max_attempts={more}))"
        if isinstance(error, UnboundedBodyError):
            cure = "give cache_dir, and cache_bytes as large as all shards (and no cache_unit='sample')"
            reason += f"; {cure}, or serve them where ranges are read"
        return ShardError(f"{what}, {attempts}: {reason}", shard=url, offset=offset)

    def _attempts(self) -> int:
        retries = self._made is not None and self._made.async_impl and not _is_http(self._made)  # by itself
        return min(2, self._retry.max_attempts) if retries else self._retry.max_attempts

    def _limit(self, system: Any) -> dict[str, float]:
        return {"timeout": self._timeout} if system.async_impl else {}

    def _use(self, work: Callable[[Any], _Got]) -> _Got:
        """Call a function of the file system.

        One that is not asynchronous has one connection, which serves one thread at a time, and no limit on the time.
        """
        with self._turns.setdefault(os.getpid(), threading.Lock()):
            if self._process != os.getpid():  # connections do not survive a fork
                self._made = self._within_timeout(lambda: _file_system(self._url, self._options))
                self._process, self._room = os.getpid(), asyncio.Semaphore(self._max_connections)
                if self._made.async_impl and not any(made is self._made for made in _NEVER_COLLECTED):
                    _NEVER_COLLECTED.append(self._made)
            system = self._made
            if not system.async_impl:
                try:
                    return self._within_timeout(lambda: work(system))
                except BaseException as error:
                    if is_transient(error) or not isinstance(error, Exception):  # such as Ctrl-C
                        self._process = -1  # the connection may be broken, or busy
                    raise
        return work(system)

    def _within_timeout(self, work: Callable[[], _Got]) -> _Got:
        """Call a function in a thread; one that takes too long is left alone there."""
        future = Future[_Got]()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="headrace file system", daemon=True).start()
        return future.result(self._timeout)

    def _path(self, system: Any, name: str) -> str:
        """The path of a file in the file system."""
        first = next(iter(self._secrets.values()))
        secrets = self._secrets.get(name.removesuffix(SUFFIX), first)  # those of a tar are those of its index
        return str(system._strip_protocol(secrets.address(name)))


@contextmanager
def slow_warning(urls: Collection[str], timeout: float) -> Iterator[None]:
    """Warn, once for a host, when the answers to some requests take long; within a coroutine."""

    def warn() -> None:
        if (host := _host(next(iter(urls)))) in _slow_hosts:
            return
        _slow_hosts.add(host)
        cure = "a small server may drop connections, then give Remote fewer, such as max_connections=8"
        message = f"{host} has not answered all of {len(urls)} requests for {seconds:g} seconds"
        warnings.warn(f"{message}, each is given up after {timeout:g}: {cure}", stacklevel=2)

    seconds = min(_SLOW, timeout / 3)
    waiting = asyncio.get_running_loop().call_later(seconds, warn)
    try:
        yield
    finally:
        waiting.cancel()


class KnownParts:
    """Some parts of a file, which give slices as all of its bytes would; each slice lies in one of them."""

    def __init__(self, data: Mapping[Span, bytes]) -> None:
        self.data = data
        ordered = sorted(data.items())
        self._begins, self._parts = [begin for (begin, _), _ in ordered], [part for _, part in ordered]

    def __getitem__(self, wanted: slice) -> bytes:
        if wanted.start >= wanted.stop:
            return b""
        number = bisect_right(self._begins, wanted.start) - 1
        begin = self._begins[number]
        return self._parts[number][wanted.start - begin : wanted.stop - begin]

    def holds(self, span: Span) -> bool:
        """Whether a range lies in one of the parts."""
        number = bisect_right(self._begins, span[0]) - 1
        return span[0] >= span[1] or (number >= 0 and span[1] <= self._begins[number] + len(self._parts[number]))


def _measured(got: Any, nbytes: int) -> bytes | BaseException:
    if isinstance(got, BaseException):
        return got
    if len(got) < nbytes:
        return WrongBytesError(f"{len(got)} bytes came, not {nbytes}")
    if len(got) > nbytes:
        return UnboundedBodyError(f"{len(got)} bytes came, not {nbytes}: the server does not read ranges")
    return bytes(got)


def _host(url: str) -> str:
    return urlsplit(Secrets(url).name).netloc


def _file_system(url: str, options: Mapping[str, Any]) -> Any:
    try:
        if _CHAIN.search(url):
            return import_module("fsspec.core").url_to_fs(url, skip_instance_cache=True, **options)[0]
        kind = import_module("fsspec").get_filesystem_class(url.partition("://")[0].lower())
        if is_web(url) and "get_client" not in options:  # proxies of the environment, as all other clients use them
            options = {**options, "client_kwargs": {"trust_env": True, **options.get("client_kwargs", {})}}
        # fsspec keeps what it made for a thread, and takes threads for the same whose numbers are.
        own = {"skip_instance_cache": not kind.async_impl, **kind._get_kwargs_from_urls(url)}
        return kind(**{**own, **options})
    except ImportError as error:
        message = f"shards at such a URL need a library ({redacted(str(error))}): {_cure(url)}"
        raise ShardError(message, shard=Secrets(url).name) from redacted_cause(error)
    except (TypeError, ValueError) as error:
        message = f"fsspec cannot open such a URL with these options ({type(error).__name__}: {redacted(str(error))})"
        raise ShardError(f"{message}: correct one of them", shard=Secrets(url).name) from redacted_cause(error)


def _cure(url: str) -> str:
    """What to install for a URL; of chained ones, such as "simplecache::s3://", for the last."""
    scheme = url.partition("://")[0].rpartition("::")[2]
    if scheme in ("s3", "s3a"):
        return 'pip install "headrace-webdatamodule[s3]"'
    cure = 'pip install "headrace-webdatamodule[remote]"'
    return cure if scheme in ("http", "https") else f"{cure}, and what it names"


# HTTP: a body that ends at the length that was asked for


def _is_http(system: Any) -> bool:
    try:
        kind: type = import_module("fsspec.implementations.http").HTTPFileSystem
    except ImportError:  # aiohttp is not installed, without which there is none
        return False
    return isinstance(system, kind)


def _get_all(
    system: Any,
    wanted: Sequence[tuple[str, Span | None]],
    most: int,
    timeout: float,
    into: BinaryIO | None = None,
    room: asyncio.Semaphore | None = None,
) -> list[Any]:
    """Ranges of files at the same time, or (None) the whole file of at most so many bytes; errors in their place."""

    async def one(path: str, span: Span | None) -> bytes:
        async with asyncio.timeout(timeout):  # ends the request, which a limit on the waiting alone would not
            async with room or nullcontext():
                return await _get(system, path, span, most, into or io.BytesIO())

    async def gather() -> list[Any]:
        with nullcontext() if room is None else slow_warning([path for path, _ in wanted], timeout):
            return await asyncio.gather(*starmap(one, wanted), return_exceptions=True)

    made: list[Any] = import_module("fsspec.asyn").sync(system.loop, gather)
    return made


@asynccontextmanager
async def _answer(system: Any, path: str, span: Span | None) -> AsyncIterator[Any]:
    """The answer to a request, its head checked."""
    options = dict(system.kwargs)
    headers = {**options.pop("headers", {}), "Accept-Encoding": "identity"}
    if span is not None:
        headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
    session = await system.set_session()
    async with session.get(system.encode_url(path), headers=headers, **options) as answer:
        if answer.status == 404:
            raise FileNotFoundError(path)
        answer.raise_for_status()
        _check_head(answer.status, answer.headers, span)
        yield answer


async def _size(system: Any, path: str, timeout: float) -> int | None:
    """The bytes of a file, from the answer to a request for the first ones: a signature may be for GET alone."""
    async with asyncio.timeout(timeout), _answer(system, path, (0, BLOCK)) as answer:
        if answer.status != 206:
            length: int | None = answer.content_length
            return length
        if (sent := _RANGE.match(answer.headers.get("Content-Range", ""))) is None:
            raise WrongBytesError("the server does not say which range it sends")
        return int(sent[2]) if sent[2] else None


async def _get(system: Any, path: str, span: Span | None, most: int, into: BinaryIO) -> bytes:
    most = most if span is None else span[1] - span[0]
    async with _answer(system, path, span) as answer:
        came = 0
        if span is None and (answer.content_length or 0) > most:
            raise UnboundedBodyError(f"the file has {answer.content_length} bytes, more than {most}")
        async for chunk in answer.content.iter_any():
            came += len(chunk)
            if came > most:
                raise UnboundedBodyError(
                    f"more than {most} bytes came: the server does not read ranges, or the file is too large"
                )
            into.write(chunk)
    return into.getvalue() if isinstance(into, io.BytesIO) else b""  # what was written, not a copy of it


def _check_head(status: int, headers: Any, span: Span | None) -> None:
    encoding = headers.get("Content-Encoding", "")
    # "aws-chunked" is how an object was uploaded; object stores keep the name, and send the object without it.
    if {name.strip().lower() for name in encoding.split(",")} - {"", "identity", "aws-chunked"}:
        message = f"the server compresses what it sends as {encoding[:40]!r}, unasked"
        raise WrongBytesError(f"{message}: switch that off there")
    if span is None:
        return
    if status != 206 and span[0] > 0:
        raise UnboundedBodyError(f"the server answers {status}, not 206: it does not read ranges")
    sent = _RANGE.match(headers.get("Content-Range", ""))
    if sent is not None and int(sent[1]) != span[0]:
        raise WrongBytesError(f"other bytes came: from {int(sent[1])}, not from {span[0]}")
