"""The user's stages and options: what is accepted, which random order they get, and methods that are called last."""

import inspect
import random
from collections import UserList
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds
from streams import flat, loader, module, number, untuple, write
from torch.utils.data import DataLoader

from headrace.webdatamodule import Split, WebDataModule
from headrace.webdatamodule.streaming.pipeline import check_options, describe_stages

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
KEEP = {"collate_fn": lambda sample: sample}


@pytest.mark.parametrize("stage", [iter, wds.shuffle(10), wds.filters.detshuffle(10), lambda source: source])
def test_one_composable_or_several(tmp_path: Path, stage: Any) -> None:
    write(tmp_path, [2, 2])
    several: list[Any] = [stage, (stage, iter), iter([stage]), [], None]
    for given in several:
        made = loader(tmp_path, 4, pipeline_wds=given)
        assert sorted(sample for [[sample]] in made) == list(range(4))


@pytest.mark.parametrize("given", [5, "shuffle", [iter, 5], {"shuffle": iter}])
def test_other_things_are_no_composables(given: Any) -> None:
    with pytest.raises(TypeError, match=r"pipeline_wds\['train'\] must be one or several callables"):
        module("/data", 4, pipeline_wds=given)


@pytest.mark.parametrize("given", ["shuffle", ["shuffle"], [("shuffle",)], [("a", 5)], {"a": {}}])
def test_other_things_are_no_calls(given: Any) -> None:
    with pytest.raises(TypeError, match=r"invoke_wds\['train'\] must list pairs of method name and kwargs"):
        module("/data", 4, invoke_wds=given)


@pytest.mark.parametrize("method", ["_run", "__class__", "with_epok", "stage"])
@pytest.mark.parametrize("where", ["invoke_wds", "invoke_wld"])
def test_a_method_that_is_not_there_or_gives_no_pipeline(tmp_path: Path, where: str, method: str) -> None:
    write(tmp_path, [4])
    message = "returns .*, not a pipeline" if method == "stage" else f"has no method '{method}'; (did|it has)"
    options: Any = {where: [(method, {"i": 0} if method == "stage" else {})]}
    with pytest.raises(ValueError, match=rf"{where}\['train'\]: .*{message}"):
        loader(tmp_path, 4, **options)


def test_a_typo_gets_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean with_epoch"):
        loader(write(tmp_path, [4]), 4, invoke_wds=[("with_epok", {})])


def test_every_option_of_the_wrapped_classes_passes() -> None:
    for target, taken in ((wds.WebDataset, {"urls"}), (DataLoader, {"dataset", "batch_size"})):
        options = dict.fromkeys(set(inspect.signature(target).parameters) - taken)
        assert check_options("n", options, target) == options
        assert check_options("n", options, target) is not options


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("kwargs_wds", "nope", r": WebDataset has no option 'nope'; it takes handler, mode, .*, seed$"),
        ("kwargs_wds", "shardshufle", "no option 'shardshufle'; did you mean 'shardshuffle'"),
        ("kwargs_wds", 5, "no option 5"),
        ("kwargs_wds", "self", "no option 'self'"),
        ("kwargs_wds", "urls", "cannot hold 'urls'"),
        ("kwargs_wld", "num_worker", "DataLoader has no option 'num_worker'; did you mean 'num_workers'"),
        ("kwargs_wld", "batch_size", "cannot hold 'batch_size'"),
        ("kwargs_wld", "dataset", "cannot hold 'dataset'"),
    ],
)
def test_unknown_options_are_named(tmp_path: Path, name: str, option: Any, message: str) -> None:
    options: Any = {name: {option: 1}}
    with pytest.raises(ValueError, match=rf"{name}\['train'\].*{message}"):
        module(write(tmp_path, [4]), 4, **options).setup("fit")


@pytest.mark.parametrize(
    ("shardshuffle", "shuffles"), [(True, True), (100, True), (False, False), (0, False), (None, False)]
)
def test_values_of_shardshuffle(tmp_path: Path, shardshuffle: Any, shuffles: bool) -> None:
    write(tmp_path, [1] * 12)
    samples = flat(loader(tmp_path, 12, kwargs_wds={"shardshuffle": shardshuffle}))
    assert sorted(samples) == list(range(12))
    assert (samples != list(range(12))) == shuffles


@pytest.mark.parametrize("shardshuffle", [-1, "yes", 2.0])
def test_values_of_shardshuffle_that_are_refused(tmp_path: Path, shardshuffle: Any) -> None:
    with pytest.raises(ValueError, match=r"\['shardshuffle'\] must be True, False or a number"):
        loader(write(tmp_path, [1]), 1, kwargs_wds={"shardshuffle": shardshuffle})


