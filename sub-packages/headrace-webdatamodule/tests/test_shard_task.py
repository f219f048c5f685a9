"""The bytes of one shard, and of its members."""

import random
import tarfile
import time
from collections import UserDict, deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_tar import made_by_tarfile, write_tar
from written_sets import by_webdataset

from headrace.webdatamodule import IndexedShards, ShardError, write_shards, write_tars
from headrace.webdatamodule.shards.index.build import build_index
from headrace.webdatamodule.shards.writing.pack_files import list_members
from headrace.webdatamodule.shards.writing.shard_builder import ShardBuilder, check_key, member_bytes, member_endings
from headrace.webdatamodule.shards.writing.shard_task import ShardFile

KEYS = st.text(st.characters(codec="utf-8", exclude_characters="./\0", exclude_categories=["Cs"]), min_size=1)
SAMPLES = st.dictionaries(
    KEYS.filter(lambda key: not key.startswith("__") and len(key.encode()) < 90),
    st.dictionaries(st.sampled_from(["txt", "a.bin", "0"]), st.binary(max_size=1500), min_size=1),
    min_size=1,
    max_size=5,
)


@pytest.mark.slow
@given(SAMPLES)
def test_webdataset_reads_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, samples: dict[str, dict[str, bytes]]
) -> None:
    path = tmp_path_factory.mktemp("tar") / "a-000000.tar"
    write_tar(path, samples.items())
    assert by_webdataset(path) == list(samples.items())
    sizes = [(f"{k}.{m}", len(data)) for k, sample in samples.items() for m, data in sample.items()]
    assert list_members(path) == sizes
    assert path.read_bytes() == made_by_tarfile(samples.items())


def test_a_large_member_and_a_long_path_are_what_tarfile_makes_of_them(tmp_path: Path) -> None:
    samples = [("d" * 120 + "/ü", {"bin": bytes(3 << 20)}), ("b", {"x": b"1", "y.z": b""})]
    write_tar(tmp_path / "a.tar", samples)
    assert (tmp_path / "a.tar").read_bytes() == made_by_tarfile(samples)


def test_samples_in_memory_are_written_as_others_are(tmp_path: Path) -> None:
    """Those in a list are taken together, others one by one; all of them give the same bytes."""
    draw = random.Random(0)
    layouts = [("txt",), ("txt", "cls"), ("seg.png", "x" * 40)]
    names = [f"{'d' * draw.choice([0, 60, 100])}/{number}".lstrip("/") for number in range(1500)]
    samples: list[Any] = [
        (name, {member: draw.randbytes(draw.choice([0, 1, 511, 512, 900])) for member in draw.choice(layouts)})
        for name in names
    ]
    samples[700] = ("others", UserDict({"txt": bytearray(b"12")}))
    samples[1100] = ("large", {"txt": bytes(2 << 20)})
    for number, given_samples in enumerate((samples, tuple(samples), deque(samples), iter(samples))):
        options: dict[str, Any] = {} if number == 3 else {"workers": 1}
        write_shards(given_samples, tmp_path / str(number), samples_per_shard=600, **options)
    made = [
        {path.name: path.read_bytes() for path in sorted((tmp_path / str(number)).glob("*.tar*"))}
        for number in range(4)
    ]
    assert made[0] == made[1] == made[2]
    plain = [(key, {name: bytes(data) for name, data in sample.items()}) for key, sample in samples]
    assert [made[0][f"shard-00000{at}.tar"] for at in range(3)] == [
        made_by_tarfile(plain[500 * at : 500 * at + 500]) for at in range(3)
    ]
    assert made[3]["shard-000000.tar"] == made_by_tarfile(plain[:600])
    for path in tmp_path.glob("*/*.tar"):
        assert build_index(path.read_bytes()) == Path(f"{path}.hri").read_bytes()


def test_a_generator_may_use_its_dictionary_again(tmp_path: Path) -> None:
    def samples() -> Iterator[tuple[str, dict[str, Any]]]:
        sample, data = dict[str, Any](), bytearray(b"0")
        for number in range(9):
            data[:] = b"%d" % number
            sample["txt"] = data
            yield f"s{number}", sample

    write_shards(samples(), tmp_path, samples_per_shard=9)
    assert [sample["txt"] for sample in IndexedShards(tmp_path)] == [str(number) for number in range(9)]


def test_a_sample_that_cannot_be_stored_is_named_soon(tmp_path: Path) -> None:
    taken = []

    def samples() -> Iterator[tuple[str, dict[str, bytes]]]:
        for number in range(99):
            taken.append(number)
            time.sleep(0.05)
            yield f"{'a.b' if number == 3 else number}", {"txt": b""}

    with pytest.raises(ShardError, match=r"the sample key 'a\.b' cannot be stored"):
        write_shards(samples(), tmp_path, samples_per_shard=99)
    assert len(taken) < 30


def test_a_tar_file_without_samples_is_one() -> None:
    assert ShardBuilder("a.tar").finish() == made_by_tarfile([])


