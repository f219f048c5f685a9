"""Which states a loader refuses, and why."""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from loaders import (
    COUNT,
    Bare,
    Squares,
    make,
    numbered_shards,
    plain,
)
from torch.utils.data import BatchSampler, RandomSampler

from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedShards,
    ResumableLoader,
    index_shards,
    write_shards,
    write_tars,
)
from headrace.webdatamodule._shared.state_mismatch import StateMismatchError

# Torch says so on machines of fewer cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return numbered_shards(tmp_path_factory.mktemp("shards"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": 99}, "version=99, this release reads 1"),
        ({"fingerprint": "0" * 32}, "is of other train data.*resume with the data it was saved with"),
        ({"steps": -1}, r"state\['steps'\] must be an int from 0 to 2\*\*62, got -1"),
        ({"epoch": -1}, r"state\['epoch'\] must be an int from 0 to 2\*\*62, got -1"),
        ({"batch_sampler": None}, "batch_sampler"),
        ({"batch_sampler": {}}, "state lacks"),
        ({"steps": "x"}, "steps"),
    ],
)
def test_a_state_of_something_else_is_refused(folder: Path, change: dict[str, Any], told: str) -> None:
    loader = plain(folder)
    with pytest.raises((ValueError, TypeError), match=told):
        loader.load_state_dict(loader.state_dict() | change)
    assert loader.state_dict() == plain(folder).state_dict()
    assert list(loader) == list(plain(folder))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"steps": None}, "steps"),
        ({"batch_sampler": None}, "batch_sampler"),
        ({"batch_sampler": {}}, "checkpoint has num_replicas=None, got num_replicas=1"),
    ],
)
def test_a_state_of_something_else_is_refused_without_a_sampler_of_state(
    folder: Path, change: dict[str, Any], told: str
) -> None:
    loader = make(folder, Bare())
    with pytest.raises((ValueError, TypeError), match=told):
        loader.load_state_dict(loader.state_dict() | change)
    assert list(loader) == list(Bare())


@pytest.mark.parametrize("state", [None, 3, [], "state"])
def test_what_is_no_state(folder: Path, state: Any) -> None:
    with pytest.raises(TypeError, match=r"what state_dict\(\) returned"):
        plain(folder).load_state_dict(state)


def test_a_state_of_another_class_says_what_was_expected(folder: Path) -> None:
    loader, batches = plain(folder), DistributedBatchSampler(COUNT, 4)
    fields = "version, seed, fingerprint, batch_sampler, order, seed_per, epoch, steps"
    expected = rf"ResumableLoader: state must be what state_dict\(\) returned, with {fields}; "
    others: list[tuple[Any, type[Exception], str]] = [
        (
            batches.state_dict(),
            ValueError,
            "lacks batch_sampler, order, seed_per, steps: got epoch, fingerprint, position, run, seed, starts, step, ",
        ),
        (torch.nn.Linear(1, 1).state_dict(), ValueError, "lacks .*: got bias, weight"),
        (loader, TypeError, "got ResumableLoader"),
    ]
    for state, kind, got in others:
        with pytest.raises(kind, match=f"{expected}.*{got}"):
            loader.load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"DistributedBatchSampler: state must be .* lacks .*position: got batch_sampler, "
    ):
        batches.load_state_dict(loader.state_dict())


@pytest.mark.parametrize("missing", ["version", "seed", "epoch", "steps", "fingerprint", "batch_sampler"])
def test_a_state_that_lacks_something_says_what(folder: Path, missing: str) -> None:
    loader = plain(folder)
    state = {name: value for name, value in loader.state_dict().items() if name != missing}
    with pytest.raises(ValueError, match=missing):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "told"),
    [({"seed": 1}, "seed=0, got seed=1: use that seed"), ({"size": 5}, "other samples.*batch size")],
)
def test_another_seed_or_batch_size_is_refused_with_the_cure(folder: Path, options: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"{told}.*start without the checkpoint"):
        plain(folder, **options).load_state_dict(plain(folder).state_dict())


def test_other_shards_are_refused(folder: Path, tmp_path: Path) -> None:
    write_tars([(f"s{i:02d}", {"json": b"%d" % (i + 1)}) for i in range(COUNT)], tmp_path, n_shards=3)
    index_shards(tmp_path)
    with pytest.raises(ValueError, match="other train data"):
        plain(tmp_path).load_state_dict(plain(folder).state_dict())


