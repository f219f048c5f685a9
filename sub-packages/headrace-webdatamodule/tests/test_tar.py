"""Tar files: the members that tarfile reads, every fault of their structure, and the samples that members form."""

import contextlib
import io
import subprocess
import tarfile
import tracemalloc
from pathlib import Path

import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule import DamagedShardError, GroupingError, RefusedMemberError, ShardError
from headrace.webdatamodule.shards.format.tar import (
    Member,
    Samples,
    fits_header,
    group,
    skip_reason,
    split_name,
    ustar_headers,
    walk,
)

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
# Bytes that are no UTF-8 are lone surrogates in Python's names.
LETTERS = st.characters(codec="utf-8", exclude_characters="\0/") | st.sampled_from("#.\udc80\udcff_")
PARTS = st.text(LETTERS, min_size=1, max_size=60)
NAMES = st.lists(PARTS, min_size=1, max_size=6).map("/".join)
Spec = list[tuple[str, bytes]]


def tar(spec: Spec, kind: int = tarfile.USTAR_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind, encoding="utf-8", errors="surrogateescape") as file:
        for name, data in spec:
            header = tarfile.TarInfo(name)
            header.size = len(data)
            header.mtime = 1.5 if kind == tarfile.PAX_FORMAT else 1  # the fraction makes an extended header
            file.addfile(header, io.BytesIO(data))
    return stream.getvalue()


def one_header(data: bytes = b"", name: str = "a.txt", **fields: object) -> bytes:
    header = tarfile.TarInfo(name)
    header.size = len(data)
    for field, value in fields.items():
        setattr(header, field, value)
    return header.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512) + bytes(1024)


def reseal(block: bytearray) -> None:
    block[148:156] = b"%06o\0 " % (256 + sum(block[:148]) + sum(block[156:512]))


def as_tarfile_sees(data: bytes) -> list[Member]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:", encoding="utf-8", errors="surrogateescape") as file:
        return [
            Member(one.name, one.offset_data, one.size, one.offset, "file" if one.isreg() else "directory")
            for one in file
        ]


def plain(members: list[Member]) -> list[Member]:
    return [one._replace(name=one.name.rstrip("/")) if one.kind == "directory" else one for one in members]


@given(st.sampled_from(FORMATS), st.lists(st.tuples(NAMES, st.binary(max_size=1100)), max_size=6))
def test_members_are_those_that_tarfile_reads(kind: int, spec: Spec) -> None:
    if kind == tarfile.USTAR_FORMAT:
        spec = [("d" * 90 + "/" + name[:20].strip("/"), data) for name, data in spec]  # it holds 100 bytes and a prefix
    data = tar(spec, kind)
    assert list(walk(data)) == as_tarfile_sees(data)
    assert [member.name for member in walk(data)] == [name for name, _ in spec]
    assert [data[m.offset : m.offset + m.size] for m in walk(data)] == [content for _, content in spec]


def test_members_are_those_that_webdataset_wrote(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with wds.TarWriter(str(path)) as writer:
        for number in range(20):
            writer.write({"__key__": f"deep/{number:04d}", "txt": "x" * number, "json": {"n": number}})
    data = path.read_bytes()
    assert list(walk(data)) == as_tarfile_sees(data)
    assert sum(1 for _ in walk(data)) == 40


@pytest.mark.parametrize("kind", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_members_are_those_that_gnu_tar_wrote(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "in"
    names = ["a.txt", "#b.txt", "übung.json", "deep/er/c.bin", "d" * 90 + ".txt"]
    if kind not in ("v7", "ustar"):
        names += ["long/" * 30 + "e" * 120 + ".txt"]
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * (300 * number))
    label = ["--label=volume"] if kind in ("gnu", "oldgnu") else []
    command = ["tar", f"--format={kind}", "--sort=name", *label, "-cf", "../a.tar", "."]
    assert subprocess.run(command, cwd=folder, check=False).returncode == 0
    data = (tmp_path / "a.tar").read_bytes()
    found = list(walk(data))
    assert [member.kind for member in found[: len(label)]] == ["label"] * len(label)
    assert plain(found[len(label) :]) == as_tarfile_sees(data)[len(label) :]
    assert {m.name for m in found if m.kind == "file"} == {f"./{name}" for name in names}


def test_names_that_would_be_dangerous_to_unpack_are_only_names() -> None:
    names = ["../up.txt", "/root.txt", "a#b.txt", "ü/漢.json", "a b.txt", "a\nb.txt", "c:\\d.txt"]
    assert [member.name for member in walk(tar([(name, b"") for name in names]))] == names


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("step", [64, pytest.param(1, marks=pytest.mark.nightly)])
def test_each_cut_is_found(kind: int, step: int) -> None:
    data = tar([("a.txt", b"1" * 700), ("a.cls", b""), ("b.txt", b"2")], kind)
    end = list(walk(data))[-1].offset + 512 + 1024
    near = {at + by for at in range(0, len(data) + 1, 512) for by in (-1, 0, 1)}
    lengths = sorted(near | set(range(0, len(data) + 1, step)))
    for length in (length for length in lengths if 0 <= length < end):
        with pytest.raises(DamagedShardError) as caught:
            list(walk(data[:length], shard="s.tar"))
        assert caught.value.shard == "s.tar"
        assert caught.value.offset is not None
        assert caught.value.offset <= length
    for length in (length for length in lengths if end <= length <= len(data)):
        if length % 512:
            with pytest.raises(DamagedShardError, match="no multiple of 512"):
                list(walk(data[:length]))
        else:
            assert sum(1 for _ in walk(data[:length])) == 3


@pytest.mark.slow
def test_each_flipped_bit_of_a_header_is_found_there() -> None:
    data = tar([("a.txt", b"1" * 700), ("b.txt", b"2")])
    at = list(walk(data))[1].start
    for bit in range(4096):
        if 148 <= bit // 8 < 156:  # the checksum itself has two bytes that mean nothing
            continue
        broken = bytearray(data)
        broken[at + bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedShardError, match=r"the header is damaged|no tar header") as caught:
            list(walk(bytes(broken)))
        assert caught.value.offset == at


def test_a_header_with_signed_sums_is_read() -> None:
    block = bytearray(one_header(name="ü.txt"))
    reseal(block)
    total = int(block[148:154], 8) - 256 * sum(byte > 127 for byte in block[:512])
    block[148:156] = b"%06o\0 " % total
    assert [member.name for member in walk(bytes(block))] == ["ü.txt"]


def expect(data: bytes, match: str, *, offset: int, member: str | None = None, refused: bool = False) -> None:
    with pytest.raises(RefusedMemberError if refused else DamagedShardError, match=match) as caught:
        list(walk(data, shard="s.tar"))
    assert (caught.value.shard, caught.value.offset, caught.value.member) == ("s.tar", offset, member)


def test_what_is_no_tar_file_is_named() -> None:
    expect(b"", "empty: it has 0 bytes", offset=0)
    expect(b"<!DOCTYPE html><html>", "no tar file.*<!DOCTYPE html>", offset=0)
    expect(b"<!DOCTYPE html><html>" * 100, "no tar header, but b'<!DOCTYPE html>", offset=0)
    expect(b"\x1f\x8b" + bytes(600), "compressed", offset=0)
    expect(bytes(range(256)) * 8, "no tar header", offset=0)


def test_two_tars_joined_and_a_lost_page_are_named() -> None:
    data = tar([("a.txt", b"1"), ("b.txt", b"2")])
    expect(data + data, f"something follows at byte {len(data)}.*joined", offset=2048)
    lost = tar([(f"{number}.txt", b"1") for number in range(20)])
    expect(lost[:4096] + bytes(4096) + lost[8192:], "page was lost", offset=4096)
    expect(lost[:4096] + bytes(512) + lost[4608:], "page was lost", offset=4096)


def test_the_end_may_be_short_but_not_missing() -> None:
    data = one_header(b"1")
    assert len(list(walk(data))) == 1
    expect(data[:-512], "two blocks of zeros .* missing", offset=1024)
    expect(data[:-1024], "two blocks of zeros .* missing", offset=1024)
    expect(
        data[:600],
        "cut in the padding after the member's data; copy or download it again",
        offset=0,
        member="a.txt",
    )


def test_absurd_sizes_are_named() -> None:
    for size in (8 << 30, (8 << 30) - 1, 1 << 60):
        expect(one_header(size=size), f"promises {size} bytes", offset=0, member="a.txt")
    expect(one_header(size=-1), "negative size", offset=0, member="a.txt")
    for field in (b"0x1\0", b"99\0"):
        block = bytearray(one_header())
        block[124:136] = field.ljust(12, b"\0")
        reseal(block)
        expect(bytes(block), "the header is damaged", offset=0)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (tarfile.LNKTYPE, "hard link"),
        (tarfile.SYMTYPE, "symbolic link"),
        (tarfile.CHRTYPE, "character device"),
        (tarfile.BLKTYPE, "block device"),
        (tarfile.FIFOTYPE, "FIFO"),
        (tarfile.GNUTYPE_SPARSE, "sparse"),
        (b"M", "another volume"),
        (b"D", "incremental"),
        (b"N", "old GNU"),
        (b"Q", "unknown type b'Q'"),
    ],
)
def test_what_is_no_plain_file_is_refused_by_name(kind: bytes, match: str) -> None:
    before = one_header(b"1", "first.txt")[:-1024]
    expect(before + one_header(name="x.txt", type=kind), match, offset=1024, member="x.txt", refused=True)


