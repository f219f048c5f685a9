"""Figures for a logger: the batch sampler has the sizes, not the loader, and sources are mixed by tokens."""

from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, PaddedCollate, SplitDataset
from headrace.webdatamodule import DistributedBatchSampler, MapDataModule, ResumableLoader
from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler

LENGTHS = [1 + 37 * number % 90 for number in range(300)]
TEXTS = [torch.ones(length) for length in LENGTHS]
PADDED: dict[str, Any] = {"max_total_size": 500, "strategy": "bucketed", "cost": "padded"}


def read(loader: ResumableLoader) -> dict[str, float]:
    """The figures of an epoch, beside what the batches really hold."""
    assert loader.metrics() == {}
    cells = float(sum(batch.numel() for batch in loader))
    return {**loader.metrics(), "cells": cells}


@pytest.mark.parametrize("made", ["given", "function"])
def test_a_loader_takes_the_sizes_of_its_batch_sampler(made: str) -> None:
    sampler = partial(DistributedSizeAwareBatchSampler, LENGTHS, **PADDED)

    def made_for(count: int, rank: int) -> Any:
        return sampler(num_replicas=count, rank=rank)

    batches = made_for(1, 0) if made == "given" else made_for
    loader = ResumableLoader(TEXTS, batches, collate_fn=PaddedCollate(), num_replicas=1, rank=0)
    steps = len(loader)
    found = read(loader)
    assert found["data/padding"] == pytest.approx(1 - sum(LENGTHS) / found["cells"])
    assert found["data/fill"] == pytest.approx(found["cells"] / (steps * 500))
    ratio = found["data/tokens_per_second"] / found["data/samples_per_second"]
    assert ratio == pytest.approx(np.mean(LENGTHS))
    assert loader.report().fill == pytest.approx(sum(LENGTHS) / found["cells"])


@pytest.mark.parametrize("module", [False, True])
def test_a_truncated_sample_counts_as_long_as_it_is_delivered(module: bool) -> None:
    sampler: Any = partial(DistributedSizeAwareBatchSampler, max_length=40, **PADDED)
    collate = PaddedCollate(max_length=40)
    if module:
        data = MapDataModule({"train": TEXTS}, batch_sampler=sampler, sizes=LENGTHS, collate_fn=collate)
        data.setup("fit")
        loader = data.train_dataloader()
    else:
        loader = ResumableLoader(TEXTS, sampler(LENGTHS), collate_fn=collate)
    found = read(loader)
    assert found["data/fill"] <= 1
    ratio = found["data/tokens_per_second"] / found["data/samples_per_second"]
    assert ratio == pytest.approx(np.minimum(LENGTHS, 40).mean())


@pytest.mark.parametrize("cost", ["sum", "padded"])
def test_the_fill_is_that_of_the_budget_that_is_filled_most(cost: Any) -> None:
    sizes = np.stack([LENGTHS, 2 * np.array(LENGTHS)], axis=1)
    options: dict[str, Any] = {"cost": cost, "extra_per_sample": (0, 3), "max_length": (None, 150)}
    batches = DistributedSizeAwareBatchSampler(sizes, (900, 1000), num_replicas=1, rank=0, **options)
    loader = ResumableLoader(range(len(LENGTHS)), batches, collate_fn=list)
    for _ in loader:
        pass
    found, report = loader.metrics(), batches.report()
    assert found["data/fill"] == pytest.approx(report.fill)
    assert report.fills[0] < report.fill == report.fills[1]
    ratio = found["data/tokens_per_second"] / found["data/samples_per_second"]
    assert ratio == pytest.approx(np.mean(LENGTHS)), "the first column counts tokens"


@pytest.mark.parametrize("long", [{}, {"oversize": "split", "max_length": 20}])
def test_special_tokens_count(long: dict[str, Any]) -> None:
    batches: Any = DistributedSizeAwareBatchSampler(LENGTHS, extra_per_sample=2, **{**PADDED, **long})
    pad = PaddedCollate()
    data = SplitDataset(TEXTS)
    loader = ResumableLoader(
        data, batches, collate_fn=lambda texts: pad([torch.nn.functional.pad(t, (1, 1)) for t in texts])
    )
    found = read(loader)
    n_samples = sum(map(len, batches.plan()))
    tokens = sum(LENGTHS) + 2 * n_samples
    assert found["data/fill"] == pytest.approx(found["cells"] / (len(loader) * 500))
    assert found["data/padding"] == pytest.approx(1 - tokens / found["cells"])
    assert found["data/tokens_per_second"] / found["data/samples_per_second"] == pytest.approx(tokens / n_samples)


