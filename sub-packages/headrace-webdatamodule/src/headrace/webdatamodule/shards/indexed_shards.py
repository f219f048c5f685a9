"""A dataset over many shards: any sample, at any time."""

from __future__ import annotations

import operator
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, count, groupby
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule._shared.display import never_raises
from headrace.webdatamodule.shards.decoding.allowed import AllowedClass, AllowedClassError, AllowedClasses
from headrace.webdatamodule.shards.decoding.decode import MemberDecoder, decode_member, member_decoder
from headrace.webdatamodule.shards.decoding.limits import MAX_BYTES
from headrace.webdatamodule.shards.errors import DecodeError, ShardError
from headrace.webdatamodule.shards.globbing import ShardPlaces, find_shards
from headrace.webdatamodule.shards.index.keys import SampleKeys
from headrace.webdatamodule.shards.index.shard_index import ShardIndex
from headrace.webdatamodule.shards.reading.open_shards import NO_DESCRIPTORS, LruCache, default_limit
from headrace.webdatamodule.shards.reading.shard_reader import Read, Sample, ShardReader
from headrace.webdatamodule.shards.set_fingerprint import shards_fingerprint

if TYPE_CHECKING:
    from headrace.webdatamodule.shards.reading.local_shards import Upcoming
    from headrace.webdatamodule.shards.remote.lookahead import LookAhead
    from headrace.webdatamodule.shards.stores.store import Traffic

Verify = Literal["read", "open", "none"]
Decoder: TypeAlias = Callable[[bytes], Any]
Decode: TypeAlias = Callable[[str, bytes], Any] | Mapping[str, Decoder | None] | None
Transform: TypeAlias = Callable[[Sample], Any]
Begin: TypeAlias = Callable[[int], None]
_VERIFY = ("read", "open", "none")


