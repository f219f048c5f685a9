"""Samples to the bytes of a shard and of its index, both at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import xxhash

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.format import tar as ustar
from headrace.webdatamodule.shards.format.tar import BLOCK, Samples
from headrace.webdatamodule.shards.index.build import Arrays, narrow, ragged
from headrace.webdatamodule.shards.index.container import FRAME_GAPS, pack, spot_ranges, spots
from headrace.webdatamodule.shards.index.keys import describe_keys
from headrace.webdatamodule.shards.writing.storable import check_key, member_bytes, member_endings

CHUNK = 1 << 20  # bytes that are worth a write


class Layout(NamedTuple):
    """What samples with the same member keys have in common.

    Args:
        number: In the order of their first samples.
        endings: For each member what follows the sample's key in its name, and the sum of these bytes.
    """

    number: int
    endings: tuple[tuple[bytes, int], ...]


class Recording:
    """Takes samples, gives the bytes of their tar file piece by piece, and remembers what the index says of them.

    Args:
        shard: Path of the tar file, named in errors.

    Attributes:
        samples: What was taken.
        checksums: `checksum32` of each member's data.
        pending: How many bytes wait to be taken away.
    """

    def __init__(self, shard: str) -> None:
        self.shard, self.samples, self.pending = shard, Samples(), 0
        self.checksums: list[int] = []
        self._pieces: list[bytes] = []
        self._gaps: list[bytes] = []
        self._frames: list[int] = []
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._padding = b""

    def add(self, key: Any, sample: Any) -> None:
        """Take one sample.

        Args:
            key: The sample's key.
            sample: {member key: bytes}.

        Raises:
            ShardError: No reader could find it again, or a tar file cannot hold it.
        """
        if not isinstance(key, str) or not isinstance(sample, Mapping):
            message = f"a sample must be a pair of a text and {{member key: bytes}}, got {key!r:.80} and {sample!r:.80}"
            raise ShardError(message, shard=self.shard)
        begin = check_key(key, shard=self.shard)
        layout = self._layouts.get(tuple(sample)) or self._new_layout(key, sample)
        begin_sum = sum(begin)
        samples, pieces, padding, at = self.samples, self._pieces, self._padding, self.samples.end
        for (ending, ending_sum), data in zip(layout.endings, sample.values(), strict=True):
            if type(data) is not bytes:
                data = member_bytes(data, shard=self.shard, sample=key, member=(begin + ending).decode())
            name, size = begin + ending, len(data)
            if len(name) <= ustar.NAME and size <= ustar.MOST_BYTES:
                gap = padding + ustar.header(name, begin_sum + ending_sum, size)
            else:
                gap = padding + self._rare(key, name, size)
            padding = ustar.PADDING[size % BLOCK]
            pieces += gap, data
            at += BLOCK
            samples.offsets.append(at)
            samples.sizes.append(size)
            at += size + len(padding)
            self._gap(gap)
            self.checksums.append(xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF)
        # Padding waits with the next header: this many bytes are a little more than those in `pieces`.
        self.pending += at - samples.end
        self._padding, samples.end = padding, at
        samples.keys.append(key)
        samples.layout_of.append(layout.number)

    def take(self) -> bytes:
        """The bytes that wait; they do not wait any more."""
        taken = b"".join(self._pieces)
        self._pieces.clear()
        self.pending = 0
        return taken

    def finish(self) -> bytes:
        """The last bytes of the tar file.

        Raises:
            ShardError: A key occurs twice.
        """
        if len(set(self.samples.keys)) < len(self.samples.keys):
            seen: set[str] = set()
            key = next(key for key in self.samples.keys if key in seen or seen.add(key))  # type: ignore[func-returns-value] # add returns None
            raise ShardError(f"the sample key {key!r} occurs twice: make keys unique", shard=self.shard, sample=key)
        last = self._padding + ustar.end(self.samples.end)
        self._pieces.append(last)
        self._gap(last)
        self._frames.append(xxhash.xxh3_64_intdigest(b"".join(self._gaps))) if self._gaps else None
        return self.take()

    def index(self, nbytes: int, read: Callable[[int, int], bytes]) -> bytes:
        """The bytes of the index: the same as `build_index` makes of the tar file, without reading it again.

        Args:
            nbytes: Bytes of the tar file.
            read: Gives its bytes between begin and end; asked for three short pieces.
        """
        samples = self.samples
        keys, key_arrays = describe_keys(samples.keys)
        arrays: Arrays = {
            "blocks": narrow(np.array(samples.offsets, np.uint64) // BLOCK),
            "sizes": narrow(np.array(samples.sizes, np.uint64)),
            "checksums": np.array(self.checksums, np.uint32),
            "frames": np.array(self._frames, np.uint64),
            **ragged(samples),
            **key_arrays,
        }
        description = {
            "samples": len(samples.keys),
            "shard_bytes": nbytes,
            "end": samples.end,
            "spots": spots(nbytes, [read(begin, end) for begin, end in spot_ranges(nbytes, samples.end)]),
            "layouts": list(samples.layouts),
            "keys": keys,
            "skipped": {},
            "skipped_names": [],
        }
        return pack(description, arrays)

    def _gap(self, gap: bytes) -> None:
        self._gaps.append(gap)
        if len(self._gaps) == FRAME_GAPS:
            self._frames.append(xxhash.xxh3_64_intdigest(b"".join(self._gaps)))
            self._gaps.clear()

    def _new_layout(self, key: str, sample: Mapping[str, bytes]) -> Layout:
        endings = member_endings(sample, shard=self.shard, sample=key)
        layout = Layout(len(self._layouts), tuple((ending, sum(ending)) for ending in endings))
        self._layouts[tuple(sample)] = layout
        self.samples.layouts[tuple(sample)] = layout.number
        return layout

    def _rare(self, key: str, name: bytes, size: int) -> bytes:
        made = ustar.long_header(name, size) if size <= ustar.MOST_BYTES else None
        if made is None:
            hint = "a USTAR header holds names to 100 bytes (255 with directories) and members to 8 GiB"
            message = f"the member of {size} bytes with a name of {len(name)} does not fit: {hint}"
            raise ShardError(message, shard=self.shard, sample=key, member=name.decode())
        return made
