"""Bytes from other machines, through fsspec."""

from __future__ import annotations

import asyncio
import io
import os
import random
import re
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.index.shard_index import ShardIndex

Asked = TypeVar("Asked")


_LASTING = (
    ShardError,
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    ImportError,
    AttributeError,
    TypeError,
    ValueError,
)

_PASSING = (408, 425, 429)


@dataclass(frozen=True)
class Patience:
    """How often to try, and how long to wait in between.

    Args:
        tries: How often to try in all.
        wait: Seconds before the second try; doubled each time, and up to a half more by chance.
        longest: Seconds between two tries, at most.

    Raises:
        ValueError: A number is not allowed.
    """

    tries: int = 5
    wait: float = 0.2
    longest: float = 10.0

    def __post_init__(self) -> None:
        if self.tries < 1 or self.wait < 0 or self.longest < 0:
            raise ValueError(f"tries must be 1 or more, wait and longest 0 seconds or more, got {self}")

    def seconds(self, tried: int) -> float:
        """How long to wait after some tries.

        Args:
            tried: How many.
        """
        return min(self.longest, self.wait * 2.0 ** (tried - 1)) * random.uniform(1, 1.5)  # noqa: S311 - no secret


def passes(error: BaseException) -> bool:
    """Whether an error may be gone a moment later.

    Args:
        error: What a file system of fsspec raised.

    >>> passes(ConnectionResetError()), passes(FileNotFoundError())
    (True, False)
    """
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in _PASSING
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and cause and (isinstance(cause, OSError) or hasattr(cause, "status")):
        return passes(cause)  # whatever happens on the way to a size, fsspec says that the file is not there
    return isinstance(error, Exception) and not isinstance(error, _LASTING)


def persist(
    ask: Callable[[Sequence[Asked]], Sequence[Got | BaseException]], wanted: Sequence[Asked], patience: Patience
) -> list[Got | BaseException]:
    """Ask for things, and again for those that did not come.

    Args:
        ask: Gives a thing or an error for each one.
        wanted: What to ask for.
        patience: How often.

    Returns:
        The things; errors for those that did not come to the end.
    """
    got: list[Got | BaseException] = list(ask(wanted))
    for tried in range(1, patience.tries):
        failed = [number for number, one in enumerate(got) if isinstance(one, BaseException)]
        if not failed or not all(passes(error) for error in got if isinstance(error, BaseException)):
            break
        time.sleep(patience.seconds(tried))
        for number, one in zip(failed, ask([wanted[number] for number in failed]), strict=True):
            got[number] = one
    return got


Span = tuple[int, int]
Offsets = npt.NDArray[np.int64]
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/")


class WholeFileError(ValueError):
    """More bytes came than were asked for: the server does not know ranges."""


class WrongAnswerError(OSError):
    """A server sent other bytes than were asked for, or packed ones."""


def is_http(system: Any) -> bool:
    """Whether a file system is fsspec's for plain HTTP.

    Args:
        system: Any file system of fsspec.
    """
    try:
        kind: type = import_module("fsspec.implementations.http").HTTPFileSystem
    except ImportError:  # aiohttp is not installed, without which there is none
        return False
    return isinstance(system, kind)


def fetch(
    system: Any, path: str, spans: Sequence[Span | None], most: int, timeout: float, into: BinaryIO | None = None
) -> list[Any]:
    """Read pieces of a file at the same time.

    Args:
        system: fsspec's file system for HTTP.
        path: The URL.
        spans: Begin and end of each piece; None for the whole file.
        most: Bytes that a whole file may have.
        timeout: Seconds for all of them.
        into: A file that the bytes of a single piece are written to, rather than given back.

    Returns:
        The bytes of each, or what went wrong.
    """
    sync = import_module("fsspec.asyn").sync
    made: list[Any] = sync(system.loop, _gather, system, path, spans, most, timeout, into)
    return made


async def _gather(
    system: Any, path: str, spans: Sequence[Span | None], most: int, timeout: float, into: BinaryIO | None
) -> list[Any]:
    async def one(span: Span | None) -> bytes:
        async with asyncio.timeout(timeout):  # ends the request, which a limit on the waiting alone would not
            return await _get(system, path, span, most, into)

    return await asyncio.gather(*map(one, spans), return_exceptions=True)


async def _get(system: Any, path: str, span: Span | None, most: int, into: BinaryIO | None) -> bytes:
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
        most = most if span is None else span[1] - span[0]
        read = io.BytesIO()
        await _body(answer, most, into or read)
        return read.getvalue()  # what was written, not a copy of it


async def _body(answer: Any, most: int, read: BinaryIO) -> None:
    came = 0
    async for chunk in answer.content.iter_any():
        came += len(chunk)
        if came > most:
            message = f"more than {most} bytes came: the server does not read ranges, or the file is too large"
            raise WholeFileError(message)
        read.write(chunk)


