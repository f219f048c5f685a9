"""Runs killed at any step, and resumed with any number of ranks and workers: 0 samples lost, 0 repeated."""

import itertools
import random
import warnings
from pathlib import Path

import pytest
from simulated import Ranks, Recipe, per_epoch, write_source

pytestmark = pytest.mark.slow

FEW, MANY = 12, 200
POINTS = [pytest.param(point, marks=[pytest.mark.nightly] if point >= FEW else []) for point in range(MANY)]
PROCESSES = 8  # at most, of all ranks together


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {
        "short": write_source(folder / "short", "a", 130, 4),
        "long": write_source(folder / "long", "b", 57, 3),
    }


def draw_ranks(rng: random.Random, *, with_workers: bool) -> tuple[int, int]:
    """A number of ranks, and of workers for each."""
    if not with_workers:
        return rng.choice([1, 2, 3, rng.randint(1, 16), 16]), 0
    world = rng.randint(1, 3)
    return world, rng.randint(0, min(4, PROCESSES // world))


@pytest.mark.parametrize("point", POINTS)
def test_killed_and_resumed_on_other_ranks(point: int, shards: dict[str, Path]) -> None:
    rng = random.Random(point)
    recipe, epochs, with_workers = Recipe.draw(rng), rng.randint(1, 3), point % 6 == 0
    world, workers = draw_ranks(rng, with_workers=with_workers)
    again, more = draw_ranks(rng, with_workers=with_workers)
    if point % 4 == 1:  # the same ranks: each has to go on with the very same batches
        again = world
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "This DataLoader will create .* worker processes")  # more than CPUs
        whole = list(Ranks(recipe, shards, world).steps(epochs))
        one = list(Ranks(recipe, shards, 1).steps(epochs))
        kill = rng.randint(0, len(whole))

        first = Ranks(recipe, shards, world, workers)
        before = list(itertools.islice(first.steps(epochs), kill))
        state = first.state(rng)
        first.kill()

        second = Ranks(recipe, shards, again, more, state)
        after = list(second.steps(epochs))
        second.kill()
    assert {warning.category for warning in caught} <= {UserWarning}
    told = [str(warning.message) for warning in caught]
    assert all("repeat" in text for text in told), told
    if again == world:
        assert before + after == whole
    wanted, got = per_epoch(one), per_epoch(before + after)
    assert wanted.keys() == got.keys()
    for epoch in wanted:
        assert not wanted[epoch] - got[epoch], "lost"
        repeated = got[epoch] - wanted[epoch]
        # Only where fewer samples are left than ranks, and then it is said.
        assert not repeated or (told and repeated.total() < max(world, again))
