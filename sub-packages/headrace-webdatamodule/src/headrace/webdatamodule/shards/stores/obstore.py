"""Ranges through obstore, whose requests run outside Python: for look-ahead, which reads without it when it fails.

In a process that is forked after obstore has sent a request, its requests never end. So nothing here sends one but in
the workers of a loader.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from headrace.webdatamodule.shards.stores.fsspec import slow_warning
from headrace.webdatamodule.shards.stores.retries import OBSTORE_RETRY
from headrace.webdatamodule.shards.stores.store import Span, TrafficCounter, WrongBytesError
from headrace.webdatamodule.shards.urls import Secrets, redacted

_TOGETHER = 8  # ranges of a file in one call; obstore asks for ten at a time
_TRIES = 3  # batches that fail one after another before a worker gives up on obstore
_REASON = 300
_FIRST = 20.0  # seconds for the first batch, which in a wrongly forked process never comes
Ranges: TypeAlias = Sequence[tuple[str, Span]]  # of files


class ObjectStore:
    """Fetches ranges through obstore, or with `otherwise` where that fails.

    Args:
        store: As `make_store` makes it.
        otherwise: Fetches ranges without obstore.
        timeout: Seconds for one batch.
        traffic: Counts requests, and the bytes that come.
        max_connections: Ranges that are asked for at the same time, each of which takes a connection.
    """

    def __init__(
        self,
        store: Any,
        otherwise: Callable[[Ranges], list[bytes]],
        timeout: float,
        traffic: TrafficCounter,
        max_connections: int,
    ) -> None:
        self._store, self._otherwise, self._timeout, self._traffic = store, otherwise, timeout, traffic
        self._came, self._failed = False, 0  # whether a batch ever came; failed ones, one after another
        self._turn, self._room = asyncio.Lock(), asyncio.Semaphore(max_connections)
        self._together = min(_TOGETHER, max_connections)

    def ranges_of(self, wanted: Ranges) -> list[bytes]:
        """Some ranges of some files, asked for at the same time."""
        if self._failed < _TRIES:
            try:
                got = self._fetch(wanted)
            except Exception as error:
                never = isinstance(error, TimeoutError) and not self._came
                self._failed += _TRIES if never else 1
                if self._failed >= _TRIES:
                    _warn(error, never=never)
            else:
                self._came, self._failed = True, 0
                return got
        return self._otherwise(wanted)

    def _fetch(self, wanted: Ranges) -> list[bytes]:
        asyn = import_module("fsspec.asyn")  # whose thread begins anew in a process that is forked
        self._traffic.add(requests=len(wanted))
        got: list[bytes] = asyn.sync(asyn.get_loop(), self._ask, wanted)
        self._traffic.add(fetched=sum(map(len, got)))
        return got

    async def _ask(self, wanted: Ranges) -> list[bytes]:
        places: dict[str, list[int]] = {}
        for place, (url, _) in enumerate(wanted):
            places.setdefault(url, []).append(place)
        most = self._together
        calls = [(url, own[at : at + most]) for url, own in places.items() for at in range(0, len(own), most)]
        seconds = self._timeout if self._came else min(self._timeout, _FIRST)
        with slow_warning([url for url, _ in wanted], self._timeout):
            async with asyncio.timeout(seconds):
                answers = await asyncio.gather(*(self._call(url, [wanted[at][1] for at in own]) for url, own in calls))
        got = [b""] * len(wanted)
        for (_, own), parts in zip(calls, answers, strict=True):
            for place, part in zip(own, parts, strict=True):
                got[place] = part
        return got

    async def _call(self, url: str, spans: Sequence[Span]) -> list[bytes]:
        get = import_module("obstore").get_ranges_async
        begins, ends = (list(bounds) for bounds in zip(*spans, strict=True))
        async with self._turn:  # one after another: two that each wait for the other's room would wait for ever
            for _ in spans:
                await self._room.acquire()
        try:
            # Ranges that lie apart are not merged: look-ahead has merged what it wants.
            path = unquote(urlsplit(url).path).lstrip("/")
            parts = await get(self._store, path, starts=begins, ends=ends, coalesce=0)
        finally:
            for _ in spans:
                self._room.release()
        for part, (begin, end) in zip(parts, spans, strict=True):
            if len(part) != end - begin:
                raise WrongBytesError(f"{len(part)} bytes came, not {end - begin}")
        return [bytes(part) for part in parts]


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
    warnings.warn(f"{message} ({_reason(error)}): {cure}", stacklevel=2)


def _reason(error: Exception) -> str:
    """An error in one line; in those below it obstore shows what it was given, passwords included."""
    return redacted(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:_REASON]}")
