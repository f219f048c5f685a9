"""Laws of mixtures by tokens: exact shares at every prefix, from any position on."""

import pickle
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import examples, in_steps
from numpy.typing import NDArray

from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler
from headrace.weighted_sampler._token_mixture import bound, token_tree

Array = NDArray[np.int64]
Kind = Literal["constant", "equal", "heavy", "zeros", "one"]
KINDS: list[Kind] = ["constant", "equal", "heavy", "zeros", "one"]
SEEDS = st.integers(0, 2**64 - 1)


def sizes_of(kind: Kind, generator: np.random.Generator, samples: int) -> Array:
    """Tokens of the samples of one source."""
    if kind == "equal":  # in all sources
        return np.full(samples, 7)
    if kind in ("constant", "one"):
        return np.full(samples, generator.integers(1, 50))
    if kind == "heavy":
        return np.clip(generator.lognormal(4, 1.2, samples), 1, 5000).astype(np.int64)
    sizes = generator.integers(0, 3, samples) * generator.integers(0, 40)
    sizes[0] += not sizes.sum()
    return sizes


class Mixed:
    """A mixture by tokens of some sources, and what is known of its order."""

    def __init__(self, weights: list[Any], sizes: list[Array], **options: Any) -> None:
        self.sizes = np.concatenate(sizes)
        self.bounds = np.cumsum([0, *map(len, sizes)]).tolist()
        self.weights = weights
        self.longest = int(self.sizes.max())
        options = {"semantics": "proportion", "per": "token", "sizes": self.sizes} | options
        self.options = options
        self.sampler = self.make()

    def make(self, **more: Any) -> WeightedDistributedSampler:
        return WeightedDistributedSampler(range(len(self.sizes)), self.by_range(self.weights), **self.options | more)

    def by_range(self, weights: list[Any]) -> dict[tuple[int, int], Any]:
        return dict(zip(pairwise(self.bounds), weights, strict=True))

    def take(self, epochs: int = 1) -> Array:
        parts = []
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            parts.append(self.sampler.take(0, self.sampler.epoch_length))
        return np.concatenate(parts)

    def deviations(self, order: Array, shares: list[Fraction] | None = None) -> Array:
        """By how many tokens each source is off its share at every prefix, shape [m + 1, sources]; float."""
        if shares is None:
            total = sum(map(Fraction, self.weights))
            shares = [Fraction(weight) / total for weight in self.weights]
        tokens = self.sizes[order]
        owners = np.searchsorted(self.bounds, order, side="right") - 1
        own = np.where(owners[:, None] == np.arange(len(self.weights)), tokens[:, None], 0)
        sums = np.cumsum(np.concatenate([np.zeros((1, len(self.weights))), own]), axis=0)
        deviations: Any = sums - sums.sum(axis=1, keepdims=True) * np.array(shares, float)
        return deviations  # type: ignore[no-any-return]


@st.composite
def mixed(draw: st.DrawFn, most: int = 8, samples: int = 2000) -> Mixed:
    kind = draw(st.sampled_from(KINDS))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = draw(st.lists(st.one_of(st.integers(1, 10), st.integers(1, 10**6)), min_size=2, max_size=most))
    counts = [1 if kind == "one" else int(generator.integers(1, samples)) for _ in weights]
    sizes = [sizes_of(kind, generator, count) for count in counts]
    return Mixed(weights, sizes, seed=draw(SEEDS), epoch_length=3000)


@examples(40)
@given(mixed())
def test_every_prefix_has_its_share_to_within_the_bound(mix: Mixed) -> None:
    worst = np.abs(mix.deviations(mix.take(2))).max() / mix.longest
    report = mix.sampler.report()
    assert report.deviation is not None
    assert report.deviation_bound is not None
    assert worst <= report.deviation_bound + 1e-9 <= 1.25


