"""Bytes from other machines, through fsspec."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, BinaryIO, TypeVar

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.remote.bounded import WholeFileError, fetch, is_http
from headrace.webdatamodule.shards.remote.coalescing import Span
from headrace.webdatamodule.shards.remote.retrying import Patience, passes, persist

Got = TypeVar("Got")
_REASON = 500
# Files up to here are read in many threads at the same time, larger ones one after another: nobody knows which of
# them are larger than they should be before they are here.
_SMALL = 1 << 20
_WINDOW = 32 << 20


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
