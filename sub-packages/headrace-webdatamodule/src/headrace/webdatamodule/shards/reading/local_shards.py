"""A set of shards: their names in order, and what a reader expects of each."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy.typing as npt

from headrace.webdatamodule.shards.errors import Damage, DamagedShardError, ManifestError, ShardError, StaleIndexError
from headrace.webdatamodule.shards.format.files import open_plain
from headrace.webdatamodule.shards.format.tar import BLOCK, compression
from headrace.webdatamodule.shards.index.consolidated import Listed, SetIndex
from headrace.webdatamodule.shards.index.manifest import Manifest, open_column
from headrace.webdatamodule.shards.index.shard_index import ShardIndex, index_path
from headrace.webdatamodule.shards.reading.shard_reader import ShardBytes, map_shard
from headrace.webdatamodule.shards.set_fingerprint import shards_fingerprint

if TYPE_CHECKING:
    from headrace.webdatamodule.shards.remote.sample_cache import SampleCache
    from headrace.webdatamodule.shards.stores.store import Span, TrafficCounter

Head = tuple[int, int, tuple[str, ...]]
# A scheme and "://"; or chained ones of fsspec, such as "simplecache::s3://bucket/a".
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+(://|::([a-zA-Z0-9+.-]+::)*[a-zA-Z][a-zA-Z0-9+.-]+://)")
_BRACES = re.compile(r"\{[^{}]*(\.\.|,)[^{}]*\}")
_SET_INDEX = "_set_index"  # not sent to workers


class Upcoming(NamedTuple):
    """When this node needs some samples next: the present window of steps, and that of each sample's next use."""

    now: int
    windows: Mapping[int, int]  # samples that are missing here are not needed again soon


@dataclass(frozen=True)
class ShardSet:
    """Some shards on this machine; small enough to be sent to each worker."""

    folder: str  # where the manifest lies; empty when there is none
    names: tuple[str, ...]  # of the tar files, seen from there
    samples: tuple[int, ...]
    checksums: tuple[int, ...]  # of their indexes
    members: tuple[str, ...]
    columns: tuple[str, ...]
    fingerprint: str
    set_fingerprint: bytes  # as of `Listed`
    is_remote: ClassVar[bool] = False  # whether several shards are opened at the same time

    @property
    def holds_descriptors(self) -> bool:
        """Whether open shards and indexes take file descriptors."""
        return True

    def path(self, number: int) -> str:
        """The path of a shard."""
        return os.path.join(self.folder, self.names[number])  # noqa: PTH118 - the paths are texts

    def open_index(self, number: int) -> ShardIndex:
        """The index of a shard, from that of the whole set or from its own file; all of it is compared."""
        if (of_set := self.find_set_index()) is not None:
            with contextlib.suppress(ShardError):  # damaged
                index = of_set.shard(number, self.path(number))
                index.check_self()
                return index
        index = self.read_index(number)
        if (index.checksum, index.n_samples) != (self.checksums[number], self.samples[number]):
            message = "the index does not match the manifest, or was replaced since these shards were opened"
            cure = "call index_shards, and open them again (a new IndexedShards)"
            raise StaleIndexError(f"{message}: {cure}", shard=self.path(number))
        index.check_self()
        return index

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != _SET_INDEX}

    def find_set_index(self) -> SetIndex | None:
        """The index of the whole set, where there is one that fits; read at the first call."""
        kept = vars(self)
        if _SET_INDEX not in kept:  # no cached_property: in Python 3.11 one set would wait for the server of another
            kept[_SET_INDEX] = self._read_set_index()
        found: SetIndex | None = kept[_SET_INDEX]
        return found

    def _read_set_index(self) -> SetIndex | None:
        if not self.folder or len(self.names) < 2:
            return None
        try:
            return self.open_set_index(Listed(self.set_fingerprint, self.checksums))
        except (OSError, ShardError):  # the shards have indexes of their own
            return None

    def open_set_index(self, listed: Listed) -> SetIndex | None:
        """Map the index of the whole set; None when there is none."""
        return SetIndex.open(self.folder, listed)

    def read_index(self, number: int) -> ShardIndex:
        """Map the index that lies beside a shard."""
        return open_index(self.path(number))

    def open_bytes(self, index: ShardIndex, *, verified: bool, whole: bool) -> ShardBytes:  # noqa: ARG002 - for remote ones
        """The bytes of a shard.

        Args:
            index: Its index.
            verified: Whether reads compare checksums.
            whole: Whether a cache may keep all of it.
        """
        return map_shard(index, verified=verified)

    def sample_cache(self, members: Sequence[str] | None) -> SampleCache | None:  # noqa: ARG002 - for remote ones
        """What keeps samples with these members; None where whole shards are kept, or nothing."""
        return None

    def cached_share(self, sample_bytes: float) -> float | None:  # noqa: ARG002 - for remote ones
        """The share of the samples, of so many bytes each, that a cache of samples has room for; None without one."""
        return None

    @property
    def traffic(self) -> TrafficCounter | None:
        """Counts what reading takes, where that is from another machine."""
        return None

    @property
    def lookahead(self) -> int:
        """Bytes that are fetched before they are read; 0 where there is nothing to gain."""
        return 0

    def fetch(self, wanted: Sequence[tuple[str, Span]], *, ahead: bool) -> list[bytes]:
        """Some ranges of shards, given by their paths; for remote ones. `ahead`: before they are read."""
        raise NotImplementedError

    def column(self, name: str) -> npt.NDArray[Any]:
        """Map a column of the manifest."""
        return open_column(self.folder, self.check_manifest(name, lambda: Manifest.load(self.folder)), name)

    def check_manifest(self, column: str, load: Callable[[], Manifest]) -> Manifest:
        """The manifest that a column is in, as it is now; refused when it was replaced."""
        if not self.folder:
            raise ManifestError(f"there is no column {column!r}: a list of shards has none; give their directory")
        manifest = load()
        if manifest.fingerprint != self.fingerprint:
            raise StaleIndexError(f"the manifest in {self.folder!r} was replaced: open it again (a new IndexedShards)")
        return manifest


