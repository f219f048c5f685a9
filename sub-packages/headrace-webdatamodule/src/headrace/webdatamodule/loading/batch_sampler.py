"""Batches of equal size for every rank."""

from __future__ import annotations

import hashlib
import operator
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy, deepcopy
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from headrace.webdatamodule._arguments import checked_int
from headrace.webdatamodule._display import never_raises
from headrace.webdatamodule._keywords import explains_keywords
from headrace.webdatamodule.loading.as_sampler import refuse_as_sampler
from headrace.webdatamodule.loading.cursor import EpochCursor
from headrace.webdatamodule.loading.fingerprint import own_fingerprint
from headrace.webdatamodule.loading.next_use import PermutationUses, ranks_of_node
from headrace.webdatamodule.loading.options import seed_int
from headrace.webdatamodule.loading.permutation import Shuffle
from headrace.webdatamodule.loading.ranks import Mesh, Ranks, refuse_sharding_again
from headrace.webdatamodule.loading.run_record import RECORD, RunRecord
from headrace.webdatamodule.loading.state_dict import check_state

VERSION = 3
CHANGEABLE = ("batch_size", "drop_last", "shuffle")  # arguments that a run may change
DATA = "data"  # samples that were appended
_AHEAD = 2**14  # places of the order that are worked out together
Samples = npt.NDArray[np.int64]
_DRAWS = 1024  # of a mixture: its weights change at multiples of this

# What the fingerprint of a mixture covers, as it says itself, and the usual cause of another one.
_OF_A_MIXTURE = "its data, weights, semantics, sizes, epoch_length, drop_last and the earlier part of its schedule"
_REWEIGHTED = (
    "the state holds a reweight of its run at draw {draw:,} and applies it by itself: construct the mixture with "
    "the weights of the run's beginning"
)


