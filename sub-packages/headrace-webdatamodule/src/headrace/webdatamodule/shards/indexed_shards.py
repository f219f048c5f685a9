"""A dataset over many shards, of one source or several: any sample, at any time."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule._shared.display import counted, never_raises
from headrace.webdatamodule.shards.decoding.allowed import AllowedClass
from headrace.webdatamodule.shards.decoding.decode import decode_member
from headrace.webdatamodule.shards.decoding.limits import MAX_BYTES
from headrace.webdatamodule.shards.decoding.sample_decoder import Decode, SampleDecoder, Transform, chosen_members
from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.globbing import ShardPlaces, find_shards
from headrace.webdatamodule.shards.index.keys import SampleKeys
from headrace.webdatamodule.shards.index.shard_index import ShardIndex
from headrace.webdatamodule.shards.reading.local_shards import ShardSet
from headrace.webdatamodule.shards.reading.open_shards import NO_DESCRIPTORS, LruCache, concurrently, default_limit
from headrace.webdatamodule.shards.reading.options import Reading, Verify
from headrace.webdatamodule.shards.reading.shard_reader import Sample, ShardReader
from headrace.webdatamodule.shards.shard_table import Opened, ShardTable, Source

if TYPE_CHECKING:
    from headrace.webdatamodule.shards.reading.local_shards import Upcoming
    from headrace.webdatamodule.shards.remote.fetcher import Fetcher
    from headrace.webdatamodule.shards.stores.store import Traffic

BeforeSample: TypeAlias = Callable[[int], None]
_Made = TypeVar("_Made")


class IndexedShards:
    """The samples of indexed shards as a map-style dataset, for torch's `DataLoader` or any other use.

    A sample is a dict as in webdataset, `{"__key__": its key, member key: decoded member}`. Each process memory-maps a
    shard when it first reads it, so a pickled dataset takes only a few bytes. If a shard or an index has changed since
    it was indexed, reading raises an error that names the place.

    Args:
        source: Place of the shards; for several sources a mapping {name: place}, whose samples follow one another. A
            place is a directory that `index_shards` has indexed, the path of its `manifest.json`, or indexed tar files:
            a list of paths, or a pattern such as `"data/shard-{000000..000041}.tar"` or `"data/*.tar"`. Also the URL of
            one of these, such as `"s3://bucket/train"`, a `Remote` with options and a cache, or a `Store`.
        keys: Members to read, in this order; None: all. Case does not matter.
        decode: How to decode members. By default `decode_member`, by extension. None: no decoding. A function of the
            member's key and its bytes. Or a mapping from member keys to functions of bytes (or None); other members are
            decoded by extension.
        transform: Function of the decoded sample that returns the item of the dataset.
        verify: When to verify checksums: "read", of each member whenever it is read; "open", of a whole shard when it
            is opened; or "none".
        allowed_classes: Classes or functions that pickles may use; see `decode_member`.
        max_open: Maximum number of shards that a process keeps open; the least recently used are closed. None: derived
            from the limit of file descriptors.
        max_bytes: Maximum bytes of one member, and of the memory for its default decoding, including its decompressed
            form. Default 2 GiB.

    Attributes:
        names: Names of the sources; empty where `source` is one place.

    Raises:
        FileNotFoundError: The path does not exist.
        ShardError: There is no index or no manifest, or it is damaged.
        TypeError: A number is not an int, or `transform` is no function.
        ValueError: An argument is not allowed.

    >>> import tempfile
    >>> from headrace.webdatamodule import index_shards, write_tars
    >>> folder = tempfile.mkdtemp()
    >>> paths = write_tars([(f"s{i}", {"json": b"[%d]" % i}) for i in range(5)], folder, n_shards=2)
    >>> manifest = index_shards(folder)
    >>> dataset = IndexedShards(folder)
    >>> len(dataset), dataset[-1]
    (5, {'__key__': 's4', 'json': [4]})
    """

    def __init__(
        self,
        source: ShardPlaces | Mapping[str, ShardPlaces],
        keys: Sequence[str] | None = None,
        decode: Decode = decode_member,
        transform: Transform | None = None,
        verify: Verify = "read",
        allowed_classes: Collection[AllowedClass] = (),
        *,
        max_open: int | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        reading = Reading(keys, decode, transform, verify, allowed_classes, max_bytes)
        if max_open is not None:
            max_open = checked_int("max_open", max_open, 1, cure="at least one shard has to be open")
        several = isinstance(source, Mapping)
        places: Mapping[str, Any] = source if isinstance(source, Mapping) else {"": source}
        if not places:
            raise ValueError("source must name a place, such as {'proteins': directory}, got an empty mapping")
        self.names = tuple(places) if several else ()
        sources = list[Source]()
        for name, place in places.items():
            shards = find_shards(place)
            members = None if keys is None else chosen_members(keys, shards.members)
            decoder = SampleDecoder(
                members or shards.members, decode, transform, reading.allowed_classes, reading.max_bytes
            )
            sources.append(Source(name, shards, members, decoder, shards.sample_cache(members)))
        self._table = ShardTable(tuple(sources))
        self._verify, self._max_open, self._max_bytes = reading.verify, max_open, reading.max_bytes
        self._begin()

    def _begin(self) -> None:
        table = self._table
        self._starts, self._ends, self._total = table.starts, table.ends, table.n_samples
        counts = None if all(source.shards.holds_descriptors for source in table.sources) else self._holds_descriptors
        limit = self._max_open or default_limit()
        self._indexes = LruCache(self._open_index, limit, counts)
        self._readers = LruCache(self._open, limit, counts)
        self._batches = count()
        self._fetcher: Fetcher | None = None
        if any(source.shards.is_remote for source in table.sources):
            from headrace.webdatamodule.shards.remote.fetcher import Fetcher

            self._fetcher = Fetcher(table, self._open_readers)

    def __getstate__(self) -> dict[str, Any]:
        derived = ("_indexes", "_readers", "_batches", "_fetcher", "_starts", "_ends", "_total")
        return {name: value for name, value in vars(self).items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    @never_raises
    def __repr__(self) -> str:
        counts = f"{counted(len(self), 'sample')} in {counted(len(self._table.places), 'shard')}"
        if self.names:
            counts += f" of {', '.join(self.names)}"
        members = ", ".join(self.member_keys) or "none"
        # grain stores this text in checkpoints, and knows the data by it.
        return f"<{type(self).__name__}: {counts}, fingerprint {self.fingerprint}, members: {members}>"

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, index: int) -> Any:
        if type(index) is int and 0 <= index < self._total:  # as it is for most, without a call
            shard = bisect_right(self._ends, index)
            number = index - self._starts[shard]
        else:
            shard, number = self._find(index)
        if self._fetcher is not None:
            return self.read([self._starts[shard] + number])[0]
        reader, read, decode = self._reader(shard)
        sample = read(number)
        return sample if decode is None else decode(sample, reader, number)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read a batch; torch's `DataLoader` calls this.

        Args:
            indices: Positions in any order, repeated or not; negative ones count from the end.

        Returns:
            The samples, in the order of the indices.

        Raises:
            IndexError: There is no such sample.
            ShardError: A shard is damaged or not the one that was indexed, or a member cannot be decoded.
        """
        return self.read(indices)

    def read(self, indices: Sequence[int], before_sample: BeforeSample | None = None) -> list[Any]:
        """Read a batch, as `__getitems__` does.

        Args:
            indices: As for `__getitems__`.
            before_sample: Called with the place in `indices` of each sample before it is decoded and transformed, for
                example to seed random numbers; None: nothing is called.

        Returns:
            The samples, in the order of the indices.

        Raises:
            IndexError: There is no such sample.
            ShardError: As for `__getitems__`.
        """
        wanted = _positions(indices, len(self))
        if self._fetcher is not None:
            return self._read_fetched(self._fetcher, wanted, before_sample)
        if min(len(wanted), len(self._table.places)) > self._readers.limit:  # in order, each shard is opened once
            order = sorted(range(len(wanted)), key=wanted.__getitem__)
            before = None if before_sample is None else lambda place: before_sample(order[place])
            read = self._read_mapped([wanted[at] for at in order], before)
            return [sample for _, sample in sorted(zip(order, read, strict=True), key=operator.itemgetter(0))]
        return self._read_mapped(wanted, before_sample)

    def _read_mapped(self, wanted: Sequence[int], before_sample: BeforeSample | None) -> list[Any]:
        readers, starts, ends, samples = self._readers.things, self._starts, self._ends, list[Any]()
        batch = next(self._batches)
        for at in wanted:
            shard = bisect_right(ends, at)
            opened = readers.get(shard)
            if opened is None or opened[0].batch != batch:
                opened = self._reader(shard)
                opened[0].batch = batch
            reader, read, decode = opened
            number = at - starts[shard]
            if decode is None:
                samples.append(read(number))
                continue
            sample = read(number)
            if before_sample is not None:
                before_sample(len(samples))
            samples.append(decode(sample, reader, number))
        return samples

    def _read_fetched(self, fetcher: Fetcher, wanted: list[int], before_sample: BeforeSample | None) -> list[Any]:
        """Several shards at once, because most of the time is spent waiting."""
        samples: list[Any] = [None] * len(wanted)
        for (reader, _, decode), places, numbers, some in fetcher.read(wanted):
            for place, number, sample in zip(places, numbers, some, strict=True):
                if before_sample is not None:
                    before_sample(place)
                samples[place] = sample if decode is None else decode(sample, reader, number)
        return samples

    @property
    def looks_ahead(self) -> bool:
        """Whether announced batches are fetched before they are read; False where all shards lie on this machine."""
        return self._fetcher is not None and self._fetcher.looks_ahead

    @property
    def keeps_samples(self) -> bool:
        """Whether samples that were read are kept in a cache, those that are needed next first."""
        return any(source.sample_cache is not None for source in self._table.sources)

    def announce(
        self,
        batches: Iterable[Sequence[int]] = (),
        *,
        restart: bool = False,
        next_use: Upcoming | None = None,
    ) -> None:
        """Say what this process reads next; for shards on this machine, nothing happens.

        Batches that lie on other machines are then fetched while earlier ones are used, up to `Remote.lookahead` bytes.
        `ResumableLoader` calls this in its workers. Whoever reads in another order than announced gets the same
        samples, later.

        Args:
            batches: The batches that are read after those announced before, in their order, as for `__getitems__`.
            restart: Whether batches announced before are forgotten; what a cache of samples has not yet written is
                written then.
            next_use: When the samples of the next batch are needed again, for a cache of samples; None: not known.

        >>> import tempfile
        >>> from headrace.webdatamodule import index_shards, write_tars
        >>> folder = tempfile.mkdtemp()
        >>> paths = write_tars([(f"s{i}", {"json": b"%d" % i}) for i in range(6)], folder, n_shards=2)
        >>> manifest = index_shards(folder)
        >>> dataset = IndexedShards(folder)
        >>> batches = [[4, 0], [2, 5]]
        >>> dataset.announce(batches)
        >>> [[sample["json"] for sample in dataset.__getitems__(batch)] for batch in batches]
        [[4, 0], [2, 5]]
        """
        if self._fetcher is not None:
            self._fetcher.expect(next_use)
            known = list[list[int]]()
            for batch in batches:
                with suppress(IndexError, TypeError):  # which the read of the batch finds, too
                    known.append(_positions(batch, len(self)))
            self._fetcher.announce(known, restart=restart)

    def take_traffic(self) -> Traffic | None:
        """What reading took in this process since the last call, over all sources; None for shards of this machine."""
        counts = [counter.take() for source in self._table.sources if (counter := source.shards.traffic) is not None]
        return reduce(operator.add, counts) if counts else None

    def cached_share(self, sample_bytes: float) -> float | None:
        """The share of the samples for which a cache of samples has room.

        Args:
            sample_bytes: Mean bytes of a sample.

        Returns:
            0 to 1; None without such a cache, and for several sources, which may share one.
        """
        [source, *others] = self._table.sources
        return None if others else source.shards.cached_share(sample_bytes)

    def share_with_workers(self) -> None:
        """Read what each worker would read for itself; called before workers are forked."""
        for _ in concurrently(ShardSet.find_set_index, [source.shards for source in self._table.sources]):
            pass

    def __iter__(self) -> Iterator[Any]:
        return self.iterate()

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        """Read consecutive samples, faster than one by one.

        Args:
            start: Index of the first sample.
            stop: One past the last; None: the end.

        Yields:
            The samples. A damaged one raises its error after all samples before it.

        Raises:
            ValueError: The range is not in 0 to `len(self)`.
            ShardError: As in `__getitems__`.
        """
        end = len(self) if stop is None else operator.index(stop)
        if not 0 <= operator.index(start) <= end <= len(self):
            raise ValueError(f"start and stop must be 0 <= start <= stop <= {len(self)}, got {start} and {stop}")
        return self._iterate(operator.index(start), end)

    def _iterate(self, at: int, stop: int) -> Iterator[Any]:
        while at < stop:
            shard = bisect_right(self._ends, at)
            start, end = self._starts[shard], min(stop, self._ends[shard])
            reader, _, decode = self._reader(shard)
            for samples in self._between(shard, reader, at - start, end - start):
                if decode is None:
                    yield from samples
                else:
                    yield from (decode(sample, reader, one) for one, sample in enumerate(samples, at - start))
                at += len(samples)

    def _between(self, shard: int, reader: ShardReader, start: int, stop: int) -> Iterator[list[Sample]]:
        if self._fetcher is None or not reader.source.by_ranges:
            return reader.between(start, stop)
        return self._fetcher.between(shard, reader, start, stop)

    def sizes(self, key: str, *, missing: int | None = None) -> npt.NDArray[np.int64]:
        """Return the size of a member in each sample, in bytes, from the indexes alone.

        Args:
            key: The member's key; case does not matter.
            missing: Size for samples that lack the member; None: raise an error.

        Returns:
            Bytes as stored, shape [n_samples].

        Raises:
            ShardError: A sample lacks the member, or an index is damaged.
            TypeError: `missing` is not an int.
            ValueError: No sample of a source has the member.
        """
        members = [chosen_members([key], source.shards.members)[0] for source in self._table.sources]
        if missing is not None:
            missing = checked_int("missing", missing, -(1 << 63))
        return np.concatenate([_member_sizes(index, members[0], missing) for index in self._every_index()])

    @property
    def member_keys(self) -> tuple[str, ...]:
        """The keys of the members that are read, of all sources."""
        return tuple(dict.fromkeys(key for source in self._table.sources for key in source.member_keys))

    @property
    def runs_own_code(self) -> bool:
        """Whether reading calls a decoder or a transform of the user's, which may draw random numbers."""
        return any(source.decode.runs_own_code for source in self._table.sources)

    @property
    def keys(self) -> SampleKeys:
        """The keys of all samples, a lazy sequence: each key is read from the index when it is accessed."""
        return SampleKeys(len(self), self.key)

    def key(self, index: int) -> str:
        """The key of a sample, from its index alone.

        Args:
            index: Its position; negative ones count from the end.

        Raises:
            IndexError: There is no such sample.
        """
        shard, number = self._find(index)
        return self._index(shard).key(number)

    @property
    def cumulative_sizes(self) -> list[int]:
        """Of each source, the number of samples in it and all before it."""
        return self._table.source_ends

    def source_of(self, index: int) -> str | None:
        """The name of the source of a sample; None where there is one source.

        Args:
            index: The sample's position; negative ones count from the end.

        Raises:
            IndexError: There is no such sample.
        """
        shard, _ = self._find(index)
        return self._table.places[shard].source.name if len(self._table.sources) > 1 else None

    def shard_of(self, index: int) -> str:
        """The path or URL of the shard of a sample.

        Args:
            index: The sample's position; negative ones count from the end.

        Raises:
            IndexError: There is no such sample.
        """
        return self._table.places[self._find(index)[0]].path

    def offset_of(self, index: int) -> int:
        """Byte offset of a sample's first member in its shard.

        Args:
            index: The sample's position; negative ones count from the end.

        Raises:
            IndexError: There is no such sample.
        """
        shard, number = self._find(index)
        opened = self._index(shard)
        return int(opened.begins[opened.span(number)[0]])

    def find(self, key: str) -> int:
        """The position of the sample with a key, from the indexes alone.

        Args:
            key: The sample's key.

        Raises:
            KeyError: No sample has the key.
            ValueError: Samples of several shards have it.
        """
        found = list[int]()
        for shard, index in enumerate(self._every_index()):
            with suppress(KeyError):
                found.append(self._starts[shard] + index.find(key))
        if len(found) > 1:
            sources = dict.fromkeys(self.source_of(index) for index in found)
            of = f"of the sources {', '.join(map(str, sources))} " if len(sources) > 1 else ""
            message = f"{len(found)} samples {of}have the key {key!r}, each in another shard: give their indices"
            raise ValueError(message)
        if not found:
            raise KeyError(key)
        return found[0]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that the manifest lists; of several sources, those that all manifests list."""
        first, *others = (source.shards.columns for source in self._table.sources)
        return tuple(name for name in first if all(name in columns for columns in others))

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of the manifest; of several sources, one after another.

        Args:
            name: Name of the column.

        Returns:
            Shape [n_samples, ...]; of one source a read-only memory map.

        Raises:
            ManifestError: There is no such column.
            StaleIndexError: The manifest was replaced after the dataset was opened.
        """
        columns = [source.shards.column(name) for source in self._table.sources]
        return columns[0] if len(columns) == 1 else np.concatenate(columns)

    @property
    def fingerprint(self) -> str:
        """Digest of all shards, without columns, and of the names of several sources; 32 hexadecimal digits."""
        return self._table.fingerprint

    def prefix_fingerprint(self, n_samples: int) -> str | None:
        """The fingerprint of the first shards that hold exactly `n_samples` samples; None if no shard ends there."""
        return self._table.prefix_fingerprint(n_samples)

    def close(self) -> None:
        """Close all files; later reads open them again."""
        self.announce(restart=True)
        self._readers.clear()
        self._indexes.clear()

    def _find(self, index: int) -> tuple[int, int]:
        """The number of the shard of a sample, and that of the sample in it."""
        if isinstance(index, str):
            raise TypeError(f"index must be an integer, got the text {index!r}: find({index!r}) gives a key's position")
        at, total = operator.index(index), self._total
        if not -total <= at < total:
            raise IndexError(f"index must be {-total} to {total - 1}, got {at}")
        shard = bisect_right(self._ends, at % total)
        return shard, at % total - self._starts[shard]

    def _holds_descriptors(self, shard: int) -> bool:
        return self._table.places[shard].source.shards.holds_descriptors

    def _reader(self, shard: int) -> Opened:
        readers = self._readers
        opened = readers.things.get(shard)
        if opened is None or readers.is_full:
            try:
                opened = readers.get(shard)
            except OSError as error:
                raise self._not_opened(error, shard) from error
        opened[0].check_size()
        return opened

    def _open_readers(self, shards: Sequence[int]) -> list[Opened]:
        """Readers of some shards; those that are closed are opened at the same time."""
        closed = [shard for shard in shards if shard not in self._readers.things]
        opened = dict(zip(closed, self._together(self._reader, closed), strict=True))
        return [opened[shard] if shard in opened else self._reader(shard) for shard in shards]

    def _together(self, function: Callable[[int], _Made], shards: Sequence[int]) -> Iterator[_Made]:
        """Call a function for some shards, at the same time where any lies on another machine."""
        if self._fetcher is None:
            return map(function, shards)
        sets = {id(one): one for one in (self._table.places[shard].source.shards for shard in shards)}
        for one in sets.values():
            one.find_set_index()  # before each thread would do so for itself
        return concurrently(function, shards)

    def _every_index(self) -> Iterator[ShardIndex]:
        return self._together(self._index, range(len(self._table.places)))

    def _index(self, shard: int) -> ShardIndex:
        try:
            return self._indexes.get(shard)
        except OSError as error:
            raise self._not_opened(error, shard) from error

    def _not_opened(self, error: OSError, shard: int) -> ShardError:
        full = error.errno in NO_DESCRIPTORS
        cure = "close other files, or raise `ulimit -n`" if full else "restore it, or index its directory again"
        return ShardError(f"the shard cannot be opened ({error}): {cure}", shard=self._table.places[shard].path)

    def _open_index(self, shard: int) -> ShardIndex:
        place = self._table.places[shard]
        return place.source.shards.open_index(place.number)

    def _open(self, shard: int) -> Opened:
        source, verify = self._table.places[shard].source, self._verify == "read"
        index = self._indexes.get(shard)
        data = source.shards.open_bytes(index, verified=verify, whole=source.sample_cache is None)
        verify = verify or source.sample_cache is not None  # what is kept has to be right
        reader = ShardReader(index, data, source.members, verify=verify, max_bytes=self._max_bytes)
        if self._verify == "open":
            if self._fetcher is not None and data.by_ranges:
                self._fetcher.check(reader)
            else:
                reader.check_all()
        read = reader.bind(data.data)  # not inside the reader: nothing would close a cycle in time
        return reader, read, None if source.decode.is_noop else source.decode


