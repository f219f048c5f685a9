"""The mixture of streams in the places where PyTorch users put it."""

import gc
import io
import json
import sys
import tarfile
from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import stream_rank_worker
from forked import run_ranks
from sources_of_items import Again, Plain
from torch.utils.data import DataLoader

from headrace.weighted_sampler import InterleavedDataset, Stopping

# webdataset closes no shard itself: what a test leaves open is collected before the next test, its warning ignored.
UNCLOSED = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
COLLECTED = pytest.mark.usefixtures("garbage_collected")


def test_every_worker_has_exact_shares_and_an_order_of_its_own() -> None:
    dataset = InterleavedDataset({"a": Again(["a"]), "b": Again(["b"])}, {"a": 3, "b": 1}, stopping="endless")
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, num_workers=2)
    items = list(islice(loader, 2048))  # the workers take turns
    assert [items[0::2].count("b"), items[1::2].count("b")] == [256, 256]
    assert items[0::2] != items[1::2]
    assert items[0::2] == list(islice(dataset, 1024))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_learn_of_a_new_epoch(persistent: bool) -> None:
    dataset = InterleavedDataset({"a": Plain("a", 30), "b": Plain("b", 30)}, {"a": 1, "b": 1})
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=persistent)
    for epoch in (0, 4, 5):
        dataset.set_epoch(epoch)
        assert [tuple(item) for item in loader] == list(dataset)


def test_an_error_in_a_worker_says_where() -> None:
    class Damaged(Again[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1
            raise OSError("shard 7 is damaged")

    loader: DataLoader[Any] = DataLoader(
        InterleavedDataset({"a": Damaged([])}, {"a": 1}), batch_size=None, num_workers=1
    )
    stream = iter(loader)
    with pytest.raises(OSError, match=r"raised by sources\['a'\], item 1 of its pass 0"):
        list(stream)
    stream._shutdown_workers()  # type: ignore[attr-defined]  # the garbage collector would wait for them for five seconds


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_ranks_and_their_workers_have_exact_shares_and_orders_of_their_own(tmp_path: Path, method: str) -> None:
    interface = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    run_ranks(stream_rank_worker.main, tmp_path, interface, [(tmp_path, rank, 2, [method]) for rank in range(2)])
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [rank["stream"]["rank"] for rank in ranks] == [0, 1]
    assert [rank[method][0] for rank in ranks] == [rank["main"] for rank in ranks]
    streams = [stream for rank in ranks for stream in rank[method]]
    assert len(set(streams)) == 4
    assert [stream.count("a") for stream in streams] == [512] * 4


@pytest.fixture
def garbage_collected() -> Iterator[None]:
    yield
    gc.collect()


def write_shards(folder: Path, name: str, shards: int, size: int) -> list[str]:
    """Write tar shards of samples ``{name}-{number}``, each with one text."""
    paths = []
    for shard in range(shards):
        path = folder / f"{name}-{shard}.tar"
        with tarfile.open(path, "w") as tar:
            for number in range(shard * size, (shard + 1) * size):
                info, text = tarfile.TarInfo(f"{name}-{number:04}.txt"), str(number).encode()
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text))
        paths.append(str(path))
    return paths


def streams_of_tars(folder: Path, stopping: Stopping) -> InterleavedDataset[dict[str, Any]]:
    """Proteins, 4 shards of 25, and peptides, 2 shards of 10; drawn three to one."""
    wds = pytest.importorskip("webdataset")
    shards = {"proteins": write_shards(folder, "proteins", 4, 25), "peptides": write_shards(folder, "peptides", 2, 10)}
    sources = {
        name: wds.WebDataset(paths, shardshuffle=False, nodesplitter=wds.split_by_node)
        for name, paths in shards.items()
    }
    return InterleavedDataset(sources, {"proteins": 0.75, "peptides": 0.25}, seed=2, stopping=stopping)


def keys(loader: Iterable[dict[str, Any]], most: int | None = None) -> list[str]:
    return [sample["__key__"] for sample in islice(loader, most)]


@pytest.mark.slow
@UNCLOSED
@COLLECTED
def test_tar_streams_are_mixed_exactly_in_two_workers(tmp_path: Path) -> None:
    dataset = streams_of_tars(tmp_path, "endless")
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, num_workers=2)
    items = keys(loader, 2048)
    for worker in range(2):
        mine = items[worker::2]
        proteins = [key for key in mine if key.startswith("proteins")]
        assert len(proteins) == 768
        # Two of the four shards are this worker's, in their own order, again and again.
        own = [shard * 25 + number for shard in (worker, worker + 2) for number in range(25)]
        assert proteins == [f"proteins-{number:04}" for number in islice(cycle(own), 768)]


@UNCLOSED
@COLLECTED
def test_tar_streams_that_are_all_exhausted_deliver_every_sample(tmp_path: Path) -> None:
    loader: DataLoader[Any] = DataLoader(streams_of_tars(tmp_path, "all_exhausted"), batch_size=None, num_workers=2)
    expected = [f"proteins-{number:04}" for number in range(100)] + [f"peptides-{number:04}" for number in range(20)]
    assert set(keys(loader)) == set(expected)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")  # torchdata calls it in its constructor
@pytest.mark.filterwarnings("ignore:.*are reread and discarded:UserWarning")
@UNCLOSED
@COLLECTED
def test_tar_streams_resume_in_the_stateful_loader(tmp_path: Path, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def load() -> Any:
        dataset = streams_of_tars(tmp_path, "all_exhausted")
        return stateful.StatefulDataLoader(dataset, batch_size=None, num_workers=workers)

    whole = keys(load())
    loader = load()
    assert keys(loader, 70) == whole[:70]
    again = load()
    again.load_state_dict(loader.state_dict())
    assert keys(again) == whole[70:]
