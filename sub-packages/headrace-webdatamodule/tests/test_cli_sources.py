"""`headrace-shards pack`: what each kind of source becomes."""

import gzip
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from command_line import run
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule import IndexedShards, verify_shards
from headrace.webdatamodule.cli_sources import Chain, Fasta, find_files, safe_key, split_file_name
from headrace.webdatamodule.shards.index.build import build_index

COMMAND = [sys.executable, "-m", "headrace.webdatamodule.cli", "pack"]


def pack(*words: object, code: int = 0) -> str:
    done = run("pack", *words)
    error = done.stderr.decode()
    assert done.returncode == code, error
    if code:
        assert error.startswith("headrace-shards: error: ")
        assert error.count("\n") == 1
        return error
    return done.stdout.decode()


def files(folder: Path, **contents: bytes) -> Path:
    for name, data in contents.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


# Files


def test_files_of_a_stem_are_a_sample(tmp_path: Path) -> None:
    source = files(tmp_path / "in", b_txt=b"B", a_txt=b"A", a_json=b"[1]", d__a_tar_gz=b"z")
    out = tmp_path / "out"
    found = json.loads(pack(source, out, "--json"))
    assert (found["samples"], found["members"]) == (3, ["json", "tar.gz", "txt"])
    assert list(IndexedShards(out, decode=None)) == [
        {"__key__": "a", "json": b"[1]", "txt": b"A"},
        {"__key__": "b", "txt": b"B"},
        {"__key__": "d/a", "tar.gz": b"z"},
    ]
    done = f"packed 1 shard, 3 samples, {found['bytes']:,} bytes, members: json, tar.gz, txt\n"
    assert pack(source, out) == f"{done}kept 1 shard, wrote 0\n"
    assert pack(source, tmp_path / "new") == done
    assert (found["kept"], found["wrote"]) == (0, 1)


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        (["--samples-per-shard", "4"], [3, 3, 4]),
        (["--n-shards", "5"], [2, 2, 2, 2, 2]),
        (["--n-shards", "2", "--workers", "2"], [5, 5]),
        ([], [10]),
    ],
)
def test_shards_are_as_large_as_asked_for(tmp_path: Path, words: list[str], counts: list[int]) -> None:
    source = files(tmp_path / "in", **{f"s{i}_txt": b"%d" % i for i in range(10)})
    out = tmp_path / "out"
    pack(source, out, *words, "--prefix", "part")
    names = [path.name for path in sorted(out.glob("*.tar"))]
    assert names == [f"part-{i:06d}.tar" for i in range(len(counts))]
    found = []
    for name in names:
        with tarfile.open(out / name) as tar:
            found.append(len(tar.getmembers()))
    assert found == counts
    assert [sample["txt"] for sample in IndexedShards(out)] == [str(i) for i in range(10)]


def test_bytes_per_shard_bounds_the_shards(tmp_path: Path) -> None:
    source = files(tmp_path / "in", **{f"s{i}_bin": bytes(9000) for i in range(10)})
    pack(source, tmp_path / "out", "--bytes-per-shard", "32K")
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.tar")]
    assert len(sizes) == 4  # three samples of 9,728 bytes fit into 32 KiB
    assert max(sizes) <= 32 * 1024 + 10240


def test_pickles_are_copied_and_not_loaded(tmp_path: Path) -> None:
    data = b"cos\nsystem\n(S'touch ran'\ntR."
    source = files(tmp_path / "in", p1_2_pkl=data, p1_3_pkl=pickle.dumps([3]))
    pack(source, tmp_path / "out", "--split-at", "last")
    found = list(IndexedShards(tmp_path / "out", decode=None))
    assert [sample["__key__"] for sample in found] == ["p1-2", "p1-3"]
    assert found[0]["pkl"] == data
    assert not Path("ran").exists()


