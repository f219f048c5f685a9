import io
import os
import re
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from indexed_sets import UNLIKE, made

from headrace.webdatamodule import IndexedShards, add_column
from headrace.webdatamodule.shards.errors import (
    DamagedIndexError,
    GroupingError,
    ManifestError,
    ShardError,
    StaleIndexError,
)
from headrace.webdatamodule.shards.format.tar import Member
from headrace.webdatamodule.shards.index.build import index_shard
from headrace.webdatamodule.shards.index.shard_index import ShardIndex, index_path
from headrace.webdatamodule.shards.interop import (
    dali_path,
    energon_path,
    export_dali,
    import_dali,
    import_energon,
    parse_dali,
    parse_energon,
    sample_key,
    sample_offsets,
)

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Z", "C"], exclude_characters="./_"), min_size=1)
MEMBERS = st.dictionaries(st.sampled_from(["txt", "JSON", "0.bin"]), st.binary(max_size=1100), min_size=1)
SAMPLES = st.dictionaries(WORDS, MEMBERS, min_size=1, max_size=6)
PLAIN = {"a": {"txt": b"1", "cls": b"22"}, "d/b": {"txt": b""}, "c": {"Json": b"3" * 600}}
Given = dict[str, dict[str, bytes]]


def write(path: Path, samples: Given, kind: int = tarfile.USTAR_FORMAT, extra: tuple[str, ...] = ()) -> Path:
    with tarfile.open(path, "w", format=kind) as file:
        for name in extra:
            file.addfile(tarfile.TarInfo(name))
        for key, members in samples.items():
            for suffix, data in members.items():
                header = tarfile.TarInfo(f"{key}.{suffix}")
                header.size = len(data)
                header.mtime = 1.5 if kind == tarfile.PAX_FORMAT else 1
                file.addfile(header, io.BytesIO(data))
    return path


def as_wds2idx_writes(path: Path) -> str:
    # DALI's rule, from tarfile's reading: the first dot of the base name parts sample and key, nothing is left out.
    lines: dict[str, list[str]] = {}
    with tarfile.open(path) as file:
        for one in file:
            dot = one.name.find(".", one.name.rfind("/") + 1)
            words = f"{one.name[dot + 1 :]} {one.offset_data} {one.size} {one.name}"
            lines.setdefault(one.name[:dot], []).append(words)
    return "".join(f"{line}\n" for line in (f"v1.2 {len(lines)}", *(" ".join(words) for words in lines.values())))


def as_energon_writes(path: Path) -> bytes:
    # Energon's rule: where a base name begins that is another than the one before, and the end of the last member.
    offsets, last = [], None
    with tarfile.open(path) as file:
        for one in file:
            found = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", one.name)
            if one.isreg() and found and not re.match(r"__[^/]*__($|/)", one.name) and found[1] != last:
                offsets.append(one.offset)
                last = found[1]
        offsets.append(file.offset)
    return np.array(offsets, "<u8").tobytes()


@settings(max_examples=30)
@given(st.sampled_from(FORMATS), SAMPLES)
def test_shards_travel_both_ways(tmp_path_factory: pytest.TempPathFactory, kind: int, samples: Given) -> None:
    path = tmp_path_factory.mktemp("tar") / "a-000000.tar"
    try:
        write(path, samples, kind)
    except ValueError:  # a name too long for the format
        return
    index_shard(path)
    assert export_dali(path) == path.with_name("a-000000.idx")
    assert dali_path(path).read_text() == as_wds2idx_writes(path)
    energon_path(path).write_bytes(as_energon_writes(path))
    own = index_path(path).read_bytes()
    for read in (import_dali, import_energon):
        index_path(path).unlink()
        assert list(read(path).keys) == list(samples)
        assert index_path(path).read_bytes() == own


def test_the_text_is_the_documented_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", PLAIN)
    index_shard(path)
    listing = export_dali(path, tmp_path / "other.idx")
    assert listing.read_text() == (
        "v1.2 3\ntxt 512 1 a.txt cls 1536 2 a.cls\ntxt 2560 0 d/b.txt\nJson 3072 600 c.Json\n"
    )
    assert len(import_dali(str(path), listing)) == 3


