"""Where a loader stands in its epochs: positions, iterations, and what the next one begins with."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.webdatamodule._shared.cursor import EpochCursor
from headrace.webdatamodule._shared.digest import bytes_digest
from headrace.webdatamodule.loading.batch_reading import Keys, Request, SkippedSample
from headrace.webdatamodule.loading.foreign_batch_sampler import OTHER_ORDER, at_beginning, has_state, samples_of
from headrace.webdatamodule.loading.next_use import NextUses


class Position(NamedTuple):
    """A place in an epoch."""

    steps: int  # batches of the epoch before it
    state: dict[str, Any] | None  # of the batch sampler; of one that has none, a hash of the batches before, if any


def position_of(batch_sampler: Any, steps: int, state: dict[str, Any] | None = None) -> Position:
    """The position of a batch sampler, `steps` batches into its epoch; `state` is for one that has none."""
    if has_state(batch_sampler):
        state = batch_sampler.state_dict()
    if state is not None and not steps and "position" in state:
        state = _at_beginning(state)  # an iteration that was abandoned has moved the batch sampler
    return Position(steps, state)


def _at_beginning(state: dict[str, Any]) -> dict[str, Any]:
    """A batch sampler's state, at the beginning of its epoch; what was skipped there stays so."""
    if "run" not in state:
        return {**state, "position": 0}
    skipped, epoch = 0, state["epoch"]
    for change in state["run"]:
        if (change["epoch"], change["position"]) == (epoch, skipped):
            skipped += change.get("skip", 0)
    return at_beginning(state, epoch, min(skipped, state["position"]))


def compared(state: dict[str, Any] | None) -> dict[str, Any]:
    """What ranks compare of a state, by names: all but what one that looked at a batch alone has noted of it."""
    if state is None or "run" not in state:
        return {"position": state}
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


class Iteration:
    """One iteration over an epoch of `length` batches, from a position on.

    Attributes:
        positions: Behind the batches that were delivered last; at least the last one.
        in_flight: What was requested and is not delivered yet: the indices of a batch, and the position after it.
        delivered: The indices of the last batch, and its skipped samples.
        plan: What the ranks compare.
        batches, reader: Where its batches come from.
        changed: Whether its batches were changed, so that the ranks compare their plans once more.
        together: Batches that were read since its ranks met: since it began, or since other ranks took over.
        under_way: Whether its generator runs.
        finished: Whether it came to its end.
    """

    def __init__(self, epoch: int, start: Position, length: int, ranks: tuple[int, int], kept: int = 2) -> None:
        self.epoch, self.start, self.length, self.ranks = epoch, start, length, ranks
        self.positions = deque([start], kept)
        self.in_flight: deque[tuple[Sequence[int], Position]] = deque()
        self.delivered: tuple[Sequence[int], list[SkippedSample]] = (), []
        self.plan: dict[str, Any] = {}
        self.batches: Any = None
        self.reader: Any = None
        self.changed = self.under_way = self.finished = False
        self.together = 0

    def meet(self) -> None:
        """Let other ranks take over: they compare their plans when those do that join them, which begin anew."""
        self.changed, self.together = False, 0
        self.plan.pop("changed", None)

    def deliver(self, indices: Sequence[int], skipped: list[SkippedSample], position: Position) -> None:
        """Note a batch, and the position after it."""
        self.delivered = indices, skipped
        self.positions.append(position)

    @property
    def position(self) -> Position:
        """Behind the last batch that was delivered."""
        return self.positions[-1]


