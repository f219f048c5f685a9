"""A dataset over many shards: any sample, at any time."""

from __future__ import annotations

import errno
import operator
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.decoding.allowed import Allowed, AllowedClass, AllowedClassError
from headrace.webdatamodule.shards.decoding.decode import decode_member
from headrace.webdatamodule.shards.decoding.limits import MAX_BYTES
from headrace.webdatamodule.shards.errors import DecodeError, ShardError
from headrace.webdatamodule.shards.index.keys import SampleKeys
from headrace.webdatamodule.shards.index.shard_index import ShardIndex
from headrace.webdatamodule.shards.reading.shard_reader import OpenShard, Sample
from headrace.webdatamodule.shards.reading.sources import Source, find_shards

Thing = TypeVar("Thing")

_FULL = (errno.EMFILE, errno.ENFILE)


def default_limit() -> int:
    """How many shards to hold open: each takes two file descriptors, and half of them are left to others."""
    try:
        from resource import RLIMIT_NOFILE, getrlimit
    except ImportError:  # not on Windows
        return 512
    soft = getrlimit(RLIMIT_NOFILE)[0]
    return max(1, min(soft // 4, 4096)) if soft >= 0 else 4096


class Held(Generic[Thing]):
    """Opens things by their numbers, and lets go of those that were not used for the longest time.

    Safe in threads: what is let go is closed when its last user has finished.

    Args:
        open_one: Opens one.
        limit: How many to hold; found out when None.

    >>> held = Held(lambda number: print("open", number) or -number, 1)
    >>> held.get(3), held.get(3)
    open 3
    (-3, -3)
    """

    def __init__(self, open_one: Callable[[int], Thing], limit: int | None = None) -> None:
        self._open, self._limit = open_one, limit or default_limit()
        self._held: dict[int, Thing] = {}  # the least recently used first
        self._process = os.getpid()

    def get(self, number: int) -> Thing:
        """One of them, opened if need be.

        Args:
            number: Of the thing.

        Raises:
            OSError: It cannot be opened; for want of file descriptors only when none is held here.
        """
        if self._process != os.getpid():  # forked: leave the parent's alone
            self._held, self._process = {}, os.getpid()
        thing = self._held.pop(number, None)
        if thing is None:
            self._leave(self._limit - 1)
            thing = self._open_anyhow(number)
        self._held[number] = thing
        return thing

    def close(self) -> None:
        """Let go of all."""
        self._leave(0)

    def _leave(self, most: int) -> None:
        for number in list(self._held)[: max(0, len(self._held) - most)]:
            self._held.pop(number, None)

    def _open_anyhow(self, number: int) -> Thing:
        while True:
            try:
                return self._open(number)
            except OSError as error:
                if error.errno not in _FULL or not self._held:
                    raise
                self._limit = max(1, len(self._held) // 2)
                self._leave(self._limit // 2)


Group = tuple[int, list[int]]


def by_shard(indices: Sequence[int] | npt.NDArray[np.integer], ends: Sequence[int]) -> tuple[list[Group], list[int]]:
    """Put the positions that lie in one shard together, in the order of the shard.

    Args:
        indices: Positions in a set of shards, shape [n]; negative ones count from the end.
        ends: The position behind each shard's last sample, shape [number of shards].

    Returns:
        Pairs of a shard and numbers of samples in it; and for each of these, in order, its place in `indices`.

    Raises:
        IndexError: A position is not there.
        TypeError: A position is no integer.

    >>> by_shard([4, 0, -1, 0], [3, 5])
    ([(0, [0, 0]), (1, [1, 1])], [1, 3, 0, 2])
    """
    wanted = np.asarray(indices)
    if not wanted.size:
        return [], []
    if wanted.dtype.kind not in "iu" or wanted.ndim != 1:
        raise TypeError(f"indices must be integers, shape [n], got {wanted.dtype} of shape {list(wanted.shape)}")
    order = wanted.argsort(kind="stable")
    ascending = wanted[order].tolist()
    count = ends[-1] if ends else 0
    if ascending[0] < -count or ascending[-1] >= count:
        wrong = ascending[0] if ascending[0] < -count else ascending[-1]
        raise IndexError(f"indices must be {-count} to {count - 1}, got {wrong}")
    if ascending[0] < 0:
        return by_shard(np.where(wanted < 0, wanted + count, wanted), ends)
    return _cut(ascending, ends), order.tolist()


def _cut(ascending: list[int], ends: Sequence[int]) -> list[Group]:
    groups: list[Group] = []
    begin = 0
    while begin < len(ascending):
        shard = bisect_right(ends, ascending[begin])
        start = ends[shard - 1] if shard else 0
        end = bisect_left(ascending, ends[shard], begin)
        groups.append((shard, [at - start for at in ascending[begin:end]]))
        begin = end
    return groups


def member_sizes(index: ShardIndex, member: str, missing: int | None = None) -> npt.NDArray[np.int64]:
    """How many bytes a member has in each sample of a shard.

    Args:
        index: Of the shard.
        member: The member's key, in lower case.
        missing: What to say of samples that lack it; an error when None.

    Returns:
        Bytes, shape [n_samples].

    Raises:
        ShardError: A sample lacks the member.
    """
    positions = index.positions(member)
    lacking = positions < 0
    if missing is None and lacking.any():
        key = index.key(int(lacking.argmax()))
        cure = "correct the shard, or name a member that all samples have; IndexedShards.sizes takes missing=0 instead"
        message = f"the sample has no member {member!r}: {cure}"
        raise ShardError(message, shard=index.shard, sample=key)
    if not index.n_members:
        return np.empty(0, np.int64)
    sizes = index.sizes[positions].astype(np.int64)
    return np.where(lacking, missing or 0, sizes)


Decoder: TypeAlias = Callable[[bytes], Any]

Decode: TypeAlias = Callable[[str, bytes], Any] | Mapping[str, Decoder | None] | None

Transform: TypeAlias = Callable[[Sample], Any]


class Finishing:
    """Decodes and transforms samples, and says where it was when one of both fails.

    Args:
        members: The member keys that occur, in lower case.
        decode: As for `IndexedShards`.
        transform: The same.
        allowed_classes: The same.
        max_bytes: The same.

    Raises:
        ValueError: One of them is not allowed.
    """

    def __init__(
        self,
        members: Iterable[str],
        decode: Decode,
        transform: Transform | None,
        allowed_classes: Collection[AllowedClass],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        if transform is not None and not callable(transform):
            raise ValueError(f"transform must be a function of a sample or None, got {transform!r}")
        self._transform = transform
        self._decoders = decoders(tuple(members), decode, allowed_classes, max_bytes)
        self.idle = transform is None and not self._decoders

    def __call__(self, sample: Sample, shard: OpenShard, number: int) -> Any:
        """Finish one sample.

        Args:
            sample: Its bytes; changed.
            shard: Where it comes from.
            number: Its number there.

        Returns:
            The sample, or what `transform` made of it.

        Raises:
            DecodeError: A member cannot be decoded; it names the place.
        """
        # A sample may have few of many members.
        few = len(sample) < len(self._decoders)
        for member in [*sample] if few else self._decoders:
            if member in sample and member in self._decoders:
                sample[member] = _decoded(self._decoders[member], sample[member], shard, number, member)
        return sample if self._transform is None else _transformed(self._transform, sample, shard)


def decoders(
    members: Collection[str],
    decode: Decode,
    allowed_classes: Collection[AllowedClass],
    max_bytes: int = MAX_BYTES,
) -> dict[str, Decoder]:
    """What decodes each member; nothing for those that stay bytes.

    Args:
        members: The member keys that occur.
        decode: As for `IndexedShards`.
        allowed_classes: The same.
        max_bytes: The same.

    Raises:
        ValueError: `decode` names other members, or is something else; `allowed_classes` would not be used, or
            holds something else.
    """
    usual = decode is decode_member or isinstance(decode, Mapping)
    if allowed_classes and not usual:
        raise ValueError(
            f"allowed_classes is for the default decoding, which decode={decode!r} replaces: leave one out"
        )
    Allowed(allowed_classes)
    by_default: dict[str, Decoder] = {
        member: partial(decode_member, member, allowed_classes=tuple(allowed_classes), max_bytes=max_bytes)
        for member in members
    }
    if decode is None or decode is decode_member:
        return by_default if usual else {}
    if isinstance(decode, Mapping):
        own = {folded(member): decoder for member, decoder in decode.items()}
        strange = [member for member in own if member not in members]
        if strange:
            raise ValueError(f"decode names {strange}, but the members are {sorted(members)}")
        for member, decoder in own.items():
            if decoder is not None and not callable(decoder):
                raise ValueError(f"decode[{member!r}] must be a function of bytes or None, got {decoder!r}")
        return {member: decoder for member, decoder in {**by_default, **own}.items() if decoder is not None}
    if not callable(decode):
        raise ValueError(f"decode must be a function of key and bytes, a mapping of such or None, got {decode!r}")
    return {member: partial(decode, member) for member in members}


def folded(member: object) -> Any:
    """A member's key in lower case; what is no text stays as it is, and is no member's key.

    >>> folded("JPG"), folded(3)
    ('jpg', 3)
    """
    return member.lower() if isinstance(member, str) else member


def _decoded(decoder: Decoder, data: bytes, shard: OpenShard, number: int, member: str) -> Any:
    try:
        return decoder(data)
    except AllowedClassError:
        raise
    except ShardError as error:
        vars(error).update(shard.place(number, member))
        raise
    except Exception as error:
        message = f"the decoder of {member!r} failed with {type(error).__name__}: {error}"
        raise DecodeError(message, **shard.place(number, member)) from error


def _transformed(transform: Transform, sample: Sample, shard: OpenShard) -> Any:
    key = sample["__key__"]
    try:
        return transform(sample)
    except Exception as error:
        error.add_note(f"in transform, with sample {key!r} of shard {shard.index.shard!r}")
        if isinstance(error, ShardError) and error.sample is None:
            error.shard, error.sample = shard.index.shard, key
        raise


Check = Literal["read", "open", "none"]

_CHECKS = ("read", "open", "none")


class IndexedShards:
    """The samples of indexed shards as a map-style dataset, for torch's `DataLoader` and for anything else.

    A sample is a dictionary as webdataset makes it, `{"__key__": its key, member key: decoded member}`. Shards are
    mapped when they are first read, by each process for itself, so that the dataset is sent to workers in a few bytes.
    What is read is what was indexed: a shard or an index that was changed is an error that names the place.

    Args:
        directory_or_manifest_or_list: A directory that `index_shards` has indexed, the path of its `manifest.json`,
            or a list of indexed tar files. Also the URL of one of these, such as "s3://bucket/train", or a `Remote`
            with options and a cache.
        keys: Which members to read, in this order; all when None. Case does not matter.
        decode: Bytes to objects. `decode_member`, by extension, when not given; None leaves bytes; a function gets the
            member's key and its bytes; a mapping holds functions of bytes (or None) for some members, while the
            others are decoded by extension.
        transform: Gets the decoded sample, and gives what the dataset gives.
        check: When to compare checksums: of each member on every "read" of it, of a whole shard on "open", or "none".
        allowed_classes: What pickles may use; see `decode_member`.
        max_open: How many shards to hold open in a process; by the limit of file descriptors when None.
        max_bytes: Most bytes that one member may have, and that the default decoding of one may take, what it is
            unpacked to included. Default 2 GiB.

    Raises:
        FileNotFoundError: There is nothing at the path.
        ShardError: There is no index or no manifest, or it is damaged.
        ValueError: An argument is not allowed.

    >>> import tempfile
    >>> from headrace.webdatamodule.shards.index.build import index_shards
    >>> from headrace.webdatamodule.shards.writing.write import write_tars
    >>> folder = tempfile.mkdtemp()
    >>> paths = write_tars([(f"s{i}", {"json": b"[%d]" % i}) for i in range(5)], folder, n_shards=2)
    >>> manifest = index_shards(folder)
    >>> dataset = IndexedShards(folder)
    >>> len(dataset), dataset[-1]
    (5, {'__key__': 's4', 'json': [4]})
    """

    def __init__(
        self,
        directory_or_manifest_or_list: Source,
        keys: Sequence[str] | None = None,
        decode: Decode = decode_member,
        transform: Transform | None = None,
        check: Check = "read",
        allowed_classes: Collection[AllowedClass] = (),
        *,
        max_open: int | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        if check not in _CHECKS:
            raise ValueError(f"check must be one of {', '.join(map(repr, _CHECKS))}, got {check!r}")
        if max_open is not None and max_open < 1:
            raise ValueError(f"max_open must be 1 or more, got {max_open}: at least one shard has to be open")
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be 1 or more, got {max_bytes}: say how large a member may become")
        self._shards = find_shards(directory_or_manifest_or_list)
        self._members = None if keys is None else _chosen(keys, self._shards.members)
        self._finish = Finishing(self.member_keys, decode, transform, allowed_classes, max_bytes)
        self._check, self._max_open, self._max_bytes = check, max_open, max_bytes
        self._begin()

    def _begin(self) -> None:
        self._ends = list(accumulate(self._shards.samples))
        self._starts = [0, *self._ends[:-1]]
        self._held = Held(self._open, self._max_open)

    def __getstate__(self) -> dict[str, Any]:
        derived = ("_held", "_starts", "_ends")
        return {name: value for name, value in vars(self).items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def __repr__(self) -> str:
        counts = f"{len(self):,} samples in {len(self._shards.names):,} shards"
        return f"<{type(self).__name__}: {counts}, members: {', '.join(self.member_keys) or 'none'}>"

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Any:
        found, number = self._find(index)
        shard, _, raw = self._raw((found, [number]))
        return raw[0] if self._finish.idle else self._finish(raw[0], shard, number)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read a batch, shard by shard; torch's `DataLoader` calls this.

        Args:
            indices: Positions in any order, repeated or not; negative ones count from the end.

        Returns:
            The samples, in the order of the indices.

        Raises:
            IndexError: There is no such sample.
            ShardError: A shard is damaged or not the one that was indexed, or a member cannot be decoded.
        """
        groups, order = by_shard(indices, self._ends)
        read: list[Any] = []
        for shard, numbers, raw in self._shards.each(self._raw, groups):
            if self._finish.idle:
                read += raw
            else:  # no map, for which a StopIteration of transform would be the end
                read += [self._finish(one, shard, number) for one, number in zip(raw, numbers, strict=True)]
        samples: list[Any] = [None] * len(read)
        for position, sample in zip(order, read, strict=True):
            samples[position] = sample
        return samples

    def __iter__(self) -> Iterator[Any]:
        return self.iterate()

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        """Read samples one after another, which is faster than to ask for each.

        Args:
            start: The first one.
            stop: The one after the last; the end when None.

        Yields:
            The samples; all that come before a damaged one, and then its error.

        Raises:
            ValueError: The range is not in 0 to `len(self)`.
            ShardError: As of `__getitems__`.
        """
        end = len(self) if stop is None else operator.index(stop)
        if not 0 <= operator.index(start) <= end <= len(self):
            raise ValueError(f"start and stop must be 0 <= start <= stop <= {len(self)}, got {start} and {stop}")
        return self._iterate(operator.index(start), end)

    def _iterate(self, at: int, stop: int) -> Iterator[Any]:
        while at < stop:
            number = bisect_right(self._ends, at)
            start, end = self._starts[number], min(stop, self._ends[number])
            shard = self._opened(number)
            for read in shard.between(at - start, end - start):
                if self._finish.idle:
                    yield from read
                else:
                    yield from (self._finish(raw, shard, one) for one, raw in enumerate(read, at - start))
                at += len(read)

    def sizes(self, key: str, *, missing: int | None = None) -> npt.NDArray[np.int64]:
        """How many bytes a member has in each sample, from the indexes alone.

        Args:
            key: The member's key; case does not matter.
            missing: What to say of samples that lack it; an error when None.

        Returns:
            Bytes as they are stored, shape [n_samples].

        Raises:
            ShardError: A sample lacks the member, or an index is damaged.
            ValueError: No sample has it.
        """
        (member,) = _chosen([key], self._shards.members)
        check = self._check != "none"
        numbers = range(len(self._starts))
        indexes = self._shards.each(partial(self._shards.open_index, check=check), numbers)
        return np.concatenate([member_sizes(index, member, missing) for index in indexes])

    @property
    def member_keys(self) -> tuple[str, ...]:
        """The keys of the members that are read."""
        return self._shards.members if self._members is None else self._members

    @property
    def keys(self) -> SampleKeys:
        """The keys of all samples, a sequence; each is made when it is asked for."""
        return SampleKeys(len(self), self.key)

    def key(self, index: int) -> str:
        """The key of a sample.

        Args:
            index: Its position; negative ones count from the end.

        Raises:
            IndexError: There is no such sample.
        """
        shard, number = self._find(index)
        return self._opened(shard).index.key(number)

    def shard_of(self, index: int) -> str:
        """Where the shard of a sample lies.

        Args:
            index: The sample's position; negative ones count from the end.

        Raises:
            IndexError: There is no such sample.
        """
        return self._shards.path(self._find(index)[0])

    def find(self, key: str) -> int:
        """The position of the first sample with a key.

        Args:
            key: The sample's key.

        Raises:
            KeyError: No sample has it.
        """
        for number, start in enumerate(self._starts):
            try:
                return start + self._opened(number).index.find(key)
            except KeyError:
                continue
        raise KeyError(key)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that the manifest lists."""
        return self._shards.columns

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of the manifest.

        Args:
            name: Its name.

        Returns:
            A read-only memory map, shape [n_samples, ...].

        Raises:
            ManifestError: There is no such column.
            StaleIndexError: The manifest was replaced since.
        """
        return self._shards.column(name)

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that change with any byte of any shard; columns do not count."""
        told = repr((self._shards.samples, self._shards.checksums))
        return blake2b(told.encode(), digest_size=16).hexdigest()

    def close(self) -> None:
        """Let go of all maps; what is read afterwards is mapped again."""
        self._held.close()

    def _find(self, index: int) -> tuple[int, int]:
        if isinstance(index, str):
            raise TypeError(f"index must be an integer, got the text {index!r}: find({index!r}) gives a key's position")
        at = operator.index(index)
        if not -len(self) <= at < len(self):
            raise IndexError(f"index must be {-len(self)} to {len(self) - 1}, got {at}")
        at %= len(self)
        shard = bisect_right(self._ends, at)
        return shard, at - self._starts[shard]

    def _raw(self, group: Group) -> tuple[OpenShard, list[int], list[Any]]:
        number, samples = group
        shard, raw = self._opened(number), list[Any]()
        shard.some(samples, raw)
        return shard, samples, raw

    def _opened(self, number: int) -> OpenShard:
        try:
            return self._held.get(number)
        except OSError as error:
            full = error.errno in (errno.EMFILE, errno.ENFILE)
            hint = "close other files, or raise `ulimit -n`" if full else "restore it, or index its directory again"
            raise ShardError(
                f"the shard cannot be opened ({error}): {hint}", shard=self._shards.path(number)
            ) from error

    def _open(self, number: int) -> OpenShard:
        index = self._shards.open_index(number, check=self._check != "none")
        verify = self._check == "read"
        shard = self._shards.open_shard(index, self._members, verify=verify, max_bytes=self._max_bytes)
        if self._check == "open":
            shard.check_all()
        return shard


def _chosen(keys: Sequence[str], members: Collection[str]) -> tuple[str, ...]:
    if isinstance(keys, str):
        raise ValueError(f"keys must be a list of member keys, got the text {keys!r}: write [{keys!r}]")
    if not isinstance(keys, Iterable):
        raise ValueError(f"keys must be a list of member keys, got {keys!r}: write [{keys!r}]")
    given = list(keys)
    chosen = tuple(map(folded, given))
    if not chosen or not all(key in members for key in chosen) or len(set(chosen)) < len(chosen):
        allowed = f"one or more of {sorted(members)}, each once"
        raise ValueError(f"keys must be {allowed}, got {given}")
    return chosen
