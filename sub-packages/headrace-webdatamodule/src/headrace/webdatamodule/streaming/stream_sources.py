"""Where a split's shards are, which samples each rank and worker reads, and how they are read."""

from __future__ import annotations

import copy
import glob
import os
import random
import re
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

import webdataset as wds
from torch.utils.data import get_worker_info

from headrace.webdatamodule._shared.random import text_key
from headrace.webdatamodule.loading.equal_plan import equal_share
from headrace.webdatamodule.shards import IndexedShards, ShardError, ShardIndex
from headrace.webdatamodule.shards.decoding.decode import member_decoder
from headrace.webdatamodule.shards.errors import Damage
from headrace.webdatamodule.shards.format.pack import is_pack_name
from headrace.webdatamodule.shards.format.tar import compressed_beside, compression
from headrace.webdatamodule.shards.set_fingerprint import files_fingerprint
from headrace.webdatamodule.shards.urls import redacted

# Those that `tarfile` decompresses in a stream: zstd since Python 3.14.
_READ_COMPRESSED = {"gzip", "bzip2", "xz", *(("zstd",) if "zst" in tarfile.TarFile.OPEN_METH else ())}
Mix = Callable[[dict[str, Any]], Iterable[Any]]
# A mixture numbers the passes over its sources: by epoch, lap, repetition, and restart of the source within that.
_EPOCH, _LAP, _REPETITION = 2**32, 2**24, 2**16


class Pass(NamedTuple):
    """One pass over the shards, as one rank sees it."""

    epoch: int = 0
    lap: int = 0  # how often the shards were begun again within the epoch
    rank: int = 0
    num_replicas: int = 1
    repetition: int = 0  # how often the dataset was repeated within the lap, by a method in `invoke_wds`

    def key(self, *parts: object) -> str:
        """Text that is different for each pass over the shards, and the same on all ranks."""
        return "/".join(map(str, (*parts, self.epoch, self.lap, self.repetition)))

    def reader_key(self, *parts: object) -> str:
        """Text that is different for each pass, rank and worker."""
        return self.key(*parts, f"rank {self.rank}", f"worker {worker_number()[0]}")


def worker_number() -> tuple[int, int]:
    """Number of this worker, and of all workers of its rank; (0, 1) outside of a worker."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def check_place(name: str, place: object) -> str:
    """Refuse places that are no local directory.

    webdataset opens a URL by its scheme: `pipe:` runs a shell, others start curl or a cloud's command line. A place
    in a configuration file must not do so unseen.
    """
    if not isinstance(place, str | os.PathLike):
        raise TypeError(f"{name} must be the path of a directory, got {place!r}")
    text = os.fspath(place)
    scheme = scheme_of(text)
    if scheme not in ("", "file"):
        cure = "copy the shards to a local directory, or use IndexedWebDataModule, which reads remote shards"
        raise ValueError(f"{name} is {redacted(text)!r}: shards are not read from {scheme!r} URLs: {cure}")
    return text


def scheme_of(place: str) -> str:
    """The URL scheme of a place in lower case, "" for a path; a single letter is a drive."""
    match = re.match(r"\s*([a-zA-Z][a-zA-Z0-9+.-]+):", place)
    return match[1].lower() if match else ""


def local_directory(place: str) -> Path:
    """The absolute path of a directory, so that no text that begins with a slash is taken for a URL later."""
    path = url2pathname(urlsplit(place).path) if scheme_of(place) == "file" else place
    return Path(path).expanduser().absolute()


def find_tars(place: str, prefix: str) -> list[str]:
    """The paths of a directory's shards, sorted."""
    directory = local_directory(place)
    if shards := sorted(directory.glob(f"{glob.escape(prefix)}-*.tar")):
        return [str(shard) for shard in shards]
    what = "has no shard" if directory.is_dir() else "is no directory, so there is no shard"
    stems = {path.stem for path in directory.glob("*-*.tar") if not path.name.startswith(".")}
    prefixes = sorted({stem.rpartition("-")[0] for stem in stems} - {""})
    cure = "correct dirs_tars_wds or prefix_tars_wds, or write the shards first"
    if compressed := compressed_beside(directory):
        raise FileNotFoundError(f"{directory} {what} named {prefix}-*.tar{compressed}")
    if prefixes:
        named = ", ".join(map(repr, prefixes[:5])) + (f" and {len(prefixes) - 5} more" if len(prefixes) > 5 else "")
        cure = f"the shards there have the prefix {named}: pass prefix_tars_wds, such as {prefixes[0]!r}"
    raise FileNotFoundError(f"{directory} {what} named {prefix}-*.tar: {cure}")


