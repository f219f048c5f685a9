"""The names of splits, for every data module and every argument that is given per split."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from indexed_runs import TRAIN, VAL, Bare, keys, make_shards

from headrace.webdatamodule import IndexedWebDataModule, MapDataModule, PickledDataWDS, Split, WebDataModule
from headrace.webdatamodule.split_names import PerSplit, by_split, named_sources, needed_by


def test_the_splits() -> None:
    assert [split.name for split in Split] == ["train", "val", "test", "predict"]


def test_a_mapping_is_copied() -> None:
    given = {Split.val: 1}
    checked = by_split("n_samples", given)
    given.clear()
    assert checked == {Split.val: 1}
    assert by_split("kwargs_wds", None) == {}


def test_names_of_splits_do_as_well() -> None:
    given: dict[Split | str, int] = {"predict": 1, Split.val: 2}
    assert by_split("n_samples", given) == {Split.predict: 1, Split.val: 2}
    with pytest.raises(ValueError, match=r"n_samples has 'val' twice: as a member of Split and by its name"):
        by_split("n_samples", {**given, "val": 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"training": 1}, "keys must be 'train', .* or members of Split, got 'training': it is 'train' here"),
        ({"Validation": 1}, "got 'Validation': it is 'val' here"),
        ({"books": 1}, "got 'books'$"),
        ({"text": 1}, "got 'text'$"),
        ({5: 1}, "or members of Split, got 5"),
        (5, r"n_samples must be a mapping from Split.*got 5: give {'train': ...}"),
    ],
)
def test_what_is_no_mapping_from_splits_is_refused(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        by_split("n_samples", given)


def test_predict_takes_the_test_split_where_there_is_no_other() -> None:
    assert needed_by("predict", ()) == needed_by("predict", {Split.test, Split.predict}) == Split.predict
    assert needed_by("predict", {Split.test}) == Split.test


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    train, val = (make_shards(tmp_path_factory.mktemp(name), name, count) for name, count in (("t", TRAIN), ("v", VAL)))
    return train, val


def indexed(folder: Path, **options: Any) -> IndexedWebDataModule:
    by_size = {"batch_sampler": Bare} if "sizes" in options else {"batch_size": 3}
    return IndexedWebDataModule(**{"shards": {"train": folder}, **by_size, **options})


def mapped(folder: Path, **options: Any) -> MapDataModule:
    by_size = {"batch_sampler": Bare} if "sizes" in options else {"batch_size": 3}
    return MapDataModule(**{"datasets": {"train": list(range(9))}, **by_size, **options})


def streamed(folder: Path, **options: Any) -> WebDataModule:
    given = {"n_samples": {"train": TRAIN}, "dirs_tars_wds": {"train": folder}, "prefix_tars_wds": "shard"}
    return WebDataModule(**{**given, "suffix_keys_wds": "json", "global_batch_size": 3, **options})


def packed(folder: Path, **options: Any) -> PickledDataWDS:
    given: dict[str, Any] = {"names_subset": {"train": ["a"]}, "dirs_tars_wds": {"train": folder}}
    return PickledDataWDS(folder, **{**given, "suffix_keys_wds": "pkl", "global_batch_size": 3, **options})


SHARED = ["batch_size", "batch_sampler", "sizes", "sampler", "collate_fn", "num_workers", "on_error"]
OF_STREAMS = ["pipeline_wds", "pipeline_prebatch_wld", "kwargs_wds", "kwargs_wld", "invoke_wds", "invoke_wld", "mix"]
ARGUMENTS = [
    *((indexed, name) for name in ("shards", *SHARED, "decode", "transform", "keys")),
    *((mapped, name) for name in ("datasets", *SHARED)),
    *((streamed, name) for name in ("n_samples", "dirs_tars_wds", *OF_STREAMS)),
    *((packed, name) for name in ("names_subset", "dirs_tars_wds")),
]
MEANT = {
    "tain": "train",
    "trian": "train",
    "Training": "train",
    "validation": "val",
    "valid": "val",
    "dev": "val",
    "eval": "val",
    "evaluation": "val",
    "vall": "val",
    "tset": "test",
    "testing": "test",
    "tests": "test",
    "predictions": "predict",
}


@pytest.mark.parametrize(("make", "name"), ARGUMENTS)
def test_a_misspelt_split_is_refused_in_every_argument(
    folders: tuple[Path, Path], make: Callable[..., Any], name: str
) -> None:
    for key, meant in MEANT.items():
        for given in ({key: folders[0]}, {"train": folders[0], key: folders[1]}):
            with pytest.raises(TypeError, match=f"{name}: keys must be 'train', .*, got {key!r}: it is {meant!r} here"):
                make(folders[0], **{name: given})


@pytest.mark.parametrize(("make", "name"), [one for one in ARGUMENTS if one[1] != "decode"])
def test_other_names_are_no_splits(folders: tuple[Path, Path], make: Callable[..., Any], name: str) -> None:
    for given in ({"books": folders[0]}, {"train": folders[0], "books": folders[1]}):
        with pytest.raises(TypeError, match=f"{name}: keys must be 'train', .*, got 'books'"):
            make(folders[0], **{name: given})


def test_a_mixture_belongs_to_a_split(folders: tuple[Path, Path]) -> None:
    sources = {"books": folders[0], "web": folders[1]}
    cure = r"\{'train': \{'name': directory, ...\}\} for several sources"
    with pytest.raises(TypeError, match=f"shards: keys must be .* got 'books'; shards are .*{cure}"):
        indexed(folders[0], shards=sources)
    module = indexed(folders[0], shards={"train": sources, "val": folders[1]}, collate_fn=keys)
    module.setup("fit")
    assert sorted(key[0] for batch in module.train_dataloader() for key in batch) == ["t"] * TRAIN + ["v"] * VAL
    assert sum(map(len, module.val_dataloader())) == VAL


def test_no_split_at_all_is_refused(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match=r"shards is empty: give at least one split, such as \{'train': directory\}"):
        indexed(folders[0], shards={})


@pytest.mark.parametrize("name", ["val", "validation", "Train"])
def test_a_split_is_no_source_of_another_one(folders: tuple[Path, Path], name: str) -> None:
    told = rf"\['train'\] names sources, and {name!r} is the name of a split: give the source another name"
    with pytest.raises(TypeError, match=f"shards{told}"):
        indexed(folders[0], shards={"train": {"books": folders[0], name: folders[1]}})
    with pytest.raises(TypeError, match=f"dirs_tars_wds{told}"):
        streamed(folders[0], dirs_tars_wds={"train": {"books": folders[0], name: folders[1]}}, mix={"train": max})


def test_members_may_have_decoders_of_their_own(folders: tuple[Path, Path]) -> None:
    module = indexed(folders[0], decode={"json": len}, collate_fn=lambda samples: [one["json"] for one in samples])
    module.setup("fit")
    assert {size for batch in module.train_dataloader() for size in batch} == {1, 2}


def test_one_value_serves_all_splits() -> None:
    one = PerSplit("batch_size", 4, 9)
    assert not one.mapped
    assert [one[split] for split in Split] == [4, 4, 4, 4]
    assert all(split in one for split in Split)


def test_a_mapping_serves_its_splits_and_leaves_the_others_the_default() -> None:
    some = PerSplit("num_workers", {Split.val: 3}, 1)
    assert some.mapped
    assert [some[split] for split in Split] == [1, 3, 1, 1]
    assert [split in some for split in Split] == [False, True, False, False]


def test_a_mapping_that_is_a_value_is_one() -> None:
    named = {"json": None, "text": len}
    one = PerSplit("decode", named, mappings=True)
    assert not one.mapped
    assert one[Split.test] is named
    assert PerSplit("decode", {Split.train: {"json": None}}, mappings=True)[Split.train] == {"json": None}
    with pytest.raises(TypeError, match=r"decode: keys must be .* got 'json'; ask for values"):
        PerSplit("decode", named, cure="ask for values")


def test_none_is_no_split() -> None:
    none = PerSplit("shards", None)
    assert not any(split in none for split in Split)
    assert none[Split.train] is None


def test_splits_and_other_keys_do_not_mix() -> None:
    with pytest.raises(TypeError, match=r"batch_size: keys must be 'train', .* or members of Split, got 'books'"):
        PerSplit("batch_size", {Split.train: 1, "books": 2})


def test_names_of_splits_are_splits() -> None:
    named = PerSplit("batch_size", {"train": 64, Split.val: 128})
    assert [named[split] for split in (Split.train, Split.val, Split.test)] == [64, 128, None]
    assert PerSplit("shards", {"train": "/x", "val": "/y"}).mapped
    with pytest.raises(ValueError, match=r"batch_size has 'train' twice"):
        PerSplit("batch_size", {"train": 64, Split.train: 128})


def test_sources_are_named() -> None:
    assert named_sources("shards", "/x", "train") == {"train": "/x"}
    assert named_sources("shards", ["/x.tar"], "val") == {"val": ["/x.tar"]}
    assert named_sources("shards", {"a": "/x", "b": "/y"}, "train") == {"a": "/x", "b": "/y"}


@pytest.mark.parametrize(
    ("given", "kind", "told"),
    [
        ({}, ValueError, "shards is empty: name at least one source"),
        ({1: "/x"}, TypeError, "names of sources must be text, got 1"),
        ({"": "/x"}, TypeError, "names of sources must be text, got ''"),
        ({"train": "/x"}, TypeError, "'train' is the name of a split"),
        ({"a": "/x", "test": "/y"}, TypeError, "'test' is the name of a split"),
    ],
)
def test_what_names_no_source(given: Any, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        named_sources("shards", given, "train")


def test_a_source_may_have_the_name_that_it_had_as_the_only_one() -> None:
    assert named_sources("shards", "/x", "train") == {"train": "/x"}
    assert named_sources("shards", {"train": "/x", "june": "/y"}, "train") == {"train": "/x", "june": "/y"}
    with pytest.raises(TypeError, match="'train' is the name of a split"):
        named_sources("shards", {"train": "/x", "june": "/y"}, "val")


@pytest.mark.parametrize("name", ["training", "validation", "valid", "dev", "Test", "prediction"])
def test_a_split_in_other_words_is_no_source(name: str) -> None:
    with pytest.raises(TypeError, match=f"shards names sources, and {name!r} is the name of a split"):
        named_sources("shards", {name: "somewhere"}, "train")


@pytest.mark.parametrize("given", [{"a": {Split.train: "x"}}, {"a": Split.train}])
def test_a_mapping_the_wrong_way_round_is_told_the_right_one(given: Any) -> None:
    with pytest.raises(TypeError, match="for several sources"):
        named_sources("shards", given, "train")