@pytest.mark.parametrize("sources", [2, 3, 10, 100, pytest.param(1000, marks=pytest.mark.nightly)])
def test_prefixes_are_within_one_longest_sample_where_sizes_vary(sources: int) -> None:
    generator = np.random.default_rng(sources)
    for shape in (0.3, 1.5):
        weights = [int(weight) + 1 for weight in np.minimum(generator.pareto(shape, sources) * 1000, 1e6)]
        sizes = [sizes_of("heavy", generator, int(generator.integers(50, 5000))) for _ in weights]
        mix = Mixed(weights, sizes, epoch_length=8000)
        assert np.abs(mix.deviations(mix.take())).max() <= mix.longest


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["constant", "heavy", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("equal", "zeros", "one"))],
)
def test_one_heavy_source_among_a_thousand_light_ones(kind: Kind) -> None:
    generator = np.random.default_rng(0)
    weights = [1000] + [1] * 1000
    mix = Mixed(weights, [sizes_of(kind, generator, 200) for _ in weights], epoch_length=6000)
    # All light sources are due at the same moments: one merge by virtual time is off by hundreds of samples.
    assert np.abs(mix.deviations(mix.take())).max() <= 1.2 * mix.longest


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=60))
def test_the_proven_bound_is_near_one_longest_sample(weights: list[int]) -> None:
    assert bound(token_tree(weights)) <= 1.25


@examples(40)
@given(mixed())
def test_every_thousand_draws_have_their_tokens(mix: Mixed) -> None:
    deviations = mix.deviations(mix.take())
    sliding = np.abs(deviations[1000:] - deviations[:-1000]).max()
    assert sliding <= 3 * mix.longest


@examples(40)
@given(mixed(samples=300))
def test_no_sample_comes_twice_before_all_others_came_once(mix: Mixed) -> None:
    order = mix.take(2)
    for begin, end in pairwise(mix.bounds):
        own = order[(order >= begin) & (order < end)]
        for low in range(0, len(own), end - begin):
            one_pass = own[low : low + end - begin]
            assert len(np.unique(one_pass)) == len(one_pass)


@examples(25)
@given(mixed(), st.integers(0, 10**12), st.data())
def test_any_position_is_worked_out_alone(mix: Mixed, epoch: int, data: st.DataObject) -> None:
    mix.sampler.set_epoch(epoch)
    start = data.draw(st.integers(0, 2900))
    together = mix.sampler.take(start, start + 100).tolist()
    alone = mix.make()
    alone.set_epoch(epoch)
    for place in data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=4)):
        assert alone.take(start + place, start + place + 1).tolist() == [together[place]]


@pytest.mark.slow
@examples(20)
@given(mixed(), st.integers(1, 9), st.integers(1, 9), st.integers(0, 3), st.data())
def test_ranks_and_resumed_runs_deliver_the_global_sequence(
    mix: Mixed, world: int, later: int, epoch: int, data: st.DataObject
) -> None:
    mix.sampler.set_epoch(epoch)
    order = mix.sampler.take(0, 3000).tolist()
    ranks = [mix.make(num_replicas=world, rank=rank) for rank in range(world)]
    for rank in ranks:
        rank.set_epoch(epoch)
    padded = order + order[: -3000 % world]
    assert in_steps((index for step in zip(*ranks, strict=True) for index in step), world) == in_steps(padded, world)
    position = data.draw(st.integers(0, 3000))
    state = mix.sampler.state_dict(position=position)
    ranks = [mix.make(num_replicas=later, rank=rank) for rank in range(later)]
    for rank in ranks:
        rank.load_state_dict(state)
    padded = order[position:] + order[: (position - 3000) % later]
    assert in_steps((index for step in zip(*ranks, strict=True) for index in step), later) == in_steps(padded, later)


@pytest.mark.slow
@examples(40)
@given(mixed(most=4), st.lists(st.integers(1, 2900), min_size=1, max_size=3, unique=True), st.data())
def test_a_schedule_makes_up_for_the_stage_before(mix: Mixed, starts: list[int], data: st.DataObject) -> None:
    count = len(mix.weights)
    later = [data.draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count)) for _ in starts]
    schedule = [(start, mix.by_range(weights)) for start, weights in zip(sorted(starts), later, strict=True)]
    mix.options["schedule"] = schedule
    mix.sampler = mix.make()
    order = mix.take()
    cuts = [0, *sorted(starts), 3000]
    ahead = np.zeros(count)
    for (low, high), weights in zip(pairwise(cuts), [mix.weights, *later], strict=True):
        shares = [Fraction(weight, sum(weights)) for weight in weights]
        deviations = ahead + mix.deviations(order[low:high], shares)
        assert np.abs(deviations).max() <= 2 * mix.longest + len(cuts)
        ahead = deviations[-1]
    assert [source.draws for source in mix.sampler.report().sources] == [
        int(np.count_nonzero((order >= begin) & (order < end))) for begin, end in pairwise(mix.bounds)
    ]


