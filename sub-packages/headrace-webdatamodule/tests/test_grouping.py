import io
import tarfile

import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule.shards.errors import GroupingError
from headrace.webdatamodule.shards.format.tar import Member, Samples, group, skip_reason, split_name, walk

LETTERS = st.sampled_from("aB.._/-é#")
NAMES = st.text(LETTERS, min_size=1, max_size=12)


def files(*names: str) -> list[Member]:
    return [Member(name, 512 + 1024 * n, 10, 1024 * n, "file") for n, name in enumerate(names)]


def as_dicts(samples: Samples) -> list[tuple[str, tuple[str, ...]]]:
    layouts = list(samples.layouts)
    return [(key, layouts[number]) for key, number in zip(samples.keys, samples.layout_of, strict=True)]


@given(NAMES)
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
        NAMES.filter(lambda name: name[-1] != "/" and skip_reason(files(name)[0]) != "hidden"), max_size=8, unique=True
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


def expect(match: str, names: list[str], sample: str, member: str) -> None:
    with pytest.raises(GroupingError, match=match) as caught:
        group(files(*names), shard="s.tar")
    error = caught.value
    assert (error.shard, error.sample, error.member) == ("s.tar", sample, member)
    assert error.offset == 1024 * (len(names) - 1)


def test_members_that_do_not_stand_together_are_named() -> None:
    expect("next to one another", ["a.x", "b.x", "a.y"], "a", "a.y")
    expect("next to one another", ["a.x", "b.x", "a.x"], "a", "a.x")


def test_two_members_of_one_key_are_named() -> None:
    expect("two members of this key", ["a.x", "a.x"], "a", "a.x")
    expect("two members of this key", ["a.x", "a.X"], "a", "a.X")
    expect("two members of this key", ["a.x", "b.x", "b.y", "b.Y"], "b", "b.Y")


def test_keys_of_readers_are_refused() -> None:
    expect("use for themselves", ["a.x", "a.__key__"], "a", "a.__key__")
