"""Mixtures of three sources on four ranks: how far the shares are from those asked for.

Each rank is a process, as in training; the environment tells the libraries which one. Sources are in memory where the
library allows that, else in its own format.
"""

import json
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from formats import Energon, Litdata, Mosaic, energon_dataset
from measure import installed, quiet, without_vision

WEIGHTS = {"a": 0.7, "b": 0.2, "c": 0.1}
SOURCE = 20_000  # samples of a source
RANKS, WINDOW = 4, 256  # samples of a window, on one rank
Labels = Iterator[int]  # which source each sample of this rank is from


def write(package: str, folder: Path) -> None:
    """Write each source in a library's format, before the ranks start; a text is the number of its source."""
    kinds = {"litdata": Litdata, "mosaicml-streaming": SmallMosaic, "megatron-energon": Energon}
    for number, path in enumerate(below(folder).values()):
        path.mkdir(parents=True)
        if package in kinds:
            kinds[package]().write([b"%d" % number] * SOURCE, path)


class SmallMosaic(Mosaic):
    """Some ten shards a source, as sets have them: its shuffle works by shards."""

    shard_bytes = 1 << 14


def below(folder: Path) -> dict[str, Path]:
    return {name: folder / name for name in WEIGHTS}


def headrace(folder: Path, rank: int) -> Labels:
    from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler

    data = NamedConcatDataset({name: range(SOURCE) for name in WEIGHTS})
    sampler = WeightedDistributedSampler(data, WEIGHTS, RANKS, rank)
    return (index // SOURCE for index in sampler)


def torch_weighted(folder: Path, rank: int) -> Labels:
    """One weight a sample, drawn with replacement; each rank has a generator of its own."""
    import torch
    from torch.utils.data import WeightedRandomSampler

    weights = np.repeat(list(WEIGHTS.values()), SOURCE).tolist()
    generator = torch.Generator().manual_seed(rank)
    return (index // SOURCE for index in WeightedRandomSampler(weights, 3 * SOURCE // RANKS, generator=generator))


def webdataset(folder: Path, rank: int) -> Labels:
    random.seed(rank)  # it draws from the global generator
    sources = [[number] * SOURCE for number in range(len(WEIGHTS))]
    return iter(import_module("webdataset").RandomMix(sources, list(WEIGHTS.values())))


def litdata(folder: Path, rank: int) -> Labels:
    module = import_module("litdata")
    parts = [module.StreamingDataset(str(path), shuffle=True) for path in below(folder).values()]
    mixed = module.CombinedStreamingDataset(parts, weights=list(WEIGHTS.values()), iterate_over_all=False)
    return (int(bytes(sample["txt"])) for sample in mixed)


def mosaic(folder: Path, rank: int) -> Labels:
    module = import_module("streaming")
    paths = below(folder)
    streams = [module.Stream(local=str(paths[name]), proportion=share) for name, share in WEIGHTS.items()]
    mixed = module.StreamingDataset(streams=streams, batch_size=WINDOW // 8, shuffle=True)
    return (int(sample["txt"]) for sample in mixed)


def energon(folder: Path, rank: int) -> Labels:
    paths = below(folder)
    blend = [f"      - weight: {share}\n        path: {paths[name]}\n" for name, share in WEIGHTS.items()]
    recipe = folder / f"mixture{rank}.yaml"
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
    recipe.write_text(head + "".join(blend))
    module = import_module("megatron.energon")
    config = module.WorkerConfig(rank=rank, world_size=RANKS, num_workers=0)
    options = {"worker_config": config, "shuffle_buffer_size": 100, "max_samples_per_sequence": 100}
    return (int(sample["txt"]) for sample in module.get_loader(energon_dataset(recipe, 0, **options)))


def grain(folder: Path, rank: int) -> Labels:
    module = import_module("grain")
    parts = [
        module.MapDataset.range(SOURCE).shuffle(seed=number).map(lambda _, number=number: number)
        for number in range(len(WEIGHTS))
    ]
    return iter(module.MapDataset.mix(parts, weights=list(WEIGHTS.values()))[rank::RANKS].to_iter_dataset())


def lhotse(folder: Path, rank: int) -> Labels:
    """A multiplexer under a sampler, which takes every fourth cut for this rank."""
    module, dummies = import_module("lhotse"), import_module("lhotse.testing.dummies")
    parts = [
        module.CutSet.from_cuts(dummies.dummy_cut(n * SOURCE + i, duration=1.0) for i in range(SOURCE))
        for n in range(len(WEIGHTS))
    ]
    mixed = module.CutSet.mux(*(part.repeat() for part in parts), weights=list(WEIGHTS.values()), seed=0)
    sampling = import_module("lhotse.dataset.sampling")
    sampler = sampling.DynamicCutSampler(mixed, max_cuts=WINDOW // 8, world_size=RANKS, rank=rank)
    return (int(re.findall(r"\d+", cut.id)[-2]) // SOURCE for batch in sampler for cut in batch)


def torchdata(folder: Path, rank: int) -> Labels:
    nodes = import_module("torchdata.nodes")
    sources = {name: nodes.IterableWrapper([number] * SOURCE) for number, name in enumerate(WEIGHTS)}
    mixed = nodes.MultiNodeWeightedSampler(sources, WEIGHTS, rank=rank, world_size=RANKS, seed=0)
    return iter(nodes.Loader(mixed))


MIXERS: dict[str, tuple[str, Callable[[Path, int], Labels]]] = {
    "headrace WeightedDistributedSampler": ("headrace-weighted-sampler", headrace),
    "torch WeightedRandomSampler": ("torch", torch_weighted),
    "webdataset RandomMix": ("webdataset", webdataset),
    "litdata CombinedStreamingDataset": ("litdata", litdata),
    "mosaic Stream(proportion=)": ("mosaicml-streaming", mosaic),
    "Energon blend": ("megatron-energon", energon),
    "grain MapDataset.mix": ("grain", grain),
    "lhotse CutSet.mux": ("lhotse", lhotse),
    "torchdata MultiNodeWeightedSampler": ("torchdata", torchdata),
}


def labels_of_ranks(name: str, folder: Path, count: int) -> list[list[int]]:
    """Return what each rank receives, from as many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(RANKS):
        told = {"RANK": rank, "GLOBAL_RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
        given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | {
            key: str(value) for key, value in told.items()
        }
        command = [sys.executable, __file__, name, str(folder), str(rank), str(count)]
        ranks.append(subprocess.Popen(command, env=os.environ | given, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=300)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"{name} failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def deviation(labels: list[int], window: int) -> float:
    """Largest difference of a source's share in a window from the share asked for, in percentage points."""
    whole = len(labels) // window * window
    parts = np.array(labels[:whole]).reshape(-1, window)
    shares = np.stack([(parts == number).mean(axis=1) for number in range(len(WEIGHTS))], axis=1)
    return 100 * float(np.abs(shares - list(WEIGHTS.values())).max())


def measure(folder: Path, count: int) -> list[dict[str, Any]]:
    """Return a row for each library: the worst window of a rank, of all ranks, and the whole draw."""
    rows = []
    for name, (package, _) in MIXERS.items():
        if not installed(package):
            continue
        print(f"  mixing: {name}", flush=True)
        write(package, folder / package)
        if package == "mosaicml-streaming":  # a process of it that was killed leaves names in shared memory behind
            import_module("streaming").base.util.clean_stale_shared_memory()
        ranks = labels_of_ranks(name, folder / package, count)
        together = [label for step in zip(*ranks, strict=False) for label in step]  # a stream may end early
        rows.append(
            {
                "name": name,
                "package": package,
                "rank_window": max(deviation(own, WINDOW) for own in ranks),
                "global_window": deviation(together, WINDOW * RANKS),
                "rank_whole": max(deviation(own, len(own)) for own in ranks),
                "whole": deviation(together, len(together)),
            }
        )
    return rows


def main() -> None:
    quiet()
    without_vision()
    name, folder, rank, count = sys.argv[1:]
    if int(os.environ["WORLD_SIZE"]) > 1 and name.startswith("mosaic"):
        import_module("torch.distributed").init_process_group("gloo")
    labels = MIXERS[name][1](Path(folder), int(rank))
    print(json.dumps([int(label) for label in islice(labels, int(count))]), flush=True)
    os._exit(0)  # threads and processes of the libraries are not waited for


if __name__ == "__main__":
    main()
