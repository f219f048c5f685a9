"""The example over LMDB, with a real file, real workers and proteins that are made up here."""

import gzip
import importlib
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Scripts
from runs import run_script
from torch.utils.data import DataLoader

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "lmdb_proteins"
LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def proteins(lengths: list[int]) -> list[str]:
    letters = random.Random(0)
    return ["".join(letters.choices(LETTERS, k=length)) for length in lengths]


def fasta(sequences: list[str]) -> str:
    lines: list[str] = []
    for number, letters in enumerate(sequences):
        lines += [f">protein{number} made up", *(letters[at : at + 60] for at in range(0, len(letters), 60))]
    return "\n".join(lines) + "\n"


def row(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(name))
    return re.split(r"\s{2,}", line.strip())[1:]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of the example."""
    monkeypatch.syspath_prepend(EXAMPLE)
    return importlib.import_module


@pytest.fixture
def script(module: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> Scripts:
    return Scripts(EXAMPLE, capsys)


@pytest.fixture
def stored(tmp_path: Path, module: Callable[[str], Any]) -> tuple[Path, list[str]]:
    """A file of 300 proteins and what they are."""
    sequences = proteins([random.Random(1).randint(5, 90) + 10 * (n % 13) for n in range(300)])
    path = tmp_path / "proteins.lmdb"
    assert module("store").write(path, (letters.encode() for letters in sequences)) == 300
    return path, sequences


def text(protein: torch.Tensor) -> str:
    return bytes(protein.tolist()).decode()


def test_proteins_come_back_as_they_were_stored(stored: tuple[Path, list[str]], module: Callable[[str], Any]) -> None:
    path, sequences = stored
    dataset = module("dataset").ProteinLMDBDataset(path)
    assert [text(dataset[index]) for index in range(len(dataset))] == sequences
    assert [dataset.num_tokens(index) for index in range(300)] == list(map(len, sequences))
    assert sorted(path.parent.iterdir()) == [path]  # no lock, no partial file
    with pytest.raises(IndexError, match=r"got 300, .* holds 300 proteins"):
        dataset[300]


def test_a_dataset_is_opened_late_and_pickled_without_its_file(
    stored: tuple[Path, list[str]], module: Callable[[str], Any], tmp_path: Path
) -> None:
    path, sequences = stored
    late = module("dataset").ProteinLMDBDataset(tmp_path / "absent.lmdb")
    with pytest.raises(FileNotFoundError, match=r"absent\.lmdb: make it with convert\.py"):
        len(late)
    dataset = module("dataset").ProteinLMDBDataset(path, max_length=50)
    assert text(dataset[7]) == sequences[7][:50]
    packed = pickle.dumps(dataset)
    assert len(packed) < 500
    copy = pickle.loads(packed)
    assert text(copy[7]) == sequences[7][:50] == text(dataset[7])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "workers"),
    [("fork", 2), ("spawn", 1), pytest.param("spawn", 2, marks=pytest.mark.nightly)],  # each imports torch anew
)
def test_workers_read_batches_by_tokens(
    stored: tuple[Path, list[str]], module: Callable[[str], Any], start: str, workers: int
) -> None:
    path, sequences = stored
    example = module("dataset")
    dataset = example.ProteinLMDBDataset(path, max_length=100)
    assert text(dataset[0]) == sequences[0][:100]  # open here before the workers start
    batches = DistributedSizeAwareBatchSampler(dataset, 1000, strategy="bucketed", cost="padded", max_length=100)
    loader = DataLoader(
        dataset, batch_sampler=batches, collate_fn=example.padded, num_workers=workers, multiprocessing_context=start
    )
    seen: list[str] = []
    for batch in loader:
        assert batch.numel() <= 1000
        seen += [text(protein[protein != 0]) for protein in batch]
    assert sorted(seen) == sorted(letters[:100] for letters in sequences)
    assert text(dataset[1]) == sequences[1][:100]  # what the workers did left this process's file alone


def check_table(shown: str, sequences: list[str]) -> list[int]:
    """Returns the padded tokens of the fixed and the dynamic batches."""
    tokens = f"{sum(min(400, len(letters)) for letters in sequences):,}"
    assert row(shown, "proteins") == ["300", "300"]
    assert row(shown, "tokens") == [tokens, tokens]
    padded = [int(cell.replace(",", "")) for cell in row(shown, "padded tokens")]
    assert padded[1] < 0.7 * padded[0]
    assert all(int(cell.replace(",", "")) <= 2048 for cell in row(shown, "largest batch"))
    return padded


SPELLED = ["--dynamic_loader", "--max_tokens", "2048", "--max_length", "400"]


def test_convert_then_compare(tmp_path: Path, script: Scripts) -> None:
    sequences = proteins([20 + 7 * (number % 60) for number in range(300)])
    source, target = tmp_path / "p.fasta.gz", tmp_path / "p.lmdb"
    source.write_bytes(gzip.compress(fasta(sequences).encode()))
    made = script("convert.py", source, target)
    assert (made.returncode, made.stdout) == (0, f"{target}: 300 proteins\n")

    result = script("", target, *(word.replace("_", "-") for word in SPELLED))
    assert (result.returncode, result.stderr) == (0, "")
    padded = check_table(result.stdout, sequences)

    fixed = script("", target, "--max-tokens", "2048", "--max-length", "400", "--workers", "0")
    assert fixed.returncode == 0
    assert row(fixed.stdout, "padded tokens") == [f"{padded[0]:,}"]


def test_the_commands_as_users_give_them(tmp_path: Path) -> None:
    sequences = proteins([20 + 7 * (number % 60) for number in range(300)])
    source, target = tmp_path / "p.fasta", tmp_path / "p.lmdb"
    source.write_text(fasta(sequences))
    commands: list[tuple[Path, list[object]]] = [
        (EXAMPLE / "convert.py", [source, target]),
        (EXAMPLE, [target, *SPELLED]),
    ]
    for path, words in commands:
        (done,) = run_script(path, words, tmp_path, [{"PYTHONWARNINGS": "error"}])
        assert (done.returncode, done.stderr) == (0, "")
    check_table(done.stdout, sequences)


def test_a_map_that_is_too_small_grows(tmp_path: Path, module: Callable[[str], Any]) -> None:
    long = [bytes([65 + number % 26]) * 2**20 for number in range(100)]  # 100 MiB into a map of 64
    path = tmp_path / "long.lmdb"
    assert module("store").write(path, iter(long)) == 100
    dataset = module("dataset").ProteinLMDBDataset(path)
    assert dataset.num_tokens(99) == 2**20
    assert text(dataset[99]) == long[99].decode()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("MKV\n", "letters before the first '>'"),
        ("", "holds no record"),
        (">one\n>two\nMK\n", "record 'one' has no sequence"),
        (">one\nMK?V1\n", "record 'one' holds '1?'"),
    ],
)
def test_what_is_no_fasta_is_refused_and_leaves_nothing(
    tmp_path: Path, content: str, complaint: str, script: Scripts
) -> None:
    (tmp_path / "wrong.fasta").write_text(content)
    result = script("convert.py", tmp_path / "wrong.fasta", tmp_path / "p.lmdb")
    assert result.returncode == 2
    assert complaint in result.stderr
    assert "wrong.fasta" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "wrong.fasta"]


def test_a_file_that_exists_is_not_overwritten(stored: tuple[Path, list[str]], tmp_path: Path, script: Scripts) -> None:
    before = stored[0].read_bytes()
    (tmp_path / "p.fasta").write_text(">one\nMKV\n")
    result = script("convert.py", tmp_path / "p.fasta", stored[0])
    assert result.returncode == 2
    assert "exists" in result.stderr
    assert stored[0].read_bytes() == before


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["absent.lmdb"], "there is no file absent.lmdb"),
        ([str(EXAMPLE / "README.md")], "is no LMDB file"),
        (["p.lmdb", "--max-tokens", "10", "--max-length", "11"], "--max-length: got 11, allowed are 1 to --max-tokens"),
        (["p.lmdb", "--workers", "-1"], "--workers: got -1"),
        ([], "the following arguments are required: lmdb"),
    ],
)
def test_what_cannot_work_is_refused(words: list[str], complaint: str, script: Scripts) -> None:
    result = script("", *words)
    assert result.returncode == 2
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr
