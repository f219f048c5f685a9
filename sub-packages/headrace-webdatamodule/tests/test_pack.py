"""The bytes of a pack: what its table says is what is read, and tables that were made to do harm are refused."""

import io
import struct
import tarfile
import tracemalloc
from collections.abc import Sequence

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule import DamagedShardError, GroupingError, RefusedMemberError, ShardError
from headrace.webdatamodule.shards.format.pack import (
    MOST_TABLE,
    is_pack_name,
    pack_head,
    pack_name,
    read_samples,
    read_table,
    table_bytes,
)

TABLE = b"3 a.txt\x001 a.cls\x002 d/b.bin\x00"
DATA = b"oneX\0\1"


def sealed(table: bytes, data: bytes = DATA, *, version: int = 1, length: int | None = None) -> bytes:
    """A pack whose checksum fits, whatever its table says."""
    begin = b"\x89HRK\r\n\x1a\n" + struct.pack("<II", version, len(table) if length is None else length)
    return begin + struct.pack("<Q", xxhash.xxh3_64_intdigest(begin + bytes(8) + table)) + table + data


def unpack(data: bytes) -> list[tuple[str, bytes]]:
    table = read_table(len(data), lambda begin, end: data[begin:end])
    return [(name, data[begin : begin + size]) for name, begin, size in table]


