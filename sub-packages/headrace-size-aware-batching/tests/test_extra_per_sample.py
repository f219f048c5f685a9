"""What each sample has beside its size, such as special tokens: counted everywhere, and not part of a piece's place."""

from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from doors import sampler_with
from hypothesis import given
from hypothesis import strategies as st
from strategies_of_sizes import examples

from headrace.size_aware_batching import (
    BlockwiseSizeAwareBatchSampler,
    DistributedSizeAwareBatchSampler,
    Piece,
    SplitDataset,
    run_worst_batches,
)
from headrace.size_aware_batching.planning.options import STRATEGIES

SIZES = np.random.default_rng(1).integers(0, 60, 150)
GRAPHS = np.stack([SIZES, SIZES[::-1]], axis=1)
WAYS: dict[str, dict[str, Any]] = {
    **{strategy: {"strategy": strategy} for strategy in STRATEGIES},
    "padded": {"cost": "padded", "length_multiple": 8},
    "shapes": {"cost": "padded", "shapes": 3},
    "curriculum": {"curriculum": 5},
    "skip": {"oversize": "skip", "max_total_size": 55},
    "optimizer steps": {"tokens_per_step": 800},
    "padded optimizer steps": {"tokens_per_step": 800, "cost": "padded"},
    "plan cache": {"plan_cache": "plans"},
    "labels": {"by": SIZES % 3},
}


def made(sizes: Any = SIZES, **options: Any) -> Any:
    return sampler_with(sizes, options.pop("max_total_size", 100), **{"num_replicas": 2, "rank": 1, **options})


@pytest.fixture(autouse=True)
def _folder_of_its_own(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("longest", [None, 40, 41.0])
@pytest.mark.parametrize("way", WAYS)
def test_the_plan_is_that_of_sizes_with_the_extra(way: str, longest: float | None) -> None:
    options = {**WAYS[way], "max_length": longest}
    with_extra, larger = made(extra_per_sample=3, **options), made(SIZES + 3, **options)
    for epoch in range(2):
        with_extra.set_epoch(epoch)
        larger.set_epoch(epoch)
        assert list(with_extra) == list(larger)
        assert with_extra.report() == larger.report()
    assert with_extra.sizes.tolist() == SIZES.tolist()
    assert with_extra.plan().sizes.tolist() == np.minimum(SIZES + 3, longest or np.inf).tolist()
    assert with_extra.skipped_indices.tolist() == larger.skipped_indices.tolist()


@pytest.mark.filterwarnings("ignore:.* are left out")
@pytest.mark.parametrize("longest", [None, 40])
def test_blocks_count_it(longest: int | None) -> None:
    shards = [SIZES[:50].astype(np.uint8), SIZES[50:].astype(np.uint8)]

    def blocks(parts: Any, **options: Any) -> Any:
        return BlockwiseSizeAwareBatchSampler(
            parts, 300, block=60, max_length=longest, num_replicas=1, rank=0, **options
        )

    assert list(blocks(shards, extra_per_sample=250, oversize="skip")) == list(
        blocks([part.astype(int) + 250 for part in shards], oversize="skip")
    )
    state = blocks(shards, extra_per_sample=2).state_dict()
    blocks(shards, extra_per_sample=2).load_state_dict(state)
    for other in ({}, {"extra_per_sample": 3}):
        with pytest.raises(ValueError, match="differs in extra_per_sample"):
            blocks(shards, **other).load_state_dict(state)


def test_each_column_has_its_own() -> None:
    options: dict[str, Any] = {"max_total_size": (120, 130), "max_length": (None, 40)}
    with_extra, larger = (
        made(GRAPHS, extra_per_sample=(2, 0.5), **options),
        made(GRAPHS + np.array([2, 0.5]), **options),
    )
    assert list(with_extra) == list(larger)
    assert with_extra.extra_per_sample == (2, 0.5)
    for extra in (2, (2,), [2, 0, 0]):
        with pytest.raises(ValueError, match="extra_per_sample must have one number for each of the 2 columns"):
            made(GRAPHS, extra_per_sample=extra, **options)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.uint32, np.int64, np.float64])
