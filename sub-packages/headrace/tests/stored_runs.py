"""Runs whose shards and states are kept in ``stored/``: ``python tests/stored_runs.py tests/stored/X.Y.Z`` writes them.

Each run is made by today's code and goes on for some steps. Its state, and what comes after them, are kept;
`test_stored.py` reads them in later versions.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from doors import sampler_with

from headrace.size_aware_batching import BatchMemoryModel, DistributedSizeAwareBatchSampler, Peaks
from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedShards,
    IndexedWebDataModule,
    MapDataModule,
    ResumableLoader,
    WebDataModule,
    write_shards,
)
from headrace.weighted_sampler import InterleavedDataset, NamedConcatDataset, WeightedDistributedSampler

SIZES = np.arange(7, 7 + 60 * 11, 11) % 97 + 1
LENGTHS = (64, 128, 256, 512, 1024, 2048, 3072, 4096)
STEPS = 3
Run = tuple[Any, Callable[[], Iterator[Any]]]  # what has the state, and what begins to yield


def texts(name: str) -> list[tuple[str, dict[str, bytes]]]:
    """Samples: numbered keys and one member in "web", words and two members in "books"."""
    if name == "web":
        return [(f"w{number:03d}", {"txt": b"web " * (1 + 5 * number % 9)}) for number in range(24)]
    words = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "ibex", "jay"]
    return [
        (word, {"txt": word.encode() * (1 + number % 4), "cls": b"%d" % number}) for number, word in enumerate(words)
    ]


def write_data(folder: Path) -> None:
    """Two sets of shards with indexes, a manifest, an index of the set and a column each; and a memory model."""
    for name in ("web", "books"):
        samples = texts(name)
        lengths = np.array([len(members["txt"]) for _, members in samples])
        write_shards(samples, folder / name, n_shards=2, columns={"tokens": lengths})
    batches = [[length] * count for count in (1, 2, 4, 8, 16) for length in LENGTHS]
    model = BatchMemoryModel()
    needed = [500_000_000 + 30_000 * sum(batch) + 2 * len(batch) * max(batch) ** 2 for batch in batches]
    model.fit(Peaks.of(batches, needed))
    model.save(folder / "memory.json")


def keys(batch: list[dict[str, Any]]) -> list[str]:
    return [sample["__key__"] for sample in batch]


def size_aware(folder: Path, **options: Any) -> Run:
    usual = {"max_total_size": 200, "num_replicas": 2, "rank": 1, "seed": 3}
    batches = sampler_with(SIZES, **(usual | options))
    batches.set_epoch(1)
    return batches, batches.__iter__


def weighted(folder: Path, **options: Any) -> Run:
    data = NamedConcatDataset({"web": list(range(24)), "books": list(range(10))})
    sampler = WeightedDistributedSampler(data, {"web": 3, "books": 1}, num_replicas=2, rank=0, seed=3, **options)
    return sampler, sampler.__iter__


def interleaved(folder: Path) -> Run:
    sources = {"web": list(range(24)), "books": list(range(100, 110))}
    stream = InterleavedDataset(sources, {"web": 0.7, "books": 0.3}, seed=3)
    return stream, stream.__iter__


def batch_sampler(folder: Path) -> Run:
    batches = DistributedBatchSampler(40, batch_size=4, num_replicas=2, rank=0, seed=3)
    batches.set_epoch(1)
    return batches, batches.__iter__


def loader(folder: Path) -> Run:
    shards = IndexedShards(folder / "web")
    batches = DistributedSizeAwareBatchSampler(shards.column("tokens"), max_total_size=60, num_replicas=1, rank=0)
    made = ResumableLoader(shards, batches, collate_fn=keys, num_replicas=1, rank=0)
    return made, made.__iter__


def indexed_data_module(folder: Path) -> Run:
    module = IndexedWebDataModule(
        {"train": {"web": folder / "web", "books": folder / "books"}},
        sizes="tokens",
        sampler=partial(WeightedDistributedSampler, weights={"web": 1, "books": 1}, epoch_length=30),
        batch_sampler=partial(DistributedSizeAwareBatchSampler, max_total_size=60),
        collate_fn=keys,
        num_replicas=1,
        rank=0,
    )
    module.setup("fit")
    return module, lambda: iter(module.train_dataloader())


def map_data_module(folder: Path) -> Run:
    module = MapDataModule({"train": list(range(30))}, batch_size=4, collate_fn=list, num_replicas=1, rank=0)
    module.setup("fit")
    return module, lambda: iter(module.train_dataloader())


def stream_data_module(folder: Path) -> Run:
    module = WebDataModule(
        n_samples={"train": 24},
        suffix_keys_wds="txt",
        dirs_tars_wds={"train": str(folder / "web")},
        global_batch_size=3,
        prefix_tars_wds="shard",
        pipeline_prebatch_wld={"train": [wds.batched(3, collation_fn=None)]},
        num_replicas=1,
        rank=0,
    )
    module.setup("fit")
    return module, lambda: iter(module.train_dataloader())


RUNS: dict[str, Callable[[Path], Run]] = {
    "size_aware": partial(size_aware, strategy="bucketed", cost="padded"),
    "size_aware_tokens_per_step": partial(size_aware, tokens_per_step=600),
    "size_aware_split": partial(size_aware, oversize="split", max_total_size=80),
    "weighted": weighted,
    "weighted_tokens": partial(weighted, per="token", sizes=[*range(1, 25), *range(10, 110, 10)]),
    "interleaved": interleaved,
    "batch_sampler": batch_sampler,
    "loader": loader,
    "indexed_data_module": indexed_data_module,
    "map_data_module": map_data_module,
    "stream_data_module": stream_data_module,
}


def plain(value: Any) -> Any:
    """As JSON has it; a piece of a long sample is its index, its start and its stop."""
    return json.loads(json.dumps(value, default=lambda piece: [piece.index, piece.start, piece.stop]))


def write(folder: Path) -> None:
    """Write the data, the states after some steps, and what comes after them."""
    folder.mkdir(parents=True)
    write_data(folder)
    states, rest = {}, {}
    for name, make in RUNS.items():
        run, begin = make(folder)
        iteration = begin()
        for _ in range(STEPS):
            next(iteration)
        states[name] = run.state_dict()
        rest[name] = plain(list(iteration))
        assert rest[name], name
    torch.save(states, folder / "states.pt")
    (folder / "rest.json").write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in rest.items()))
    with (folder / "rest.json").open("a") as file:
        file.write("\n}\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
