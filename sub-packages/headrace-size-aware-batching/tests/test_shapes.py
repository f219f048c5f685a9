"""Few shapes: how they are chosen, what every batch has of them, what they cost, and how often a model is compiled."""

from itertools import combinations, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies_of_sizes import Case, cases, examples
from test_laws import all_ranks, repeats, samples

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, PaddedCollate
from headrace.size_aware_batching.planning.options import TAILS, Tail
from headrace.size_aware_batching.planning.shapes import least_waste

LENGTHS = np.random.default_rng(0).lognormal(np.log(360), 0.8, 20_000).clip(8, 2048).astype(np.int64)
Shape = tuple[int, int]


def made(sizes: Any, budget: float, shapes: Any, **options: Any) -> DistributedSizeAwareBatchSampler:
    given: dict[str, Any] = {"strategy": "bucketed", "cost": "padded"} | options
    return DistributedSizeAwareBatchSampler(sizes, budget, shapes=shapes, **given)


def shape_of(batch: list[int], sizes: Any, shapes: tuple[Shape, ...] | None) -> Shape:
    """Return the shape that the collate function gives a batch."""
    samples = [torch.zeros(int(sizes[index])) for index in batch]
    count, length = PaddedCollate(shapes=shapes)(samples).shape
    return count, length


@repeats
@examples(40)
@given(
    cases(),
    st.integers(1, 20),
    st.integers(1, 9),
    st.sampled_from(TAILS[:2]),
    st.sampled_from([None, 7, 40]),
    st.integers(1, 4),
    st.integers(0, 3),
    st.booleans(),
)
def test_every_batch_has_one_of_the_shapes_none_over_the_budget_and_each_sample_comes_once(
    case: Case, most: int, world: int, tail: Tail, window: int | None, multiple: int, epoch: int, shuffle: bool
) -> None:
    sizes, budget = np.minimum(case[0], 3000), max(case[1], multiple)
    sizes = np.minimum(sizes, budget // multiple * multiple)
    options: dict[str, Any] = {
        "tail": tail,
        "window": window,
        "length_multiple": multiple,
        "batch_size_multiple": multiple,
        "shapes": most,
        "shuffle": shuffle,
    }
    sampler = made(sizes, budget, most, **{name: options[name] for name in options if name != "shapes"})
    shapes = sampler.shapes
    assert shapes is not None
    assert len(shapes) == len({length for _, length in shapes}) <= most
    assert all(count * length <= budget and length % multiple == 0 for count, length in shapes)
    assert all(count <= multiple or count % multiple == 0 for count, _ in shapes)
    sampler.set_epoch(epoch)
    state = sampler.state_dict()
    ranks = all_ranks((sizes, budget), ("bucketed", "padded"), world, state, **options)
    found = samples(ranks)
    assert set(found) == set(range(len(sizes)))
    if tail == "split" and len(sizes) >= len(ranks[0]) * world:
        assert set(found.values()) <= {1}
    for batch in (batch for batches in ranks for batch in batches):
        longest = int(sizes[batch].max())
        length = min(length for _, length in shapes if length >= longest)
        assert len(batch) <= {length: count for count, length in shapes}[length]


@examples(25)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=8, unique_by=lambda pair: pair[0]),
    st.integers(1, 9),
)
def test_the_choice_is_the_best_of_all(pairs: list[tuple[int, int]], most: int) -> None:
    weights, members = (np.array(column) for column in zip(*sorted(pairs), strict=True))

    def waste(tops: tuple[int, ...]) -> int:
        owner = np.searchsorted(np.array(tops), np.arange(len(weights)))
        return int((members * weights[np.array(tops)[owner]]).sum())

    last, count = len(weights) - 1, min(most, len(weights))
    best = min(waste((*tops, last)) for tops in combinations(range(last), count - 1))
    chosen = tuple(least_waste(members, weights.astype(float), most).tolist())
    assert len(chosen) == count
    assert waste(chosen) == best


def test_batches_are_as_full_as_without_the_limit() -> None:
    for budget in (4096, 16384):
        sampler = made(LENGTHS, budget, 16, num_replicas=1, rank=0)
        report = sampler.report()
        assert sampler.shapes is not None
        assert report.shapes == len(sampler.shapes) == 16
        assert report.fill > 0.97
        assert report.largest <= budget
        full = {length: count for count, length in sampler.shapes}
        short = [b for b in sampler if len(b) < full[min(n for n in full if n >= LENGTHS[b].max())]]
        assert len(short) <= 1  # one a window