def open_index(path: str) -> ShardIndex:
    """Map the index that lies beside a tar file."""
    try:
        return ShardIndex.open(path)
    except FileNotFoundError as error:
        with contextlib.suppress(FileNotFoundError), os.fdopen(open_plain(path), "rb") as file:
            if program := compression(file.read(BLOCK)):
                raise DamagedShardError(Damage.COMPRESSED.format(program=program), shard=path) from None
        message = f"there is no index {index_path(path).name!r} beside the shard: call index_shards on its directory"
        raise ShardError(message, shard=path) from error


def is_url(place: object) -> bool:
    """Whether shards at a place are read through fsspec."""
    return isinstance(place, str) and bool(_URL.match(place))


def expand_braces(place: str) -> list[str]:
    """Expand what is in braces, as shells and webdataset do."""
    if not _BRACES.search(place):
        return [place]
    from braceexpand import braceexpand

    return list(braceexpand(place))


def of_manifest(folder: str, manifest: Manifest) -> ShardSet:
    """The shards that a manifest in a folder lists."""
    listed = Listed.of(manifest)
    return ShardSet(
        folder,
        tuple(shard.name for shard in manifest.shards),
        tuple(shard.samples for shard in manifest.shards),
        listed.checksums,
        manifest.members,
        tuple(column.name for column in manifest.columns),
        manifest.fingerprint,
        listed.fingerprint,
    )


def head(index: ShardIndex) -> Head:
    """What a reader has to know of one shard without a manifest."""
    return index.n_samples, index.checksum, index.member_keys


def of_heads(names: Sequence[str], heads: Iterable[Head]) -> ShardSet:
    """Shards without a manifest."""
    samples, checksums, members = zip(*heads, strict=True)
    every = tuple(sorted(set().union(*members)))
    fingerprint = shards_fingerprint(samples, checksums)
    return ShardSet("", tuple(names), samples, checksums, every, (), fingerprint, b"")
