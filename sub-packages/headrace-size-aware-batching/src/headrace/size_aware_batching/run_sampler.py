"""What batch samplers over a run have in common: epochs, positions, steps, states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, Literal

from torch.utils.data import Sampler

from headrace.size_aware_batching._shared.as_sampler import refuse_as_sampler
from headrace.size_aware_batching._shared.checks import checked_int, shown
from headrace.size_aware_batching._shared.display import inner, never_raises
from headrace.size_aware_batching._shared.epoch_plan import Place, PlannedBatch
from headrace.size_aware_batching._shared.ranks import Mesh, Ranks, refuse_sharding_again
from headrace.size_aware_batching._shared.run import Planner, Run
from headrace.size_aware_batching._validation import checked_epoch, counted


class RunSampler(Sampler[list[Any]]):
    """Base class of batch samplers whose batches come from the plans of a `Run`.

    Args:
        planner: Makes the plans.
        num_replicas: Number of data-parallel ranks; by default that of ``torch.distributed``.
        rank: Rank of this process, or ``"all"`` for the batches of all ranks.
        mesh: In place of both.
    """

    def __init__(
        self, planner: Planner, num_replicas: int | None, rank: int | Literal["all"] | None, mesh: Mesh | None
    ) -> None:
        super().__init__()
        all_ranks = isinstance(rank, str)
        if isinstance(rank, str):
            if rank != "all":
                raise ValueError(f'rank must be an int >= 0 or "all", got {shown(rank)}')
            if mesh is not None:
                raise ValueError("mesh and rank='all' were both given: give num_replicas=mesh.size() in place of mesh")
            rank = None
        self._run = Run(planner, Ranks(num_replicas, rank, mesh), all_ranks)

    @property
    def sampler(self) -> EpochSetter:
        """Sets the epoch; not the ``sampler`` argument. Lightning calls ``batch_sampler.sampler.set_epoch``."""
        return EpochSetter(self)

    @property
    def batch_sampler(self) -> EpochSetter:
        """Sets the epoch: Hugging Face's ``Trainer`` calls ``loader.batch_sampler.batch_sampler.set_epoch``."""
        return EpochSetter(self)

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
    def rank(self) -> int | Literal["all"]:
        """Current rank of this process, or ``"all"``."""
        return "all" if self._run.all_ranks else self._run.ranks.current()[1]

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
        refuse_sharding_again(None if self._run.all_ranks else 'rank="all"', uneven=True)
        for batch in self._run.deliver(self):
            self._delivered(batch)
            yield batch.samples

    def _delivered(self, batch: PlannedBatch) -> None:
        """Note a batch before it is yielded."""

    def batches_from(self, place: Place | int | None = None) -> Iterator[PlannedBatch]:
        """Yield this rank's batches of the epoch from a place on, each with the place behind it; nothing moves.

        The position of the sampler, its state and running iterations stay as they are. A loader that reads ahead takes
        its batches from here and keeps the place itself; ``state_dict(place)`` is the state there.

        Args:
            place: A position, such as that of a state, or the ``place`` of an earlier batch; by default where the next
                iteration begins. If the epoch has changed in the middle, a place behind the last change.

        Returns:
            An iterator of `PlannedBatch`, with ``samples``, ``place`` and ``draws``.

        Raises:
            ValueError: If the epoch does not have that place.

        >>> from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
        >>> sampler = DistributedSizeAwareBatchSampler([4, 1, 3, 2], 5, strategy="sequential", shuffle=False)
        >>> [(batch.samples, batch.place.position) for batch in sampler.batches_from()], sampler.position
        ([([0, 1], 2), ([2, 3], 4)], 0)
        >>> [batch.samples for batch in sampler.batches_from(2)]
        [[2, 3]]
        """
        return self._run.batches_from(None if place is None else self._checked_place(place))

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
        world = None if num_replicas is None else checked_int("num_replicas", num_replicas, 1)
        by_rank = self._run.step(number, world)
        if rank is None:
            return by_rank
        return by_rank[checked_int("rank", rank, high=len(by_rank) - 1)]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over next; a loaded position of another epoch is discarded."""
        self._run.set_epoch(checked_epoch(epoch))

    def state_dict(self, position: Place | int | None = None) -> dict[str, Any]:
        """Return the state for a resume: version, seed, epoch, position, fingerprint and the record of the run.

        Args:
            position: Number of samples that the training loop has received in this epoch, on all ranks together, or
                the ``place`` of a batch of `batches_from`. By default the position of this sampler, which with workers
                is ahead of the loop.
        """
        return self._run.state(None if position is None else self._checked_place(position))

    def _checked_place(self, place: Place | int) -> Place:
        if isinstance(place, Place):
            return place
        return self._run.place(self._run.checked_position(checked_int("position", place)))

    def _in_words(self, figures: Sequence[str], more: Sequence[str] = ()) -> str:
        """Return a representation with some figures, and those that all such samplers have."""
        shown_figures = [*figures, f"epoch {self.epoch}", f"seed {self._run.planner.seed}", *more]
        return f"{type(self).__name__}({', '.join(shown_figures)})"

    def _ranks_in_words(self) -> str:
        ranks = "ranks unknown"
        with suppress(ValueError):  # of an environment that contradicts what was given
            ranks = counted(self.num_replicas, "rank")
        return f"all {ranks}" if self._run.all_ranks else ranks

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_run": copy(self._run)}


class EpochSetter:
    """Passes ``set_epoch`` on to the batch sampler that it belongs to."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    @never_raises
    def __repr__(self) -> str:
        return f"{type(self).__name__} of {inner(self._owner)}"

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over next."""
        self._owner.set_epoch(epoch)


def budget_in_words(budget: Any) -> str:
    """Return the budget, or those of all columns, for a representation."""
    return f"budget {' and '.join(f'{limit:,}' for limit in (budget if isinstance(budget, list) else [budget]))}"