def test_sums_do_not_overflow(dtype: Any) -> None:
    largest = 2**40 if dtype in (np.int64, np.float64) else np.iinfo(dtype).max
    plan = made(np.array([5, largest], dtype), max_total_size=2**50, extra_per_sample=2).plan()
    assert plan.sizes.tolist() == [7, largest + 2]
    assert made(np.array([5], dtype), extra_per_sample=2).plan().sizes.dtype == dtype


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        (-1, ValueError, "extra_per_sample must be a number >= 0 and below .*, got -1"),
        (float("inf"), ValueError, "extra_per_sample must be a number >= 0 and below .*, got inf"),
        (float("nan"), ValueError, "extra_per_sample must be a real number, got NaN"),
        ("2", TypeError, "extra_per_sample must be a real number, got '2'"),
        ((2, 0), ValueError, r"extra_per_sample must be a single number for sizes of one column, got \(2, 0\)"),
    ],
)
def test_other_values_are_refused(extra: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        made(extra_per_sample=extra)


def test_sizes_that_become_too_large_are_refused() -> None:
    with pytest.raises(ValueError, match=r"extra_per_sample must leave sizes below 2\*\*62, got 2 beside a size of"):
        made([2**62 - 1], max_total_size=float("inf"), extra_per_sample=2)


def test_an_error_names_it_beside_the_size_that_it_makes_too_large() -> None:
    with pytest.raises(ValueError, match=r"sample 1 has size 101, extra_per_sample=2 included"):
        made([5, 99], extra_per_sample=2)


@examples(60)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=40),
    st.integers(5, 80),
    st.integers(0, 4),
    st.sampled_from(["sum", "padded"]),
    st.one_of(st.none(), st.integers(5, 100)),
)
def test_each_piece_has_it(sizes: list[int], budget: int, extra: int, cost: Any, longest: int | None) -> None:
    sampler = made(
        sizes,
        max_total_size=budget,
        extra_per_sample=extra,
        oversize="split",
        cost=cost,
        max_length=longest,
        tail="pad",
        num_replicas=1,
        rank=0,
    )
    covered = [0] * len(sizes)
    most = min(budget, longest or budget)
    for batch in sampler:
        counted = [(key.length if isinstance(key, Piece) else sizes[key]) + extra for key in batch]
        assert max(counted) <= most
        assert (sum(counted) if cost == "sum" else len(counted) * max(counted)) <= budget
        for key in batch:
            covered[int(key)] += key.length if isinstance(key, Piece) else sizes[key]
            assert not isinstance(key, Piece) or (
                key.size == sizes[int(key)] and key.length in (most - extra, key.size - key.start)
            )
    assert covered == sizes
    plan, report = sampler.plan(), sampler.report()
    assert report.size == sum(sizes) + extra * len(plan.indices)
    assert report.largest <= budget
    assert report.over_budget == 0


def test_pieces_are_read_from_samples_without_it() -> None:
    data = SplitDataset([list(range(10)), [7]])
    sampler = made([10, 1], max_total_size=6, extra_per_sample=2, oversize="split", num_replicas=1, rank=0)
    parts = [sample for batch in sampler for sample in data.__getitems__(batch)]
    assert sorted(chain.from_iterable(parts)) == sorted([*range(10), 7])
    assert max(map(len, parts)) == 4


@pytest.mark.parametrize("options", [{}, {"max_length": 2}])
def test_a_budget_without_room_for_a_piece_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"oversize='split' needs room for a piece of size 1, .*extra_per_sample=2"):
        made([10, 1], extra_per_sample=2, oversize="split", **{"max_total_size": 2, **options})


def test_pieces_share_work_by_their_sizes() -> None:
    options: dict[str, Any] = {"oversize": "split", "work": [10.0, 1.0, 1.0], "num_replicas": 1, "rank": 0}
    sampler = made([10, 1, 1], max_total_size=7, extra_per_sample=2, **options)
    assert sampler.report().imbalance == 1
    assert sampler.plan().lengths is not None


def test_a_state_names_it_and_a_resume_accepts_it() -> None:
    whole = made(extra_per_sample=2)
    batches = iter(whole)
    begun = list(islice(batches, 3))
    state, rest = whole.state_dict(), list(batches)
    same = made(extra_per_sample=np.int64(2))
    same.load_state_dict(state)
    assert list(same) == rest
    for extra in (None, 3):
        other = made(extra_per_sample=extra)
        with pytest.raises(
            ValueError, match=r"differs in extra_per_sample.* \(extra_per_sample=2\), go on with accept"
        ):
            other.load_state_dict(state)
        other.load_state_dict(state, accept="extra_per_sample")
        after = list(other)
        assert all(SIZES[batch].sum() + (extra or 0) * len(batch) <= 100 for batch in after)
        assert other.extra_per_sample == (extra or 0,)
        other.set_epoch(1)
        fresh = made(extra_per_sample=extra)
        fresh.set_epoch(1)
        assert list(other) == list(fresh)
        assert list(other.step(1))[1] == begun[1]
        again = made(extra_per_sample=extra)
        again.load_state_dict(other.state_dict())
        assert list(again.step(1))[1] == begun[1]


def test_a_run_without_it_accepts_it_later() -> None:
    before = made(num_replicas=1, rank=0)
    begun = list(islice(before, 3))
    other = made(extra_per_sample=2, num_replicas=1, rank=0)
    with pytest.raises(ValueError, match="differs in extra_per_sample"):
        other.load_state_dict(before.state_dict())
    other.load_state_dict(before.state_dict(), accept={"extra_per_sample"})
    rest = list(other)
    assert sorted(chain.from_iterable(begun + rest)) == list(range(len(SIZES)))
    assert all(SIZES[batch].sum() + 2 * len(batch) <= 100 for batch in rest)


def test_without_it_the_fingerprint_is_as_ever() -> None:
    plain = made().fingerprint
    assert {made(extra_per_sample=extra).fingerprint for extra in (None, 0, 0.0, [0])} == {plain}
    assert (
        made(GRAPHS, max_total_size=(120, 130)).fingerprint
        == made(GRAPHS, max_total_size=(120, 130), extra_per_sample=(0, 0)).fingerprint
    )
    assert len({made(extra_per_sample=extra).fingerprint for extra in (2, 2.0, np.int16(2), (2,))}) == 1
    assert len({made(extra_per_sample=extra).fingerprint for extra in (0, 1, 2)}) == 3


def test_a_batch_that_runs_out_of_memory_is_named_with_it() -> None:
    sampler = DistributedSizeAwareBatchSampler([10, 10, 1], 30, extra_per_sample=5, num_replicas=1, rank=0)
    model = torch.nn.Linear(1, 1)

    def step(_batch: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError, match="2 samples, largest 15, sum 21, does not fit"):
        run_worst_batches(sampler, lambda _: None, step, model=model, optimizer=torch.optim.SGD(model.parameters()))
