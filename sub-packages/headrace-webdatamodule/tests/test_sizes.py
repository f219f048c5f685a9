"""Sizes: bytes of a member, a column, or what a function says, asked once."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.webdatamodule import (
    DamagedSampleWarning,
    DamagedShardError,
    IndexedShards,
    SizesInMemoryWarning,
    add_column,
    index_shards,
    write_tars,
)
from headrace.webdatamodule.loading.sizes import column_name, sizes_of_shards

COUNT = 700  # of three chunks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made(tmp_path / "shards")


def made(folder: Path, count: int = COUNT) -> Path:
    write_tars([(f"s{i:03d}", {"json": b"%d" % i, "txt": b"x" * (i % 7)}) for i in range(count)], folder, n_shards=3)
    index_shards(folder, drop_columns=True)
    return folder


def size(folder: Path, sizes: Any, **options: Any) -> Any:
    return sizes_of_shards(IndexedShards(folder), folder, sizes, **options)


class Counted:
    """A function of a sample that writes down each call, in whichever process."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __call__(self, sample: dict[str, Any]) -> int:
        with self.log.open("a") as file:
            file.write("x")
        return int(sample["json"]) + 1

    @property
    def calls(self) -> int:
        return len(self.log.read_text()) if self.log.exists() else 0


def test_a_member_counts_by_its_bytes(folder: Path) -> None:
    for key in ("txt", "TXT"):
        assert size(folder, key).tolist() == [i % 7 for i in range(COUNT)]


def test_a_column_comes_first(folder: Path) -> None:
    add_column(folder, "txt", np.arange(COUNT))
    add_column(folder, "both", np.ones((COUNT, 2), np.float32))
    assert size(folder, "txt").tolist() == list(range(COUNT))
    assert size(folder, "both").shape == (COUNT, 2)


def test_a_large_column_is_the_map_of_its_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_column(folder, "tokens", np.arange(COUNT))
    monkeypatch.setattr("headrace.webdatamodule.shards.index.manifest._READ_BYTES", 0)  # from which size it is mapped
    found = size(folder, "tokens")
    assert isinstance(found.base, np.memmap)
    assert not found.flags.writeable
    assert found.tolist() == list(range(COUNT))


def test_a_name_of_neither_is_told_what_there_is(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"'length' is neither .* no columns and the members \['json', 'txt'\]"):
        size(folder, "length")
    add_column(folder, "tokens", np.zeros(COUNT, np.int64))
    with pytest.raises(ValueError, match=r"columns \['tokens'\]"):
        size(folder, "length")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (np.array(["a"] * COUNT), "holds <U1"),
        (np.zeros((COUNT, 2, 2)), r"of shape \[2, 2\]"),
        (np.where(np.arange(COUNT) == 5, np.nan, 1.0), "holds nan for sample 's005'"),
        (np.where(np.arange(COUNT) == 6, -1, 1), "holds -1 for sample 's006'"),
        (np.zeros(COUNT, np.bool_), "holds bool"),
    ],
)
def test_a_column_of_no_sizes_is_refused(folder: Path, values: Any, told: str) -> None:
    add_column(folder, "odd", values)
    with pytest.raises(ValueError, match=f"column 'odd'.*{told}"):
        size(folder, "odd")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_is_asked_once_and_its_answer_kept(folder: Path, tmp_path: Path, workers: int) -> None:
    function = Counted(tmp_path / "calls")
    before = IndexedShards(folder).fingerprint
    first = size(folder, function, num_workers=workers)
    assert first.tolist() == [i + 1 for i in range(COUNT)]
    assert function.calls == COUNT
    again = size(folder, function)
    assert function.calls == COUNT
    assert np.array_equal(first, again)
    assert IndexedShards(folder).columns == (column_name(function),)
    assert IndexedShards(folder).fingerprint == before  # a checkpoint still fits


def test_other_shards_are_sized_anew(folder: Path, tmp_path: Path) -> None:
    function = Counted(tmp_path / "calls")
    size(folder, function)
    made(folder, 5)
    assert size(folder, function).tolist() == [1, 2, 3, 4, 5]


