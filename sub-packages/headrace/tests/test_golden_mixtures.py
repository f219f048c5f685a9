"""Golden plans of mixtures: no batch or step of a run over a mixture changes by accident.

``python tests/test_golden_mixtures.py --write`` writes the table anew, ``--states`` the states of some rows: a plan
that changes is a decision, seen in the difference of these files. ``--show ROW`` prints what a row does, to compare two
versions.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from golden import Row, command, differences, integers, states, stored, stored_states

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import DistributedBatchSampler
from headrace.weighted_sampler import WeightedDistributedSampler

TABLE = Path(__file__).with_suffix(".txt")
SIZES = 1 + integers(83, 0, 50, 1) * integers(83, 0, 50, 2) // 50
PARTS = [(0, 20), (20, 55), (55, 83)]


def mixed(weights: Any, **options: Any) -> Callable[[], WeightedDistributedSampler]:
    """Return what makes a mixture of the three parts."""
    options = {"seed": 5, "epoch_length": 101, "semantics": "proportion", **options}
    return lambda: WeightedDistributedSampler(
        range(len(SIZES)), dict(zip(PARTS, weights, strict=True)), num_replicas=1, rank=0, **options
    )


MIXTURES: dict[str, Callable[[], WeightedDistributedSampler]] = {
    "draws": mixed([5, 3, 2]),
    "tokens": mixed([5, 3, 2], per="token", sizes=SIZES),
    "ratios": mixed([1.5, 0.25, 1], semantics="ratio", epoch_length=None),
    "schedule": mixed([5, 3, 2], schedule=[(150, dict(zip(PARTS, [1, 1, 8], strict=True)))]),
    "each once": mixed([5, 3, 2], stopping="drop_exhausted", epoch_length=None),
    "capped": mixed([5, 3, 2], max_passes={PARTS[0]: 3}),
}
KINDS: dict[str, tuple[float, dict[str, Any]]] = {
    "stratified": (110, {"strategy": "stratified", "cost": "sum", "balanced_ranks": 8}),
    "packed": (110, {"strategy": "packed", "cost": "sum", "balanced_ranks": 8, "window": 40}),
    "sequential": (110, {"strategy": "sequential", "cost": "sum"}),
    "padded": (140, {"strategy": "bucketed", "cost": "padded", "balanced_ranks": 8}),
    "skip": (35, {"strategy": "stratified", "cost": "sum", "balanced_ranks": 8, "oversize": "skip"}),
    "drop": (110, {"strategy": "sequential", "cost": "sum", "tail": "drop"}),
}
OTHER_WEIGHTS = dict(zip(PARTS, [1, 1, 3], strict=True))


def by_size(mixture: Callable[[], Any], budget: float, options: dict[str, Any]) -> Row:
    def make(**changed: Any) -> DistributedSizeAwareBatchSampler:
        arguments = {"max_total_size": budget, "sampler": mixture(), **options, **changed}
        return DistributedSizeAwareBatchSampler(SIZES, **arguments)

    return Row(make, {"max_total_size": 1.5 * budget}, OTHER_WEIGHTS, ("optimizer",))


def by_count(mixture: Callable[[], Any], options: dict[str, Any]) -> Row:
    def make(**changed: Any) -> DistributedBatchSampler:
        arguments = {"batch_size": 4, "sampler": mixture(), **options, **changed}
        return DistributedBatchSampler(len(SIZES), **arguments)

    return Row(make, {"batch_size": 6}, OTHER_WEIGHTS, ("all", "plan", "report", "optimizer"))


ROWS = {
    f"{name} | {kind}": by_size(mixture, *KINDS[kind])
    for name, mixture in MIXTURES.items()
    for kind in {"draws": KINDS, "tokens": ("stratified", "sequential", "padded")}.get(name, ("sequential",))
} | {
    f"{name} | count{', drop' if drop else ''}": by_count(mixture, {"drop_last": drop})
    for name, mixture in MIXTURES.items()
    for drop in ((False, True) if name in ("draws", "tokens") else (False,))
}


STATES = ("draws | stratified", "tokens | sequential", "draws | count")


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_as_the_table_has_it(name: str) -> None:
    assert differences(name, ROWS[name], TABLE) == {}


def test_the_table_has_these_rows_and_no_others() -> None:
    assert list(stored(TABLE)) == list(ROWS)


@pytest.mark.parametrize("name", STATES)
def test_states_are_as_stored(name: str) -> None:
    assert states(ROWS[name]) == stored_states(TABLE)[name]


if __name__ == "__main__":
    command(ROWS, TABLE, STATES)
