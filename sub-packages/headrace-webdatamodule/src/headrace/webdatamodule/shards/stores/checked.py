"""A store as readers use it: it repeats what failed, compares lengths, counts traffic and names faults."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from copy import copy
from mmap import mmap
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.stores.retries import RetryPolicy, is_transient, retry
from headrace.webdatamodule.shards.stores.store import (
    KnownParts,
    Span,
    Store,
    StoreError,
    TrafficCounter,
    UnboundedBodyError,
    WrongBytesError,
    merge,
)
from headrace.webdatamodule.shards.urls import Secrets, redacted, redacted_cause

_Got = TypeVar("_Got")
_REASON = 500
_BEGIN = 80  # bytes of a wrong file that are shown
_BLANK = b"\xef\xbb\xbf \t\r\n"
# Files up to here are read in many threads at the same time, larger ones one after another: nobody knows which of
# them are larger than they should be before they are here.
_SMALL = 1 << 20


class CheckedStore:
    """Reads files of a store, given by their URLs without secrets.

    Args:
        store: Reads the bytes.
        policy: How to repeat failed requests.
        timeout: Seconds that the store waits for an answer; for texts.
    """

    def __init__(self, store: Store, policy: RetryPolicy, timeout: float) -> None:
        self._store, self._policy, self._timeout = store, policy, timeout
        self._prefix = store.url.rstrip("/") + "/"
        self.traffic = TrafficCounter()  # of shards
        self._whole_only = set[str]()  # hosts that were asked for ranges and sent whole files
        self._one_large: dict[int, threading.Lock] = {}  # by the process: one may be held while another begins

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_one_large": {}}

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
        attempts = min(2, self._policy.max_attempts)
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
        """Write all bytes of a file into another one, where the server does not read ranges."""

        def read(name: str) -> None:
            file.seek(0)
            try:
                self._store.download(name, nbytes, file)
            finally:
                self.traffic.add(requests=1, fetched=file.tell())
            if file.tell() != nbytes:
                raise WrongBytesError(f"{file.tell()} bytes came, not {nbytes}")

        self._one(url, read)

    def size(self, url: str) -> int:
        """The bytes of a file."""
        size = self._one(url, self._store.size)
        if size is None:
            raise ShardError("the server does not say how large the file is: serve it with its length", shard=url)
        return size

    def map(self, url: str) -> mmap | bytes | None:
        """A file mapped into memory; None where ranges have to be read."""
        return self._one(url, self._store.map)

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
        got = retry(self._ask, wanted, self._policy, self._attempts)
        for (url, (begin, end)), one in zip(wanted, got, strict=True):
            if isinstance(one, UnboundedBodyError):
                self._whole_only.add(_host(url))
            if isinstance(one, BaseException):
                failed = self._failed(f"bytes {begin} to {end} cannot be read", one, url, begin)
                raise failed from redacted_cause(one)
        return [one for one in got if isinstance(one, bytes)]

    def parts(self, url: str, spans: Sequence[Span]) -> KnownParts:
        """Some ranges of a file, merged; see `merge`."""
        merged = merge({url: spans})[url]
        return KnownParts(dict(zip(merged, self.ranges(url, merged), strict=True)))

    def _ask(self, wanted: Sequence[tuple[str, Span]]) -> list[bytes | BaseException]:
        try:
            got = self._store.ranges([(self._name(url), begin, end) for url, (begin, end) in wanted])
        except Exception as error:  # each store raises its own
            return [error] * len(wanted)
        finally:
            self.traffic.add(requests=len(wanted))
        measured = [_measured(one, end - begin) for one, (_, (begin, end)) in zip(got, wanted, strict=True)]
        self.traffic.add(fetched=sum(len(one) for one in measured if isinstance(one, bytes)))
        return measured

    def _up_to(self, url: str, most: int) -> bytes | None:
        def read(name: str) -> bytes | None:
            try:
                data = self._store.read(name, most)
            except UnboundedBodyError:
                return None
            return data if len(data) <= most else None

        return self._one(url, read)

    def _one(self, url: str, read: Callable[[str], _Got]) -> _Got:
        def ask(_: Sequence[None]) -> list[_Got | BaseException]:
            try:
                return [read(self._name(url))]
            except Exception as error:  # each store raises its own
                return [error]

        [got] = retry(ask, [None], self._policy, self._attempts)
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
            if self._attempts() == self._policy.max_attempts:  # else the store has retries of its own
                more = max(12, self._attempts() + 5)
                reason += f"; to wait longer for the server, give Remote(retry=RetryPolicy(max_attempts={more}))"
        lacks_ranges = isinstance(error, UnboundedBodyError)
        if lacks_ranges:
            cure = "give cache_dir, and cache_bytes as large as all shards (and no cache_unit='sample')"
            reason += f"; {cure}, or serve them where ranges are read"
        status = getattr(error, "status", None)
        return StoreError(
            f"{what}, {attempts}: {reason}",
            shard=url,
            offset=offset,
            missing=isinstance(error, FileNotFoundError),
            status=status if isinstance(status, int) else None,
            lacks_ranges=lacks_ranges,
        )

    def _attempts(self) -> int:
        return min(2, self._policy.max_attempts) if self._store.retries else self._policy.max_attempts

    def _name(self, url: str) -> str:
        return url.removeprefix(self._prefix)


def _measured(got: bytes | BaseException, nbytes: int) -> bytes | BaseException:
    if isinstance(got, BaseException):
        return got
    if len(got) < nbytes:
        return WrongBytesError(f"{len(got)} bytes came, not {nbytes}")
    if len(got) > nbytes:
        return UnboundedBodyError(f"{len(got)} bytes came, not {nbytes}: the server does not read ranges")
    return bytes(got)


def _host(url: str) -> str:
    return urlsplit(Secrets(url).name).netloc