class IndexedShards:
    """The samples of indexed shards as a map-style dataset, for torch's `DataLoader` or any other use.

    A sample is a dict as in webdataset, `{"__key__": its key, member key: decoded member}`. Each process memory-maps a
    shard when it first reads it, so a pickled dataset takes only a few bytes. If a shard or an index has changed since
    it was indexed, reading raises an error that names the place.

    Args:
        source: A directory that `index_shards` has indexed, the path of its `manifest.json`, or indexed tar files: a
            list of paths, or a pattern such as `"data/shard-{000000..000041}.tar"` or `"data/*.tar"`. Also the URL of
            one of these, such as `"s3://bucket/train"`, or a `Remote` with options and a cache.
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

    Raises:
        FileNotFoundError: The path does not exist.
        ShardError: There is no index or no manifest, or it is damaged.
        TypeError: A number is not an int.
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
        source: ShardPlaces,
        keys: Sequence[str] | None = None,
        decode: Decode = decode_member,
        transform: Transform | None = None,
        verify: Verify = "read",
        allowed_classes: Collection[AllowedClass] = (),
        *,
        max_open: int | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        if verify not in _VERIFY:
            raise ValueError(f"verify must be one of {', '.join(map(repr, _VERIFY))}, got {verify!r}")
        if max_open is not None:
            max_open = checked_int("max_open", max_open, 1, cure="at least one shard has to be open")
        max_bytes = checked_int("max_bytes", max_bytes, 1, cure="say how large a member may become")
        self._shards = find_shards(source)
        self._members = None if keys is None else _chosen(keys, self._shards.members)
        self._decode = SampleDecoder(self.member_keys, decode, transform, allowed_classes, max_bytes)
        self._verify, self._max_open, self._max_bytes = verify, max_open, max_bytes
        self._begin()

    def _begin(self) -> None:
        self._ends = list(accumulate(self._shards.samples))
        self._starts = [0, *self._ends[:-1]]
        self._total = self._ends[-1] if self._ends else 0
        shards = self._shards
        limit = self._max_open or default_limit() if shards.holds_descriptors else len(shards.names) + 1
        self._indexes = LruCache(shards.open_index, limit)
        self._readers = LruCache(self._open, limit)
        self._batches = count()
        self._ahead: LookAhead | None = None

    def __getstate__(self) -> dict[str, Any]:
        derived = ("_indexes", "_readers", "_batches", "_ahead", "_starts", "_ends", "_total")
        return {name: value for name, value in vars(self).items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    @never_raises
    def __repr__(self) -> str:
        counts = f"{len(self):,} samples in {len(self._shards.names):,} shards"
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
        reader, read = self._reader(shard)
        sample = reader.read_many([number])[0] if self._shards.concurrent else read(number)
        return sample if self._decode.is_noop else self._decode(sample, reader, number)

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
        return self._read_each(indices, None)

    def _read_each(self, indices: Sequence[int], begin: Begin | None) -> list[Any]:
        """The same; `begin(place)` is called before the sample at a place of the batch is decoded and transformed."""
        wanted = _positions(indices, len(self))
        if self._shards.concurrent:
            return self._read_concurrently(wanted, begin)
        if min(len(wanted), len(self._starts)) > self._readers.limit:  # in order, each shard is opened once
            order = sorted(range(len(wanted)), key=wanted.__getitem__)
            read = self._read(
                [wanted[at] for at in order], None if begin is None else lambda place: begin(order[place])
            )
            return [sample for _, sample in sorted(zip(order, read, strict=True), key=operator.itemgetter(0))]
        return self._read(wanted, begin)

    def _read(self, wanted: Sequence[int], begin: Begin | None) -> list[Any]:
        readers, starts, ends, samples = self._readers.things, self._starts, self._ends, list[Any]()
        batch, decode = next(self._batches), None if self._decode.is_noop else self._decode
        for at in wanted:
            shard = bisect_right(ends, at)
            opened = readers.get(shard)
            if opened is None or opened[0].batch != batch:
                opened = self._reader(shard)
                opened[0].batch = batch
            reader, read = opened
            number = at - starts[shard]
            if decode is None:
                samples.append(read(number))
                continue
            sample = read(number)
            if begin is not None:
                begin(len(samples))
            samples.append(decode(sample, reader, number))
        return samples

    def _read_concurrently(self, wanted: Sequence[int], begin: Begin | None) -> list[Any]:
        """Several shards at once, because most of the time is spent waiting; from what was fetched ahead without it."""
        groups = self._by_shard(wanted)
        ahead = self._ahead
        fetched = ahead.take(wanted) if ahead is not None and ahead.process == os.getpid() else None

        def read(group: tuple[int, list[int]]) -> tuple[ShardReader, list[int], list[Sample]]:
            shard, places = group
            numbers = [wanted[place] - self._starts[shard] for place in places]
            reader = self._reader(shard)[0]
            return reader, numbers, reader.read_many(numbers, None if fetched is None else fetched.get(shard))

        samples: list[Any] = [None] * len(wanted)
        each = self._shards.each if fetched is None else map
        traffic = self._shards.traffic
        for (_, places), (reader, numbers, some) in zip(groups, each(read, groups), strict=True):
            if traffic is not None:
                traffic.add(used=sum(sum(map(len, sample.values())) - len(sample["__key__"]) for sample in some))
            for place, number, sample in zip(places, numbers, some, strict=True):
                if begin is not None:
                    begin(place)
                samples[place] = sample if self._decode.is_noop else self._decode(sample, reader, number)
        return samples

    def _by_shard(self, wanted: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Shards, and the places of their samples among some positions."""
        order = sorted(range(len(wanted)), key=wanted.__getitem__)
        return [
            (shard, list(places))
            for shard, places in groupby(order, lambda place: bisect_right(self._ends, wanted[place]))
        ]

    @property
    def _looks_ahead(self) -> bool:
        """Whether announced batches are fetched before they are read."""
        return self._shards.look_ahead(self._spans) is not None

    def _take_traffic(self) -> Traffic | None:
        """What batches took in this process since this was called last; None of shards on this machine."""
        return None if self._shards.traffic is None else self._shards.traffic.take()

    def _look_ahead(self, batches: Iterable[Sequence[int]], *, anew: bool) -> None:
        """Announce batches that this process reads next, in their order; `anew` forgets those announced before."""
        if anew:
            self._flush()
        if self._ahead is None or self._ahead.process != os.getpid():
            self._ahead = self._shards.look_ahead(self._spans)
        if self._ahead is None:
            return
        known = list[list[int]]()
        for batch in batches:
            with suppress(IndexError, TypeError):  # which the read of the batch finds, too
                known.append(_positions(batch, len(self)))
        self._ahead.announce(known, anew=anew)

    @property
    def _keeps_samples(self) -> bool:
        """Whether samples that were read are kept in a cache, by when they are needed next."""
        return self._shards.keeps_samples

    def _cached_share(self, sample_bytes: float) -> float | None:
        """The share of the samples, of so many bytes each, that a cache of samples has room for; None without one."""
        return self._shards.cached_share(sample_bytes)

    def _share_with_workers(self) -> None:
        """Read what each worker would read for itself; call it before workers are started."""
        self._shards.share_with_workers()

    def _flush(self) -> None:
        """Write what is kept of the samples that were read in this process."""
        self._shards.flush()

    def _expect(self, upcoming: Upcoming | None) -> None:
        """Say when the samples of the next batch are needed again."""
        self._shards.expect(upcoming)

    def _spans(self, wanted: Sequence[int]) -> dict[int, Sequence[tuple[int, int]]]:
        """For each shard the ranges of some samples that have to be fetched."""
        groups = self._by_shard(wanted)
        closed = [shard for shard, _ in groups if shard not in self._readers.things]
        for _ in self._shards.each(self._reader, closed):
            pass
        found = {
            shard: self._reader(shard)[0].missing([wanted[place] - self._starts[shard] for place in places])
            for shard, places in groups
        }
        return {shard: spans for shard, spans in found.items() if spans}

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
            reader, _ = self._reader(shard)
            for samples in reader.between(at - start, end - start):
                if self._decode.is_noop:
                    yield from samples
                else:
                    yield from (self._decode(sample, reader, one) for one, sample in enumerate(samples, at - start))
                at += len(samples)

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
            ValueError: No sample has the member.
        """
        (member,) = _chosen([key], self._shards.members)
        if missing is not None:
            missing = checked_int("missing", missing, -(1 << 63))
        return np.concatenate([_member_sizes(index, member, missing) for index in self._every_index()])

    @property
    def member_keys(self) -> tuple[str, ...]:
        """The keys of the members that are read."""
        return self._shards.members if self._members is None else self._members

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

    def shard_of(self, index: int) -> str:
        """The path or URL of the shard of a sample.

        Args:
            index: The sample's position; negative ones count from the end.

        Raises:
            IndexError: There is no such sample.
        """
        return self._shards.path(self._find(index)[0])

    def offset_of(self, index: int) -> int:
        """Byte offset of a sample's first member in its shard.

        Args:
            index: The sample's position; negative ones count from the end.

        Raises:
            IndexError: There is no such sample.
        """
        shard, number = self._find(index)
        opened = self._index(shard)
        return int(opened.begins[opened.span(number)[0]]) * opened.unit

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
            raise ValueError(f"{len(found)} samples have the key {key!r}, each in another shard: give their indices")
        if not found:
            raise KeyError(key)
        return found[0]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that the manifest lists."""
        return self._shards.columns

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of the manifest.

        Args:
            name: Name of the column.

        Returns:
            A read-only memory map, shape [n_samples, ...].

        Raises:
            ManifestError: There is no such column.
            StaleIndexError: The manifest was replaced after the dataset was opened.
        """
        return self._shards.column(name)

    @property
    def fingerprint(self) -> str:
        """Digest of all shards, without columns; 32 hexadecimal digits."""
        return self._fingerprint_of(len(self._shards.samples))

    def prefix_fingerprint(self, n_samples: int) -> str | None:
        """The fingerprint of the first shards that hold exactly `n_samples` samples; None if no shard ends there."""
        ends = [0, *self._ends]
        # Of several, as shards may be empty, the most: they are the ones that a set of them alone has.
        return self._fingerprint_of(bisect_right(ends, n_samples) - 1) if n_samples in ends else None

    def _fingerprint_of(self, n_shards: int) -> str:
        return shards_fingerprint(self._shards.samples[:n_shards], self._shards.checksums[:n_shards])

    def close(self) -> None:
        """Close all files; later reads open them again."""
        if self._ahead is not None:
            self._look_ahead([], anew=True)
        self._flush()
        self._readers.clear()
        self._indexes.clear()

    def _find(self, index: int) -> tuple[int, int]:
        if isinstance(index, str):
            raise TypeError(f"index must be an integer, got the text {index!r}: find({index!r}) gives a key's position")
        at, total = operator.index(index), self._total
        if not -total <= at < total:
            raise IndexError(f"index must be {-total} to {total - 1}, got {at}")
        shard = bisect_right(self._ends, at % total)
        return shard, at % total - self._starts[shard]

    def _reader(self, shard: int) -> tuple[ShardReader, Read]:
        readers = self._readers
        opened = readers.things.get(shard)
        if opened is None or len(readers.things) >= readers.limit:
            try:
                opened = readers.get(shard)
            except OSError as error:
                raise self._not_opened(error, shard) from error
        opened[0].check_size()
        return opened

    def _every_index(self) -> Iterator[ShardIndex]:
        return self._shards.each(self._index, range(len(self._starts)))

    def _index(self, shard: int) -> ShardIndex:
        try:
            return self._indexes.get(shard)
        except OSError as error:
            raise self._not_opened(error, shard) from error

    def _not_opened(self, error: OSError, shard: int) -> ShardError:
        full = error.errno in NO_DESCRIPTORS
        cure = "close other files, or raise `ulimit -n`" if full else "restore it, or index its directory again"
        return ShardError(f"the shard cannot be opened ({error}): {cure}", shard=self._shards.path(shard))

    def _open(self, shard: int) -> tuple[ShardReader, Read]:
        verify = self._verify == "read"
        index = self._indexes.get(shard)
        first, most = self._starts[shard], self._max_bytes
        reader = self._shards.open_shard(index, self._members, first=first, verify=verify, max_bytes=most)
        if self._verify == "open":
            reader.check_all()
        return reader, reader.bind(reader.source.data)  # not inside the reader: nothing would close a cycle in time


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


class SampleDecoder:
    """Decodes and transforms samples, and names the place when one of both fails."""

    def __init__(
        self,
        members: Sequence[str],
        decode: Decode,
        transform: Transform | None,
        allowed_classes: Collection[AllowedClass],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        if transform is not None and not callable(transform):
            raise ValueError(f"transform must be a function of a sample or None, got {transform!r}")
        self._transform = transform
        self._decoders = _decoders(members, decode, allowed_classes, max_bytes)
        self._steps = [_step(member, decoder) for member, decoder in self._decoders.items()]
        self.is_noop = transform is None and not self._decoders
        self.runs_own_code = transform is not None or not (decode is None or decode is decode_member)

    def __call__(self, sample: Sample, reader: ShardReader, number: int) -> Any:
        """Finish one sample, in place; `reader` and `number` tell where it comes from."""
        steps = self._steps
        if len(sample) < len(steps):  # a sample may have few of many members
            steps = [_step(member, self._decoders[member]) for member in sample if member in self._decoders]
        member = ""
        try:
            for member, decoder, make, most in steps:
                if (data := sample.get(member)) is not None:
                    sample[member] = make(data) if len(data) <= most else decoder(data)
        except AllowedClassError:
            raise
        except ShardError as error:
            vars(error).update(reader.place(number, member))
            raise
        except Exception as error:
            failed = self._decoders[member]
            if isinstance(failed, MemberDecoder):  # of a small member
                explained = failed.explained(error)
            else:
                explained = DecodeError(f"the decoder of {member!r} failed with {type(error).__name__}: {error}")
            vars(explained).update(reader.place(number, member))
            raise explained from error
        if self._transform is None:
            return sample
        key, shard = sample["__key__"], reader.index.shard
        try:
            return self._transform(sample)
        except Exception as error:
            error.add_note(f"in transform, with sample {key!r} of shard {shard!r}")
            if isinstance(error, ShardError) and error.sample is None:
                error.shard, error.sample = shard, key
            raise


def _step(member: str, decoder: Decoder) -> tuple[str, Decoder, Decoder, int]:
    """A member's key, its decoder, the one of small members, and the most bytes of these."""
    make, most = (decoder.make, decoder.most) if isinstance(decoder, MemberDecoder) else (decoder, -1)
    return member, decoder, make, most