def test_a_source_that_a_schedule_leaves_out_goes_on_where_it_was() -> None:
    generator = np.random.default_rng(5)
    mix = Mixed([1, 1, 1], [sizes_of("heavy", generator, 900) for _ in range(3)], epoch_length=3000)
    mix.options["schedule"] = [(700, mix.by_range([1, 0, 2])), (1500, mix.by_range([1, 1, 0]))]
    mix.sampler = mix.make()
    order = mix.take()
    second = (order >= 900) & (order < 1800)
    assert not second[700:1500].any()
    assert (order[1500:] < 1800).all()
    own = order[second][:900]
    assert len(np.unique(own)) == len(own)


@pytest.mark.parametrize("seed", [4, 18, 26])
def test_the_deviation_of_a_later_epoch_counts_where_it_begins(seed: int) -> None:
    """There a source may be ahead by more than after any draw of its own in that epoch."""
    generator = np.random.default_rng(seed)
    weights = generator.integers(1, 10, 3).tolist()
    mix = Mixed(weights, [sizes_of("heavy", generator, 300) for _ in weights], seed=seed, epoch_length=50)
    for epoch in range(4):
        mix.sampler.set_epoch(epoch)
        found = mix.sampler.report().deviation
        worst = np.abs(mix.deviations(mix.take(epoch + 1))[50 * epoch :]).max() / mix.longest
        assert found == pytest.approx(worst, abs=1e-9)


@pytest.mark.slow
@examples(40)
@given(mixed(most=5), st.integers(0, 2), st.integers(1, 7), st.booleans())
def test_the_report_counts_tokens_exactly(mix: Mixed, epoch: int, world: int, drop_last: bool) -> None:
    ranks = [mix.make(num_replicas=world, rank=rank, drop_last=drop_last) for rank in range(world)]
    for rank in ranks:
        rank.set_epoch(epoch)
    delivered = np.concatenate([list(rank) for rank in ranks])
    owners = np.searchsorted(mix.bounds, delivered, side="right") - 1
    tokens = np.bincount(owners, mix.sizes[delivered], minlength=len(mix.weights))
    report = ranks[0].report()
    assert [line.token_share for line in report.sources] == pytest.approx(list(tokens / tokens.sum()))
    assert [line.asked_token_share for line in report.sources] == pytest.approx(
        [weight / sum(mix.weights) for weight in mix.weights]
    )
    mix.sampler.set_epoch(0)
    order = mix.take(epoch + 1)
    worst = np.abs(mix.deviations(order)[3000 * epoch :]).max() / mix.longest
    assert report.deviation == pytest.approx(worst, abs=1e-6)


def test_nested_weights_and_temperatures_are_shares_of_the_tokens() -> None:
    generator = np.random.default_rng(1)
    sizes = [sizes_of("heavy", generator, count) for count in (3000, 500, 1000)]
    data = NamedConcatDataset({name: range(len(own)) for name, own in zip("abc", sizes, strict=True)})
    options: dict[str, Any] = {"per": "token", "sizes": np.concatenate(sizes), "epoch_length": 20_000}
    weights: dict[str, Any] = {"ab": (0.75, {"a": 2, "b": 1}), "c": 0.25}
    nested = WeightedDistributedSampler(data, weights, **options).report()
    assert [line.token_share for line in nested.sources] == pytest.approx([0.5, 0.25, 0.25], abs=0.002)
    warm = WeightedDistributedSampler(data, semantics="temperature", temperature=2, **options).report()
    roots = np.sqrt([own.sum() for own in sizes])
    assert [line.token_share for line in warm.sources] == pytest.approx(list(roots / roots.sum()), abs=0.002)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sources"), [("equal", 8), ("equal", 2), ("heavy", 8), ("heavy", 3)])
def test_every_rank_sees_all_sources_evenly(kind: Kind, sources: int) -> None:
    generator = np.random.default_rng(2)
    mix = Mixed([1] * sources, [sizes_of(kind, generator, 5000) for _ in range(sources)], epoch_length=160_000)
    for rank in range(8):
        order = list(mix.make(num_replicas=8, rank=rank))
        owners, tokens = np.searchsorted(mix.bounds, order, side="right") - 1, mix.sizes[order]
        shares = np.bincount(owners, tokens) / tokens.sum()
        # Of sizes that vary, a rank has by chance the longer or the shorter samples of a source.
        assert np.abs(shares * sources - 1).max() <= (0.002 if kind == "equal" else 0.15)


