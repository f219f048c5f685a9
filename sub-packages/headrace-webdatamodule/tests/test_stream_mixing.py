"""Several sources made into one stream."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds

from headrace.webdatamodule import Split, WebDataModule, index_shards, write_tars
from headrace.webdatamodule.passes import CurrentPass, Pass
from headrace.webdatamodule.streaming.mixing import Mixed, SourcePass, SourceStream

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def one_after_the_other(sources: Mapping[str, Iterable[Any]]) -> Iterator[Any]:
    return itertools.chain(*sources.values())


class InTurn:
    """One of each in turn, without end; a source that has run out begins again."""

    def __init__(self, sources: Mapping[str, Iterable[Any]]) -> None:
        self.sources = sources

    def __iter__(self) -> Iterator[Any]:
        endless = [self.again(source) for source in self.sources.values()]
        return (sample for turn in zip(*endless, strict=True) for sample in turn)

    @staticmethod
    def again(source: Iterable[Any]) -> Iterator[Any]:
        while True:
            yield from source


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """12 samples "a" of 0 to 11, and 4 samples "b" of 100 to 103."""
    for name, begin, n in (("a", 0, 12), ("b", 100, 4)):
        write_tars([(f"s{i}", {"json": b"%d" % i}) for i in range(begin, begin + n)], tmp_path / name, n_shards=4)
    return {name: tmp_path / name for name in "ab"}


def module(places: Any, mix: Any, n: int = 16, workers: int = 0, **options: Any) -> WebDataModule:
    given: dict[str, Any] = {
        "pipeline_wds": {Split.train: wds.map(lambda sample: sample[0])},
        "pipeline_prebatch_wld": {Split.train: wds.batched(4, collation_fn=None)},
        "kwargs_wds": {Split.train: {"shardshuffle": True}},
        "kwargs_wld": {Split.train: {"num_workers": workers}},
        **options,
    }
    return WebDataModule({Split.train: n}, "json", {Split.train: places}, 4, mix={Split.train: mix}, **given)


def flat(batches: Iterable[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("indexed", [False, True])
def test_sources_one_after_the_other(places: dict[str, Path], workers: int, indexed: bool) -> None:
    for place in places.values() if indexed else []:
        index_shards(place)
    loader = module(places, one_after_the_other, workers=workers).train_dataloader()
    first, second = flat(loader), flat(loader)
    assert sorted(first) == sorted(second) == [*range(12), *range(100, 104)]
    assert first != second


@pytest.mark.parametrize("indexed", [False, True])
def test_a_source_that_begins_again_has_another_order(places: dict[str, Path], indexed: bool) -> None:
    for place in places.values() if indexed else []:
        index_shards(place)
    loader = module(places, InTurn, 160).train_dataloader()
    assert len(loader) == 40
    samples = flat(loader)
    assert [sample >= 100 for sample in samples] == [False, True] * 80
    rare = samples[1::2]
    assert Counter(rare) == dict.fromkeys(range(100, 104), 20)
    passes = [tuple(rare[i : i + 4]) for i in range(0, 80, 4)]
    assert len(set(passes)) > 5
    assert flat(loader) != samples
    again = module(places, InTurn, 160).train_dataloader()
    assert flat(again) == samples


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mixture_is_resumed_by_reading_again(places: dict[str, Path], workers: int) -> None:
    whole = list(module(places, InTurn, workers=workers).train_dataloader())
    data = module(places, InTurn, workers=workers)
    running = iter(data.train_dataloader())
    first = [next(running), next(running)]
    resumed = module(places, InTurn, workers=workers)
    resumed.load_state_dict(data.state_dict())
    with pytest.warns(UserWarning, match="the 2 batches before it are read again and thrown away"):
        rest = list(resumed.train_dataloader())
    assert first + rest == whole


def test_each_reader_gets_some_of_each_source(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="train, source 'a': 4 shards cannot be shared by 6 readers"):
        module(places, InTurn, workers=2).setup("fit")
    for place in places.values():
        index_shards(place)
    seen = Counter[int]()
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        batches = list(module(places, InTurn, 240, workers=2).train_dataloader())
        assert len(batches) == 60
        seen += Counter(flat(batches))
    assert set(seen) == {*range(12), *range(100, 104)}


def test_the_orders_of_sources_do_not_depend_on_where_they_lie(places: dict[str, Path], tmp_path: Path) -> None:
    state = module(places, InTurn).train_dataloader().state_dict()
    moved = {name: place.rename(tmp_path / f"moved {name}") for name, place in places.items()}
    module(moved, InTurn).train_dataloader().load_state_dict(state)
    with pytest.raises(ValueError, match="the fingerprint of the shards of 'a' was"):
        module({"a": moved["b"], "b": moved["a"]}, InTurn).train_dataloader().load_state_dict(state)


class Telling(list[Any]):
    """Notes what it is told."""

    told: int = -1

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch


def test_each_pass_has_a_number_of_its_own() -> None:
    current, told = CurrentPass(), Telling()
    own = SourcePass(current)
    source = SourceStream(wds.DataPipeline(lambda: iter([0])), own)
    stage = Mixed({"a": source}, lambda sources: told, current)
    numbers = []
    for epoch, lap in [(0, 0), (0, 1), (1, 0), (7, 3)]:
        current.set(Pass(epoch, lap, 1, 2))
        list(stage())
        numbers.append(told.told)
        list(source)
        first = own.get()
        assert (first.rank, first.world) == (1, 2)
        list(source)
        assert own.get()[:2] == (first.epoch, first.lap + 1)
        source.set_epoch(told.told + 1)  # as a mixture says it
        list(source)
        assert own.get()[:2] == (first.epoch, first.lap + 1)
        assert first.epoch == epoch
    assert sorted(set(numbers)) == numbers


def test_a_mix_that_returns_nothing(places: dict[str, Path]) -> None:
    with pytest.raises(TypeError, match="mix must return an iterable of samples, got None"):
        list(module(places, lambda sources: None).train_dataloader())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mix": {}}, r"names 2 sources: add mix=\{Split.train: a callable"),
        ({"mix": {Split.train: 5}}, r"mix\[Split.train\] must be a callable"),
        ({"mix": {Split.train: InTurn, Split.val: InTurn}}, "mix has Split.val, but"),
        ({"dirs_tars_wds": {Split.train: {}}}, "is empty: name at least one source"),
        ({"dirs_tars_wds": {Split.train: {3: "x"}}}, "names of sources must be text, got 3"),
        ({"dirs_tars_wds": {Split.train: {"a": "pipe:cat"}}}, r"dirs_tars_wds\[Split.train\]\['a'\] is 'pipe:cat'"),
        ({"dirs_tars_wds": {Split.train: "one"}}, r"mix has Split.train, but dirs_tars_wds\[Split.train\] is not"),
    ],
)
def test_what_does_not_fit_together(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "n_samples": {Split.train: 5},
        "suffix_keys_wds": "json",
        "dirs_tars_wds": {Split.train: {"a": "x", "b": "y"}},
        "global_batch_size": 4,
        "mix": {Split.train: InTurn},
    }
    WebDataModule(**good)
    with pytest.raises((TypeError, ValueError), match=message):
        WebDataModule(**{**good, **change})
