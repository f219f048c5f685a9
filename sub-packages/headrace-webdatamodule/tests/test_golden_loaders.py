"""Golden bytes of shards, and golden batches and states of loaders: nothing of it changes by accident.

``python tests/test_golden_loaders.py --write`` writes the file beside this module anew: what changes there is a
decision. A loader's batches are digests for three seeds, its state is stored in full.
"""

import argparse
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import streams
from golden import Listed, Sliced, digest, integers

from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedShards,
    IndexedWebDataModule,
    MapDataModule,
    ResumableLoader,
    index_shards,
    write_shards,
    write_tars,
)

STORED = Path(__file__).with_suffix(".json")
SEEDS = (0, 1, 2**63 + 11)
N = 61
LENGTHS = integers(N, 1, 700, 1).tolist()
SAMPLES = [(f"s{i:03d}", {"txt": b"x" * length, "json": b"%d" % i}) for i, length in enumerate(LENGTHS)]
UNEVEN = [(key, members if i % 5 else {"txt": b"y"}) for i, (key, members) in enumerate(SAMPLES)]


def foreign(folder: Path) -> None:
    write_tars(SAMPLES, folder, n_shards=2)
    index_shards(folder)


WRITTEN: dict[str, Callable[[Path], Any]] = {
    "shards": lambda folder: write_shards(SAMPLES, folder, n_shards=3, workers=1),
    "uneven members": lambda folder: write_shards(UNEVEN, folder, n_shards=2, workers=1),
    "by bytes": lambda folder: write_shards(SAMPLES, folder, bytes_per_shard=60_000, workers=1),
    "of a generator": lambda folder: write_shards((sample for sample in SAMPLES), folder, samples_per_shard=25),
    "packs": lambda folder: write_shards(SAMPLES, folder, n_shards=2, bytes_per_pack=1024, workers=1),
    "column": lambda folder: write_shards(
        SAMPLES, folder, n_shards=2, workers=1, columns={"length": LENGTHS}, fingerprint="1"
    ),
    "tars": foreign,
}


def written(name: str, folder: Path) -> dict[str, str]:
    """Return the digests of all files of a set."""
    WRITTEN[name](folder)
    return {
        path.name: hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest() for path in sorted(folder.iterdir())
    }


class Loaded:
    """What a kind of loader gives: of epochs 0 and 1, and the rest of epoch 1 behind its state."""

    def __init__(self, make: Callable[..., Any], folder: Path) -> None:
        self.make, self.folder = make, folder

    def loader(self, seed: int, world: int, rank: int) -> tuple[Any, Any]:
        """Return who has the state, and the loader."""
        made = self.make(self.folder, seed, num_replicas=world, rank=rank)
        if isinstance(made, ResumableLoader):
            return made, made
        made.setup("fit")
        return made, made.train_dataloader()

    def batches(self, seed: int) -> list[Any]:
        found: list[Any] = []
        for world in (1, 2):
            for rank in range(world):
                _, loader = self.loader(seed, world, rank)
                found.append([len(loader), read(loader)])
                loader.set_epoch(1)
                found.append(read(loader))
        return found

    def state(self) -> Any:
        holder, loader = self.loader(0, 2, 1)
        loader.set_epoch(1)
        read(islice(loader, 3))
        return json.loads(json.dumps(holder.state_dict()))

    def rest(self, state: Any) -> list[Any]:
        holder, loader = self.loader(0, 2, 1)
        holder.load_state_dict(state)
        return read(loader)


def read(loader: Iterable[Any]) -> list[Any]:
    return [[sample["__key__"] if isinstance(sample, dict) else sample for sample in batch] for batch in loader]


def over_shards(folder: Path, seed: int, *, drop_last: bool = False, order: Any = None, **ranks: Any) -> Any:
    sampler = None if order is None else order(N)
    batches = DistributedBatchSampler(N, 4, sampler=sampler, drop_last=drop_last, seed=seed, **ranks)
    return ResumableLoader(IndexedShards(folder), batches, collate_fn=list)


def indexed(folder: Path, seed: int, **options: Any) -> Any:
    return IndexedWebDataModule({"train": folder}, seed=seed, collate_fn=list, **{"batch_size": 4, **options})


