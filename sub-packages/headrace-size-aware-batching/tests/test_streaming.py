import copy
import itertools
import logging
import math
import pickle
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies_of_sizes import examples
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from headrace.size_aware_batching import BucketedBatching, PaddedCollate, bucketed_batching

Sample = tuple[int, float]  # a number of its own, and its size


def size_of(sample: Sample) -> float:
    return sample[1]


def numbered(sizes: Any) -> Iterator[Sample]:
    return enumerate(sizes)


def quadratic(n: int, largest: float) -> float:
    return n * (largest + largest**2)


class Counted:
    """A stream that counts what is pulled from it."""

    def __init__(self, samples: Iterator[Any]) -> None:
        self.samples = samples
        self.pulled = 0

    def __iter__(self) -> Iterator[Any]:
        for sample in self.samples:
            self.pulled += 1
            yield sample


def endless(low: int, high: int) -> Iterator[Sample]:
    sizes = random.Random(0)
    return ((number, sizes.randint(low, high)) for number in itertools.count())


options = st.fixed_dictionaries(
    {
        "cost": st.sampled_from(["padded", "sum", quadratic]),
        "buffer_size": st.integers(1, 40),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 2**64 - 1),
        "max_items": st.none() | st.integers(4, 10),
        "batch_size_multiple": st.integers(1, 4),
    }
)
sizes_lists = st.lists(st.integers(0, 30), max_size=120) | st.lists(st.floats(0, 30), max_size=60)


def cost_of(cost: Any, sizes: list[float]) -> float:
    if cost == "sum":
        return math.fsum(sizes)
    return len(sizes) * max(sizes) if cost == "padded" else float(cost(len(sizes), max(sizes)))


@examples(150)
@given(sizes_lists, options)
def test_each_sample_once_and_never_over_the_budget(sizes: list[float], kwargs: dict[str, Any]) -> None:
    budget = 1000 if kwargs["cost"] is quadratic else 33
    stream = Counted(numbered(sizes))
    delivered = 0
    seen: list[Sample] = []
    for batch in bucketed_batching(stream, size_of, budget, **kwargs):
        assert stream.pulled - delivered <= kwargs["buffer_size"]
        delivered += len(batch)
        seen += batch
        assert batch
        assert cost_of(kwargs["cost"], [size for _, size in batch]) <= budget
        assert len(batch) <= (kwargs["max_items"] or kwargs["buffer_size"])
        multiple = kwargs["batch_size_multiple"]
        assert len(batch) <= multiple or len(batch) % multiple == 0
    assert sorted(seen) == list(numbered(sizes))


@given(sizes_lists, options)
def test_the_same_stream_and_seed_give_the_same_batches(sizes: list[float], kwargs: dict[str, Any]) -> None:
    first = list(bucketed_batching(numbered(sizes), size_of, 1000, **kwargs))
    assert first == list(bucketed_batching(numbered(sizes), size_of, 1000, **kwargs))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=80), st.integers(1, 9), st.integers(1, 20))
