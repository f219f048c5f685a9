"""Ranges through obstore, whose requests run outside Python: for look-ahead, which reads without it when it fails.

In a process that is forked after obstore has sent a request, its requests never end. So nothing here sends one but in
the workers of a loader.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from headrace.webdatamodule.shards.stores.checked import CheckedStore
from headrace.webdatamodule.shards.stores.fsspec import slow_warning
from headrace.webdatamodule.shards.stores.retries import OBSTORE_RETRY
from headrace.webdatamodule.shards.stores.store import Span, Store, UnboundedBodyError, WrongBytesError
from headrace.webdatamodule.shards.urls import Secrets, is_web, redacted

_TOGETHER = 8  # ranges of a file in one call; obstore asks for ten at a time
_TRIES = 3  # batches that fail one after another before a worker gives up on obstore
_REASON = 300
_FIRST = 20.0  # seconds for the first batch, which in a wrongly forked process never comes
_KEPT = (FileNotFoundError, PermissionError, TimeoutError, UnboundedBodyError, WrongBytesError)  # kinds of errors
_Got = TypeVar("_Got")


class ObstoreStore(Store):
    """Files of a place that obstore knows; for processes that are not forked afterwards.

    Args:
        url: URL of a folder or a file, with what is secret in it.
        options: Options of obstore's store.
        timeout: Limit of one request, in seconds.
        max_connections: Ranges that are asked for at the same time, each of which takes a connection.
    """

    retries = True

    def __init__(self, url: str, options: Mapping[str, Any], timeout: float, max_connections: int) -> None:
        self.url = Secrets(url).name.rstrip("/")
        self._address, self._options, self._timeout = url, dict(options), timeout
        self._max_connections, self._together = max_connections, min(_TOGETHER, max_connections)
        self._begin()

    def _begin(self) -> None:
        self._process, self._made = -1, None
        self.has_answered = False
        self._turn, self._room = asyncio.Lock(), asyncio.Semaphore(self._max_connections)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_made", "_turn", "_room")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def read(self, name: str, limit: int) -> bytes:
        """See `Store`."""

        async def ask() -> bytes:
            answer = await import_module("obstore").get_async(self._made, self._path(name))
            if (size := answer.meta["size"]) > limit:
                raise UnboundedBodyError(f"the file has {size} bytes, more than {limit}")
            return bytes(await answer.bytes_async())

        return self._run(ask)

    def size(self, name: str) -> int:
        """See `Store`."""

        async def ask() -> int:
            size: int = (await import_module("obstore").head_async(self._made, self._path(name)))["size"]
            return size

        return self._run(ask)

    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """See `Store`."""

        async def ask() -> list[bytes]:
            places: dict[str, list[int]] = {}
            for place, (name, _, _) in enumerate(wanted):
                places.setdefault(name, []).append(place)
            most = self._together
            calls = [(name, own[at : at + most]) for name, own in places.items() for at in range(0, len(own), most)]
            with slow_warning([f"{self.url}/{name}" for name in places], self._timeout):
                answers = await asyncio.gather(
                    *(self._call(name, [wanted[at][1:] for at in places]) for name, places in calls)
                )
            got = [b""] * len(wanted)
            for (_, own), parts in zip(calls, answers, strict=True):
                for place, part in zip(own, parts, strict=True):
                    got[place] = part
            return got

        return self._run(ask)

    def _run(self, ask: Callable[[], Coroutine[Any, Any, _Got]]) -> _Got:
        asyn = import_module("fsspec.asyn")  # whose thread begins anew in a process that is forked
        if self._process != os.getpid():
            self._begin()
            self._made, self._process = make_store(self._address, self._options), os.getpid()
        seconds = self._timeout if self.has_answered else min(self._timeout, _FIRST)

        async def within() -> _Got:
            async with asyncio.timeout(seconds):
                return await ask()

        try:
            got: _Got = asyn.sync(asyn.get_loop(), within)
        except Exception as error:  # its text may show the options, passwords included
            kind = next((kind for kind in _KEPT if isinstance(error, kind)), OSError)
            raise kind(_reason(error)) from None
        self.has_answered = True
        return got

    async def _call(self, name: str, spans: Sequence[Span]) -> list[bytes]:
        get = import_module("obstore").get_ranges_async
        begins, ends = (list(bounds) for bounds in zip(*spans, strict=True))
        async with self._turn:  # one after another: two that each wait for the other's room would wait for ever
            for _ in spans:
                await self._room.acquire()
        try:
            # Ranges that lie apart are not merged: look-ahead has merged what it wants.
            parts = await get(self._made, self._path(name), starts=begins, ends=ends, coalesce=0)
        finally:
            for _ in spans:
                self._room.release()
        for part, (begin, end) in zip(parts, spans, strict=True):
            if len(part) != end - begin:
                raise WrongBytesError(f"{len(part)} bytes came, not {end - begin}")
        return [bytes(part) for part in parts]

    def _path(self, name: str) -> str:
        url = name if "://" in name else f"{self.url}/{name}"
        if is_web(url):
            return unquote(urlsplit(url).path).lstrip("/")
        return url.partition("://")[2].partition("/")[2]  # "#", "?" and "%20" are parts of a key


class ObstoreFirst:
    """Reads ranges through obstore, or as otherwise where that fails, for good after three batches in a row.

    Args:
        store: The store; it is given up when it fails.
        otherwise: Reads the ranges that obstore did not, and counts the traffic of both.
    """

    def __init__(self, store: ObstoreStore, otherwise: CheckedStore) -> None:
        self._store: ObstoreStore | None = store
        self._otherwise, self._failed = otherwise, 0

    def ranges_of(self, wanted: Sequence[tuple[str, Span]]) -> list[bytes]:
        """Some ranges of some files, asked for at the same time."""
        store, traffic = self._store, self._otherwise.traffic
        if store is not None:
            traffic.add(requests=len(wanted))
            try:
                got = store.ranges([(url, begin, end) for url, (begin, end) in wanted])
            except Exception as error:
                never = isinstance(error, TimeoutError) and not store.has_answered
                self._failed += _TRIES if never else 1
                if self._failed >= _TRIES:
                    self._store = None
                    _warn(error, never=never)
            else:
                self._failed = 0
                traffic.add(fetched=sum(map(len, got)))
                return got
        return self._otherwise.ranges_of(wanted)


def make_store(url: str, options: Mapping[str, Any]) -> Any:
    """A store of obstore's that all files beside a URL lie in; nothing is sent.

    Raises:
        ImportError: obstore is not installed.
        ValueError: obstore does not know such URLs, or one of the options.
    """
    try:
        stores = import_module("obstore.store")
    except ImportError as error:
        cure = "pip install 'headrace-webdatamodule[obstore]', or leave the argument out"
        raise ImportError(f"obstore= needs the library obstore: {cure}") from error
    scheme, place, _, query, _ = urlsplit(url)
    name = Secrets(url).name
    web = scheme.lower() in ("http", "https")
    if web and query:
        cure = "leave obstore out, then fsspec sends it"
        raise ValueError(f"obstore must be None for URLs with a query, which it does not send, as for {name!r}: {cure}")
    given = {"retry_config": OBSTORE_RETRY, **options}
    if scheme.lower() == "http":
        given["client_options"] = {"allow_http": True, **given.get("client_options", {})}
    make = stores.HTTPStore.from_url if web else stores.from_url
    try:
        return make(f"{scheme}://{place}", **given)
    except Exception as error:  # classes of obstore's own, and TypeError
        reason = _reason(error)
        message = f"obstore must be options of obstore's store for {scheme}://, got {sorted(options)}"
        raise ValueError(f"{message} ({reason}): correct them, or leave obstore out") from None


def _warn(error: Exception, *, never: bool) -> None:
    cure = "correct the options in obstore=, or leave it out"
    if never:
        cure += '; if this process used obstore before the workers were forked, give multiprocessing_context="spawn"'
    message = "obstore failed, so this worker fetches its batches through fsspec, more slowly"
    warnings.warn(f"{message} ({error}): {cure}", stacklevel=2)


def _reason(error: BaseException) -> str:
    """An error in one line; in those below it obstore shows what it was given, passwords included."""
    return redacted(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:_REASON]}")