def mapped(folder: Path, seed: int, **options: Any) -> Any:
    return MapDataModule({"train": list(range(N))}, batch_size=4, seed=seed, collate_fn=list, **options)


LOADERS: dict[str, Callable[..., Any]] = {
    "loader": over_shards,
    "loader, drop": lambda *given, **ranks: over_shards(*given, drop_last=True, **ranks),
    "loader of an order": lambda *given, **ranks: over_shards(*given, order=Listed, **ranks),
    "loader of slices": lambda *given, **ranks: over_shards(*given, order=Sliced, **ranks),
    "indexed": indexed,
    "indexed in order": lambda *given, **ranks: indexed(*given, shuffle=False, drop_last=True, **ranks),
    "mapped": mapped,
}
STREAMS: dict[str, dict[str, Any]] = {
    "stream": {},
    "stream of whole shards": {"exact": False},
}


def streamed(name: str, seed: int, folder: Path) -> list[Any]:
    """Return two epochs of a stream on one rank, and one on each of two."""
    options = {**STREAMS[name], "kwargs_wds": {"shardshuffle": True, "seed": seed}}
    alone = streams.loader(folder, N, 4, **options)
    ranks = [streams.loader(folder, N, 4, 2, num_replicas=2, rank=rank, **options) for rank in range(2)]
    return [streams.quietly(loader) for loader in (alone, alone, *ranks)]


def streamed_state(name: str, folder: Path) -> Any:
    module = streams.module(folder, N, 4, kwargs_wds={"shardshuffle": True}, **STREAMS[name])
    module.setup("fit")
    list(islice(module.train_dataloader(), 3))
    return json.loads(json.dumps(module.state_dict()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tars_of_numbers(tmp_path_factory.mktemp("stream"))


def shards(folder: Path) -> Path:
    write_shards(SAMPLES, folder, n_shards=3, workers=1)
    return folder


def tars_of_numbers(folder: Path) -> Path:
    write_tars([(f"s{i:05}", {"json": b"%d" % i}) for i in range(N)], folder, n_shards=4)
    index_shards(folder)
    return folder


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", WRITTEN)
def test_a_set_has_the_same_bytes(name: str, stored: dict[str, Any], tmp_path: Path) -> None:
    assert written(name, tmp_path / "set") == stored["bytes"][name]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_gives_the_same_batches(name: str, seed: int, stored: dict[str, Any], folder: Path) -> None:
    assert digest(Loaded(LOADERS[name], folder).batches(seed)) == stored["batches"][name][str(seed)]


@pytest.mark.parametrize("name", LOADERS)
def test_a_state_of_a_loader_is_the_same_and_resumes(name: str, stored: dict[str, Any], folder: Path) -> None:
    loaded = Loaded(LOADERS[name], folder)
    state = loaded.state()
    assert state == stored["states"][name]
    assert digest(loaded.rest(state)) == stored["rest"][name]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_gives_the_same_batches(name: str, seed: int, stored: dict[str, Any], stream: Path) -> None:
    assert digest(streamed(name, seed, stream)) == stored["batches"][name][str(seed)]


@pytest.mark.parametrize("name", STREAMS)
def test_a_state_of_a_stream_is_the_same(name: str, stored: dict[str, Any], stream: Path) -> None:
    assert streamed_state(name, stream) == stored["states"][name]


def collected(home: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all that is stored, by its kind."""
    yield "bytes", {name: written(name, home / name) for name in WRITTEN}
    folder, stream = shards(home / "set"), tars_of_numbers(home / "stream")
    loaded = {name: Loaded(make, folder) for name, make in LOADERS.items()}
    batches = {name: {str(seed): digest(one.batches(seed)) for seed in SEEDS} for name, one in loaded.items()}
    batches |= {name: {str(seed): digest(streamed(name, seed, stream)) for seed in SEEDS} for name in STREAMS}
    yield "batches", batches
    yield "rest", {name: digest(one.rest(one.state())) for name, one in loaded.items()}
    states = {name: one.state() for name, one in loaded.items()}
    yield "states", states | {name: streamed_state(name, stream) for name in STREAMS}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", required=True, help=f"write {STORED.name} anew")
    parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        STORED.write_text(f"{json.dumps(dict(collected(Path(place))), indent=1)}\n", encoding="utf-8")
