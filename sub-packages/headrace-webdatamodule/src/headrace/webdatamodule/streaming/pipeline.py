"""One split's stream: its options, the stages of the user's, and the dataset that workers iterate over."""

from __future__ import annotations

import copy
import difflib
import inspect
import random
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
import webdataset as wds
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from headrace.webdatamodule._shared.digest import text_digest
from headrace.webdatamodule._shared.random import text_key
from headrace.webdatamodule.loading.worker import end_with_parent, seed_generators
from headrace.webdatamodule.streaming.stream_sources import (
    IndexedSource,
    MemberReader,
    Mix,
    MixedReader,
    Pass,
    ShardSource,
    count_samples,
    find_tars,
    has_own_split,
    is_resampled,
)

Calls = Sequence[tuple[str, Mapping[str, Any]]]
_SET_BY_US = {
    "urls": "the shards come from dirs_tars_wds and prefix_tars_wds",
    "batch_size": "batch in pipeline_prebatch_wld, for example with webdataset.batched(16)",
    "dataset": "the data module makes it",
}
# Options of WebDataset that do not change what comes out of a shard: samples shared by index obey them as well.
_HARMLESS = {
    "shardshuffle",
    "detshuffle",
    "seed",
    "nodesplitter",
    "workersplitter",
    "handler",
    "empty_check",
    "verbose",
}
# Options of WebDataset that do not change the order of the samples, or are described apart.
_ORDERLESS = _HARMLESS - {"nodesplitter", "workersplitter"} | {"cache_dir", "cache_size", "url_to_name"}
_STRICT = (wds.reraise_exception, wds.filters.reraise_exception)  # webdataset has it twice


@dataclass(frozen=True)
class StreamOptions:
    """The arguments of a `WebDataModule` for one split; `stages_wds` and `stages_wld` are its pipelines."""

    name: str  # of the split
    places: Mapping[str, str]  # directories by the names of sources; a single one has an empty name
    prefix: str
    keys: tuple[str, ...]
    n_samples: int
    global_batch_size: int
    training: bool  # epochs differ in their order, and shards that run out before the end of one are read again
    stages_wds: Sequence[Any]
    stages_wld: Sequence[Any]
    kwargs_wds: Mapping[str, Any]
    kwargs_wld: Mapping[str, Any]
    invoke_wds: Calls
    invoke_wld: Calls
    allowed_classes: Collection[Any]
    mix: Mix | None
    exact: bool | None

    @property
    def seed(self) -> Any:
        """Of the shards' order, and of stages that shuffle without one."""
        seed = self.kwargs_wds.get("seed")
        return 0 if seed is None else seed

    @property
    def num_workers(self) -> int:
        """Worker processes of a rank; 0: samples are read in the process that trains."""
        return int(self.kwargs_wld.get("num_workers", 0))

    @property
    def n_batches(self) -> int:
        """Batches per epoch on each rank: n_samples / global_batch_size, rounded up."""
        return -(-self.n_samples // self.global_batch_size)

    def argument(self, name: str) -> str:
        """An argument's name with the split, for messages."""
        return f"{name}[{self.name!r}]"

    def label(self, source: str) -> str:
        """Name of the split, and of a source if it has one, for messages."""
        return f"{self.name}, source {source!r}" if source else self.name


def stages_of(name: str, given: Any) -> list[Any]:
    """One composable or several as a list."""
    if given is None:
        return []
    several = isinstance(given, Iterable) and not isinstance(given, str | Mapping) and not _is_stage(given)
    stages = list(given) if several else [given]
    for stage in stages:
        if not _is_stage(stage):
            expected = "callables that take an iterator and return one, such as webdataset.shuffle(100)"
            raise TypeError(f"{name} must be one or several {expected}, got {stage!r}")
    return stages


def _is_stage(stage: object) -> bool:
    return callable(stage) or isinstance(stage, wds.utils.PipelineStage)


def calls_of(name: str, given: Any) -> list[tuple[str, dict[str, Any]]]:
    """Method calls as pairs of a name and keyword arguments."""
    calls = []
    for call in () if given is None else [given] if isinstance(given, str | Mapping) else given:
        match call:
            case (str(method), Mapping() as kwargs):
                calls.append((method, dict(kwargs)))
            case _:
                example = '[("with_epoch", {"nbatches": 100})]'
                raise TypeError(f"{name} must list pairs of method name and kwargs like {example}, got {call!r}")
    return calls


def call_methods(name: str, pipeline: Any, calls: Calls) -> Any:
    """Call methods one after the other, each on what the last one returned."""
    kind = type(pipeline)
    for method, kwargs in calls:
        known = [name for name in dir(pipeline) if not name.startswith("_") and callable(getattr(pipeline, name))]
        if method not in known:
            close = difflib.get_close_matches(method, known)
            hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(known)}"
            raise ValueError(f"{name}: {kind.__name__} has no method {method!r}; {hint}")
        result = getattr(pipeline, method)(**kwargs)
        pipeline = pipeline if result is None else result
        if not isinstance(pipeline, kind):
            cure = "leave it out, and call it on the loader yourself"
            raise ValueError(f"{name}: {method!r} returns {type(pipeline).__name__}, not a pipeline: {cure}")
    return pipeline


