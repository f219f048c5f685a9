"""The bytes of a pack: what its table says is what is read, and tables that were made to do harm are refused."""

import io
import json
import struct
import tarfile
import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule import DamagedShardError, GroupingError, RefusedMemberError, ShardError
from headrace.webdatamodule.shards.format.pack import (
    MAX_TABLE_BYTES,
    is_pack_name,
    pack_head,
    pack_name,
    read_samples,
    table_bytes,
    unpack,
)

TABLE: dict[str, Any] = {"layouts": [["txt", "cls"], ["bin"]], "layout_of": [0, 1], "keys": ["a", "d/b"]}
TABLE["sizes"] = [3, 1, 2]
DATA = b"oneX\0\1"


def sealed(table: bytes, data: bytes = DATA, *, version: int = 1, length: int | None = None) -> bytes:
    """A pack whose checksum fits, whatever its table says."""
    begin = b"\x89HRK\r\n\x1a\n" + struct.pack("<II", version, len(table) if length is None else length)
    return begin + struct.pack("<Q", xxhash.xxh3_64_intdigest(begin + bytes(8) + table)) + table + data


def packed(table: Mapping[str, Any], data: bytes = DATA) -> bytes:
    return sealed(json.dumps(table).encode(), data)


def tar(*members: tuple[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as file:
        for name, data in members:
            header = tarfile.TarInfo(name)
            header.size = len(data)
            file.addfile(header, io.BytesIO(data))
    return stream.getvalue()


def test_the_table_says_where_each_member_is() -> None:
    assert list(unpack("p.hrpack", packed(TABLE))) == [("a.txt", b"one"), ("a.cls", b"X"), ("d/b.bin", b"\0\1")]
    whole = tar(("x.txt", b"1"), ("p.hrpack", packed(TABLE)), ("y.txt", b"23"))
    samples = read_samples(whole)
    assert (samples.keys, samples.packs, samples.sizes) == (["x", "a", "d/b", "y"], 1, [1, 3, 1, 2, 2])
    found = [whole[at : at + size] for at, size in zip(samples.offsets, samples.sizes, strict=True)]
    assert found == [b"1", b"one", b"X", b"\0\1", b"23"]
    assert samples.end == len(whole.rstrip(b"\0")) + 510


KEYS = st.text(st.characters(codec="utf-8", exclude_characters="./\0_"), min_size=1, max_size=8)
LAYOUTS = st.lists(st.sampled_from(['quo"te', "txt", "é.bin", "\n"]), min_size=1, unique=True)


@given(st.dictionaries(KEYS, LAYOUTS.flatmap(lambda names: st.tuples(st.just(names), st.just(len(names))))))
def test_what_is_written_is_read_and_takes_no_more_than_it_is_said(made: dict[str, tuple[list[str], int]]) -> None:
    samples = [(key, names, list(range(count))) for key, (names, count) in made.items()]
    if not samples:
        return
    head = pack_head(samples)
    data = b"".join(bytes([size]) * size for _, _, sizes in samples for size in sizes)
    wanted = [
        (f"{key}.{name}", bytes([n]) * n) for key, names, sizes in samples for name, n in zip(names, sizes, strict=True)
    ]
    assert list(unpack("p.hrpack", head + data)) == wanted
    assert len(head) <= 128 + sum(table_bytes(key, tuple(names)) for key, names, _ in samples)


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


def changed(**fields: Any) -> bytes:
    return packed({**TABLE, **fields})


HOSTILE = {
    "empty": (b"", "begins with"),
    "another file": (b"PK\3\4" + bytes(100), "begins with"),
    "cut head": (packed(TABLE)[:20], "begins with"),
    "no table": (sealed(b""), "no JSON"),
    "no JSON": (sealed(b"{"), "no JSON"),
    "no UTF-8": (sealed(json.dumps(TABLE).encode().replace(b'"a"', b'"\xff"')), "no JSON in UTF-8"),
    "UTF-16": (sealed(json.dumps(TABLE).encode("utf-16")), "no JSON"),
    "deep": (sealed(b"[" * 100_000), "no JSON"),
    "digits": (changed().replace(b"[3,", b"[" + b"9" * 5000 + b","), "checksum"),
    "endless digits": (sealed(json.dumps(TABLE).encode().replace(b"[3,", b"[" + b"9" * 5000 + b",")), "no JSON"),
    "a list": (sealed(json.dumps(list(TABLE.items())).encode()), "no object"),
    "a number": (sealed(b"1"), "no object"),
    "a field less": (packed({k: v for k, v in TABLE.items() if k != "layout_of"}), "no object"),
    "a field more": (changed(more=1), "no object"),
    "a field twice": (sealed(json.dumps(TABLE).encode()[:-1] + b', "sizes": [3, 1, 2]}'), "no object"),
    "another order": (packed(dict(reversed(TABLE.items()))), "no object"),
    "an object for a list": (changed(layouts={"txt": 1}), "something else than lists"),
    "objects as layouts": (changed(layouts=[{"txt": 1}, ["bin"]]), "without a name"),
    "a text for a list": (changed(keys="ab"), "something else than lists"),
    "numbers as keys": (changed(keys=[1, 2]), "something else than lists"),
    "fractions": (changed(sizes=[3.0, 1, 2]), "something else than lists"),
    "truth": (changed(sizes=[3, True, 2]), "something else than lists"),
    "not a number": (changed(sizes=[3, float("nan"), 2]), "something else than lists"),
    "nothing": (changed(sizes=None), "something else than lists"),
    "no samples": (packed({"layouts": [], "layout_of": [], "keys": [], "sizes": []}, b""), "no samples"),
    "no members": (changed(layouts=[["txt", "cls"], []]), "no members"),
    "a member without a name": (changed(layouts=[["txt", ""], ["bin"]]), "without a name"),
    "a slash in a member": (changed(layouts=[["txt", "x/y"], ["bin"]]), "without a name"),
    "a NUL in a member": (changed(layouts=[["txt", "x\0"], ["bin"]]), "without a name"),
    "a number as a member": (changed(layouts=[["txt", 1], ["bin"]]), "without a name"),
    "two members of one key": (changed(layouts=[["txt", "TXT"], ["bin"]]), "two members of one key"),
    "a reserved member": (changed(layouts=[["txt", "__KEY__"], ["bin"]]), "reserved"),
    "a pack in a pack": (changed(layouts=[["txt", "HRpack"], ["bin"]]), "reserved"),
    "a layout that is not there": (changed(layout_of=[0, 2]), "without a layout"),
    "a negative layout": (changed(layout_of=[0, -1]), "without a layout"),
    "too few layouts": (changed(layout_of=[0]), "without a layout"),
    "too few keys": (changed(keys=["a"]), "without a layout"),
    "a key twice": (changed(keys=["a", "a"]), "occurs twice"),
    "no key": (changed(keys=["a", ""]), "cannot be that of a sample"),
    "a dot in a key": (changed(keys=["a", "b.c"]), "cannot be that of a sample"),
    "a NUL in a key": (changed(keys=["a", "b\0"]), "cannot be that of a sample"),
    "an absolute key": (changed(keys=["a", "/etc/b"]), "cannot be that of a sample"),
    "a folder as a key": (changed(keys=["a", "b/"]), "cannot be that of a sample"),
    "a hidden folder as a key": (changed(keys=["a", "__b__/c"]), "cannot be that of a sample"),
    "half a letter in a key": (changed(keys=["a", "\udc80"]), "UTF-8"),
    "half a letter in a member": (changed(layouts=[["txt", "\ud800"], ["bin"]]), "UTF-8"),
    "too few sizes": (changed(sizes=[3, 3]), "one size for each"),
    "too many sizes": (changed(sizes=[3, 1, 2, 0]), "one size for each"),
    "a huge size": (changed(sizes=[3, 1, 1 << 62]), "not those of its 6 bytes"),
    "a negative size": (changed(sizes=[8, -4, 2]), "not those of its 6 bytes"),
    "sizes beyond the pack": (changed(sizes=[3, 1, 3]), "not those of its 6 bytes"),
    "bytes that nobody has": (packed(TABLE, DATA + b"!"), "not those of its 7 bytes"),
    "a table beyond the pack": (sealed(b"{}", b"", length=1000), "does not fit"),
    "a table of 4 GiB": (sealed(b"{}", DATA, length=0xFFFFFFFF), "does not fit"),
    "a huge table": (sealed(b" " * (MAX_TABLE_BYTES + 1), b""), "does not fit"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_packs_are_refused(kind: str) -> None:
    data, reason = HOSTILE[kind]
    with pytest.raises(DamagedShardError, match=f"the pack is damaged.*{reason}") as caught:
        list(unpack("p.hrpack", data))
    assert caught.value.member == "p.hrpack"
    with pytest.raises(DamagedShardError, match=reason) as caught:
        read_samples(tar(("x.txt", b"1"), ("p.hrpack", data)), shard="s.tar")
    assert (caught.value.shard, caught.value.member, caught.value.offset) == ("s.tar", "p.hrpack", 1024)


def test_another_version_is_refused() -> None:
    with pytest.raises(RefusedMemberError, match=r"\(version 2, this one reads 1\): upgrade headrace"):
        list(unpack("p.hrpack", sealed(json.dumps(TABLE).encode(), version=2)))


def test_each_flipped_bit_of_head_and_table_is_found() -> None:
    whole = packed(TABLE)
    for bit in range(8 * (len(whole) - len(DATA))):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ShardError, match=r"the pack (is damaged|was written by another release)"):
            unpack("p.hrpack", bytes(broken))


def test_each_cut_is_found() -> None:
    whole = packed(TABLE)
    for length in range(len(whole)):
        with pytest.raises(DamagedShardError, match="the pack is damaged"):
            unpack("p.hrpack", whole[:length])


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (json.dumps({**TABLE, "layout_of": [0] * 1_000_000}).encode(), "without a layout"),
        (b"[" + b"[]," * 1_390_000 + b"1]", "no object"),
    ],
)
def test_the_largest_tables_take_little_memory(table: bytes, reason: str) -> None:
    data = sealed(table)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedShardError, match=reason):
            unpack("p.hrpack", data)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "members",
    [
        [("a.json", b"{}"), ("p.hrpack", packed(TABLE))],
        [("p.hrpack", packed(TABLE)), ("q.hrpack", packed(TABLE))],
        [("p.hrpack", packed(TABLE)), ("d/b.txt", b"1")],
        [("p.hrpack", packed(TABLE)), ("a.json", b"{}")],
        [("z.txt", b"1"), ("p.hrpack", packed(TABLE)), ("z.json", b"{}")],
    ],
)
def test_a_sample_is_in_one_pack_or_in_none(members: Sequence[tuple[str, bytes]]) -> None:
    with pytest.raises(GroupingError):
        read_samples(tar(*members))
