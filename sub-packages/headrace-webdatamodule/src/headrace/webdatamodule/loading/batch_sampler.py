"""Batches of equal size for every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from headrace.webdatamodule._shared.as_sampler import refuse_as_sampler
from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule._shared.display import never_raises
from headrace.webdatamodule._shared.epoch_plan import Place, PlannedBatch
from headrace.webdatamodule._shared.keywords import explains_keywords
from headrace.webdatamodule._shared.ranks import Mesh, Ranks, refuse_sharding_again
from headrace.webdatamodule._shared.run import Run
from headrace.webdatamodule.loading.equal_plan import DATA, EqualOptions, EqualPlanner
from headrace.webdatamodule.loading.next_use import PermutationUses, ranks_of_node
from headrace.webdatamodule.loading.options import seed_int
from headrace.webdatamodule.loading.user_sampler import NoUserSampler, UserSampler

CHANGEABLE = ("batch_size", "drop_last", "shuffle")  # arguments that a run may change


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
        n_samples = checked_int("n_samples", n_samples, 0, cure="give len(dataset)")
        options = EqualOptions(checked_int("batch_size", batch_size, 1), bool(drop_last), bool(shuffle))
        if sampler is not None and (isinstance(sampler, Iterator) or not isinstance(sampler, Iterable)):
            raise TypeError(f"sampler must be an iterable that can be read in every epoch, got {sampler!r}")
        order = NoUserSampler() if sampler is None else UserSampler(sampler)
        planner = EqualPlanner(
            type(self).__name__, n_samples, options, order, seed_int(seed), reweights=tuple(order.reweights)
        )
        self._run = Run(planner, Ranks(num_replicas, rank, mesh))
        self.draws: list[int] | None = None

    @property
    def _planner(self) -> EqualPlanner:
        return cast(EqualPlanner, self._run.planner)

    @property
    def n_samples(self) -> int:
        """Number of samples."""
        return self._planner.n

    @property
    def batch_size(self) -> int:
        """Number of samples in a batch, on each rank."""
        return self._planner.options.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether samples that do not fill a batch on every rank are dropped."""
        return self._planner.options.drop_last

    @property
    def shuffle(self) -> bool:
        """Whether the built-in order is a new permutation in each epoch."""
        return self._planner.options.shuffle

    @property
    def seed(self) -> int:
        """Seed of the order."""
        return self._planner.seed

    @property
    def sampler(self) -> Iterable[int] | None:
        """The sampler that gives the order; None for the built-in order."""
        return self._planner.order.sampler

    @never_raises
    def __repr__(self) -> str:
        ranks = "ranks not known yet"
        with suppress(ValueError):  # of an environment that contradicts what was given
            ranks = "rank {1} of {0}".format(*self._run.ranks.current())
        order = "shuffled" if self.shuffle else "in order"
        figures = [
            f"{self.n_samples:,} samples",
            f"batch_size {self.batch_size:,}",
            order if self.sampler is None else f"ordered by {type(self.sampler).__name__}",
            *(["drop_last"] if self.drop_last else []),
            ranks,
            f"epoch {self.epoch} at {self.position:,}",
            f"seed {self.seed}",
        ]
        return f"{type(self).__name__}({', '.join(figures)})"

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration, or of the next one."""
        return self._run.epoch

    @property
    def position(self) -> int:
        """Number of samples of the epoch that all ranks together have received or skipped."""
        return self._run.position

    @property
    def num_replicas(self) -> int:
        """Current number of data-parallel ranks."""
        return self._run.world

    @property
    def rank(self) -> int:
        """Current rank of this process."""
        return self._run.ranks.current()[1]

    def __len__(self) -> int:
        """Number of batches in the whole epoch on each rank."""
        return len(self._run)

    @property
    def remaining(self) -> int:
        """Number of batches left in the epoch, with the current number of ranks."""
        return self._run.remaining

    def __iter__(self) -> Iterator[list[int]]:
        refuse_as_sampler(self)
        if self._run.ranks.current()[0] > 1:
            refuse_sharding_again("num_replicas=1 and rank=0")
        for batch in self._run.deliver(self):
            self.draws = batch.draws
            yield batch.samples

    def batches_from(self, place: Place | int | None = None) -> Iterator[PlannedBatch]:
        """Yield this rank's batches of the epoch from a place on, each with the place behind it; nothing moves.

        The position of the sampler, its state and running iterations stay as they are. A loader that reads ahead takes
        its batches from here and keeps the place itself; `state_dict(place)` is the state there.

        Args:
            place: A position, such as that of a state, or the `place` of an earlier batch; by default where the next
                iteration begins. If the epoch has changed in the middle, a place behind the last change.

        Raises:
            ValueError: The epoch does not have that place.

        >>> batches = DistributedBatchSampler(5, 2, shuffle=False)
        >>> [(batch.samples, batch.place.position) for batch in batches.batches_from(2)], batches.position
        ([([2, 3], 4), ([4], 5)], 0)
        """
        return self._run.batches_from(None if place is None else self._checked_place(place))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over next; a loaded position applies only to its own epoch."""
        self._run.set_epoch(checked_int("epoch", epoch, 0))

    def state_dict(self, position: Place | int | None = None) -> dict[str, Any]:
        """Return the position after the last batch that was taken, in samples of all ranks; correct at any time.

        The state also holds the record of the run: the number of the next step, the first steps of the epochs that
        began, and the changes.

        Args:
            position: Another position of the epoch, or the `place` of a batch of `batches_from`.
        """
        return self._run.state(None if position is None else self._checked_place(position))

    def _checked_place(self, place: Place | int) -> Place:
        if isinstance(place, Place):
            return place
        return self._run.place(self._run.checked_position(checked_int("position", place, 0)))

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
        self._run.load(state, _checked_names(accept))

    @property
    def excluded_indices(self) -> npt.NDArray[np.int64]:
        """The samples that `exclude` left out, ascending."""
        return np.array(sorted(self._planner.excluded), np.int64)

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
        numbers = [checked_int("indices", index, 0) for index in indices]
        if numbers and max(numbers) >= self.n_samples:
            raise ValueError(f"indices must be 0 to {self.n_samples - 1}, the samples, got {max(numbers)}")
        self._run.exclude(numbers)

    def skip(self, steps: int) -> npt.NDArray[np.int64]:
        """Skip the next steps of this epoch, once; call it on every rank at the same step.

        Args:
            steps: Number of steps; at most the rest of the epoch is skipped.

        Returns:
            The skipped samples of all ranks.
        """
        return self._run.skip(checked_int("steps", steps, 1))

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
        return self._run.reweight(weights, draw)

    def reshard(self, num_replicas: int | None = None, rank: int | None = None, mesh: Mesh | None = None) -> None:
        """Continue with another number of ranks in the running process: the rest of the epoch is distributed to them.

        Call it on every rank at the same step, after a launcher has made the new process group.

        Args:
            num_replicas: Number of data-parallel ranks; as in the constructor.
            rank: This rank.
            mesh: In place of both.
        """
        self._run.reshard(Ranks(num_replicas, rank, mesh))

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
        world = None if num_replicas is None else checked_int("num_replicas", num_replicas, 1)
        by_rank = self._run.step(number, world)
        if rank is None:
            return by_rank
        if checked_int("rank", rank, 0) >= len(by_rank):
            raise ValueError(f"rank must be 0 to {len(by_rank) - 1}, the ranks of step {number}, got {rank}")
        return by_rank[rank]

    def next_uses(self) -> PermutationUses | None:
        """When this node needs samples next, for a cache; None if that is not known, or a `sampler` gives the order.

        A single node needs all samples in each epoch: there it makes no difference which of them a cache keeps.
        """
        world, rank = self._run.ranks.current()
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
        return vars(self) | {"_run": copy(self._run)}

    @property
    def fingerprint(self) -> str:
        """Digest of the samples, the batch size, the order and the seed."""
        return self._planner.fingerprint

    @property
    def order_digest(self) -> str:
        """Digest of an order without a fingerprint of its own; ranks compare it before an epoch."""
        return self._planner.order.digest


def _checked_names(accept: Collection[str]) -> set[str]:
    names = {accept} if isinstance(accept, str) else set(accept)
    for name in names - {*CHANGEABLE, DATA}:
        raise ValueError(f"accept must name some of {[*CHANGEABLE, DATA]}, got {name!r}")
    return names
