"""Tables of golden plans: digests of what a batch sampler does, asked through its public names alone.

A table is a text file beside its test: a line for each row, with its name and a value for each column. All numbers that
rows are made of come from `integers`, so that they are the same on every platform and with every numpy. Beside it stand
the states of some rows in full.

Columns:
    len, keys1, keys3, keys8: ``len()`` and the batches in worlds of 1, 3 and 8 ranks: of 1 rank in epochs 0, 1 and 3,
        of more ranks in epoch 1; of 8 those of the first, the fourth and the last, unless ``all_of_8``.
    all: The batches that ``rank="all"`` gets of epoch 1 in a world of 3.
    draws: What ``draws`` is behind each of the batches of ``keys1`` and ``keys3``.
    left: ``remaining`` before, in the middle and at the end of the epoch of ``keys3``.
    step: ``step(n)`` for future steps of two epochs, and for past ones.
    plan, report: All batches of ``plan()`` of epoch 1, ``batch`` and ``worst_batches``; the figures of ``report()``.
    optimizer: What the sampler says about its optimizer steps.
    resumed: The rest of an epoch after a resume, from 3 ranks on 2, and with ``rank="all"``.
    changed: An epoch in which samples are excluded, a step is skipped and the number of ranks changes.
    accepted: The rest of an epoch after a resume with another value of one argument.
    reweighted: What is left of two epochs after other weights of a mixture, and the draw and step that have them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

EPOCHS = (0, 1, 3)
FIGURES = (
    *("batches", "samples", "items_min", "items_max", "size", "padded", "padding", "cost", "budget", "largest"),
    *("fill", "fills", "over_budget", "num_replicas", "steps", "imbalance", "oversize", "skipped", "co_occurrence"),
    *("shapes", "shapes_cost", "autocorrelation"),
)
FIGURES_OF_STEPS = (
    *("steps", "tokens_asked", "tokens_min", "tokens_mean", "tokens_max", "tokens_last"),
    *("micro_batches_min", "micro_batches_max"),
)
FIGURES_OF_CURRICULUM = ("steps", "share_at_start", "share_at_end")
REFUSED = (IndexError, TypeError, ValueError)


def integers(count: int, low: int, high: int, key: int = 0) -> NDArray[np.int64]:
    """Return integers from ``low`` to below ``high``: splitmix64 of a key and their place."""
    with np.errstate(over="ignore"):
        state = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(key) * np.uint64(1_000_003)
        state *= np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (low + (state % np.uint64(high - low)).astype(np.int64)).astype(np.int64)


def permutation(count: int, key: int) -> NDArray[np.int64]:
    return np.argsort(integers(count, 0, 2**62, key), kind="stable")


class Listed:
    """An order that is read as a whole, another one in each epoch."""

    def __init__(self, n_samples: int) -> None:
        self.n_samples, self.epoch = n_samples, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.n_samples

    def __iter__(self) -> Iterator[int]:
        return iter(permutation(self.n_samples, 50 + self.epoch).tolist())


class Sliced:
    """An order that slices are taken from, with repeats: a quarter longer than the data."""

    fingerprint = "slices"

    def __init__(self, n_samples: int) -> None:
        self.n_samples, self.epoch = n_samples, 0
        self.epoch_length = n_samples + n_samples // 4

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.epoch_length

    def __iter__(self) -> Iterator[int]:
        return iter(self.take(0, len(self)).tolist())

    def take(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the order of the current epoch from ``start`` to below ``stop``."""
        return integers(self.epoch_length, 0, max(1, self.n_samples), 90 + self.epoch)[start:stop]


@dataclass(frozen=True)
class Row:
    """How a row's sampler is made.

    Args:
        make: Makes it; takes ``num_replicas``, ``rank`` and arguments that replace the row's.
        other: An argument with another value, which a resume accepts.
        weights: Other weights, where a mixture gives the order.
        alone: Columns to leave out, as the class has no such method.
    """

    make: Callable[..., Any]
    other: dict[str, Any] = field(default_factory=dict)
    weights: Any = None
    without: tuple[str, ...] = ()
    all_of_8: bool = False


def digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=4).hexdigest()


def keys(batch: Iterable[Any]) -> list[Any]:
    """Return a batch in JSON: an int for a sample, three for a piece of one."""
    return [key if type(key) is int else [int(key.index), int(key.start), int(key.stop)] for key in batch]


def read(sampler: Iterable[Any]) -> list[list[Any]]:
    return [keys(batch) for batch in sampler]


def attempt(ask: Callable[[], Any]) -> Any:
    """Return an answer, or the class of the error that refuses it: texts change, and tell no plan."""
    try:
        return ask()
    except REFUSED as error:
        return type(error).__name__


