from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule.shards.index.keys import NumberedKeys, describe_keys, namer, read_keys

TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from("%d{}0"), max_size=6)


@given(TEXTS, TEXTS, st.integers(0, 10**12), st.integers(1, 1000), st.integers(1, 18), st.data())
def test_numbered_keys_are_named_as_they_are(
    prefix: str, suffix: str, first: int, step: int, width: int, data: st.DataObject
) -> None:
    keys = NumberedKeys(20, prefix, first, step, width, suffix)
    start, stop, by = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20)), data.draw(st.integers(1, 30))
    for asked in (range(start, stop), range(start, stop, by), range(start, stop, by)[::-1]):
        assert list(namer(keys)(asked)) == [keys[sample] for sample in asked]
    samples = data.draw(st.lists(st.integers(0, 19)))
    assert list(namer(keys)(samples)) == [keys[sample] for sample in samples]


@given(st.lists(TEXTS, min_size=1, unique=True), st.data())
def test_any_keys_are_named_as_they_are(texts: list[str], data: st.DataObject) -> None:
    keys = read_keys(len(texts), *describe_keys(texts))
    samples = data.draw(st.lists(st.integers(0, len(texts) - 1)))
    assert list(namer(keys)(samples)) == [texts[sample] for sample in samples]
    assert list(namer(keys)(range(len(texts)))) == texts