@pytest.mark.parametrize("kind", ["gnu", "posix"])
def test_a_sparse_file_of_gnu_tar_is_refused(tmp_path: Path, kind: str) -> None:
    with (tmp_path / "hole.bin").open("wb") as file:
        file.truncate(1 << 20)
    command = ["tar", f"--format={kind}", "--sparse", "-cf", "a.tar", "hole.bin"]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0
    with pytest.raises(RefusedMemberError, match="sparse"):
        list(walk((tmp_path / "a.tar").read_bytes()))


def test_a_size_beyond_8_gib_is_read_in_each_form() -> None:
    expect(one_header(size=9 << 30), f"promises {9 << 30} bytes", offset=0, member="a.txt")
    header = tarfile.TarInfo("a.txt")
    header.size = 9 << 30
    expect(header.tobuf(tarfile.PAX_FORMAT), f"promises {9 << 30} bytes", offset=1024, member="a.txt")


def pax_record(key: bytes, value: bytes) -> bytes:
    body = b" " + key + b"=" + value + b"\n"
    length = len(body) + len(str(len(body)))
    return str(length + (len(str(length)) > len(str(len(body))))).encode() + body


def extended(kind: bytes, body: bytes) -> bytes:
    return one_header(body, "ext", type=kind)[:-1024]


def test_extended_headers_reach_as_far_as_they_should() -> None:
    member = one_header(b"1")[:-1024]
    local, world = extended(b"x", pax_record(b"path", b"l.txt")), extended(b"g", pax_record(b"path", b"g.txt"))
    assert [one.name for one in walk(local + member + member + bytes(1024))] == ["l.txt", "a.txt"]
    names = [one.name for one in walk(world + member + local + member + bytes(1024))]
    assert names == ["g.txt", "l.txt"]
    long = extended(b"L", b"n" * 300 + b".txt\0") + extended(b"K", b"link\0")
    assert [(one.name, one.start, one.offset) for one in walk(long + member + bytes(1024))] == [
        ("n" * 300 + ".txt", 0, 2560)
    ]


def test_extended_headers_that_fit_nothing_are_named() -> None:
    local = extended(b"x", pax_record(b"path", b"l.txt"))
    expect(local + bytes(1024), "not followed by its member", offset=1024)
    expect(local, "not followed by its member", offset=1024)
    member = one_header(b"1")
    for value in (b"-1", b"1" * 30):
        expect(extended(b"x", pax_record(b"size", value)) + member, "negative or too", offset=1024, member="a.txt")
    expect(extended(b"x", pax_record(b"path", b"a\0b")) + member, "no usable name", offset=1024, member="a\0b")
    expect(one_header(name=""), "no usable name", offset=0, member="")