@pytest.mark.slow
@pytest.mark.parametrize(("most", "cost"), [(4, 1.42), (8, 1.19), (16, 1.09), (32, 1.05), (10_000, 1.0)])
def test_the_report_says_what_the_limit_costs(most: int, cost: float) -> None:
    limited, free = made(LENGTHS, 16384, most), made(LENGTHS, 16384, None)
    report = limited.report()
    assert limited.shapes is not None
    given = {length: count for count, length in limited.shapes}
    padded = 0
    for batch in limited.plan():
        length = min(length for length in given if length >= LENGTHS[batch].max())
        padded += given[length] * length  # the rows that are filled up are padding, too
    assert report.padded == padded
    assert report.padding == pytest.approx(1 - LENGTHS.sum() / padded)
    assert report.shapes_cost == padded / free.report().padded
    assert report.shapes_cost <= cost
    assert np.isnan(limited.plan().report().shapes_cost)  # it was not compared
    assert free.report().shapes_cost == 1
    assert free.report().shapes == len({shape_of(b.tolist(), LENGTHS, None) for b in free.plan()})


def test_shapes_are_those_of_the_sizes_and_options_alone() -> None:
    first = made(LENGTHS, 16384, 8, seed=1)
    other = made(LENGTHS.astype(np.float32), 16384, 8, seed=2, num_replicas=4, rank=3, tail="drop")
    other.set_epoch(5)
    list(other)
    assert first.shapes == other.shapes
    assert made(LENGTHS, 16384, None).shapes is None
    assert made([], 16384, 4).shapes == ()


def test_a_cost_function_bounds_the_shapes_too() -> None:
    def needed(n: int, longest: int) -> float:
        return 1000 + 2 * n * longest + 0.01 * n * longest**2

    sampler = made(LENGTHS, 60_000, 12, cost=needed, max_items=64)
    assert sampler.shapes is not None
    assert all(needed(*shape) <= 60_000 and shape[0] <= 64 for shape in sampler.shapes)
    found = {shape_of(batch, LENGTHS, sampler.shapes) for batch in sampler}
    assert found <= set(sampler.shapes)
    report = sampler.report()
    assert report.largest == max(needed(*shape) for shape in found)


@pytest.mark.parametrize("tail", TAILS)
def test_an_order_that_repeats_samples_and_splits_by_work_keeps_to_the_shapes(tail: Tail) -> None:
    order = np.random.default_rng(1).integers(0, 500, 3000).tolist()
    options: dict[str, Any] = {"sampler": order, "window": 700, "work": LENGTHS, "tail": tail, "num_replicas": 7}
    samplers = [made(LENGTHS, 8192, 6, rank=rank, **options) for rank in range(7)]
    shapes = samplers[0].shapes
    assert shapes is not None
    delivered = [batch for sampler in samplers for batch in sampler]
    assert {shape_of(batch, LENGTHS, shapes) for batch in delivered} <= set(shapes)
    if tail == "split":
        assert sorted(index for batch in delivered for index in batch) == sorted(order)


def test_samples_that_are_left_out_or_cut_have_no_shape() -> None:
    sizes = np.append(LENGTHS, [50_000])
    skipping = made(sizes, 16384, 8, oversize="skip")
    assert skipping.shapes == made(LENGTHS, 16384, 8).shapes
    cut = made(LENGTHS, 16384, 8, max_length=512)
    assert cut.shapes is not None
    assert max(length for _, length in cut.shapes) == 512
    collate = PaddedCollate(shapes=cut.shapes, max_length=512)
    batch = next(iter(cut))
    assert tuple(collate([torch.zeros(int(LENGTHS[i])) for i in batch]).shape) in cut.shapes