def test_sizes_of_several_kinds(folder: Path) -> None:
    both = size(folder, lambda sample: (sample["json"], len(sample["txt"])))
    assert both.tolist() == [[i, i % 7] for i in range(COUNT)]
    assert size(folder, lambda sample: torch.tensor(sample["json"])).tolist() == list(range(COUNT))
    mixed = size(folder, lambda sample: sample["json"] + (0.5 if sample["json"] == 600 else 0))
    assert mixed[600] == 600.5


def test_the_callers_random_numbers_stay(folder: Path) -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    size(folder, lambda sample: 1, num_workers=1)
    assert torch.equal(torch.get_rng_state(), before)


def at(number: int, value: Any) -> Callable[[Any], Any]:
    return lambda sample: value if sample["json"] == number else 1


NO_SIZES = [
    (at(300, -1), "gave -1 for sample 's300'"),
    (at(301, float("nan")), "gave nan for sample 's301'"),
    (at(0, float("inf")), "gave inf for sample 's000'"),
    (at(699, None), "gave None for sample 's699'"),
    (at(5, "5"), "gave '5' for sample 's005'"),
    (at(5, True), "gave True for sample 's005'"),
    (at(5, [[1]]), r"gave \[\[1\]\] for sample 's005'"),
    (at(5, [1, 2]), "one size for sample 's000', and 2 sizes for 's005'"),
    (lambda sample: [1] * (1 + (sample["json"] > 255)), "1 sizes for samples before 's256', and 2 sizes"),
]
IN_WORKERS = [
    pytest.param(*case, 2, marks=() if number % 4 == 0 else pytest.mark.nightly) for number, case in enumerate(NO_SIZES)
]


@pytest.mark.parametrize(("function", "told", "workers"), [*((*case, 0) for case in NO_SIZES), *IN_WORKERS])
def test_what_is_no_size_is_named(folder: Path, function: Any, told: str, workers: int) -> None:
    with pytest.raises(ValueError, match=told):
        size(folder, function, num_workers=workers)
    assert IndexedShards(folder).columns == ()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_that_fails_says_with_which_sample(folder: Path, workers: int) -> None:
    def fails(sample: dict[str, Any]) -> float:
        return 1 / abs(int(sample["json"]) - 411)

    with pytest.raises(ZeroDivisionError) as caught:
        size(folder, fails, num_workers=workers)
    said = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "in the sizes function, with sample 's411'" in said
    assert "collate" not in said.replace("collate_fn(data)", "")  # torch's own frame, in the text of a worker's error


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_that_stops_an_iteration_is_an_error(folder: Path, workers: int) -> None:
    with pytest.raises(RuntimeError, match="the sizes function raised StopIteration"):
        size(folder, lambda sample: next(iter([])) if sample["json"] == 411 else 1, num_workers=workers)


def test_what_is_no_function_is_a_type_error(folder: Path) -> None:
    with pytest.raises(TypeError, match="or a function of a sample, got 3"):
        size(folder, 3)


LIMIT = 10
WEIGHTS = {"a": 1}


def helper(sample: Any) -> int:
    return LIMIT


def by_helper(sample: Any) -> int:
    return helper(sample)


def closing_over(number: int) -> Callable[[Any], int]:
    return lambda sample: number


def test_code_constants_defaults_and_cells_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def closing(over: Any) -> Callable[[Any], Any]:
        return lambda sample: over

    def scaled(sample: Any, *, by: int = 1) -> int:
        return by

    def scaled_twice(sample: Any, *, by: int = 2) -> int:
        return by

    scaled_twice.__name__ = scaled.__name__
    names = [
        column_name(function)
        for function in (
            lambda sample: 1,
            lambda sample: 2,
            lambda sample: len(sample),
            lambda sample: sum(sample),
            lambda sample, by=1: by,
            lambda sample, by=2: by,
            closing(1),
            closing(2),
            closing(True),
            closing(helper),
            scaled,
            scaled_twice,
            partial(scaled, by=3),
            partial(scaled, by=4),
            Counted(Path("a")),
            Counted(Path("b")),
            by_helper,
        )
    ]
    assert len(set(names)) == len(names)
    assert column_name(closing(1)) == column_name(closing(1))
    assert column_name(partial(scaled, by=3)) == column_name(partial(scaled, by=3))
    assert column_name(len, None) != column_name(len, closing)
    before = column_name(by_helper)
    monkeypatch.setitem(globals(), "LIMIT", 11)
    assert column_name(by_helper) != before
    monkeypatch.undo()
    assert column_name(by_helper) == before


