"""File systems of fsspec that are synchronous, as those of FTP and SFTP are: a connection, one request at a time."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shard_server import COUNT, QUICK, written_once

from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedShards,
    Remote,
    ResumableLoader,
    RetryPolicy,
    ShardError,
)

fsspec: Any = import_module("fsspec")  # ships no type information


@dataclass
class Wire:
    """The way to a folder, and what goes wrong on it."""

    folder: Path
    crossed: Path  # made when two requests share a connection at the same time
    connections: int = 0
    stuck_connections: int = 0  # which are never made
    closed: int = 0  # requests that end with their connection
    stuck: int = 0  # requests that are never answered
    over: threading.Event = field(default_factory=threading.Event)


class Wired(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A folder behind a connection that breaks as those of `ftplib` and paramiko do."""

    protocol = "wired"
    wire: Wire

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.turn, self.is_open = threading.Lock(), True
        self.wire.connections += 1
        if self.wire.stuck_connections:
            self.wire.stuck_connections -= 1
            self.wire.over.wait(60)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("wired://")

    def answer(self, path: str) -> bytes:
        if not self.turn.acquire(blocking=False):
            self.wire.crossed.touch()
            raise OSError("the answers of two requests are mixed up")
        try:
            time.sleep(0.001)
            if self.wire.closed:
                self.wire.closed, self.is_open = self.wire.closed - 1, False
            if self.wire.stuck:
                self.wire.stuck, self.is_open = self.wire.stuck - 1, False
                self.wire.over.wait(60)
            if not self.is_open:
                raise EOFError("the connection is closed")
            return (self.wire.folder / path).read_bytes()
        finally:
            self.turn.release()

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": len(self.answer(path)), "type": "file"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self.answer(path)[start:end]


folder = pytest.fixture(scope="module")(written_once)


@pytest.fixture
def wire(folder: Path, tmp_path: Path) -> Iterator[Wire]:
    fsspec.register_implementation("wired", Wired, clobber=True)
    made = Wired.wire = Wire(folder, tmp_path / "crossed")
    yield made
    made.over.set()
    assert not made.crossed.exists()


def keep(samples: list[Any]) -> list[Any]:
    return samples


@pytest.mark.parametrize("listed", [False, True])
def test_a_connection_serves_one_request_at_a_time(wire: Wire, listed: bool) -> None:
    tars = [f"wired://{path.name}" for path in sorted(wire.folder.glob("*.tar"))]
    near = IndexedShards(wire.folder)
    far = IndexedShards(Remote(tars if listed else "wired://.", retry=QUICK))
    order = np.random.default_rng(0).permutation(COUNT).tolist()
    assert far.__getitems__(order) == near.__getitems__(order)
    assert list(far) == list(near)
    assert wire.connections == 1


def test_two_sets_have_a_connection_each(wire: Wire) -> None:
    train, val = (IndexedShards(Remote("wired://.", retry=RetryPolicy(1))) for _ in range(2))
    reader = threading.Thread(target=lambda: list(train))
    reader.start()
    assert list(val) == list(IndexedShards(wire.folder))
    reader.join()
    assert wire.connections == 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_fetch_ahead_one_request_at_a_time(wire: Wire) -> None:
    far = IndexedShards(Remote("wired://.", retry=RetryPolicy(1)))
    loader = ResumableLoader(far, DistributedBatchSampler(COUNT, 6), collate_fn=keep, num_workers=2)
    assert sorted(sample["json"][0] for batch in loader for sample in batch) == list(range(COUNT))


@pytest.mark.parametrize("fault", ["closed", "stuck"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_connection_that_breaks_is_made_anew(wire: Wire, tmp_path: Path, fault: str, cached: bool) -> None:
    setattr(wire, fault, 1)
    remote = Remote("wired://.", cache_dir=tmp_path / "cache" if cached else None, timeout=0.1, retry=QUICK)
    far = IndexedShards(remote)
    assert (getattr(wire, fault), wire.connections) == (0, 2)
    assert far.sizes("bin").sum() > 0
    setattr(wire, fault, 1)
    assert far.__getitems__([0, COUNT - 1]) == IndexedShards(wire.folder).__getitems__([0, COUNT - 1])
    assert (getattr(wire, fault), wire.connections) == (0, 3)


def test_a_connection_that_is_never_made_is_given_up(wire: Wire) -> None:
    wire.stuck_connections = 1
    with pytest.raises(ShardError, match=r"after 1 attempts: no answer within 0\.1 seconds"):
        IndexedShards(Remote("wired://.", timeout=0.1, retry=RetryPolicy(1)))


def test_an_answer_that_never_comes_is_given_up(wire: Wire) -> None:
    far = IndexedShards(Remote("wired://.", timeout=0.1, retry=RetryPolicy(1)))
    assert far.sizes("bin").sum() > 0
    for index in (0, COUNT - 1):
        wire.stuck = 1
        with pytest.raises(ShardError, match=r"after 1 attempts: no answer within 0\.1 seconds"):
            far[index]
        assert far[index]["json"] == [index]


def test_they_get_as_many_attempts_as_others(wire: Wire) -> None:
    wire.closed = QUICK.max_attempts - 1
    assert len(IndexedShards(Remote("wired://.", retry=QUICK))) == COUNT
    wire.closed = QUICK.max_attempts
    with pytest.raises(ShardError, match=f"after {QUICK.max_attempts} attempts: EOFError: the connection is closed"):
        IndexedShards(Remote("wired://.", retry=QUICK))
