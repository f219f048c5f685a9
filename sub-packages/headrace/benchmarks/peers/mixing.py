"""Mixtures of three sources on four ranks: how far the shares are from those asked for, by samples and by tokens.

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

# By tokens: sources of short, long and very short texts. A library without shares by tokens draws each source so often
# that the tokens have their shares on average.
MEDIANS = (400, 2000, 60)
SIZES = [
    np.clip(np.random.default_rng(number).lognormal(np.log(median), 0.9, SOURCE), 1, 20 * median).astype(np.int64)
    for number, median in enumerate(MEDIANS)
]


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


def headrace_tokens(folder: Path, rank: int) -> Labels:
    """The samples themselves, whose tokens it knows."""
    from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler

    data = NamedConcatDataset({name: range(SOURCE) for name in WEIGHTS})
    return iter(WeightedDistributedSampler(data, WEIGHTS, RANKS, rank, per="token", sizes=np.concatenate(SIZES)))


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


def labels_of_ranks(name: str, folder: Path, count: int, per: str = "sample") -> list[list[int]]:
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
        command = [sys.executable, __file__, name, str(folder), str(rank), str(count), per]
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


def sizes_of(labels: list[int]) -> np.ndarray[Any, Any]:
    """Tokens of samples of some sources: each source is read in a shuffled order, again and again."""
    sizes = np.empty(len(labels), np.int64)
    for number, own in enumerate(SIZES):
        where = np.flatnonzero(np.array(labels) == number)
        generator = np.random.default_rng(number)
        passes = [generator.permutation(own) for _ in range(len(where) // SOURCE + 1)]
        sizes[where] = np.concatenate(passes)[: len(where)]
    return sizes


def token_deviations(labels: list[int], sizes: np.ndarray[Any, Any], window: int) -> tuple[float, float]:
    """Largest deviation of a source from its share of the tokens.

    Returns:
        After any number of samples, in longest samples; in any window, in percentage points of its tokens.
    """
    total, prefix, worst = np.concatenate([[0], np.cumsum(sizes)]), 0.0, 0.0
    for number, share in enumerate(WEIGHTS.values()):
        own = np.concatenate([[0], np.cumsum(np.where(np.array(labels) == number, sizes, 0))])
        prefix = max(prefix, float(np.abs(own - share * total).max()))
        shares = (own[window:] - own[:-window]) / (total[window:] - total[:-window])
        worst = max(worst, 100 * float(np.abs(shares - share).max()))
    return prefix / max(int(own.max()) for own in SIZES), worst


def measure_tokens(folder: Path, count: int) -> list[dict[str, Any]]:
    """Return a row for each library: the worst prefix and window of all ranks, by tokens."""
    rows = []
    for name, (package, _) in MIXERS.items():
        if not installed(package):
            continue
        print(f"  mixing by tokens: {name}", flush=True)
        write(package, folder / package)
        if package == "mosaicml-streaming":
            import_module("streaming").base.util.clean_stale_shared_memory()
        ranks = labels_of_ranks(name, folder / package, count, "token")
        together = [label for step in zip(*ranks, strict=False) for label in step]
        if name.startswith("headrace"):
            sizes = np.concatenate(SIZES)[together]
            together = [index // SOURCE for index in together]
        else:
            sizes = sizes_of(together)
        prefix, window = token_deviations(together, sizes, WINDOW * RANKS)
        rows.append({"name": name, "package": package, "token_prefix": prefix, "token_window": window})
    return rows


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
    name, folder, rank, count, per = sys.argv[1:]
    mixer = MIXERS[name][1]
    if per == "token" and mixer is headrace:
        mixer = headrace_tokens
    elif per == "token":
        draws = [share / own.mean() for share, own in zip(WEIGHTS.values(), SIZES, strict=True)]
        WEIGHTS.update({name: draw / sum(draws) for name, draw in zip(WEIGHTS, draws, strict=True)})
    if int(os.environ["WORLD_SIZE"]) > 1 and name.startswith("mosaic"):
        import_module("torch.distributed").init_process_group("gloo")
    labels = mixer(Path(folder), int(rank))
    print(json.dumps([int(label) for label in islice(labels, int(count))]), flush=True)
    os._exit(0)  # threads and processes of the libraries are not waited for


if __name__ == "__main__":
    main()
