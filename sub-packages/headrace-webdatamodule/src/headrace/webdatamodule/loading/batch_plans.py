"""Any batch sampler, of headrace, torch or a user, as a loader asks it: batches from a position on, and states."""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule._shared.digest import bytes_digest
from headrace.webdatamodule.loading.next_use import NextUses, PlanUses, planned_uses
from headrace.webdatamodule.loading.position import Position

_OTHER_ORDER = (
    "the order of {kind} is not the one that the checkpoint was saved in: samples would be lost and repeated. Use a "
    "sampler whose order depends on a seed and the epoch alone, or start without the checkpoint"
)
_PLANNED = ("begin", "begun", "delivered", "go_to", "batches_from", "n_batches_from")


class BatchAt(NamedTuple):
    """A batch: its samples, the place after it, and the draws of its samples."""

    samples: Sequence[Any]
    place: Any
    draws: Sequence[int] | None = None


class BatchPlan(ABC):
    """A batch sampler that a loader reads ahead; only the loader's position counts.

    Args:
        sampler: The batch sampler.
        copied: Returns another one with the same batches.
        n_samples: Number of samples of the dataset, if their repetitions are counted; else None.
    """

    def __init__(self, sampler: Any, copied: Callable[[], Any], n_samples: int | None) -> None:
        self.sampler, self._copied, self._n_samples = sampler, copied, n_samples

    @property
    def kind(self) -> str:
        """The class of the batch sampler."""
        return type(self.sampler).__name__

    @property
    def order_digest(self) -> str:
        """Digest of an order that the state does not name."""
        return str(getattr(self.sampler, "order_digest", ""))

    def go_to(self, epoch: int, _position: Position) -> None:
        """Let the next iteration begin at a position of an epoch."""
        set_epoch(self.sampler, epoch)

    @abstractmethod
    def length(self, epoch: int, position: Position) -> int:
        """Return the batches of an epoch, of which those before a position came already."""

    @abstractmethod
    def begin(self, epoch: int, position: Position) -> Iterator[BatchAt]:
        """Begin an iteration at a position, and return its batches, each with the place after it."""

    def rest(self, _epoch: int, _position: Position) -> Iterator[BatchAt] | None:
        """Return the batches after a position of an iteration that was left behind; None: it continues by itself."""
        return None

    def delivered(self, batch: BatchAt) -> None:  # noqa: B027 - a place in a batch is enough for others
        """Count a batch of the iteration that has reached the training loop."""

    @abstractmethod
    def beside(self, epoch: int, position: Position) -> tuple[int, Iterator[BatchAt]]:
        """Return the length of an iteration from a position on that counts for nothing, and its batches."""

    def adopt(self, epoch: int, start: Position, batch: BatchAt) -> None:  # noqa: B027 - as above
        """Count an iteration that began beside another one at ``start``, and has delivered one batch."""

    @abstractmethod
    def state(self, epoch: int, position: Position, ranks: tuple[int, int]) -> dict[str, Any]:
        """Return the state at a position of the epoch."""

    @abstractmethod
    def load(self, state: Mapping[str, Any], present: int, ranks: tuple[int, int], accept: Collection[str]) -> Position:
        """Resume from a loader's state that was checked; if that is refused, it is in the ``present`` epoch."""

    def take_over(self, _state: Mapping[str, Any], _epoch: int, *, within_epoch: bool) -> Any:  # noqa: ARG002 - for others
        """Continue the run of a batch sampler for other ranks, and return the place.

        Where no epoch is interrupted this one may have other options, such as a batch size by the number of ranks,
        which the record notes.
        """
        return None

    def compared(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what ranks compare of a state, by names."""
        return {"position": state}

    def changing(self, method: str) -> Any:
        """Return the batch sampler if it has a method that changes a run or asks it; refuse others."""
        if not callable(getattr(self.sampler, method, None)):
            raise TypeError(
                f"batch_sampler must have {method}() for that, got {self.kind}: use DistributedBatchSampler or "
                "DistributedSizeAwareBatchSampler, which keep a record of the run"
            )
        return self.sampler

    def place(self) -> Any:
        """Return the place where the run is; None without one."""
        return None

    def has_moved(self) -> bool:
        """Whether somebody else has changed the batch sampler, or read it, since the iteration began."""
        return False

    def settled(self, _epoch: int, position: Position) -> Position:
        """Return the position after a change that came at a position."""
        return position

    def _refuse_single(self, batch: Any) -> None:
        """Refuse what gives one sample at a time."""
        if not hasattr(batch, "__len__"):
            raise TypeError(
                f"batch_sampler must give lists of indices, got {type(batch).__name__} from {self.kind}, which gives "
                f"one sample at a time: wrap it, such as BatchSampler({self.kind}(...), batch_size=..., "
                "drop_last=False) of torch.utils.data"
            )

    def _check_accept(self, accept: Collection[str]) -> None:
        """Refuse to accept changes where the batch sampler does not."""
        load = getattr(self.sampler, "load_state_dict", None)
        if accept and (load is None or "accept" not in inspect.signature(load).parameters):
            raise TypeError(
                f"accept={sorted(accept)} needs a batch_sampler with load_state_dict(state, accept), got {self.kind}: "
                "use DistributedBatchSampler or DistributedSizeAwareBatchSampler"
            )


class RunPlan(BatchPlan):
    """A batch sampler over a run: the run is always where the training loop is."""

    _begun: object = None  # what stands for the iteration

    def go_to(self, epoch: int, position: Position) -> None:
        """Let the next iteration begin at a position of an epoch."""
        self._begun = None
        set_epoch(self.sampler, epoch)
        self.sampler.go_to(0 if position.place is None else position.place)

    def length(self, _epoch: int, position: Position) -> int:
        """Return the batches of an epoch; those that were skipped before do not count."""
        if position.steps or position.place is not None:
            return position.steps + int(self.sampler.remaining)
        return len(self.sampler)

    def begin(self, _epoch: int, _position: Position) -> Iterator[BatchAt]:
        """Begin an iteration at the position where the run was put."""
        batches: Iterator[BatchAt] = self.sampler.begin()
        self._begun = self.sampler.begun
        return batches

    def has_moved(self) -> bool:
        """Whether somebody else has changed the batch sampler, or read it, since the iteration began."""
        return self._begun is not None and self.sampler.begun is not self._begun

    def settled(self, epoch: int, position: Position) -> Position:
        """Return the place of the run after a change; where somebody else has read it, go back."""
        if self.sampler.begun is not None or self.sampler.epoch != epoch:
            self.go_to(epoch, position)
            return position
        self._begun = None
        return Position(position.steps, self.place())

    def delivered(self, batch: BatchAt) -> None:
        """Move the run to the place after a batch."""
        self.sampler.delivered(batch)

    def beside(self, _epoch: int, position: Position) -> tuple[int, Iterator[BatchAt]]:
        """Ask for batches of the present epoch, which moves nothing."""
        place = 0 if position.place is None else position.place
        return position.steps + self.sampler.n_batches_from(place), self.sampler.batches_from(place)

    def adopt(self, epoch: int, start: Position, batch: BatchAt) -> None:
        """Let the run begin where another iteration began, and take its first batch."""
        self.go_to(epoch, start)
        self.begin(epoch, start)
        self.sampler.delivered(batch)

    def state(self, _epoch: int, position: Position, _ranks: tuple[int, int]) -> dict[str, Any]:
        """Return the state at a position of the epoch."""
        state: dict[str, Any] = self.sampler.state_dict(0 if position.place is None else position.place)
        return state

    def load(
        self, state: Mapping[str, Any], present: int, _ranks: tuple[int, int], accept: Collection[str]
    ) -> Position:
        """Resume from a loader's state that was checked."""
        self._check_accept(accept)
        epoch, steps = state["epoch"], state["steps"]
        load_state(self.sampler, state["batch_sampler"], epoch, accept)
        if 0 < steps < len(self.sampler) and state.get("order", "") != self.order_digest:
            set_epoch(self.sampler, present)
            self.sampler.go_to(0)
            raise ValueError(_OTHER_ORDER.format(kind=type(getattr(self.sampler, "sampler", self.sampler)).__name__))
        return Position(steps, self.place())

    def take_over(self, state: Mapping[str, Any], epoch: int, *, within_epoch: bool) -> Any:
        """Continue the run of a batch sampler for other ranks, and return the place."""
        if within_epoch:
            load_state(self.sampler, state, epoch)
        elif "run" in state:
            options = {name for change in state["run"] for name in change.get("options", ())}
            load_state(self.sampler, state, epoch, options)
        return self.place()

    def place(self) -> Any:
        """Return the place where the run is; None at the beginning of an epoch."""
        place = self.sampler.place
        return place if place.position else None

    def compared(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what ranks compare of a state: all but what one that looked at a batch alone has noted of it."""
        own = ("world", "all", "step")
        changes = [{name: value for name, value in change.items() if name not in own} for change in state["run"]]
        changes = [change for change in changes if len(change) > 2]  # more than a place
        plain = {name: value for name, value in state.items() if name not in ("step", "starts", "run", "fingerprint")}
        return {
            **{name if name == "position" else f"{name} of the state": value for name, value in plain.items()},
            **{
                f"{name} of change {number} of the run": value
                for number, change in enumerate(changes)
                for name, value in change.items()
            },
        }


class CopiedPlan(BatchPlan):
    """A batch sampler with a state of its own: each iteration reads a copy, whose state after each batch is a place."""

    _latest: tuple[int, Position, Any] | None = None  # a copy at a position, not iterated yet

    def _copy_at(self, epoch: int, position: Position) -> Any:
        if self._latest is None or self._latest[:2] != (epoch, position):
            copied = self._copied()
            set_epoch(copied, epoch)
            if position.place is not None:
                load_state(copied, position.place, epoch)
            self._latest = epoch, position, copied
        return self._latest[2]

    def length(self, epoch: int, position: Position) -> int:
        """Return the batches of an epoch, of which those before a position came already."""
        if not (position.steps or (position.place or {}).get("position")):
            set_epoch(self.sampler, epoch)
            return len(self.sampler)
        copied = self._copy_at(epoch, position)
        remaining = getattr(copied, "remaining", None)
        return len(copied) if remaining is None or callable(remaining) else position.steps + int(remaining)

    def begin(self, epoch: int, position: Position) -> Iterator[BatchAt]:
        """Read a copy from a position on."""
        copied, self._latest = self._copy_at(epoch, position), None
        for batch in copied:
            self._refuse_single(batch)
            yield BatchAt(batch, copied.state_dict(), draws_of(copied, batch))

    def beside(self, epoch: int, position: Position) -> tuple[int, Iterator[BatchAt]]:
        """Read another copy."""
        return self.length(epoch, position), self.begin(epoch, position)

    def state(self, epoch: int, position: Position, _ranks: tuple[int, int]) -> dict[str, Any]:
        """Return the state at a position of the epoch."""
        state: dict[str, Any] | None = position.place
        if state is None:
            set_epoch(self.sampler, epoch)
            state = self.sampler.state_dict()
        return state

    def load(
        self, state: Mapping[str, Any], _present: int, _ranks: tuple[int, int], accept: Collection[str]
    ) -> Position:
        """Resume from a loader's state that was checked."""
        self._check_accept(accept)
        copied = self._copied()
        load_state(copied, state["batch_sampler"], state["epoch"], accept)
        steps = state["steps"]
        if 0 < steps < len(copied) and state.get("order", "") != getattr(copied, "order_digest", ""):
            raise ValueError(_OTHER_ORDER.format(kind=type(getattr(copied, "sampler", copied)).__name__))
        return Position(steps, copied.state_dict())

    def take_over(self, state: Mapping[str, Any], epoch: int, *, within_epoch: bool) -> Any:
        """Continue within an epoch from the place of another one; between epochs there is nothing to continue."""
        if not within_epoch:
            return None
        copied = self._copied()
        load_state(copied, state, epoch)
        return copied.state_dict()


class CountedPlan(BatchPlan):
    """A batch sampler without a state: its batches are counted and hashed, and read again from the beginning."""

    def length(self, epoch: int, _position: Position) -> int:
        """Return the batches of an epoch."""
        set_epoch(self.sampler, epoch)
        return len(self.sampler)

    def begin(self, epoch: int, position: Position) -> Iterator[BatchAt]:
        """Read it from a position on."""
        return self._read(self.sampler, epoch, position)

    def beside(self, epoch: int, position: Position) -> tuple[int, Iterator[BatchAt]]:
        """Read a copy."""
        copied = self._copied()
        set_epoch(copied, epoch)
        return len(copied), self._read(copied, epoch, position)

    def rest(self, epoch: int, position: Position) -> Iterator[BatchAt]:
        """Read a copy, as the batch sampler may be in another epoch."""
        return self.beside(epoch, position)[1]

    def _read(self, sampler: Any, epoch: int, start: Position) -> Iterator[BatchAt]:
        set_epoch(sampler, epoch)
        repeats = None if self._n_samples is None or _has_draws(sampler) else Repeats(self._n_samples)
        delivered = b""
        for step, batch in enumerate(sampler):
            self._refuse_single(batch)
            if step and step == start.steps and start.place not in (None, delivered.hex()):
                raise ValueError(_OTHER_ORDER.format(kind=self.kind))
            delivered = bytes_digest(delivered, _hashed(batch))
            draws = draws_of(sampler, batch) if repeats is None else repeats.count(batch)
            if step >= start.steps:
                yield BatchAt(batch, delivered.hex(), draws)

    def state(self, _epoch: int, position: Position, ranks: tuple[int, int]) -> dict[str, Any]:
        """Return the state at a position: every rank has batches of its own."""
        num_replicas, rank = ranks
        return {"num_replicas": num_replicas, "rank": rank, "delivered": position.place}

    def load(self, state: Mapping[str, Any], present: int, ranks: tuple[int, int], accept: Collection[str]) -> Position:
        """Resume from a loader's state that was checked, with as many ranks."""
        self._check_accept(accept)
        saved, steps, (num_replicas, rank) = state["batch_sampler"], state["steps"], ranks
        if saved.get("num_replicas") != num_replicas:
            raise ValueError(
                f"checkpoint has num_replicas={saved.get('num_replicas')}, got num_replicas={num_replicas}, and "
                f"{self.kind} has no state_dict to share the rest among them: resume with as many ranks, or give a "
                "batch sampler that has one"
            )
        set_epoch(self.sampler, state["epoch"])
        if steps > (length := len(self.sampler)):
            set_epoch(self.sampler, present)
            raise ValueError(f"state has steps={steps}, more than the {length} batches of its epoch")
        return Position(steps, saved.get("delivered") if saved.get("rank") == rank else None)

    def compared(self, _state: Mapping[str, Any]) -> dict[str, Any]:
        """Return nothing: every rank has batches of its own."""
        return {"position": None}


def batch_plan(
    sampler: Any, dataset: Any, name: str, make: Callable[[], Any] | None = None, n_samples: int | None = None
) -> BatchPlan:
    """Return how a loader reads a batch sampler, by what it has; `make` makes another one, if a function made it."""
    check_batch_sampler(sampler, dataset)
    copied = partial(_deep_copy, sampler, dataset, name) if make is None else make
    if _is_planned(type(sampler)):
        return RunPlan(sampler, copied, n_samples)
    return (CopiedPlan if has_state(sampler) else CountedPlan)(sampler, copied, n_samples)


def _is_planned(kind: type) -> bool:
    """Whether batch samplers of a class have batches that can be asked; one that iterates in its own way is read."""
    if not all(hasattr(kind, name) for name in _PLANNED):
        return False
    iterates, begins = (next(base for base in kind.__mro__ if name in vars(base)) for name in ("__iter__", "begin"))
    return issubclass(begins, iterates)


def _deep_copy(sampler: Any, dataset: Any, name: str) -> Any:
    """A batch sampler of the same order; the dataset stays the same."""
    try:
        return copy.deepcopy(sampler, {id(dataset): dataset})
    except TypeError as error:
        kind = type(sampler).__name__
        why = "an iteration" if has_state(sampler) else "a second iteration"
        raise TypeError(
            f"{why} of the {name} loader{'' if has_state(sampler) else ', while one is under way,'} needs a copy of "
            f"{kind}, and it cannot be copied ({error}): keep no iterators in its attributes, give batch_sampler as a "
            "function of num_replicas and rank that makes it, or begin anew with set_epoch"
        ) from error


class NodeUses:
    """When this node needs samples next; plans of epochs are kept while the batches stay as they are."""

    def __init__(self) -> None:
        self._made: tuple[tuple[Any, ...], PlanUses | None] = (), None  # for which batches, and what was made

    def of(self, sampler: Any, ranks: tuple[int, int], epoch: int) -> NextUses | None:
        """Return when samples of an epoch are needed next; None if that is not known, or of no use."""
        if callable(own := getattr(sampler, "next_uses", None)):
            uses: NextUses | None = own()
            return uses
        made_for = getattr(sampler, "fingerprint", None), ranks, len(excluded_by(sampler))
        if self._made[0] != made_for:
            self._made = made_for, planned_uses_of(sampler, *ranks)
        planned = self._made[1]
        return planned if planned is not None and planned.prepare(epoch) else None


def planned_uses_of(batch_sampler: Any, world: int, rank: int) -> PlanUses | None:
    """The next uses by a batch sampler that plans its epochs."""
    return planned_uses(getattr(batch_sampler, "plan", None), sizes_of(batch_sampler), world, rank)


class Repeats:
    """How often each sample of a dataset came before, in the batches of one rank."""

    def __init__(self, n_samples: int) -> None:
        self._counts = np.zeros(n_samples, np.uint32)  # whose pages are taken when they are first written

    def count(self, batch: Sequence[int]) -> list[int] | None:
        """For each sample of the next batch; None where all come for the first time."""
        batch, counts = samples_of(batch), self._counts
        indices = np.array(batch, np.int64)
        before = counts[indices]
        counts[indices] = before + 1
        if len(set(batch)) < len(batch):
            for place, index in enumerate(indices.tolist()):
                before[place] += batch[:place].count(index)
            np.maximum.at(counts, indices, before + 1)
        counted: list[int] = before.tolist()
        return counted if before.any() else None


def _hashed(batch: Any) -> bytes:
    """A batch as bytes; of keys that are no integers what they show."""
    try:
        return array("q", (len(batch), *batch)).tobytes()
    except TypeError:
        return repr((samples_of(batch), batch)).encode()


def has_state(batch_sampler: Any) -> bool:
    """Whether a batch sampler can be resumed by itself."""
    return callable(getattr(batch_sampler, "state_dict", None)) and hasattr(batch_sampler, "load_state_dict")


def _has_draws(batch_sampler: Any) -> bool:
    """Whether a batch sampler has `draws`, and no method of that name."""
    return hasattr(batch_sampler, "draws") and not callable(batch_sampler.draws)


def draws_of(batch_sampler: Any, batch: Sequence[int]) -> Sequence[int] | None:
    """The `draws` of a batch sampler's latest batch; None where it has none, or something else of that name."""
    draws: Any = getattr(batch_sampler, "draws", None)
    if isinstance(draws, np.ndarray):
        draws = draws.tolist()
    return draws if isinstance(draws, Sequence) and len(draws) == len(batch) else None


def counts_sizes(batch_sampler: Any) -> bool:
    """Whether its `sizes` and `n_samples` mean what those of headrace's batch samplers mean."""
    return hasattr(type(batch_sampler), "fingerprint")


def sizes_of(batch_sampler: Any) -> Any:
    """The size of each sample by which a batch sampler fills its batches; None if it does not say."""
    return getattr(batch_sampler, "sizes", None) if counts_sizes(batch_sampler) else None


def longest_of(batch_sampler: Any, columns: int) -> list[float]:
    """The size up to which a batch sampler counts a sample in each column, as `collate_fn` truncates; else infinite."""
    longest = getattr(batch_sampler, "max_length", None) if counts_sizes(batch_sampler) else None
    return _of_columns(longest, columns, math.inf)


def extra_of(batch_sampler: Any, columns: int) -> list[float]:
    """What a batch sampler counts of each sample beside its size in each column, such as special tokens."""
    extra = getattr(batch_sampler, "extra_per_sample", None) if counts_sizes(batch_sampler) else None
    return _of_columns(extra, columns, 0.0)


def _of_columns(values: Any, columns: int, missing: float) -> list[float]:
    """A number for each column of sizes."""
    listed = [*values] if isinstance(values, Sequence) else [values]
    numbers = [float(value) if isinstance(value, int | float) else missing for value in listed]
    return [*numbers, *[missing] * columns][:columns]


def budgets_of(batch_sampler: Any) -> tuple[Any, tuple[float, ...]]:
    """The cost of a batch, such as "sum", and its budgets; none where it does not say."""
    cost = getattr(getattr(batch_sampler, "options", None), "cost", None)
    budget: Any = getattr(batch_sampler, "max_total_size", None)
    budgets = budget if isinstance(budget, Sequence) else [budget]
    return cost, tuple(float(each) for each in budgets if isinstance(each, int | float))


def asked_shares(batch_sampler: Any) -> Any:
    """What the shares of its mixture refer to, and the requested share of each source; None where it has none."""
    asked = getattr(batch_sampler, "asked_shares", None)
    return asked() if callable(asked) else None


def check_batch_sampler(batch_sampler: Any, dataset: Any) -> Any:
    """Refuse what is no batch sampler, or one that says it was made for another number of samples."""
    if not (hasattr(batch_sampler, "__len__") and hasattr(batch_sampler, "__iter__")):
        kind = type(batch_sampler).__name__
        raise TypeError(
            f"batch_sampler must give lists of indices in every epoch and have a length, got {kind}: give one such as "
            "DistributedBatchSampler(len(dataset), batch_size)"
        )
    if not counts_sizes(batch_sampler):
        return batch_sampler
    sizes = sizes_of(batch_sampler)
    count = getattr(batch_sampler, "n_samples", None) if sizes is None else len(sizes)
    if isinstance(count, int) and count not in (0, len(dataset)):
        kind, sampler = type(batch_sampler).__name__, getattr(batch_sampler, "sampler", None)
        cure = "give it len(dataset)" if sizes is None else "give it the sizes of this dataset"
        if sizes is None and isinstance(sampler, Sized) and len(sampler) == count:
            cure += f", not the length of its {type(sampler).__name__}"
        message = f"dataset must have the {count} samples that {kind} was made for, got {len(dataset)}"
        raise ValueError(f"{message}: {cure}")
    return batch_sampler


def samples_of(batch: Iterable[Any]) -> list[int]:
    """The index of each sample of a batch, whose keys may say it by `int()`, as pieces of samples do."""
    found = list[int]()
    for key in batch:
        try:
            found.append(int(key))
        except (TypeError, ValueError):
            raise TypeError(
                "batch_sampler must give indices, or keys that int() makes the sample's index of, such as Piece, got "
                f"{key!r}"
            ) from None
    return found


def ranks_of(batch_sampler: Any) -> tuple[int, int] | None:
    """The number of ranks and the rank that a batch sampler, or its sampler, is for; None if it does not say."""
    for one in (batch_sampler, getattr(batch_sampler, "sampler", None)):
        found = getattr(one, "num_replicas", None), getattr(one, "rank", None)
        if all(isinstance(number, int) for number in found):
            return found  # type: ignore[return-value]  # of two ints
    return None


def set_epoch(batch_sampler: Any, epoch: int) -> None:
    """Tell a batch sampler, or its sampler, the epoch."""
    setter = getattr(batch_sampler, "set_epoch", None)
    setter = setter or getattr(getattr(batch_sampler, "sampler", None), "set_epoch", None)
    if callable(setter):
        setter(epoch)


def load_state(batch_sampler: Any, state: Mapping[str, Any], epoch: int, accept: Collection[str] = ()) -> None:
    """Resume a batch sampler, whichever epoch was set before; what may differ is given to one that takes it."""
    accepted = {"accept": accept} if accept else {}
    batch_sampler.load_state_dict(state, **accepted)
    if batch_sampler.state_dict().get("epoch", epoch) != epoch:  # a later epoch was set, which it keeps
        set_epoch(batch_sampler, epoch)
        batch_sampler.load_state_dict(state, **accepted)


def recorded_ranks(state: Mapping[str, Any] | None) -> int | None:
    """The number of ranks that a state's run had last; None if it says none."""
    worlds = [change["world"] for change in (state or {}).get("run", ()) if "world" in change]
    return worlds[-1] if worlds else None


def excluded_by(batch_sampler: Any) -> npt.NDArray[np.int64]:
    """The samples that a batch sampler was told to leave out, ascending."""
    excluded: npt.NDArray[np.int64] = getattr(batch_sampler, "excluded_indices", np.zeros(0, np.int64))
    return excluded


def skipped_by(batch_sampler: Any) -> Sequence[int]:
    """The samples that a batch sampler leaves out as larger than its budget."""
    skipped: Sequence[int] = getattr(batch_sampler, "skipped_indices", ())
    return skipped


def accumulation_of(batch_sampler: Any) -> Any:
    """The number of batches in each optimizer step; None if it is not known."""
    return getattr(batch_sampler, "accumulation", None)


def gives_all_ranks(batch_sampler: Any) -> bool:
    """Whether a batch sampler gives the batches of all ranks."""
    return isinstance(getattr(batch_sampler, "rank", None), str)