class Progress(EpochCursor):
    """Where a loader stands: its epoch, the position there, and where the next iteration begins.

    It is the cursor of a `ResumableLoader`; its positions count batches. The latest iteration alone moves the position.
    `set_epoch`, a state or a rewind puts the loader at a place, and then there is no latest iteration until another
    one begins.

    Attributes:
        place: Where it was put last; the next iteration begins there.
        resumed: Whether a state put it there.
    """

    iteration: Iteration | None

    def __init__(self) -> None:
        super().__init__()
        self.place, self.resumed = Position(0, None), False

    @property
    def begun(self) -> bool:
        """Whether an iteration has begun since it was put at a place."""
        return self.iteration is not None

    @property
    def finished(self) -> bool:
        """Whether the latest iteration came to its end."""
        return self.iteration is not None and self.iteration.finished

    @property
    def under_way(self) -> Iteration | None:
        """The latest iteration, while it runs."""
        return self.iteration if self.iteration is not None and self.iteration.under_way else None

    @property
    def chosen(self) -> bool:
        """Whether `set_epoch` chose the epoch, and nothing was iterated since."""
        return self._chosen

    def go_to(self, epoch: int, position: int) -> None:
        """As the cursor does; the place has no state of the batch sampler until `put`."""
        super().go_to(epoch, position)
        self.place, self.resumed = Position(position, None), False

    def put(self, epoch: int, place: Position, *, resumed: bool = False) -> None:
        """Let the next iteration begin at a place."""
        self.go_to(epoch, place.steps)
        self.place, self.resumed = place, resumed

    def load(self, epoch: int, place: Position) -> None:
        """Take the place of a state."""
        self._chosen = False
        self.put(epoch, place, resumed=True)

    def begin(self, iteration: object = None) -> object:
        """Make an iteration the latest one."""
        self.resumed = False
        return super().begin(iteration)

    def adopt(self, iteration: Iteration) -> None:
        """Make an iteration the latest one that has delivered batches already."""
        self.begin(iteration)
        self.move(iteration, iteration.position.steps)

    def behind(self, done: int | None = None) -> Position:
        """The position after the last batch; if no more than `done` batches count, after the last of these."""
        positions = [self.place] if self.iteration is None else self.iteration.positions
        if done is None or done >= positions[-1].steps:
            return positions[-1]
        return next((position for position in reversed(positions) if position.steps <= done), positions[0])

    def again(self) -> Position:
        """Where the latest iteration's epoch begins once more: a look at one batch leaves a loaded position."""
        latest = self.iteration
        if latest is None or latest.finished or latest.position.steps > latest.start.steps + 1:
            return Position(0, None)
        return latest.start

    def flags(self) -> tuple[bool, bool, bool, bool]:
        """What a copy has to know beside the state."""
        return self.begun, self.finished, self.chosen, self.resumed

    def follow(self, flags: tuple[bool, bool, bool, bool], ranks: tuple[int, int]) -> None:
        """Stand where the original of a copy stands, whose state was loaded here."""
        begun, finished, chosen, resumed = flags
        if finished:
            done = Iteration(self.epoch, self.place, self.place.steps, ranks)
            done.finished = True
            self.adopt(done)
        if finished or not begun:
            self._chosen, self.resumed = chosen, resumed


def requested(
    batches: Any,
    iteration: Iteration,
    keys: Keys,
    draws_of: Callable[[Sequence[int]], Sequence[int] | None] | None,
    next_uses: NextUses | None = None,
) -> Iterator[Request]:
    """The batches of an iteration after those that it has delivered, noted as in flight.

    `draws_of` is asked for the draws of each batch, `next_uses` for when its samples are needed next.
    """
    start, stop, state_of = iteration.position, iteration.length, batches.state_dict if has_state(batches) else None
    given, delivered = iter(batches), b""
    step = start.steps if state_of else 0  # a batch sampler without a state is read from the beginning
    for batch in given:
        step += 1
        if not hasattr(batch, "__len__"):
            raise TypeError(SINGLE.format(got=type(batch).__name__, kind=type(batches).__name__))
        if state_of:
            state, draws = state_of(), None if draws_of is None else draws_of(batch)
        else:
            delivered = bytes_digest(delivered, _hashed(batch))
            draws = None if draws_of is None else draws_of(batch)
            if step < start.steps:
                continue
            state = {"delivered": delivered.hex()}
        if step > stop or (step == stop and next(given, None) is not None):
            raise _miscounted(batches, stop, "gives more")
        if step > start.steps:
            iteration.in_flight.append((batch, Position(step, state)))
            upcoming = None if next_uses is None else next_uses.of(iteration.epoch, step - 1, batch)
            yield Request(batch, keys, step - 1, draws, None, upcoming)
        elif step < stop and start.state not in (None, state):
            raise ValueError(OTHER_ORDER.format(kind=type(batches).__name__))
    if step < stop:
        raise _miscounted(batches, stop, f"gave {step}")


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
        return before.tolist() if before.any() else None


def _hashed(batch: Any) -> bytes:
    """A batch as bytes; of keys that are no integers what they show."""
    try:
        return array("q", (len(batch), *batch)).tobytes()
    except TypeError:
        return repr((samples_of(batch), batch)).encode()


def _miscounted(batches: Any, stop: int, what: str) -> RuntimeError:
    message = f"{type(batches).__name__} has a length of {stop}, but {what} batches"
    return RuntimeError(f"{message}: trainers plan by it, make its __len__ count the batches of the present epoch")


SINGLE = (
    "batch_sampler must give lists of indices, got {got} from {kind}, which gives one sample at a time: wrap it, "
    "such as BatchSampler({kind}(...), batch_size=..., drop_last=False) of torch.utils.data"
)
