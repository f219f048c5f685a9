import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run
from hypothesis import given
from hypothesis import strategies as st
from indexed_sets import UNLIKE, made

from headrace.webdatamodule import (
    IndexedShards,
    Manifest,
    ManifestError,
    ShardIndex,
    add_column,
    index_shards,
    open_column,
    verify_shards,
    write_shards,
    write_tars,
)
from headrace.webdatamodule.shards.format.tar import RESERVED
from headrace.webdatamodule.shards.index.checksums import checksum64
from headrace.webdatamodule.shards.index.manifest import (
    DERIVED,
    MOST_MANIFEST_BYTES,
    NAME,
    ColumnEntry,
    ShardEntry,
    is_plain_name,
    kept_columns,
    unfinished_write,
)
from headrace.webdatamodule.utils import pickles_to_tars

NAMES = st.text(st.characters(codec="utf-8"), min_size=1).filter(is_plain_name)
COUNTS = st.integers(0, 1 << 60)
HEX = st.text("0123456789abcdef", min_size=16, max_size=16)
SHARDS = st.lists(st.builds(ShardEntry, NAMES, COUNTS, COUNTS, HEX, COUNTS), unique_by=lambda s: s.name, max_size=4)
COLUMNS = st.lists(
    st.builds(ColumnEntry, st.text(min_size=1), st.just("<f8"), NAMES, HEX), unique_by=lambda c: c.name, max_size=2
)
# hypothesis tries the words that our modules have, and so those that are refused, too
MEMBERS = st.lists(st.text().filter(lambda member: member not in RESERVED), unique=True).map(tuple)
MANIFESTS = st.builds(Manifest, SHARDS.map(tuple), MEMBERS, COLUMNS.map(tuple))
COLUMN = ColumnEntry("n", "<f8", "n.npy", "0" * 16)
ONE = Manifest(
    (ShardEntry("a.tar", 2048, 3, "0123456789abcdef"),), ("txt",), (ColumnEntry("n", "<f8", "n.npy", "0" * 16),)
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tars([(f"s{n}", {"txt": b"x" * n}) for n in range(10)], tmp_path, n_shards=3)
    index_shards(tmp_path)
    return tmp_path


@pytest.mark.slow
@given(MANIFESTS)
def test_a_manifest_comes_back_from_its_text(manifest: Manifest) -> None:
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.fingerprint == manifest.fingerprint
    assert again.to_json() == manifest.to_json()
    assert again.n_samples == sum(shard.samples for shard in manifest.shards)


@pytest.mark.slow
@given(MANIFESTS, MANIFESTS)
def test_the_fingerprint_tells_manifests_apart(one: Manifest, other: Manifest) -> None:
    assert (one.fingerprint == other.fingerprint) == (one == other)


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(ONE.to_json()), **fields})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "no manifest of shards"),
        ("{}", "no manifest of shards"),
        (changed(format="other"), "no manifest of shards"),
        (changed(version=2), "version 2, this release reads version 1"),
        (changed(shards={}), "'shards' is no list"),
        (changed(shards=[{}]), "'shards' is no list of objects with name"),
        (changed(shards=[3]), "'shards' is no list of objects with name"),
        (changed(members=[3]), "fingerprint does not fit"),
        (changed(members=["cls"]), "fingerprint does not fit"),
        (changed(fingerprint="0" * 32), "fingerprint does not fit"),
        (changed(columns=None), "'columns' is no list"),
    ],
)
def test_a_text_that_is_no_manifest_is_refused(text: str, match: str) -> None:
    with pytest.raises(ManifestError, match=match):
        Manifest.from_json(text)


@pytest.mark.parametrize(
    "name", ["../a.tar", "/etc/passwd", "a/b.tar", "..", ".", "", "a\0b", "..\\a.tar", "c:a.tar", None]
)
def test_names_that_lead_elsewhere_are_refused(name: Any) -> None:
    shard, column = {**vars(ONE.shards[0]), "name": name}, {**vars(COLUMN), "file": name}
    for text in (changed(shards=[shard]), changed(columns=[column])):
        with pytest.raises(ManifestError, match="leads elsewhere, or is no file name"):
            Manifest.from_json(text)