def test_bytes_depend_on_the_samples_only_and_the_format_is_plain_ustar(tmp_path: Path) -> None:
    for name in ("a.tar", "b.tar"):
        write_tar(tmp_path / name, [("k", {"x": b"12"})])
    data = (tmp_path / "a.tar").read_bytes()
    assert data == (tmp_path / "b.tar").read_bytes()
    assert data[257:265] == b"ustar\x0000"
    with tarfile.open(tmp_path / "a.tar") as tar:
        [header] = tar.getmembers()
    assert (header.mtime, header.pax_headers, header.offset_data) == (0, {}, 512)


def test_an_error_in_the_middle_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a-000000.tar"
    write_tar(path, [("old", {"x": b""})])

    class Breaks(list[tuple[str, dict[str, bytes]]]):
        def __getitem__(self, position):  # type: ignore[no-untyped-def] # list's overloads
            if position == 1:
                raise OSError("the source went away")
            return super().__getitem__(position)

    message = rf"failed to read sample 1: OSError: .*went away .shard '.*/{tmp_path.name}/a-000000.tar'"
    with pytest.raises(ShardError, match=message):
        write_tars(Breaks([("new", {"x": b"1"})] * 2), tmp_path, n_shards=1, prefix="a")
    assert [p.name for p in tmp_path.iterdir()] == ["a-000000.tar"]
    assert [name for name, _ in list_members(path)] == ["old.x"]


def test_a_staged_shard_is_invisible_to_globs(tmp_path: Path) -> None:
    with closing(ShardFile(tmp_path / "a-000000.tar", "0")) as shard:
        shard.add("k", {"x": b""})
        shard.seal()
        shard.sync()
        staged = list(tmp_path.iterdir())
        assert len(staged) == 2
        assert not list(tmp_path.glob("*.tar"))
        assert all(path.name.startswith(".") for path in staged)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["", "a.b", "/a", "__a__", "__a", "a/", "a\0"])
def test_keys_that_readers_would_not_give_back_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ShardError, match="cannot be stored"):
        check_key(key)
    with pytest.raises(ShardError, match="cannot be stored"):
        write_tar(tmp_path / "a.tar", [(key, {"x": b""})])


@pytest.mark.parametrize("sample", [{"": b""}, {"a/b": b""}, {"A": b"", "a": b""}, {1: b""}, {"a": b"", 1: b""}])
def test_member_keys_that_readers_would_not_give_back_are_refused(tmp_path: Path, sample: dict[Any, bytes]) -> None:
    with pytest.raises(ShardError, match=r"member key .* cannot be stored.*sample 'k'"):
        write_tar(tmp_path / "a.tar", [("k", sample)])


def test_a_sample_without_members_and_a_long_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="no members"):
        write_tar(tmp_path / "a.tar", [("k", {})])
    with pytest.raises(ShardError, match="100 bytes"):
        write_tar(tmp_path / "a.tar", [("k" * 101, {"x": b""})])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.arange(4.0), r"must be bytes, got ndarray: numpy\.save.*sample 'k', member 'k\.x'"),
        ("text", r"must be bytes, got str: .*text\.encode\(\)"),
        (3, "must be bytes, got int"),
    ],
)
def test_members_that_are_no_bytes_are_refused(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(ShardError, match=message):
        write_tar(tmp_path / "a.tar", [("k", {"x": data})])
    assert not list(tmp_path.iterdir())


def test_bytes_like_members_are_stored_whole(tmp_path: Path) -> None:
    numbers = np.arange(4.0)
    sample: dict[str, Any] = {"a": numbers.data, "b": bytearray(b"22"), "c": memoryview(b"abcdef")[::2]}
    write_tar(tmp_path / "a.tar", [("k", sample)])
    plain = {"a": numbers.tobytes(), "b": b"22", "c": b"ace"}
    assert by_webdataset(tmp_path / "a.tar") == [("k", plain)]


@pytest.mark.parametrize("sample", [(3, {"x": b""}), (["k"], {"x": b""}), ("k", [b""]), ("k", None)])
def test_what_is_no_sample_is_refused(tmp_path: Path, sample: Any) -> None:
    with pytest.raises(ShardError, match="must be a pair of a text"):
        write_tar(tmp_path / "a.tar", [sample])


@pytest.mark.parametrize("key", ["a\ud800", "\udc80"])
def test_keys_that_are_no_utf8_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ShardError, match="cannot be written as UTF-8"):
        check_key(key)
    with pytest.raises(ShardError, match="cannot be written as UTF-8"):
        write_tar(tmp_path / "a.tar", [(key, {"x": b""})])


def test_names_and_bytes_of_members() -> None:
    assert check_key("ü/1") == b"\xc3\xbc/1"
    assert member_endings(["txt", "seg.png"], sample="a", shard="a-000000.tar") == [b".txt", b".seg.png"]
    assert member_bytes(np.arange(2, dtype="<i2").data, sample="a", member="a.bin") == b"\0\0\1\0"