def shuffled(n: int, key: str) -> list[int]:
    """A permutation of 0 to n - 1 that depends on the key only.

    >>> shuffled(6, "seed 1, epoch 0")
    [1, 4, 5, 2, 3, 0]
    """
    return sorted(range(n), key=lambda shard: text_key(f"{key}/{shard}"))


def rank_share(n: int, num_replicas: int, rank: int) -> tuple[int, int]:
    """The range of samples of one rank, in a list of `n` that begins again where it ends.

    All ranks get equally many; at most `num_replicas - 1` samples come twice.
    """
    each = -(-n // num_replicas)
    return rank * each, (rank + 1) * each


def pieces(counts: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Cut a range of samples at the ends of shards of `counts` samples; beyond the last comes the first again.

    Yields the number of a shard, its first sample and the one after its last.
    """
    ends = list(accumulate(counts))
    at = start
    while ends and ends[-1] and at < stop:
        shard = bisect_right(ends, at % ends[-1])
        first = at % ends[-1] - (ends[shard] - counts[shard])
        last = min(counts[shard], first + stop - at)
        yield shard, first, last
        at += last - first


class IndexedSource:
    """Samples of shards of `counts` samples: each rank and worker reads its share of them, through the indexes.

    The shards are shuffled by `seed`, if it is not None. With `even` every worker of every rank gets equally many
    samples, as the sources of a mixture must.
    """

    def __init__(self, tars: Sequence[str], counts: Sequence[int], keys: Sequence[str], seed: Any, *, even: bool):
        self.tars, self.counts, self.seed, self.even = list(tars), list(counts), seed, even
        shards = IndexedShards(self.tars, decode=None)
        wanted = list(dict.fromkeys(key.lower() for key in keys))
        if set(wanted) <= set(shards.member_keys):
            shards = IndexedShards(self.tars, wanted, decode=None)
        self.shards, self.fingerprint = shards, shards.fingerprint

    def __len__(self) -> int:
        return sum(self.counts)

    def __call__(self, now: Pass) -> Iterator[dict[str, Any]]:
        """One dictionary of encoded members per sample."""
        number, num_workers = worker_number()
        if self.even:
            readers = now.num_replicas * num_workers
            start, stop = rank_share(len(self), readers, now.rank * num_workers + number)
        else:
            start, stop = equal_share(*rank_share(len(self), now.num_replicas, now.rank), number, num_workers)
        order: Sequence[int] = range(len(self.tars))
        if self.seed is not None:
            order = shuffled(len(self.tars), now.key(self.seed))
        begins = [end - count for end, count in zip(accumulate(self.counts), self.counts, strict=True)]
        for at, first, last in pieces([self.counts[shard] for shard in order], start, stop):
            tar, begin = self.tars[order[at]], begins[order[at]]
            for sample in self.shards.iterate(begin + first, begin + last):
                sample["__url__"] = tar
                yield sample


class ShardSource:
    """Samples of shards without indexes: each rank and worker reads whole shards.

    `options` are those of `webdataset.WebDataset`, which reads them. They are shuffled before they are split.
    """

    def __init__(self, tars: Sequence[str], options: Mapping[str, Any], seed: Any, *, shuffle: bool):
        self.tars, self.seed, self.shuffle = list(tars), seed, shuffle
        self.own_split, self.resampled = has_own_split(options), is_resampled(options)
        given = {"empty_check": False, **options}
        if not self.own_split:
            # webdataset asks for the rank in the worker, where a spawned process knows of none.
            given["nodesplitter"] = None
        given |= _keeping_packs(given)
        self._pipeline = wds.WebDataset(self.tars, shardshuffle=False, **given)
        grouper = next(at for at, stage in enumerate(self._pipeline.pipeline) if _is_grouper(stage))
        self._pipeline.pipeline.insert(grouper, _refuse_packs)
        openers = (wds.cache.StreamingOpen, wds.cache.FileCache)
        [at] = [i for i, stage in enumerate(self._pipeline.pipeline) if isinstance(stage, openers)]
        self._pipeline.pipeline[at] = LocalOpener(given.get("handler", wds.reraise_exception))
        self.fingerprint = files_fingerprint(self.tars)

    def __call__(self, now: Pass) -> Iterator[dict[str, Any]]:
        """One dictionary of encoded members per sample."""
        pipeline = copy.copy(self._pipeline)
        pipeline.pipeline = [lambda: ({"url": tar} for tar in self._tars_of(now)), *pipeline.pipeline[1:]]
        return iter(pipeline)

    def _tars_of(self, now: Pass) -> Iterator[str]:
        if self.resampled:
            draw = random.Random(now.reader_key("resampled", self.seed))  # noqa: S311 - an order, not a secret
            return iter(lambda: draw.choice(self.tars), None)
        order: Sequence[int] = range(len(self.tars))
        if self.shuffle:
            order = shuffled(len(self.tars), now.key(self.seed))
        own = order if self.own_split else islice(order, now.rank, None, now.num_replicas)
        return (self.tars[shard] for shard in own)


def has_own_split(options: Mapping[str, Any]) -> bool:
    """Whether the user chose how ranks share the shards; None is a choice as well: every rank reads all of them."""
    return options.get("nodesplitter", wds.split_by_node) is not wds.split_by_node


def is_resampled(options: Mapping[str, Any]) -> bool:
    """Whether the shards are drawn without end."""
    return bool(options.get("resampled")) or options.get("mode") == "resampled"


def count_samples(tar: str) -> int | None:
    """How many samples a shard holds, by its index; None where there is no index."""
    try:
        return int(ShardIndex.open(tar).n_samples)
    except FileNotFoundError:
        return None


def _is_grouper(stage: Any) -> bool:
    """Whether a stage of webdataset puts members together to samples."""
    return getattr(stage, "f", None) is wds.tariterators.group_by_keys


def _keeping_packs(options: Mapping[str, Any]) -> dict[str, Any]:
    """The functions of `options` that choose and rename files, so that packs come to `_refuse_packs` as they are."""
    given, names = dict[str, Any](), ("select_files", "rename_files")
    for name, function in ((name, options[name]) for name in names if options.get(name) is not None):
        kept = {"select_files": lambda _: True, "rename_files": str}[name]
        given[name] = lambda file, function=function, kept=kept: kept(file) if is_pack_name(file) else function(file)
    return given


def _refuse_packs(files: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A stage after webdataset's reader of tars: to webdataset, a pack of many samples is one."""
    for file in files:
        if file and is_pack_name(file["fname"]):
            cure = "call index_shards on its directory, and leave out options of webdataset's reader"
            message = f"the shard has packs, whose samples are read through its index: {cure}"
            raise ShardError(message, shard=file["__url__"], member=file["fname"])
        yield file


class LocalOpener:
    """Opens shards as plain files, in place of webdataset's opener.

    That one parses paths as URLs: it runs a shell for `pipe:`, obeys GOPEN_REWRITE and WDS_CACHE, and cuts file names
    at "#" and "?". `handler` receives an exception, and returns whether to continue.
    """

    def __init__(self, handler: Callable[[Exception], bool]) -> None:
        self.handler = handler

    def __call__(self, source: Iterable[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
        """One dictionary with an open stream per shard."""
        for item in source:
            path = item["url"]
            try:
                _check_complete(path)
                stream = open(path, "rb")  # noqa: PTH123, SIM115 - closed below, when its reader is done
            except Exception as error:
                if self.handler(error):
                    continue
                return
            with stream:
                yield {"url": path, "stream": stream, "local_path": path}


def _check_complete(path: str) -> None:
    """Refuse a tar file without the two blocks of zeros at its end: readers would take a cut for the end."""
    with open(path, "rb") as stream:  # noqa: PTH123 - the path is text already
        head = stream.read(512)
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - 1024))
        tail = stream.read()
    program = compression(head)
    if program and program not in _READ_COMPRESSED:
        raise ShardError(Damage.COMPRESSED.format(program=program), shard=path)
    if head[257:262] == b"ustar" and tail != bytes(1024):
        raise ShardError("the shard is cut off: its end is missing. Write or copy it again", shard=path)
    if not head:
        raise ShardError("the shard is an empty file. Write or copy it again", shard=path)


class MemberReader:
    """Tuples of the decoded members `keys` of a source, which gives dictionaries of encoded members for a pass."""

    def __init__(
        self, source: Callable[[Pass], Iterator[dict[str, Any]]], keys: Sequence[str], allowed_classes: Collection[Any]
    ) -> None:
        self.source, self.keys = source, tuple(keys)
        self._decoders = {key: member_decoder(key, tuple(allowed_classes)) for key in self.keys}

    def __call__(self, now: Pass) -> Iterator[tuple[Any, ...]]:
        """One tuple per sample."""
        return (tuple(self._decoded(sample, key) for key in self.keys) for sample in self.source(now))

    def _decoded(self, sample: dict[str, Any], key: str) -> Any:
        data = sample.get(key, sample.get(key.lower()))  # webdataset folds the case of member keys
        if data is None:
            names = sorted(name for name in sample if not name.startswith("__"))
            raise ShardError(
                f"the sample has no member {key!r}, only {names}: correct suffix_keys_wds, or the shard",
                shard=sample["__url__"],
                sample=sample["__key__"],
            )
        try:
            decoder = self._decoders[key]
            return data if decoder is None else decoder(data)
        except ShardError as error:
            error.shard, error.sample, error.member = sample["__url__"], sample["__key__"], key
            raise


class MixedReader:
    """Several sources, made into one stream by a function of the user's, in each worker and for each pass."""

    def __init__(self, readers: Mapping[str, MemberReader], mix: Mix) -> None:
        self.readers, self.mix = dict(readers), mix

    def __call__(self, now: Pass) -> Iterator[Any]:
        """The mixed samples."""
        number = now.epoch * _EPOCH + now.lap * _LAP + now.repetition * _REPETITION
        mixed = self.mix({name: RepeatableSource(reader, now, number) for name, reader in self.readers.items()})
        if not isinstance(mixed, Iterable):
            raise TypeError(f"mix must return an iterable of samples, got {mixed!r}")
        if hasattr(mixed, "set_epoch"):
            mixed.set_epoch(number)
        return iter(mixed)


class RepeatableSource:
    """One source of a mixture; each iteration is another pass over its shards, in another order."""

    def __init__(self, reader: MemberReader, now: Pass, number: int) -> None:
        self._reader, self._now, self._next = reader, now, number

    def set_epoch(self, epoch: int) -> None:
        """Choose the next pass, for mixtures that count passes themselves."""
        self._next = epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, lap = divmod(self._next, _EPOCH)
        self._next += 1
        return self._reader(self._now._replace(epoch=epoch, lap=lap, repetition=0))
