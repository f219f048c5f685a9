"""Golden batches: no batch or step of `DistributedBatchSampler` changes by accident.

``python tests/test_golden_batches.py --write`` writes the table anew, ``--states`` the states of some rows: a batch
that changes is a decision, seen in the difference of these files. ``--show ROW`` prints what a row does, to compare two
versions.
"""

from pathlib import Path
from typing import Any

import pytest
from golden import Listed, Row, Sliced, command, differences, permutation, states, stored, stored_states

from headrace.webdatamodule import DistributedBatchSampler

TABLE = Path(__file__).with_suffix(".txt")
SIZES = ((97, 4), (64, 4), (31, 7), (25, 1), (5, 2))  # samples, and those of a batch
FEW = ((3, 8), (1, 3), (0, 2))
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "drop": {"drop_last": True},
    "in order": {"shuffle": False},
    "in order, drop": {"shuffle": False, "drop_last": True},
    "seed": {"seed": 2**63 + 11},
    "order": {"sampler": Listed},
    "slices": {"sampler": Sliced},
    "slices, drop": {"sampler": Sliced, "drop_last": True},
    "list": {"sampler": lambda n: permutation(n, 5).tolist()},
}


def row(n_samples: int, batch_size: int, options: dict[str, Any]) -> Row:
    def make(**changed: Any) -> DistributedBatchSampler:
        arguments = {"batch_size": batch_size, **options, **changed}
        if "sampler" in arguments:
            arguments["sampler"] = arguments["sampler"](n_samples)
        return DistributedBatchSampler(n_samples, **arguments)

    return Row(make, {"batch_size": batch_size + 2}, None, ("all", "plan", "report", "optimizer"), all_of_8=True)


ROWS = {
    f"{n_samples} by {batch_size}" + (f" | {name}" if name else ""): row(n_samples, batch_size, options)
    for n_samples, batch_size in SIZES + FEW
    for name, options in OPTIONS.items()
    if (n_samples, batch_size) in SIZES or name in ("", "drop", "slices")
}


STATES = ("97 by 4", "64 by 4 | drop", "97 by 4 | slices")


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