def test_members_that_are_skipped_here_may_be_in_the_other_index(tmp_path: Path) -> None:
    extra = ("__meta__/info.json", "d/README", ".hidden.txt")
    path = write(tmp_path / "a.tar", {"a": {"txt": b"1"}}, extra=extra)
    lines = [f"{name.partition('.')[2] or name} {512 * n} 0 {name}" for n, name in enumerate(extra, start=1)]
    dali_path(path).write_text("\n".join(["v1.2 4", *lines, "txt 2048 1 a.txt", ""]))
    assert list(import_dali(path).keys) == ["a"]
    energon_path(path).write_bytes(as_energon_writes(path))
    assert list(import_energon(path).keys) == ["a"]


@pytest.mark.parametrize("name", ["a b.txt", "a.", "a\tb.txt", "a.t\rt"])
def test_names_that_dali_cannot_read_are_refused(tmp_path: Path, name: str) -> None:
    key, _, suffix = name.partition(".")
    path = write(tmp_path / "a.tar", {"first": {"txt": b""}, key: {suffix: b""}})
    index_shard(path)
    with pytest.raises(ShardError, match="cannot hold this name") as caught:
        export_dali(path)
    assert (caught.value.shard, caught.value.member, caught.value.offset) == (str(path), name, 512)
    assert not dali_path(path).exists()


def test_a_shard_without_an_index_is_not_exported(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", PLAIN)
    with pytest.raises(ShardError, match=r"no index 'a\.tar\.hri'.*call index_shards") as caught:
        export_dali(path)
    assert caught.value.shard == str(path)
    assert not dali_path(path).exists()


def test_a_shard_without_samples_is_not_exported(tmp_path: Path) -> None:
    index_shard(write(tmp_path / "a.tar", {}))
    with pytest.raises(ShardError, match="without samples"):
        export_dali(tmp_path / "a.tar")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "version ''"),
        ("v1.1 1\ntxt 512 1\n", "version 'v1.1'; only v1.2"),
        ("v1.2\n", "promises"),
        ("v1.2 2\ntxt 512 1 a.txt\n", "promises '2' samples, and has 1 lines"),
        ("v1.2 1\ntxt 512 1 a.txt", "is cut"),
        ("v1.2 1\ntxt 512 1 a\xa0b.txt x\n", "line 2 .* not four words"),
        ("v1.2 1\ntxt 512 1\n", "line 2"),
        ("v1.2 1\n\n", "line 2"),
        ("v1.2 2\ntxt 512 1 a.txt\n512 txt 1 a.txt\n", "line 3"),
        ("v1.2 1\ntxt -512 1 a.txt\n", "line 2"),
        ("v1.2 1\ntxt  1 a.txt\n", "line 2"),
    ],
)
def test_texts_of_another_form_are_refused(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(DamagedIndexError, match=match):
        parse_dali(text)
    path = write(tmp_path / "a.tar", PLAIN)
    dali_path(path).write_text(text)
    with pytest.raises(DamagedIndexError, match=match) as caught:
        import_dali(path)
    assert caught.value.shard == str(path)
    assert str(dali_path(path)) in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "member"),
    [
        ("txt 512 1 a.txt cls", "txt 512 2 a.txt cls", "a.txt"),
        ("d/b.txt", "d/x.txt", "d/b.txt"),
        ("2560", "3072", "d/b.txt"),
        ("v1.2 3\ntxt 512 1 a.txt cls 1536 2 a.cls\n", "v1.2 2\n", "a.txt"),
        ("v1.2 3\n", "v1.2 4\nx 0 0 more.x\n", "a.txt"),
        ("c.Json\n", "c.Json\nx 0 0 more.x\n", "more.x"),
        (" cls 1536 2 a.cls\n", "\ncls 1536 2 a.cls\n", "a.txt"),
    ],
)
def test_the_text_of_another_shard_is_refused(tmp_path: Path, old: str, new: str, member: str) -> None:
    path = write(tmp_path / "a.tar", PLAIN)
    index_shard(path)
    text = export_dali(path).read_text()
    assert old in text
    head, *lines = text.replace(old, new).splitlines()
    dali_path(path).write_text("\n".join([f"v1.2 {len(lines)}", *lines, ""]))
    assert head
    with pytest.raises(StaleIndexError, match="belongs to another shard") as caught:
        import_dali(path)
    assert caught.value.member == member