def _decoders(
    members: Sequence[str], decode: Decode, allowed_classes: Collection[AllowedClass], max_bytes: int
) -> dict[str, Decoder]:
    """What decodes each member; nothing for those that stay bytes."""
    by_extension = decode is decode_member or isinstance(decode, Mapping)
    if allowed_classes and not by_extension:
        message = f"allowed_classes is for the default decoding, which decode={decode!r} replaces"
        raise ValueError(f"{message}: leave one out")
    AllowedClasses(allowed_classes)
    made = {member: member_decoder(member, tuple(allowed_classes), max_bytes) for member in members}
    default: dict[str, Decoder] = {member: decoder for member, decoder in made.items() if decoder is not None}
    if decode is None or decode is decode_member:
        return default if by_extension else {}
    if isinstance(decode, Mapping):
        own = {_folded(member): decoder for member, decoder in decode.items()}
        unknown = [member for member in own if member not in members]
        if unknown:
            raise ValueError(f"decode names {unknown}, but the members are {sorted(members)}")
        for member, decoder in own.items():
            if decoder is not None and not callable(decoder):
                raise ValueError(f"decode[{member!r}] must be a function of bytes or None, got {decoder!r}")
        return {member: decoder for member, decoder in {**default, **own}.items() if decoder is not None}
    if not callable(decode):
        raise ValueError(f"decode must be a function of key and bytes, a mapping of such or None, got {decode!r}")
    return {member: partial(decode, member) for member in members}


def _folded(member: object) -> Any:
    """A member's key in lower case; what is no text stays as it is, and is no member's key."""
    return member.lower() if isinstance(member, str) else member


def _chosen(keys: Sequence[str], members: Collection[str]) -> tuple[str, ...]:
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        raise ValueError(f"keys must be a list of member keys, got {keys!r}: write [{keys!r}]")
    given = list(keys)
    chosen = tuple(map(_folded, given))
    if not chosen or not all(key in members for key in chosen) or len(set(chosen)) < len(chosen):
        raise ValueError(f"keys must be one or more of {sorted(members)}, each once, got {given}")
    return chosen


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
