"""The command as a user runs it."""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.cli import main
from headrace.size_aware_batching.planning.options import Strategy

COMMAND = [sys.executable, "-m", "headrace.size_aware_batching.cli"]


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    sizes = np.random.default_rng(0).lognormal(np.log(360), 0.8, 4000).clip(8, 2048).astype(np.int32)
    np.save(tmp_path / "lengths.npy", sizes)
    return tmp_path / "lengths.npy"


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, words)], text=True, capture_output=True, check=False)


def printed(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main([str(word) for word in words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headrace-batches: error: ")
    assert err.count("\n") == 1
    return err


def row(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(name + " "))
    return re.split(r"\s{2,}", line.strip())[1:]


@pytest.mark.slow
def test_the_command_prints_and_draws_strategies_side_by_side(lengths: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plans.png"
    ways = ["stratified", "packed"]
    result = command(lengths, "--budget", "16384", "--strategy", *ways, "--draw", picture)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[0].split() == ways
    assert row(result.stdout, "samples") == ["4,000", "4,000"]
    assert all(float(fill.rstrip("%")) > 95 for fill in row(result.stdout, "fill"))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly  # in this process it is tested below
def test_the_command_refuses_in_one_line_with_status_2(lengths: Path) -> None:
    result = command(lengths, "--budget", "1000")
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert "sizes must not exceed --budget=1000" in result.stderr
    assert "--oversize='skip'" in result.stderr


def test_help_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "--budget" in capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"headrace-batches {version('headrace-size-aware-batching')}\n"


@pytest.mark.parametrize(("cost", "usual"), [("sum", "stratified"), ("padded", "bucketed")])
def test_json_holds_what_the_sampler_reports(
    lengths: Path, capsys: pytest.CaptureFixture[str], cost: str, usual: Strategy
) -> None:
    words = [
        "--cost",
        cost,
        "--num-replicas",
        "4",
        "--seed",
        "3",
        "--epoch",
        "2",
        "--max-length",
        "1000",
        "--extra-per-sample",
        "2",
        "--max-items",
        "40",
        "--balanced-ranks",
        "4",
    ]
    result = json.loads(printed(capsys, lengths, "--budget", "8192", *words, "--json"))
    sampler = DistributedSizeAwareBatchSampler(
        np.load(lengths),
        8192,
        strategy=usual,
        cost="padded" if cost == "padded" else "sum",
        num_replicas=4,
        rank=0,
        seed=3,
        max_length=1000,
        extra_per_sample=2,
        max_items=40,
        balanced_ranks=4,
    )
    assert result["plans"] == {usual: json.loads(json.dumps(vars(sampler.report(2))))}
    assert (result["samples"], result["budget"], result["num_replicas"]) == (4000, [8192], 4)


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.txt", "3\n4\n5\n"), ("a.fasta", ">1\nMKV\n>2\nMKVL\n>3\nMKVLA\n")],
)
def test_sizes_come_from_text_and_fasta(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    out = printed(capsys, tmp_path / name, tmp_path / name, "--budget", "5", "--strategy", "packed")
    assert row(out, "samples") == ["6"]
    assert row(out, "size") == ["24"]
    assert row(out, "batches") == ["6"]


def test_sizes_come_from_columns_of_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file, folder = tmp_path / "train.parquet", tmp_path / "parts"
    folder.mkdir()
    for path, lengths in ((file, [3, 4, 5]), (folder / "0.parquet", [5, 1]), (folder / "1.parquet", [6])):
        parquet.write_table(arrow.table({"length": lengths, "text": ["a"] * len(lengths)}), path)
    out = printed(capsys, file, folder, "--column", "length", "--budget", "6")
    assert (row(out, "samples"), row(out, "size")) == (["6"], ["24"])
    assert "train.parquet: has no column 'tokens', only 'length', 'text'" in refused(
        capsys, file, "--column", "tokens", "--budget", "6"
    )
    assert "train.parquet: sizes must be numbers" in refused(capsys, file, "--column", "text", "--budget", "6")
    for path in (file, folder):
        assert f"{path.name}: --column NAME must be given for Parquet" in refused(capsys, path, "--budget", "6")


def test_parquet_needs_pyarrow_and_other_files_no_column(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "only for them" in refused(capsys, lengths, "--column", "length", "--budget", "6")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # as if it were not installed
    (tmp_path / "train.parquet").touch()
    assert "train.parquet: pip install pyarrow" in refused(
        capsys, tmp_path / "train.parquet", "--column", "length", "--budget", "6"
    )


def test_several_columns_take_several_budgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "graphs.npy", np.array([[2, 1], [2, 9], [2, 1], [2, 9]]))
    plan = json.loads(printed(capsys, tmp_path / "graphs.npy", "--budget", "4,10", "--json"))["plans"]["stratified"]
    assert plan["batches"] >= 2
    assert plan["items_max"] <= 2
    assert "--budget must have one budget for each column of sizes, got 1 for shape (4, 2)" in refused(
        capsys, tmp_path / "graphs.npy", "--budget", "4"
    )


def test_a_strategy_has_its_cost(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(lengths), "--budget", "8192", "--json"]
    plans = json.loads(printed(capsys, *words, "--strategy", "bucketed", "packed", "sequential"))["plans"]
    assert [plan["cost"] for plan in plans.values()] == ["padded", "sum", "sum"]
    plans = json.loads(printed(capsys, *words, "--strategy", "bucketed", "--cost", "sum"))["plans"]
    assert plans["bucketed"]["cost"] == "sum"
    assert list(json.loads(printed(capsys, *words, "--cost", "padded"))["plans"]) == ["bucketed"]


def test_few_shapes_and_what_they_cost(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(lengths), "--budget", "8192", "--cost", "padded"]
    free, few = printed(capsys, *words), printed(capsys, *words, "--shapes", "8")
    assert (row(few, "shapes"), row(free, "shapes cost")) == (["8"], ["1.0000"])
    assert int(row(free, "shapes")[0]) > 100
    assert 1.1 < float(row(few, "shapes cost")[0]) < 1.3
    assert "--shapes=8 goes with --cost='padded' or a function, got 'sum'" in refused(
        capsys, lengths, "--budget", "8192", "--shapes", "8"
    )


@pytest.mark.slow
def test_oversize_samples_are_counted(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    over = int((np.load(lengths) > 1000).sum())
    assert over > 0
    skip = printed(capsys, lengths, "--budget", "1000", "--oversize", "skip")
    assert (row(skip, "samples"), row(skip, "skipped")) == ([f"{4000 - over:,}"], [str(over)])
    own = printed(capsys, lengths, "--budget", "1000", "--oversize", "own_batch")
    assert (row(own, "samples"), row(own, "over budget"), row(own, "skipped")) == (["4,000"], [str(over)], ["0"])
    split = printed(capsys, lengths, "--budget", "1000", "--oversize", "split")
    assert (row(split, "oversize"), row(split, "over budget"), row(split, "skipped")) == ([str(over)], ["0"], ["0"])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--budget", "16384", "--cost", "padded", "--strategy", "packed"], "--strategy='packed' works with --cost="),
        (["--budget", "16384", "--batch-size-multiple", "8"], "--batch-size-multiple=8 goes with"),
        (["--budget", "16384", "--strategy", "best"], "invalid choice: 'best'"),
        (["--budget", "16384", "--num-replicas", "0"], "--num-replicas must be an int >= 1, got 0"),
        (["--budget", "16384", "--seed", "-1"], "--seed must be an int from 0 to"),
        (["--budget", "16384", "--epoch", "-1"], "--epoch must be an int >= 0, got -1"),
        (["--budget", "16384", "--max-items", "0"], "--max-items must be an int >= 1, got 0"),
        (["--budget", "16384", "--draw", "plans.nonsense"], "nonsense"),
        (["--budget", "0"], "--budget must be greater than 0, got 0"),
        (["--budget", "inf"], "got 'inf', expected a number"),
        (["--budget", "many"], "got 'many', expected a number"),
        ([], "--budget"),
    ],
)
def test_what_cannot_work_is_refused(
    lengths: Path, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    assert complaint in refused(capsys, lengths, *words)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "absent.npy" in refused(capsys, tmp_path / "absent.npy", "--budget", "5")
    (tmp_path / "s.txt").write_text("1\ntwo\n")
    assert "s.txt: line 2: expected one number, got 'two'" in refused(capsys, tmp_path / "s.txt", "--budget", "5")
