"""The shards of some sources in one row: where a sample lies, and which of its members are read how."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from headrace.webdatamodule.shards.decoding.sample_decoder import SampleDecoder
from headrace.webdatamodule.shards.reading.local_shards import ShardSet
from headrace.webdatamodule.shards.reading.shard_reader import Read, ShardReader
from headrace.webdatamodule.shards.set_fingerprint import shards_fingerprint, sources_fingerprint

if TYPE_CHECKING:
    from headrace.webdatamodule.shards.remote.sample_cache import SampleCache

# The reader of a shard, what reads its samples by their numbers, and what decodes them: None leaves them as they are.
Opened: TypeAlias = tuple[ShardReader, Read, SampleDecoder | None]


@dataclass(frozen=True)
class Source:
    """The shards of a source, and which of their members are read how."""

    name: str  # empty where there is one source without a name
    shards: ShardSet
    members: tuple[str, ...] | None  # None: all
    decode: SampleDecoder
    sample_cache: SampleCache | None = None  # keeps samples that were read

    @property
    def member_keys(self) -> tuple[str, ...]:
        """The keys of the members that are read."""
        return self.shards.members if self.members is None else self.members

    def fingerprint(self, n_shards: int) -> str:
        """Digest of the first shards."""
        return shards_fingerprint(self.shards.samples[:n_shards], self.shards.checksums[:n_shards])


class Place(NamedTuple):
    """Where a shard stands in its source."""

    source: Source
    number: int  # of the shard
    first: int  # number of its first sample

    @property
    def path(self) -> str:
        """The path or URL of the shard."""
        return self.source.shards.path(self.number)


@dataclass(frozen=True)
class ShardTable:
    """The shards of all sources, one source after another."""

    sources: tuple[Source, ...]
    places: list[Place] = field(init=False, repr=False)
    ends: list[int] = field(init=False, repr=False)  # one past the last sample of each shard
    starts: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        places, counts = list[Place](), list[int]()
        for source in self.sources:
            firsts = accumulate(source.shards.samples, initial=0)
            places += [Place(source, number, first) for number, (first, _) in enumerate(pairwise(firsts))]
            counts += source.shards.samples
        ends = list(accumulate(counts))
        for name, value in {"places": places, "ends": ends, "starts": [0, *ends[:-1]]}.items():
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[type[ShardTable], tuple[tuple[Source, ...]]]:
        return ShardTable, (self.sources,)

    @cached_property
    def source_ends(self) -> list[int]:
        """One past the last sample of each source."""
        return list(accumulate(sum(source.shards.samples) for source in self.sources))

    @property
    def n_samples(self) -> int:
        """Samples of all sources."""
        return self.ends[-1] if self.ends else 0

    def group(self, wanted: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Shards, and the places of their samples among some positions."""
        order = sorted(range(len(wanted)), key=wanted.__getitem__)
        return [
            (shard, list(places))
            for shard, places in groupby(order, lambda place: bisect_right(self.ends, wanted[place]))
        ]

    def source_of(self, at: int) -> int:
        """The number of the source of a sample."""
        return bisect_right(self.source_ends, at)

    @property
    def fingerprint(self) -> str:
        """Digest of all shards, and of the names of several sources."""
        return sources_fingerprint(
            [(source.name, source.fingerprint(len(source.shards.samples))) for source in self.sources]
        )

    def prefix_fingerprint(self, n_samples: int) -> str | None:
        """The fingerprint of the first shards that hold exactly so many samples; None if no shard ends there."""
        number = bisect_left(self.source_ends, n_samples)
        if number == len(self.sources):
            return None
        *before, last = self.sources[: number + 1]
        ends = [0, *accumulate(last.shards.samples)]
        inside = n_samples - (self.source_ends[number - 1] if number else 0)
        if inside not in ends:
            return None
        # Of several, as shards may be empty, the most: they are the ones that a set of them alone has.
        digest = last.fingerprint(bisect_right(ends, inside) - 1)
        parts = [(source.name, source.fingerprint(len(source.shards.samples))) for source in before]
        return sources_fingerprint([*parts, (last.name, digest)])
