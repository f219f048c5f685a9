"""A dataset over many shards: any sample, at any time."""

from __future__ import annotations

import errno
import operator
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.decoding.allowed import AllowedClass
from headrace.webdatamodule.shards.decoding.decode import decode_member
from headrace.webdatamodule.shards.decoding.limits import MAX_BYTES
from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.index.keys import SampleKeys
from headrace.webdatamodule.shards.reading.finishing import Decode, Finishing, Transform, folded
from headrace.webdatamodule.shards.reading.held import Held
from headrace.webdatamodule.shards.reading.measuring import member_sizes
from headrace.webdatamodule.shards.reading.ordering import Group, by_shard
from headrace.webdatamodule.shards.reading.shard_reader import OpenShard
from headrace.webdatamodule.shards.reading.sources import Source, find_shards

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
    >>> from headrace.webdatamodule.shards.writing.writer import write_tars
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