def test_directories_of_the_v7_format_are_directories() -> None:
    block = bytearray(one_header(name="folder/"))
    block[156] = 0
    reseal(block)
    assert [member.kind for member in walk(bytes(block))] == ["directory"]


@given(st.sampled_from([b"x", b"g", b"L", b"K", b"X"]), st.binary(max_size=1500))
def test_extended_headers_of_any_bytes_raise_our_errors_only(kind: bytes, body: bytes) -> None:
    with contextlib.suppress(ShardError):
        list(walk(extended(kind, body) + one_header(b"1")))


@pytest.mark.parametrize(
    ("before", "match"),
    [
        (extended(b"x", pax_record(b"comment", b"x" * 70_000)), "an extended header has 70.* bytes, more than"),
        (extended(b"L", b"1" * 60_000), "a number of 1000 digits"),
        (extended(b"x", pax_record(b"path", b"a.txt")) * 1000, "hundreds of extended headers"),
        (
            b"".join(extended(b"g", pax_record(b"k%d" % n, b"")) + one_header()[:512] for n in range(1002)),
            "1000 global",
        ),
        (extended(b"g", pax_record(b"size", b"5000")), "the header promises 5000|global extended header changes"),
        (extended(b"x", pax_record(b"GNU.sparse.map", b"0,5")), "sparse"),
        (extended(b"x", pax_record(b"GNU.sparse.size", b"9" * 30)), "sparse"),
    ],
    ids=["long", "digits", "chain", "globals", "size", "map", "sparse"],
)
def test_extended_headers_made_to_hurt_are_refused(before: bytes, match: str) -> None:
    with pytest.raises(ShardError, match=match) as caught:
        list(walk(before + one_header(b"1"), shard="s.tar"))
    assert caught.value.shard == "s.tar"
    assert caught.value.offset is not None


@pytest.mark.slow
def test_a_million_members_take_no_memory_each() -> None:
    block = one_header()[:512]
    data = memoryview(block * 20_000 + bytes(1024))
    tracemalloc.start()
    try:
        assert sum(1 for _ in walk(data)) == 20_000
        # 40 bytes each, so many that what threads of earlier tests take meanwhile does not count.
        assert tracemalloc.get_traced_memory()[1] < 800_000
    finally:
        tracemalloc.stop()


FEW_LETTERS = st.sampled_from("aB.._/-é#")
SHORT_NAMES = st.text(FEW_LETTERS, min_size=1, max_size=12)


def files(*names: str) -> list[Member]:
    return [Member(name, 512 + 1024 * n, 10, 1024 * n, "file") for n, name in enumerate(names)]


def as_dicts(samples: Samples) -> list[tuple[str, tuple[str, ...]]]:
    layouts = list(samples.layouts)
    return [(key, layouts[number]) for key, number in zip(samples.keys, samples.layout_of, strict=True)]


@given(SHORT_NAMES)
def test_names_are_split_as_webdataset_does_but_for_hidden_files(name: str) -> None:
    reason = skip_reason(files(name)[0])
    key, suffix = wds.tariterators.base_plus_ext(name)
    if reason == "no extension":
        assert key is None
    elif reason == "":
        assert split_name(name) == (key, suffix)
    else:
        assert reason == "hidden"
        assert name.rpartition("/")[2].startswith(".")


@given(
    st.lists(
        SHORT_NAMES.filter(lambda name: name[-1] != "/" and skip_reason(files(name)[0]) != "hidden"),
        max_size=8,
        unique=True,
    )
)
def test_samples_are_those_that_webdataset_reads(names: list[str]) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as file:
        for name in names:
            header = tarfile.TarInfo(name)
            header.mtime = 0
            file.addfile(header)
    stream.seek(0)
    try:
        samples = group(walk(stream.getvalue()))
    except GroupingError:
        return
    found = wds.tariterators.group_by_keys(wds.tariterators.tar_file_expander([{"url": "x", "stream": stream}]))
    read = [
        (one["__key__"], tuple(key for key in one if key not in ("__key__", "__url__", "__local_path__")))
        for one in found
    ]
    assert read == [(key, tuple(suffix.lower() for suffix in layout)) for key, layout in as_dicts(samples)]