def test_without_a_sampler_of_state_ranks_stay_as_many(folder: Path) -> None:
    two = make(folder, Bare(), num_replicas=2, rank=0, check_ranks=False)
    next(iter(two))
    same = make(folder, Bare(), num_replicas=2, rank=1, check_ranks=False)
    same.load_state_dict(two.state_dict())
    assert list(same) == list(Bare())[1:]
    with pytest.raises(
        ValueError, match=r"num_replicas=2, got num_replicas=3, and Bare has no state_dict.*as many ranks"
    ):
        make(folder, Bare(), num_replicas=3, rank=0).load_state_dict(two.state_dict())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"batch_sampler": {"position": "1"}}, "position.* must be an int"),
        ({"batch_sampler": {"position": None}}, "position.* must be an int"),
        ({"batch_sampler": {"position": -1}}, "it was changed"),
        ({"steps": 0}, "it was changed"),
        ({"epoch": 5}, "of epoch 5, but its batch sampler is in 0"),
        ({"steps": 10**30}, "from 0 to 2"),
        ({"epoch": 10**30}, "from 0 to 2"),
    ],
)
def test_a_state_that_was_changed_by_hand(folder: Path, change: dict[str, Any], told: str) -> None:
    loader = plain(folder)
    assert len(list(islice(loader, 2))) == 2
    state = loader.state_dict()
    changed = {**state, **change, "batch_sampler": {**state["batch_sampler"], **change.get("batch_sampler", {})}}
    with pytest.raises(ValueError, match=told):
        plain(folder).load_state_dict(changed)


def test_more_steps_than_there_are_batches_to_count(folder: Path) -> None:
    loader = make(folder, Bare())
    with pytest.raises(ValueError, match="more than the 12 batches"):
        loader.load_state_dict(loader.state_dict() | {"steps": 13})


def test_a_state_of_another_dataset_is_refused() -> None:
    def state(dataset: Any, **options: Any) -> Any:
        return ResumableLoader(dataset, [[0, 1]], **options).state_dict()

    plain = ResumableLoader([1, 2, 3], [[0, 1]])
    plain.load_state_dict(state([1, 2, 3]))
    others = (state([1, 2]), state([4, 5, 6]), state([1, 3, 2]), state([1, 2, 3], fingerprint="v2"), state(Squares()))
    for other in others:
        with pytest.raises(StateMismatchError) as caught:
            plain.load_state_dict(other)
        assert caught.value.differences == ("data",)
        assert caught.value.acceptable == {"data"}
    with pytest.raises(ValueError, match="checkpoint has seed=3, got seed=0: use that seed"):
        plain.load_state_dict(state([1, 2, 3], seed=3))


def test_a_state_of_other_shards_is_refused(tmp_path: Path) -> None:
    def loader(name: str, keys: Sequence[str]) -> ResumableLoader:
        if not (tmp_path / name).exists():
            write_shards([(key, {"txt": key.encode()}) for key in keys], tmp_path / name, n_shards=2)
        batches = DistributedBatchSampler(len(keys), 4, num_replicas=1, rank=0)
        return ResumableLoader(IndexedShards(tmp_path / name), batches, collate_fn=list, num_replicas=1, rank=0)

    keys = [f"key{number:03d}" for number in range(50)]
    state = loader("then", keys).state_dict()
    renamed = [*keys[:20], *(f"{key}x" for key in keys[20:])]
    for name, others in {"fewer": keys[:-1], "turned": keys[::-1], "renamed": renamed}.items():
        with pytest.raises(StateMismatchError) as caught:
            loader(name, others).load_state_dict(state)
        assert caught.value.differences == ("data",)
    loader("then", keys).load_state_dict(state)


def _unseeded(data: list[int]) -> list[Any]:
    return [
        DistributedBatchSampler(len(data), 8, sampler=RandomSampler(data)),
        BatchSampler(RandomSampler(data), 8, drop_last=False),
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_an_order_that_cannot_be_read_again_is_refused(which: int) -> None:
    data = list(range(300))
    first = ResumableLoader(data, _unseeded(data)[which])
    for _ in zip(range(5), first, strict=False):
        pass
    state = json.loads(json.dumps(first.state_dict()))
    second = ResumableLoader(data, _unseeded(data)[which])

    def resume() -> None:
        second.load_state_dict(state)
        list(second)

    with pytest.raises(ValueError, match="is not the one that the checkpoint was saved in"):
        resume()


def test_a_seeded_order_is_resumed_by_counting_batches() -> None:
    data = list(range(300))

    def loader() -> ResumableLoader:
        order = RandomSampler(data, generator=torch.Generator().manual_seed(5))
        return ResumableLoader(data, BatchSampler(order, 8, drop_last=False))

    first = loader()
    begun = [batch.tolist() for _, batch in zip(range(5), first, strict=False)]
    second = loader()
    second.load_state_dict(first.state_dict())
    again = second.state_dict()
    assert again == first.state_dict()
    rest = [batch.tolist() for batch in second]
    assert sorted(number for batch in begun + rest for number in batch) == data


@pytest.mark.parametrize("run", [5, 1.5, None, "x"])
def test_a_run_that_is_no_list_is_refused(run: Any) -> None:
    loader = ResumableLoader(list(range(40)), DistributedBatchSampler(40, 4), collate_fn=list)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(ValueError, match=r"run.* must be"):
        loader.load_state_dict({**state, "batch_sampler": {**state["batch_sampler"], "run": run}})