def test_a_missing_and_a_damaged_manifest_are_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"no \.tar files"):
        Manifest.load(tmp_path)
    (tmp_path / "a.tar").touch()
    with pytest.raises(ManifestError, match="call index_shards"):
        Manifest.load(tmp_path)
    (tmp_path / NAME).write_text("{}")
    with pytest.raises(ManifestError, match=r"manifest\.json: this is no manifest of shards: move it away"):
        Manifest.load(str(tmp_path))


FOREIGN = b'{"version": 2, "files": {"a.tar": 17}}'
SAMPLES = [("s1", {"txt": b"1"}), ("s2", {"txt": b"2"})]
WRITERS: dict[str, Callable[[Path], object]] = {
    "index_shards": index_shards,
    "index_shards, forced": lambda folder: index_shards(folder, force=True, drop_columns=True),
    "headrace-shards index": lambda folder: command_line("index", folder),
    "write_shards": lambda folder: write_shards(SAMPLES, folder, n_shards=1),
    "write_shards, another version": lambda folder: write_shards(SAMPLES, folder, n_shards=1, fingerprint="2"),
    "write_shards, anew": lambda folder: write_shards(SAMPLES, folder, n_shards=1, overwrite=True),
    "write_shards of a generator": lambda folder: write_shards(
        iter(SAMPLES), folder, samples_per_shard=2, fingerprint="2"
    ),
    "headrace-shards pack": lambda folder: command_line("pack", files_beside(folder), folder, "--overwrite"),
    "pickles_to_tars": lambda folder: pickles_to_tars(files_beside(folder), ["s1"], "pkl", folder, "p"),
    "Manifest.save": ONE.save,
}


def files_beside(folder: Path) -> Path:
    source = folder.with_name("files")
    source.mkdir()
    (source / "s1.pkl").write_bytes(pickle.dumps(1))
    return source


def command_line(*words: object) -> None:
    done = run(*words)
    assert done.returncode == 2
    raise FileExistsError(done.stderr.decode())