def check_options(name: str, options: Mapping[str, Any], target: Callable[..., Any]) -> dict[str, Any]:
    """Copy options that are passed through to webdataset or torch; refuse unknown ones, and those that we set."""
    parameters = inspect.signature(target).parameters
    for option in options:
        if option in _SET_BY_US and option in parameters:
            raise ValueError(f"{name} cannot hold {option!r}: {_SET_BY_US[option]}")
        known = [parameter for parameter in parameters if parameter not in _SET_BY_US]
        if option not in known:
            close = difflib.get_close_matches(str(option), known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
            raise ValueError(f"{name}: {target.__name__} has no option {option!r}; {hint}")
    return dict(options)


class StreamDataset(IterableDataset[Any]):
    """What the workers of a loader iterate over: one pass over the sources, through the user's stages.

    The first stage of `pipeline`, a WebDataset whose methods the user may have called, reads the sources.
    """

    def __init__(
        self,
        options: StreamOptions,
        sources: Mapping[str, IndexedSource | ShardSource],
        pipeline: Any,
        *,
        shuffle: bool,
    ) -> None:
        self.options, self.sources, self.pipeline, self.shuffle = options, dict(sources), pipeline, shuffle
        self._now = Pass()
        self._shared: torch.Tensor | None = None
        self._checked = 0

    def begin(self, now: Pass) -> None:
        """Choose the pass of the workers that are started next."""
        self._now = now
        if self._shared is not None:
            self._shared.copy_(torch.tensor(now, dtype=torch.int64))

    def share(self) -> None:
        """Let workers that persist see the pass."""
        self._shared = torch.tensor(self._now, dtype=torch.int64)
        self._shared.share_memory_()  # type: ignore[no-untyped-call] # torch leaves it untyped

    def __iter__(self) -> Iterator[Any]:
        now = self._now if self._shared is None else Pass(*self._shared.tolist())
        if get_worker_info() is not None and "worker_init_fn" not in self.options.kwargs_wld:
            end_with_parent()
            key = text_key(now.reader_key("worker", self.options.seed), 8)
            seed_generators(int.from_bytes(key, "little"))  # random augmentations resume as well
        repetitions = count()
        pipeline = copy.copy(self.pipeline)
        # The methods repeat() and with_epoch() make further repetitions by calling this.
        pipeline.iterator1 = lambda: self._one_pass(now._replace(repetition=next(repetitions)))
        return iter(pipeline)

    def _one_pass(self, now: Pass) -> Iterator[Any]:
        reader, *stages = self.pipeline.pipeline
        return apply_stages(stages, reader(now), now, str(self.options.seed))

    def check_ranks(self, num_replicas: int, rank: int) -> None:
        """Refuse more ranks than shards, where ranks read whole shards; warn where workers idle, or samples repeat."""
        given = self.options.kwargs_wds
        if num_replicas == self._checked or has_own_split(given) or "workersplitter" in given or is_resampled(given):
            return
        self._checked = num_replicas
        for name, source in self.sources.items():
            if isinstance(source, ShardSource):
                self._check_shards(name, len(source.tars), num_replicas)
            elif rank == 0 and self.options.mix is None and (more := -len(source) % num_replicas):
                n = len(source)
                warnings.warn(
                    f"{self.options.name}: {n} samples cannot be shared equally by {num_replicas} ranks: {more} of them"
                    f" come twice in each pass. With {n + more} or {n - num_replicas + more} none would",
                    UserWarning,
                    stacklevel=2,
                )

    def _check_shards(self, name: str, n_shards: int, num_replicas: int) -> None:
        options = self.options
        readers = num_replicas * max(1, options.num_workers)
        needed = readers if options.mix else num_replicas
        numbers = (
            f"{options.label(name)}: {n_shards} shards cannot be shared by {readers} readers"
            f" ({num_replicas} ranks with num_workers={options.num_workers})"
        )
        fewer = f"lower num_workers in {options.argument('kwargs_wld')}, "
        index = "Call index_shards on the directory, so that samples are shared, "
        if needed > n_shards:
            who = "each" if options.mix else "each rank"
            cure = f"{index}{fewer if options.mix else ''}or write at least {needed} shards"
            raise ValueError(f"{numbers}: {who} reads whole shards and needs at least one. {cure}")
        if readers > n_shards:
            idle = f"each reads whole shards, so that {readers - n_shards} workers or more idle"
            cure = f"{index}{fewer}or write at least {readers} shards"
            warnings.warn(f"{numbers}: {idle}. {cure}", UserWarning, stacklevel=3)

    @property
    def endless(self) -> bool:
        """Whether samples are left when an epoch is over, by the user's will."""
        # Of a mixture an epoch is what was promised: whether it ends by itself is the mixture's affair.
        options = self.options
        return options.mix is not None or is_resampled(options.kwargs_wds) or self.pipeline.repetitions != 1


def apply_stages(stages: Iterable[Any], source: Iterator[Any], now: Pass, seed: str) -> Iterator[Any]:
    """Chain the user's stages to a source, with random generators of this pass; `seed` is for those without one."""
    pipeline = wds.DataPipeline()
    for number, stage in enumerate(stages):
        source = pipeline.invoke(_reseeded(stage, now, f"{seed}/{number}"), source)
    return source


def _reseeded(stage: Any, now: Pass, seed: str) -> Any:
    """A stage of webdataset's with generators of its own for this pass, rank and worker.

    A worker starts every epoch with a copy of what the training process holds, so a generator given to
    `webdataset.shuffle(rng=...)` would give the same order in every epoch, and so would its `seed=...`. A shuffle with
    neither would take the time for a seed, in an order that no checkpoint can resume.
    """
    if isinstance(stage, wds.filters.detshuffle):
        stage = copy.copy(stage)
        stage.epoch += int.from_bytes(text_key(now.key(), 6), "little")
    if not isinstance(stage, wds.filters.FilterFunction):
        return stage
    args = [_derived(value, now) for value in stage.args]
    kwargs = {name: _derived(value, now) for name, value in stage.kw.items()}
    if stage.f is wds.shuffle.f:
        given = inspect.signature(stage.f).bind(None, *args, **kwargs).arguments
        args, kwargs = [], {name: value for name, value in given.items() if name != "data"}
        if kwargs.get("rng") is None:
            own = kwargs.get("seed")
            kwargs["seed"] = now.reader_key(seed if own is None else repr(own))
    return stage.__class__(stage.f, *args, **kwargs)


def _derived(value: Any, now: Pass) -> Any:
    if not isinstance(value, random.Random):
        return value
    return random.Random(now.reader_key(text_key(repr(value.getstate())).hex()))  # noqa: S311 - an order, not a secret


def open_stream(options: StreamOptions) -> StreamDataset:
    """Find the shards of a split and put its stages together."""
    given = check_options(options.argument("kwargs_wds"), options.kwargs_wds, wds.WebDataset)
    shuffle = _is_shuffle(f"{options.argument('kwargs_wds')}['shardshuffle']", given.pop("shardshuffle", False))
    given.pop("detshuffle", None)  # all shards are shuffled before they are split, the same on all ranks
    check_options(options.argument("kwargs_wld"), options.kwargs_wld, DataLoader)
    sources: dict[str, IndexedSource | ShardSource] = {}
    for name, place in options.places.items():
        tars = find_tars(place, options.prefix)
        seed = f"{options.seed}/{name}" if name else options.seed
        counts = _counts(options, name, tars)
        if counts is None:
            sources[name] = ShardSource(tars, given, seed, shuffle=shuffle)
        else:
            own = seed if shuffle else None
            sources[name] = IndexedSource(tars, counts, options.keys, own, even=options.mix is not None)
    readers = {name: MemberReader(source, options.keys, options.allowed_classes) for name, source in sources.items()}
    reader = readers[""] if options.mix is None else MixedReader(readers, options.mix)
    pipeline = wds.WebDataset(["replaced below"], shardshuffle=False).compose()
    pipeline.pipeline = [reader, *options.stages_wds]
    pipeline = call_methods(options.argument("invoke_wds"), pipeline, options.invoke_wds)
    return StreamDataset(options, sources, pipeline, shuffle=shuffle)


def _is_shuffle(name: str, shardshuffle: Any) -> bool:
    if shardshuffle is None or (isinstance(shardshuffle, int) and shardshuffle >= 0):
        return bool(shardshuffle)
    raise ValueError(f"{name} must be True, False or a number of shards >= 0, got {shardshuffle!r}")


def _counts(options: StreamOptions, name: str, tars: Sequence[str]) -> list[int] | None:
    """Samples of each shard, if ranks and workers are to get equal shares of samples; None: they share shards."""
    if options.exact is False:
        return None
    reason = _obstacle(options)
    counts = [] if reason else [count_samples(tar) for tar in tars]
    missing = counts.count(None)
    if missing:
        reason = f"{missing} of {len(tars)} shards have no index beside them: call index_shards on their directory"
    if reason and options.exact:
        raise ValueError(f"{options.label(name)}: exact=True is not possible, because {reason}")
    if 0 < missing < len(tars):
        message = f"{options.label(name)}: {reason}; until then ranks share whole shards"
        warnings.warn(message, UserWarning, stacklevel=2)
    return None if reason else [number for number in counts if number is not None]


def _obstacle(options: StreamOptions) -> str | None:
    given = options.kwargs_wds
    others = sorted(set(given) - _HARMLESS)
    if has_own_split(given) or given.get("workersplitter", wds.split_by_worker) is not wds.split_by_worker:
        return "kwargs_wds holds a splitter of your own: leave it out"
    if others:
        return f"kwargs_wds holds {', '.join(others)}: leave it out"
    if given.get("handler", wds.reraise_exception) not in _STRICT:
        return "a handler in kwargs_wds may skip samples: leave the handler out"
    return None


def describe_options(dataset: StreamDataset) -> dict[str, str]:
    """What decides the order and the batches, as texts by name; functions do not count, nor where the shards lie."""
    options = dataset.options
    given = {name: options.kwargs_wds[name] for name in sorted(set(options.kwargs_wds) - _ORDERLESS)}
    if not has_own_split(given):
        given.pop("nodesplitter", None)
    described = {
        "seed": str(options.seed),
        "shardshuffle": str(dataset.shuffle),
        "suffix_keys_wds": ", ".join(options.keys),
        "n_samples": str(options.n_samples),
        "global_batch_size": str(options.global_batch_size),
        "mix": describe_stages([] if options.mix is None else [options.mix]),
        "kwargs_wds": _describe(given),
        "pipeline_wds": describe_stages(options.stages_wds),
        "pipeline_prebatch_wld": describe_stages(options.stages_wld),
        "invoke_wds": _describe(options.invoke_wds),
        "invoke_wld": _describe(options.invoke_wld),
    }
    for name, source in dataset.sources.items():
        of = f" of {name!r}" if name else ""
        described |= {f"exact{of}": str(isinstance(source, IndexedSource)), f"shards{of}": source.fingerprint}
    return described


def describe_stages(stages: Iterable[Any]) -> str:
    """Stages with their plain options; of functions only that there is one, as they are renamed and moved.

    >>> describe_stages([wds.shuffle(100, seed=3), partial(sorted, key=len, reverse=True), len])
    'shuffle(bufsize=100, seed=3), sorted(key=..., reverse=True), ...'
    """
    return ", ".join(map(_describe_stage, stages))


def _describe_stage(stage: Any) -> str:
    match stage:
        case wds.filters.detshuffle():
            name, described = "detshuffle", [_describe(vars(stage))]
        case wds.filters.FilterFunction():
            name = stage.f.__name__.lstrip("_")
            given = dict(list(inspect.signature(stage.f).bind(None, *stage.args, **stage.kw).arguments.items())[1:])
            described = [f"{key}={_describe(value)}" for key, value in sorted(given.items())]
        case partial():
            name = getattr(stage.func, "__qualname__", type(stage.func).__name__)
            described = [_describe(value) for value in stage.args]
            described += [f"{key}={_describe(value)}" for key, value in sorted(stage.keywords.items())]
        case _:
            return str(getattr(stage, "fingerprint", "..."))
    return f"{name}({', '.join(described)})"


def _describe(value: Any) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    match value:
        case random.Random():
            return f"random {text_digest(repr(value.getstate()))[:12]}"
        case Mapping():
            return f"{{{', '.join(f'{_describe(key)}: {_describe(held)}' for key, held in value.items())}}}"
        case tuple() | MutableSequence():
            return f"[{', '.join(map(_describe, value))}]"
        case bool() | int() | float() | str() | None:
            return repr(value)
    return "..."
