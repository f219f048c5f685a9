"""Parsing of mixtures: the arguments of both classes, validated, as sources and integer weights by position."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Generic, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import Dataset

from headrace.weighted_sampler._arguments import MAX_POSITION, SEED_BOUND, as_choice, shown
from headrace.weighted_sampler._growth import Growth, source_epochs
from headrace.weighted_sampler._interleave import MAX_SOURCES
from headrace.weighted_sampler._mixture import Mixture, SampleOrder, SourceOrder
from headrace.weighted_sampler._permutation import Indices
from headrace.weighted_sampler._shared.checks import checked_int
from headrace.weighted_sampler._shared.digest import array_digest
from headrace.weighted_sampler._sources import Sources, hugging_face_identity, is_one_shot
from headrace.weighted_sampler._states import DIGEST_DIGITS, data_identity, digest
from headrace.weighted_sampler._stopping import MAX_DROPPED, STOP_RULES, Stopping, StopRule, drop_stages
from headrace.weighted_sampler._token_mixture import TokenMixture
from headrace.weighted_sampler._weight_semantics import (
    PER,
    SEMANTICS,
    Amounts,
    amounts_of,
    normalize,
    parse_temperature,
)
from headrace.weighted_sampler.schedule import (
    NAMED,
    Schedule,
    Stage,
    StageWeights,
    StreamSchedule,
    parse_schedule,
    parse_source_schedule,
    stage_at,
    still_drawn,
)
from headrace.weighted_sampler.weights import (
    StreamWeights,
    Weight,
    WeightedSources,
    Weights,
    check_list,
    parse_sources,
    parse_stream_weights,
)

T = TypeVar("T")
STREAM_SEMANTICS = ("proportion", "ratio", "temperature")
FINGERPRINT = {"data": DIGEST_DIGITS, "options": DIGEST_DIGITS}  # its parts

# -- Of the sampler ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaving:
    """A source that leaves the mixture."""

    name: str
    position: int  # of the endless sequence


@dataclass(frozen=True)
class MixtureSpec:
    """The sources of a mixture, and their weights by position."""

    length: int  # samples in the dataset
    sources: WeightedSources  # with the first stage's weights
    stages: tuple[Stage, ...]  # of the endless sequence
    requested: tuple[tuple[Fraction, ...], ...]  # for each stage and source, the share of the draws
    weights: tuple[tuple[Fraction, ...], ...]  # for each stage and source, as given
    means: tuple[Fraction, ...] | None  # mean tokens per sample of each source; None if shares refer to samples
    epoch_length: int
    tokens: Indices | None = None  # of each sample, in equal parts of a token; None if shares refer to samples
    drops: bool = False  # whether each source is drawn once an epoch and then dropped
    leaving: tuple[Leaving, ...] = ()  # sources that leave after their last pass
    growth: Growth | None = None  # where the data grew; the stages begin there

    def order(self, seed: int) -> SampleOrder:
        """Build the sequence of samples for a seed."""
        ranges = self.sources.ranges
        first = None if self.growth is None or self.drops else self.growth.first
        mixture: SourceOrder
        if self.tokens is None or self.drops:
            mixture = Mixture(self.stages, self.epoch_length, seed, every_epoch=self.drops, first=first)
        else:
            tokens = [self.tokens[begin:end] for begin, end in ranges]
            passes = source_epochs(seed, ranges, self.growth)
            mixture = TokenMixture(self.stages, self.epoch_length, seed, tokens, passes, first)
        return SampleOrder(mixture, ranges, self.sources.members, self.growth)

    def grown(self, growth: Growth | None) -> "MixtureSpec":
        """Return the same mixture from where its data grew: its stages begin there."""
        if growth is None or self.drops:
            return replace(self, growth=growth)
        begin = growth.epoch * self.epoch_length
        number = stage_at(self.stages, begin)
        stages = (Stage(begin, self.stages[number].weights), *self.stages[number + 1 :])
        requested, weights = self.requested[number:], self.weights[number:]
        return replace(self, growth=growth, stages=stages, requested=requested, weights=weights)

    def identity(self) -> object:
        """Plain values that identify the shares beyond the weights and the sources."""
        return self.drops, None if self.tokens is None else array_digest(self.tokens)


def parse_mixture(
    argument: str,
    dataset: Sized,
    weights: Weights | None,
    *,
    semantics: str | None,
    epoch_length: int | None,
    temperature: Weight | None,
    per: str,
    sizes: ArrayLike | None,
    schedule: Schedule,
    stopping: str,
    named: str = NAMED,
) -> MixtureSpec:
    """Check the arguments of ``WeightedDistributedSampler``.

    In messages, ``argument`` is the name of the weights, and ``named`` that of each entry of the schedule.
    """
    _check_dataset(dataset)
    if semantics is not None:
        as_choice("semantics", semantics, SEMANTICS)
    exact_temperature = parse_temperature(semantics, temperature)
    if weights is None:
        weights = _ones(argument, dataset, semantics)
    sources = parse_sources(argument, weights, dataset)
    if len(sources.parts) > MAX_SOURCES:
        raise ValueError(
            f"{argument} names {len(sources.parts)} sources, at most {MAX_SOURCES} are allowed; "
            "merge the smallest, or give one weight per sample"
        )
    semantics = semantics or ("ratio" if sources.by_range else "proportion")
    per_sample = sources.members is not None
    if per_sample and semantics not in ("ratio", "proportion"):
        raise ValueError(f"one weight per sample needs semantics 'ratio' or 'proportion', got {semantics!r}")
    amounts = amounts_of(sources, per, sizes, semantics, len(dataset))
    stages = [StageWeights(0, argument, sources), *parse_source_schedule(schedule, sources, dataset, named)]
    for stage in stages:
        _check_stage(stage.argument, stage.weights, amounts, semantics)
    normalized = [
        normalize(stage.weights.weights, amounts, semantics, exact_temperature, per_sample=per_sample)
        for stage in stages
    ]
    if max(stage.epoch_length for stage in normalized) > MAX_POSITION:
        raise ValueError(f"{argument} asks for more than 2**62 draws an epoch; use smaller weights")
    length = normalized[0].epoch_length if epoch_length is None else epoch_length
    drops = as_choice("stopping", stopping, ("endless", "drop_exhausted")) == "drop_exhausted"
    if amounts.sizes is not None and not drops:
        normalized = [stage.by_tokens(amounts) for stage in normalized]
    spec = MixtureSpec(
        length=len(dataset),
        sources=sources,
        stages=tuple(Stage(stage.start, own.weights) for stage, own in zip(stages, normalized, strict=True)),
        requested=tuple(normalized_shares(stage.requested) for stage in normalized),
        weights=tuple(tuple(stage.weights.weights) for stage in stages),
        means=tuple(amounts.means()) if amounts.tokens else None,
        epoch_length=checked_int("epoch_length", length, 1, MAX_POSITION),
        tokens=amounts.sizes,
    )
    if not drops:
        return spec
    refused = {
        f"no epoch_length, got {epoch_length}: leave it out": epoch_length is not None,
        f"no schedule, got {len(schedule)} later {'stage' if len(schedule) == 1 else 'stages'}: leave it out": schedule,
        "no weights of single samples: give weights of datasets or ranges": per_sample,
        f"up to {MAX_DROPPED} sources, got {len(sources.parts)}: concatenate some": len(sources.parts) > MAX_DROPPED,
    }
    for allowed, violated in refused.items():
        if violated:
            raise ValueError(f"stopping='drop_exhausted' draws each sample once per epoch: it takes {allowed}")
    return _dropping(spec)


def _dropping(spec: MixtureSpec) -> MixtureSpec:
    """The same sources, each drawn once an epoch and then dropped."""
    [draws], [asked] = (stage.weights for stage in spec.stages), spec.requested
    sizes = [part.size for part in spec.sources.parts]
    stages = tuple(drop_stages(draws, sizes))
    kept = [[share * (weight > 0) for share, weight in zip(asked, stage.weights, strict=True)] for stage in stages]
    return replace(
        spec,
        stages=stages,
        requested=tuple(map(normalized_shares, kept)),
        weights=spec.weights * len(stages),
        epoch_length=sum(size for size, weight in zip(sizes, draws, strict=True) if weight),
        drops=True,
    )


def normalized_shares(parts: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """Scale shares to a sum of 1."""
    total = sum(parts)
    return tuple(part / total for part in parts)


def _check_dataset(dataset: object) -> None:
    if isinstance(dataset, (list, tuple)) and dataset and all(isinstance(part, (Dataset, range)) for part in dataset):
        raise TypeError(
            f"dataset must be one dataset, got a {type(dataset).__name__} of {len(dataset)}: join them with "
            "NamedConcatDataset({name: dataset, ...}) or torch's ConcatDataset"
        )
    if not isinstance(dataset, Sized):
        raise TypeError(
            f"dataset must have a length, got {type(dataset).__name__}: weights of indices need a map-style dataset"
        )


def _ones(argument: str, dataset: Sized, semantics: str | None) -> Weights:
    if semantics != "temperature":
        raise TypeError(f"{argument} must be given unless semantics='temperature', got None")
    if not hasattr(dataset, "cumulative_sizes"):
        raise TypeError(f"{argument} must be given: {type(dataset).__name__} is not a concatenation of datasets")
    return [int(size > 0) for size in np.diff(dataset.cumulative_sizes, prepend=0)]


def _check_stage(argument: str, sources: WeightedSources, amounts: Amounts, semantics: str) -> None:
    if semantics != "proportion" and any(part.groups for part in sources.parts):
        raise ValueError(f"nested {argument} need semantics='proportion', got {semantics!r}")
    for part, tokens in zip(sources.parts, amounts.tokens or (), strict=amounts.tokens is not None):
        if part.weight and not tokens:
            raise ValueError(
                f"sizes of {part.name!r} are all 0, so it cannot contribute a share of the tokens; "
                f"give it weight 0 in {argument}"
            )


# -- Of streams ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamMixture(Generic[T]):
    """The sources with a positive weight in some stage."""

    names: tuple[str, ...]
    sources: tuple[Iterable[T], ...]
    stages: tuple[Stage, ...]
    seed: int
    stopping: Stopping
    sizeof: Callable[[T], object] | None = None  # tokens of an item; None if shares refer to items

    def size_of(self, item: T) -> int:
        """The tokens of an item.

        Raises:
            TypeError: If ``sizeof`` does not return an int.
            ValueError: If it returns a negative one.
        """
        return checked_int("sizeof(item)", cast("Callable[[T], object]", self.sizeof)(item), 0)

    def reached(self, stages: int) -> list[str]:
        """The names of the sources that the first stages draw from."""
        weights = zip(*(stage.weights for stage in self.stages[:stages]), strict=True)
        return [name for name, own in zip(self.names, weights, strict=True) if any(own)]

    def fingerprint(self, stages: int | None = None) -> str:
        """Identify the data that the first stages draw from (16 hex digits), and their options and seed (16)."""
        names = self.reached(len(self.stages) if stages is None else stages)
        place_of = {name: place for place, name in enumerate(self.names)}
        places = [place_of[name] for name in names]
        data = [self.sources[place] for place in places]
        lengths = [len(source) if isinstance(source, Sequence) else None for source in data]
        weights = [(stage.start, [stage.weights[place] for place in places]) for stage in self.stages[:stages]]
        identities = [data_identity(source) or hugging_face_identity(source) for source in data]
        return digest(names, identities, lengths) + digest(
            weights, self.seed, self.stopping, *(["token"] if self.sizeof else [])
        )

    @property
    def rule(self) -> StopRule:
        """What happens when a source has no more items."""
        return STOP_RULES[self.stopping]

    def over(self, exhausted: Sequence[int], position: int) -> bool:
        """Whether the stream ends at a position, given how often each source was exhausted."""
        return self.rule.over(exhausted, still_drawn(self.stages, position))


def parse_streams(
    sources: Sources[T],
    weights: StreamWeights,
    seed: int,
    stopping: str,
    semantics: str = "proportion",
    temperature: Weight | None = None,
    schedule: StreamSchedule = (),
    per: str = "sample",
    sizeof: Callable[[T], object] | None = None,
) -> StreamMixture[T]:
    """Validate the arguments of ``InterleavedDataset``, leave out sources of weight 0, and sort the others by name.

    >>> mixture = parse_streams({"b": [1], "a": [2], "c": [3]}, {"a": 0.25, "b": 0.75, "c": 0}, 0, "endless")
    >>> mixture.names, mixture.stages
    (('a', 'b'), (Stage(start=0, weights=(1, 3)),))
    """
    as_choice("semantics", semantics, STREAM_SEMANTICS)
    criterion = cast("Stopping", as_choice("stopping", stopping, STOP_RULES))
    exact_temperature = parse_temperature(semantics, temperature)
    _check_per(per, sizeof, semantics)
    named = _named(sources)
    if len(named) > MAX_SOURCES:
        raise ValueError(f"sources must be at most {MAX_SOURCES}, got {len(named)}; concatenate some of them")

    def parse(argument: str, given: object) -> dict[str, Fraction]:
        return parse_stream_weights(argument, sources, given, semantics)

    later = parse_schedule(schedule, parse)
    starts, parsed = [0, *(stage.start for stage in later)], [parse("weights", weights)]
    parsed += [stage.weights for stage in later]
    if later and STOP_RULES[criterion].at_end == "drop":
        raise ValueError("schedule cannot be followed with stopping='drop_exhausted': give one of the two")
    drawn = {name: source for name, source in named.items() if any(stage[name] for stage in parsed)}
    for name, source in drawn.items():
        _check_source(name, source, criterion)
    amounts = Amounts(tuple(1 if semantics == "proportion" else _length(*item) for item in drawn.items()))
    normalized = [
        normalize([stage[name] for name in drawn], amounts, semantics, exact_temperature).weights for stage in parsed
    ]
    stages = tuple(map(Stage, starts, normalized))
    exact_seed = checked_int("seed", seed, 0, SEED_BOUND - 1)
    return StreamMixture(tuple(drawn), tuple(drawn.values()), stages, exact_seed, criterion, sizeof)


def _check_per(per: str, sizeof: object, semantics: str) -> None:
    if (as_choice("per", per, PER) == "token") != (sizeof is not None):
        raise ValueError(
            "per='token' needs sizeof=, a function that returns the tokens of an item"
            if sizeof is None
            else "sizeof is for shares by tokens: give per='token'"
        )
    if sizeof is not None and not callable(sizeof):
        raise TypeError(f"sizeof must be a function of an item, got {shown(sizeof)}")
    if sizeof is not None and semantics != "proportion":
        raise ValueError(
            f"per='token' needs semantics='proportion' for streams, whose tokens are not known: got {semantics!r}"
        )


def _named(sources: Sources[T]) -> dict[str, Iterable[T]]:
    if not isinstance(sources, Mapping):
        check_list("sources", sources, "a mapping {name: iterable} or a list of iterables,")
        return {str(place): source for place, source in enumerate(sources)}
    for name in sources:
        if not isinstance(name, str):
            raise TypeError(f"sources must have strings as names, got {shown(name)}")
    return {name: sources[name] for name in sorted(sources)}


def _check_source(name: str, source: object, stopping: Stopping) -> None:
    if isinstance(source, (str, bytes)) or not isinstance(source, Iterable):
        raise TypeError(f"sources[{name!r}] must have __iter__ and yield samples, got {type(source).__name__}")
    if STOP_RULES[stopping].at_end == "again" and is_one_shot(source):
        raise ValueError(
            f"sources[{name!r}] is an iterator ({type(source).__name__}) and cannot restart, which "
            f"stopping={stopping!r} needs; give an object whose __iter__ returns a new iterator, or use "
            "stopping='first_exhausted'"
        )


def _length(name: str, source: object) -> int:
    if not isinstance(source, Sized):
        raise TypeError(
            f"sources[{name!r}] must have a length unless semantics='proportion', got {type(source).__name__}; "
            "give it a __len__, or give the shares themselves with semantics='proportion'"
        )
    return checked_int(f"len(sources[{name!r}])", len(source), 1)