def shuffled(where: str, stage: dict[str, Any], seed_in: str) -> dict[str, Any]:
    """Options that shuffle samples at one of the four places where a user can."""
    batched = wds.batched(4, collation_fn=None)
    made = wds.shuffle(40, 40, None, stage["seed"]) if seed_in == "place" else wds.shuffle(40, initial=40, **stage)
    options: dict[str, dict[str, Any]] = {
        "pipeline_wds": {"pipeline_wds": [untuple, made]},
        "pipeline_prebatch_wld": {"pipeline_prebatch_wld": [made, batched]},
        "invoke_wds": {"invoke_wds": [("shuffle", {"size": 40, "initial": 40, **stage})]},
        "invoke_wld": {
            "pipeline_prebatch_wld": None,
            "invoke_wld": [("shuffle", {"size": 40, **stage}), ("listed", {"batchsize": 4})],
        },
    }
    return options[where]


WHERE = ["pipeline_wds", "pipeline_prebatch_wld", "invoke_wds", "invoke_wld"]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("seed_in", ["name", "place", "rng"])
def test_a_seed_of_shuffle_gives_each_epoch_its_order(tmp_path: Path, where: str, seed_in: str, workers: int) -> None:
    write(tmp_path, [10] * 4)

    def made(seed: int) -> Any:
        stage = {"rng": random.Random(seed)} if seed_in == "rng" else {"seed": seed}
        return loader(tmp_path, 40, 4, kwargs_wld={"num_workers": workers}, **shuffled(where, stage, seed_in))

    first = made(0)
    epochs = [tuple(flat(first)) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(40))] * 3
    assert len(set(epochs)) == 3
    again = made(0)
    again.set_epoch(2)
    assert tuple(flat(again)) == epochs[2]
    assert tuple(flat(made(1))) != epochs[0]


UNSEEDED: dict[str, Any] = {
    "inside": {"pipeline_wds": [untuple, wds.shuffle(9, initial=9)]},
    "two": {"pipeline_wds": [untuple, wds.shuffle(9, 9, None, None), wds.shuffle(7, initial=7)]},
    "outside": {"pipeline_prebatch_wld": [wds.shuffle(9, initial=9), wds.batched(4, collation_fn=None)]},
    "invoked": {"pipeline_wds": [untuple], "invoke_wds": [("shuffle", {"size": 9, "initial": 9})]},
    "detshuffle": {"pipeline_wds": [untuple, wds.filters.detshuffle(9)]},
    "resampled": {"pipeline_wds": [untuple], "kwargs_wds": {"resampled": True}},
}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("where", UNSEEDED)
def test_a_shuffle_without_a_seed_resumes_in_its_order(tmp_path: Path, where: str, workers: int) -> None:
    write(tmp_path, [7, 7, 6])

    def made() -> Any:
        return loader(tmp_path, 20, 4, kwargs_wld={"num_workers": workers}, **UNSEEDED[where])

    whole = made()
    epochs = [list(whole) for _ in range(2)]
    assert epochs[0] != epochs[1]
    if where != "resampled":
        assert [sorted(flat(epoch)) for epoch in epochs] == [list(range(20))] * 2
    first, resumed = made(), made()
    running = iter(first)
    taken = [next(running), next(running)]
    resumed.load_state_dict(first.state_dict())
    assert taken + list(resumed) + list(resumed) == epochs[0] + epochs[1]


@pytest.mark.parametrize("stage", [wds.shuffle(50, rng=random.Random(3)), wds.filters.detshuffle(50, seed=3)])
def test_ranks_shuffle_differently(tmp_path: Path, stage: Any) -> None:
    write(tmp_path, [50])
    own: Any = {"kwargs_wds": {"nodesplitter": None}, "pipeline_wds": [untuple, wds.map(abs), stage]}
    orders = [flat(loader(tmp_path, 100, 1, 2, num_replicas=2, rank=rank, **own)) for rank in range(2)]
    # detshuffle is webdataset's own affair: the same on every rank.
    assert (orders[0] != orders[1]) == isinstance(stage, wds.filters.FilterFunction)


def test_another_seed_is_another_order(tmp_path: Path) -> None:
    write(tmp_path, [2] * 20)
    orders = {tuple(flat(loader(tmp_path, 40, kwargs_wds={"shardshuffle": 5, "seed": seed}))) for seed in (0, 1)}
    assert len(orders) == 2


def test_repetitions_of_the_dataset_have_their_own_order(tmp_path: Path) -> None:
    write(tmp_path, [2] * 10)
    kwargs = {"shardshuffle": True}
    samples = flat(loader(tmp_path, 40, kwargs_wds=kwargs, invoke_wds=[("repeat", {"nepochs": 2})]))
    assert sorted(samples[:20]) == sorted(samples[20:]) == list(range(20))
    assert samples[:20] != samples[20:]