def test_members_keep_their_order_and_case() -> None:
    samples = group(files("a.txt", "a.JSON.gz", "b.txt", "c.txt", "c.JSON.gz"))
    assert as_dicts(samples) == [("a", ("txt", "JSON.gz")), ("b", ("txt",)), ("c", ("txt", "JSON.gz"))]
    assert samples.layout_of == [0, 1, 0]
    assert samples.offsets == [512, 1536, 2560, 3584, 4608]
    assert samples.end == 5120


def test_what_is_skipped_is_named_with_its_reason() -> None:
    folder = Member("folder.d", 512, 0, 0, "directory")
    odd = files("README", "__meta__/x.json", "__index__.json", "__a.txt", "dir/.hidden", ".top.txt", "a.txt")
    samples = group([folder, *odd])
    assert [(one.name, one.reason) for one in samples.skipped] == [
        ("folder.d", "directory"),
        ("README", "no extension"),
        ("__meta__/x.json", "meta"),
        ("dir/.hidden", "hidden"),
        (".top.txt", "hidden"),
    ]
    assert samples.keys == ["__index__", "__a", "a"]


def test_a_skipped_member_between_a_samples_members_does_not_part_them() -> None:
    assert group(files("a.x", "README", "a.y")).keys == ["a"]


def test_no_members_make_no_samples() -> None:
    assert group([]) == Samples()


def expect_grouping(match: str, names: list[str], sample: str, member: str) -> None:
    with pytest.raises(GroupingError, match=match) as caught:
        group(files(*names), shard="s.tar")
    error = caught.value
    assert (error.shard, error.sample, error.member) == ("s.tar", sample, member)
    assert error.offset == 1024 * (len(names) - 1)


def test_members_that_do_not_stand_together_are_named() -> None:
    expect_grouping("next to one another", ["a.x", "b.x", "a.y"], "a", "a.y")
    expect_grouping("next to one another", ["a.x", "b.x", "a.x"], "a", "a.x")


def test_two_members_of_one_key_are_named() -> None:
    expect_grouping("two members of this key", ["a.x", "a.x"], "a", "a.x")
    expect_grouping("two members of this key", ["a.x", "a.X"], "a", "a.X")
    expect_grouping("two members of this key", ["a.x", "b.x", "b.y", "b.Y"], "b", "b.Y")


def test_keys_of_readers_are_refused() -> None:
    expect_grouping("use for themselves", ["a.x", "a.__key__"], "a", "a.__key__")


def test_members_and_headers_are_what_they_say() -> None:
    found = group(files("a/1.txt", "a/1.CLS", "a/2.txt", "README"))
    assert (found.keys, found.layouts) == (["a/1", "a/2"], {("txt", "CLS"): 0, ("txt",): 1})
    assert [skipped.name for skipped in found.skipped] == ["README"]
    names = ("a.b/c", "a/.b", "__a__/b.c", "__a.b")
    assert [skip_reason(one) for one in files(*names)] == ["no extension", "hidden", "meta", ""]
    assert split_name("a.b/c.tar.gz") == ("a.b/c", "tar.gz")
    [header] = ustar_headers([b"a.txt"], [8])
    assert (len(header), header[:6]) == (512, b"a.txt\0")
    assert (header[124:136], header[148:156]) == (b"00000000010\0", b"006715\0 ")
    [short, long] = ustar_headers([b"a.txt", b"d" * 90 + b"/" + b"n" * 90], [8, 0])
    assert short == header
    assert (long[:100], long[345:500]) == (b"n" * 90 + bytes(10), b"d" * 90 + bytes(65))
    assert [fits_header(name) for name in (b"n" * 100, b"n" * 101, b"d" * 156 + b"/n")] == [True, False, False]