def _check_head(status: int, headers: Any, span: Span | None) -> None:
    packing = headers.get("Content-Encoding", "identity")
    if packing not in ("identity", ""):
        raise WrongAnswerError(f"the server packs what it sends as {packing[:40]!r}, unasked: switch that off there")
    if span is None:
        return
    if status != 206 and span[0] > 0:
        raise WholeFileError(f"the server answers {status}, not 206: it does not read ranges")
    told = _RANGE.match(headers.get("Content-Range", ""))
    if told is not None and int(told[1]) != span[0]:
        message = f"other bytes came: from {int(told[1])}, not from {span[0]}"
        raise WrongAnswerError(message)


Got = TypeVar("Got")

_REASON = 500
# Files up to here are read in many threads at the same time, larger ones one after another: nobody knows which of
# them are larger than they should be before they are here.
_SMALL = 1 << 20

_WINDOW = 32 << 20
_REQUEST = 4 << 20


class ShortReadError(OSError):
    """Fewer bytes came than were asked for."""


class Transport:
    """Reads files of one file system; each process makes its own connections.

    Args:
        url: Of a file or directory there.
        options: For fsspec, such as `endpoint_url`; see the file system's class.
        patience: How often to try.
        timeout: Seconds for some requests at once, as far as the file system knows how to stop.

    Raises:
        ShardError: fsspec, or what it needs for such URLs, is not installed, or it does not know the options.
    """

    def __init__(self, url: str, options: Mapping[str, Any], patience: Patience, timeout: float) -> None:
        self.url, self._options, self._patience, self._timeout = url, dict(options), patience, timeout
        self._made: Any = None
        self._process = -1
        self._alone: dict[int, threading.Lock] = {}  # by the process: a lock may be held while another one begins

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_made": None, "_process": -1, "_alone": {}}

    def whole(self, url: str, most: int) -> bytes:
        """All bytes of a file; of several large ones, a process reads one at a time.

        Args:
            url: Where it lies.
            most: How many they may be.

        Raises:
            ShardError: It cannot be read, or is larger.
        """
        data = self._up_to(url, min(most, _SMALL))
        if data is None and most > _SMALL:
            with self._alone.setdefault(os.getpid(), threading.Lock()):
                data = self._up_to(url, most)
        if data is None:
            raise ShardError(f"the file has more than {most} bytes, which no such file should have", shard=url)
        return data

    def copy(self, url: str, nbytes: int, file: BinaryIO) -> None:
        """Write all bytes of a file on a web server into another one, where pieces cannot be had.

        Args:
            url: Where it lies.
            nbytes: How many it should have; more are not read.
            file: Where to write them, from its begin.

        Raises:
            ShardError: It cannot be read, or the other one not be written.
        """
        seconds = self._timeout * (nbytes // _WINDOW + 1)

        def read(system: Any, _: dict[str, float]) -> None:
            file.seek(0)
            (got,) = fetch(system, _path(system, url), [None], nbytes, seconds, file)
            if isinstance(got, BaseException):
                raise got
            if file.tell() < nbytes:
                raise ShortReadError(f"{file.tell()} bytes came, not {nbytes}")

        self._one(url, read)

    def size(self, url: str) -> int:
        """The bytes of a file.

        Args:
            url: Where it lies.

        Raises:
            ShardError: The server does not tell.
        """
        size = self._one(url, lambda system, limit: system.info(_path(system, url), **limit).get("size"))
        if not isinstance(size, int):
            raise ShardError("the server does not tell how large the file is: serve it with its length", shard=url)
        return size

    def ranges(self, url: str, spans: Sequence[Span]) -> list[bytes]:
        """Some pieces of a file, asked for at the same time.

        Args:
            url: Where it lies.
            spans: Begin and end of each piece.

        Returns:
            Their bytes, as many as were asked for.

        Raises:
            ShardError: One of them did not come; it names the URL, the offset and the reason.
        """
        if not spans:
            return []
        got = persist(lambda wanted: self._ask(url, wanted), spans, self._patience)
        for (begin, end), one in zip(spans, got, strict=True):
            if isinstance(one, BaseException):
                raise self._failed(f"bytes {begin} to {end} cannot be read", one, url, begin) from one
        return [one for one in got if isinstance(one, bytes)]

    def _ask(self, url: str, spans: Sequence[Span]) -> list[bytes | BaseException]:
        try:
            system = self._system()
            path = _path(system, url)
            begins, ends = (list(bounds) for bounds in zip(*spans, strict=True))
            if is_http(system):
                got = fetch(system, path, spans, 0, self._timeout)
            else:
                options = self._limit(system)
                got = system.cat_ranges([path] * len(spans), begins, ends, on_error="return", **options)
        except Exception as error:  # each file system raises its own
            return [error] * len(spans)
        return [_measured(one, *span) for one, span in zip(got, spans, strict=True)]

    def _up_to(self, url: str, most: int) -> bytes | None:
        return self._one(url, lambda system, limit: self._all(system, url, most, limit))

    def _all(self, system: Any, url: str, most: int, limit: dict[str, float]) -> bytes | None:
        path = _path(system, url)
        if not is_http(system):
            data = bytes(system.cat_file(path, start=0, end=most + 1, **limit))
            return data if len(data) <= most else None
        (got,) = fetch(system, path, [None], most, self._timeout)
        if isinstance(got, WholeFileError):
            return None
        if isinstance(got, BaseException):
            raise got
        return bytes(got)

    def _one(self, url: str, read: Callable[[Any, dict[str, float]], Got]) -> Got:
        def ask(_: Sequence[None]) -> list[Got | BaseException]:
            try:
                system = self._system()
                return [read(system, self._limit(system))]
            except Exception as error:  # each file system raises its own
                return [error]

        (got,) = persist(ask, [None], self._patience)
        if isinstance(got, BaseException):
            raise self._failed("the file cannot be read", got, url, None) from got
        return got

    def _failed(self, what: str, error: BaseException, url: str, offset: int | None) -> ShardError:
        if isinstance(error, ShardError):
            return error
        reason = f"{type(error).__name__}: {str(error)[:_REASON]}"  # some quote all that came
        if error.__cause__ is not None:
            reason += f" ({type(error.__cause__).__name__}: {str(error.__cause__)[:_REASON]})"
        tries = f"after {self._patience.tries} tries" if passes(error) else "which another try would not change"
        return ShardError(f"{what}, {tries}: {reason}", shard=url, offset=offset)

    def _limit(self, system: Any) -> dict[str, float]:
        return {"timeout": self._timeout} if system.async_impl else {}

    def _system(self) -> Any:
        if self._process != os.getpid():  # connections do not survive a fork
            self._made, self._process = _file_system(self.url, self._options), os.getpid()
        return self._made


def _measured(got: Any, begin: int, end: int) -> bytes | BaseException:
    if isinstance(got, BaseException):
        return got
    if len(got) < end - begin:
        return ShortReadError(f"{len(got)} bytes came, not {end - begin}")
    if len(got) > end - begin:
        return WholeFileError(f"{len(got)} bytes came, not {end - begin}: the server does not read ranges")
    return bytes(got)


def _path(system: Any, url: str) -> str:
    return str(system._strip_protocol(url))


def _file_system(url: str, options: Mapping[str, Any]) -> Any:
    try:
        core = import_module("fsspec.core")
    except ImportError as error:
        cure = "pip install 'headrace-webdatamodule[remote]'"
        raise ShardError(f"shards at URLs need the library fsspec: {cure}, or copy them here", shard=url) from error
    try:
        return core.url_to_fs(url, **options)[0]
    except (ImportError, TypeError, ValueError) as error:
        message = f"there is no way to such a URL with these options ({type(error).__name__}: {error})"
        raise ShardError(f"{message}: install what it needs, or correct one of them", shard=url) from error


def coalesce(begins: Offsets, ends: Offsets, *, gap: int, most: int) -> list[Span]:
    """Put spans of bytes together.

    Args:
        begins: Where they begin, shape [n], in any order, repeated or not.
        ends: Where they end, shape [n].
        gap: Bytes between two spans that may be read in vain.
        most: Bytes of what is put together, at most; a single span may have more.

    Returns:
        Ascending spans. Each of those given lies in one of them, those without bytes aside.

    >>> coalesce(np.array([900, 0, 100]), np.array([950, 50, 200]), gap=50, most=1000)
    [(0, 200), (900, 950)]
    """
    some = ends > begins
    order = np.lexsort((ends[some], begins[some]))
    made: list[Span] = []
    for begin, end in zip(begins[some][order].tolist(), ends[some][order].tolist(), strict=True):
        if made:
            first, last = made[-1]
            if begin < last or (begin - last <= gap and max(last, end) - first <= most):
                made[-1] = first, max(last, end)
                continue
        made.append((begin, end))
    return made


class Pieces:
    """Some pieces of a file, which give slices as all of its bytes would.

    Args:
        spans: Where they lie: ascending, apart from one another.
        read: Their bytes.

    >>> pieces = Pieces([(0, 4), (10, 12)], [b"abcd", b"ef"])
    >>> pieces[1:3], pieces[10:12], pieces[7:7]
    (b'bc', b'ef', b'')
    """

    def __init__(self, spans: Sequence[Span], read: Sequence[bytes]) -> None:
        self._begins = [begin for begin, _ in spans]
        self._read = read

    def __getitem__(self, wanted: slice) -> bytes:
        begin, end = wanted.start, wanted.stop
        if begin >= end:
            return b""
        number = bisect_right(self._begins, begin) - 1
        first = self._begins[number] if number >= 0 else 0
        if number < 0 or end - first > len(self._read[number]):
            raise LookupError(f"bytes {begin} to {end} were not read")
        return self._read[number][begin - first : end - first]


def check_far(index: ShardIndex, transport: Transport) -> None:
    """See by its size and three short pieces whether a shard on another machine is the one that was indexed.

    Args:
        index: Of the shard; it names the URL.
        transport: Reads there.

    Raises:
        ShardError: It cannot be read.
        StaleIndexError: It is another one.
    """
    size = transport.size(index.shard)
    begins, ends = np.array(index.fingerprint_ranges() if size == index.shard_bytes else [(0, 0)], np.int64).T
    spans = coalesce(begins, ends, gap=0, most=_REQUEST)
    pieces = Pieces(spans, transport.ranges(index.shard, spans))
    index.check_shard(size, lambda begin, end: pieces[begin:end])
