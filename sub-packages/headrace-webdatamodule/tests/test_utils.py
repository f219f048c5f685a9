"""`pickles_to_tars`, by its documented path."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from headrace.webdatamodule import IndexedShards, verify_shards
from headrace.webdatamodule.utils import pickles_to_tars

NAMES = [f"sample.{i}" for i in range(10)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = tmp_path / "pickles"
    made.mkdir()
    for i, name in enumerate(NAMES):
        (made / f"{name}.my.pt").write_bytes(pickle.dumps([i]))
        (made / f"{name}.json").write_text(json.dumps(i))
    return made


def test_the_bytes_of_files_become_samples(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pickles_to_tars(str(source), NAMES, "my.pt", str(out), "myshards", min_num_shards=5)
    assert sorted(path.name for path in out.glob("*.tar")) == [f"myshards-{i:06d}.tar" for i in range(5)]
    found = list(IndexedShards(out, decode={"my.pt": pickle.loads}))
    assert found == [{"__key__": f"sample-{i}", "my.pt": [i]} for i in range(10)]
    before = {path: path.stat().st_ino for path in out.glob("*.tar")}
    pickles_to_tars(str(source), NAMES, "my.pt", str(out), "myshards", min_num_shards=5)
    assert {path: path.stat().st_ino for path in out.glob("*.tar")} == before


def test_a_tilde_is_the_home(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    pickles_to_tars(f"~/{source.name}", NAMES, "my.pt", "~/out", "myshards")
    assert len(IndexedShards(tmp_path / "out", decode=None)) == len(NAMES)


def test_errors_name_no_arguments_of_other_callers(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pickles_to_tars(source, NAMES[:1], "my.pt", out, "p")
    errors = []
    for names, suffix in ([], "my.pt"), (NAMES, "npy"), (NAMES[1:2], "my.pt"):
        with pytest.raises((FileExistsError, FileNotFoundError, ValueError)) as caught:
            pickles_to_tars(source, names, suffix, out, "p")
        errors.append(str(caught.value))
    assert "there are no names" in errors[0]
    assert "correct the directory, the names or the suffixes" in errors[1]
    assert "another directory or prefix" in errors[2]
    assert not [word for word in ("_subset", "_wds", "dir_pickles") if word in "".join(errors)]


def test_several_suffixes_and_a_function_that_makes_the_sample(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def make(key: str, data: dict[str, bytes]) -> dict[str, Any]:
        return {"__key__": f"new-{key}", "both.json": b"[%b, %d]" % (data["json"], len(data["my.pt"]))}

    for _ in range(2):
        pickles_to_tars(source, iter(NAMES), ("my.pt", "json"), out, "a", make, 2)
    nbytes = len(pickle.dumps([0]))
    assert list(IndexedShards(out)) == [{"__key__": f"new-sample-{i}", "both.json": [i, nbytes]} for i in range(10)]
    assert verify_shards(out) == []


def test_what_is_not_allowed_is_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(FileNotFoundError, match=r"1 of 11 files are missing, first .*nope\.my\.pt"):
        pickles_to_tars(source, [*NAMES, "nope"], "my.pt", out, "a")
    wrong: list[tuple[Any, Any, str]] = [
        ("sample", None, "input_prefix_subset must be a list of names, got the text 'sample'"),
        (NAMES, 0, "min_num_shards must be an int >= 1, got 0: None takes a fitting number"),
        ([], None, "there are no names"),
    ]
    for names, count, message in wrong:
        with pytest.raises(ValueError, match=message):
            pickles_to_tars(source, names, "my.pt", out, "a", min_num_shards=count)
    assert not out.exists()
