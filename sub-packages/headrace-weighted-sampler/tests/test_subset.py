"""Parts of sources with which a short run repeats its data as the full run does."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset

from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler, repetition_matched_subset

sizes_of_sources = st.lists(st.integers(8, 400), min_size=1, max_size=5)


@pytest.mark.filterwarnings("ignore:.*so few samples:UserWarning")
@given(sizes_of_sources, st.fractions(Fraction(1, 30), 1), st.fractions(Fraction(1, 30), 1), st.integers(0, 2**64 - 1))
def test_a_part_is_a_share_of_each_source_and_holds_smaller_parts(
    sizes: list[int], fraction: Fraction, other: Fraction, seed: int
) -> None:
    data = NamedConcatDataset({f"s{number}": range(size) for number, size in enumerate(sizes)})
    part = repetition_matched_subset(data, fraction, seed=seed)
    assert list(part) == list(data.names)
    begin = 0
    for size, indices in zip(sizes, part.values(), strict=True):
        assert abs(len(indices) - size * fraction) <= 0.5 or len(indices) == 1
        assert (np.diff(indices) > 0).all()
        assert begin <= indices[0]
        assert indices[-1] < begin + size
        begin += size
    smaller, larger = sorted([fraction, other])
    inner = repetition_matched_subset(data, smaller, seed=seed)
    outer = repetition_matched_subset(data, larger, seed=seed)
    assert all(set(inner[name]) <= set(outer[name]) for name in part)


def test_each_source_makes_as_many_passes_as_in_the_full_run() -> None:
    lengths = np.random.default_rng(0).integers(50, 500, 33_600)
    data = NamedConcatDataset({"web": range(32_000), "books": range(1_280), "code": range(320)})
    weights, draws = {"web": 0.5, "books": 0.3, "code": 0.2}, 64_000
    part = repetition_matched_subset(data, 1 / 16, sizes=lengths)
    small = NamedConcatDataset({name: Subset(data, indices.tolist()) for name, indices in part.items()})
    chosen = np.concatenate(list(part.values()))
    full = WeightedDistributedSampler(data, weights, per="token", sizes=lengths, epoch_length=draws).report()
    short = WeightedDistributedSampler(
        small, weights, per="token", sizes=lengths[chosen], epoch_length=draws // 16
    ).report()
    unmatched = WeightedDistributedSampler(data, weights, epoch_length=draws // 16).report()
    for before, after, other in zip(full.sources, short.sources, unmatched.sources, strict=True):
        passes = before.draws / before.size
        assert after.draws / after.size == pytest.approx(passes, rel=0.02)
        assert other.draws / other.size < 0.1 * passes
    for begin, end, indices in zip([0, *data.cumulative_sizes], data.cumulative_sizes, part.values(), strict=False):
        assert abs(lengths[indices].sum() - lengths[begin:end].sum() / 16) <= 250  # half of the longest
    assert [small[number] for number in (0, 2000, 2080)] == [data[int(chosen[number])] for number in (0, 2000, 2080)]


def test_all_of_the_data_and_sources_without_names() -> None:
    data = ConcatDataset[int]([Subset(range(10), range(10)), Subset(range(20), range(20))])  # type: ignore[arg-type]
    part = repetition_matched_subset(data, 1)
    assert {name: indices.tolist() for name, indices in part.items()} == {0: list(range(10)), 1: list(range(10, 30))}


def test_a_source_with_too_few_samples_keeps_one_and_is_named() -> None:
    data = NamedConcatDataset({"web": range(1000), "tiny": range(5)})
    with pytest.warns(UserWarning, match=r"'tiny' \(1 of 5\): so few samples repeat otherwise"):
        part = repetition_matched_subset(data, 1 / 16)
    assert len(part["tiny"]) == 1


@pytest.mark.parametrize(
    ("dataset", "fraction", "error"),
    [
        (NamedConcatDataset({"a": range(9)}), True, "fraction must be a number above 0 and at most 1, got True"),
        (range(10), 0.5, "dataset must have cumulative_sizes"),
        (NamedConcatDataset({"a": range(9)}), "half", "fraction must be a number above 0 and at most 1, got 'half'"),
        (NamedConcatDataset({"a": range(9)}), 0, "fraction must be above 0 and at most 1, got 0"),
        (NamedConcatDataset({"a": range(9)}), 1.5, "fraction must be above 0 and at most 1, got 1.5"),
    ],
)
def test_other_arguments_are_refused(dataset: object, fraction: float, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        repetition_matched_subset(dataset, fraction)
