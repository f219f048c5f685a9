"""Bytes over plain HTTP, no more than were asked for: fsspec itself reads whatever a server sends."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any, BinaryIO

from headrace.webdatamodule.shards.remote.coalescing import Span

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