def _positions(indices: Sequence[int], total: int) -> list[int]:
    items = indices.tolist() if hasattr(indices, "tolist") else indices
    try:
        wanted = list(map(operator.index, items))
    except TypeError as error:
        raise TypeError(f"indices must be integers, shape [n], got {indices!r:.80}") from error
    if not wanted:
        return wanted
    if type(items[0]) is bool:
        raise TypeError(f"indices must be integers, shape [n], got {indices!r:.80}: a mask gives no positions")
    least, most = min(wanted), max(wanted)
    if least < -total or most >= total:
        raise IndexError(f"indices must be {-total} to {total - 1}, got {least if least < -total else most}")
    return [at % total for at in wanted] if least < 0 else wanted


def _member_sizes(index: ShardIndex, member: str, missing: int | None) -> npt.NDArray[np.int64]:
    positions = index.positions(member)
    lacking = positions < 0
    if missing is None and lacking.any():
        cure = "correct the shard, or name a member that all samples have; IndexedShards.sizes takes missing=0 instead"
        message = f"the sample has no member {member!r}: {cure}"
        raise ShardError(message, shard=index.shard, sample=index.key(int(lacking.argmax())))
    if not index.n_members:
        return np.empty(0, np.int64)
    return np.where(lacking, missing or 0, index.sizes[positions].astype(np.int64))
