"""Long samples in pieces: laws of the samplers' plans, the dataset that reads pieces, and the two together."""

import pickle
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from doors import sampler_with
from hypothesis import given
from hypothesis import strategies as st
from strategies_of_sizes import examples
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from headrace.size_aware_batching import (
    BucketBatchSampler,
    DistributedSizeAwareBatchSampler,
    PackedCollate,
    PaddedCollate,
    Piece,
    SizeAwareBatchSampler,
    SplitDataset,
    plan_step,
    run_worst_batches,
)
from headrace.size_aware_batching.planning.options import STRATEGIES

SIZES = np.random.default_rng(1).integers(1, 300, 150)


def made(sizes: Any = SIZES, budget: float = 64, **options: Any) -> Any:
    return sampler_with(sizes, budget, oversize="split", **{"cost": "sum", **options})


def span(key: Any, sizes: Any) -> tuple[int, int, int]:
    if isinstance(key, Piece):
        assert key.size == sizes[key.index]
        assert 0 < key.length < key.size
        return key.index, key.start, key.stop
    return key, 0, int(sizes[key])


def refuse_gaps(batches: Iterable[Sequence[Any]], sizes: Any, times: int = 1) -> None:
    """Every element of every sample is there so many times."""
    covered = [np.zeros(int(size), int) for size in sizes]
    seen = Counter[int]()
    for batch in batches:
        for key in batch:
            index, start, stop = span(key, sizes)
            covered[index][start:stop] += 1
            seen[index] += 1
    assert set(seen) == set(range(len(sizes)))
    assert all((each == times).all() for each in covered)


def lengths_of(batch: Sequence[Any], sizes: Any) -> list[int]:
    return [stop - start for _, start, stop in (span(key, sizes) for key in batch)]


