"""Shards of any number and any size, tiny ones too: as many steps on every rank, and each sample once."""

import random
import warnings
from collections import Counter
from pathlib import Path

import pytest
from simulated import Ranks, Recipe, per_epoch

from headrace.webdatamodule import index_shards, write_tars

pytestmark = pytest.mark.slow

FEW, MANY, TOGETHER = 20, 1000, 20  # layouts, and how many of them are one test
STARTS = [
    pytest.param(start, marks=[pytest.mark.nightly] if start >= FEW else []) for start in range(0, MANY, TOGETHER)
]
COUNTS = [*[1] * 12, *[2] * 6, 3, 3, 4, 5, 5, 6, 7, 8, 9, 11, 13, 16, 20, 25, 32, 40, 64]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, int]]:
    """Indexed tar files with their numbers of samples; a layout is some of them."""
    folder, made = tmp_path_factory.mktemp("pool"), []
    for number, count in enumerate(COUNTS):
        rng = random.Random(number)
        samples = [(f"t{number}s{i}", {"txt": b"x" * rng.randint(1, 60)}) for i in range(count)]
        (path,) = write_tars(samples, folder / str(number), n_shards=1)
        index_shards(folder / str(number))
        made.append((path, count))
    return made


@pytest.mark.parametrize("start", STARTS)
def test_equal_steps_on_all_ranks(start: int, pool: list[tuple[Path, int]]) -> None:
    for layout in range(start, start + TOGETHER):
        check_layout(random.Random(layout), pool)


def check_layout(rng: random.Random, pool: list[tuple[Path, int]]) -> None:
    chosen = rng.sample(pool, rng.randint(2, rng.choice([3, 8, len(pool)])))
    recipe, world, total = Recipe.draw(rng), rng.randint(1, 16), sum(count for _, count in chosen)
    cut = rng.randint(1, len(chosen) - 1)
    shards = {"one": [path for path, _ in chosen[:cut]], "other": [path for path, _ in chosen[cut:]]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks = Ranks(recipe, shards, world)
        counts = per_epoch(list(ranks.steps(epochs=2)))  # refuses unequal steps
    told = {str(warning.message) for warning in caught}
    assert all("repeat" in text for text in told), told
    assert counts.keys() == {0, 1}
    for seen in counts.values():
        if recipe.weights is None:
            everything = Counter(ranks.loaders[0].dataset.key(index) for index in range(total))
            assert not everything - seen, "lost"
            again = (seen - everything).total()
            # Where there are too few samples for a batch on every rank, and then it is said.
            assert not again or (told and again < world)