def test_energons_offsets_of_another_shard_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", PLAIN, tarfile.PAX_FORMAT)
    good = np.frombuffer(as_energon_writes(path), "<u8")
    for wrong in (good[:-1], good[1:], np.append(good, good[-1] + 512), good + np.array([0, 0, 0, 512], "<u8")):
        energon_path(path).write_bytes(wrong.astype("<u8").tobytes())
        with pytest.raises(StaleIndexError, match=r"entry \d of \d is wrong") as caught:
            import_energon(path)
        assert caught.value.shard == str(path)
    assert not index_path(path).exists()


@pytest.mark.parametrize("data", [b"", b"1234567", np.array([512, 0], "<u8").tobytes(), np.array([5], "<u8").tobytes()])
def test_bytes_that_are_no_offsets_are_refused(data: bytes) -> None:
    with pytest.raises(DamagedIndexError, match="no index of Energon's"):
        parse_energon(data, name="a.tar.idx")


def test_a_shard_that_cannot_be_indexed_is_not_imported(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", {"a": {"x": b"", "X": b""}})
    energon_path(path).write_bytes(as_energon_writes(path))
    dali_path(path).write_text(as_wds2idx_writes(path))
    for read in (import_dali, import_energon):
        with pytest.raises(GroupingError, match="two members"):
            read(path)
    assert sample_offsets([]) == [0]
    with pytest.raises(FileNotFoundError):
        ShardIndex.open(path)


def instead(path: Path, what: str) -> None:
    path.unlink(missing_ok=True)
    if what == "fifo":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    elif what == "endless":
        path.symlink_to("/dev/zero")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such files there")
def test_a_column_or_a_foreign_index_that_is_a_fifo_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path, UNLIKE)
    [column] = add_column(tmp_path, "n", [1, 2, 3]).columns
    instead(tmp_path / column.file, "fifo")
    instead(energon_path(path), "fifo")
    with pytest.raises(ManifestError, match="a FIFO"):
        IndexedShards(tmp_path).column("n")
    with pytest.raises(DamagedIndexError, match="a FIFO"):
        import_energon(path)


def member(name: str, data: bytes, kind: bytes = b"0") -> bytes:
    header = tarfile.TarInfo(name)
    header.size, header.type = len(data), kind
    return header.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512)


END = bytes(1024)


def test_energons_rule_takes_no_time(tmp_path: Path) -> None:
    name = "a/" * 30_000 + "x"
    data = member("././@LongLink", name.encode() + b"\0", b"L") + member("x", b"") + END
    (tmp_path / "a.tar").write_bytes(data)
    energon_path(tmp_path / "a.tar").write_bytes(np.array([len(data) - 1024], "<u8").tobytes())
    assert len(import_energon(tmp_path / "a.tar")) == 0


def test_a_damaged_index_is_not_exported(tmp_path: Path) -> None:
    path = made(tmp_path, UNLIKE)
    index = ShardIndex.open(path)
    data = bytearray(index.data)
    data[data.index(index.sizes.tobytes())] += 1
    index_path(path).write_bytes(data)
    with pytest.raises(DamagedIndexError, match="the arrays of the index are damaged"):
        export_dali(path)
    assert not dali_path(path).exists()


def test_a_tilde_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    monkeypatch.setenv("USERPROFILE", str(tmp_path.parent))
    path, there = made(tmp_path, UNLIKE), f"~/{tmp_path.name}"
    assert export_dali(f"{there}/{path.name}", f"{there}/x.idx") == tmp_path / "x.idx"
    assert import_dali(f"{there}/{path.name}", f"{there}/x.idx").n_samples == len(UNLIKE)
    energon_path(path).write_bytes(as_energon_writes(path))
    assert import_energon(f"{there}/{path.name}").n_samples == len(UNLIKE)


def test_what_the_formats_say() -> None:
    assert parse_dali("v1.2 1\ntxt 512 3 a.txt cls 1536 1 a.cls\n")[0][1] == ("cls", 1536, 1, "a.cls")
    assert parse_energon(np.array([0, 1024, 2048], "<u8").tobytes()).tolist() == [0, 1024, 2048]
    members = [Member("a.x", 512, 1, 0, "file"), Member("b.x", 1536, 0, 1024, "file")]
    assert sample_offsets(members) == [0, 1024, 1536]
    assert [sample_key(name) for name in ("a.d/b.x.y", "a/.x", "a.d/.x", "a/b")] == ["a.d/b", "a/", None, None]
