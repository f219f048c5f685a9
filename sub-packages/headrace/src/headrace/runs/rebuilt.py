"""The batch sampler of a run, made again from its state."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from headrace.runs.checkpoints import CheckpointError, Found
from headrace.runs.packages import SIZE_AWARE, WEBDATAMODULE, WEIGHTED, needed

EQUAL, BY_SIZE = "DistributedBatchSampler", "DistributedSizeAwareBatchSampler"
BY_TOKENS = "OptimizerStepBatchSampler"
NOT_BY_TOKENS = ("strategy", "batch_size_multiple", "shapes", "window", "balanced_ranks")  # that it does not have
_MOST_RANKS = 1 << 20  # a step of more would fill the memory
_OTHER_TOKENS = "the mixture of this run had its shares of tokens by other sizes, which the state does not hold"
IN_PYTHON = (
    "make the loader as in the training script, load the state into it, and call its samples_of_step(number) in Python"
)


class Run:
    """What the state of a run says of it.

    Attributes:
        kind: Name of the batch sampler's class.
        settings: What holds at its position: "world", "n", "options", "exclude", "mixture", "reweight".
        n_samples: Number of samples of the dataset.
    """

    def __init__(self, found: Found) -> None:
        self.found, self.state = found, dict(found.sampler)
        if not found.recorded:
            raise ValueError(
                f"the state {found.path} has no record of the run: a batch sampler that keeps none saved it; {EQUAL} "
                f"and {BY_SIZE} keep one"
            )
        self.kind = _kind(self.state["run"])
        try:
            if not all(
                type(self.state[name]) is int and self.state[name] >= 0 for name in ("seed", "epoch", "position")
            ):
                raise ValueError("seed, epoch and position must be ints >= 0")
            self.record = _record(self.kind, self.state)
            if any(change.get("world", 1) > _MOST_RANKS for change in self.record.changes):
                raise ValueError(f"no run has more than {_MOST_RANKS:,} ranks")
            self.settings: dict[str, Any] = self.record.settings(self.state["epoch"], self.state["position"])
            self.n_samples = int(self.settings.get("n", 0))
            if self.settings["options"].get("tokens_per_step") is not None:
                self.kind = BY_TOKENS
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the state {found.path} was changed: {error}") from error

    @property
    def world(self) -> int | None:
        """Number of ranks; None where the run had not begun."""
        return self.settings.get("world")

    @property
    def needs_sizes(self) -> bool:
        """Whether the sizes of samples decide its batches, or its order."""
        mixture = self.settings.get("mixture")
        return self.kind != EQUAL or (mixture is not None and mixture.get("per") == "token")

    def sampler(self, sizes: Any = None, num_replicas: int | None = None) -> Any:
        """Make the batch sampler, at the position of the state.

        Args:
            sizes: Of the samples, where batches are planned by them, or shares of a mixture are those of tokens.
            num_replicas: Number of ranks of coming steps; by default as many as there were last.

        Raises:
            CheckpointError: The state was changed.
            ValueError: The sizes are others, or the record does not hold all that decides the batches.
        """
        if self.needs_sizes and sizes is None:
            what = "batches of this run are planned" if self.kind != EQUAL else "the mixture of this run has shares"
            raise ValueError(
                f"{what} by the sizes of its samples: give --sizes FILE, or --data FOLDER and --sizes NAME, a column "
                "or a member"
            )
        if self.needs_sizes and len(sizes) < self.n_samples:
            raise ValueError(f"--sizes must be those of {self.n_samples} samples, got {len(sizes)}")
        return (self._of_batches if self.kind == EQUAL else self._of_sizes)(sizes, num_replicas or self.world or 1)

    def _mixture(self, sizes: Any) -> Any:
        """The mixture that gave the order; None where the state holds none."""
        if (mixture := self.settings.get("mixture")) is None:
            return None
        with needed(WEIGHTED, "a state of a run over a mixture"):
            from headrace.weighted_sampler import WeightedDistributedSampler
        tokens = sizes if sizes is None or sizes.ndim == 1 else sizes[:, 0]
        try:
            return WeightedDistributedSampler.from_mixture(mixture, tokens)
        except ValueError as error:
            raise CheckpointError(f"the state {self.found.path}: {error}") from error

    def _of_batches(self, sizes: Any, world: int) -> Any:
        with needed(WEBDATAMODULE, f"a state of {EQUAL}"):
            from headrace.webdatamodule import DistributedBatchSampler
            from headrace.webdatamodule._shared.state_mismatch import StateMismatchError
        options = {**self.settings["options"], "seed": self.state["seed"], "num_replicas": world, "rank": 0}
        mixture = self._mixture(sizes)
        made = DistributedBatchSampler(self.n_samples, **options, sampler=mixture)
        try:
            made.load_state_dict(self.state)
        except StateMismatchError as error:
            if mixture is not None:
                raise ValueError(f"{_OTHER_TOKENS}: {IN_PYTHON}") from error
            raise ValueError(
                f"the order of this run came from a sampler, and the state does not hold that: {IN_PYTHON}"
            ) from error
        except ValueError as error:
            raise CheckpointError(f"the state {self.found.path}: {error}") from error
        return made

    def _of_sizes(self, sizes: Any, world: int) -> Any:
        with needed(SIZE_AWARE, f"a state of {BY_SIZE}"):
            from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, OptimizerStepBatchSampler
            from headrace.size_aware_batching._shared.state_mismatch import StateMismatchError
        options = dict(self.settings["options"])
        if "block" in options:
            raise ValueError(f"this run planned its batches block by block, and the state has no shards: {IN_PYTHON}")
        if functions := [name for name, value in options.items() if value == "a function"]:
            raise ValueError(f"{functions[0]} of this run is a function, and the state does not hold that: {IN_PYTHON}")
        mixture = self._mixture(sizes)
        rank: Any = "all" if self.settings.get("all") else 0
        door: Any = DistributedSizeAwareBatchSampler
        if self.kind == BY_TOKENS:
            door, options["accumulate"] = OptimizerStepBatchSampler, self.settings.get("accumulate")
            options = {name: value for name, value in options.items() if name not in NOT_BY_TOKENS}
        else:
            options.pop("tokens_per_step", None)
        try:
            made = door(
                sizes[: self.n_samples],
                **options,
                sampler=mixture,
                seed=self.state["seed"],
                num_replicas=world,
                rank=rank,
            )
        except ValueError as error:
            raise ValueError(f"--sizes do not fit the options of this run: {error}") from error
        try:
            made.load_state_dict(self.state)
        except StateMismatchError as error:
            unknown = "; a sampler that is no mixture, labels, work and functions are not in the state"
            if mixture is not None and mixture.mixture["per"] == "token":
                unknown += f"; {_OTHER_TOKENS}"
            raise ValueError(f"{error.reason}{unknown}: {IN_PYTHON}") from error
        except ValueError as error:
            raise CheckpointError(f"the state {self.found.path}: {error}") from error
        return made


def _kind(run: Any) -> str:
    options = run[0].get("options") if isinstance(run, list | tuple) and isinstance(run[0], Mapping) else None
    for kind, name in ((EQUAL, "batch_size"), (BY_SIZE, "max_total_size")):
        if isinstance(options, Mapping) and name in options:
            return kind
    raise CheckpointError("the state's record of the run must begin with the options of its batches: it was changed")


def _record(kind: str, state: Mapping[str, Any]) -> Any:
    """The record of a state, by the package that the state is of."""
    if kind == EQUAL:
        with needed(WEBDATAMODULE, f"a state of {EQUAL}"):
            from headrace.webdatamodule._shared.record import RunRecord
        return RunRecord.from_state(state)
    with needed(SIZE_AWARE, f"a state of {BY_SIZE}"):
        from headrace.size_aware_batching._shared.record import RunRecord as RecordOfSizes
    return RecordOfSizes.from_state(state)


def epoch_of(sampler: Any, record: Any, step: int) -> int:
    """The epoch of a step that the run has."""
    if step < record.step:
        return int(record.epoch_of(step))
    epoch, end, ahead = int(sampler.epoch), record.step + _steps(sampler, sampler.remaining), deepcopy(sampler)
    while step >= end:
        epoch += 1
        ahead.set_epoch(epoch)
        end += _steps(ahead, len(ahead))
    return epoch


def _steps(sampler: Any, batches: int) -> int:
    return batches // sampler.num_replicas if sampler.rank == "all" else batches
