"""The workers of a loader: their random numbers, and how they start and end."""

import multiprocessing
import os
import random
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loaders import (
    COUNT,
    Bare,
    epoch_of,
    make,
    numbered_shards,
    plain,
)

from headrace.webdatamodule import DistributedBatchSampler, ResumableLoader

# Torch says so on machines of fewer cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return numbered_shards(tmp_path_factory.mktemp("shards"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_closed_loader_opens_again(folder: Path, workers: int) -> None:
    loader = plain(folder, num_workers=workers)
    batches = iter(loader)
    taken = [next(batches), next(batches)]
    state = loader.state_dict()
    loader.close()
    loader.close()
    loader.load_state_dict(state)
    assert taken + list(loader) == list(plain(folder))
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_stay_from_epoch_to_epoch(folder: Path, workers: int) -> None:
    loader = make(
        folder, DistributedBatchSampler(COUNT, 4), num_workers=workers, collate_fn=lambda samples: os.getpid()
    )
    first = set(epoch_of(loader, 0))
    second = set(epoch_of(loader, 1))
    assert first == second
    assert len(first) == max(workers, 1)
    assert (os.getpid() in first) == (workers == 0)
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_callers_random_numbers_stay(folder: Path, workers: int) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = plain(folder, num_workers=workers)
    for epoch in range(2):
        epoch_of(loader, epoch)
    loader.close()
    assert torch.equal(torch.get_rng_state(), before)


def drawn(samples: list[Any]) -> float:
    return float(torch.rand(()))


def test_random_numbers_of_workers_repeat_themselves(folder: Path) -> None:
    def draws(seed: int, epoch: int) -> list[float]:
        loader = plain(folder, num_workers=2, seed=seed, collate_fn=drawn)
        loader.set_epoch(epoch)
        made = list(loader)
        loader.close()
        return made

    assert draws(0, 1) == draws(0, 1)
    assert not set(draws(0, 1)) & set(draws(0, 2))
    assert not set(draws(0, 1)) & set(draws(1, 1))


def drawn_of_all(samples: list[Any]) -> tuple[float, float, float]:
    return random.random(), np.random.random(), float(torch.rand(()))  # noqa: NPY002 - what is seeded


@pytest.mark.parametrize("kind", [Bare, lambda: DistributedBatchSampler(COUNT, 4)])
@pytest.mark.parametrize(("workers", "context"), [(3, "fork"), pytest.param(2, "spawn", marks=pytest.mark.nightly)])
def test_random_numbers_are_those_of_the_step(folder: Path, kind: Any, workers: int, context: str) -> None:
    whole = make(folder, kind(), num_workers=2, collate_fn=drawn_of_all)
    first, second = epoch_of(whole, 0), epoch_of(whole, 1)
    assert len({number for batch in first + second for number in batch}) == 3 * len(first + second)
    for done in (1, 4):
        whole.set_epoch(1)
        assert list(islice(whole, done)) == second[:done]
        resumed = make(folder, kind(), num_workers=workers, multiprocessing_context=context, collate_fn=drawn_of_all)
        resumed.load_state_dict(whole.state_dict())
        assert list(resumed) == second[done:]
        resumed.close()
    whole.close()


def test_random_numbers_differ_from_epoch_to_epoch_in_workers_that_stay(folder: Path) -> None:
    loader = plain(folder, num_workers=2, collate_fn=drawn)
    first, second = (set(epoch_of(loader, epoch)) for epoch in (0, 1))
    assert not first & second
    loader.close()


def test_random_numbers_differ_from_rank_to_rank(folder: Path) -> None:
    def draws(rank: int) -> set[Any]:
        loader = plain(folder, num_workers=1, world=(2, rank), collate_fn=drawn, check_ranks=False)
        made = set(loader)
        loader.close()
        return made

    assert not draws(0) & draws(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but")
@pytest.mark.parametrize("workers", [0, 1])
def test_pinned_memory_that_is_not_there_changes_nothing(folder: Path, workers: int) -> None:
    loader = plain(folder, num_workers=workers, pin_memory=True, collate_fn=None)
    keys = [key for batch in loader for key in batch["__key__"]]
    loader.close()
    assert len(keys) == COUNT


def test_prefetching_is_for_workers_only(folder: Path) -> None:
    assert len(list(plain(folder, prefetch_factor=3))) == 6


@pytest.mark.slow
@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_workers_that_are_not_forked(folder: Path, context: str) -> None:
    loader = plain(folder, num_workers=1, multiprocessing_context=context)
    assert list(loader) == list(plain(folder))
    loader.close()


class Pooled:
    """Asks a pool of threads for its samples."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self[0]

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return self.pool.submit(int, index).result()


def test_the_error_of_a_forked_worker_without_the_threads_of_its_parent_names_the_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.webdatamodule.loading.worker.GRACE", 0.1)
    loader = ResumableLoader(Pooled(), [[0], [1]], num_workers=1, timeout=1, multiprocessing_context="fork")
    cure = r"timed out after 1 seconds: .* such as polars, .*: give multiprocessing_context='spawn' or 'forkserver'"
    with pytest.raises(RuntimeError, match=cure):
        next(iter(loader))


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
@pytest.mark.parametrize("what", [lambda samples: samples, partial(max, key=threading.Lock())])
def test_what_a_worker_cannot_be_sent_is_an_error_with_the_cure(context: str, what: Any) -> None:
    loader = ResumableLoader([0, 1], [[0], [1]], collate_fn=what, num_workers=1, multiprocessing_context=context)
    sent = f"workers that are started by '{context}' get the dataset and collate_fn by pickle, which failed"
    with pytest.raises(TypeError, match=rf"{sent} \(.*\): define functions in a module, .* or .*context='fork'"):
        next(iter(loader))


def test_workers_start_before_ranks_compare_their_plans(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork right behind a collective leaves the child stuck on Python 3.11."""
    before, children = set(multiprocessing.active_children()), list[int]()
    monkeypatch.setattr(
        "headrace.webdatamodule.loader.compare_plans",
        lambda plan, name, num_replicas, mesh: children.append(len(set(multiprocessing.active_children()) - before)),
    )
    loader = plain(folder, num_workers=2)
    assert len(list(loader)) == 6
    loader.close()
    assert children == [2]


def test_forks_beside_threads_do_not_warn(folder: Path) -> None:
    """Python 3.12 and newer would."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loader = plain(folder, num_workers=1, multiprocessing_context="fork")
            assert len(list(loader)) == 6
            loader.close()
    finally:
        end.set()
        thread.join()


def test_a_timeout_of_numpy() -> None:
    assert len(ResumableLoader([1], [[0]], timeout=np.float64(5), num_workers=1)) == 1
