"""When a node needs samples next, by the plans of size-aware batches: against the batches of all its ranks, listed."""

from typing import Any

import numpy as np
import pytest
import torch
from doors import sampler_with
from torch.utils.data import RandomSampler

from headrace.size_aware_batching import BlockwiseSizeAwareBatchSampler
from headrace.webdatamodule.loading.batch_plans import planned_uses_of
from headrace.weighted_sampler import WeightedDistributedSampler

LENGTHS = np.random.default_rng(0).integers(5, 60, 1200)
NODES, LOCAL = 4, 2
KINDS: dict[str, dict[str, Any]] = {
    "stratified": {},
    "bucketed": {"strategy": "bucketed", "cost": "padded"},
    "packed": {"strategy": "packed"},
    "tokens per step": {"tokens_per_step": 4000},
    "long samples in pieces": {"max_total_size": 40, "oversize": "split"},
}


def of_rank(rank: int, options: dict[str, Any]) -> Any:
    return sampler_with(LENGTHS, **{"max_total_size": 400, "num_replicas": NODES * LOCAL, "rank": rank, **options})


def samples_of(batch: list[Any]) -> list[int]:
    return [int(key) for key in batch]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("excluded", [(), (3, 50, 777)])
def test_a_node_is_told_when_it_needs_a_sample_next(
    kind: str, excluded: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(LOCAL))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    node = 1
    ranks = [of_rank(node * LOCAL + one, KINDS[kind]) for one in range(LOCAL)]
    for sampler in ranks:
        sampler.exclude(excluded)
    later: dict[int, tuple[int, float]] = {}
    for epoch in range(NODES, 0, -1):
        for sampler in ranks:
            sampler.set_epoch(epoch)
            batches = list(sampler)
            for step, batch in enumerate(batches):
                later.update(dict.fromkeys(samples_of(batch), (epoch, step / len(batches))))
    for sampler in ranks:
        sampler.set_epoch(0)
    uses = planned_uses_of(ranks[0], NODES * LOCAL, node * LOCAL)
    assert uses is not None
    assert uses.prepare(0)
    told = right = wanted = 0
    for step, batch in enumerate(ranks[0]):
        found = uses.of(0, step, samples_of(batch)).windows
        told += len(found)
        for sample in set(samples_of(batch)):
            wanted += sample in later
            if sample in found and sample in later:
                number, place = later[sample]
                right += number * 64 - 1 <= found[sample] <= number * 64 + int(64 * place) + 1
    # The last step shares what is left among the ranks, which a plan does not say.
    assert right >= 0.95 * max(told, wanted) > 50


@pytest.mark.parametrize("strategy", ["sequential", "bucketed"])
def test_asking_for_next_uses_changes_no_batch(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def of_mixture() -> Any:
        mixture = WeightedDistributedSampler(LENGTHS, {(0, 600): 1, (600, 1200): 3}, num_replicas=1, rank=0)
        cost = "padded" if strategy == "bucketed" else "sum"
        return of_rank(0, {"sampler": mixture, "strategy": strategy, "cost": cost})

    asked, other = of_mixture(), of_mixture()
    uses = planned_uses_of(asked, 8, 0)
    assert uses is not None
    for epoch in range(3):
        for sampler in (asked, other):
            sampler.set_epoch(epoch)
        assert uses.prepare(epoch)
        for step, (batch, expected) in enumerate(zip(asked, other, strict=True)):
            assert batch == expected
            uses.of(epoch, step, samples_of(batch))
            assert asked.state_dict() == other.state_dict()


def test_an_order_that_is_known_for_one_epoch_alone_has_no_next_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def of_random() -> Any:
        order = RandomSampler(LENGTHS.tolist(), generator=torch.Generator().manual_seed(3))
        return of_rank(0, {"sampler": order, "strategy": "sequential"})

    asked, other = of_random(), of_random()
    uses = planned_uses_of(asked, 8, 0)
    assert uses is not None
    assert not uses.prepare(0)
    assert list(asked) == list(other)


def test_blocks_have_no_next_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    blocks = BlockwiseSizeAwareBatchSampler(
        lambda shard: LENGTHS[100 * shard : 100 * shard + 100], 400, lengths=[100] * 12, block=400,
        num_replicas=8, rank=0,
    )  # fmt: skip
    assert planned_uses_of(blocks, 8, 0) is None