def test_directories_complete_one_another(tmp_path: Path) -> None:
    one, two = files(tmp_path / "images", a_jpg=b"i"), files(tmp_path / "labels", a_cls=b"1")
    found = find_files([one, two])
    assert list(found) == [("a", {"cls": b"1", "jpg": b"i"})]
    files(two, a_jpg=b"other")
    assert "would both be its member 'jpg'" in pack(one, two, tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()


def test_files_that_are_left_are_named(tmp_path: Path) -> None:
    source = files(tmp_path / "in", a_txt=b"A", README=b"", _hidden=b"", end_=b"")
    os.mkfifo(source / "pipe.txt")
    (source / "link").symlink_to(tmp_path)
    words = [*COMMAND, str(source), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("headrace-shards: warning: 5 files not packed, as no part of a sample")
    assert done.stderr.count("\n") == 1


# FASTA


def test_fasta_records_are_numbered_samples(tmp_path: Path) -> None:
    one, two = tmp_path / "one.fasta", tmp_path / "two.fa.gz"
    one.write_bytes(b"\n>sp|P1.1|X first protein\r\nMK\r\nVL A\r\n\r\n>empty\r\n")
    two.write_bytes(gzip.compress(b">sp|P1.1|X again\nACGT"))
    pack(one, two, tmp_path / "out", "--samples-per-shard", "2", "--workers", "2")
    assert list(IndexedShards(tmp_path / "out")) == [
        {"__key__": "000000000", "id.txt": "sp|P1.1|X first protein", "seq.txt": "MKVLA"},
        {"__key__": "000000001", "id.txt": "empty", "seq.txt": ""},
        {"__key__": "000000002", "id.txt": "sp|P1.1|X again", "seq.txt": "ACGT"},
    ]


@pytest.mark.parametrize("words", [[], ["--key-from", "id"]])
@pytest.mark.parametrize(
    ("text", "number", "at"),
    [(">a\nMK\n>M\xfcller b\nMK\n", 3, 8), (">\xfc\nM\n", 2, 1), (">a\nMK\xd7\nM\n>b\nM", 2, 5)],
)
def test_text_that_is_no_utf8_is_noticed_before_anything_is_written(
    tmp_path: Path, text: str, number: int, at: int, words: list[str]
) -> None:
    (tmp_path / "one.fa").write_text(">Müller\nMK\n>x\nM\n", encoding="utf-8")
    (tmp_path / "two.fa").write_text(text, encoding="latin-1")
    (tmp_path / "two.fa.gz").write_bytes(gzip.compress((tmp_path / "two.fa").read_bytes()))
    for name in ("two.fa", "two.fa.gz"):
        told = pack(tmp_path / "one.fa", tmp_path / name, tmp_path / "out", *words, code=2)
        assert f"{name}: record {number} has text that is no UTF-8, at byte {at}: convert the file" in told
        assert "iconv -f latin1 -t utf-8" in told
    assert not (tmp_path / "out").exists()
    pack(tmp_path / "one.fa", tmp_path / "out", *words)
    assert IndexedShards(tmp_path / "out")[0]["id.txt"] == "Müller"


@pytest.mark.parametrize("begin", [b"", b"\r\n"])
def test_a_byte_order_mark_is_no_part_of_a_record(tmp_path: Path, begin: bytes) -> None:
    source = tmp_path / "a.fasta"
    source.write_bytes(b"\xef\xbb\xbf" + begin + b">one\r\n>two\r\nMK\r\n")
    done = run("pack", source, tmp_path / "out", "--key-from", "id")
    assert done.returncode == 0, done.stderr
    assert b"record 0 has no letters" in done.stderr
    assert list(IndexedShards(tmp_path / "out")) == [
        {"__key__": "one", "id.txt": "one", "seq.txt": ""},
        {"__key__": "two", "id.txt": "two", "seq.txt": "MK"},
    ]


@given(st.lists(st.tuples(st.text("ab| >.", max_size=9), st.lists(st.text("ACG*", min_size=1, max_size=9)))))
def test_fasta_gives_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[str, list[str]]]
) -> None:
    path = tmp_path_factory.mktemp("fasta") / "a.fasta"
    path.write_text("".join(f">{title}\n" + "".join(f"{line}\n" for line in lines) for title, lines in records))
    if not records:
        with pytest.raises(ValueError, match="the file is empty"):
            Fasta(path)
        return
    source = pickle.loads(pickle.dumps(Chain([Fasta(path), Fasta(path, len(records))])))
    found = [(key, members["id.txt"].decode(), members["seq.txt"].decode()) for key, members in source]
    expected = [(title.strip(), "".join(lines)) for title, lines in records]
    assert found == [(f"{i:09d}", *one) for i, one in enumerate(expected * 2)]
    cut = source.part(len(records) - 1, len(records) + 1)
    assert list(cut) == list(source)[len(records) - 1 : len(records) + 1]
    assert list(cut.keys()) == [key for key, _ in cut]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.fasta", b""),
        ("a.fasta", b"\n\n"),
        ("a.fasta", b"ACGT\n>late\nA\n"),
        ("a.fasta", b"<html>\x1b[31m"),
        ("a.fasta", b">one\rACGT\r"),
        ("a.fa.gz", b"no gzip"),
        ("a.fa.gz", gzip.compress(b">one\n" + os.urandom(999))[:-20]),
        ("a.csv", b"x"),
    ],
)
def test_files_that_are_no_fasta_are_refused(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    error = pack(tmp_path / name, tmp_path / "out", code=2)
    assert name in error
    assert "\x1b" not in error
    assert not list(tmp_path.glob("out/*.tar"))


# LMDB


@pytest.mark.slow
def test_a_fasta_that_grows_many_times_warns_and_says_what_to_do(tmp_path: Path) -> None:
    def packed(name: str, records: int, letters: int) -> tuple[float, str]:
        source, out = tmp_path / f"{name}.fasta", tmp_path / name
        source.write_text("".join(f">{number}\n{'A' * letters}\n" for number in range(records)))
        done = run("pack", source, out, "--n-shards", "2")
        assert done.returncode == 0, done.stderr
        return sum(path.stat().st_size for path in out.glob("*.tar")) / source.stat().st_size, done.stderr.decode()

    growth, told = packed("short", 9000, 240)
    number = re.search(r"warning: the shards take about (\d+) times the bytes of the records, 18 MiB for 2\.1: ", told)
    assert number is not None, told
    assert abs(int(number[1]) - growth) <= 1
    assert "Pass --bytes-per-pack 64K" in told
    assert "columns of a Parquet table, for MapDataModule" in told
    for name, records, letters in (("few", 800, 240), ("long", 9000, 1200)):
        assert packed(name, records, letters)[1] == ""


def lmdb_of(path: Path, *, subdir: bool = True) -> Path:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(path), subdir=subdir) as environment, environment.begin(write=True) as writing:
        for i in range(6):
            writing.put(b"1abc.%d" % i, pickle.dumps(i))
    return path