@pytest.mark.slow
@examples(75)
@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=60),
    st.integers(1, 120),
    st.sampled_from([("stratified", "sum"), ("packed", "sum"), ("sequential", "padded"), ("bucketed", "padded")]),
    st.sampled_from([1, 2, 5]),
    st.one_of(st.none(), st.integers(1, 150)),
    st.booleans(),
    st.integers(0, 2),
)
def test_the_pieces_of_all_ranks_cover_each_sample_once_within_the_budget(
    sizes: list[int], budget: int, way: Any, world: int, max_length: int | None, shuffle: bool, epoch: int
) -> None:
    options = {"strategy": way[0], "cost": way[1], "max_length": max_length, "shuffle": shuffle, "num_replicas": world}
    samplers = [made(sizes, budget, **options, rank=rank) for rank in range(world)]
    batches = []
    for sampler in samplers:
        sampler.set_epoch(epoch)
        with warnings.catch_warnings(record=True) as repeats:
            warnings.simplefilter("always")
            own = list(sampler)
        assert len(own) == len(sampler) == len(samplers[0])
        batches += own
    assert bool(repeats) == (len(samplers[0]) * world > len(samplers[0].plan(epoch).indices))
    if not repeats:  # there are pieces for all ranks of the last step
        refuse_gaps(batches, sizes)
    for batch in batches:
        found = lengths_of(batch, sizes)
        assert (sum(found) if way[1] == "sum" else len(found) * max(found)) <= budget
        assert max(found) <= (max_length or budget)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_the_plan_says_is_what_comes(strategy: Any) -> None:
    sampler = made(strategy=strategy)
    plan, batches = sampler.plan(), list(sampler)
    assert [plan.keys(number) for number in range(len(plan))] == batches
    assert [sampler.batch(number) for number in range(len(sampler))] == batches
    assert [plan[3:5].keys(number) for number in range(2)] == batches[3:5]
    assert [len(each) for each in plan] == [len(batch) for batch in batches]
    report = sampler.report()
    assert (report.samples, report.oversize, report.skipped) == (len(plan.indices), int((SIZES > 64).sum()), 0)
    assert report.over_budget == 0
    assert report.largest <= 64
    assert report.size == SIZES.sum()
    assert report.fill == pytest.approx(SIZES.sum() / len(plan) / 64)
    cut = [length for size in SIZES.tolist() for length in [64] * (size // 64) + [size % 64] * (size % 64 > 0)]
    alone = DistributedSizeAwareBatchSampler(cut, 64, strategy=strategy, cost="sum").report()
    assert replace(report, oversize=0) == alone, "as if the pieces were samples"
    assert sampler.oversize_indices.tolist() == np.flatnonzero(SIZES > 64).tolist()
    assert not len(sampler.skipped_indices)
    refuse_gaps(batches, SIZES)


def test_pieces_fill_the_budget_and_follow_one_another_in_order() -> None:
    found = list(made([10, 3, 0], 4, strategy="sequential", shuffle=False))
    rest = [Piece(0, 8, 10, 10)]
    assert found == [[Piece(0, 0, 4, 10)], [Piece(0, 4, 8, 10)], rest, [1, 2]]
    assert list(made([10, 3], 64)) == list(DistributedSizeAwareBatchSampler([10, 3], 64))


def test_plan_step_cuts_by_the_same_rule() -> None:
    plan = plan_step([10, 3, 0, 7], 4, num_replicas=1, oversize="split")
    found = sorted(
        (int(index), int(start), int(start + length))
        for index, start, length in zip(
            *(np.concatenate(each[0]) for each in (plan.micro_batches, plan.starts, plan.lengths)), strict=True
        )
    )
    keys = [key for batch in made([10, 3, 0, 7], 4) for key in batch]
    assert found == sorted(span(key, [10, 3, 0, 7]) for key in keys)


def test_max_length_is_the_longest_piece() -> None:
    sampler = made([100, 5, 33], 64, max_length=16)
    batches = list(sampler)
    refuse_gaps(batches, [100, 5, 33])
    assert Counter(length for batch in batches for length in lengths_of(batch, [100, 5, 33])) == {
        16: 8,
        4: 1,
        5: 1,
        1: 1,
    }
    assert sampler.oversize_indices.tolist() == [0, 2]


@pytest.mark.parametrize("given", [np.array([100.0, 5.0]), torch.tensor([100, 5]), np.array([100, 5], np.uint8)])
def test_whole_sizes_of_any_kind(given: Any) -> None:
    refuse_gaps(list(made(given, 33.9)), [100, 5])
    assert {length for batch in made(given, 33.9) for length in lengths_of(batch, [100, 5])} == {33, 1, 5}


@pytest.mark.parametrize(
    ("cost", "budget", "longest"),
    [("padded", 100, 96), (lambda n, largest: n * largest**2, 70**2, 64), (lambda n, largest: n * largest, 1e9, 299)],
)
def test_a_piece_is_the_largest_that_fits_by_any_cost(cost: Any, budget: float, longest: int) -> None:
    multiple = 8 if longest < 299 else 1
    sampler = made(SIZES, budget, cost=cost, strategy="bucketed", length_multiple=multiple)
    batches = list(sampler)
    refuse_gaps(batches, SIZES)
    assert max(length for batch in batches for length in lengths_of(batch, SIZES)) == longest
    assert sampler.report().over_budget == 0


def test_it_meets_the_other_options() -> None:
    padded = {"strategy": "bucketed", "cost": "padded"}
    several: list[dict[str, Any]] = [
        {"max_items": 2},
        padded | {"curriculum": 20},
        padded | {"shapes": 4},
        padded | {"batch_size_multiple": 2},
        {"tokens_per_step": 500},
        {"work": SIZES**2},
        {"window": 10},
        {"rank": "all", "num_replicas": 3},
    ]
    for options in several:
        sampler = made(**options)
        refuse_gaps(list(sampler), SIZES)
        report = sampler.report()
        assert report.over_budget == 0
        assert report.imbalance < 2
    assert max(map(len, made(max_items=2))) == 2


def test_work_is_split_with_its_sample() -> None:
    plan = made([10, 5], 5, work=[20, 3], num_replicas=1, rank=0).plan()
    assert plan.report(3).imbalance == pytest.approx(10 / (23 / 3))


def test_optimizer_steps_hold_pieces() -> None:
    steps: list[list[list[Any]]] = []
    for rank in range(2):
        sampler = made(budget=100, max_length=25, tokens_per_step=1000, num_replicas=2, rank=rank)
        own = list(sampler.optimizer_steps(sampler))
        steps = own if not steps else [a + b for a, b in zip(steps, own, strict=True)]
    refuse_gaps([batch for step in steps for batch in step], SIZES)
    totals = [sum(sum(lengths_of(batch, SIZES)) for batch in step) for step in steps]
    assert all(abs(total - 1000) <= 25 for total in totals[:-1])


class Repeats:
    """An order that draws samples repeatedly and can be sliced."""

    epoch_length = 40

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def take(self, start: int, stop: int) -> Any:
        return np.tile([3, 1, 0, 3], 10)[start:stop]


@pytest.mark.parametrize("strategy", ["sequential", "stratified"])
def test_an_order_gives_all_pieces_of_each_sample_it_names(strategy: Any) -> None:
    sizes = [100, 5, 33, 70]
    batches = list(made(sizes, 64, sampler=Repeats(), strategy=strategy))
    flat = Counter(key for batch in batches for key in batch)
    assert flat == {
        1: 10,
        Piece(0, 0, 64, 100): 10,
        Piece(0, 64, 100, 100): 10,
        Piece(3, 0, 64, 70): 20,
        Piece(3, 64, 70, 70): 20,
    }
    refuse_gaps(list(made(sizes, 64, sampler=[3, 2, 1, 0], strategy=strategy)), sizes)
    if strategy == "sequential":
        first = list(made(sizes, 64, sampler=[3, 2, 1, 0], strategy=strategy))[:2]
        assert first == [[Piece(3, 0, 64, 70)], [Piece(3, 64, 70, 70), 2, 1]]


def test_ranks_that_repeat_pieces_name_them() -> None:
    sampler = made([9], 4, num_replicas=4, rank=0)
    with pytest.warns(
        UserWarning, match=r"samples are repeated on 1 rank: \[Piece\(index=0, start=\d, stop=\d, size=9\)\]"
    ):
        list(sampler)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ([[9, 1], [1, 1]], {"budget": (4, 4)}, r"needs sizes of shape \[n\], got \(2, 2\)"),
        ([9.5, 1], {"budget": 4}, "needs whole sizes, got float64 with fractions"),
        ([9, 1], {"budget": 0.5}, "needs room for a piece of size 1, got max_total_size=0.5"),
        ([9, 1], {"budget": 4, "max_length": 0.5}, "needs room for a piece of size 1, got max_length=0.5"),
        ([9, 1], {"budget": 4, "cost": "padded", "length_multiple": 8, "strategy": "bucketed"}, "room for a piece"),
        ([2**60, 1], {"budget": 4}, "would make 2.88e[+]17 pieces of size 4"),
    ],
)
def test_what_cannot_be_cut_is_refused(sizes: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"oversize='split' {message}" if message[:4] != "room" else message):
        made(sizes, **options)


