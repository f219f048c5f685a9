"""The arguments of batch samplers, validated once: which batches there are, and every refusal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, cast

from headrace.size_aware_batching._shared.checks import shown
from headrace.size_aware_batching._validation import checked_flag, one_of, whole_number
from headrace.size_aware_batching.planning.costs import COSTS, Cost, CostFunction, as_cost
from headrace.size_aware_batching.planning.limits import plain_budget
from headrace.size_aware_batching.planning.shapes import checked_shapes
from headrace.size_aware_batching.planning.token_schedule import TokenSchedule
from headrace.size_aware_batching.sizes.read import plain_extra

Strategy = Literal["sequential", "stratified", "bucketed", "packed"]
Tail = Literal["split", "pad", "drop"]
Oversize = Literal["raise", "skip", "own_batch", "split"]
LabelPer = Literal["batch", "step"]
StreamOversize = Literal["raise", "skip", "own_batch"]  # of elements that have no index
STRATEGIES: tuple[Strategy, ...] = ("sequential", "stratified", "bucketed", "packed")
SORTING: tuple[Strategy, ...] = ("stratified", "packed", "bucketed")
TAILS: tuple[Tail, ...] = ("split", "pad", "drop")
LABEL_PER: tuple[LabelPer, ...] = ("batch", "step")
OVERSIZE: tuple[Oversize, ...] = ("raise", "skip", "own_batch", "split")
STREAM_OVERSIZE: tuple[StreamOversize, ...] = ("raise", "skip", "own_batch")
LARGEST_MULTIPLE = 2**31
CHANGEABLE = (  # arguments that a run may change; in the order of the signature
    "max_total_size",
    "strategy",
    "cost",
    "shuffle",
    "max_items",
    "batch_size_multiple",
    "length_multiple",
    "shapes",
    "oversize",
    "tail",
    "max_length",
    "extra_per_sample",
    "curriculum",
    "window",
    "balanced_ranks",
    "tokens_per_step",
)
RECORDED_IF_GIVEN = ("extra_per_sample",)  # None where a record has none
DATA = "data"  # samples that were appended
FUNCTION = "a function"  # in records, in place of one
_KEEPS_ORDER = ", which keeps the order of the samples"
# Arguments that some strategies do not have: their default, the strategies that have them, the end of the error.
_OF_STRATEGIES: tuple[tuple[str, Any, tuple[Strategy, ...], str], ...] = (
    ("batch_size_multiple", 1, ("bucketed", "sequential"), ""),
    ("balanced_ranks", None, SORTING, f"{_KEEPS_ORDER}: leave it out"),
    ("shapes", None, ("bucketed",), ": in another order any batch may need the longest shape"),
    ("curriculum", None, SORTING, _KEEPS_ORDER),
)


def change_within_epoch_error(name: str, value: object) -> ValueError:
    """Return the error where an argument of an epoch that has begun allows no change."""
    return ValueError(
        f"{name}={shown(value)} allows changes at the beginning of an epoch only: make them after set_epoch of the "
        "next one and before its first batch, or resume from a state that was saved there"
    )


def implied(
    strategy: Strategy | None, cost: Literal["sum", "padded"] | CostFunction | None
) -> tuple[Strategy, Literal["sum", "padded"] | CostFunction]:
    """Return strategy and cost where a user may have left out either: the usual one of the other.

    >>> implied(None, None), implied(None, "padded"), implied("bucketed", None), implied("packed", None)
    (('stratified', 'sum'), ('bucketed', 'padded'), ('bucketed', 'padded'), ('packed', 'sum'))
    """
    if strategy is not None:
        one_of("strategy", strategy, STRATEGIES)
    if cost is None:
        of_strategy = (name for name in COSTS if as_cost(name).strategies[0] == strategy)
        cost = cast(Literal["sum", "padded"], next(of_strategy, "sum"))
    return strategy or cast(Strategy, as_cost(cost).strategies[0]), cost


@dataclass(frozen=True)
class Options:
    """The arguments of `DistributedSizeAwareBatchSampler` that decide which batches there are."""

    strategy: Strategy = "stratified"
    cost: Literal["sum", "padded"] | CostFunction = "sum"
    shuffle: bool = True
    max_items: int | None = None
    batch_size_multiple: int = 1
    length_multiple: int = 1
    oversize: Oversize = "raise"
    window: int | None = None
    shapes: int | Sequence[tuple[int, int]] | None = None
    curriculum: int | None = None
    balanced_ranks: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_items", "batch_size_multiple", "length_multiple", "window", "curriculum", "balanced_ranks"):
            high = LARGEST_MULTIPLE if name.endswith(("multiple", "ranks", "curriculum")) else None
            object.__setattr__(self, name, whole_number(name, getattr(self, name), high=high))
        if isinstance(self.shapes, Sequence) and not isinstance(self.shapes, str):
            object.__setattr__(self, "shapes", checked_shapes(self.shapes, self.length_multiple))
        else:
            object.__setattr__(self, "shapes", whole_number("shapes", self.shapes))
        object.__setattr__(self, "shuffle", checked_flag("shuffle", self.shuffle))
        one_of("strategy", self.strategy, STRATEGIES)
        one_of("oversize", self.oversize, OVERSIZE)
        self._refuse_mismatches()
        if self.shapes is not None:
            self._refuse_shapes()
        if self.curriculum is not None and not self.shuffle:
            raise ValueError(
                f"curriculum={self.curriculum} goes with shuffle=True, got False: without it every epoch is the same"
            )
        for name, default, strategies, why in _OF_STRATEGIES:
            if (value := getattr(self, name)) != default and self.strategy not in strategies:
                raise ValueError(
                    f"{name}={shown(value)} goes with strategy={_listed(strategies)}, got {self.strategy!r}{why}"
                )

    @property
    def fingerprint_parts(self) -> dict[str, Any]:
        """The arguments by name, for a fingerprint."""
        return {field.name: getattr(self, field.name) for field in fields(Options)}

    @property
    def sorts(self) -> bool:
        """Whether samples are sorted by size, so that every epoch has as many batches."""
        return self.shuffle and self.strategy != "sequential"

    @property
    def chooses_order(self) -> bool:
        """Whether a user decided which steps follow one another: by these arguments, or as samples keep their order."""
        return self.strategy == "sequential" or not (self.balanced_ranks is None and self.curriculum is None)

    def balanced_for(self, first_world: int) -> int:
        """Return for how many ranks steps are balanced in a run that began with ``first_world`` of them."""
        return self.balanced_ranks or first_world

    @property
    def size_note(self) -> str:
        """What to say behind a size."""
        return ""

    @property
    def batch_cost(self) -> Cost:
        """The cost of a batch."""
        return as_cost(self.cost, self.length_multiple)

    def _refuse_mismatches(self) -> None:
        cost = self.batch_cost
        if self.strategy not in cost.strategies:
            given = FUNCTION if callable(self.cost) else repr(self.cost)
            raise ValueError(
                f"strategy={self.strategy!r} works with cost='sum' only, got {given}: leave it out for 'bucketed', "
                "or give 'sequential' for an order of your own"
            )
        if not cost.pads and self.length_multiple > 1:
            raise ValueError(
                f"length_multiple must be 1 with cost={cost.name!r}, got {self.length_multiple}: it has no padding"
            )
        if self.max_items is not None and self.max_items < self.batch_size_multiple:
            raise ValueError(
                f"max_items={self.max_items} is less than batch_size_multiple={self.batch_size_multiple}: "
                "no batch could hold such a multiple"
            )

    def _refuse_shapes(self) -> None:
        given = f"shapes={shown(self.shapes)} goes with"
        if not self.batch_cost.pads:
            raise ValueError(
                f"{given} cost='padded' or a function, got {self.cost!r}: batches that are not padded have no shape of "
                "count and length"
            )
        if self.oversize == "own_batch":
            raise ValueError(
                f"{given} oversize='raise', 'skip' and 'split', got 'own_batch': each of those batches has a shape of "
                "its own"
            )


@dataclass(frozen=True)
class SamplerOptions(Options):
    """The arguments of a batch sampler that decide which batches there are.

    ``max_length`` is as it was given; its columns are known with the sizes. With ``tokens_per_step`` they are those of
    optimizer steps, in which the samples come in the order of the list. ``label_per`` is None where samples have no
    labels; ``has_groups`` says whether some samples stay together.
    """

    max_total_size: Any = None
    tail: Tail = "split"
    max_length: Any = None
    extra_per_sample: Any = None
    tokens_per_step: Any = None
    accumulate: int | None = None
    label_per: LabelPer | None = None
    has_groups: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("tail", self.tail, TAILS)
        if self.label_per is not None:
            self._refuse_labels()
        if self.has_groups:
            self._refuse_groups()
        object.__setattr__(self, "accumulate", whole_number("accumulate", self.accumulate))
        if self.tokens_per_step is not None:
            object.__setattr__(self, "tokens_per_step", TokenSchedule.from_argument(self.tokens_per_step).value)
        object.__setattr__(self, "max_total_size", plain_budget(self.max_total_size))
        object.__setattr__(self, "extra_per_sample", plain_extra(self.extra_per_sample))

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> SamplerOptions:
        """Return the options among the arguments of a sampler."""
        options = {name: arguments[name] for name in (*CHANGEABLE, "accumulate") if name in arguments}
        one_of("label_per", label_per := arguments.get("label_per", "batch"), LABEL_PER)
        if arguments.get("by") is not None:
            options["label_per"] = label_per
        elif label_per != "batch":
            raise ValueError(f"label_per={label_per!r} goes with by=, the label of each sample, got by=None: give both")
        options["has_groups"] = arguments.get("group_by") is not None
        options["strategy"], options["cost"] = implied(options.get("strategy"), options["cost"])
        return cls(**options)

    @cached_property
    def schedule(self) -> TokenSchedule | None:
        """Tokens of each optimizer step."""
        return None if self.tokens_per_step is None else TokenSchedule.from_argument(self.tokens_per_step)

    @property
    def size_note(self) -> str:
        """What to say behind a size that is more than a user gave."""
        return (
            f", extra_per_sample={shown(self.extra_per_sample)} included" if self.extra_per_sample is not None else ""
        )

    def _refuse_labels(self) -> None:
        if self.strategy not in SORTING:
            raise ValueError(f"by goes with strategy={_listed(SORTING)}, got {self.strategy!r}{_KEEPS_ORDER}")
        if self.curriculum is not None:
            raise ValueError(
                f"curriculum={self.curriculum} and by were both given, but each of them decides which batches come "
                "first: leave out one"
            )
        if self.label_per == "step" and self.tail == "drop":
            raise ValueError(
                "label_per='step' goes with tail='split' and 'pad', got 'drop': it would drop the last batches of each "
                "label, and small labels as a whole"
            )

    def _refuse_groups(self) -> None:
        for name, value, allowed in (
            ("oversize", self.oversize, OVERSIZE[:3]),
            ("shapes", self.shapes, (None,)),
            ("batch_size_multiple", self.batch_size_multiple, (1,)),
        ):
            if value not in allowed:
                raise ValueError(
                    f"group_by goes with {name}={' or '.join(map(repr, allowed))}, got {shown(value)}: a group is "
                    "never split, and has any number of samples"
                )

    def recorded(self, max_length: Any) -> dict[str, Any]:
        """Return the arguments that may change, in JSON; a function is recorded as such."""
        own = {**vars(self), "max_length": max_length}
        names = [name for name in CHANGEABLE if name not in RECORDED_IF_GIVEN or own[name] is not None]
        return {name: as_json(FUNCTION if callable(own[name]) else own[name]) for name in names}

    def changed(self, recorded: Mapping[str, Any]) -> SamplerOptions:
        """Return the arguments with others that a record has."""
        return replace(self, **recorded)


def _listed(strategies: Sequence[Strategy]) -> str:
    *others, last = map(repr, strategies)
    return f"{', '.join(others)} and {last}" if others else last


def as_json(value: Any) -> Any:
    """Return a value as JSON has it, the same for equal ones: 200 for 200.0."""
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    return int(value) if isinstance(value, float) and value.is_integer() else value