def test_padding_counts_in_multiples(sizes: list[int], multiple: int, buffer_size: int) -> None:
    budget = 40
    batches = bucketed_batching(
        sizes, lambda n: n, budget, length_multiple=multiple, buffer_size=buffer_size, oversize="skip"
    )
    for batch in batches:
        assert len(batch) * -(-max(batch) // multiple) * multiple <= budget


def test_a_buffer_that_holds_all_gives_the_fewest_batches() -> None:
    sizes = [random.Random(1).randint(1, 100) for _ in range(500)]
    batches = list(bucketed_batching(sizes, lambda n: n, 400))
    falling = sorted(sizes, reverse=True)
    count, begin = 0, 0
    while begin < len(falling):  # the largest that is left sets how many go with it
        begin += 400 // falling[begin]
        count += 1
    assert len(batches) == count


def test_a_stream_without_an_end_is_read_no_further_than_the_buffer() -> None:
    stream = Counted(endless(1, 100))
    batches = bucketed_batching(stream, size_of, 1000, buffer_size=300)
    assert stream.pulled == 0  # nothing before the first batch is asked for
    delivered = len(next(batches))
    assert stream.pulled == 300
    for batch in itertools.islice(batches, 2000):
        delivered += len(batch)
    assert stream.pulled - delivered <= 300
    assert delivered > 20_000


def test_no_more_samples_are_alive_than_the_buffer_holds() -> None:
    alive = 0
    most = 0

    class Tracked:
        """Counts those of its kind that exist."""

        def __init__(self, size: int) -> None:
            nonlocal alive, most
            self.size = size
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    batches = bucketed_batching((Tracked(int(s)) for _, s in endless(1, 50)), lambda x: x.size, 500, buffer_size=100)
    for _ in itertools.islice(batches, 500):
        pass
    assert 100 <= most <= 100 + 50  # the loop holds on to one batch while the next is made; 50 is a large one
    batches.close()


@pytest.mark.parametrize("shuffle", [True, False])
def test_rare_sizes_do_not_wait_for_ever(shuffle: bool) -> None:
    # The smallest stand at the end of the sorted buffer, where a batch is never complete.
    sizes = (1 if number % 997 == 5 else 100 for number in itertools.count())
    waited = []
    delivered = 0
    for batch in itertools.islice(
        bucketed_batching(numbered(sizes), size_of, 1000, buffer_size=200, shuffle=shuffle), 3000
    ):
        delivered += len(batch)
        waited += [delivered - number for number, size in batch if size == 1]
    assert len(waited) >= 28  # of 30 that have passed
    assert max(waited) < 20 * 200


@given(st.integers(0, 2**64 - 1))
@examples(10)
def test_no_sample_of_an_even_stream_waits_long(seed: int) -> None:
    delivered, latest = 0, 0
    for batch in itertools.islice(bucketed_batching(endless(1, 50), size_of, 200, buffer_size=100, seed=seed), 500):
        delivered += len(batch)
        latest = max(latest, *(delivered - number for number, _ in batch))
    assert latest < 25 * 100


def test_little_padding_in_a_rolling_buffer() -> None:
    sizes = np.clip(np.random.default_rng(0).lognormal(np.log(360), 0.8, 40_000), 8, 2048).astype(int).tolist()
    bound = sum(1 / (16384 // size) for size in sizes)
    assert len(list(bucketed_batching(sizes, lambda n: n, 16384, buffer_size=10_000))) < 1.02 * bound
    assert len(list(bucketed_batching(sizes, lambda n: n, 16384, buffer_size=1_000))) < 1.08 * bound


def test_the_order_is_random_or_that_of_arrival() -> None:
    sizes = [1, 2, 3, 4, 5, 6, 7, 8] * 50
    stage = BucketedBatching(size_of, 40, buffer_size=400, shuffle=False)
    by_arrival = [min(number for number, _ in batch) for batch in stage(numbered(sizes))]
    assert by_arrival == sorted(by_arrival)

    orders = {
        tuple(tuple(batch) for batch in bucketed_batching(numbered(sizes), size_of, 40, seed=s)) for s in range(20)
    }
    assert len(orders) == 20
    # The first batch is of every size, each as often as it has batches: 8 for size 8, 1 or 2 for size 1.
    first = Counter(next(bucketed_batching(numbered(sizes), size_of, 40, seed=s))[0][1] for s in range(400))
    batches_of = Counter(batch[0][1] for batch in next(iter(orders)))
    total = sum(batches_of.values())
    for size, count in batches_of.items():
        expected = 400 * count / total
        assert abs(first[size] - expected) < 6 * math.sqrt(expected), (size, first[size], expected)


def test_equal_sizes_are_mixed() -> None:
    together = next(bucketed_batching(numbered([1] * 1000), size_of, 100, buffer_size=1000))
    numbers = sorted(number for number, _ in together)
    assert numbers[0] < 150
    assert numbers[-1] > 850


def test_epochs_differ_and_come_again() -> None:
    stage = BucketedBatching(size_of, 40, buffer_size=50)
    sizes = [1, 2, 3, 4, 5, 6, 7, 8] * 50
    zero = list(stage(numbered(sizes)))
    assert list(stage(numbered(sizes))) == zero
    stage.set_epoch(1)
    one = list(stage(numbered(sizes)))
    assert one != zero
    assert one != list(bucketed_batching(numbered(sizes), size_of, 40, buffer_size=50, seed=1))
    assert list(pickle.loads(pickle.dumps(stage))(numbered(sizes))) == one


def test_too_large_samples() -> None:
    sizes = [3, 50, 4, 60, 5]
    with pytest.raises(ValueError, match=r"sample at position 1 has size 50, .*max_total_size=40: .*oversize='skip'"):
        list(bucketed_batching(sizes, lambda n: n, 40))
    with pytest.warns(UserWarning, match="position") as warned:
        kept = list(bucketed_batching(sizes, lambda n: n, 40, oversize="skip"))
    assert sorted(itertools.chain(*kept)) == [3, 4, 5]
    assert [str(w.message).split(" has")[0] for w in warned] == [f"the sample at position {n}" for n in (1, 3)]
    assert {w.filename for w in warned} == {__file__}
    told: list[str] = []
    batches = list(bucketed_batching(sizes, lambda n: n, 40, oversize="own_batch", info_logger=told.append))
    assert [b for b in batches if b[0] >= 50] == [[50], [60]]
    assert sorted(itertools.chain(*batches)) == sorted(sizes)
    assert told == ["1 batch of 3 elements, fill 0.3750 of max_total_size=40; 2 over it, one a batch: positions 1, 3"]


@pytest.mark.parametrize("cost", ["sum", "padded", quadratic])
def test_an_infinite_size_fits_no_budget(cost: Any) -> None:
    for budget in (40, math.inf):
        with pytest.raises(ValueError, match="position 1 has size inf"):
            list(bucketed_batching([1, math.inf], lambda n: n, budget, cost=cost))
    assert list(bucketed_batching([1, 2], lambda n: n, math.inf, cost=cost, shuffle=False)) == [[2, 1]]


def test_many_skipped_samples_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    with caplog.at_level(logging.INFO, "headrace.size_aware_batching"):
        stream = itertools.chain([9] * 1200, [1])
        assert list(bucketed_batching(stream, lambda n: n, 5, oversize="skip", warn_logger=told.append)) == [[1]]
    assert len(told) == 102
    assert told[100].startswith("1000 are skipped so far")
    assert told[101] == caplog.messages[0]
    assert "1200 skipped" in told[101]


def test_an_endless_run_of_large_samples_holds_nothing_back() -> None:
    batches = bucketed_batching(itertools.repeat(9), lambda n: n, 5, oversize="own_batch")
    assert list(itertools.islice(batches, 3)) == [[9]] * 3


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"dataset": 5}, TypeError),
        ({"sizeof": 5}, TypeError),
        ({"max_total_size": 0}, ValueError),
        ({"max_total_size": "5"}, TypeError),
        ({"cost": "mean"}, ValueError),
        ({"buffer_size": 0}, ValueError),
        ({"buffer_size": 2.0}, TypeError),
        ({"seed": -1}, ValueError),
        ({"max_items": 0}, ValueError),
        ({"batch_size_multiple": 0}, ValueError),
        ({"max_items": 2, "batch_size_multiple": 4}, ValueError),
        ({"length_multiple": 0}, ValueError),
        ({"length_multiple": 8, "cost": "sum"}, ValueError),
        ({"oversize": "drop"}, ValueError),
        ({"collate_fn": 5}, TypeError),
        ({"info_logger": 5}, TypeError),
        ({"warn_logger": 5}, TypeError),
    ],
)
def test_arguments_are_checked_at_the_call(wrong: dict[str, Any], error: type[Exception]) -> None:
    given: dict[str, Any] = {"dataset": [1], "sizeof": len, "max_total_size": 5} | wrong
    with pytest.raises(error, match=next(iter(wrong))):
        bucketed_batching(given.pop("dataset"), **given)


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        (-1, ValueError, "position 2 "),
        (math.nan, ValueError, "position 2 "),
        ("x", TypeError, "position 2 "),
        (2**61, ValueError, "position 2: .*larger unit"),
    ],
)
def test_faulty_sizes_name_the_sample(size: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        list(bucketed_batching([1, 1, size], lambda n: n, math.inf))


def test_sizes_near_the_end_of_the_integers_do_not_wrap() -> None:
    size = 2**62 // 100 - 1
    for cost in ("sum", "padded"):
        batches = list(bucketed_batching([size] * 100, lambda n: n, 2**62 - 1, cost=cost, buffer_size=100))
        assert [len(batch) for batch in batches] == [100]
        halves = list(bucketed_batching([size] * 100, lambda n: n, size * 50, cost=cost, buffer_size=100))
        assert [len(batch) for batch in halves] == [50, 50]


def test_a_cost_function_is_asked_once_a_size() -> None:
    calls: Counter[tuple[int, float]] = Counter()

    def cost(n: int, largest: float) -> float:
        calls[n, largest] += 1
        return n * largest

    stream = itertools.islice(endless(1, 20), 5000)
    same = list(bucketed_batching(stream, size_of, 100, cost=cost, buffer_size=200))
    stream = itertools.islice(endless(1, 20), 5000)
    assert same == list(bucketed_batching(stream, size_of, 100, cost="padded", buffer_size=200))
    # One for every sample as it comes, one for every batch as it leaves, and a few for every distinct size.
    assert calls.total() <= 5000 + len(same) + 20 * 20


def test_other_forms_of_sizes() -> None:
    for sizeof in ([4, 1, 4], np.array([4, 1, 4]), torch.tensor([4, 1, 4]), {0: 4, 1: 1, 2: 4}):
        assert list(bucketed_batching([2, 0, 1], sizeof, 8, shuffle=False)) == [[2, 0], [1]]


class Proteins(IterableDataset[Any]):
    """Sequence i holds i ones; workers share them out."""

    def __init__(self, count: int, stage: BucketedBatching) -> None:
        self.count = count
        self.stage = stage

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return self.stage(torch.ones(length) for length in range(1 + first, 1 + self.count, step))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, pytest.param(2, marks=pytest.mark.nightly)])
def test_in_a_loader_with_workers(workers: int) -> None:
    collate = PaddedCollate(return_mask=True)
    stage = BucketedBatching(len, 400, buffer_size=30, collate_fn=collate)
    loader = DataLoader(
        Proteins(100, stage),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,  # so that the stage has to be pickled
    )
    lengths: list[int] = []
    for values, _, mask in loader:
        assert values.numel() <= 400
        lengths += mask.sum(1).tolist()
    assert sorted(lengths) == list(range(1, 101))