def test_the_error_of_a_long_sample_names_the_policy() -> None:
    with pytest.raises(ValueError, match="choose oversize='split', 'skip' or 'own_batch'"):
        DistributedSizeAwareBatchSampler([9], 4)


def test_a_sampler_is_pickled_and_its_pieces_are_hashable() -> None:
    sampler = made()
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)
    piece = Piece(1, 2, 5, 9)
    assert {piece: int(piece)} == {pickle.loads(pickle.dumps(piece)): 1}


# In order, one pass.


def test_a_sampler_in_order_splits() -> None:
    sizes = [3, 10, 0, 2]
    batches = list(SizeAwareBatchSampler(range(4), sizes, 4, oversize="split"))
    assert batches == [[0], [Piece(1, 0, 4, 10)], [Piece(1, 4, 8, 10)], [Piece(1, 8, 10, 10), 2, 3]]
    with pytest.raises(ValueError, match="oversize='split' needs whole sizes, got inf at index 1"):
        list(SizeAwareBatchSampler(range(2), [3, np.inf], 4, oversize="split"))
    with pytest.raises(ValueError, match=r"needs room for a piece of size 1, got max_total_size=0\.5"):
        SizeAwareBatchSampler(range(2), sizes, 0.5, oversize="split")


def test_buckets_split() -> None:
    options = {"max_total_size": 64, "sizeof": SIZES, "oversize": "split"}
    batches = list(BucketBatchSampler(SIZES, [0, 100, 300], SizeAwareBatchSampler, options))
    refuse_gaps(batches, SIZES)