@pytest.mark.parametrize("scale", [1, 1 / 7, 2.0**-40, 3.7e5])
def test_sizes_may_be_fractions_or_large(scale: float) -> None:
    generator = np.random.default_rng(3)
    sizes = [sizes_of("heavy", generator, 300) for _ in range(3)]
    plain = Mixed([5, 3, 2], sizes, epoch_length=5000)
    scaled = Mixed([5, 3, 2], sizes, epoch_length=5000)
    scaled.options["sizes"] = scaled.sizes * scale
    scaled.sampler = scaled.make()
    assert np.abs(scaled.deviations(scaled.take())).max() <= plain.longest


def test_sizes_that_cannot_be_summed_exactly_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sizes must be at most 2\*\*32, and 2\*\*62 together, got"):
        Mixed([1, 1], [np.array([2**33]), np.array([1])])


@pytest.mark.timeout(60)  # the first draw would take minutes, and gigabytes
def test_one_sample_of_millions_of_others_is_refused_with_the_figure() -> None:
    sizes = np.full(20_000, 100)
    sizes[7] = 2**32
    data = NamedConcatDataset({"web": range(10_000), "books": range(10_000)})

    def of(**options: Any) -> WeightedDistributedSampler:
        return WeightedDistributedSampler(data, {"web": 1, "books": 1}, per="token", sizes=sizes, **options)

    says = r"^sizes: the longest sample must have at most 131,072 times .* of a mean draw .*, got 21,479,835 times: cut"
    with pytest.raises(ValueError, match=says):
        of()
    later: Any = {"schedule": [(10, {"web": 1, "books": 1})]}
    with pytest.raises(ValueError, match=says):
        WeightedDistributedSampler(data, {"web": 0, "books": 1}, per="token", sizes=sizes, **later)
    assert of(stopping="drop_exhausted").epoch_length == 20_000, "shares by the mean sizes need no sums"
    sizes[7] = 2**22
    assert len(of().take(0, 9)) == 9


def test_the_sizes_belong_to_the_state() -> None:
    one = Mixed([1, 1], [np.array([3, 4]), np.array([1])])
    two = Mixed([1, 1], [np.array([4, 3]), np.array([1])])
    with pytest.raises(ValueError, match="state was saved with other options: weights, semantics, sizes"):
        two.sampler.load_state_dict(one.sampler.state_dict())


@pytest.mark.parametrize("per", ["sample", "token"])
def test_two_passes_share_no_more_neighbours_than_chance(per: Any) -> None:
    sizes = np.random.default_rng(4).integers(1, 100, 20_000)
    options: dict[str, Any] = {} if per == "sample" else {"per": "token", "sizes": sizes}
    sampler = WeightedDistributedSampler(range(20_000), {(0, 20_000): 1}, semantics="proportion", **options)
    pairs = []
    for epoch in range(4):  # an epoch is one pass
        sampler.set_epoch(epoch)
        order = sampler.take(0, 20_000)
        assert len(np.unique(order)) == 20_000
        low, high = np.minimum(order[1:], order[:-1]), np.maximum(order[1:], order[:-1])
        pairs.append(low * 20_000 + high)
    for one, two in pairwise(pairs):
        # By chance 2 of the 20,000 pairs meet again, Poisson: above 15 once in 10**9 cases.
        assert len(np.intersect1d(one, two)) <= 15


def test_the_order_is_pinned() -> None:
    # Changing these numbers changes every saved run: bump the version of the state as well.
    sizes = [np.array([3, 1, 4, 1, 5]), np.array([9, 2, 6]), np.array([5])]
    mix = Mixed([5, 3, 2], sizes, epoch_length=12, seed=7)
    mix.sampler.set_epoch(10**9)
    assert mix.sampler.take(0, 12).tolist() == [2, 0, 3, 8, 3, 1, 2, 8, 0, 4, 5, 4]


def test_a_pickled_mixture_holds_the_sizes_once() -> None:
    sizes = np.random.default_rng(6).integers(1, 100, 100_000)
    mix = Mixed([3, 1], [sizes[:60_000], sizes[60_000:]], epoch_length=50_000)
    pickled = pickle.dumps(mix.sampler)
    assert len(pickled) < 1.1 * sizes.nbytes
    assert list(pickle.loads(pickled)) == list(mix.sampler)
