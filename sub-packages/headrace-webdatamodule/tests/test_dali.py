import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from indexed_sets import UNLIKE, made

from headrace.webdatamodule import DamagedIndexError, ShardError, ShardIndex, export_dali
from headrace.webdatamodule.shards.dali import dali_path
from headrace.webdatamodule.shards.index.build import index_shard
from headrace.webdatamodule.shards.index.shard_index import index_path

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


@pytest.mark.slow
@settings(max_examples=30)
@given(st.sampled_from(FORMATS), SAMPLES)
def test_the_text_is_what_wds2idx_writes(tmp_path_factory: pytest.TempPathFactory, kind: int, samples: Given) -> None:
    path = tmp_path_factory.mktemp("tar") / "a-000000.tar"
    try:
        write(path, samples, kind)
    except ValueError:  # a name too long for the format
        return
    index_shard(path)
    assert export_dali(path) == path.with_name("a-000000.idx")
    assert dali_path(path).read_text() == as_wds2idx_writes(path)


def test_the_text_is_the_documented_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", PLAIN)
    index_shard(path)
    listing = export_dali(path, tmp_path / "other.idx")
    assert listing.read_text() == (
        "v1.2 3\ntxt 512 1 a.txt cls 1536 2 a.cls\ntxt 2560 0 d/b.txt\nJson 3072 600 c.Json\n"
    )


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
    path, there = made(tmp_path, UNLIKE), f"~/{tmp_path.name}"
    assert export_dali(f"{there}/{path.name}", f"{there}/x.idx") == tmp_path / "x.idx"