def test_helpers_in_inner_functions_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    functions: list[Any] = [
        lambda sample: sum(helper(one) for one in sample),
        lambda sample: [helper(one) for one in sample],
        lambda sample: max(sample, key=lambda one: LIMIT - one),
        lambda sample: WEIGHTS["a"],
    ]
    before = [column_name(function) for function in functions]
    monkeypatch.setitem(globals(), "LIMIT", 11)
    monkeypatch.setitem(WEIGHTS, "a", 2)
    after = [column_name(function) for function in functions]
    assert not set(before) & set(after)
    assert after == [column_name(function) for function in functions]


@pytest.mark.parametrize("at", range(4))
def test_each_of_several_alike_tells(at: int) -> None:
    def together(*numbers: int) -> Callable[..., Any]:
        inner = [closing_over(number) for number in numbers]
        return lambda sample: [one(sample) for one in inner]

    changed = [1, 2, 3, 4]
    changed[at] = 9
    assert column_name(together(1, 2, 3, 4)) == column_name(together(1, 2, 3, 4)) != column_name(together(*changed))


def test_the_code_of_a_callable_object_tells() -> None:
    def kind(call: Callable[..., int]) -> Any:
        return type("Sizer", (), {"__call__": call, "__module__": __name__})()

    assert column_name(kind(lambda self, sample: 1)) != column_name(kind(lambda self, sample: 2))


def test_what_an_object_holds_and_does_tells() -> None:
    def kind(cost: Callable[..., int]) -> Any:
        body = {"__call__": lambda self, sample: self.cost(), "cost": cost, "__module__": __name__}
        return type("Sizer", (), body)

    def holding(**state: Any) -> Any:
        made = kind(lambda self: 1)()
        vars(made).update(state)
        return made

    assert column_name(kind(lambda self: 1)()) != column_name(kind(lambda self: 2)())
    assert column_name(kind(lambda self: 1)().cost) != column_name(kind(lambda self: 2)().cost)
    assert column_name(lru_cache(closing_over(1))) != column_name(lru_cache(closing_over(2)))
    assert column_name(holding(kept=torch.ones(3))) == column_name(holding(kept=torch.ones(3)))
    assert column_name(holding(kept=torch.ones(3))) != column_name(holding(kept=torch.zeros(3)))
    assert column_name(holding(kept=np.arange(3))) != column_name(holding(kept=np.arange(4)))


@pytest.mark.parametrize(
    "thing",
    [
        torch.ones((), dtype=torch.bfloat16),
        torch.ones(2, 3, requires_grad=True).t(),
        torch.ones(3).bool(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, 2).to_sparse(),
        torch.empty(0, 3),
        torch.empty(3, device="meta"),
        torch.nn.Linear(1, 1),
        np.array([{}], dtype=object),
        np.zeros(2, [("a", "<i4")]),
        threading.Lock(),
        sys.stdout,
        re.compile("a"),
        (number for number in range(3)),
    ],
)
def test_anything_can_be_told(thing: Any) -> None:
    def function(sample: Any) -> Any:
        return thing

    assert column_name(function) == column_name(function)
    assert column_name(partial(max, thing)) == column_name(partial(max, thing))


def test_functions_that_call_themselves_have_a_name() -> None:
    def deep(sample: Any) -> int:
        return deep(sample[0]) if sample else 0

    assert column_name(deep) == column_name(deep)


@pytest.mark.parametrize("function", [len, max, str, Counted.__call__, partial(max, 1), column_name])
def test_names_are_parts_of_a_file_name(folder: Path, function: Any) -> None:
    add_column(folder, column_name(function), np.zeros(COUNT))
    assert column_name(function) in IndexedShards(folder).columns


@pytest.mark.slow
def test_names_are_the_same_in_every_process() -> None:
    script = """
from functools import partial
from headrace.webdatamodule.loading.sizes import column_name
known = {"a", "b", "gamma", "delta"}
def f(sample, kinds=frozenset(known)):
    return len(sample) if sample in {"x", "yy", "zzz", "wwww"} else len(known)
class Tokens:
    def __init__(self):
        self.special = set(known)
    def length(self, sample):
        return len(sample)
print(column_name(f), column_name(partial(f, kinds=known)), column_name(lambda s: known), column_name(Tokens().length))
"""
    names = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(names) == 1


