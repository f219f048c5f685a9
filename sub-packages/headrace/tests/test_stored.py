"""What earlier versions have written, kept in ``stored/``, is read: shards, indexes, columns, memory models, states."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_runs import LENGTHS, RUNS, STEPS, plain, texts

from headrace.size_aware_batching import BatchMemoryModel
from headrace.webdatamodule import IndexedShards, verify_shards

STORED = Path(__file__).parent / "stored"
VERSIONS = sorted(path.name for path in STORED.iterdir() if (path / "rest.json").is_file())


@pytest.fixture(params=VERSIONS)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What a version wrote, in a place where a reader may write; times are those of a clone, which mean nothing."""
    folder = tmp_path / "stored"
    shutil.copytree(STORED / request.param, folder)
    for path in folder.rglob("*.tar"):
        os.utime(path, (2e9, 2e9))
    return folder


def rest_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "rest.json").read_text(encoding="utf-8"))
    return found


def states_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "states.pt", weights_only=True)
    return found


def resumed(folder: Path, name: str, state: Any) -> Any:
    run, begin = RUNS[name](folder)
    run.load_state_dict(state)
    return plain(list(begin()))


def test_a_version_is_kept() -> None:
    assert "0.1.0" in VERSIONS


@pytest.mark.parametrize("name", ["web", "books"])
def test_stored_shards_are_read_and_whole(stored: Path, name: str) -> None:
    shards = IndexedShards(stored / name, decode=None, verify="open")
    assert [shards[i] for i in range(len(shards))] == [{"__key__": key, **members} for key, members in texts(name)]
    assert shards.column("tokens").tolist() == [len(members["txt"]) for _, members in texts(name)]
    assert verify_shards(stored / name) == []


def test_a_stored_memory_model_predicts_what_it_was_fitted_to(stored: Path) -> None:
    model = BatchMemoryModel.load(stored / "memory.json")
    for length in LENGTHS:
        needed = 5e8 + 3e4 * 8 * length + 2 * 8 * length**2
        assert needed <= model.predict(8, length) <= 1.05 * needed


@pytest.mark.filterwarnings("ignore:sources.* has no state of its own")
@pytest.mark.parametrize("name", RUNS)
def test_a_stored_state_resumes_with_the_same_batches(stored: Path, name: str) -> None:
    rest, states = rest_of(stored), states_of(stored)
    if name not in states:
        pytest.skip(f"{stored.name} had no {name}")
    assert resumed(stored, name, states[name]) == rest[name]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_from_its_beginning_has_the_stored_order(stored: Path, name: str) -> None:
    rest = rest_of(stored)
    if name not in rest:
        pytest.skip(f"{stored.name} had no {name}")
    _, begin = RUNS[name](stored)
    assert plain(list(begin())[STEPS:]) == rest[name]