# Python 3.12 and newer warn where torch forks its workers.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_workers_that_live_on_learn_of_a_new_epoch(context: str) -> None:
    stage = BucketedBatching(len, 400, buffer_size=30)
    loader = DataLoader(
        Proteins(60, stage),
        batch_size=None,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context=context,
        collate_fn=in_lengths,
    )
    for epoch in (0, 1, 2, 0):
        stage.set_epoch(epoch)
        assert list(loader) == [in_lengths(batch) for batch in Proteins(60, stage)]


@pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, lambda stage: pickle.loads(pickle.dumps(stage))])
def test_a_copy_has_an_epoch_of_its_own(through: Any) -> None:
    stage = BucketedBatching(len, 400)
    stage.set_epoch(2)
    copied = through(stage)
    stage.set_epoch(3)
    assert (stage.epoch, copied.epoch) == (3, 2)
    copied.set_epoch(4)
    assert (stage.epoch, copied.epoch) == (3, 4)


def in_lengths(batch: list[torch.Tensor]) -> list[int]:
    return list(map(len, batch))


@pytest.mark.nightly
def test_a_long_stream_is_as_tight_at_its_end_as_at_its_beginning() -> None:
    def padding(batches: list[list[Sample]]) -> float:
        return sum(len(b) * max(s for _, s in b) for b in batches) / sum(s for b in batches for _, s in b)

    batches = bucketed_batching(endless(1, 1000), size_of, 20_000, buffer_size=2000)
    early = padding(list(itertools.islice(batches, 2000)))
    for _ in itertools.islice(batches, 20_000):
        pass
    late = padding(list(itertools.islice(batches, 2000)))
    assert late - 1 < 1.1 * (early - 1) + 0.001