@pytest.mark.parametrize("subdir", [True, False])
def test_lmdb_entries_are_samples(tmp_path: Path, subdir: bool) -> None:
    source = lmdb_of(tmp_path / "db.lmdb", subdir=subdir)
    pack(source, tmp_path / "out", "--member", "pkl", "--n-shards", "2", "--workers", "2")
    assert list(IndexedShards(tmp_path / "out")) == [{"__key__": f"1abc-{i}", "pkl": i} for i in range(6)]


def test_lmdb_keys_choose_entries(tmp_path: Path) -> None:
    source = lmdb_of(tmp_path / "db")
    keys = tmp_path / "train.keys"
    keys.write_text("1abc.4\n1abc.2\n")
    pack(source, tmp_path / "out", "--keys", keys)
    found = [(sample["__key__"], pickle.loads(sample["bin"])) for sample in IndexedShards(tmp_path / "out")]
    assert found == [("1abc-4", 4), ("1abc-2", 2)]
    keys.write_text("nope\n")
    assert "'nope'" in pack(source, tmp_path / "none", "--keys", keys, code=2)


def named_lmdb(path: Path) -> Path:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(path), max_dbs=2) as environment:
        for name, letter in ((b"train", b"t"), (b"val", b"v")):
            database = environment.open_db(name)
            with environment.begin(write=True, db=database) as writing:
                for i in range(3):
                    writing.put(b"%b%d" % (letter, i), letter * 48)
        with environment.begin(write=True) as writing:
            writing.put(b"note", b"x" * 48)  # as long as the record of a database
    return path


