"""Bytes from other machines through fsspec: whole files and ranges, no more than were asked for.

fsspec's own HTTP reads whatever a server sends, and does not check that it is the range that was asked for.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import re
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, nullcontext
from importlib import import_module
from itertools import starmap
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.format.tar import BLOCK
from headrace.webdatamodule.shards.index.shard_index import SUFFIX
from headrace.webdatamodule.shards.stores.retries import is_transient
from headrace.webdatamodule.shards.stores.store import Span, Store, UnboundedBodyError, WrongBytesError
from headrace.webdatamodule.shards.urls import Secrets, is_web, redacted, redacted_cause

# In a process that is forked, a file system of the parent must not be cleaned up: to close its connections takes them
# out of the epoll that both share, and the parent would wait for their answers for ever.
_NEVER_COLLECTED: list[Any] = []
_Got = TypeVar("_Got")
# URLs of fsspec's that are chained, such as "simplecache::s3://bucket/a"; not [::1], and no other "::" in a path.
_CHAIN = re.compile(r"::[a-zA-Z][a-zA-Z0-9+.-]*(::|://)")
_RANGE = re.compile(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18})?")
_WINDOW = 32 << 20
_SLOW = 30.0  # seconds after which a process says what it waits for, or a third of the timeout
MAX_CONNECTIONS = 128
_slow_hosts = set[str]()  # that this process has named


class FsspecStore(Store):
    """Files of one file system of fsspec; see `Secrets` for their names. Each process makes its own connections.

    Args:
        urls: URLs with what is secret in them, of a folder or of files.
        options: Options of the file system.
        timeout: Seconds to wait for an answer.
        max_connections: Ranges that are read at the same time.
    """

    def __init__(
        self,
        urls: Sequence[str],
        options: Mapping[str, Any],
        timeout: float,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._secrets = {one.name: one for one in map(Secrets, urls)}
        self.url = next(iter(self._secrets)).rstrip("/")
        self._address, self._options, self._timeout = urls[0], dict(options), timeout
        self._max_connections = max_connections
        self._made: Any = None
        self._room: asyncio.Semaphore | None = None  # for connections
        self._process = -1
        self._turns: dict[int, threading.Lock] = {}  # by the process: one may be held while another begins

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": None, "_room": None, "_process": -1, "_turns": {}}

    @property
    def retries(self) -> bool:  # type: ignore[override]  # known when the file system is made
        """Whether the file system repeats failed requests by itself."""
        return self._made is not None and self._made.async_impl and not _is_http(self._made)

    def read(self, name: str, limit: int) -> bytes:
        """See `Store`."""

        def read(system: Any) -> bytes:
            path = self._path(system, name)
            if not _is_http(system):
                try:
                    return bytes(system.cat_file(path, start=0, end=limit + 1, **self._limit(system)))
                except OSError as error:
                    if error.errno != errno.EINVAL or system.info(path, **self._limit(system)).get("size") != 0:
                        raise
                    return b""  # S3 refuses a range of an empty file
            [got] = _get_all(system, [(path, None)], limit, self._timeout)
            if isinstance(got, BaseException):
                raise got
            return bytes(got)

        return self._use(read)

    def size(self, name: str) -> int | None:
        """See `Store`."""

        def read(system: Any) -> Any:
            path = self._path(system, name)
            if _is_http(system):
                return import_module("fsspec.asyn").sync(system.loop, _size, system, path, self._timeout)
            return system.info(path, **self._limit(system)).get("size")

        size = self._use(read)
        return size if isinstance(size, int) else None

    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> Sequence[bytes | BaseException]:
        """See `Store`."""

        def read(system: Any) -> Any:
            known = {name: self._path(system, name) for name in dict.fromkeys(name for name, _, _ in wanted)}
            if _is_http(system):
                asked = [(known[name], (begin, end)) for name, begin, end in wanted]
                return _get_all(system, asked, 0, self._timeout, room=self._room)
            paths = [known[name] for name, _, _ in wanted]
            begins, ends = [begin for _, begin, _ in wanted], [end for _, _, end in wanted]
            if not system.async_impl:  # where one fails, its connection is of no use for the others
                return system.cat_ranges(paths, begins, ends, on_error="raise")
            options = {"batch_size": self._max_connections, **self._limit(system)}
            return system.cat_ranges(paths, begins, ends, on_error="return", **options)

        got: Sequence[bytes | BaseException] = self._use(read)
        return got

    def download(self, name: str, nbytes: int, file: BinaryIO) -> None:
        """See `Store`; only web servers lack ranges."""
        seconds = self._timeout * (nbytes // _WINDOW + 1)

        def read(system: Any) -> None:
            [got] = _get_all(system, [(self._path(system, name), None)], nbytes, seconds, file)
            if isinstance(got, BaseException):
                raise got

        self._use(read)

    def _limit(self, system: Any) -> dict[str, float]:
        return {"timeout": self._timeout} if system.async_impl else {}

    def _use(self, work: Callable[[Any], _Got]) -> _Got:
        """Call a function of the file system.

        One that is not asynchronous has one connection, which serves one thread at a time, and no limit on the time.
        """
        with self._turns.setdefault(os.getpid(), threading.Lock()):
            if self._process != os.getpid():  # connections do not survive a fork
                self._made = self._within_timeout(lambda: _file_system(self._address, self._options))
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
        url = name if "://" in name else f"{self.url}/{name}"
        first = next(iter(self._secrets.values()))
        secrets = self._secrets.get(url.removesuffix(SUFFIX), first)  # those of a tar are those of its index
        return str(system._strip_protocol(secrets.address(url)))


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
    try:
        async with asyncio.timeout(timeout), _answer(system, path, (0, BLOCK)) as answer:
            if answer.status != 206:
                length: int | None = answer.content_length
                return length
            if (sent := _RANGE.match(answer.headers.get("Content-Range", ""))) is None:
                raise WrongBytesError("the server does not say which range it sends")
            return int(sent[2]) if sent[2] else None
    except Exception as error:
        if getattr(error, "status", None) == 416:  # the first byte cannot be sent: there is none
            return 0
        raise


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
