"""Golden plans: no batch, step or figure of these samplers changes by accident.

``python tests/test_golden_plans.py --write`` writes the table anew, ``--states`` the states of some rows: a plan
that changes is a decision, seen in the difference of these files. ``--show ROW`` prints what a row does, to compare two
versions.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doors import sampler_with
from golden import Listed, Row, Sliced, command, differences, integers, permutation, states, stored, stored_states

from headrace.size_aware_batching import BlockwiseSizeAwareBatchSampler

TABLE = Path(__file__).with_suffix(".txt")


def skewed(count: int, longest: int, key: int) -> Any:
    """Sizes of which most are short."""
    return 1 + integers(count, 0, longest, key) * integers(count, 0, longest, key + 1) // longest


UNEVEN = skewed(83, 50, 1)
LONG = skewed(61, 240, 3)  # 13 exceed a budget of 110
EQUAL = np.full(67, 7)
ZEROS = integers(73, 0, 4, 5) * integers(73, 0, 9, 6)
FLOATS = skewed(79, 50, 7) / 4
MANY = skewed(3001, 50, 11)  # "packed" and "stratified" differ from some 500 batches on
TWO = np.stack([UNEVEN, integers(83, 1, 30, 8)], axis=1)
THREE = np.stack([integers(61, 1, 20, 9), integers(61, 1, 20, 10), np.full(61, 5)], axis=1)
WORK = UNEVEN.astype(float) ** 2
PAIRS = np.arange(83) // 2
GROUPS = integers(83, 0, 25, 13)
LABELS = np.array(["text", "code", "speech"])[np.minimum(integers(3001, 0, 11, 12) // 5, 2)]


def units(n: int, largest: float) -> float:
    """A cost that grows faster than the length, in whole numbers."""
    return n * (16 * int(largest) + int(largest) ** 2)


class Frames:
    """Sizes by index, as a dataset has them."""

    def __init__(self, sizes: Any) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)


# Each kind of batches with its budget. `balanced_ranks` is always given where it is allowed.
KINDS: dict[str, tuple[float, dict[str, Any]]] = {
    "stratified": (110, {"strategy": "stratified", "cost": "sum", "balanced_ranks": 8}),
    "packed": (110, {"strategy": "packed", "cost": "sum", "balanced_ranks": 8}),
    "sequential": (110, {"strategy": "sequential", "cost": "sum"}),
    "bucketed": (110, {"strategy": "bucketed", "cost": "sum", "balanced_ranks": 8}),
    "padded": (140, {"strategy": "bucketed", "cost": "padded", "balanced_ranks": 8}),
    "padded sequential": (220, {"strategy": "sequential", "cost": "padded"}),
    "function": (5000, {"strategy": "bucketed", "cost": units, "balanced_ranks": 8}),
    "function sequential": (6000, {"strategy": "sequential", "cost": units}),
}
ALL = tuple(KINDS)
SOME = ("stratified", "sequential", "padded", "function")
OTHERS = ("bucketed", "padded sequential", "function sequential")
MIXED = ("stratified", "padded", "function sequential")
TOKENS: dict[str, Any] = {"balanced_ranks": None, "tokens_per_step": 500}  # where balanced_ranks is not allowed

# name: kinds, sizes, factor of the budget, options.
VARIANTS: dict[str, tuple[tuple[str, ...], Any, float, dict[str, Any]]] = {
    "": (ALL, UNEVEN, 1, {}),
    "seed": (("stratified", "padded sequential"), UNEVEN, 1, {"seed": 2**63 + 11}),
    "in order": (SOME, UNEVEN, 1, {"shuffle": False}),
    "long": (("stratified", "padded"), LONG, 4, {}),
    "equal": (("stratified", "padded"), EQUAL, 0.5, {}),
    "zeros": (("stratified", "padded"), ZEROS, 0.5, {}),
    "floats": (("stratified", "sequential", "bucketed"), FLOATS, 0.25, {}),
    "max_items": ((*MIXED, "bucketed"), UNEVEN, 1, {"max_items": 6}),
    "few items": (("stratified", "padded"), UNEVEN[:50], 1, {"max_items": 2}),
    "drop": (SOME, UNEVEN, 0.6, {"tail": "drop"}),
    "pad": (OTHERS, UNEVEN, 0.6, {"tail": "pad"}),
    "window": (("stratified", "padded", "bucketed"), UNEVEN, 0.8, {"window": 30}),
    "balanced 1": (("stratified", "bucketed", "padded"), UNEVEN, 0.5, {"balanced_ranks": 1}),
    "balanced 3": (("packed", "padded"), UNEVEN, 0.5, {"balanced_ranks": 3}),
    "balanced 64": (("padded",), UNEVEN, 0.5, {"balanced_ranks": 64}),
    "multiple": (("bucketed", "padded", "function sequential"), UNEVEN, 1, {"batch_size_multiple": 4}),
    "multiple drop": (("padded", "padded sequential"), UNEVEN, 1, {"batch_size_multiple": 2, "tail": "drop"}),
    "length_multiple": (("padded", "function", "padded sequential"), UNEVEN, 1, {"length_multiple": 8}),
    "shapes": (("padded", "function"), UNEVEN, 1, {"shapes": 4}),
    "given shapes": (("padded",), UNEVEN, 1, {"shapes": [(14, 10), (5, 25), (2, 50)]}),
    "skip": (SOME, LONG, 1, {"oversize": "skip"}),
    "own batch": (SOME, LONG, 1, {"oversize": "own_batch"}),
    "split": (("packed", "sequential", "padded"), LONG, 1, {"oversize": "split"}),
    "split length": (("stratified", "padded"), LONG[:35], 1, {"oversize": "split", "max_length": 50}),
    "split drop": (("sequential",), LONG, 1, {"oversize": "split", "max_length": 50, "tail": "drop"}),
    "capped": (MIXED, LONG, 1, {"max_length": 25}),
    "extra": (MIXED, LONG, 1, {"max_length": 25, "extra_per_sample": 2}),
    "extra split": (("packed", "padded"), LONG[:35], 1, {"oversize": "split", "extra_per_sample": 3}),
    "work": (("stratified", "padded", "bucketed"), UNEVEN, 0.7, {"work": WORK}),
    "work in windows": (("packed",), UNEVEN, 0.7, {"work": WORK, "window": 30}),
    "two columns": (("stratified", "sequential", "bucketed"), TWO, 1, {"max_total_size": (110, 140)}),
    "two capped": (("sequential",), TWO, 1, {"max_total_size": (110, 140), "max_length": (None, 20)}),
    "two skip": (
        ("stratified",),
        np.concatenate([TWO[:50], [[111, 2], [9, 61]]]),
        1,
        {"max_total_size": (110, 60), "oversize": "skip", "max_length": (48, None)},
    ),
    "two extra": (("stratified",), TWO, 1, {"max_total_size": (130, 140), "extra_per_sample": (2, 0)}),
    "three columns": (("stratified", "sequential"), THREE, 1, {"max_total_size": (90, 70, 40)}),
    "order": (("packed", "function", "sequential"), UNEVEN, 1, {"sampler": Listed}),
    "order in windows": (("packed", "padded"), UNEVEN, 0.8, {"sampler": Listed, "window": 30}),
    "slices": (SOME, UNEVEN, 1, {"sampler": Sliced}),
    "slices in windows": (("stratified", "padded"), UNEVEN, 0.8, {"sampler": Sliced, "window": 30}),
    "slices drop": (("stratified", "padded sequential"), UNEVEN, 0.6, {"sampler": Sliced, "tail": "drop"}),
    "slices skip": (("padded", "sequential"), LONG, 1, {"sampler": Sliced, "oversize": "skip", "window": 30}),
    "slices split": (
        ("stratified", "sequential"),
        LONG[:30],
        1,
        {"sampler": Sliced, "oversize": "split", "max_length": 50},
    ),
    "list": (("stratified", "sequential"), UNEVEN, 1, {"sampler": lambda n: permutation(n, 5).tolist()[: n - 9]}),
    "curriculum": (("packed", "bucketed", "padded", "function"), UNEVEN, 0.7, {"curriculum": 9}),
    "long curriculum": (("stratified", "padded"), UNEVEN, 0.7, {"curriculum": 60}),
    "curriculum by work": (("stratified",), UNEVEN, 0.7, {"curriculum": 12, "work": WORK[::-1].copy()}),
    "curriculum skip": (("padded",), LONG, 1, {"curriculum": 12, "oversize": "skip"}),
    "tokens": (("stratified", "padded", "function"), UNEVEN, 1, TOKENS),
    "tokens drop": (("stratified", "padded"), UNEVEN, 1, TOKENS | {"tokens_per_step": 400, "tail": "drop"}),
    "tokens in order": (("stratified",), UNEVEN, 1, TOKENS | {"shuffle": False}),
    "stages": (("stratified", "padded"), UNEVEN, 1, TOKENS | {"tokens_per_step": [(0, 300), (5, 500), (9, 350)]}),
    "tokens accumulate": (("stratified",), UNEVEN, 1, TOKENS | {"accumulate": 6}),
    "tokens curriculum": (("stratified", "padded"), UNEVEN, 1, TOKENS | {"curriculum": 7}),
    "tokens of slices": (("stratified", "padded"), UNEVEN, 1, TOKENS | {"sampler": Sliced}),
    "tokens extra": (("stratified",), UNEVEN, 1, TOKENS | {"extra_per_sample": 2}),
    "tokens split": (("stratified",), LONG[:30], 1, TOKENS | {"oversize": "split", "max_length": 50}),
    "tokens of two columns": (("stratified",), TWO, 1, TOKENS | {"max_total_size": (110, 140)}),
    "dataset": (("sequential",), Frames(UNEVEN), 1, {}),
    "labels": (("stratified", "bucketed", "padded", "function"), UNEVEN, 0.7, {"by": LABELS[:83]}),
    "labels in order": (("packed", "padded"), UNEVEN, 0.7, {"by": LABELS[:83], "shuffle": False}),
    "labels drop": (("stratified",), UNEVEN, 0.7, {"by": LABELS[:83], "tail": "drop"}),
    "labels split": (("stratified",), LONG, 1, {"by": LABELS[:61], "oversize": "split"}),
    "labels of slices": (("stratified", "padded"), UNEVEN, 0.7, {"by": LABELS[:83], "sampler": Sliced, "window": 60}),
    "one label a step": (("packed", "padded"), UNEVEN, 0.7, {"by": LABELS[:83], "label_per": "step"}),
    "one label a step pad": (("bucketed",), UNEVEN, 0.7, {"by": LABELS[:83], "label_per": "step", "tail": "pad"}),
    "one label a step of slices": (
        ("stratified",),
        UNEVEN,
        0.7,
        {"by": LABELS[:83], "label_per": "step", "sampler": Sliced, "window": 60},
    ),
    "pairs": (("stratified", "padded", "sequential", "function"), UNEVEN, 1, {"group_by": PAIRS}),
    "groups": (("packed", "padded"), UNEVEN, 5, {"group_by": GROUPS}),
    "groups skip": (("stratified", "padded"), LONG, 1, {"group_by": GROUPS[:61], "oversize": "skip"}),
    "groups own batch": (("bucketed",), LONG, 1, {"group_by": GROUPS[:61], "oversize": "own_batch"}),
    "groups of few items": (("stratified", "padded"), UNEVEN, 5, {"group_by": GROUPS, "max_items": 9}),
    "groups of labels": (("stratified",), UNEVEN, 1, {"group_by": PAIRS, "by": PAIRS % 3}),
    "groups work": (("stratified", "padded"), UNEVEN, 5, {"group_by": GROUPS, "work": WORK}),
    "groups curriculum": (("stratified", "padded"), UNEVEN, 1, {"group_by": PAIRS, "curriculum": 9}),
    "groups of two columns": (("stratified",), TWO, 1, {"group_by": PAIRS, "max_total_size": (110, 140)}),
    "many labels": (("stratified",), MANY, 0.6, {"by": LABELS}),
    "many of one label a step": (("padded",), MANY, 0.6, {"by": LABELS, "label_per": "step"}),
    "few": (("stratified", "padded", "sequential"), UNEVEN[:5], 1, {}),
    "few drop": (("stratified",), UNEVEN[:30], 0.6, {"tail": "drop"}),
    "one": (("stratified",), UNEVEN[:1], 1, {}),
    "none": (("stratified", "sequential"), UNEVEN[:0], 1, {}),
    "many": (("stratified", "packed", "bucketed", "padded"), MANY, 0.6, {}),
}


def planned(sizes: Any, budget: Any, options: dict[str, Any], all_of_8: bool) -> Row:
    """Return the row of a batch sampler that plans an epoch at once."""
    given = {name: value for name, value in options.items() if name != "balanced_ranks" or value is not None}
    budget = given.pop("max_total_size", budget)

    def make(**changed: Any) -> Any:
        arguments = {"max_total_size": budget, **given, **changed}
        if "sampler" in arguments:
            arguments["sampler"] = arguments["sampler"](len(sizes))
        return sampler_with(sizes, **arguments)

    larger = tuple(3 * one // 2 for one in budget) if isinstance(budget, tuple) else 1.5 * budget
    without: tuple[str, ...] = () if "tokens_per_step" in options else ("optimizer",)
    if len(sizes) == len(MANY):
        without += ("keys", "resumed", "changed", "accepted", "all")
    return Row(make, {"max_total_size": larger}, None, without, all_of_8)


BLOCKS: dict[str, tuple[tuple[str, ...], Any, dict[str, Any]]] = {
    "": (("stratified", "bucketed", "padded", "padded sequential", "function"), UNEVEN, {}),
    "small blocks": (("sequential", "padded"), UNEVEN, {"block": 15}),
    "one block": (("stratified",), UNEVEN, {"block": 1000}),
    "in order": (("sequential", "padded"), UNEVEN, {"shuffle": False}),
    "drop": (MIXED, UNEVEN, {"tail": "drop"}),
    "pad": (SOME, UNEVEN, {"tail": "pad"}),
    "max_items": (("packed", "bucketed"), UNEVEN, {"max_items": 5}),
    "window": (("packed", "padded"), UNEVEN, {"window": 20}),
    "skip": (("packed", "padded"), LONG[:40], {"oversize": "skip"}),
    "own batch": (("sequential", "padded"), LONG, {"oversize": "own_batch"}),
    "capped": (MIXED, LONG, {"max_length": 25}),
    "extra": (("padded",), LONG, {"max_length": 25, "extra_per_sample": 2}),
    "two columns": (("stratified", "sequential"), TWO[:60], {"max_total_size": (70, 80)}),
    "few": (("stratified", "sequential"), UNEVEN[:5], {}),
    "none": (("sequential",), UNEVEN[:0], {}),
}


def blockwise(sizes: Any, budget: Any, options: dict[str, Any], all_of_8: bool) -> Row:
    """Return the row of a `BlockwiseSizeAwareBatchSampler` over shards of 0 to 22 samples."""
    starts = np.minimum(np.concatenate([[0], np.cumsum(integers(30, 0, 23, 20))]), len(sizes))
    shards = [sizes[begin:end] for begin, end in itertools.pairwise(starts)]

    def make(**changed: Any) -> BlockwiseSizeAwareBatchSampler:
        arguments = {"max_total_size": budget, "block": 40, **options, **changed}
        return BlockwiseSizeAwareBatchSampler(shards.__getitem__, lengths=[*map(len, shards)], **arguments)

    return Row(make, without=("plan", "report", "optimizer", "changed", "accepted"), all_of_8=all_of_8)


def rows() -> dict[str, Row]:
    found: dict[str, Row] = {}
    for variant, (kinds, sizes, factor, changed) in VARIANTS.items():
        for kind in kinds:
            budget, options = KINDS[kind]
            row = planned(sizes, budget * factor, {**options, **changed}, variant in ("", "drop", "pad"))
            found[f"{kind} | {variant}" if variant else kind] = row
    for variant, (kinds, sizes, changed) in BLOCKS.items():
        for kind in kinds:
            budget, options = KINDS[kind]
            row = blockwise(sizes, budget * 0.7, {**options, **changed}, variant == "drop")
            found[f"blocks, {kind} | {variant}" if variant else f"blocks, {kind}"] = row
    return found


ROWS = rows()


STATES = (
    "stratified",
    "sequential",
    "padded",
    "function",
    "padded | shapes",
    "stratified | two columns",
    "stratified | split length",
    "stratified | slices",
    "stratified | curriculum by work",
    "stratified | stages",
    "stratified | labels",
    "blocks, stratified",
)


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