def test_lmdb_of_named_databases_is_refused_and_one_can_be_chosen(tmp_path: Path) -> None:
    source, out = named_lmdb(tmp_path / "db"), tmp_path / "out"
    told = pack(source, out, code=2)
    assert "the LMDB holds the named databases 'train', 'val': choose one with --db" in told
    assert not out.exists()
    pack(source, out, "--db", "val", "--workers", "2", "--n-shards", "2")
    assert list(IndexedShards(out)) == [{"__key__": f"v{i}", "bin": b"v" * 48} for i in range(3)]
    keys = tmp_path / "keys"
    keys.write_text("t2\n")
    pack(source, tmp_path / "one", "--db", "train", "--keys", keys)
    assert list(IndexedShards(tmp_path / "one")) == [{"__key__": "t2", "bin": b"t" * 48}]
    keys.write_text("note\n")
    pack(source, tmp_path / "note", "--keys", keys)
    assert list(IndexedShards(tmp_path / "note")) == [{"__key__": "note", "bin": b"x" * 48}]
    keys.write_text("train\n")
    assert "named databases 'train': choose" in pack(source, tmp_path / "none", "--keys", keys, code=2)
    for wrong in ("test", "note"):
        assert f"there is no database '{wrong}'" in pack(source, tmp_path / "none", "--db", wrong, code=2)


