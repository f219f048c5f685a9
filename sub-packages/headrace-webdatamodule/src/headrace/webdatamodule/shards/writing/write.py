"""`write_shards`: samples to a directory of indexed shards; `write_tars`: to tar files alone. Both by `write_set`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.format.files import directory_lock, output_directory, sync_directory
from headrace.webdatamodule.shards.index.build import save_manifest
from headrace.webdatamodule.shards.index.manifest import (
    NAME,
    Manifest,
    check_column,
    refuse_foreign,
    unfinished_write,
)
from headrace.webdatamodule.shards.writing.executor import progress, refuse_inherited, run
from headrace.webdatamodule.shards.writing.plan import (
    EMPTY,
    Plan,
    ShardSize,
    bounds_of,
    given_sizes,
    measure,
    pack_size,
    refuse_finished,
    refuse_leftovers,
    repeated_key,
    sample_bytes,
    samples_bytes,
    shard_bounds,
    shard_paths,
    shard_size,
)
from headrace.webdatamodule.shards.writing.resume import kept
from headrace.webdatamodule.shards.writing.shard_builder import Written, check_key, key_hashes
from headrace.webdatamodule.shards.writing.shard_task import (
    KeyedSample,
    MapStyle,
    Publisher,
    ShardFile,
    ShardTask,
    load,
    remove_parts,
    unreadable,
)

_TWICE = "make keys unique, remove both shards and write them again; there is no manifest"
NEW_COLUMNS = "Remove manifest.json, call again, and add them again"
Columns = dict[str, npt.NDArray[Any]]
SamplesToWrite = MapStyle | Iterable[KeyedSample] | Callable[[], MapStyle | Iterable[KeyedSample]]


def write_shards(
    samples: SamplesToWrite,
    directory: str | Path,
    *,
    samples_per_shard: int | None = None,
    bytes_per_shard: int | None = None,
    n_shards: int | None = None,
    bytes_per_pack: int | None = None,
    executor: Executor | None = None,
    workers: int = 1,
    prefix: str = "shard",
    sizes: npt.ArrayLike | None = None,
    columns: Mapping[str, npt.ArrayLike] | None = None,
    fingerprint: str = "",
    overwrite: bool = False,
) -> Manifest:
    """Write samples, in order, to `{directory}/{prefix}-000000.tar` and so on, each with its index.

    A shard gets its final name when it is complete on disk; the manifest is written last. The bytes depend only on the
    samples. If the number of samples is known, the shards are planned in advance, and each shard is a separate task;
    after a killed run, the next run keeps the complete shards and writes the rest. Samples of a generator are written
    in this process as they come; after a killed run, the next run starts over. A second process that writes to the
    directory waits for the first.

    If the directory holds a finished set, `fingerprint` decides: if it is the same, nothing is written; otherwise the
    set is replaced.

    Args:
        samples: Pairs of a key and the sample's members, {member key: bytes}. An object with `len()` and integer
            indices, or any iterable such as a generator. Or a function without arguments that returns one of these; it
            is called once here and, if the result has indices, once for each shard. Samples with indices are pickled
            for other processes. If they have a method `part(start, stop)` that returns the samples of one shard, only
            these are pickled; a method `keys()` may return all keys without making the samples.
        directory: Output directory for this set alone; it is created if it does not exist.
        samples_per_shard: Maximum number of samples in a shard. Shards differ by at most one sample; from a generator,
            all shards but the last are full.
        bytes_per_shard: Maximum bytes of a tar file; a larger sample gets its own shard.
        n_shards: Number of shards, from 1 to the number of samples; they differ by at most one sample. Not for a
            generator.
        bytes_per_pack: For small samples, such as short texts, which then take fewer bytes on disk: samples of at most
            this many bytes, such as 65536, are written together in packs, members with at most this many bytes of data.
            Readers of this release find each sample as before; other programs see one member `.hrpack` for each pack.
            None: no packs.
        executor: Runs the tasks: any executor with the interface of `concurrent.futures`, such as `get_executor()` of a
            Dask client; all its workers must see the directory. None: as `workers` says.
        workers: Number of local processes; 1: this process. Several help where samples take long to make: starting them
            takes seconds, and small samples from memory are written as fast as they are sent.
        prefix: First part of the file names.
        sizes: For `bytes_per_shard`, the bytes of each sample in a tar file, shape [n_samples]: for each member 512
            plus its data padded to a multiple of 512; in a pack its data, its name and 12 bytes. None: each sample is
            read once more to find its size.
        columns: Arrays to store beside the shards, {name: array}, shape [n_samples, ...]; see `add_column`.
        fingerprint: Any text that changes with the samples, such as a version.
        overwrite: Whether to replace existing shards, even a finished set.

    Returns:
        The manifest.

    Raises:
        TypeError: The samples can be neither indexed nor iterated, they cannot be sent to other processes, or a number
            is not an int.
        ValueError: A number, the prefix, sizes or columns are not allowed, or `directory` is a URL.
        FileExistsError: The directory holds a finished set and no `fingerprint` is given, or it holds other files,
            shards of other samples, or a `manifest.json` of another program.
        ShardError: A sample cannot be read or stored, or a key occurs twice; it names the shard and the sample.
        OSError: Writing failed, for example because the disk is full; the error names the shard.
        BrokenProcessPool: A process was killed, or could not start.
        RuntimeError: The executor was shut down, or a script that starts processes lacks `if __name__ == "__main__"`.

    >>> import tempfile
    >>> samples = [(f"sample{i}", {"txt": b"%d" % i}) for i in range(5)]
    >>> manifest = write_shards(samples, tempfile.mkdtemp(), n_shards=2)
    >>> [(shard.name, shard.samples) for shard in manifest.shards]
    [('shard-000000.tar', 2), ('shard-000001.tar', 3)]
    """
    processes = checked_int("workers", workers, 1)
    if not isinstance(fingerprint, str):
        raise ValueError(f"fingerprint must be a text, got {fingerprint!r}")
    if executor is not None and (processes > 1 or not callable(getattr(executor, "submit", None))):
        raise ValueError(f"executor must have a method submit, and goes without workers, got {executor!r}, {workers!r}")
    folder = output_directory("directory", directory)
    shard_paths(Path(), prefix, 0)
    size = shard_size(samples_per_shard, bytes_per_shard, n_shards)
    packs = pack_size(bytes_per_pack)
    refuse_inherited()
    everything = _loaded(samples)
    refuse_foreign(folder)
    replaces = overwrite or bool(fingerprint)  # else a finished set is left alone
    if not hasattr(everything, "__len__"):
        if n_shards is not None or executor is not None or processes > 1 or sizes is not None:
            allowed = "samples_per_shard or bytes_per_shard, and neither n_shards, executor, workers nor sizes"
            raise ValueError(f"samples without len() are written in this process as they come: give {allowed}")
        plan = Plan.of_stream(prefix, size, fingerprint, packs)
        folder.mkdir(parents=True, exist_ok=True)
        with directory_lock(folder):
            finished = (folder / NAME).exists() and not unfinished_write(folder)
            if not replaces:
                refuse_finished(folder)
            elif finished and not overwrite and plan.prepare(folder, replaces=True, stream=True):
                return _with_columns(folder, columns or {})
            plan.prepare(folder, replaces=replaces, anew=True, stream=True)
            return _write_stream(iter(everything), folder, plan, size, packs, columns or {})
    count = len(everything)
    stored = None if sizes is None else given_sizes(sizes, count)
    arrays = _check_columns(columns or {}, count)
    known = getattr(everything, "keys", None)
    keys: Iterable[str] | None = known() if callable(known) else None
    if not replaces:
        refuse_finished(folder)
    if bytes_per_shard is not None and stored is None and count:
        stored, keys = measure(everything, packs)
    bounds = bounds_of(count, stored, size, with_packs=packs > 0)
    hashes = None if keys is None else _check_keys(keys, count)
    plan = Plan.of(prefix, bounds, fingerprint, packs)
    folder.mkdir(parents=True, exist_ok=True)
    with directory_lock(folder):
        if not replaces:
            refuse_finished(folder)  # which another process has finished meanwhile
        written = write_set(
            samples,
            folder,
            plan,
            bounds,
            bytes_per_pack=packs,
            hashes=hashes,
            replaces=replaces,
            anew=overwrite,
            executor=executor,
            workers=processes,
        )
        return save_set(folder, written, arrays)


def write_set(
    samples: Any,
    folder: Path,
    plan: Plan,
    bounds: Sequence[int],
    *,
    bytes_per_pack: int = 0,
    hashes: npt.NDArray[np.uint64] | None = None,
    replaces: bool,
    anew: bool,
    executor: Executor | None = None,
    workers: int = 1,
) -> list[Written]:
    """Write those shards of a plan that are not there yet, or stale; the folder is locked, and gets no manifest yet.

    `bytes_per_pack` is that of the plan. `Plan.prepare` says what is stale; `kept` what is there already, with the
    `hashes` of all keys where they are known.
    """
    tasks = _tasks(samples, shard_paths(folder, plan.prefix, plan.shards), bounds, bytes_per_pack)
    plan.prepare(folder, replaces=replaces, anew=anew)
    remove_parts(folder, plan.prefix)
    parts = [None if hashes is None else hashes[start:stop] for start, stop in pairwise(bounds)]
    found = [kept(task, part, same=bool(plan.fingerprint)) for task, part in zip(tasks, parts, strict=True)]
    todo = [task for task, one in zip(tasks, found, strict=True) if one is None]
    new = iter(run(todo, executor, workers, plan.prefix))
    return [next(new) if one is None else one for one in found]


def _write_stream(
    samples: Iterator[Any],
    folder: Path,
    plan: Plan,
    size: ShardSize,
    bytes_per_pack: int,
    columns: Mapping[str, npt.ArrayLike],
) -> Manifest:
    """Write samples whose number is unknown, as they come."""
    remove_parts(folder, plan.prefix)
    name, most = size
    by_count, room = name == "samples_per_shard", samples_bytes(most)
    written, token, count = list[Written](), secrets.token_hex(4), 0
    shard: ShardFile | None = None
    with Publisher() as publisher:
        with progress(None, folder) as bar:
            for key, sample in _numbered(samples, folder / f"{plan.prefix}-*.tar"):
                if shard is not None:
                    is_full = len(shard) >= most if by_count else shard.nbytes + sample_bytes(key, sample) > room
                    if is_full:
                        written.append(publisher.finish(shard))
                        shard = None
                if shard is None:
                    path = folder / f"{plan.prefix}-{len(written):06d}.tar"
                    shard = publisher.begin(path, token, bytes_per_pack)
                shard.add(key, sample)
                if shard.is_due:
                    shard.flush()
                count += 1
                bar.update()
        if shard is None:
            raise ValueError(EMPTY)
        written.append(publisher.finish(shard))
    arrays = _check_columns(columns, count)
    replace(plan, shards=len(written), samples=count).save(folder)
    return save_set(folder, written, arrays)


def _numbered(samples: Iterator[Any], path: Path) -> Iterator[Any]:
    number = 0
    while True:
        try:
            key, sample = next(samples)
        except StopIteration:
            return
        except Exception as error:
            raise unreadable(error, number, path) from error
        yield key, sample
        number += 1


def _with_columns(folder: Path, columns: Mapping[str, npt.ArrayLike]) -> Manifest:
    """The manifest of a finished set, with some more columns."""
    manifest = Manifest.load(folder)
    arrays = _check_columns(columns, manifest.n_samples)
    return save_manifest(folder, [(entry, manifest.members) for entry in manifest.shards], arrays, cure=NEW_COLUMNS)


def save_set(folder: Path, written: Sequence[Written], arrays: Columns) -> Manifest:
    """Write the manifest of a set, with columns."""
    _refuse_repeated_key(written, folder, _TWICE)
    described = [(one.entry, one.members) for one in written]
    return save_manifest(folder, described, arrays, cure=NEW_COLUMNS)


def _refuse_repeated_key(written: Sequence[Written], folder: Path, cure: str) -> None:
    if again := repeated_key(written, folder):
        key, first, second = again
        message = f"the sample key {key!r} occurs twice, first in {first}: {cure}"
        raise ShardError(message, shard=str(folder / second), sample=key)


def _loaded(samples: Any) -> Any:
    made = load(samples) if callable(samples) else samples
    indexed = hasattr(made, "__len__") and hasattr(made, "__getitem__")
    if isinstance(made, Mapping) or not (indexed or isinstance(made, Iterable)):
        allowed = (
            "something with len() and integer indexing, an iterable, or a function without arguments that gives one"
        )
        cure = "list(samples.items())" if isinstance(made, Mapping) else "a list of pairs"
        raise TypeError(f"samples must be {allowed}, got {type(made).__name__}: give {cure}")
    return made if indexed else iter(made)


def _check_columns(columns: object, n_samples: int) -> Columns:
    if not isinstance(columns, Mapping):
        raise ValueError(f"columns must be {{name: array}}, got {type(columns).__name__}")
    return {name: check_column(name, values, n_samples, what=f"columns[{name!r}]") for name, values in columns.items()}


def _tasks(samples: Any, paths: Sequence[Path], bounds: Sequence[int], bytes_per_pack: int) -> list[ShardTask]:
    """One task a shard, each with its own samples only, where these can be cut."""
    token, tasks = secrets.token_hex(4), []
    for path, (start, stop) in zip(paths, pairwise(bounds), strict=True):
        own, first, last = samples, start, stop
        if type(samples) in (list, tuple):  # a subclass may make its samples when they are asked for
            own, first, last = samples[start:stop], 0, stop - start
        elif callable(getattr(samples, "part", None)):
            own, first, last = samples.part(start, stop), 0, stop - start
        tasks.append(ShardTask(path, own, first, last, start, token, bytes_per_pack))
    return tasks


def _check_keys(keys: Iterable[str], n_samples: int) -> npt.NDArray[np.uint64]:
    """Refuse keys that cannot be stored, or occur twice, before anything is written; their hashes."""
    listed, seen = list(keys), set[str]()
    if len(listed) != n_samples:
        raise ValueError(f"samples.keys() gives {len(listed)} keys of {n_samples} samples: give one for each")
    for key in listed:
        check_key(key)
        if key in seen:
            raise ShardError(f"the sample key {key!r} occurs twice: make keys unique", sample=key)
        seen.add(key)
    return key_hashes(listed)


def write_tars(
    samples: Sequence[tuple[str, Mapping[str, bytes]]],
    directory: str | Path,
    *,
    n_shards: int,
    prefix: str = "wdshards",
) -> list[Path]:
    """Write samples, in order, to `{directory}/{prefix}-000000.tar` and so on, without indexes.

    The shards differ by at most one sample. They get their names when all of them are complete on disk; their bytes
    depend only on the samples. Shards of the same names are replaced.

    Args:
        samples: Pairs of a key and the sample's members, {member key: bytes}. Keys must be unique and without a dot.
            Any object with `len()` and integer indices; each sample is read once.
        directory: Output directory; it is created if it does not exist.
        n_shards: Number of shards, 1 to `len(samples)`.
        prefix: First part of the file names.

    Returns:
        The paths of the shards, in order.

    Raises:
        TypeError: `n_shards` is not an int.
        ValueError: `n_shards` or `prefix` is not allowed, or `directory` is a URL.
        FileExistsError: The directory holds further shards of this prefix, which readers would take for
            a part of the new set.
        ShardError: A key occurs twice or cannot be stored, or a member is not bytes.

    >>> import tempfile
    >>> samples = [(f"sample{i}", {"txt": b"%d" % i}) for i in range(5)]
    >>> paths = write_tars(samples, tempfile.mkdtemp(), n_shards=2)
    >>> [path.name for path in paths]
    ['wdshards-000000.tar', 'wdshards-000001.tar']
    """
    bounds = shard_bounds(len(samples), n_shards)
    target = output_directory("directory", directory)
    paths = shard_paths(target, prefix, len(bounds) - 1)
    target.mkdir(parents=True, exist_ok=True)
    refuse_leftovers(target, prefix, paths)
    with TemporaryDirectory(prefix=f".{prefix}-", dir=target) as hidden, _shards_named_in(target):
        folder = Path(hidden, target.name)
        folder.mkdir(exist_ok=True)
        plan = Plan.of(prefix, bounds, "")
        written = write_set(samples, folder, plan, bounds, replaces=False, anew=False)
        _refuse_repeated_key(written, folder, "make keys unique")
        for path in paths:
            (folder / path.name).replace(path)
    sync_directory(target)
    return paths


@contextmanager
def _shards_named_in(folder: Path) -> Iterator[None]:
    """Errors name shards where they will lie, not where they are written first."""
    try:
        yield
    except ShardError as error:
        error.shard = error.shard and str(folder / Path(error.shard).name)
        raise
