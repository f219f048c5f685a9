"""Planning in blocks: 1e11 samples in 1e6 shards on 10,000 ranks, without data.

    python benchmarks/blockwise.py                                     # blocks of 1e8 samples, some minutes and 2 GB
    python benchmarks/blockwise.py --samples 1e9 --shards 1e4 --block 1e7 --ranks 1000 --others 900

A keyed function makes the sizes of a shard. Shards come in 16 kinds of other lengths, as sources do. Every part runs in
a process of its own.
"""

import argparse
import json
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching import BlockwiseSizeAwareBatchSampler, DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.planning.block_planner import BlockPlanner

KINDS = 16
BUDGET = 16384
Sizes = NDArray[np.uint16]


def tables() -> NDArray[np.uint16]:
    """Return sizes by kind and 16 random bits: lognormal, the medians from 250 to 520."""
    draw = np.random.default_rng(0)
    medians = np.geomspace(250, 520, KINDS)[:, None]
    return np.clip(draw.lognormal(np.log(medians), 0.8, (KINDS, 2**16)), 8, 2048).astype(np.uint16)


class Shards:
    """Sizes of shards, each from its number alone; and the processor time that this took."""

    def __init__(self, samples: int, shards: int) -> None:
        self.lengths = np.full(shards, samples // shards, np.int64)
        self.lengths[: samples % shards] += 1
        self.tables, self.busy = tables(), 0.0

    def __call__(self, shard: int) -> Sizes:
        begin = time.process_time()
        bits = np.random.Generator(np.random.Philox(key=shard)).integers(0, 2**16, self.lengths[shard], dtype=np.uint16)
        sizes: Sizes = self.tables[shard % KINDS][bits]
        self.busy += time.process_time() - begin
        return sizes


def memory(field: str) -> int:
    """Return a field of the process's memory in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise KeyError(field)


def clocked(begin: tuple[float, float]) -> dict[str, float]:
    return {"seconds": time.perf_counter() - begin[0], "busy": time.process_time() - begin[1]}


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def sampler(options: argparse.Namespace, shards: Shards, ranks: int, rank: Any = 0) -> Any:
    return BlockwiseSizeAwareBatchSampler(
        shards,
        BUDGET,
        lengths=shards.lengths,
        block=options.block,
        strategy=options.strategy,
        cost="sum",
        num_replicas=ranks,
        rank=rank,
    )


def planner(sampler: BlockwiseSizeAwareBatchSampler) -> BlockPlanner:
    """Return what knows where blocks begin."""
    return cast(BlockPlanner, sampler._run.planner)


def one_block(options: argparse.Namespace) -> dict[str, Any]:
    """Plan as many samples as a block has at once, as an epoch of their own."""
    shards = Shards(options.samples, options.shards)
    sizes = np.concatenate([shards(shard) for shard in range(int(options.block // shards.lengths[0]))])
    sizes.flags.writeable = False
    before, begin = memory("VmRSS"), now()
    made = DistributedSizeAwareBatchSampler(
        sizes, BUDGET, strategy=options.strategy, cost="sum", num_replicas=8, rank=0
    )
    next(iter(made))
    found = clocked(begin)
    return {**found, "memory": memory("VmHWM") - before + sizes.nbytes, "bytes of sizes": sizes.nbytes}


def first(options: argparse.Namespace) -> dict[str, Any]:
    """Construct, plan to the first batch, go on over some steps."""
    shards = Shards(options.samples, options.shards)
    before, begin = memory("VmRSS"), now()
    made = sampler(options, shards, options.ranks, 17)
    constructed = clocked(begin)
    batches = iter(made)
    next(batches)
    found = clocked(begin)
    own, begin = memory("VmHWM") - before, now()
    for _ in range(options.steps):
        next(batches)
    later = clocked(begin)
    return {
        **found,
        "constructed": constructed["busy"],
        "sizes": shards.busy,
        "memory": own,
        "a step": later["busy"] / options.steps,
        "blocks": made.n_blocks,
    }


def anywhere(options: argparse.Namespace) -> dict[str, Any]:
    """Resume at random positions, on another number of ranks; and find steps by their numbers."""
    shards = Shards(options.samples, options.shards)
    source = sampler(options, shards, options.ranks)
    next(iter(source))
    busy, sizes, states = [], [], []
    for position in np.random.default_rng(1).integers(0, options.samples, 4).tolist():
        made = sampler(options, shards, options.others)
        before, begin = shards.busy, now()
        made.load_state_dict(source.state_dict() | {"position": position, "sizes": ""})
        next(iter(made))
        busy.append(clocked(begin)["busy"])
        sizes.append(shards.busy - before)
        states.append(len(json.dumps(made.state_dict())))
    return {"busy": float(np.median(busy)), "sizes": float(np.median(sizes)), "state": max(states)}


def border(options: argparse.Namespace) -> dict[str, Any]:
    """Pass the end of a block, be killed there, and resume on other ranks: is anything lost, repeated or too much?"""
    shards = Shards(options.samples, options.shards)
    start = sampler(options, shards, options.ranks, "all")
    begin = int(planner(start).sequence(0)[1][1])  # where the second block begins
    place = begin - 8 * options.ranks * BUDGET // 450
    next(iter(start))
    state = start.state_dict() | {"position": place, "sizes": ""}

    def resumed(ranks: int, state: dict[str, Any]) -> Any:
        made = sampler(options, shards, ranks, "all")
        made.load_state_dict(state)
        return made

    whole, begun = resumed(options.ranks, state), now()
    listed = list(islice(whole, 16 * options.ranks))
    passed = clocked(begun)
    killed = resumed(options.ranks, state)
    parts = list(islice(killed, 7 * options.ranks))
    rest = resumed(options.others, killed.state_dict())
    parts += list(islice(rest, len(listed) - len(parts)))
    samples = np.concatenate([np.array(batch) for batch in listed])
    cuts = np.cumsum([0, *shards.lengths.tolist()])
    shard = np.searchsorted(cuts, samples, side="right") - 1
    sizes = np.empty(len(samples), np.int64)
    for one in np.unique(shard).tolist():
        sizes[shard == one] = shards(one)[samples[shard == one] - cuts[one]]
    sums = np.add.reduceat(sizes, np.cumsum([0, *map(len, listed[:-1])]))
    of_ranks = sums[: len(sums) // options.ranks * options.ranks].reshape(-1, options.ranks)
    together = (of_ranks.max(axis=1) / of_ranks.mean(axis=1)).tolist()
    return {
        "busy": passed["busy"],
        "position behind": whole.state_dict()["position"] > begin,
        "samples": len(samples),
        "twice": len(samples) - len(np.unique(samples)),
        "same after the resume": parts == listed,
        "largest batch": int(sums.max()),
        "fill": float(sums.mean() / BUDGET),
        "largest rank of a step": max(together),
        "largest rank of the median step": float(np.median(together)),
        "state": len(json.dumps(rest.state_dict())),
    }


def randomness(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the order with a full shuffle."""
    shards = Shards(options.samples, options.shards)
    made = sampler(options, shards, options.ranks, "all")
    blocks, (sequence, starts) = planner(made).blocks, planner(made).sequence(0)
    # Where a sample comes: its block's place, and inside that, which is shuffled whole, anywhere.
    draw = np.random.default_rng(2)
    places = draw.integers(0, options.samples, 10**6)
    block = np.searchsorted(blocks.starts, places, side="right") - 1
    turn = np.argsort(sequence)[block]
    lengths = np.diff(blocks.starts)
    at = starts[turn] + draw.integers(0, lengths[block])
    samples = blocks.samples(places)
    distance = np.abs(samples - at) / options.samples
    means = np.array([table.mean() for table in shards.tables])
    kinds = [means[blocks.shards(number) % KINDS].mean() for number in range(made.n_blocks)]
    cuts = np.cumsum(np.concatenate([[0], shards.lengths]))
    seen, in_batch = [], []
    for batch in islice(made, 20 * 1000):
        shard = np.searchsorted(cuts, np.array(batch), side="right") - 1
        seen.append((shard[1:] == shard[:-1]).mean() if len(shard) > 1 else 0.0)
        in_batch.append(len(shard) - len(np.unique(shard)))
    return {
        "neighbours of one shard": float(np.mean(seen)),
        "by chance in a block": float(shards.lengths[0] / options.block),
        "by chance of all": float(1 / options.shards),
        "samples of a batch whose shard comes again in it": float(np.mean(in_batch)),
        "distance of place and position": float(distance.mean()),
        "of a full shuffle": 1 / 3,
        "correlation of place and position": float(np.corrcoef(samples, at)[0, 1]),
        "mean size of a block: standard deviation": float(np.std(kinds) / np.mean(kinds)),
    }


def length(options: argparse.Namespace) -> dict[str, Any]:
    """Count some blocks: what len() takes."""
    shards = Shards(options.samples, options.shards)
    made = sampler(options, shards, options.ranks)
    begin, count = now(), min(3, made.n_blocks)
    for number in range(count):
        planner(made).count(0, number)
    found = clocked(begin)["busy"]
    return {"busy a block": found / count, "sizes": shards.busy / count, "busy all": found / count * made.n_blocks}


PARTS = {part.__name__: part for part in (one_block, first, anywhere, border, length, randomness)}


def main() -> None:
    def whole(word: str) -> int:
        return int(float(word))

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=whole, default=10**11)
    parser.add_argument("--shards", type=whole, default=10**6)
    parser.add_argument("--block", type=whole, default=10**8)
    parser.add_argument("--ranks", type=whole, default=10_000)
    parser.add_argument("--others", type=whole, default=9_000, help="ranks after a resume")
    parser.add_argument("--steps", type=whole, default=20)
    parser.add_argument("--strategy", default="stratified")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(PARTS[options.child](options)))
        return
    given = sys.argv[1 : sys.argv.index("--parts")] if "--parts" in sys.argv else sys.argv[1:]  # --parts comes last
    for part in options.parts:
        command = [sys.executable, __file__, *given, "--child", part]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        print(part)
        for name, value in json.loads(done.stdout).items():
            print(f"  {name}: {value:,.6g}" if isinstance(value, float) else f"  {name}: {value:,}", flush=True)


if __name__ == "__main__":
    main()