def noisy(sample: Any) -> list[float]:
    return [sample[0], random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002


@pytest.mark.parametrize("persistent", [False, True])
def test_random_augmentations_in_workers_resume(tmp_path: Path, persistent: bool) -> None:
    write(tmp_path, [6, 6])
    options: Any = {"pipeline_wds": wds.map(noisy), "kwargs_wld": {"num_workers": 2, "persistent_workers": persistent}}
    whole = loader(tmp_path, 12, 2, **options)
    epochs = [list(whole), list(whole)]
    draws = [tuple(sample[1:]) for epoch in epochs for batch in epoch for sample in batch]
    assert len(set(draws)) == len(draws)
    resumed = loader(tmp_path, 12, 2, **options)
    resumed.load_state_dict({**whole.state_dict(), "epoch": 1, "position": 3})
    assert list(resumed) == epochs[1][3:]


@pytest.mark.parametrize(
    ("calls", "length", "samples"),
    [
        ([("with_epoch", {"nbatches": 7})], 7, [*range(10), *range(4)]),
        ([("with_epoch", {"nbatches": 2})], 2, [*range(4)]),
        ([("repeat", {"nepochs": 2})], 10, [*range(10), *range(10)]),
        ([("repeat", {"nepochs": 2, "nbatches": 6})], 6, [*range(10), 0, 1]),
        ([("with_length", {"n": 3, "silent": True})], 3, [*range(10)]),
    ],
)
def test_methods_of_the_loader_come_last(
    tmp_path: Path, calls: list[tuple[str, dict[str, Any]]], length: int, samples: list[int]
) -> None:
    made = loader(write(tmp_path, [5, 5]), 10, 2, invoke_wld=calls)
    assert len(made) == length
    assert flat(iter(made)) == samples


def test_batches_made_by_methods_are_counted(tmp_path: Path) -> None:
    write(tmp_path, [5, 5])
    calls = [("map", {"f": lambda x: x + 1}), ("listed", {"batchsize": 4})]
    made = loader(tmp_path, 10, 4, pipeline_prebatch_wld=None, invoke_wld=calls)
    assert (list(made), len(made)) == ([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]], 3)


def test_an_endless_loader_has_no_length(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="endless"):
        len(loader(write(tmp_path, [5, 5]), 10, invoke_wld=[("repeat", {})]))


def test_methods_of_the_dataset_come_last(tmp_path: Path) -> None:
    write(tmp_path, [5, 5])
    calls: Any = [("map", {"f": lambda x: -x}), ("with_epoch", {"nsamples": 25})]
    assert flat(loader(tmp_path, 24, 4, invoke_wds=calls)) == [-i for i in [*range(10), *range(10), *range(4)]]


def test_samples_leave_the_loader_as_torch_passes_them_on(tmp_path: Path) -> None:
    write(tmp_path, [2])
    plain: Any = {"pipeline_wds": None, "pipeline_prebatch_wld": None}
    assert list(loader(tmp_path, 2, **plain)) == [[0], [1]]
    assert list(loader(tmp_path, 2, kwargs_wld=KEEP, **plain)) == [(0,), (1,)]


def test_descriptions_hold_seeds_and_sizes_and_nothing_of_functions() -> None:
    def of(*stages: Any) -> str:
        return describe_stages(stages)

    assert of(wds.map(str), wds.batched(4, collation_fn=len)) == of(wds.map(len), wds.batched(4, collation_fn=str))
    assert of(wds.batched(4)) == of(wds.batched(batchsize=np.int64(4))) == of(wds.batched(4.0)) != of(wds.batched(5))
    assert of(wds.shuffle(4, seed=1)) != of(wds.shuffle(4, seed=2))
    assert of(wds.shuffle(4, rng=random.Random(1))) == of(wds.shuffle(4, rng=random.Random(1)))
    assert of(wds.shuffle(4, rng=random.Random(1))) != of(wds.shuffle(4, rng=random.Random(2)))
    assert of(wds.filters.detshuffle(4, seed=1)) != of(wds.filters.detshuffle(4, seed=2))
    assert of(partial(sorted, key=len)) != of(partial(sorted, key=len, reverse=True))
    assert of(partial(sorted, key=len)) == of(partial(sorted, key=str))
    assert of(partial(sorted, by=UserList([1, 2]))) == of(partial(sorted, by=[1, 2])) != of(partial(sorted, by=[1, 3]))


def test_splits_may_be_given_by_their_names(tmp_path: Path) -> None:
    write(tmp_path, [4])
    made = WebDataModule({"test": 4}, "json", {Split.test: tmp_path}, 1, pipeline_wds={"test": number})
    assert list(made.test_dataloader()) == [0, 1, 2, 3]