# The dataset.


class Documents:
    """Dicts as a tokenizer makes them; counts what is read."""

    def __init__(self, sizes: Any = SIZES) -> None:
        self.sizes = sizes
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        ids = torch.arange(int(self.sizes[index])) + 1000 * index
        return {"ids": ids, "labels": ids.tolist(), "doc": index, "name": f"document {index}"}


class AtOnce(Documents):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [Documents, AtOnce])
def test_a_batch_reads_a_long_sample_once(kind: Any) -> None:
    documents = kind([10, 2])
    data = SplitDataset(documents)
    found = data.__getitems__([Piece(0, 4, 8, 10), 1, Piece(0, 8, 10, 10), 1])
    assert documents.read == [0, 1, 1]
    assert [sample["ids"].tolist() for sample in found] == [[4, 5, 6, 7], [1000, 1001], [8, 9], [1000, 1001]]
    assert [sample["labels"] for sample in found] == [[4, 5, 6, 7], [1000, 1001], [8, 9], [1000, 1001]]
    assert [(s["doc"], s["name"], s["piece_start"]) for s in found] == [
        (0, "document 0", 4),
        (1, "document 1", 0),
        (0, "document 0", 8),
        (1, "document 1", 0),
    ]
    assert len(data) == 2
    assert data.sizes == [10, 2], "the attributes of the dataset"
    assert not hasattr(data, "fingerprint")


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (torch.arange(12).reshape(6, 2), [[4, 5], [6, 7]]),
        (np.arange(6), [2, 3]),
        ("abcdef", "cd"),
        (b"abcdef", b"cd"),
        (list("abcdef"), ["c", "d"]),
        ((torch.arange(6), 7, "ab"), ([2, 3], 7, "ab")),
        (
            {"a": "abcdef", "b": "abc", "__key__": "number"},
            {"a": "cd", "b": "abc", "__key__": "number", "piece_start": 2},
        ),
        ({"a": [1] * 6, "name": "abcdef"}, {"a": [1, 1], "name": "abcdef", "piece_start": 2}),
        ({"a": {"b": np.arange(6)}, "c": [1, 2]}, {"a": {"b": [2, 3]}, "c": [1, 2], "piece_start": 2}),
    ],
)
def test_what_has_the_size_of_the_sample_is_cut(sample: Any, expected: Any) -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        return value.tolist() if hasattr(value, "tolist") else value

    assert plain(SplitDataset([sample])[Piece(0, 2, 4, 6)]) == expected


def test_fields_are_named_and_kinds_of_ones_own_are_cut() -> None:
    sample = {"ids": [1, 2, 3], "classes": [7, 8, 9]}
    assert SplitDataset([sample], fields=["ids"], start=None)[Piece(0, 1, 3, 3)] == {
        "ids": [2, 3],
        "classes": [7, 8, 9],
    }
    of_range = SplitDataset([range(9)], cut=lambda whole, piece: whole[piece.start : piece.stop])
    assert (of_range[Piece(0, 2, 4, 9)], of_range[0]) == (range(2, 4), range(9))