@pytest.mark.parametrize("text", [FOREIGN, b"sha256 a.tar\n", changed(version=2).encode()])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_manifest_of_another_program_is_never_replaced(writer: str, text: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    if "index" in writer:
        write_tars(SAMPLES, folder, n_shards=1)
    (folder / NAME).write_bytes(text)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(FileExistsError, match=r"manifest\.json.*move it away, or.*symbolic links"):
        WRITERS[writer](folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with pytest.raises(ManifestError, match=r"move it away, or.*symbolic links") as raised:
        Manifest.load(folder)
    assert "index the directory again" not in str(raised.value)


@pytest.mark.parametrize("text", [FOREIGN, b"\xff\xfe", b"[[1, 2], 3]", b""])
@pytest.mark.parametrize("writer", ["write_shards, anew", "write_shards of a generator", "pickles_to_tars"])
def test_a_plan_of_another_program_is_never_replaced(writer: str, text: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    note = folder / f"{'p' if writer == 'pickles_to_tars' else 'shard'}.plan.json"
    note.write_bytes(text)
    with pytest.raises(FileExistsError, match=r"plan\.json.*move it away, or choose another prefix"):
        WRITERS[writer](folder)
    assert [note] == list(folder.iterdir())
    assert note.read_bytes() == text


def test_saving_replaces_what_was_there(tmp_path: Path) -> None:
    ONE.save(tmp_path)
    other = replace(ONE, columns=())
    other.save(tmp_path)
    assert Manifest.load(tmp_path) == other
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


KILLED = """
import sys
import time
from dataclasses import replace
from headrace.webdatamodule import Manifest
manifest = Manifest.load(sys.argv[1])
print("ready", flush=True)
while True:
    manifest = replace(manifest, members=(*manifest.members[-5000:], f"m{len(manifest.members)}"))
    manifest.save(sys.argv[1])
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_a_whole_manifest(folder: Path) -> None:
    for moment in range(5):
        with subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(0.03 * moment)
            writer.kill()
        assert writer.returncode == -signal.SIGKILL
        assert Manifest.load(folder).n_samples == 10


# --- columns


def test_a_column_comes_back(folder: Path) -> None:
    tokens = np.arange(10, dtype=np.int32) ** 2
    rows = np.random.default_rng(0).normal(size=(10, 3))
    add_column(folder, "tokens", tokens)
    manifest = add_column(str(folder), "rows", rows)
    assert manifest == Manifest.load(folder)
    assert [(column.name, column.dtype) for column in manifest.columns] == [("tokens", "<i4"), ("rows", "<f8")]
    found = open_column(folder, manifest, "tokens")
    assert not found.flags.writeable
    np.testing.assert_array_equal(found, tokens)
    np.testing.assert_array_equal(open_column(folder, manifest, "rows"), rows)


@pytest.mark.parametrize(("rows", "mapped"), [(1 << 10, False), (1 << 18, True)])
def test_small_columns_are_read_and_large_ones_mapped(folder: Path, rows: int, mapped: bool) -> None:
    values = np.arange(10 * rows).reshape(10, rows)
    found = open_column(folder, add_column(folder, "n", values), "n")
    assert (isinstance(found, np.memmap), found.flags.writeable) == (mapped, False)
    np.testing.assert_array_equal(found, values)


def test_a_replaced_column_leaves_the_old_manifest_readable_until_the_end(folder: Path) -> None:
    old = add_column(folder, "n", np.zeros(10))
    [file] = [column.file for column in old.columns]
    new = add_column(folder, "n", np.ones(10))
    assert [column.file for column in new.columns] != [file]
    assert not (folder / file).exists()
    assert open_column(folder, new, "n").tolist() == [1.0] * 10
    assert old.fingerprint != new.fingerprint


def test_the_same_column_again_changes_nothing(folder: Path) -> None:
    old = add_column(folder, "n", np.zeros(10))
    assert add_column(folder, "n", np.zeros(10)) == old
    assert open_column(folder, old, "n").tolist() == [0.0] * 10


@pytest.mark.parametrize("values", [np.zeros(9), 3, np.array([object()] * 10), np.zeros(10, [("a", "<i4")]), [[1]] * 9])
def test_columns_of_another_form_are_refused(folder: Path, values: Any) -> None:
    with pytest.raises(ValueError, match=r"values must be .* shape \[10, \.\.\.\], one row for each sample, got"):
        add_column(folder, "n", values)


@pytest.mark.parametrize("name", ["", "../n", "/n", ".n", "a/b", "n" * 250])
def test_column_names_that_lead_elsewhere_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name must be a part of a file name"):
        add_column(folder, name, np.zeros(10))


def test_a_missing_or_changed_column_is_named(folder: Path) -> None:
    manifest = add_column(folder, "n", np.zeros(10))
    with pytest.raises(ManifestError, match=r"no column 'm', only \['n'\]"):
        open_column(folder, manifest, "m")
    path = folder / manifest.columns[0].file
    for wrong in (np.zeros(9), np.zeros(10, np.float32)):
        np.save(path, wrong)
        with pytest.raises(ManifestError, match="not those that were stored"):
            open_column(folder, manifest, "n")
        checksum = f"{checksum64(path.read_bytes()):016x}"  # of a manifest that was tampered with
        forged = replace(manifest, columns=(replace(manifest.columns[0], checksum=checksum),))
        with pytest.raises(ManifestError, match=r"is <f. of shape \[.*\], not <f8 of \[10, \.\.\.\]"):
            open_column(folder, forged, "n")
    for broken in (b"", b"\x93NUMPY", path.read_bytes()[:-1], b"\x80\x04."):
        path.write_bytes(broken)
        with pytest.raises(ManifestError, match="cannot be read"):
            open_column(folder, manifest, "n")
    path.unlink()
    with pytest.raises(ManifestError, match="cannot be read"):
        open_column(folder, manifest, "n")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (torch.ones(10, requires_grad=True), "makes no array: .*detach"),
        (np.ma.masked_less(np.arange(10), 3), "some that are masked: fill them"),
    ],
)
def test_a_column_that_would_lose_something_is_refused(folder: Path, values: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"column 'n': values must be .*{told}"):
        add_column(folder, "n", values)
    add_column(folder, "n", np.ma.masked_less(np.arange(10), -3))  # nothing is


def test_a_column_of_uneven_rows_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"column 'n': values must be .* each sample, got .*inhomogeneous"):
        add_column(folder, "n", [[1], [1, 2]] * 5)


def test_columns_that_are_added_at_once_are_all_there(folder: Path) -> None:
    names = [f"c{number}" for number in range(8)]
    together = threading.Barrier(len(names) + 1)

    def add(name: str) -> None:
        together.wait()
        add_column(folder, name, np.arange(10))

    threads = [threading.Thread(target=add, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    together.wait()
    for _ in range(5):
        index_shards(folder)
    for thread in threads:
        thread.join()
    manifest = Manifest.load(folder)
    assert sorted(column.name for column in manifest.columns) == names
    assert [open_column(folder, manifest, name).tolist() for name in names] == [list(range(10))] * len(names)
    assert not list(folder.glob(".*"))


ADDING = """
import sys
from headrace.webdatamodule import add_column
print("ready", flush=True)
sys.stdin.readline()
add_column(sys.argv[1], sys.argv[2], range(10))
"""


@pytest.mark.slow
def test_columns_of_several_processes_are_all_there(folder: Path) -> None:
    names = ["a", "b", "c"]
    words = [[sys.executable, "-c", ADDING, str(folder), name] for name in names]
    processes = [subprocess.Popen(one, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for one in words]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    assert sorted(column.name for column in Manifest.load(folder).columns) == names


def test_the_home_of_a_column_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    manifest = add_column(f"~/{folder.name}", "n", np.zeros(10))
    assert manifest == Manifest.load(folder) == Manifest.load(f"~/{folder.name}")
    assert open_column(f"~/{folder.name}", manifest, "n").shape == (10,)


def test_columns_stay_with_the_same_shards_only(folder: Path) -> None:
    add_column(folder, f"{DERIVED}x", np.zeros(10))
    manifest = add_column(folder, "n", np.zeros(10))
    assert kept_columns(folder, manifest, cure="") == manifest.columns
    other = replace(manifest, shards=manifest.shards[:1])
    with pytest.raises(ManifestError, match=r"these columns were made: n\. Do this$"):
        kept_columns(folder, other, cure="Do this")
    assert kept_columns(folder, other, replaced={"n", "m"}, cure="") == ()
    (folder / NAME).unlink()
    assert kept_columns(folder, other, cure="") == ()


def test_an_entry_is_what_the_index_says(folder: Path) -> None:
    for entry in Manifest.load(folder).shards:
        assert ShardEntry.of(ShardIndex.open(folder / entry.name)) == entry


def test_an_endless_manifest_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / NAME).open("wb") as file:
        file.truncate(MOST_MANIFEST_BYTES + 1)
    with pytest.raises(ManifestError, match=f"{MOST_MANIFEST_BYTES + 1} bytes, more than the {MOST_MANIFEST_BYTES} "):
        Manifest.load(tmp_path)


BAD: list[tuple[str, Any]] = [
    *[(key, value) for key in ("samples", "nbytes", "skipped") for value in (10**400, 2**63, -1, True, 1.0, "1", None)],
    *[("name", value) for value in ("\ud800.tar", "x" * 300, "é" * 200, "a\0", "", 3, None, "a/b.tar", "NUL:")],
    *[("index", value) for value in ("", "0" * 17, "g" * 16, 3, "\ud800" * 16)],
]


@pytest.mark.parametrize(("key", "value"), BAD)
def test_a_manifest_that_says_what_cannot_be_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    made(tmp_path, UNLIKE)
    table = json.loads((tmp_path / NAME).read_text())
    wrong = copy.deepcopy(table)
    wrong["shards"][0][key] = value
    (tmp_path / NAME).write_text(json.dumps(wrong))
    with pytest.raises(ManifestError, match="index the directory again") as caught:
        Manifest.load(tmp_path)
    assert len(str(caught.value)) < 1000
    assert verify_shards(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '{"format": "headrace-shards", "version": NaN}',
        '{"format": "headrace-shards", "version": 1, "version": 1}',
        '{"format": "headrace-shards", "version": true}',
        '{"format": "headrace-shards", "version": %s}' % ("9" * 5000),
        "[" * 100_000,
        "Infinity",
        "\ufeff{}",
        "",
    ],
)
def test_a_manifest_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_json(text)


def test_a_manifest_cannot_have_a_shard_removed_as_a_column(tmp_path: Path) -> None:
    write_tars([("a", {"txt": b"1"})], tmp_path, n_shards=1)
    [entry] = index_shards(tmp_path).shards
    for file in (entry.name, f"{entry.name}.hri", "manifest.json"):
        replace(Manifest.load(tmp_path), columns=(ColumnEntry("tok", "<i8", file, "0" * 16),)).save(tmp_path)
        add_column(tmp_path, "tok", [3])
        assert {path.name for path in tmp_path.iterdir()} >= {entry.name, f"{entry.name}.hri", "manifest.json"}
    [before] = Manifest.load(tmp_path).columns
    add_column(tmp_path, "tok", [4])
    assert not (tmp_path / before.file).exists()  # the column that was replaced is


COMMAND = [sys.executable, "-m", "headrace.webdatamodule.cli"]


SAMPLES = [(f"s{i:02d}", {"txt": b"%d" % i}) for i in range(24)]


TOLD = r"a write was stopped at 1 of 12 shards.*run it again, or remove shard\.plan\.json to keep what is there"


KILLED_WRITE = """
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
def begun(tmp_path: Path) -> Path:
    """The first of twelve shards, and the note that tells of the others."""
    done = subprocess.run([sys.executable, "-c", KILLED_WRITE, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.glob("*.tar")] == ["shard-000000.tar"]
    return tmp_path


def test_a_part_of_a_set_is_not_taken_for_all_of_it(begun: Path) -> None:
    before = sorted(path.name for path in begun.iterdir())
    for use in (index_shards, IndexedShards):
        with pytest.raises(ManifestError, match=TOLD):
            use(begun)
    [fault] = verify_shards(begun)
    assert "stopped at 1 of 12 shards" in str(fault)
    assert sorted(path.name for path in begun.iterdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize(("command", "code"), [("info", 2), ("index", 2), ("verify", 1), ("ls", 2)])
def test_commands_name_the_same_cure(begun: Path, command: str, code: int) -> None:
    done = subprocess.run([*COMMAND, command, str(begun)], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "stopped at 1 of 12 shards" in done.stdout + done.stderr
    assert "headrace-shards index" not in done.stdout + done.stderr


def test_both_cures_help(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    kept = tmp_path_factory.mktemp("kept")
    for path in begun.glob("shard-*"):
        (kept / path.name).write_bytes(path.read_bytes())
    assert write_shards(SAMPLES, begun, n_shards=12, workers=1).n_samples == 24
    assert (verify_shards(begun), len(index_shards(begun).shards)) == ([], 12)
    (kept / "shard.plan.json").unlink(missing_ok=True)
    assert (index_shards(kept).n_samples, verify_shards(kept)) == (2, [])


def test_a_part_that_a_manifest_made_look_whole_is_a_fault(begun: Path) -> None:
    note = (begun / "shard.plan.json").read_bytes()
    (begun / "shard.plan.json").unlink()
    index_shards(begun)
    (begun / "shard.plan.json").write_bytes(note)
    [fault] = verify_shards(begun)
    assert "stopped at 1 of 12 shards" in str(fault)


@pytest.mark.parametrize(
    "note", [b"", b"[]", b"{}", b"[" * 100_000, b'{"format": "headrace-plan", "shards": -1}', b"\xff"]
)
def test_notes_of_others_say_nothing(tmp_path: Path, note: bytes) -> None:
    (tmp_path / "x.plan.json").write_bytes(note)
    os.mkfifo(tmp_path / "y.plan.json")
    assert unfinished_write(tmp_path) is None


def test_a_note_of_endless_shards_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.plan.json").write_text(f'{{"format": "headrace-plan", "shards": {10**30}}}')
    with pytest.raises(ManifestError, match="stopped at 0 of 1000"):
        index_shards(tmp_path)


def test_a_plan_of_another_release_is_refused_by_all_who_read_it(begun: Path) -> None:
    note = begun / "shard.plan.json"
    note.write_text(note.read_text().replace('"version": 1', '"version": 2'))
    readers: list[Callable[[], object]] = [
        lambda: write_shards(SAMPLES, begun, n_shards=12, workers=1),
        lambda: write_shards(SAMPLES, begun, n_shards=12, workers=1, fingerprint="other"),
        lambda: index_shards(begun),
        lambda: IndexedShards(begun),
    ]
    before = {path.name: path.read_bytes() for path in begun.glob("[!.]*")}
    for read in readers:
        with pytest.raises(ManifestError, match=r"shard.plan.json has version 2, this release reads version 1"):
            read()
    assert {path.name: path.read_bytes() for path in begun.glob("[!.]*")} == before


def test_a_directory_without_tar_files_says_so(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"there are no \.tar files in"):
        IndexedShards(tmp_path)


def test_plain_names_lie_in_the_directory_itself() -> None:
    names: list[Any] = ["a.tar", "../a.tar", "/a.tar", "c:a.tar", "a\\b", ".", "", 3]
    assert [name for name in names if is_plain_name(name)] == ["a.tar"]
