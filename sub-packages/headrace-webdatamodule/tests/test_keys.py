"""Keys of samples: numbered ones as one rule, others as their bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule.shards.index.keys import (
    ListedKeys,
    NumberedKeys,
    SampleKeys,
    describe_keys,
    is_utf8,
    read_keys,
)

KEYS = st.text(st.characters(codec="utf-8", exclude_characters="./\0") | st.just("\udc80"), min_size=1, max_size=20)


@given(st.lists(KEYS, unique=True, max_size=20))
def test_keys_come_back(keys: list[str]) -> None:
    described, arrays = describe_keys(keys)
    found = read_keys(len(keys), described, arrays)
    assert list(found) == keys
    assert found[:] == keys
    assert found[::-2] == keys[::-2]
    assert [found.find(key) for key in keys] == list(range(len(keys)))
    for stranger in ("", "\udcff", *(key + "0" for key in keys), *(key[:-1] for key in keys)):
        if stranger not in keys:
            with pytest.raises(KeyError):
                found.find(stranger)
    with pytest.raises(IndexError):
        found[len(keys)]


WIDTHS = st.integers(1, 8)
PREFIXES = st.sampled_from(["", "s1_", "\u0663"])  # an Arabic digit is none of ours


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 30), WIDTHS, PREFIXES)
def test_numbered_keys_take_no_room(first: int, step: int, count: int, width: int, prefix: str) -> None:
    keys = [f"{prefix}{first + step * n:0{width}d}é" for n in range(count)]
    described, arrays = describe_keys(keys)
    found = read_keys(count, described, arrays)
    assert isinstance(found, NumberedKeys)
    assert not arrays
    assert list(found) == keys
    for wrong in (f"{first + step * count:0{width}d}é", f"0{first}é", "\u0663é", "é", "", f"{'9' * 5000}é"):
        stranger = f"{prefix}{wrong}"
        if stranger not in keys:
            with pytest.raises(KeyError):
                found.find(stranger)


@pytest.mark.parametrize(
    "keys", [["a2", "a1"], ["a1", "b2"], ["a1", "a2", "a4"], ["a", "b"], ["a1", "a"], ["a01", "a2"], ["9" * 30, "8"]]
)
def test_other_keys_are_listed(keys: list[str]) -> None:
    described, arrays = describe_keys(keys)
    found = read_keys(len(keys), described, arrays)
    assert isinstance(found, ListedKeys)
    assert list(found) == keys


TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from("%d{}0"), max_size=6)


@given(TEXTS, TEXTS, st.integers(0, 10**12), st.integers(1, 1000), st.integers(1, 18), st.data())
def test_numbered_keys_are_named_as_they_are(
    prefix: str, suffix: str, first: int, step: int, width: int, data: st.DataObject
) -> None:
    keys = NumberedKeys(20, prefix, first, step, width, suffix)
    start, stop, by = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20)), data.draw(st.integers(1, 30))
    for asked in (range(start, stop), range(start, stop, by), range(start, stop, by)[::-1]):
        assert list(keys.many(asked)) == [keys[sample] for sample in asked]
    samples = data.draw(st.lists(st.integers(0, 19)))
    assert list(keys.many(samples)) == [keys[sample] for sample in samples]


@given(st.lists(TEXTS, min_size=1, unique=True), st.data())
def test_any_keys_are_named_as_they_are(texts: list[str], data: st.DataObject) -> None:
    keys = read_keys(len(texts), *describe_keys(texts))
    samples = data.draw(st.lists(st.integers(0, len(texts) - 1)))
    assert list(keys.many(samples)) == [texts[sample] for sample in samples]
    assert list(keys.many(range(len(texts)))) == texts


def test_the_keys_of_a_set_are_a_sequence() -> None:
    keys = SampleKeys(4, "key{}".format)
    assert list(keys) == ["key0", "key1", "key2", "key3"]
    assert (keys[-1], keys[1:3], keys[::-3]) == ("key3", ["key1", "key2"], ["key3", "key0"])
    assert "key2" in keys
    assert keys.index("key2") == 2
    with pytest.raises(IndexError):
        keys[4]


def test_texts_are_made_when_they_are_asked_for() -> None:
    keys = SampleKeys(3, "key{}".format)
    assert (keys[-1], keys[:2], "key1" in keys) == ("key2", ["key0", "key1"], True)
    assert (is_utf8("a\udc80"), is_utf8("a\ud800"), is_utf8(3)) == (True, False, False)
