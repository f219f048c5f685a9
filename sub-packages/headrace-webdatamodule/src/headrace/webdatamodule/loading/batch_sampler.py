"""Batches of equal size for every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, cast

from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule._shared.display import counted, never_raises
from headrace.webdatamodule._shared.epoch_plan import PlannedBatch
from headrace.webdatamodule._shared.ranks import Mesh, Ranks, refuse_sharding_again
from headrace.webdatamodule._shared.run import Run
from headrace.webdatamodule._shared.run_sampler import RunSampler
from headrace.webdatamodule.loading.equal_plan import EqualOptions, EqualPlanner
from headrace.webdatamodule.loading.next_use import PermutationUses, ranks_of_node
from headrace.webdatamodule.loading.options import seed_int
from headrace.webdatamodule.loading.state_dict import DATA
from headrace.webdatamodule.loading.user_sampler import NoUserSampler, UserSampler

CHANGEABLE = ("batch_size", "drop_last", "shuffle")  # arguments that a run may change


class DistributedBatchSampler(RunSampler):
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
        user_sampler = NoUserSampler() if sampler is None else UserSampler(sampler)
        planner = EqualPlanner(
            type(self).__name__, n_samples, options, user_sampler, seed_int(seed), mixed=user_sampler.mixed
        )
        super().__init__(Run(planner, Ranks(num_replicas, rank, mesh)))
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
        return self._planner.user_sampler.sampler

    @never_raises
    def __repr__(self) -> str:
        ranks = "ranks not known yet"
        with suppress(ValueError):  # of an environment that contradicts what was given
            ranks = "rank {1} of {0}".format(*self._run.ranks.current())
        order = "shuffled" if self.shuffle else "in order"
        figures = [
            counted(self.n_samples, "sample"),
            f"batch_size {self.batch_size:,}",
            order if self.sampler is None else f"ordered by {type(self.sampler).__name__}",
            *(["drop_last"] if self.drop_last else []),
            ranks,
            f"epoch {self.epoch} at {self.position:,}",
            f"seed {self.seed}",
        ]
        return f"{type(self).__name__}({', '.join(figures)})"

    @property
    def rank(self) -> int:
        """Current rank of this process."""
        return self._run.ranks.current()[1]

    def _refuse_sharding_again(self) -> None:
        if self._run.ranks.current()[0] > 1:
            refuse_sharding_again("num_replicas=1 and rank=0")

    def _note(self, batch: PlannedBatch) -> None:
        self.draws = batch.draws

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

    @property
    def fingerprint(self) -> str:
        """Digest of the samples, the batch size, the order and the seed."""
        return self._planner.fingerprint

    @property
    def order_digest(self) -> str:
        """Digest of an order without a fingerprint of its own; ranks compare it before an epoch."""
        return self._planner.user_sampler.digest


def _checked_names(accept: Collection[str]) -> set[str]:
    names = {accept} if isinstance(accept, str) else set(accept)
    for name in names - {*CHANGEABLE, DATA}:
        raise ValueError(f"accept must name some of {[*CHANGEABLE, DATA]}, got {name!r}")
    return names