@pytest.mark.parametrize("name", ["length", "num_examples", "num-samples", "nextid", "__len__", "__keys__"])
def test_counts_of_an_lmdb_are_no_samples(name: str, tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    source = lmdb_of(tmp_path / "db")
    with lmdb.open(str(source)) as environment, environment.begin(write=True) as writing:
        writing.put(name.encode(), pickle.dumps(6))
    done = run("pack", source, tmp_path / "out", "--member", "pkl")
    assert done.returncode == 0
    assert f"warning: {source}: the entries '{name}' describe the others and are not packed".encode() in done.stderr
    assert b"--keys" in done.stderr
    assert [sample["pkl"] for sample in IndexedShards(tmp_path / "out")] == list(range(6))
    keys = tmp_path / "keys"
    keys.write_text(f"{name}\n")
    if name.startswith("__"):
        assert "cannot be stored" in pack(source, tmp_path / "one", "--keys", keys, code=2)
    else:
        pack(source, tmp_path / "one", "--keys", keys)
        assert len(IndexedShards(tmp_path / "one")) == 1


@pytest.mark.parametrize("key", [b"__meta__", b"\xff\xfe", b"/a"])
def test_an_lmdb_key_that_no_sample_can_have_names_the_cure(key: bytes, tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    source = lmdb_of(tmp_path / "db")
    with lmdb.open(str(source)) as environment, environment.begin(write=True) as writing:
        writing.put(key, b"?")
    told = pack(source, tmp_path / "out", code=2)
    assert f"{source}: the entry {key!r} " in told.replace("\\\\", "\\")
    assert "list the keys to pack in a file for --keys" in told


def test_what_is_no_lmdb_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.lmdb").write_bytes(b"no database" * 1000)
    assert "a.lmdb" in pack(tmp_path / "a.lmdb", tmp_path / "out", code=2)
    (tmp_path / "b.lmdb").mkdir()
    pack(tmp_path / "b.lmdb", tmp_path / "out", code=2)
    assert not list((tmp_path / "b.lmdb").iterdir())


# Usage


def test_wrong_sources_are_refused(tmp_path: Path) -> None:
    source = files(tmp_path / "in", a_txt=b"A")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.fa").write_bytes(b">a\nA\n")
    out = tmp_path / "out"
    pack(tmp_path / "nope", out, code=2)
    pack(tmp_path / "empty", out, code=2)
    assert "several kinds" in pack(source, tmp_path / "a.fa", out, code=2)
    assert "lies in the source" in pack(source, source / "shards", code=2)
    pack(source, code=2)
    pack(source, out, "--keys", tmp_path / "a.fa", code=2)
    for words in (["--n-shards", "0"], ["--n-shards", "2"], ["--bytes-per-shard", "1X"], ["--prefix", "a/b"]):
        pack(source, out, *words, code=2)
    pack(source, out, "--n-shards", "1", "--samples-per-shard", "1", code=2)
    assert not list(tmp_path.glob("out/*.tar"))


def test_other_shards_are_not_mixed_in(tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(files(tmp_path / "in", a_txt=b"A", b_txt=b"B"), out, "--n-shards", "2")
    before = {path.name: path.read_bytes() for path in out.glob("*.tar")}
    pack(files(tmp_path / "other", c_txt=b"C"), out, code=2)
    assert {path.name: path.read_bytes() for path in out.glob("*.tar")} == before


def test_a_failed_run_leaves_no_manifest_and_nothing_half(tmp_path: Path) -> None:
    source = files(tmp_path / "in", **{f"s{i}_txt": b"x" for i in range(9)}, s8_TXT=b"the same in lower case")
    for words in ([], ["--workers", "2"]):
        error = pack(source, tmp_path / "out", "--samples-per-shard", "2", *words, code=2)
        assert "'s8'" in error
        check_whole(tmp_path / "out")


def check_whole(out: Path) -> None:
    """What has its final name is whole, and no reader takes it for a set."""
    assert not (out / "manifest.json").exists()
    assert not list(out.glob(".*"))
    for path in out.glob("*.tar"):
        build_index(path.read_bytes())


def test_keys_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    source = files(tmp_path / "in", a_txt=b"A")
    (source / "v1.2").mkdir()
    (source / "v1.2" / "b.txt").write_bytes(b"B")
    told = pack(source, tmp_path / "out", code=2)
    for part in ("'v1.2/b'", repr(str(source / "v1.2" / "b.txt")), "rename the directory", "pass --split-at last"):
        assert part in told
    assert not (tmp_path / "out").exists()
    pack(source, tmp_path / "out", "--split-at", "last")
    assert [sample["__key__"] for sample in IndexedShards(tmp_path / "out")] == ["a", "v1-2/b"]


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--workers", "2"]])
def test_ctrl_c_is_quiet_and_leaves_nothing_half(tmp_path: Path, words: list[str]) -> None:
    source, out = tmp_path / "a.fasta", tmp_path / "out"
    letters = b"ACGT" * 300  # so many that tars need no warning
    source.write_bytes(b"".join(b">%d\n%b\n" % (number, letters) for number in range(40_000)))
    # Samples come so slowly that all shards would take minutes, wherever they are written: the signal comes before the
    # end. What runs in the background inherits that Ctrl-C is ignored.
    script = """
import signal, sys, time
from headrace.webdatamodule import cli_sources
from headrace.webdatamodule.cli import main
class Slow(cli_sources.Fasta):
    def __getitem__(self, index):
        time.sleep(0.005)
        return super().__getitem__(index)
cli_sources.Fasta = Slow
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
"""
    program = tmp_path / "program.py"
    program.write_text(script)
    command = [sys.executable, str(program), "pack", str(source), str(out), "--samples-per-shard", "4000", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while not list(out.glob(".*.tar.*.part")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        try:
            output, error = process.communicate()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, output, error) == (130, b"", b"")
    check_whole(out)


@pytest.mark.slow
def test_ctrl_c_while_a_process_starts_is_quiet(tmp_path: Path) -> None:
    """Any thread may receive the signal, those of numpy's libraries for example; the first one then interrupts."""
    source, out = tmp_path / "a.fasta", tmp_path / "out"
    letters = b"ACGT" * 300  # so many that tars need no warning
    source.write_bytes(b"".join(b">%d\n%b\n" % (number, letters) for number in range(40_000)))
    script = """
import signal, sys, threading
from multiprocessing import util
from headrace.webdatamodule.cli import main
start, begin, done, started = util.spawnv_passfds, threading.Event(), threading.Event(), []
def receive():
    begin.wait()
    signal.raise_signal(signal.SIGINT)
    done.set()
def interrupted(path, words, *rest):
    pid = start(path, words, *rest)
    if "--multiprocessing-fork" in words:
        started.append(pid)
        if len(started) == 2:
            begin.set()
            done.wait()
    return pid
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=receive).start()
    util.spawnv_passfds = interrupted
    code = main()
    assert len(started) == 2
    sys.exit(code)
"""
    program = tmp_path / "program.py"
    program.write_text(script)
    options = ["--samples-per-shard", "4000", "--workers", "2"]
    command = [sys.executable, str(program), "pack", str(source), str(out), *options]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
    check_whole(out)


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], pytest.param(["--workers", "2"], marks=pytest.mark.nightly)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_killed_run_is_completed_and_whole_shards_are_kept(tmp_path: Path, words: list[str], seed: int) -> None:
    source, out = tmp_path / "a.fasta", tmp_path / "out"
    letters = b"ACGT" * 300  # so many that tars need no warning
    source.write_bytes(b"".join(b">%d\n%b\n" % (number, letters) for number in range(40_000)))
    options = [str(source), str(out), "--samples-per-shard", "2000", *words]
    with subprocess.Popen([*COMMAND, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while process.poll() is None and len(list(out.glob("*.tar"))) < 2 + 7 * seed:
            time.sleep(0.002)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert not (out / "manifest.json").exists()
    before = {path.name: path.stat().st_ino for path in out.glob("*.tar") if Path(f"{path}.hri").exists()}
    assert before
    pack(*options)
    assert before.items() <= {path.name: path.stat().st_ino for path in out.glob("*.tar")}.items()
    assert verify_shards(out) == []
    assert len(IndexedShards(out)) == 40_000
    assert not list(out.glob(".*"))


def test_packing_again_changes_nothing_and_changed_files_are_refused(tmp_path: Path) -> None:
    source, out = files(tmp_path / "in", **{f"s{i}_txt": b"%d" % i for i in range(9)}), tmp_path / "out"
    pack(source, out)
    before = {path.name: (path.stat().st_ino, path.read_bytes()) for path in out.iterdir()}
    pack(source, out)
    after = {path.name: (path.stat().st_ino, path.read_bytes()) for path in out.iterdir()}
    assert [after[f"shard-000000.tar{end}"] == before[f"shard-000000.tar{end}"] for end in ("", ".hri")] == [True, True]
    assert {name: data for name, (_, data) in after.items()} == {name: data for name, (_, data) in before.items()}
    files(source, s2_txt=b"9")  # as long as before
    assert "holds shards of other files, or of files that have changed since: pass --overwrite" in pack(
        source, out, code=2
    )
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {name: data for name, (_, data) in after.items()}
    assert "kept" not in pack(source, out, "--overwrite")
    assert IndexedShards(out)[2]["txt"] == "9"


def test_what_is_written_anew_is_not_called_kept(tmp_path: Path) -> None:
    source, out = tmp_path / "files", tmp_path / "out"
    source.mkdir()
    for i in range(8):
        (source / f"{i}.txt").write_text(str(i))
    assert pack(source, out, "--n-shards", 4).startswith("packed 4 shards")
    assert pack(source, out, "--n-shards", 2) == "packed 2 shards, 8 samples, 20,480 bytes, members: txt\n"
    for _ in range(3):
        assert "kept" not in pack(source, out, "--n-shards", 2, "--overwrite")
    assert pack(source, out, "--n-shards", 2).endswith("kept 2 shards, wrote 0\n")


def test_what_was_kept_and_written_is_told(tmp_path: Path) -> None:
    source, out = files(tmp_path / "in", **{f"s{i}_txt": b"x" for i in range(12)}), tmp_path / "out"
    words = (source, out, "--n-shards", "12")
    pack(*words)
    for number in range(2, 12):
        (out / f"shard-{number:06d}.tar").unlink()
    assert pack(*words).splitlines()[1] == "kept 2 shards, wrote 10"
    (out / "shard-000007.tar").unlink()
    found = json.loads(pack(*words, "--json"))
    assert (found["kept"], found["wrote"], found["shards"]) == (11, 1, 12)
    assert verify_shards(out) == []


# Keys of FASTA records


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("words", [[], ["--key-from", "id"]])
def test_ids_of_fasta_records_are_their_keys(tmp_path: Path, workers: str, words: list[str]) -> None:
    one, two = tmp_path / "a.fa", tmp_path / "b.fasta.gz"
    one.write_bytes(b">sp|P1.2|A/B first protein\nMK\nV\n> __x\nM\n")
    two.write_bytes(gzip.compress(b">q.1\r\nMM\r\n"))
    out = tmp_path / "out"
    pack(one, two, out, *words, "--n-shards", "2", "--workers", workers)
    found = [(sample["__key__"], sample["id.txt"], sample["seq.txt"]) for sample in IndexedShards(out)]
    assert found == [("sp|P1-2|A-B", "sp|P1.2|A/B first protein", "MKV"), ("--x", "__x", "M"), ("q-1", "q.1", "MM")]
    assert IndexedShards(out).find("q-1") == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b">a.1 x\nM\n>a-1 y\nM\n", "'a.1' in .*a.fa and 'a-1' in .*a.fa both give the key 'a-1'"),
        (b">a\nM\n>\nM\n", "record 1 has no id"),
        (f">a\nM\n>{'k' * 94} x\nM\n".encode(), "name of 101 bytes"),
    ],
)
def test_ids_that_are_no_keys_are_refused_before_anything_is_written(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "a.fa").write_bytes(text)
    assert re.search(message, pack(tmp_path / "a.fa", tmp_path / "out", "--key-from", "id", code=2))
    assert not (tmp_path / "out").exists()
    done = run("pack", tmp_path / "a.fa", tmp_path / "out")
    assert done.returncode == 0
    assert re.search("keys are the records' numbers, as ids cannot be keys: .*" + message, done.stderr.decode())
    assert [sample["__key__"] for sample in IndexedShards(tmp_path / "out")] == ["000000000", "000000001"]
    told = run("pack", tmp_path / "a.fa", tmp_path / "numbers", "--key-from", "number")
    assert (told.returncode, b"numbers, as" in told.stderr) == (0, False)


@pytest.mark.parametrize("words", [["--member", "pkl"], ["--key-from", "id"], ["--split-at", "last"]])
def test_options_of_other_sources_are_refused(tmp_path: Path, words: list[str]) -> None:
    source = files(tmp_path / "in", a_txt=b"A")
    if words[0] == "--split-at":
        source = tmp_path / "a.fa"
        source.write_bytes(b">a\nM\n")
    told = pack(source, tmp_path / "out", *words, code=2)
    assert re.search(f"{words[0]} is for .*, but the sources are (files|fasta): leave it out", told)


def test_shards_are_not_packed_by_mistake(tmp_path: Path) -> None:
    source, out = files(tmp_path / "in", a_txt=b"A"), tmp_path / "out"
    pack(source, out)
    told = pack(out, tmp_path / "again", code=2)
    assert "holds shards that are indexed already" in told
    assert not (tmp_path / "again").exists()
    (out / "shard-000000.tar.hri").unlink()
    done = subprocess.run([*COMMAND, str(out), str(tmp_path / "again")], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "1 tar files are packed as members" in done.stderr


def test_names_become_keys() -> None:
    assert split_file_name("a/b.c.txt", "first") == ("a/b", "c.txt")
    assert split_file_name("a/b.c.txt", "last") == ("a/b-c", "txt")
    assert split_file_name("a/.b", "first") == ("", "")
    assert (safe_key("sp|P1.2|A/B"), safe_key("__x")) == ("sp|P1-2|A-B", "--x")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b">p1\nACDE\n>p2\nAC\n>", "record 2 has no letters: is the file cut?"),
        (b">p1\nACDE\n>p2\nAC\n>p3\n", "record 2 has no letters: is the file cut?"),
        (b">p1\n \r\n\n>p2\r\nAC\r\n>p3", "record 0 has no letters, and so have 1 more: is the file cut?"),
        (b">p1\nACDE\n\n>p2\nAC\n\n", ""),
        (b">p1\n>ACDE>\nAC\n>p2\nA", "record 0 has no letters: is the file cut?"),
        (b">p1\n\n  >\n", ""),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_record_without_letters_is_warned_of(tmp_path: Path, data: bytes, told: str, packed: bool) -> None:
    path = tmp_path / ("a.fasta.gz" if packed else "a.fasta")
    path.write_bytes(gzip.compress(data) if packed else data)
    done = run("pack", path, tmp_path / "out")
    assert done.returncode == 0
    warnings = [line for line in done.stderr.decode().splitlines() if "keys are the records' numbers" not in line]
    assert warnings == ([f"headrace-shards: warning: {path}: {told}"] if told else [])


def test_records_without_letters_are_counted_over_all_files(tmp_path: Path) -> None:
    (tmp_path / "a.fasta").write_bytes(b">p1\nAC\n>p2\nAC\n")
    (tmp_path / "b.fasta").write_bytes(b">p3\nAC\n>p4\n")
    done = run("pack", tmp_path / "a.fasta", tmp_path / "b.fasta", tmp_path / "out")
    assert f"{tmp_path}/b.fasta: record 3 has no letters" in done.stderr.decode()
    assert IndexedShards(tmp_path / "out")[3] == {"__key__": "p4", "id.txt": "p4", "seq.txt": ""}