@pytest.mark.parametrize("place", ["list", "tar", "url"])
def test_sizes_that_find_no_place_are_held(folder: Path, tmp_path: Path, place: str) -> None:
    tars = sorted(folder.glob("*.tar"))
    source: Any = {"list": tars, "tar": tars[0], "url": folder.as_uri().replace("file:", "local:")}[place]
    shards = IndexedShards(source)
    function = Counted(tmp_path / "calls")
    for calls in (1, 2):
        with pytest.warns(SizesInMemoryWarning, match="add_column"):
            assert len(sizes_of_shards(shards, source, function)) == len(shards)
        assert function.calls == calls * len(shards)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    # pytest's own directories are closed to other users.
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        folder = made(Path(name) / "shards", 10)
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)


READ_ONLY = """
import json, os, sys, warnings
from headrace.webdatamodule import IndexedShards
from headrace.webdatamodule.loading.sizes import sizes_of_shards
shards = IndexedShards(sys.argv[1])
if os.getuid() == 0:
    os.setuid(65534)  # whom permissions bind
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    sizes = sizes_of_shards(shards, sys.argv[1], lambda sample: sample["json"])
print(json.dumps([sizes.tolist(), [[type(one.message).__name__, str(one.message)] for one in caught]]))
"""


@pytest.mark.slow
def test_a_directory_that_is_read_only_warns(open_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY, str(open_folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    sizes, warned = json.loads(done.stdout)
    assert sizes == list(range(10))
    assert [kind for kind, _ in warned] == ["SizesInMemoryWarning"]
    assert "ermission denied" in warned[0][1]
    assert "will be again next time" in warned[0][1]
    assert IndexedShards(open_folder).columns == ()


def test_two_that_ask_at_once_keep_one_answer(folder: Path, tmp_path: Path) -> None:
    function = Counted(tmp_path / "calls")
    before = IndexedShards(folder)
    size(folder, function)
    assert np.array_equal(sizes_of_shards(before, folder, function), size(folder, function))
    assert function.calls == 2 * COUNT
    assert len(IndexedShards(folder).columns) == 1


def test_shards_that_were_replaced_meanwhile_keep_nothing(folder: Path) -> None:
    def replacing(sample: dict[str, Any]) -> int:
        if sample["json"] == 699:
            made(folder, 5)
        return 1

    with pytest.warns(SizesInMemoryWarning, match="replaced meanwhile"):
        size(folder, replacing)
    assert IndexedShards(folder).columns == ()


def test_shards_that_change_are_sized_anew(tmp_path: Path) -> None:
    write_tars([(f"s{i}", {"txt": b"x" * (i + 1)}) for i in range(3)], tmp_path, n_shards=1)
    index_shards(tmp_path)
    assert sizes_of_shards(IndexedShards(tmp_path), tmp_path, letters).tolist() == [1, 2, 3]
    write_tars([(f"t{i}", {"txt": b"x" * 9}) for i in range(3)], tmp_path, n_shards=1, prefix="more")
    index_shards(tmp_path)
    assert sizes_of_shards(IndexedShards(tmp_path), tmp_path, letters).tolist() == [9, 9, 9, 1, 2, 3]


def letters(sample: dict[str, Any]) -> int:
    return len(sample["txt"])


def test_damaged_samples_have_no_size_when_they_are_skipped(tmp_path: Path) -> None:
    samples = [(f"s{i}", {"txt": b"word%d" % i, "bin": b"x" * 40_000}) for i in range(9)]
    write_tars(samples, tmp_path, n_shards=1)
    index_shards(tmp_path)
    (tar,) = tmp_path.glob("*.tar")
    tar.write_bytes(tar.read_bytes().replace(b"word2", b"worm2"))
    with pytest.raises(DamagedShardError):
        sizes_of_shards(IndexedShards(tmp_path), tmp_path, letters)
    with pytest.warns(DamagedSampleWarning, match=r"damaged samples of sizes have no size, 1 of 9: .*s2"):
        found = sizes_of_shards(IndexedShards(tmp_path), tmp_path, letters, on_error="skip")
    assert found.tolist() == [5, 5, 0, 5, 5, 5, 5, 5, 5]
    assert IndexedShards(tmp_path).columns == ()