def test_samples_without_length_have_a_shape() -> None:
    sampler = made([0, 0, 0, 5], 10, 1)
    assert sampler.shapes == ((2, 5),)
    empty = made([0, 0, 0], 2, 4)
    assert empty.shapes == ((2, 1),)
    assert sorted(i for batch in empty for i in batch) == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "stratified", "cost": "sum"}, "shapes=4 goes with cost='padded' or a function, got 'sum'"),
        ({"strategy": "sequential"}, "shapes=4 goes with strategy='bucketed', got 'sequential'"),
        ({"oversize": "own_batch"}, "shapes=4 goes with oversize='raise', 'skip' and 'split', got 'own_batch'"),
        ({"shapes": 0}, "shapes must be an int >= 1, got 0"),
        ({"sizes": [1.5, 2.0]}, "shapes=4 needs whole sizes, .* got 1.5 at index 0"),
        ({"sizes": [[1, 2]], "budget": (9, 9)}, r"shapes=4 needs one size a sample, got sizes of shape \(1, 2\)"),
    ],
)
def test_what_has_no_shapes_is_refused(options: dict[str, Any], message: str) -> None:
    options = {"sizes": LENGTHS, "budget": 16384, "shapes": 4, **options}
    with pytest.raises(ValueError, match=message):
        made(**options)


# The collate function.


def test_a_batch_is_padded_to_the_shortest_shape_that_holds_it() -> None:
    collate = PaddedCollate({"ids": 9, "y": 3}, shapes=[(2, 8), (4, 4), (8, 2)], return_mask=True, return_lengths=True)
    rows = [{"ids": torch.ones(n), "labels": [1] * n, "y": n / 2, "kind": 7, "name": "x"} for n in (1, 3, 2)]
    batch = collate(rows)
    assert batch["ids"].tolist() == [[1, 9, 9, 9], [1, 1, 1, 9], [1, 1, 9, 9], [9, 9, 9, 9]]
    assert batch["labels"].tolist()[2:] == [[1, 1, -100, -100], [-100] * 4]
    assert batch["attention_mask"].any(1).tolist() == [True, True, True, False]
    assert batch["lengths"].tolist() == [1, 3, 2, 0]
    assert batch["y"].tolist() == [0.5, 1.5, 1, 3]
    assert batch["kind"].tolist() == [7, 7, 7, 0]
    assert batch["name"] == ["x", "x", "x"]
    assert collate(rows[:1] * 5)["ids"].shape == (8, 2)
    with pytest.raises(ValueError, match=r"shapes must hold every batch, got 5 samples, the longest with 3.*\(4, 4\)"):
        collate(rows[1:2] * 5)
    assert collate.shapes == ((8, 2), (4, 4), (2, 8))  # by length


def test_all_fields_of_a_batch_get_one_shape() -> None:
    collate = PaddedCollate(shapes=[(2, 8), (4, 4)], fixed=["box"])
    batch = collate([{"source": [1] * 3, "target": [1] * 5, "box": [1.0, 2.0], "labels": 1}])
    assert batch["source"].shape == batch["target"].shape == (2, 8)
    assert batch["box"].tolist() == [[1, 2], [0, 0]]
    assert batch["labels"].tolist() == [1, -100]
    with pytest.raises(ValueError, match="max_total_size=10"):
        PaddedCollate(shapes=[(2, 8)], max_total_size=10)([torch.ones(1)])


@pytest.mark.parametrize("shapes", [5, "ab", [(1, 0)], [(0, 1)], [(1, 2, 3)], [(1.5, 2)], [3]])
def test_shapes_that_are_none_are_refused(shapes: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"in shapes|shapes must"):
        PaddedCollate(shapes=shapes)


def test_lengths_of_shapes_are_multiples_where_both_are_given() -> None:
    assert PaddedCollate(0, 4, shapes=[(2, 8)])([torch.ones(1)]).shape == (2, 8)
    with pytest.raises(ValueError, match="shapes must have lengths that are multiples of length_multiple=3, got 8"):
        PaddedCollate(0, 3, shapes=[(2, 8)])


# Shapes that are given.