def test_what_cannot_be_cut_is_named() -> None:
    piece = Piece(0, 0, 4, 9)
    with pytest.raises(ValueError, match=r"sample 0 must have something of length 9.*got a dict with \['ids'\] of 10"):
        SplitDataset([{"ids": [0] * 10, "n": 3}])[piece]
    with pytest.raises(
        ValueError, match=r"sample 0 must have something of length 9.*got a int with nothing that has a"
    ):
        SplitDataset([5])[piece]
    with pytest.raises(ValueError, match=r"must have fields \['labels'\] of length 9.*\['ids'\] of 9"):
        SplitDataset([{"ids": [0] * 9}], fields=["ids", "labels"])[piece]
    with pytest.raises(ValueError, match="sample 0 has a field 'piece_start' already: name another key"):
        SplitDataset([{"piece_start": 3}])[0]
    with pytest.raises(TypeError, match="fields must be a sequence of dict keys"):
        SplitDataset([5], fields="ids")
    with pytest.raises(TypeError, match="dataset must have len"):
        SplitDataset(iter([5]))
    with pytest.raises(TypeError, match="start must be a key"):
        SplitDataset([5], start=3)  # type: ignore[arg-type]  # the point
    with pytest.raises(TypeError, match="cut must be a function"):
        SplitDataset([5], cut=3)  # type: ignore[arg-type]  # the point


@pytest.mark.parametrize(
    "data", [[[1, 2, 3]], np.zeros((3, 3, 3, 3)), torch.zeros(3, 3, 3, 3), TensorDataset(torch.zeros(3))]
)
def test_a_dataset_that_does_not_know_pieces_raises(data: Any) -> None:
    with pytest.raises((TypeError, IndexError)):
        data[Piece(0, 0, 2, 3)]


# All together.


def tokens(batch: dict[str, Any]) -> list[int]:
    """What a batch holds, checked: a piece begins where it says, and its positions go on there."""
    expected = batch["ids"] % 1000
    assert torch.equal(batch["position_ids"], expected)
    assert torch.equal(expected[batch["cu_seqlens"][:-1].long()], batch["piece_start"])
    assert len(batch["doc"]) == len(batch["name"]) == len(batch["piece_start"]) == len(batch["cu_seqlens"]) - 1
    assert len(batch["ids"]) <= 64
    return list(batch["labels"].tolist())


ALL = sorted(1000 * index + at for index, size in enumerate(SIZES.tolist()) for at in range(size))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_delivers_every_token_once_at_its_position(workers: int) -> None:
    collate = PackedCollate(max_total_size=64)
    loader = DataLoader(SplitDataset(Documents()), batch_sampler=made(), collate_fn=collate, num_workers=workers)
    assert sorted(token for batch in loader for token in tokens(batch)) == ALL


@pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")  # torchdata calls it in its constructor
def test_a_stateful_loader_resumes_inside_a_document() -> None:
    def loader() -> Any:
        sampler = made(strategy="sequential")
        return StatefulDataLoader(SplitDataset(Documents()), batch_sampler=sampler, collate_fn=PackedCollate())

    running = loader()
    batches = iter(running)
    delivered = [token for _ in range(7) for token in tokens(next(batches))]
    state = running.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    assert sorted(delivered + [token for batch in resumed for token in tokens(batch)]) == ALL


def test_padded_batches_hold_pieces() -> None:
    sampler = made(cost="padded", strategy="bucketed", shapes=3)
    collate = PaddedCollate(max_total_size=64, shapes=sampler.shapes, return_lengths=True)
    loader = DataLoader(SplitDataset(Documents()), batch_sampler=sampler, collate_fn=collate)
    assert sum(int(batch["lengths"].sum()) for batch in loader) == SIZES.sum()


def test_the_worst_batches_run_with_their_pieces() -> None:
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    data, sampler, ran = SplitDataset(Documents()), made(), list[int]()

    def step(batch: Any) -> None:
        ran.append(len(batch["ids"]))
        layer(batch["ids"][:, None].float()).sum().backward()
        optimizer.step()

    def batches_of(keys: Any) -> Any:
        return PackedCollate()(data.__getitems__(keys))

    run_worst_batches(sampler, batches_of, step, model=layer, optimizer=optimizer, k=2)
    assert ran == [64, 64, 64]
