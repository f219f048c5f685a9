"""Ranks of a training run side by side in one process, each with the data module that it would have."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import IndexedWebDataModule, Split, index_shards, write_tars
from headrace.weighted_sampler import WeightedDistributedSampler

LONGEST = 60  # bytes of a sample
WAYS = [  # that the batch sampler allows
    (strategy, cost)
    for strategy in ("sequential", "stratified", "bucketed", "packed")
    for cost in ("sum", "padded")
    if cost == "sum" or strategy in ("sequential", "bucketed")
]
Keys = list[str]


def write_source(folder: Path, name: str, count: int, n_shards: int) -> Path:
    """Indexed shards of texts of 1 to `LONGEST` bytes, a few of them long."""
    rng = random.Random(name)
    texts = [b"x" * min(LONGEST, 1 + int(rng.expovariate(1 / 15))) for _ in range(count)]
    write_tars([(f"{name}{number}", {"txt": text}) for number, text in enumerate(texts)], folder, n_shards=n_shards)
    index_shards(folder)
    return folder


def keys_of(samples: list[dict[str, Any]]) -> Keys:
    return [sample["__key__"] for sample in samples]


@dataclass(frozen=True)
class Recipe:
    """What a run is given, apart from ranks and workers.

    Args:
        batch_size: Of plain batches; None for batches by size.
        strategy: Of the batches by size.
        cost: Of them.
        budget: Of them.
        weights: Of the sources; None without a mixture.
        seed: Of everything.
    """

    batch_size: int | None
    strategy: str
    cost: str
    budget: int
    weights: tuple[float, ...] | None
    seed: int

    @classmethod
    def draw(cls, rng: random.Random) -> "Recipe":
        return cls(
            rng.choice([None, None, 2, 3, 5]),
            *rng.choice(WAYS),
            rng.randint(LONGEST, 4 * LONGEST),
            rng.choice([None, (0.5, 2.0), (1.0, 0.3), (0.0, 1.5)]),
            rng.randrange(2**64),
        )

    def module(
        self, shards: dict[str, Any], world: int, rank: int, workers: int = 0, **options: Any
    ) -> IndexedWebDataModule:
        """The data module of one rank."""
        sized: Any = partial(
            DistributedSizeAwareBatchSampler,
            max_total_size=self.budget,
            strategy=self.strategy,  # type: ignore[arg-type]  # one of WAYS
            cost=self.cost,  # type: ignore[arg-type]  # likewise
            window=64,
        )
        order: Any = None
        if self.weights is not None:
            weights = dict(zip(shards, self.weights, strict=True))
            order = partial(WeightedDistributedSampler, weights=weights, semantics="ratio")
        module = IndexedWebDataModule(
            {Split.train: shards},
            batch_size=self.batch_size,
            batch_sampler=sized if self.batch_size is None else None,
            sizes="txt" if self.batch_size is None else None,
            sampler=order,
            collate_fn=keys_of,
            num_workers=workers,
            seed=self.seed,
            num_replicas=world,
            rank=rank,
            **options,
        )
        module.setup("fit")
        return module


class Ranks:
    """All ranks of a run, which step together.

    Args:
        recipe: What they are given.
        shards: {name of a source: its folder}.
        world: Number of ranks.
        workers: Of each.
        state: What a checkpoint holds; None at the beginning.
    """

    def __init__(
        self, recipe: Recipe, shards: dict[str, Any], world: int, workers: int = 0, state: dict[str, Any] | None = None
    ) -> None:
        self.modules = [recipe.module(shards, world, rank, workers) for rank in range(world)]
        for module in self.modules:
            if state is not None:
                module.load_state_dict(state)
        self.loaders = [module.train_dataloader() for module in self.modules]

    def steps(self, epochs: int) -> Iterator[tuple[int, list[Keys]]]:
        """Yields an epoch and each rank's batch, until the last epoch is over; ends nowhere else."""
        for epoch in range(self.loaders[0].epoch, epochs):
            for loader in self.loaders:
                loader.set_epoch(epoch)
            lengths = {len(loader) for loader in self.loaders}
            done = {loader.steps for loader in self.loaders}
            assert len(lengths) == len(done) == 1, "ranks would wait for one another"
            count = done.pop()
            # Strict: no rank ends before another.
            for batches in zip(*self.loaders, strict=True):
                count += 1
                yield epoch, list(batches)
            assert {count} == lengths

    def state(self, rng: random.Random) -> dict[str, Any]:
        """What a checkpoint would hold, the same on every rank."""
        states = [module.state_dict() for module in self.modules]
        assert all(state == states[0] for state in states)
        return rng.choice(states)

    def kill(self) -> None:
        for module in self.modules:
            module.on_exception(KeyboardInterrupt())


def per_epoch(steps: Sequence[tuple[int, list[Keys]]]) -> dict[int, Counter[str]]:
    """How often each sample came in each epoch, over all ranks."""
    counts: dict[int, Counter[str]] = {}
    for epoch, batches in steps:
        counts.setdefault(epoch, Counter()).update(key for batch in batches for key in batch)
    return counts