def rounded(value: Any) -> Any:
    """Return a figure in JSON, to six digits: sums differ by platform behind them."""
    if isinstance(value, tuple | list):
        return [rounded(one) for one in value]
    if isinstance(value, str) or value is None:
        return value
    number = float(value)
    return str(number) if math.isnan(number) or math.isinf(number) else float(f"{number:.6g}")


def figures(report: Any) -> list[Any]:
    found = [[name, rounded(getattr(report, name))] for name in FIGURES]
    for part, names in (("optimizer_steps", FIGURES_OF_STEPS), ("curriculum", FIGURES_OF_CURRICULUM)):
        inner = getattr(report, part)
        found.append([part, None if inner is None else [rounded(getattr(inner, name)) for name in names]])
    return found


class Epochs:
    """The epochs of all ranks in worlds of 1, 3 and 8, as far as a table asks for them."""

    def __init__(self, row: Row) -> None:
        self.len: dict[int, list[Any]] = {}
        self.keys: dict[int, list[Any]] = {}
        self.draws: list[Any] = []
        self.left: list[Any] = []
        for world in (1, 3, 8):
            self.len[world], self.keys[world] = [], []
            for rank in range(world) if world < 8 or row.all_of_8 else (0, 3, 7):
                sampler = row.make(num_replicas=world, rank=rank)
                for epoch in EPOCHS if world == 1 else EPOCHS[1:2]:
                    sampler.set_epoch(epoch)
                    if rank == 0:
                        self.len[world].append(attempt(sampler.__len__))
                    self.keys[world].append(attempt(partial(self.read, sampler, world)))

    def read(self, sampler: Any, world: int) -> list[Any]:
        batches, left, draws = [], [sampler.remaining] if world == 3 else [], []
        for number, batch in enumerate(sampler):
            batches.append(keys(batch))
            draws.append(None if (own := getattr(sampler, "draws", None)) is None else list(own))
            if number == 2 and world == 3:
                left.append(sampler.remaining)
        if world == 3:
            self.left.append([*left, sampler.remaining])
        if world < 8:
            self.draws.append(draws)
        return batches


def of_all(row: Row) -> Any:
    sampler = row.make(num_replicas=3, rank="all")
    sampler.set_epoch(1)
    return [len(sampler), read(sampler)]


def steps(row: Row) -> Any:
    sampler = row.make(num_replicas=3, rank=1)
    length = len(sampler)
    found = [read(sampler.step(number)) for number in (0, length + 1)]
    found.append(read(sampler.step(2, num_replicas=2)))
    list(sampler)
    sampler.set_epoch(1)
    list(islice(sampler, 2))
    return [*found, [read(sampler.step(number)) for number in (1, length + 1)]]


def planned(row: Row) -> Any:
    sampler = row.make(num_replicas=3, rank=0)
    sampler.set_epoch(1)
    plan = sampler.plan()
    found = [read(plan.keys(number) for number in range(len(plan))), attempt(lambda: read(sampler.worst_batches(2)))]
    return [*found, attempt(lambda: [keys(sampler.batch(number)) for number in (0, 2)])]


def reported(row: Row) -> Any:
    return figures(row.make(num_replicas=3, rank=0).report())


def optimizer(row: Row) -> Any:
    sampler = row.make(num_replicas=3, rank=2)
    found = []
    for epoch in EPOCHS:
        sampler.set_epoch(epoch)
        found.append([sampler.num_optimizer_steps(epoch), [len(step) for step in sampler.optimizer_steps(sampler)]])
        found.append([sampler.accumulation.tolist(), rounded(sampler.tokens_at(epoch * 4))])
    return found


def resumed(row: Row) -> Any:
    before = row.make(num_replicas=3, rank=2)
    before.set_epoch(1)
    taken = read(islice(before, 2))
    state = json.loads(json.dumps(before.state_dict()))
    rest = []
    for rank in (0, 1) if "all" in row.without else (1, "all"):
        after = row.make(num_replicas=2, rank=rank)
        after.load_state_dict(state)
        rest.append([after.remaining, read(after), len(after)])
    return [taken, rest]


def changed(row: Row) -> Any:
    sampler = row.make(num_replicas=2, rank=1)
    sampler.set_epoch(1)
    batches = iter(sampler)
    found = read(islice(batches, 1))
    sampler.exclude([3, 0])
    found += read(islice(batches, 1))
    found += [sampler.skip(1).tolist(), *read(islice(batches, 1))]
    sampler.reshard(3, 2)
    found += read(islice(batches, 1))
    return [found, sampler.remaining, read(batches), read(sampler.step(1)), read(sampler.step(3))]