class DistributedBatchSampler(Sampler[list[int]]):
    """Batches of `batch_size` samples; every rank gets the same number of batches, and each sample comes once.

    Step s distributes the next `num_replicas * batch_size` positions of one order to the ranks. The last batches are
    smaller if the samples do not divide evenly, unless `drop_last`. With fewer samples than ranks in the last step,
    some repeat, with a warning that names them. After a `break`, a new iteration restarts the epoch.

    States hold a short record of the run. With it `step` returns the samples of any past or future step, and the run
    can change in the middle of an epoch: `load_state_dict(state, accept=...)`, `exclude`, `skip`, `reshard`,
    `reweight`. The rest of the epoch then consists of all samples not yet delivered. All ranks must call these methods
    at the same step.

    Args:
        n_samples: Number of samples.
        batch_size: Number of samples in a batch, on each rank.
        sampler: The order, the same on every rank. If it has `take(start, stop)`, slices are read from it, and
            `epoch_length` is the number of its positions; otherwise all of it is read once per epoch. None: the
            built-in order.
        shuffle: Whether the built-in order is a new permutation in each epoch. False: the order of the data.
        drop_last: Whether to drop samples that do not fill a batch on every rank.
        num_replicas: Number of data-parallel ranks; None: read from the process group at the start of an epoch.
        rank: This rank, with the same default.
        mesh: In place of both, a 1-D `DeviceMesh` of the data-parallel ranks.
        seed: Seed of the order, 0 to 2**64 - 1.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is not allowed.

    Attributes:
        draws: For each sample of the latest batch, its position in the epoch's order by `sampler`; None without a
            `sampler`, because then no sample comes twice. A loader uses it to seed the random numbers of repeated
            samples.

    >>> list(DistributedBatchSampler(5, 2, shuffle=False))
    [[0, 1], [2, 3], [4]]
    >>> list(DistributedBatchSampler(5, 2, shuffle=False, drop_last=True))
    [[0, 1], [2, 3]]
    """

    @explains_keywords
    def __init__(
        self,
        n_samples: int,
        batch_size: int,
        *,
        sampler: Iterable[int] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        mesh: Mesh | None = None,
        seed: int = 0,
    ) -> None:
        self.n_samples = checked_int("n_samples", n_samples, 0, "give len(dataset)")
        self.batch_size = checked_int("batch_size", batch_size, 1)
        self._ranks = Ranks(num_replicas, rank, mesh)
        if sampler is not None and (isinstance(sampler, Iterator) or not isinstance(sampler, Iterable)):
            raise TypeError(f"sampler must be an iterable that can be read in every epoch, got {sampler!r}")
        self.sampler, self.shuffle, self.drop_last, self.seed = sampler, shuffle, drop_last, seed_int(seed)
        self._cursor = EpochCursor()  # its positions count samples of all ranks
        self._stamp = ""  # the fingerprint of the epoch that is iterated, which every batch's state holds
        self._listed: tuple[int, npt.NDArray[np.int64]] | None = None  # an epoch and its order
        self.draws: range | None = None
        self._excluded: list[int] = []
        self._record = RunRecord()
        self._record.note(0, 0, self._settings())
        self._stretches: tuple[int, list[_Stretch]] | None = None  # of an epoch
        self._interrupted: object = None  # the iteration that a change interrupted: its next batches are planned anew
        self._finished: object = None  # one that came to its end

    @never_raises
    def __repr__(self) -> str:
        ranks = "ranks not known yet"
        with suppress(ValueError):  # of an environment that contradicts what was given
            ranks = "rank {1} of {0}".format(*self._ranks.current())
        order = "shuffled" if self.shuffle else "in order"
        figures = [
            f"{self.n_samples:,} samples",
            f"batch_size {self.batch_size:,}",
            order if self.sampler is None else f"ordered by {type(self.sampler).__name__}",
            *(["drop_last"] if self.drop_last else []),
            ranks,
            f"epoch {self.epoch} at {self._cursor.position:,}",
            f"seed {self.seed}",
        ]
        return f"{type(self).__name__}({', '.join(figures)})"

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration, or of the next one."""
        return self._cursor.epoch

    @property
    def num_replicas(self) -> int:
        """Current number of data-parallel ranks."""
        return self._ranks.world_size()

    @property
    def rank(self) -> int:
        """Current rank of this process."""
        return self._ranks.current()[1]

    def __len__(self) -> int:
        """Number of batches in the whole epoch on each rank."""
        stretches, world = self._of_epoch(self.epoch), self._ranks.world_size()
        if stretches[-1].position > 0:
            return self._record.step - (self._record.start_of(self.epoch) or 0) + self.remaining
        return stretches[0].steps(0, world)

    @property
    def remaining(self) -> int:
        """Number of batches left in the epoch, with the current number of ranks."""
        return self._of_epoch(self.epoch)[-1].steps(self._cursor.position, self._ranks.world_size())

    def __iter__(self) -> Iterator[list[int]]:
        refuse_as_sampler(self)
        while (yield from self._deliver()):  # until no change interrupts it
            pass

    def _deliver(self) -> Generator[list[int], None, bool]:
        """This rank's batches of the epoch; returns whether a change interrupted them."""
        world, rank = self._ranks.current()
        if world > 1:
            refuse_sharding_again("num_replicas=1 and rank=0")
        self._set_inner_epoch(self.epoch)  # trainers tell a sampler that they find an epoch of theirs
        iteration, start = self._cursor.begin(), self._cursor.position
        self._begin_record(start, world)
        begun, self._stamp = self._record.step, self._epoch_fingerprint(self.epoch)
        stretch = self._of_epoch(self.epoch)[-1]
        steps = stretch.steps(start, world)
        if stretch.end and not steps and not start:
            raise ValueError(
                f"drop_last=True leaves no batch: {stretch.end} samples do not fill {world} batches of "
                f"{stretch.batch_size}; use a smaller batch_size, or drop_last=False"
            )
        together = max(1, _AHEAD // (stretch.batch_size * world))
        for first in range(0, steps, together):
            spans = [stretch.span(start, step, world) for step in range(first, min(first + together, steps))]
            begin = spans[0][0]
            ids = stretch.order(begin, spans[-1][1]).tolist()
            for step, (low, high) in enumerate(spans, first + 1):
                # What is dropped behind the last step has had its turn.
                if self._cursor.move(iteration, high if step < steps else stretch.end):
                    self._record.step = begun + step
                if high - low < world:
                    _warn_of_repetition(ids[low - begin : high - begin], world)
                own = _share(low, high, rank, world)
                self.draws = None if self.sampler is None else range(*own)
                yield ids[own[0] - begin : own[1] - begin]
                if self._interrupted is iteration:  # and no other one has begun since
                    return self._cursor.iteration is None
        if self._cursor.iteration is iteration:
            self._finished = iteration
            if self._epochs_differ:
                self._cursor.finish(iteration, start, self)
        return False

    @property
    def _epochs_differ(self) -> bool:
        """Whether another epoch would have other batches, and none comes unasked for."""
        if self.sampler is None:
            return self.shuffle
        return hasattr(self.sampler, "set_epoch") and getattr(self.sampler, "shuffle", True) is not False

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over next; a loaded position applies only to its own epoch."""
        if self._cursor.choose(checked_int("epoch", epoch, 0)):
            self._set_inner_epoch(epoch)
            if (
                self._record.starts and epoch <= self._record.starts[-1][0]
            ):  # back again: the record forgets what came behind
                self._record.begin(epoch, 0, self._settings())
                self._stretches = None

    def _set_inner_epoch(self, epoch: int) -> None:
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was taken, in samples of all ranks; correct at any time.

        The state also holds the record of the run: the number of the next step, the steps at which epochs began, and
        the changes.
        """
        return {
            "version": VERSION,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self._cursor.position,
            "fingerprint": self._stamp if self._cursor.iteration else self._epoch_fingerprint(self.epoch),
            **self._record.state(self.epoch, self._cursor.position, self._settings()),
        }

    def load_state_dict(self, state: Mapping[str, Any], accept: Collection[str] = ()) -> None:
        """Resume from a state, on any number of ranks.

        A state is ignored if a later `set_epoch` chose a newer epoch.

        Args:
            state: The result of `state_dict`.
            accept: Differences from the run that saved it to accept: "batch_size", "drop_last", "shuffle", and "data"
                for appended samples. The rest of the epoch, new samples included, is delivered with these arguments;
                samples that `drop_last` left out of an ended epoch stay out. With a `sampler`, data can be appended
                only at the beginning of an epoch.

        Raises:
            TypeError: `state` has the wrong type.
            ValueError: `state` was saved with other data, another order, batch size or seed, or is not a state of this
                class.
        """
        accept = _checked_names(accept)
        own = {"version": VERSION, "seed": self.seed}
        optional = ("fingerprint", *RECORD)
        check_state(state, type(self).__name__, own, ("epoch", "position"), optional)
        record, before, loaded = RunRecord.of(state), self._reweights, False
        try:  # a fingerprint is that of the weights there were
            self._set_reweights(record.settings(state["epoch"], state["position"])["reweight"])
            loaded = self._load(state, record, accept)
        finally:
            if not loaded:
                self._set_reweights(before)

    def _load(self, state: Mapping[str, Any], record: RunRecord, accept: set[str]) -> bool:
        """Resume where a state was taken; return whether, as a later `set_epoch` may have chosen another epoch."""
        epoch, position = state["epoch"], state["position"]
        held = self._in_full(record.settings(epoch, position))
        accepted = self._refuse_others(state, held, accept)
        if self._cursor.overrules(epoch):
            return False
        before, excluded = self._record, self._excluded
        self._set_inner_epoch(epoch)
        try:
            self._set_record(record, held["exclude"])
            if accepted:
                record.note(epoch, position, self._settings())
            stretches = self._stretched(epoch)
            if position > (end := stretches[-1].end):
                raise ValueError(f"state['position'] must be 0 to {end}, the places of an epoch, got {position}")
        except (TypeError, ValueError):
            self._set_record(before, excluded)
            self._set_inner_epoch(self.epoch)
            raise
        self._cursor.resume(epoch, position)
        self._stretches = epoch, stretches
        return True

    def _refuse_others(self, state: Mapping[str, Any], held: dict[str, Any], accept: set[str]) -> bool:
        """Refuse a state of other data or options than may differ; return whether any of these do."""
        epoch: int = state["epoch"]
        changed: dict[str, Any] = {}
        own = {"version": VERSION, "seed": self.seed, "fingerprint": self._epoch_fingerprint(epoch)}
        if state["fingerprint"] == own["fingerprint"]:
            return False
        then, grown = held["options"], held["n"] < self.n_samples
        if state["run"]:
            changed = {name: value for name, value in then.items() if value != self._options[name]}
            changed |= {DATA: held["n"]} if grown else {}
        accepted = {name: value for name, value in changed.items() if name in accept}
        options = {**self._options, **{name: value for name, value in accepted.items() if name != DATA}}
        n_samples = accepted.get(DATA, self.n_samples)
        if accepted and self._epoch_fingerprint(epoch, n_samples, options) == state["fingerprint"]:
            if DATA in accepted and self.sampler is not None and state["position"]:
                raise ValueError(
                    "accept={'data'} needs a state of the beginning of an epoch where a sampler gives the order, got "
                    f"position={state['position']}: resume with the data of the state, and let them grow at its end"
                )
            return True
        try:
            check_state(state, type(self).__name__, own, ("epoch", "position"), RECORD)
        except ValueError as error:
            own_values = {**self._options, DATA: f"{self.n_samples} samples"}
            differs = ", ".join(f"{name} ({value}, here {own_values[name]})" for name, value in changed.items())
            cure = f"; it differs in {differs}: go on with accept={sorted({*changed, *accept})}" if changed else ""
            if not changed and _mixes(self.sampler):
                cure = f"; of the mixture it covers {_OF_A_MIXTURE}"
                if held["reweight"]:
                    cure += f"; {_REWEIGHTED.format(draw=held['reweight'][-1][0])}"
            raise ValueError(f"{error}{cure}") from None
        return True

    @property
    def excluded_indices(self) -> npt.NDArray[np.int64]:
        """The samples that `exclude` left out, ascending."""
        return np.array(sorted(self._excluded), np.int64)

    def exclude(self, indices: Iterable[int]) -> None:
        """Exclude samples from now on, in every epoch; call it on every rank at the same step.

        Batches that were already taken still contain them. Workers prefetch batches: with a `ResumableLoader` call its
        own `exclude`. States record the excluded samples.

        Args:
            indices: Samples, 0 to `n_samples - 1`.

        Raises:
            TypeError: An index is not an int.
            ValueError: An index is out of range.

        >>> batches = DistributedBatchSampler(5, 2, shuffle=False)
        >>> batches.exclude([1])
        >>> list(batches), batches.excluded_indices.tolist()
        ([[0, 2], [3, 4]], [1])
        """
        known, given = set(self._excluded), [checked_int("indices", index, 0) for index in indices]
        if given and max(given) >= self.n_samples:
            raise ValueError(f"indices must be 0 to {self.n_samples - 1}, the samples, got {max(given)}")
        if new := [index for index in dict.fromkeys(given) if index not in known]:
            self._set_record(self._record, self._excluded + new)
            self._record.note(self.epoch, self._cursor.position, self._settings())
            self._interrupt(self._cursor.position, unless_finished=True)

    def skip(self, steps: int) -> npt.NDArray[np.int64]:
        """Skip the next steps of this epoch, once; call it on every rank at the same step.

        Args:
            steps: Number of steps; at most the rest of the epoch is skipped.

        Returns:
            The skipped samples of all ranks.
        """
        count, world, start = checked_int("steps", steps, 1), self._ranks.world_size(), self._cursor.position
        self._begin_record(start, world)
        stretch = self._of_epoch(self.epoch)[-1]
        count = min(count, steps := stretch.steps(start, world))
        stop = stretch.span(start, count - 1, world)[1] if count else start
        place = stretch.end if count == steps and count else stop  # what is dropped at the end has had its turn
        self._record.note(self.epoch, start, {}, skip=place - start)
        self._stretches = None
        self._interrupt(place)
        return stretch.order(start, stop)

    def reweight(self, weights: Any, draw: int | None = None) -> tuple[int, int]:
        """Change the weights of the mixture given as `sampler`; call it on every rank at the same step.

        Passes over its sources continue, and shares are exact before and after. States hold the change.

        Args:
            weights: As the mixture was given them, for the same sources.
            draw: First draw with the new weights, counted since epoch 0. By default the next multiple of 1,024 that was
                not delivered.

        Returns:
            That draw, and the step of the run that has it.

        Raises:
            TypeError: The `sampler` has no weights that can change, or a weight has the wrong type.
            ValueError: The weights are not allowed, the run has not begun, or the mixture's schedule has a later
                change.
        """
        if not (_mixes(self.sampler) and self._has_slices):
            raise TypeError(
                f"sampler must mix sources by weight for that, got {type(self.sampler).__name__}: give a "
                "WeightedDistributedSampler"
            )
        position, length = self._cursor.position, self._epoch_length
        if draw is None:
            first = self._of_epoch(self.epoch)[-1].first_draw(position)
            draw = -(-(self.epoch * length + (length if first is None else first)) // _DRAWS) * _DRAWS
        self._set_reweights(self.sampler.reweighted(weights, draw))  # type: ignore[union-attr]  # a mixture
        self._record.note(self.epoch, position, self._settings())
        self._interrupt(position, unless_finished=True)
        return draw, self._step_of_draw(draw)

    def _step_of_draw(self, draw: int) -> int:
        """The step that delivers a draw, or the first one behind it."""
        world, epoch, position, number = self._ranks.world_size(), self.epoch, self._cursor.position, self._record.step
        while True:
            stretch, begin = self._of_epoch(epoch)[-1], epoch * self._epoch_length
            steps = stretch.steps(position, world)
            place = stretch.place_of(draw - begin)
            for step in range(min(max(0, place - position) // (stretch.batch_size * world), max(0, steps - 2)), steps):
                if stretch.span(position, step, world)[1] > place:
                    return number + step
            if begin >= draw and not steps:  # epochs are empty
                return number
            epoch, position, number = epoch + 1, 0, number + steps

    @property
    def _epoch_length(self) -> int:
        """Draws of an epoch of the mixture."""
        return int(self.sampler.epoch_length)  # type: ignore[union-attr]  # a mixture

    @property
    def _reweights(self) -> list[Any]:
        """Changes of the mixture's weights that runs have made, as the mixture has them."""
        return list(self.sampler.reweights) if _mixes(self.sampler) else []  # type: ignore[union-attr]  # a mixture

    def _set_reweights(self, changes: list[Any]) -> None:
        if changes == self._reweights:
            return
        if not _mixes(self.sampler):
            raise ValueError(
                f"state is of a run whose mixture got other weights, and sampler is {type(self.sampler).__name__}: "
                "give the WeightedDistributedSampler of that run"
            )
        self.sampler.reweights = changes  # type: ignore[union-attr]  # a mixture
        self._stretches = None

    def _sampler_with(self, changes: list[Any], epoch: int) -> Any:
        """The sampler as it was with these changes of its weights."""
        if changes == self._reweights:
            return self.sampler
        other: Any = copy(self.sampler)
        other.reweights = changes
        other.set_epoch(epoch)
        return other

    def reshard(self, num_replicas: int | None = None, rank: int | None = None, mesh: Mesh | None = None) -> None:
        """Continue with another number of ranks in the running process: the rest of the epoch is distributed to them.

        Call it on every rank at the same step, after a launcher has made the new process group.

        Args:
            num_replicas: Number of data-parallel ranks; as in the constructor.
            rank: This rank.
            mesh: In place of both.
        """
        self._ranks = Ranks(num_replicas, rank, mesh)
        self._interrupt(self._cursor.position, unless_finished=True)

    def step(self, number: int, *, num_replicas: int | None = None, rank: int | None = None) -> Any:
        """Return the samples of any step of the run, past or future, rank by rank.

        Steps are numbered from the start of the run over all epochs; a step is one batch on each rank. "step" of a
        state is the next step. Past steps are returned as they were delivered, whatever changed since; future steps as
        they will be if nothing changes.

        Args:
            number: Number of the step.
            num_replicas: Number of ranks for a future step; by default the current one. A past step has the number that
                it ran with.
            rank: Rank whose samples to return; None: all ranks.

        Returns:
            A list of samples for each rank, or the list of `rank`.

        Raises:
            IndexError: The epochs are empty, or the run began after that step.
            ValueError: The step ran with too few ranks for `rank`, or the order of another epoch is not known because
                `sampler` has no `set_epoch`.

        >>> batches = DistributedBatchSampler(5, 2, shuffle=False)
        >>> batches.step(2), batches.step(3)
        ([[4]], [[0, 1]])
        """
        number = checked_int("number", number, 0)
        world = self._ranks.world_size() if num_replicas is None else checked_int("num_replicas", num_replicas, 1)
        record = self._record
        if record.first_step <= number < record.step:
            epoch = record.epoch_of(number)
            stretches, parts = self._of_epoch(epoch), record.parts(epoch)
            part = [part for part in parts if part.step <= number][-1]
            stretch = [one for one in stretches if one.position <= part.position][-1]
            found = self._dealt(stretch, part.position, number - part.step, part.settings["world"])
        else:
            found = self._coming(number - record.step, world)
        if rank is None:
            return found
        if checked_int("rank", rank, 0) >= len(found):
            raise ValueError(f"rank must be 0 to {len(found) - 1}, the ranks of step {number}, got {rank}")
        return found[rank]

    def _coming(self, steps: int, world: int) -> list[list[int]]:
        """The step that comes so many steps behind the present place."""
        epoch, position, empty = self.epoch, self._cursor.position, False
        while steps >= 0:
            stretch = self._of_epoch(epoch)[-1]
            left = stretch.steps(position, world)
            if steps < left:
                return self._dealt(stretch, position, steps, world)
            if empty and not left:
                break
            epoch, position, steps, empty = epoch + 1, 0, steps - left, not left
        raise IndexError("number must be a step of the run, got one that it does not have")

    @staticmethod
    def _dealt(stretch: _Stretch, start: int, step: int, world: int) -> list[list[int]]:
        low, high = stretch.span(start, step, world)
        ids: list[int] = stretch.order(low, high).tolist()
        shares = [_share(low, high, rank, world) for rank in range(world)]
        return [ids[begin - low : end - low] for begin, end in shares]

    def next_uses(self) -> PermutationUses | None:
        """When this node needs samples next, for a cache; None if that is not known, or a `sampler` gives the order.

        A single node needs all samples in each epoch: there it makes no difference which of them a cache keeps.
        """
        world, rank = self._ranks.current()
        ranks = ranks_of_node(world, rank)
        if self.sampler is not None or ranks is None or len(ranks) == world or not self.n_samples:
            return None
        return PermutationUses(
            self.seed if self.shuffle else None,
            self.excluded_indices,
            self.n_samples,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            world=world,
            ranks=ranks,
        )

    def __getstate__(self) -> dict[str, Any]:
        own = {"_cursor": copy(self._cursor), "_record": deepcopy(self._record), "_stretches": None}
        return vars(self) | own | {"_interrupted": None, "_finished": None}

    def __copy__(self) -> DistributedBatchSampler:
        other = object.__new__(type(self))
        vars(other).update(self.__getstate__(), sampler=copy(self.sampler))  # which has an epoch of its own
        return other

    @property
    def fingerprint(self) -> str:
        """Digest of the samples, the batch size, the order and the seed."""
        return self._fingerprint_with(own_fingerprint(self.sampler), self.n_samples, self._options)

    def _epoch_fingerprint(
        self, epoch: int, n_samples: int | None = None, options: Mapping[str, Any] | None = None
    ) -> str:
        """What states hold: a sampler's schedule may change behind their epoch."""
        of = getattr(self.sampler, "epoch_fingerprint", None)
        inner = of(epoch) if callable(of) else own_fingerprint(self.sampler)
        return self._fingerprint_with(
            inner, self.n_samples if n_samples is None else n_samples, self._options if options is None else options
        )

    def _fingerprint_with(self, inner: str | None, n_samples: int, options: Mapping[str, Any]) -> str:
        shuffle, drop_last, batch_size = (bool(options["shuffle"]), bool(options["drop_last"]), options["batch_size"])
        order = f"shuffle {shuffle}" if self.sampler is None else f"{type(self.sampler).__name__} {inner}"
        parts = f"{n_samples} {batch_size} {drop_last} {order} {self.seed}"
        return hashlib.blake2b(parts.encode(), digest_size=8).hexdigest()

    @property
    def order_digest(self) -> str:
        """Digest of an order without a fingerprint of its own; ranks compare it before an epoch."""
        if self.sampler is None or own_fingerprint(self.sampler) is not None:
            return ""
        return hashlib.blake2b(self._list(self.epoch).tobytes(), digest_size=8).hexdigest()

    @property
    def _options(self) -> dict[str, Any]:
        """The arguments that may change."""
        return {"batch_size": self.batch_size, "drop_last": bool(self.drop_last), "shuffle": bool(self.shuffle)}

    def _settings(self, world: int | None = None) -> dict[str, Any]:
        """What the record holds of the present."""
        ranks = {} if world is None else {"world": world}
        held = {"n": self.n_samples, "options": self._options, "exclude": self._excluded, "reweight": self._reweights}
        return {**ranks, **held}

    def _in_full(self, held: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of a record, checked; those of the present where it has none."""
        options = {
            **self._options,
            **{name: held["options"][name] for name in self._options if name in held["options"]},
        }
        n_samples, fault = (
            held.get("n", self.n_samples),
            "state['run'] must be as state_dict() returned it: it was changed",
        )
        if type(n_samples) is not int or type(options["batch_size"]) is not int or options["batch_size"] < 1:
            raise ValueError(fault)
        if not all(type(index) is int and 0 <= index < n_samples for index in held["exclude"]):
            raise ValueError(fault)
        own = {"exclude": list(held["exclude"]), "reweight": list(held["reweight"])}
        return {"n": n_samples, "options": options, **own}

    def _set_record(self, record: RunRecord, excluded: list[int]) -> None:
        self._record, self._excluded, self._stretches = record, excluded, None

    def _begin_record(self, position: int, world: int) -> None:
        before = list(self._record.changes)
        self._record.begin(self.epoch, position, self._settings(world))
        if self._record.changes != before:
            self._stretches = None

    def _interrupt(self, position: int, *, unless_finished: bool = False) -> None:
        """Let the iteration that is under way, or else the next one, go on with other batches from a place on."""
        self._stretches, latest = None, self._cursor.iteration
        if latest is not None and latest is self._finished and unless_finished:
            return
        self._interrupted = latest or self._interrupted  # which a change at the same step has interrupted already
        self._cursor.go_to(self.epoch, position)

    def _of_epoch(self, epoch: int) -> list[_Stretch]:
        """The stretches of an epoch."""
        if epoch != self.epoch:
            return self._of_other_epoch(epoch)
        if self._stretches is None or self._stretches[0] != epoch:
            self._stretches = epoch, self._stretched(epoch)
        return self._stretches[1]

    def _of_other_epoch(self, epoch: int) -> list[_Stretch]:
        """Those of another epoch than the present one, whose order stays as it is."""
        if self.sampler is None:
            return self._stretched(epoch)
        if not callable(getattr(self.sampler, "set_epoch", None)):
            raise ValueError(
                f"number must be a step of epoch {self.epoch}, as {type(self.sampler).__name__} does not tell the "
                f"order of epoch {epoch}: give it set_epoch(epoch)"
            )
        listed = self._listed
        self._set_inner_epoch(epoch)
        try:
            found = self._stretched(epoch)
            # Read the order now: the sampler's `take` follows its latest `set_epoch`.
            return [one._replace(order=partial(_part, one.position, one.order(one.position, one.end))) for one in found]
        finally:
            self._set_inner_epoch(self.epoch)
            self._listed = listed

    def _stretched(self, epoch: int) -> list[_Stretch]:
        """Work out the stretches of an epoch: after a change all that was not delivered, and what is new."""
        if self._record.start_of(epoch) is None:
            return [self._first(epoch, self._settings())]
        first, *later = self._record.parts(epoch)
        stretches, held = [self._first(epoch, self._in_full(first.settings))], self._in_full(first.settings)
        for part in later:
            if (now := self._in_full(part.settings)) != held and part.change is not None:
                stretches.append(self._rest(epoch, stretches[-1], part.change["position"], held, now))
                held = now
        return stretches

    def _first(self, epoch: int, settings: Mapping[str, Any]) -> _Stretch:
        """The whole epoch."""
        options, left_out = settings["options"], np.array(sorted(settings["exclude"]), np.int64)
        sizes = options["batch_size"], options["drop_last"]
        if self.sampler is None:
            count = settings["n"] - len(left_out)
            # A shuffle of an epoch is worked out in microseconds, or in no more than a sort of 65,536 words.
            order = Shuffle(count, self.seed, epoch).take if options["shuffle"] else np.arange
            return _Stretch(0, count, partial(_without, left_out, order) if len(left_out) else order, *sizes)
        draws = None
        if self._has_slices:
            end, order = self._epoch_length, self._sampler_with(settings["reweight"], epoch).take
        else:
            listed = self._list(epoch)
            end, order = len(listed), partial(_part, 0, listed)
        if len(left_out):
            whole = np.asarray(order(0, end), np.int64)
            draws = np.flatnonzero(~np.isin(whole, left_out))
            end, order = len(draws), partial(_part, 0, whole[draws])
        return _Stretch(0, end, order, *sizes, draws)

    def _rest(
        self, epoch: int, before: _Stretch, position: int, then: Mapping[str, Any], now: Mapping[str, Any]
    ) -> _Stretch:
        """What a change leaves of an epoch, in the same order; in a new one where samples or `shuffle` are new."""
        options = now["options"]
        begin = min(position, before.end)
        rest, draws = np.asarray(before.order(begin, before.end), np.int64), before.draws_from(begin)
        if changed := [draw for draw, weights in now["reweight"] if [draw, weights] not in then["reweight"]]:
            rest, draws = self._reweighted(epoch, rest, draws, changed[0], now["reweight"])
        new = np.arange(then["n"], now["n"])
        rest, draws = np.concatenate([rest, new]), np.concatenate([draws, new])  # a mixture has no new samples here
        kept = ~np.isin(rest, now["exclude"])
        rest, draws = rest[kept], draws[kept]
        if self.sampler is None and (len(new) or options["shuffle"] != then["options"]["shuffle"]):
            rest = (
                rest[Shuffle(len(rest), self.seed, epoch, position).take(0, len(rest))]
                if options["shuffle"]
                else np.sort(rest)
            )
        end = position + len(rest)
        sizes = options["batch_size"], options["drop_last"]
        return _Stretch(position, end, partial(_part, position, rest), *sizes, draws)

    def _reweighted(
        self, epoch: int, rest: Samples, draws: Samples, draw: int, changes: list[Any]
    ) -> tuple[Samples, Samples]:
        """The rest of an epoch, and its draws, with other weights from a draw of the run on."""
        length = self._epoch_length
        if (low := draw - epoch * length) >= length:
            return rest, draws
        if not len(draws) or low < draws[0]:
            raise ValueError("state['run'] must be as state_dict() returned it: it was changed")
        cut = int(np.searchsorted(draws, low))
        coming = np.asarray(self._sampler_with(changes, epoch).take(low, length), np.int64)
        return np.concatenate([rest[:cut], coming]), np.concatenate([draws[:cut], np.arange(low, length)])

    @property
    def _has_slices(self) -> bool:
        return hasattr(self.sampler, "take") and hasattr(self.sampler, "epoch_length")

    def _list(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._listed is None or self._listed[0] != epoch:
            self._listed = epoch, np.fromiter(map(operator.index, self.sampler or ()), np.int64)
        return self._listed[1]


class _Stretch(NamedTuple):
    """Places of an epoch, from a change on, whose samples come in one order and in batches of one size."""

    position: int
    end: int
    order: Callable[[int, int], Samples]  # of two places, the samples between them
    batch_size: int
    drop_last: bool
    draws: Samples | None = None  # of each place from `position` on, its place in the sampler's order; None: the same

    def draws_from(self, place: int) -> Samples:
        """The draws of the places from one on."""
        return np.arange(place, self.end) if self.draws is None else self.draws[place - self.position :]

    def first_draw(self, place: int) -> int | None:
        """The draw of a place; None where the epoch ends."""
        if place >= self.end:
            return None
        return place if self.draws is None else int(self.draws[place - self.position])

    def place_of(self, draw: int) -> int:
        """The first place that has this draw or a later one."""
        return draw if self.draws is None else self.position + int(np.searchsorted(self.draws, draw))

    def steps(self, start: int, world: int) -> int:
        """Steps from a place on."""
        return n_steps(max(0, self.end - start), self.batch_size, world, drop_last=self.drop_last)

    def span(self, start: int, step: int, world: int) -> tuple[int, int]:
        """The places of a step, counted from a place."""
        return step_span(step, start, self.end, self.batch_size, world, drop_last=self.drop_last)


def _mixes(sampler: object) -> bool:
    """Whether a sampler has weights that a run may change."""
    return hasattr(sampler, "reweights") and callable(getattr(sampler, "reweighted", None))


def _part(position: int, listed: npt.NDArray[np.int64], start: int, stop: int) -> npt.NDArray[np.int64]:
    """Places of a list that begins at a position."""
    return listed[start - position : stop - position]


def _without(
    left_out: npt.NDArray[np.int64], order: Callable[[int, int], npt.NDArray[np.int64]], start: int, stop: int
) -> npt.NDArray[np.int64]:
    """An order of the samples that are left, by their numbers among these."""
    numbers = order(start, stop)
    return numbers + np.searchsorted(left_out - np.arange(len(left_out)), numbers, "right")


def _share(low: int, high: int, rank: int, world: int) -> tuple[int, int]:
    """The places of a step that a rank gets; one, that others have too, where there are fewer than ranks."""
    if high - low < world:
        own = low + rank % (high - low)
        return own, own + 1
    return equal_share(low, high, rank, world)


def _warn_of_repetition(ids: list[int], world: int) -> None:
    """Name the samples of a step that come twice, as it has fewer of them than ranks."""
    again = [ids[other % len(ids)] for other in range(len(ids), world)]
    message = f"the last step has {len(ids)} samples for {world} ranks: {len(again)} come again"
    warnings.warn(f"{message}, {again[:10]}{' ...' if len(again) > 10 else ''}", stacklevel=4)


def _checked_names(accept: Collection[str]) -> set[str]:
    names = {accept} if isinstance(accept, str) else set(accept)
    for name in names - {*CHANGEABLE, DATA}:
        raise ValueError(f"accept must name some of {[*CHANGEABLE, DATA]}, got {name!r}")
    return names


def n_steps(left: int, batch_size: int, world: int, *, drop_last: bool = False) -> int:
    """How many steps `left` samples make."""
    return left // (batch_size * world) if drop_last else -(-left // (batch_size * world))


def step_span(
    step: int, start: int, end: int, batch_size: int, world: int, *, drop_last: bool = False
) -> tuple[int, int]:
    """The places of a step, counted from `start`: the first, and the one after the last.

    All steps but the last hold `batch_size * world` samples. Where the last one would leave ranks without a sample, the
    last two share theirs.
    """
    whole = batch_size * world
    begin = start + step * whole
    if drop_last:
        return begin, begin + whole
    steps = n_steps(end - start, batch_size, world)
    rest = end - start - (steps - 1) * whole
    if rest < world and steps > 1 and batch_size > 1 and step >= steps - 2:
        first = start + (steps - 2) * whole
        middle = first + (end - first) // 2
        return (first, middle) if step == steps - 2 else (middle, end)
    return begin, min(begin + whole, end)


def equal_share(start: int, stop: int, number: int, count: int) -> tuple[int, int]:
    """The share of one of `count` readers in a range; equal up to one, and so empty in a range that is shorter."""
    n = stop - start
    return start + n * number // count, start + n * (number + 1) // count