@pytest.mark.parametrize(("before", "now"), [(None, 2), (2, None), (2, 1)])
def test_forgotten_special_tokens_count_from_a_resume_on(before: Any, now: Any) -> None:
    def loader(extra: Any) -> ResumableLoader:
        batches: Any = DistributedSizeAwareBatchSampler(LENGTHS, 500, extra_per_sample=extra, num_replicas=1, rank=0)
        return ResumableLoader(range(len(LENGTHS)), batches, collate_fn=list)

    begun, other = loader(before), loader(now)
    seen = [*chain(*islice(begun, 3))]
    with pytest.raises(ValueError, match="differs in extra_per_sample"):
        other.load_state_dict(begun.state_dict())
    other.load_state_dict(begun.state_dict(), accept={"extra_per_sample"})
    rest = list(other)
    assert sorted(chain(seen, *rest)) == list(range(len(LENGTHS)))
    assert all(sum(LENGTHS[index] + (now or 0) for index in batch) <= 500 for batch in rest)
    again = loader(now)
    again.load_state_dict(other.state_dict())
    again.set_epoch(1)
    other.set_epoch(1)
    assert list(again) == list(other)


def test_pieces_of_long_samples_count_by_their_own_length() -> None:
    batches = DistributedSizeAwareBatchSampler(LENGTHS, 500, max_length=40, oversize="split")
    loader = ResumableLoader(SplitDataset(TEXTS), batches, collate_fn=torch.cat)
    tokens = sum(len(batch) for batch in loader)
    figures = loader.metrics()
    assert tokens == sum(LENGTHS)
    assert figures["data/fill"] == pytest.approx(tokens / (len(loader) * 500))


def test_sources_mixed_by_tokens_have_their_token_shares_in_the_figures() -> None:
    both = NamedConcatDataset({"short": [torch.ones(5)] * 600, "long": [torch.ones(50)] * 100})
    sizes = [5] * 600 + [50] * 100
    mixture = WeightedDistributedSampler(
        both, {"short": 3, "long": 1}, per="token", sizes=sizes, epoch_length=500, num_replicas=1, rank=0
    )
    batches = DistributedSizeAwareBatchSampler(sizes, 500, sampler=mixture, num_replicas=1, rank=0)
    loader = ResumableLoader(both, batches, collate_fn=torch.cat)
    for _ in loader:
        pass
    figures = loader.metrics()
    assert figures["data/token_share/short"] == pytest.approx(0.75, abs=0.02)
    assert figures["data/token_share/long"] == pytest.approx(0.25, abs=0.02)
    assert figures["data/share/short"] > 0.95
    report = loader.report()
    assert report.tokens is not None
    assert report.tokens["short"] / sum(report.tokens.values()) == pytest.approx(figures["data/token_share/short"])
    assert "of the tokens" in str(report)


@pytest.mark.parametrize("per", ["sample", "token"])
@pytest.mark.parametrize("by_size", [False, True])
def test_the_share_that_was_asked_for_stands_beside_the_delivered_one(per: Any, by_size: bool) -> None:
    data = NamedConcatDataset({"web": TEXTS[:200], "books": TEXTS[200:]})
    options: dict[str, Any] = {"per": "token", "sizes": LENGTHS} if per == "token" else {}
    options |= {"weights": {"web": 3, "books": 1}, "schedule": [(400, {"web": 1, "books": 1})]}
    mixture = WeightedDistributedSampler(
        data, epoch_length=800, num_replicas=1, rank=0, semantics="proportion", **options
    )
    batches: Any
    if by_size:
        batches = DistributedSizeAwareBatchSampler(LENGTHS, sampler=mixture, num_replicas=1, rank=0, **PADDED)
    else:
        batches = DistributedBatchSampler(len(data), 8, sampler=mixture, num_replicas=1, rank=0)
    loader = ResumableLoader(data, batches, sizes=LENGTHS, collate_fn=PaddedCollate())
    figures = read(loader)
    report = loader.report()
    assert report.asked is not None
    of, asked = report.asked
    assert of == per
    assert asked["web"] == pytest.approx(0.625, abs=0.01)
    name, delivered = ("asked_share", "share") if per == "sample" else ("asked_token_share", "token_share")
    for source in ("web", "books"):
        assert figures[f"data/{name}/{source}"] == asked[source]
        assert figures[f"data/{delivered}/{source}"] == pytest.approx(asked[source], abs=0.01)
        assert f"{asked[source]:.1%} asked for" in str(report)