def accepted(row: Row) -> Any:
    before = row.make(num_replicas=2, rank=1)
    taken = read(islice(before, 2))
    state = json.loads(json.dumps(before.state_dict()))
    after = row.make(num_replicas=2, rank=0, **row.other)
    after.load_state_dict(state, accept=set(row.other))
    return [taken, after.remaining, read(after)]


def reweighted(row: Row) -> Any:
    sampler = row.make(num_replicas=2, rank=1)
    batches = iter(sampler)
    found: list[Any] = [read(islice(batches, 3)), list(sampler.reweight(row.weights)), read(batches)]
    sampler.set_epoch(1)
    return [*found, read(sampler), [read(sampler.step(number)) for number in (1, 5, 17)]]


ASKED: dict[str, Callable[[Row], Any]] = {
    "all": of_all,
    "step": steps,
    "plan": planned,
    "report": reported,
    "optimizer": optimizer,
    "resumed": resumed,
    "changed": changed,
    "accepted": accepted,
    "reweighted": reweighted,
}


def answers(row: Row) -> dict[str, Any]:
    """Return what a row's sampler does, by column, in full."""
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "keys" not in row.without:
            epochs = Epochs(row)
            found |= {"len": list(epochs.len.values())}
            found |= {f"keys{world}": own for world, own in epochs.keys.items()}
            found |= {"draws": epochs.draws, "left": epochs.left}
        for name, ask in ASKED.items():
            if name not in row.without and (name != "reweighted" or row.weights is not None):
                found[name] = attempt(partial(ask, row))
    return found


def columns(row: Row) -> dict[str, str]:
    """Return a row of the table: lengths as they are, refusals by the class of the error, digests of the rest."""
    found = answers(row)
    shown = {name: value if isinstance(value, str) else digest(value) for name, value in found.items()}
    if "len" in found:
        shown["len"] = "/".join(",".join(map(str, own)) for own in found["len"])
    return shown


def stored(table: Path) -> dict[str, dict[str, str]]:
    """Return the rows of a table."""
    found = {}
    for line in table.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, values = line.partition(": ")
            found[name] = dict(value.split("=", 1) for value in values.split())
    return found


def differences(name: str, row: Row, table: Path) -> dict[str, str]:
    """Return the columns of a row that differ from the table, each as "stored, now found"."""
    wanted, found = stored(table).get(name, {}), columns(row)
    return {
        column: f"{wanted.get(column)}, now {found.get(column)}"
        for column in {**wanted, **found}
        if wanted.get(column) != found.get(column)
    }


def states(row: Row) -> list[Any]:
    """Return states of a run: in an epoch, after changes where the class has them, and after a resume."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = row.make(num_replicas=2, rank=1)
        list(sampler)
        sampler.set_epoch(1)
        batches = iter(sampler)
        list(islice(batches, 2))
        found = [json.loads(json.dumps(sampler.state_dict()))]
        if "changed" not in row.without and attempt(lambda: sampler.exclude([3, 0])) is None:
            list(islice(batches, 1))
            sampler.skip(1)
            if row.weights is not None:
                sampler.reweight(row.weights)
            found.append(json.loads(json.dumps(sampler.state_dict())))
        after = row.make(num_replicas=3, rank=0)
        after.load_state_dict(found[-1])
        list(islice(after, 1))
        return [*found, json.loads(json.dumps(after.state_dict()))]


def states_beside(table: Path) -> Path:
    """Return the file of the states of a table's rows: their layout is none of its columns."""
    return table.with_name(f"{table.stem}_states.json")


def stored_states(table: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(states_beside(table).read_text(encoding="utf-8"))
    return found


def command(rows: dict[str, Row], table: Path, with_states: Iterable[str]) -> None:
    """Write the table and the states of some rows, or show what rows do in full, to compare two versions."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help=f"write {table.name} anew")
    parser.add_argument("--states", action="store_true", help=f"write {states_beside(table).name} anew")
    parser.add_argument("--show", metavar="ROW", nargs="+", help="print what these rows do, in full, as JSON")
    arguments = parser.parse_args()
    if arguments.write:
        lines = [
            " ".join([f"{name}:", *(f"{column}={value}" for column, value in columns(row).items())])
            for name, row in rows.items()
        ]
        head = f"# Written by `python tests/{table.stem}.py --write`. A line that changes is a decision: say why."
        table.write_text("\n".join([head, *lines, ""]), encoding="utf-8")
        print(f"{len(lines)} rows in {table.name}")
    if arguments.states:
        text = json.dumps({name: states(rows[name]) for name in with_states}, indent=1)
        states_beside(table).write_text(f"{text}\n", encoding="utf-8")
    for name in arguments.show or ():
        print(name)
        for column, value in answers(rows[name]).items():
            print(f"  {column}: {json.dumps(value)}")