def tar(*members: tuple[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as file:
        for name, data in members:
            header = tarfile.TarInfo(name)
            header.size = len(data)
            file.addfile(header, io.BytesIO(data))
    return stream.getvalue()


def test_the_table_says_where_each_member_is() -> None:
    assert list(unpack(sealed(TABLE))) == [("a.txt", b"one"), ("a.cls", b"X"), ("d/b.bin", b"\0\1")]
    whole = tar(("x.txt", b"1"), ("p.hrpack", sealed(TABLE)), ("y.txt", b"23"))
    samples = read_samples(whole)
    assert (samples.keys, samples.packs, samples.sizes) == (["x", "a", "d/b", "y"], 1, [1, 3, 1, 2, 2])
    found = [whole[at : at + size] for at, size in zip(samples.offsets, samples.sizes, strict=True)]
    assert found == [b"1", b"one", b"X", b"\0\1", b"23"]
    assert samples.end == len(whole.rstrip(b"\0")) + 510


KEYS = st.text(st.characters(codec="utf-8", exclude_characters="./\0_"), min_size=1, max_size=8)
LAYOUTS = st.lists(st.sampled_from(['quo"te', "txt", "é.bin", "\n"]), min_size=1, unique=True)


@given(st.dictionaries(KEYS, LAYOUTS))
def test_what_is_written_is_read_and_takes_no_more_than_it_is_said(made: dict[str, list[str]]) -> None:
    members = [(f"{key}.{name}", size) for key, names in made.items() for size, name in enumerate(names)]
    head = pack_head(members)
    data = b"".join(bytes([size]) * size for _, size in members)
    assert list(unpack(head + data)) == [(name, bytes([size]) * size) for name, size in members]
    assert len(head) <= 128 + sum(table_bytes(key, names) for key, names in made.items())


@pytest.mark.parametrize("name", ["a.hrpack", "d/e.hrpack", "A.HRPACK"])
def test_the_name_tells_a_pack(name: str) -> None:
    assert is_pack_name(name)


@pytest.mark.parametrize("name", ["a.b.hrpack", "hrpack", ".hrpack", "__m__/a.hrpack", "a.hrpack/b", "a.hrpack.txt"])
def test_other_names_do_not(name: str) -> None:
    assert not is_pack_name(name)


def test_a_pack_is_named_by_its_first_sample() -> None:
    assert pack_name("d/s0") == b"d/s0.hrpack"
    assert pack_name("s" * 93) == b"s" * 93 + b".hrpack"
    assert len(pack_name("s" * 94)) == 16 + 7


def named(name: bytes) -> bytes:
    return sealed(b"6 " + name + b"\0")


ENTRY, SIZES = "no size and name of a member", "not those of its data"
HOSTILE = {
    "empty": (b"", "begins with"),
    "another file": (b"PK\3\4" + bytes(100), "begins with"),
    "cut head": (sealed(TABLE)[:20], "begins with"),
    "a changed digit": (sealed(TABLE).replace(b"3 a", b"9 a"), "checksum"),
    "no table": (sealed(b""), SIZES),
    "no UTF-8": (named(b"a.\xff"), "no UTF-8"),
    "half a letter": (named(b"\xed\xb2\x80.txt"), "no UTF-8"),
    "no end": (sealed(TABLE + b"0 c.txt"), SIZES),
    "an empty entry": (sealed(TABLE + b"\0"), ENTRY),
    "no size": (sealed(b"a.txt\0"), ENTRY),
    "a negative size": (sealed(b"8 a.txt\x00-2 b.txt\x00"), ENTRY),
    "a fraction": (sealed(b"6.0 a.txt\0"), ENTRY),
    "other digits": (sealed("\u0666 a.txt\0".encode()), ENTRY),
    "endless digits": (sealed(b"9" * 5000 + b" a.txt\0"), ENTRY),
    "no name": (named(b""), ENTRY),
    "no extension": (named(b"a"), ENTRY),
    "a member without a name": (named(b"a."), ENTRY),
    "no key": (named(b".txt"), ENTRY),
    "an absolute key": (named(b"/etc/b.txt"), ENTRY),
    "a dot in a folder": (named(b"b.c/d.txt"), ENTRY),
    "a hidden folder": (named(b"__b__/c.txt"), ENTRY),
    "a reserved member": (named(b"a.__KEY__"), ENTRY),
    "a pack in a pack": (named(b"a.HRpack"), ENTRY),
    "a huge size": (sealed(b"9999999999 a.txt\0"), SIZES),
    "sizes beyond the pack": (sealed(b"7 a.txt\0"), SIZES),
    "bytes that nobody has": (sealed(TABLE, DATA + b"!"), SIZES),
    "a table beyond the pack": (sealed(TABLE, b"", length=1000), "does not fit"),
    "a table of 4 GiB": (sealed(TABLE, DATA, length=0xFFFFFFFF), "does not fit"),
    "a huge table": (sealed(b" " * (MOST_TABLE + 1), b""), "does not fit"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_packs_are_refused(kind: str) -> None:
    data, reason = HOSTILE[kind]
    with pytest.raises(DamagedShardError, match=f"the pack is damaged.*{reason}"):
        unpack(data)
    with pytest.raises(DamagedShardError, match=reason) as caught:
        read_samples(tar(("x.txt", b"1"), ("p.hrpack", data)), shard="s.tar")
    assert (caught.value.shard, caught.value.member, caught.value.offset) == ("s.tar", "p.hrpack", 1024)


def test_another_version_is_refused() -> None:
    with pytest.raises(RefusedMemberError, match=r"\(version 2, this one reads 1\): upgrade headrace"):
        list(unpack(sealed(TABLE, version=2)))


def test_each_flipped_bit_of_head_and_table_is_found() -> None:
    whole = sealed(TABLE)
    for bit in range(8 * (len(whole) - len(DATA))):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ShardError, match=r"the pack (is damaged|was written by another release)"):
            unpack(bytes(broken))


def test_each_cut_is_found() -> None:
    whole = sealed(TABLE)
    for length in range(len(whole)):
        with pytest.raises(DamagedShardError, match="the pack is damaged"):
            unpack(whole[:length])


def test_the_largest_table_takes_little_memory() -> None:
    table = b"0 a.b\0" * (MOST_TABLE // 6)
    tracemalloc.start()
    try:
        assert sum(1 for _ in unpack(sealed(table, b""))) == MOST_TABLE // 6
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "members",
    [
        [("a.json", b"{}"), ("p.hrpack", sealed(TABLE))],
        [("p.hrpack", sealed(TABLE)), ("q.hrpack", sealed(TABLE))],
        [("p.hrpack", sealed(TABLE)), ("d/b.txt", b"1")],
        [("p.hrpack", sealed(TABLE)), ("a.json", b"{}")],
        [("z.txt", b"1"), ("p.hrpack", sealed(TABLE)), ("z.json", b"{}")],
        [("p.hrpack", sealed(b"3 a.txt\x003 a.TXT\0"))],
        [("p.hrpack", sealed(b"3 a.txt\x001 b.txt\x002 a.cls\0"))],
    ],
)
def test_a_sample_is_in_one_pack_or_in_none(members: Sequence[tuple[str, bytes]]) -> None:
    with pytest.raises(GroupingError):
        read_samples(tar(*members))
