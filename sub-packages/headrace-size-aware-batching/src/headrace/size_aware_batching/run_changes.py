"""What a run may ask of its batch sampler: any step, past or coming, and changes in the middle of an epoch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from copy import copy, deepcopy
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from headrace.size_aware_batching._validation import checked_int, shown, warn, whole_number
from headrace.size_aware_batching.planning.cursor import EpochCursor
from headrace.size_aware_batching.planning.distribution import distribute_steps, n_steps
from headrace.size_aware_batching.planning.foreign_sampler import SamplerOrder
from headrace.size_aware_batching.planning.last_step import Balance, Tail
from headrace.size_aware_batching.planning.optimizer_steps import Segment, TokenSteps
from headrace.size_aware_batching.planning.options import Options
from headrace.size_aware_batching.planning.order import SliceOrder
from headrace.size_aware_batching.planning.pieces import Pieces
from headrace.size_aware_batching.planning.planner import Planner, make_planner
from headrace.size_aware_batching.planning.prepared import PreparedSizes, without
from headrace.size_aware_batching.planning.random import fold_in
from headrace.size_aware_batching.planning.ranks import Mesh, Ranks
from headrace.size_aware_batching.planning.rest import (
    RestPlanner,
    delivered,
    filtered,
    first_unread,
    place_of_draw,
    place_of_step,
    reordered,
    rest_of_order,
    still_sorted,
)
from headrace.size_aware_batching.planning.run_record import Part, RunRecord

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
    "curriculum",
    "window",
    "balanced_ranks",
    "tokens_per_step",
)
DATA = "data"  # samples that were appended
DRAWS = 1024  # of a mixture: its weights change at multiples of this


class RunChanges(Sampler[list[Any]]):
    """Base of batch samplers that record their run, so that it can change and any step can be looked up.

    A change in the middle of an epoch ends the current list of batches and plans the remaining samples anew. Positions
    continue over all lists of an epoch. The subclass, `DistributedSizeAwareBatchSampler`, plans whole epochs and holds
    the state.
    """

    sizes: NDArray[Any]
    work: NDArray[np.float64] | None
    options: Options
    tail: Tail
    seed: int
    epoch: Any
    num_replicas: Any
    tokens_per_step: Any
    _pieces: Pieces | None
    _arguments: dict[str, Any]  # of the constructor
    _own_options: dict[str, Any]  # those of CHANGEABLE, in JSON
    _of_all: bool
    _ranks: Ranks
    _order: SamplerOrder | None
    _steps: TokenSteps | None
    _planner: Any
    _ranks_of_run: int | None
    _segments: list[Segment]
    _began: Any

    def _prepare_changes(self, prepared: PreparedSizes) -> None:
        self._prepared = self._whole = prepared  # without and with what is excluded
        self._excluded: list[int] = []  # samples of the dataset
        self._cursor = EpochCursor()  # its positions count samples of the epoch's lists
        self._record = RunRecord()
        self._plans: tuple[int, list[PlannedPart]] | None = None  # of an epoch, each from a change on
        self._interrupted: object = None  # a running iteration whose batches were planned anew
        self._finished: object = None  # one that came to its end
        self._past = False  # whether it stands for another one at a time of its run

    @staticmethod
    @abstractmethod
    def _make(sizes: NDArray[Any], max_total_size: Any, **arguments: Any) -> RunChanges:
        """Construct such a sampler."""

    @abstractmethod
    def _key(self, epoch: int) -> int: ...

    @abstractmethod
    def _plan_epoch(self, epoch: int | None = None, at: int | None = None) -> Planner | RestPlanner: ...

    @abstractmethod
    def _epoch_fingerprint(self, epoch: int) -> str: ...

    @abstractmethod
    def _fingerprint_parts(self, order: str | None) -> dict[str, Any]: ...

    @abstractmethod
    def _current_segments(self, position: int | None = None) -> list[Segment]: ...

    @abstractmethod
    def _keys(self, planned: NDArray[Any]) -> list[Any]: ...

    @abstractmethod
    def _balance(self) -> Balance | None: ...

    @property
    def excluded_indices(self) -> NDArray[np.int64]:
        """The samples that `exclude` left out, ascending."""
        return np.array(sorted(self._excluded), np.int64)

    def exclude(self, indices: Iterable[int]) -> None:
        """Exclude samples from now on, in every epoch; call it on every rank at the same step.

        Batches that were already yielded keep them. With workers the sampler is ahead of the training loop: call
        ``exclude`` of the loader instead. States record the excluded samples.

        Args:
            indices: Samples of the dataset.

        Raises:
            TypeError: If an index is not an int.
            ValueError: If an index is out of range, or in the middle of an epoch with ``curriculum`` or
                ``tokens_per_step``.

        >>> from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
        >>> sampler = DistributedSizeAwareBatchSampler([4, 1, 3, 2], 5, strategy="sequential", shuffle=False)
        >>> sampler.exclude([1, 2])
        >>> list(sampler), sampler.state_dict()["run"][0]["exclude"]
        ([[0], [3]], [1, 2])
        """
        given = [checked_int("indices", index, end=len(self.sizes), noun=", the samples") for index in indices]
        known = set(self._excluded)
        new = [index for index in dict.fromkeys(given) if index not in known]
        if not new:
            return
        record, excluded = deepcopy(self._record), self._excluded
        try:
            self._set_record(self._record, excluded + new)
            self._change(self.epoch, self._cursor.position)
        except ValueError:
            self._set_record(record, excluded)
            raise
        self._interrupt()

    def skip(self, steps: int) -> NDArray[np.int64]:
        """Skip the next steps of this epoch, once; call it on every rank at the same step.

        Args:
            steps: Number of steps; at most the rest of the epoch is skipped.

        Returns:
            The skipped samples of all ranks.
        """
        count, key, start = whole_number("steps", steps), self._key(self.epoch), self._cursor.position
        self._refuse_within_steps()
        if self._record.begin(self.epoch, start, self._settings(self.num_replicas)):
            self._plans = None
        planner = self._plan_epoch()
        dealt = self._dealt(planner, self, key, start, self.num_replicas)
        places = [place for _, place in islice(dealt, count)]
        place = places[-1] if places else start
        skipped = delivered(planner, key, place)[start - getattr(planner, "origin", 0) :]
        skipped = skipped if self._pieces is None else self._pieces.samples[skipped]
        if places and self.tail == "drop" and next(dealt, None) is None:
            place = planner.n_samples  # what is dropped behind the last step has had its turn
        self._record.note(self.epoch, start, {}, skip=place - start)
        self._plans = None
        self._interrupt(place)
        return skipped

    def reweight(self, weights: Any, draw: int | None = None) -> tuple[int, int]:
        """Change the weights of the mixture that is the ``sampler``; call it on every rank at the same step.

        Passes over its sources continue, and shares are exact before and after. States hold the change.

        Args:
            weights: As the mixture was given them, for the same sources.
            draw: Where they begin, in draws of the mixture since epoch 0. By default the next multiple of 1,024 that is
                in no window that has begun.

        Returns:
            That draw, and the step of the run from which on it is felt.

        Raises:
            TypeError: If the ``sampler`` has no weights that can change, or a weight has the wrong type.
            ValueError: If the weights are not allowed, the run has not begun, or the mixture's schedule has a later
                change; or with ``tokens_per_step``.
        """
        order = self._order
        if order is None or not order.mixes:
            raise TypeError(
                "sampler must mix sources by weight for that, got "
                f"{type(None if order is None else order.sampler).__name__}: give a WeightedDistributedSampler"
            )
        if self._steps is not None:
            raise ValueError(
                f"tokens_per_step must be None for that, got {shown(self.tokens_per_step)}: give the weights to the "
                "mixture's schedule=, and resume from a state of the beginning of an epoch"
            )
        waits = False
        if draw is None:
            begin, position = self.epoch * order.epoch_length, self._cursor.position
            planner = self._plan_epoch()
            unread = order.epoch_length if position >= planner.n_samples else first_unread(planner, position)
            draw = -(-(begin + unread) // DRAWS) * DRAWS
            waits = position < planner.n_samples and unread >= order.epoch_length
        record, before = deepcopy(self._record), self._reweights
        try:
            self._set_reweights(order.sampler.reweighted(weights, draw))
            self._change(self.epoch, self._cursor.position)
            found = draw, self._step_of_draw(draw, order.epoch_length)
        except ValueError:
            self._set_reweights(before)
            self._set_record(record, self._excluded)
            raise
        self._interrupt()
        if waits:
            warn(
                f"the weights change in epoch {draw // order.epoch_length}, at step {found[1]} of the run: the windows "
                f"of batches that have begun reach to the end of epoch {self.epoch}. With a smaller window=, or "
                "strategy='sequential', weights change earlier"
            )
        return found

    def _step_of_draw(self, draw: int, epoch_length: int) -> int:
        """Return the first step that may hold a draw or a later one: that of the window that has it."""
        epoch, position, number, world = self.epoch, self._cursor.position, self._record.step, self.num_replicas
        while True:
            with nullcontext() if self._order is None else self._order.at_epoch(epoch, self.epoch):
                planner, key, begin = self._plan_epoch(epoch), self._key(epoch), epoch * epoch_length
                place = place_of_draw(planner, draw - begin)
                coming = self._dealt(planner, self, key, position, world) if place < planner.n_samples else ()
                for step, (_, end) in enumerate(coming):
                    if end > place:
                        return number + step
                left = n_steps(planner.count(key, position), world, self.tail)
                if begin >= draw and not left:  # epochs are empty
                    return number
            epoch, position, number = epoch + 1, 0, number + left

    @property
    def _reweights(self) -> list[Any]:
        """Changes of the mixture's weights that runs have made, as the mixture has them."""
        return [] if self._order is None else self._order.reweights

    def _set_reweights(self, changes: list[Any]) -> None:
        if changes == self._reweights:
            return
        if self._order is None:
            raise ValueError(
                "state is of a run whose mixture got other weights, and sampler is None: give the "
                "WeightedDistributedSampler of that run"
            )
        self._order.set_reweights(changes)
        self._planner = self._plans = None

    def reshard(self, num_replicas: int | None = None, rank: int | None = None, mesh: Mesh | None = None) -> None:
        """Continue with another number of ranks in the running process: the rest of the epoch is distributed to them.

        Call it on every rank at the same step, after a launcher has made the new process group.

        Args:
            num_replicas: Number of data-parallel ranks; as in the constructor.
            rank: Rank of this process.
            mesh: In place of both.
        """
        self._ranks = Ranks(num_replicas, rank, mesh)
        self._interrupt()

    def step(self, number: int, *, num_replicas: int | None = None, rank: int | None = None) -> Any:
        """Return the samples of any step of the run, past or future, rank by rank.

        Steps are numbered from the start of the run over all epochs; a step is one batch on each rank. ``"step"`` of a
        state is the next step. Past steps are returned as they were delivered, whatever changed since; future steps as
        they will be if nothing changes.

        Args:
            number: Number of the step.
            num_replicas: Number of ranks for a future step; by default the current one. A past step has the number that
                it ran with.
            rank: Rank whose samples to return; None: all ranks.

        Returns:
            A list of samples for each rank, or the list of ``rank``.

        Raises:
            IndexError: If the step does not exist because all epochs are empty.
            ValueError: If the step ran with too few ranks for ``rank``, or with ``tokens_per_step``.

        >>> from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
        >>> sampler = DistributedSizeAwareBatchSampler([4, 1, 3, 2], 5, strategy="sequential", shuffle=False)
        >>> sampler.step(1), sampler.step(2), list(sampler)[1]
        ([[2, 3]], [[0, 1]], [2, 3])
        """
        number = checked_int("number", number)
        self._refuse_within_steps()
        world = self.num_replicas if num_replicas is None else checked_int("num_replicas", num_replicas, 1)
        record = self._record
        if record.starts and record.starts[0] <= number < record.step:
            epoch = record.epoch_of(number)
            part = [part for part in record.parts(epoch) if part.step <= number][-1]
            found = self._step_of(epoch, part, number)
        else:
            found = self._coming_step(number, world)
        if rank is None:
            return found
        return found[checked_int("rank", rank, end=len(found), noun=", the ranks of that step")]

    def _planned_parts(self, epoch: int) -> list[PlannedPart]:
        """Return the plans of an epoch, each from a change on; none where one plan holds for all of it."""
        if epoch >= len(self._record.starts):
            return []
        if self._plans is None or self._plans[0] != epoch:
            first, *later = self._record.parts(epoch)
            planned: list[PlannedPart] = []
            retired = np.zeros(len(self._whole.sizes), bool)
            later = [part for part in later if part.change is not None and self._record.replans(part.change)]
            for part in [first, *later] if later else ():
                planned.append(self._planned_part(epoch, part, planned, retired))
            self._plans = epoch, planned
        return self._plans[1]

    def _planned_part(
        self, epoch: int, part: Part, before: list[PlannedPart], retired: NDArray[np.bool_]
    ) -> PlannedPart:
        """Plan what the plan before leaves of an epoch; ``retired`` are the samples that were delivered before."""
        sampler = self._with(part.settings, epoch)
        if not before:
            return PlannedPart(0, sampler, sampler._plan_epoch(epoch))
        sampler._refuse_within_epoch()
        position = part.change["position"] if part.change else 0
        earlier, prepared, order, presorted = before[-1], sampler._prepared, None, None
        if position > earlier.planner.n_samples:
            raise ValueError(
                f"position must be an int from 0 to {earlier.planner.n_samples}, the samples of the epoch, got "
                f"{position}"
            )
        _refuse_other_pieces(earlier.sampler._pieces, sampler._pieces)
        if sampler._order is None:
            given = delivered(earlier.planner, earlier.sampler._key(epoch), position)
            retired[given] = True
            by_size = self._still_sorted(earlier, sampler, given, retired)
            if by_size is None:
                kept = without(prepared.kept, len(prepared.sizes), np.flatnonzero(retired[: len(prepared.sizes)]))
                prepared = replace(prepared, kept=kept)
            else:  # in another order, of which nothing but their number is taken
                prepared, presorted = replace(prepared, kept=by_size[0]), (lambda: by_size)
        else:
            order = rest_of_order(earlier.planner, earlier.sampler._key(epoch), position)
            order = self._reweighted(order, epoch, earlier.sampler, sampler)
            if prepared.kept is not None:
                order = filtered(order, prepared.kept, len(prepared.sizes))
        key = int(fold_in(self.seed, epoch, position)[0])
        return PlannedPart(
            position,
            sampler,
            RestPlanner(position, make_planner(prepared, sampler.options, order, presorted=presorted), key),
        )

    @staticmethod
    def _still_sorted(
        earlier: PlannedPart, now: RunChanges, given: NDArray[Any], retired: NDArray[np.bool_]
    ) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Return the remaining samples and their sizes, largest first; None unless the earlier plan has sorted them."""
        sized = now._prepared
        same = sized.sizes is earlier.sampler._prepared.sizes and sized.sizes.ndim == 1
        by_size = now.options.shuffle and now.options.strategy != "sequential"
        if not same or not by_size or now._whole.kept is not None or now._pieces is not None:
            return None
        excluded = np.array(now._excluded, np.int64)
        left = len(sized.sizes) - np.count_nonzero(retired) - np.count_nonzero(~retired[np.unique(excluded)])
        return still_sorted(earlier.planner, sized, np.concatenate([given, excluded]), int(left))

    @staticmethod
    def _reweighted(order: SliceOrder, epoch: int, before: RunChanges, now: RunChanges) -> SliceOrder:
        """Return the rest of a mixture's order, from the draw on with other weights where they have changed."""
        mixture, known = now._order, before._reweights
        changed = [draw for draw, weights in now._reweights if [draw, weights] not in known]
        if mixture is None or not changed or changed[0] >= (epoch + 1) * mixture.epoch_length:
            return order
        draw = changed[0] - epoch * mixture.epoch_length
        if draw < order.read:
            raise ValueError("state['run'] must have weights from a later draw on: it was changed")
        return reordered(order, mixture.order(), draw)

    def _with(self, settings: Mapping[str, Any], epoch: int) -> RunChanges:
        """Return a sampler of its own with the options, the samples and what was excluded at a time of the run."""
        options, n_samples = settings["options"], settings.get("n", len(self.sizes))
        changed = {
            name: value for name, value in options.items() if name in CHANGEABLE and self._own_options[name] != value
        }
        order = self._order
        if order is not None:
            order = order.sampler_with(settings.get("reweight", order.reweights), epoch)
        if not changed and n_samples == len(self.sizes):
            made = copy(self)
            made._order = (
                None if order is None else SamplerOrder(order, self._whole.kept, len(self.sizes), self._pieces)
            )
            made._cursor, made._record, made._excluded, made._prepared = EpochCursor(), RunRecord(), [], made._whole
        else:
            work = None if self.work is None else self.work[:n_samples]
            arguments = {**self._arguments, **changed, "work": work}
            made = self._make(self.sizes[:n_samples], sampler=order, num_replicas=1, rank=0, **arguments)
        made._past, made._ranks_of_run = True, self._ranks_of_run
        made._leave_out(list(settings.get("exclude", ())))
        return made

    def _leave_out(self, excluded: list[int]) -> None:
        """Plan without these samples from the next planning on."""
        self._planner = self._plans = None
        if excluded == self._excluded:
            return
        self._excluded, samples, pieces = excluded, np.array(excluded, np.int64), self._pieces
        kept = without(self._whole.kept, len(self.sizes), samples)
        if self._order is not None:
            self._order.kept = kept
            self._order.finished()
        if pieces is not None:
            kept = without(None, len(pieces.samples), pieces.of(samples))
        self._prepared = replace(self._whole, kept=kept)
        if self._steps is not None:
            self._steps = replace(self._steps, sized=self._prepared)

    def _set_record(self, record: RunRecord, excluded: list[int]) -> None:
        self._record = record
        self._leave_out(excluded)

    def _settings(self, replicas: int | None = None) -> dict[str, Any]:
        """Return what the record holds of the present."""
        ranks = {} if replicas is None else {"world": replicas, "all": self._of_all}
        held = {"options": self._own_options, "exclude": self._excluded, "reweight": self._reweights}
        return {**ranks, "n": len(self.sizes), **held}

    def _change(self, epoch: int, position: int) -> None:
        """Note that other options or samples hold from a place on, and refuse that where the epoch cannot."""
        self._record.note(epoch, position, self._settings())
        self._plans = None
        if position and self._record.replans(self._record.changes[-1]):
            self._refuse_within_epoch()

    def _interrupt(self, position: int | None = None) -> None:
        """Let the iteration that is under way, or else the next one, go on with other batches from here on."""
        latest, segments = self._cursor.iteration, self._current_segments()
        if latest is not None and latest is self._finished and position is None:
            return
        self._interrupted = latest or self._interrupted  # which a change at the same step has interrupted already
        self._cursor.go_to(self.epoch, self._cursor.position if position is None else position)
        self._began, self._segments = None, segments

    def _refuse_within_epoch(self) -> None:
        """Refuse a change in the middle of an epoch whose plan depends on what came before."""
        for name in ("tokens_per_step", "curriculum"):
            if (value := self._own_options[name]) is not None:
                raise ValueError(
                    f"{name}={shown(value)} allows changes at the beginning of an epoch only: make them behind "
                    "set_epoch of the next one and before its first batch, or resume from a state that was saved there"
                )

    def _refuse_within_steps(self) -> None:
        if self._steps is not None:
            raise ValueError(f"tokens_per_step must be None for that, got {shown(self.tokens_per_step)}")

    def _step_of(self, epoch: int, part: Part, number: int) -> list[list[Any]]:
        """Return a past step of a part of an epoch, rank by rank."""
        with nullcontext() if self._order is None else self._order.at_epoch(epoch, self.epoch):
            planned = [one for one in self._planned_parts(epoch) if one.position <= part.position]
            if planned:
                _, sampler, planner = planned[-1]
            else:
                sampler = self._with(part.settings, epoch)
                planner = sampler._plan_epoch(epoch)
            sampler._of_all = part.settings.get("all", False)
            return self._dealt_step(planner, sampler, epoch, part.position, number - part.step, part.settings["world"])

    def _coming_step(self, number: int, world: int) -> list[list[Any]]:
        """Return a step of the rest of this epoch, or of one that comes."""
        epoch, position, number, empty = self.epoch, self._cursor.position, number - self._record.step, False
        while True:
            with nullcontext() if self._order is None else self._order.at_epoch(epoch, self.epoch):
                planner = self._plan_epoch(epoch)
                left = n_steps(planner.count(self._key(epoch), position), world, self.tail)
                if 0 <= number < left:
                    return self._dealt_step(planner, self, epoch, position, number, world)
            if number < 0 or (empty and not left):
                raise IndexError("number must be a step of the run, got one that it does not have")
            epoch, position, number, empty = epoch + 1, 0, number - left, not left

    def _dealt_step(
        self,
        planner: Planner | RestPlanner,
        sampler: RunChanges,
        epoch: int,
        position: int,
        steps: int,
        world: int,
    ) -> list[list[Any]]:
        """Return the step that comes so many steps behind a position, rank by rank."""
        key = sampler._key(epoch)
        passed, place = place_of_step(planner, key, position, steps, world, sampler.tail)
        batches, _ = next(islice(self._dealt(planner, sampler, key, place, world), steps - passed, None))
        return [sampler._keys(batch) for batch in batches]

    @staticmethod
    def _dealt(
        planner: Planner | RestPlanner, sampler: RunChanges, key: int, place: int, world: int
    ) -> Iterator[tuple[list[NDArray[Any]], int]]:
        """Yield the steps from a place of an epoch on, rank by rank, and the place behind each."""
        for steps in distribute_steps(planner.batches(key, place), world, sampler.tail, sampler._balance()):
            offsets, own = steps.offsets.tolist(), len(steps.offsets) - 1 - steps.repeated
            for first in range(0, len(offsets) - 1, world):
                cuts = offsets[first : first + world + 1]
                yield (
                    [steps.indices[begin:end] for begin, end in pairwise(cuts)],
                    place + offsets[min(first + world, own)],
                )
            place += offsets[own]


def _refuse_other_pieces(before: Pieces | None, now: Pieces | None) -> None:
    """Refuse other pieces than an epoch began with; those of appended samples come behind them."""
    if before is now:
        return
    if before is None or now is None or not np.array_equal(before.starts, now.starts[: len(before.starts)]):
        raise ValueError(
            "oversize='split' allows what changes the pieces (max_total_size, max_length, cost) at the beginning of an "
            "epoch only: give max_length, the longest piece, so that another budget leaves the pieces as they are"
        )


class PlannedPart(NamedTuple):
    """The plan of an epoch from a change on."""

    position: int
    sampler: RunChanges
    planner: Planner | RestPlanner