@repeats
@examples(40)
@given(cases(), st.integers(1, 12), st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
def test_given_shapes_plan_as_those_that_were_chosen(
    case: Case, most: int, world: int, multiple: int, epoch: int
) -> None:
    sizes, budget = np.minimum(case[0], 3000), max(case[1], multiple)
    sizes = np.minimum(sizes, budget // multiple * multiple)
    options: dict[str, Any] = {"length_multiple": multiple, "batch_size_multiple": multiple}
    for rank in range(world):
        options |= {"num_replicas": world, "rank": rank}
        chosen = made(sizes, budget, most, **options)
        pairs = chosen.shapes or ()
        given = made(sizes, budget, [[*pair] for pair in reversed(pairs)], **options)
        assert given.shapes == pairs
        assert given.fingerprint == chosen.fingerprint
        for sampler in (chosen, given):
            sampler.set_epoch(epoch)
        assert [*given] == [*chosen]


def test_a_run_goes_on_with_shapes_that_were_given() -> None:
    lengths = LENGTHS[:600]
    before = made(lengths, 8192, 8)
    batches = [*islice(before, 5)]
    shapes = [(30, 256), (8, 1024), (4, 2048)]
    after = made(lengths, 8192, shapes)
    with pytest.raises(ValueError, match=r"differs in .*shapes"):
        after.load_state_dict(before.state_dict())
    after.load_state_dict(before.state_dict(), accept=["shapes"])
    rest = [*after]
    assert sorted(index for batch in [*batches, *rest] for index in batch) == [*range(600)]
    assert all(len(batch) <= 30 for batch in rest)
    again = made(lengths, 8192, shapes)
    again.load_state_dict(after.state_dict())
    assert again.step(2) == [batches[2]]
    assert again.step(6) == [rest[1]]


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ([], {}, r"shapes must be pairs \(count, length\), each length once"),
        ([(2, 100), (4, 2048)], {}, "none with a larger count than a shorter one"),
        ([(2, 2048), (1, 2048)], {}, "each length once"),
        (
            [(8, 1000)],
            {},
            r"hold every sample, got a longest one of 2048 and \(count, length\) \(8, 1000\)",
        ),
        ([(40, 256), (5, 2048)], {}, r"got \(40, 256\) where 32 samples fit: lower its count"),
        ([(30, 256), (4, 2048)], {"max_items": 20}, r"got \(30, 256\) where 20 samples fit"),
        ([(30, 256), (3, 2048)], {"batch_size_multiple": 4}, r"got \(30, 256\) where 32 samples fit"),
        ([(30, 250), (4, 2048)], {"length_multiple": 8}, "multiples of length_multiple=8, got 250"),
        ([(30, 256), (4, 2048)], {"cost": "sum"}, "goes with cost='padded' or a function"),
        ([(30, 256), (4, 0)], {}, "each number in shapes must be an int >= 1, got 0"),
        ("16", {}, "shapes must be an int >= 1"),
    ],
)
def test_given_shapes_that_cannot_be_are_refused(shapes: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        made(LENGTHS, 8192, shapes, **options)


def test_given_shapes_may_have_more_rows_than_there_are_samples() -> None:
    few = made([3, 5, 9], 8192, [(800, 10)])
    assert few.shapes == ((800, 10),)
    assert sorted(*few) == [0, 1, 2]


# Compilers.


class Compilations:
    """A backend of torch.compile that compiles nothing and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Any:
        self.count += 1
        return graph.forward


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [4, 12, None])
def test_a_model_is_compiled_once_for_each_shape(shapes: int | None) -> None:
    lengths = LENGTHS[: 1500 if shapes else 500]  # without shapes most batches are compiled
    samplers = [made(lengths, 8192, shapes, num_replicas=2, rank=rank) for rank in range(2)]
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4))
    torch._dynamo.reset()
    backend = Compilations()
    compiled = torch.compile(model, backend=backend, dynamic=False)
    collate = PaddedCollate(shapes=samplers[0].shapes, return_mask=True)
    delivered = 0
    with torch._dynamo.config.patch(cache_size_limit=1000):  # beyond 8 it would compile no more, and say so only once
        for epoch in range(2):
            for sampler in samplers:  # one after the other: what all ranks together compile
                sampler.set_epoch(epoch)
                for batch in sampler:
                    ids, _, mask = collate([torch.ones(int(lengths[i]), dtype=torch.int64) for i in batch])
                    compiled(ids)
                    delivered += int(mask.any(1).sum())
    torch._dynamo.reset()
    assert delivered == 2 * len(lengths)
    if shapes is None:
        assert backend.count > 40
    else:
        assert backend.count == shapes


def test_rows_that_are_filled_up_change_no_gradient() -> None:
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    rows = [{"x": torch.randn(n, 8), "labels": torch.randint(0, 8, (n,))} for n in (3, 5)]
    gradients = []
    for shapes in (None, [(6, 7)]):
        batch = PaddedCollate(shapes=shapes, return_mask=True)(rows)
        model.zero_grad()
        hidden = model(batch["x"], src_key_padding_mask=~batch["attention_mask"])
        loss = torch.nn.functional.cross_entropy(hidden.flatten(0, 1), batch["labels"].flatten())
        torch.autograd.backward(loss)
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
