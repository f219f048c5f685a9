"""The command line: its exit code and what it prints."""

import base64
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run

from headrace.webdatamodule import add_column, index_shards, write_tars
from headrace.webdatamodule.cli import byte_count, main
from headrace.webdatamodule.cli_output import escaped, table

COMMAND = [sys.executable, "-m", "headrace.webdatamodule.cli"]
Sample = tuple[str, dict[str, bytes]]


def shards(*words: object, **options: Any) -> subprocess.CompletedProcess[bytes]:
    if not options:
        return run(*words)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([*COMMAND, *map(str, words)], check=False, **options)


def text_of(*words: object, code: int = 0, **options: Any) -> str:
    done = shards(*words, **options)
    assert (done.returncode, done.stderr) == (code, b"")
    return done.stdout.decode()


def json_of(*words: object, code: int = 0) -> Any:
    return json.loads(text_of(*words, "--json", code=code))


def error_of(*words: object, code: int, **options: Any) -> str:
    done = shards(*words, **options)
    line = done.stderr.decode()
    assert done.returncode == code, line
    assert not done.stdout
    assert line.startswith("headrace-shards: error: ")
    assert line.endswith("\n")
    assert line.count("\n") == 1
    return line


def corpus(n: int = 10) -> list[Sample]:
    return [(f"s{i:03d}", {"json": b"[%d]" % i, "raw.bin": bytes(range(256)) * (i % 3)}) for i in range(n)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards, indexed."""
    where = tmp_path / "set"
    write_tars(corpus(), where, n_shards=3)
    index_shards(where)
    return where


def tar_of(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members:
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
    return path


def damage(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# Help and usage


@pytest.mark.parametrize("command", ["pack", "index", "verify", "ls", "cat", "info"])
def test_each_command_has_help(command: str) -> None:
    assert "--json" in text_of(command, "--help")


def test_the_version_is_that_of_the_package() -> None:
    assert text_of("--version") == f"headrace-shards {version('headrace-webdatamodule')}\n"


@pytest.mark.parametrize(
    "words", [[], ["nope"], ["ls"], ["ls", ""], ["ls", "a", "b"], ["verify", ".", "--workers", "0"], ["ls", ".", "--x"]]
)
def test_wrong_usage_is_one_line_and_code_2(words: list[str]) -> None:
    error_of(*words, code=2)


@pytest.mark.parametrize("command", ["ls", "info", "verify"])
def test_no_command_that_reads_loads_torch(folder: Path, command: str) -> None:
    script = """
import sys
from headrace.webdatamodule.cli import main
code = main(sys.argv[1:])
sys.exit(3 if {"torch", "lightning", "webdataset"} & set(sys.modules) else code)
"""
    done = subprocess.run([sys.executable, "-c", script, command, folder], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


# Each command in a process of its own, forked from one that has imported what they need.
SEVERAL = """
import json, os, sys
from headrace.webdatamodule.cli import main
codes = []
for words in json.loads(sys.argv[1]):
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(main(words))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(codes)
"""
CLOSED, FULL = (["bash", "-c", f'"$@" 2>{where}', "-"] for where in ("&-", "/dev/full"))


@pytest.mark.slow
@pytest.mark.parametrize("start", [CLOSED, FULL], ids=["closed", "full"])
def test_exit_codes_do_not_need_stderr(folder: Path, start: list[str]) -> None:
    stale = folder / "wdshards-000002.tar"
    os.utime(stale, (2e9, 2e9))
    (folder / "no.txt").touch()
    wanted: list[tuple[list[object], int]] = [
        (["verify", folder], 0),
        (["verify", folder, "--workers", "2"], 0),
        (["verify", folder / "nope"], 2),
        (["ls", stale], 0),  # with a warning
        (["ls", folder / "no.txt"], 1),
        (["ls", folder / "nope"], 2),
        (["nope"], 2),
        (["index", folder], 0),
    ]
    several = [sys.executable, "-c", SEVERAL, json.dumps([list(map(str, words)) for words, _ in wanted])]
    done = subprocess.run([*start, *several], stdout=subprocess.PIPE, check=False)
    assert json.loads(done.stdout) == [code for _, code in wanted]
    alone = subprocess.run([*start, *COMMAND, "ls", stale], stdout=subprocess.DEVNULL, check=False)
    assert alone.returncode == 0


@pytest.mark.parametrize("words", [["cat", "s3://a/b", "k"], ["ls", "https://a/b.tar"], ["pack", ".", "file:///out"]])
def test_urls_are_refused_and_the_cure_named(words: list[str]) -> None:
    line = error_of(*words, code=2)
    assert "://" in line
    assert "give a local path, or read it with IndexedShards" in line


# index


def test_index_prints_what_it_indexed(tmp_path: Path) -> None:
    write_tars(corpus(), tmp_path, n_shards=2)
    assert text_of("index", tmp_path).startswith("indexed 2 shards, 10 samples, ")
    found = json_of("index", tmp_path, "--workers", 2)
    nbytes = sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    assert [found[name] for name in ("shards", "samples", "bytes", "members")] == [2, 10, nbytes, ["json", "raw.bin"]]
    assert found["fingerprint"] == index_shards(tmp_path).fingerprint


def test_index_names_members_that_are_skipped(tmp_path: Path) -> None:
    tar_of(tmp_path / "a.tar", [("one.txt", b"1"), ("READ\x1bME", b"")])
    done = shards("index", tmp_path)
    assert done.returncode == 0
    assert done.stderr.startswith(b"headrace-shards: warning: 1 member will not be read, as no part of a sample")
    assert b"\x1b" not in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_index_warns_of_data_that_changed(folder: Path) -> None:
    path = sorted(folder.glob("*.tar"))[0]
    data = bytearray(path.read_bytes())
    data[512] ^= 1
    path.write_bytes(data)
    done = shards("index", folder)
    assert done.returncode == 0
    assert done.stderr.startswith(b"headrace-shards: warning: ")
    assert b"has other data than when it was indexed before: member 's000.json'" in done.stderr


def test_index_refuses_columns_of_other_shards_until_told(tmp_path: Path) -> None:
    write_tars(corpus(), tmp_path, n_shards=2)
    index_shards(tmp_path)
    add_column(tmp_path, "tokens", np.arange(10))
    tar_of(tmp_path / "z.tar", [("one.txt", b"1")])
    assert "--drop-columns" in error_of("index", tmp_path, code=2)
    assert json_of("index", tmp_path, "--drop-columns")["columns"] == []


@pytest.mark.parametrize("command", ["index", "ls", "info", "cat"])
def test_what_is_not_there_is_code_2(tmp_path: Path, command: str) -> None:
    more = ["key"] if command == "cat" else []
    assert str(tmp_path) in error_of(command, tmp_path / "nope", *more, code=2)
    error_of(command, tmp_path, *more, code=2)


def test_verify_needs_a_directory(tmp_path: Path) -> None:
    error_of("verify", tmp_path / "nope", code=2)
    assert "there are no .tar files" in text_of("verify", tmp_path, code=1)
    tar_of(tmp_path / "a.tar", [("a.txt", b"1")])
    assert "call index_shards on that directory" in text_of("verify", tmp_path, code=1)


def broken(path: Path, how: str) -> None:
    whole = tar_of(path, [("one.txt", b"1" * 600), ("two.txt", b"2")]).read_bytes()
    with tarfile.open(path, "w") as tar:
        link = tarfile.TarInfo("one.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    if how != "link":
        data = {"empty": b"", "html": b"<html>\x1b[31m" * 99, "cut": whole[:700], "no end": whole[:2560]}[how]
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["empty", "html", "cut", "no end", "link"])
@pytest.mark.parametrize("command", ["index", "ls", "info", "verify"])
def test_damaged_shards_are_code_1(tmp_path: Path, command: str, how: str) -> None:
    path = tmp_path / "a\x1b[2J.tar"
    broken(path, how)
    if command == "verify":
        line = text_of("verify", tmp_path, code=1)
    else:
        line = error_of(command, tmp_path if command == "index" else path, code=1)
    assert "\x1b" not in line
    assert "a\\x1b[2J.tar" in line


# verify


def test_verify_finds_nothing_in_a_whole_set(folder: Path) -> None:
    assert text_of("verify", folder) == "0 faults\n"
    assert json_of("verify", folder, "--workers", 2) == {"directory": str(folder), "faults": []}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_verify_decodes_if_asked_to(tmp_path: Path, workers: int) -> None:
    samples = [
        ("good", {"json": b"[1, 2]"}),
        ("bad", {"json": b"[1, 2"}),
        ("empty", {"json": b""}),
        ("raw", {"x": b"?"}),
    ]
    write_tars(samples, tmp_path, n_shards=2)
    index_shards(tmp_path)
    assert text_of("verify", tmp_path) == "0 faults\n"
    words = ("verify", tmp_path, "--decode", "--workers", workers)
    first, second, last = text_of(*words, code=1).splitlines()
    assert all(word in first for word in ("wdshards-000000.tar", "'bad'", "'bad.json'"))
    assert all(word in second for word in ("wdshards-000001.tar", "'empty'", "'empty.json'"))
    assert last == "2 faults"
    assert [fault["sample"] for fault in json_of(*words, code=1)["faults"]] == ["bad", "empty"]
    shard = tmp_path / "wdshards-000001.tar"
    data = bytearray(shard.read_bytes())
    data[data.index(b"?")] ^= 1
    shard.write_bytes(data)
    told = text_of("verify", tmp_path, "--decode", code=1).splitlines()
    assert ["'raw'" in line for line in told] == [True, False, False, False], "damage is named once"
    (tmp_path / "wdshards-000001.tar.hri").unlink()
    assert "the index is missing" in text_of("verify", tmp_path, "--decode", code=1)


def test_verify_prints_each_fault_with_its_place(folder: Path) -> None:
    paths = sorted(folder.glob("*.tar"))
    damage(paths[0], 512)  # the first byte of data
    paths[1].unlink()
    lines = text_of("verify", folder, code=1).splitlines()
    assert lines[-1] == "2 faults"
    for part in (str(paths[0]), "'s000'", "'s000.json'", "offset 0"):
        assert part in lines[0]
    assert str(paths[1]) in lines[1]
    first, second = json_of("verify", folder, "--workers", 2, code=1)["faults"]
    assert (first["shard"], first["sample"], first["member"], first["offset"]) == (
        str(paths[0]),
        "s000",
        "s000.json",
        0,
    )
    assert second["shard"] == str(paths[1])


# ls


def test_ls_equals_what_tarfile_reads(folder: Path) -> None:
    found = json_of("ls", folder)["samples"]
    assert [one["key"] for one in found] == [key for key, _ in corpus()]
    for sample in found:
        with tarfile.open(sample["shard"]) as tar:
            for one in sample["members"]:
                header = tar.getmember(one["name"])
                assert (one["offset"], one["bytes"]) == (header.offset_data, header.size)
        assert sample["bytes"] == sum(one["bytes"] for one in sample["members"])
    lines = text_of("ls", folder).splitlines()
    assert lines[1] == "s001\tjson,raw.bin\t259"
    parts = [one for sample in found for one in sample["members"]]
    for line, one in zip(text_of("ls", folder, "--long").splitlines(), parts, strict=True):
        assert line.split("\t")[1:] == [str(one["offset"]), str(one["bytes"]), one["xxh3"], one["name"]]


def test_ls_reads_a_tar_without_an_index_and_writes_none(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "a.tar", [("d/one.txt", b"1"), ("d/one.cls", b"22"), ("two.TXT", b"")])
    assert text_of("ls", path) == "d/one\ttxt,cls\t3\ntwo\tTXT\t0\n"
    assert [file.name for file in tmp_path.iterdir()] == ["a.tar"]


def test_ls_escapes_what_a_terminal_would_obey(tmp_path: Path) -> None:
    names = ["\x1b[2Jred.txt", "tab\tbed.txt", "line\nfeed.txt", "\u202egnp.txt", "h#é.txt", "byte\udcff.txt"]
    path = tar_of(tmp_path / "a.tar", [(name, b"") for name in names])
    shown = text_of("ls", path)
    assert shown.splitlines() == [
        f"{key}\ttxt\t0" for key in ("\\x1b[2Jred", "tab\\tbed", "line\\nfeed", "\\u202egnp", "h#é", "byte\\udcff")
    ]
    ascii_only = text_of("ls", path, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert "h#\\xe9\ttxt" in ascii_only
    assert [one["members"][0]["name"] for one in json_of("ls", path)["samples"]] == names


def test_sizes_are_those_of_members_and_columns(folder: Path) -> None:
    expected = [256 * (i % 3) for i in range(10)]
    assert text_of("sizes", folder, "raw.bin") == "".join(f"{size}\n" for size in expected)
    assert json_of("sizes", folder / "manifest.json", "RAW.bin")["sizes"] == expected
    assert text_of("sizes", sorted(folder.glob("*.tar"))[1], "json") == "3\n" * 3
    add_column(folder, "tokens", np.arange(10) / 4)
    add_column(folder, "both", np.arange(20).reshape(10, 2))
    add_column(folder, "names", np.array(list("abcdefghij")))
    assert text_of("sizes", folder, "tokens").splitlines()[:3] == ["0.0", "0.25", "0.5"]
    assert text_of("sizes", folder, "both").splitlines()[:2] == ["0 1", "2 3"]
    assert "column 'names' holds <U1 of shape [], not sizes" in error_of("sizes", folder, "names", code=2)
    add_column(folder, "odd", np.array([1.0, np.nan] * 5))
    for more in ((), ("--json",)):
        assert "column 'odd' holds nan for sample 's001'" in error_of("sizes", folder, "odd", *more, code=2)
    add_column(folder, "flags", np.zeros(10, bool))
    assert "holds bool of shape [], not sizes" in error_of("sizes", folder, "flags", code=2)
    told = error_of("sizes", folder, "seq", code=2)
    assert (
        "neither a member nor a column 'seq', but json, raw.bin, both, flags, names, odd, tokens: name one of these"
        in told
    )
    assert "call index_shards" in error_of("sizes", tar_of(folder.parent / "a.tar", [("a.txt", b"")]), "txt", code=2)


def test_an_index_that_does_not_fit_is_told(folder: Path) -> None:
    path = folder / "wdshards-000000.tar"
    shutil.copy(folder / "wdshards-000001.tar", path)
    done = shards("ls", path)
    assert done.returncode == 0
    assert done.stderr.startswith(b"headrace-shards: warning: the index of ")
    assert done.stderr.count(b"\n") == 1
    assert done.stdout.count(b"s003\t") == 1
    error_of("ls", folder, code=1)
    path.unlink()
    assert "missing" in error_of("ls", folder, "--json", code=1)


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    write_tars(corpus(9000), tmp_path, n_shards=1)
    index_shards(tmp_path)
    script = 'set -o pipefail; "$@" | head -n 1'
    for words in (["ls", str(tmp_path)], ["ls", str(tmp_path), "--json"]):
        done = subprocess.run(["bash", "-c", script, "-", *COMMAND, *words], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.count(b"\n") == 1


@pytest.mark.slow
def test_faults_count_though_nobody_reads_them(folder: Path) -> None:
    damage(folder / "wdshards-000000.tar", 512)
    script = '"$@" | true; exit "${PIPESTATUS[0]}"'
    done = subprocess.run(["bash", "-c", script, "-", *COMMAND, "verify", folder], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told(folder: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = shards("ls", folder, stdout=full)
    assert done.returncode == 2
    assert done.stderr == b"headrace-shards: error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_write_that_is_cut_is_told(tmp_path: Path, unbuffered: str) -> None:
    write_tars([("a", {"bin": bytes(100_000)})], tmp_path, n_shards=1)
    index_shards(tmp_path)
    script = 'ulimit -f 8; "$@" > "$0"'  # of the first write, 8 KiB still fit
    words = ["bash", "-c", script, str(tmp_path / "out"), *COMMAND, "cat", str(tmp_path), "a.bin"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(words, capture_output=True, check=False, env=environment)
    assert done.returncode == 2
    assert done.stderr == b"headrace-shards: error: standard output cannot be written: File too large\n"


@pytest.mark.slow
def test_ctrl_c_is_quiet_and_code_130(tmp_path: Path) -> None:
    write_tars(corpus(9000), tmp_path, n_shards=1)
    index_shards(tmp_path)
    # What runs in the background inherits that Ctrl-C is ignored.
    script = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from headrace.webdatamodule.cli import main
sys.exit(main())
"""
    words = [sys.executable, "-c", script, "ls", str(tmp_path), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)  # it writes, and soon waits for the full pipe
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
    assert (process.returncode, error) == (130, b"")


class Notebook(io.TextIOBase):
    """As in a notebook: texts are shown elsewhere, and the descriptor is that of a terminal that nobody looks at."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def fileno(self) -> int:
        raise AssertionError("what is written here is not seen")


def test_a_program_that_calls_main_gets_what_is_printed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    write_tars([("a", {"bin": b"\xff\x00"})], tmp_path_factory.mktemp("bytes"), n_shards=1)
    other = tmp_path_factory.getbasetemp() / "bytes0"
    index_shards(other)
    texts = io.StringIO()
    with contextlib.redirect_stdout(texts):
        assert [main([name, str(folder)]) for name in ("index", "ls", "info", "verify")] == [0, 0, 0, 0]
    assert texts.getvalue().count("s003") == 1
    shown = Notebook()
    with contextlib.redirect_stdout(shown):
        assert main(["ls", str(folder), "--json"]) == 0
        assert main(["cat", str(folder), "nope"]) == 2
    assert json.loads(shown.text)["samples"]
    texts, wrapped = io.StringIO(), io.TextIOWrapper(io.BytesIO())
    for stream in (texts, wrapped):
        with contextlib.redirect_stdout(stream):
            assert main(["cat", str(other), "a.bin"]) == 0
    assert texts.getvalue() == "\\xff\0"
    wrapped.seek(0)
    assert wrapped.buffer.read() == b"\xff\x00"


# cat


def test_cat_gives_the_bytes(folder: Path) -> None:
    for key, members in corpus()[::4]:
        for member, data in members.items():
            assert shards("cat", folder, f"{key}.{member.upper()}").stdout == data
        assert shards("cat", folder, key).stdout == b"".join(members.values())
    texts = folder.parent / "texts"
    write_tars([("a", {"json": b"[1]", "txt": b"one\n", "seq.txt": b"MK"})], texts, n_shards=1)
    index_shards(texts)
    assert shards("cat", texts, "a").stdout == b"[1]\none\nMK"
    assert shards("cat", texts, "a.seq.txt").stdout == b"MK"
    found = json_of("cat", folder / "wdshards-000001.tar", "s004")
    decoded = {one["member"]: base64.b64decode(one["base64"]) for one in found["members"]}
    assert (found["key"], decoded) == corpus()[4]


@pytest.mark.parametrize("name", ["nope", "s001.nope", "s001.", "", "S001.json"])
def test_cat_of_what_is_not_there_is_code_2(folder: Path, name: str) -> None:
    error_of("cat", folder, name, code=2)


def test_cat_of_damage_is_code_1_and_prints_nothing(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "a.tar", [("one.raw", bytes(100_000)), ("two.txt", b"whole")])
    index_shards(tmp_path)
    damage(path, 512 + 20_000)
    line = error_of("cat", tmp_path, "one.raw", code=1)
    for part in (str(path), "'one'", "'one.raw'", "offset 0"):
        assert part in line
    assert text_of("cat", tmp_path, "two.txt") == "whole"


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "nbytes"), [("a.txt", 5), ("a.bin", (2 << 30) + 1)])
def test_cat_reads_members_of_any_size_and_only_those_asked_for(tmp_path: Path, name: str, nbytes: int) -> None:
    large = tarfile.TarInfo("a.bin")
    large.size = (2 << 30) + 1
    with (tmp_path / "a.tar").open("wb") as file:
        file.write(large.tobuf())
        file.seek(512 + (2 << 30) + 512)
        with tarfile.open(fileobj=file, mode="w") as tar:
            small = tarfile.TarInfo("a.txt")
            small.size = 5
            tar.addfile(small, io.BytesIO(b"small"))
    index_shards(tmp_path)
    counted = 'set -o pipefail; "$@" | wc -c'
    words = ["bash", "-c", counted, "-", *COMMAND, "cat", str(tmp_path), name]
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}  # a single write takes less than 2 GiB
    done = subprocess.run(words, capture_output=True, check=False, env=unbuffered)
    assert (done.returncode, done.stderr) == (0, b"")
    assert int(done.stdout) == nbytes
    assert "has no member 'cls', only 'bin', 'txt'" in error_of("cat", tmp_path, "a.cls", code=2)


def test_cat_of_a_member_that_other_samples_have(tmp_path: Path) -> None:
    write_tars([("a", {"txt": b"1"}), ("b", {"cls": b"22"})], tmp_path, n_shards=2)
    index_shards(tmp_path)
    assert text_of("cat", tmp_path, "b.cls") == "22"
    assert "'a' has no member 'cls', only 'txt'" in error_of("cat", tmp_path, "a.cls", code=2)


# info


def test_info_counts(folder: Path) -> None:
    add_column(folder, "tokens", np.arange(10, dtype=np.int32))
    found = json_of("info", folder)
    assert (len(found["shards"]), found["samples"]) == (3, 10)
    assert [one["samples"] for one in found["shards"]] == [3, 3, 4]
    sizes = [len(members["raw.bin"]) for _, members in corpus()]
    assert found["members"]["raw.bin"] == {
        "samples": 10, "bytes": sum(sizes), "min": 0, "median": 256, "max": 512
    }  # fmt: skip
    assert found["columns"] == [{"name": "tokens", "dtype": "<i4"}]
    shown = text_of("info", folder)
    assert shown.startswith("3 shards, 10 samples, ")
    for part in ("tokens", "raw.bin", "wdshards-000002.tar"):
        assert part in shown


def test_info_of_members_that_only_some_samples_have(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "a.tar", [("one.txt", b"1"), ("two.txt", b"22"), ("two.cls", b""), ("NOTES", b"")])
    found = json_of("info", path)
    assert found["members"]["cls"]["samples"] == 1
    assert found["members"]["txt"]["median"] == 1.5
    assert found["shards"][0]["skipped_names"] == ["NOTES"]
    assert found["fingerprint"] is None


def test_words_and_lines() -> None:
    assert [byte_count(word) for word in ("100", "2k", "512MiB")] == [100, 2048, 536870912]
    assert escaped("a\x1b[2Jb\tc\n") == "a\\x1b[2Jb\tc\\n"
    assert escaped("\u00e9\u202e\udcff") == "é\\u202e\\udcff"
    assert table([("name", "bytes"), ("a.tar", 10240)]) == ["name    bytes", "a.tar  10,240"]
