"""The quickstart, on proteins that are made up here, as a user runs it."""

import importlib
import random
import re
import subprocess
from pathlib import Path

import pytest
from in_process import Scripts
from runs import run_script

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "quickstart"


def write_fasta(path: Path, lengths: list[int], seed: int) -> Path:
    letters = random.Random(seed)
    lines = (f">{i}\n{''.join(letters.choices('ACDEFGHIKLMNPQRSTVWY', k=n))}\n" for i, n in enumerate(lengths))
    path.write_text("".join(lines))
    return path


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Scripts:
    monkeypatch.syspath_prepend(EXAMPLE)
    return Scripts(EXAMPLE, capsys)


def row(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(name))
    return re.split(r"\s{2,}", line.strip())[1:]


def test_it_trains_on_the_same_samples_and_draws_a_picture(tmp_path: Path, quickstart: Scripts) -> None:
    lengths = [20 + 2 * (number % 60) for number in range(300)]
    files = [write_fasta(tmp_path / "long.fasta", lengths, 1), write_fasta(tmp_path / "short.fasta", [30] * 100, 2)]
    options: list[str | Path] = [
        "--fasta",
        *files,
        "--tokens",
        "8000",
        "--budget",
        "1024",
        "--max-length",
        "128",
        "--out",
        tmp_path / "out",
    ]
    (first,) = run_script(EXAMPLE, options, tmp_path)
    assert first.returncode == 0, first.stderr
    # What the data are, and what the names of the ways mean.
    assert first.stdout.startswith("Data: sequences of the FASTA files, a token a byte, cut at 128")
    assert "fixed, safe (8)   8 of the longest keep the budget" in first.stdout
    samples = row(first.stdout, "samples")
    assert len(set(samples)) == 1
    assert int(samples[0].replace(",", "")) > 50
    assert len(set(row(first.stdout, "real tokens"))) == 1
    largest = [int(cell.replace(",", "")) for cell in row(first.stdout, "largest batch")]
    # The safe fixed batch and ours stay inside the budget; the fixed batch of the mean count need not.
    assert 0 < largest[0] <= 1024
    assert 0 < largest[-1] <= 1024
    over = [int(cell) for cell in row(first.stdout, "steps over the budget")]
    assert (over[0], over[-1], over[1] > 0) == (0, 0, largest[1] > 1024)
    padded = [int(cell.replace(",", "")) for cell in row(first.stdout, "padded tokens")]
    assert padded[-1] < padded[0]
    assert [float(cell) for cell in row(first.stdout, "  times headrace's")] == [
        round(n / padded[-1], 1) for n in padded
    ]
    for name in ("long", "short"):
        _, _, asked, drawn, _ = row(first.stdout, name)
        # Exact to a sample, of which the longest has 138 tokens.
        assert abs(int(drawn.replace(",", "")) - int(asked.replace(",", ""))) <= 138
    assert "training on batches of headrace: " in first.stdout
    assert len(first.stderr.splitlines()) <= 1  # no progress bar without a terminal
    for picture in ("report.png", "report-stacked.png"):
        assert (tmp_path / "out" / picture).read_bytes().startswith(b"\x89PNG")

    what_it_says_to_do_next_works(first.stdout, files[0], tmp_path)
    shards = sorted((tmp_path / "out").rglob("*.tar"))
    written = [path.stat().st_mtime_ns for path in shards]
    assert shards
    again = [word if word != "8000" else "500" for word in options]  # one batch: refused once the shards are there
    assert quickstart("", *again).returncode == 2
    assert [path.stat().st_mtime_ns for path in shards] == written


def what_it_says_to_do_next_works(stdout: str, data: Path, folder: Path) -> None:
    _, *commands, last = stdout[stdout.index("Next, ") :].splitlines()
    assert len(commands) == 3
    for command in commands:
        words = command.replace("DATA", str(data)).replace("MEMBER", "seq.txt")
        done = subprocess.run(words, shell=True, cwd=folder, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    assert "1,024" in done.stdout  # the budget, in the report of the batches
    assert Path(last.split(": ")[1]).is_file()


def test_the_headline_is_the_same_on_every_machine(quickstart: Scripts) -> None:
    report = importlib.import_module("report")
    safe = report.Run("safe", "", [1] * 8, [100] * 8, [200] * 8, 500, seconds=9.0, busy=9.0)
    ours = report.Run("headrace", "", [4, 4], [400, 400], [500, 500], 500, seconds=1.0, busy=1.0)
    first, second = report.headline([safe, ours]).splitlines()
    assert first == "The same 8 samples, the same budget of 500 tokens:"
    assert second == "headrace takes 2 steps instead of 8, with 1.6 times fewer padded tokens"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--fasta", "absent.fasta"], "there is no file absent.fasta"),
        (["--budget", "100"], "--budget: got 100"),
        (["--tokens", "0"], "--tokens: got 0"),
    ],
)
def test_what_cannot_work_is_refused_in_a_line(
    words: list[str], complaint: str, tmp_path: Path, quickstart: Scripts
) -> None:
    result = quickstart("", *words, "--out", tmp_path)
    assert result.returncode == 2
    assert complaint in result.stderr


def test_a_single_batch_cannot_be_interrupted(tmp_path: Path, quickstart: Scripts) -> None:
    file = write_fasta(tmp_path / "a.fasta", [30] * 20, 1)
    options = ["--tokens", "1000", "--budget", "4096", "--max-length", "64"]
    result = quickstart("", "--fasta", file, *options, "--out", tmp_path / "out")
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    assert "make one batch of 4,096 tokens: pass more --tokens" in result.stderr


def test_a_file_that_is_no_fasta_is_named(tmp_path: Path, quickstart: Scripts) -> None:
    wrong = tmp_path / "wrong.fasta"
    wrong.write_text("ACDE\n")
    result = quickstart("", "--fasta", wrong, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert "wrong.fasta" in result.stderr
    assert "Traceback" not in result.stderr
