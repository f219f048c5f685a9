"""A write that was killed: nobody takes a part of a set for all of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.webdatamodule import IndexedShards, ManifestError, index_shards, verify_shards, write_shards
from headrace.webdatamodule.shards.index.manifest import stopped_write

COMMAND = [sys.executable, "-m", "headrace.webdatamodule.cli"]
SAMPLES = [(f"s{i:02d}", {"txt": b"%d" % i}) for i in range(24)]
TOLD = r"a write was stopped at 1 of 12 shards.*run it again, or remove shard\.plan\.json to keep what is there"
KILLED = """
import os, signal, sys
from headrace.webdatamodule import write_shards
class Dying:
    def __len__(self):
        return 24
    def __getitem__(self, i):
        if i == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return f"s{i:02d}", {"txt": b"%d" % i}
write_shards(Dying(), sys.argv[1], n_shards=12, workers=1)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The first of twelve shards, and the note that tells of the others."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.glob("*.tar")] == ["shard-000000.tar"]
    return tmp_path


def test_a_part_of_a_set_is_not_taken_for_all_of_it(folder: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    for use in (index_shards, IndexedShards):
        with pytest.raises(ManifestError, match=TOLD):
            use(folder)
    [fault] = verify_shards(folder)
    assert "stopped at 1 of 12 shards" in str(fault)
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize(("command", "code"), [("info", 2), ("index", 2), ("verify", 1), ("ls", 2)])
def test_commands_name_the_same_cure(folder: Path, command: str, code: int) -> None:
    done = subprocess.run([*COMMAND, command, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "stopped at 1 of 12 shards" in done.stdout + done.stderr
    assert "headrace-shards index" not in done.stdout + done.stderr


def test_both_cures_help(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    kept = tmp_path_factory.mktemp("kept")
    for path in folder.glob("shard-*"):
        (kept / path.name).write_bytes(path.read_bytes())
    assert write_shards(SAMPLES, folder, n_shards=12, workers=1).n_samples == 24
    assert (verify_shards(folder), len(index_shards(folder).shards)) == ([], 12)
    (kept / "shard.plan.json").unlink(missing_ok=True)
    assert (index_shards(kept).n_samples, verify_shards(kept)) == (2, [])


def test_a_part_that_a_manifest_made_look_whole_is_a_fault(folder: Path) -> None:
    note = (folder / "shard.plan.json").read_bytes()
    (folder / "shard.plan.json").unlink()
    index_shards(folder)
    (folder / "shard.plan.json").write_bytes(note)
    [fault] = verify_shards(folder)
    assert "stopped at 1 of 12 shards" in str(fault)


@pytest.mark.parametrize(
    "note", [b"", b"[]", b"{}", b"[" * 100_000, b'{"format": "headrace-plan", "shards": -1}', b"\xff"]
)
def test_notes_of_others_say_nothing(tmp_path: Path, note: bytes) -> None:
    (tmp_path / "x.plan.json").write_bytes(note)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "y.plan.json")
    assert stopped_write(tmp_path) is None


def test_a_note_of_endless_shards_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.plan.json").write_text(f'{{"format": "headrace-plan", "shards": {10**30}}}')
    with pytest.raises(ManifestError, match="stopped at 0 of 1000"):
        index_shards(tmp_path)


def test_a_directory_without_tar_files_says_so(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"there are no \.tar files in"):
        IndexedShards(tmp_path)