# Ranks.


class Mesh:
    """The least that a mesh has to offer."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def get_local_rank(self) -> int:
        return self._rank


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 5, 100, 333])
def test_ranks_share_the_batches_of_one_stream(world: int, count: int) -> None:
    stream = list(numbered([1 + 7 * number % 40 for number in range(count)]))
    options: dict[str, Any] = {"buffer_size": 50}
    with warnings.catch_warnings(record=True):  # that samples come again is tested below
        warnings.simplefilter("always")
        ranks = [
            list(bucketed_batching(stream, size_of, 100, mesh=Mesh(world, rank), **options)) for rank in range(world)
        ]
    assert len({len(rank) for rank in ranks}) == 1
    assert all(len(batch) * max(size for _, size in batch) <= 100 for rank in ranks for batch in rank)
    seen = Counter(number for rank in ranks for batch in rank for number, _ in batch)
    assert set(seen) == set(range(count))
    if count >= world:
        assert seen.total() == count
    whole = list(bucketed_batching(stream, size_of, 100, **options))
    steps = len(whole) // world
    assert [batch for step in zip(*ranks, strict=True) for batch in step][: steps * world] == whole[: steps * world]
    quiet: Any = str
    given = list(bucketed_batching(stream, size_of, 100, num_replicas=world, rank=0, warn_logger=quiet, **options))
    assert given == ranks[0]


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_stream_that_is_read_again_goes_on_on_other_ranks(ranks: int) -> None:
    stream = list(numbered([1 + 7 * number % 40 for number in range(600)]))
    old_ranks, steps_done = 2, 9
    before = [
        batch
        for rank in range(old_ranks)
        for batch in itertools.islice(
            bucketed_batching(stream, size_of, 100, buffer_size=50, num_replicas=old_ranks, rank=rank), steps_done
        )
    ]
    after = [
        batch
        for rank in range(ranks)
        for batch in itertools.islice(
            bucketed_batching(stream, size_of, 100, buffer_size=50), steps_done * old_ranks + rank, None, ranks
        )
    ]
    assert sorted(number for batch in before + after for number, _ in batch) == list(range(600))


def test_too_few_samples_for_the_ranks_are_repeated_with_a_warning() -> None:
    with pytest.warns(
        UserWarning, match="the last step of the stream has 2 samples for 3 ranks: samples are repeated on 1 rank"
    ):
        assert len(list(bucketed_batching([1, 2], [0, 1, 1], 10, num_replicas=3, rank=2))) == 1


def test_ranks_of_a_stage() -> None:
    stage = BucketedBatching(len, 12, shuffle=False, mesh=Mesh(2, 1))
    worker = pickle.loads(pickle.dumps(stage))
    assert (worker.num_replicas, worker.rank, worker.mesh) == (2, 1, None)
    words = ["to", "stream", "brook", "or"]
    assert list(worker(words)) == list(stage(words)) == [["stream", "brook"]]
    assert list(BucketedBatching(len, 12, shuffle=False)(words)) == [["to", "or"], ["stream", "brook"]]
    with pytest.raises(ValueError, match=r"mesh and rank=0 were both given: .*, so leave out rank"):
        BucketedBatching(len, 12, mesh=Mesh(2, 1), rank=0)
    with pytest.raises(ValueError, match="num_replicas must be given with rank=1, got None"):
        BucketedBatching(len, 12, rank=1)
