"""Batch samplers over a run: epochs, positions, steps, states, and changes of the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from .as_sampler import refuse_as_sampler
from .checks import checked_int
from .epoch_plan import Place, PlannedBatch
from .ranks import Mesh, Ranks
from .run import Run


class RunSampler(Sampler[list[Any]]):
    """Base class of batch samplers whose batches come from the plans of a `Run`.

    All ranks call the methods that change the run at the same step. Under a `DataLoader` of torch with workers the
    sampler is ahead of the training loop; under a `ResumableLoader` it is where the loop is.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration, or of the next one."""
        return self._run.epoch

    @property
    def position(self) -> int:
        """Number of samples of the epoch that all ranks together have received or skipped."""
        return self._run.position

    @property
    def start(self) -> int:
        """The position where the next iteration begins: 0, unless a state was loaded or the epoch has changed."""
        return self._run.start.position

    @property
    def num_replicas(self) -> int:
        """Current number of data-parallel ranks."""
        return self._run.world

    @property
    def remaining(self) -> int:
        """Number of batches that each rank has yet to receive in the epoch, from the position of ``state_dict()``."""
        return self._run.remaining

    def __len__(self) -> int:
        """Return the number of batches that each rank gets in the whole epoch, also after a resume.

        The number is exact; with ``rank="all"`` it counts the batches of all ranks. See ``remaining`` for the rest of
        an epoch.
        """
        return len(self._run)

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield this rank's batches, from the position that was loaded, else from the beginning of the epoch."""
        # All of this runs at the first ``next``: a DataLoader may make an iterator that it never uses.
        refuse_as_sampler(self)
        self._refuse_sharding_again()
        for batch in self._run.deliver(self):
            self._note(batch)
            yield batch.samples

    def _refuse_sharding_again(self) -> None:
        """Refuse a loader that distributes the batches of this rank once more."""
        raise NotImplementedError

    def _note(self, batch: PlannedBatch) -> None:
        """Note a batch that is delivered."""

    @property
    def place(self) -> Place:
        """The place of ``position``."""
        return self._run.place()

    def go_to(self, place: Place | int) -> None:
        """Let the next iteration begin at a place of this epoch that was passed, as if its state were loaded.

        Args:
            place: 0, or a `Place`.

        Raises:
            ValueError: If the epoch does not have that place.
        """
        self._run.go_to(self._checked_place(place))

    def begin(self) -> Iterator[PlannedBatch]:
        """Begin an iteration as ``iter()`` does, and return its batches; only `delivered` moves the position.

        So a loader may read any number of batches ahead, and the position, the state and every change are at the place
        of the training loop. A change in the middle of the epoch ends the iteration: begin another one, which
        continues from there.

        Returns:
            An iterator of `PlannedBatch`, with ``samples``, ``place`` and ``draws``.

        Raises:
            ValueError: If there is no batch for each rank, or the order is not the same on all of them.
        """
        return self._run.begin()

    @property
    def begun(self) -> object:
        """What stands for the latest `begin` or ``iter()``; None if a change or a choice of the place came since."""
        return self._run.iteration

    def delivered(self, batch: PlannedBatch) -> None:
        """Move the position to the place after a batch of `begin` that the training loop has received.

        Args:
            batch: The batch after the one that was delivered before.
        """
        self._run.delivered(batch.place)
        self._note(batch)

    def batches_from(self, place: Place | int | None = None) -> Iterator[PlannedBatch]:
        """Yield this rank's batches of the epoch from a place on, each with the place after it; nothing moves.

        The position of the sampler, its state and running iterations stay as they are. A loader that reads ahead takes
        its batches from here and keeps the place itself; ``state_dict(place)`` is the state there.

        Args:
            place: A position, such as that of a state, or the ``place`` of an earlier batch; by default where the next
                iteration begins.

        Returns:
            An iterator of `PlannedBatch`, with ``samples``, ``place`` and ``draws``.

        Raises:
            ValueError: If the epoch does not have that place.
        """
        return self._run.batches_from(None if place is None else self._checked_place(place))

    def n_batches_from(self, place: Place | int) -> int:
        """Return the number of batches that `batches_from` yields from a place on."""
        return self._run.n_batches_from(self._checked_place(place))

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
            IndexError: If the epochs are empty, or the run began after that step.
            ValueError: If the step ran with too few ranks for ``rank``, or the order of another epoch is not known
                because ``sampler`` has no ``set_epoch``.
        """
        number = checked_int("number", number)
        world = None if num_replicas is None else checked_int("num_replicas", num_replicas, 1)
        by_rank = self._run.step(number, world)
        if rank is None:
            return by_rank
        return by_rank[checked_int(f"rank of step {number}", rank, high=len(by_rank) - 1)]

    def epoch_of_step(self, number: int, num_replicas: int | None = None) -> int:
        """Return the epoch of any step of the run; the arguments and errors are those of `step`."""
        world = None if num_replicas is None else checked_int("num_replicas", num_replicas, 1)
        return self._run.epoch_of_step(checked_int("number", number), world)

    def asked_shares(self) -> tuple[str, dict[str, float]] | None:
        """Return the requested shares of the mixture that is the ``sampler``, as its ``asked_shares``; else None."""
        shares: tuple[str, dict[str, float]] | None = self._run.planner.user_sampler.asked_shares()
        return shares

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over next; a loaded position of another epoch is discarded."""
        self._run.set_epoch(checked_int("epoch", epoch))

    def state_dict(self, position: Place | int | None = None) -> dict[str, Any]:
        """Return the state for a resume: version, seed, epoch, position, fingerprint and the record of the run.

        Args:
            position: Number of samples that the training loop has received in this epoch, on all ranks together, or
                the ``place`` of a batch of `batches_from`. By default the position of this sampler, which with workers
                is ahead of the loop.
        """
        return self._run.state(None if position is None else self._checked_place(position))

    def _checked_place(self, place: Place | int) -> Place:
        run = self._run
        if place == 0:
            return Place(0)
        position = checked_int("position", place.position if isinstance(place, Place) else place)
        run.refuse_position(position)
        return place if isinstance(place, Place) else run.place(position)

    @property
    def excluded_indices(self) -> NDArray[np.int64]:
        """The samples that `exclude` left out, ascending."""
        return np.array(sorted(self._run.planner.settings["exclude"]), np.int64)

    def exclude(self, indices: Iterable[int]) -> None:
        """Exclude samples from now on, in every epoch; call it on every rank at the same step.

        Batches that were already yielded keep them, also those that workers of torch's `DataLoader` have read ahead.
        States record the excluded samples.

        Args:
            indices: Samples of the dataset, from 0 on.

        Raises:
            TypeError: If an index is not an int.
            ValueError: If an index is out of range, or the rest of the epoch cannot be planned anew.
        """
        last = self._run.planner.settings["n"] - 1
        self._run.exclude([checked_int("indices", index, high=last) for index in indices])

    def skip(self, steps: int) -> NDArray[np.int64]:
        """Skip the next steps of this epoch, once; call it on every rank at the same step.

        Args:
            steps: Number of steps; at most the rest of the epoch is skipped.

        Returns:
            The skipped samples of all ranks.
        """
        return self._run.skip(checked_int("steps", steps, 1))

    def reweight(self, weights: Any, draw: int | None = None) -> tuple[int, int]:
        """Change the weights of the mixture that is the ``sampler``; call it on every rank at the same step.

        Passes over its sources continue, and shares are exact before and after. States hold the change.

        Args:
            weights: As the mixture was given them, for the same sources.
            draw: First draw with the new weights, counted since epoch 0. By default the next multiple of 1,024 that is
                in no batch, and in no window of batches, that has begun.

        Returns:
            That draw, and the first step that it affects.

        Raises:
            TypeError: If the ``sampler`` has no weights that can change, or a weight has the wrong type.
            ValueError: If the weights are not allowed, the run has not begun, or the mixture's schedule has a later
                change.
        """
        return self._run.reweight(weights, draw)

    def reshard(self, num_replicas: int | None = None, rank: int | None = None, mesh: Mesh | None = None) -> None:
        """Continue with another number of ranks in the running process: the rest of the epoch is distributed to them.

        Call it on every rank at the same step, after a launcher has made the new process group.

        Args:
            num_replicas: Number of data-parallel ranks; as in the constructor.
            rank: Rank of this process.
            mesh: In place of both.
        """
        self._run.reshard(Ranks(num_replicas, rank, mesh))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_run": copy(self._run)}
