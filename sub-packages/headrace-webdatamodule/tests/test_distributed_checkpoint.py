"""Checkpoints of `torch.distributed.checkpoint`, which loads into the state that a fresh loader has."""

from pathlib import Path
from typing import Any

import pytest
from distributed_tasks import SAVED, checkpointed, checkpointing
from loaders import Bare
from processes import run_ranks
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.utils.data import SequentialSampler

from headrace.webdatamodule import DistributedBatchSampler, ResumableLoader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_run_of_four_ranks_goes_on_with_two_and_with_six(tmp_path: Path, how: str) -> None:
    begun = run_ranks(checkpointing, tmp_path / "four", 4, str(tmp_path / how), how)
    out = {number for rank in begun for number in rank["excluded"]}
    before = [number for rank in begun for number in rank["came"]]
    assert out
    assert before
    for world in (2, 6):
        ranks = run_ranks(checkpointed, tmp_path / str(world), world, str(tmp_path / how))
        rest = [number for rank in ranks for number in rank["rest"]]
        assert sorted(before + rest) == sorted(set(range(SAVED)) - out)
        assert all(rank["weight"] == 4.0 for rank in ranks)
        assert all(rank["steps"] == begun[0]["steps"] for rank in ranks)  # the record of the run
        whole = [number for rank in ranks for number in rank["next"]]
        assert sorted(whole) == sorted(set(range(SAVED)) - out)


def loader(batches: Any = None, **options: Any) -> ResumableLoader:
    batches = DistributedBatchSampler(23, 4) if batches is None else batches
    return ResumableLoader(list(range(23)), batches, collate_fn=list, **options)


def save(one: ResumableLoader, folder: Path, batches: int = 3) -> list[list[int]]:
    came = []
    for _ in one:
        came.append([int(index) for index in one.indices])
        if len(came) == batches:
            break
    state_dict_saver.save({"loader": one}, checkpoint_id=folder, no_dist=True)
    return came


def load(one: ResumableLoader, folder: Path) -> list[list[int]]:
    state_dict_loader.load({"loader": one}, checkpoint_id=folder, no_dist=True)
    return [[int(index) for index in one.indices] for _ in one]


KINDS: dict[str, Any] = {
    "own": lambda: None,
    "sampler that says nothing": lambda: DistributedBatchSampler(23, 4, sampler=SequentialSampler(range(23))),
    "no state": Bare,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed_per", ["step", "sample"])
def test_every_key_comes_back(tmp_path: Path, kind: str, seed_per: Any) -> None:
    whole = loader(KINDS[kind](), seed_per=seed_per)
    first = loader(KINDS[kind](), seed_per=seed_per)
    came = save(first, tmp_path)
    other = loader(KINDS[kind](), seed_per=seed_per)
    state = {"loader": other.state_dict()}
    state_dict_loader.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state["loader"] == first.state_dict()
    assert came + load(other, tmp_path) == [[int(index) for index in whole.indices] for _ in whole]
    begun = loader(KINDS[kind](), seed_per=seed_per)
    next(iter(begun))
    assert load(begun, tmp_path) == load(loader(KINDS[kind](), seed_per=seed_per), tmp_path)


def test_what_is_refused_stays_refused(tmp_path: Path) -> None:
    save(loader(seed_per="sample"), tmp_path)
    with pytest.raises(ValueError, match="checkpoint has seed_per='sample', got seed_per='step'"):
        load(loader(seed_per="step"), tmp_path)


def test_a_state_that_is_refused_or_ignored_leaves_the_loader_as_it_was(tmp_path: Path) -> None:
    """The states are loaded into those that the loader returned."""
    save(loader(seed_per="step"), tmp_path / "other")
    one, expected = loader(seed_per="sample"), loader(seed_per="sample")
    save(one, tmp_path / "own")
    state = one.state_dict()
    with pytest.raises(ValueError, match="seed_per"):
        load(one, tmp_path / "other")
    assert one.state_dict() == state
    for late in (one, expected):
        late.set_epoch(4)
    state = expected.state_dict()
    state_dict_loader.load({"loader": expected}, checkpoint_id=tmp_path / "own", no_dist=True)
    assert expected.state_dict() == state
