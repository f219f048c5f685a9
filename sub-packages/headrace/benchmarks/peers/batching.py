"""Batches under a budget: each library's own sampler, as its documentation uses it, over the same sizes.

Samplers that know no ranks have their batches dealt to the ranks in turn, without a last step that is not whole.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from importlib import import_module
from itertools import islice, pairwise
from typing import Any, Literal

import numpy as np
import torch
from corpus import LONGEST, Sizes
from measure import alternating, first_only, installed
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler
from wheels import definitions

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, bucketed_batching

Batches = list[list[int]]
Make = Callable[[Sizes, int, int, int], Iterable[list[int]]]  # sizes, budget, ranks, rank: this rank's batches
SEED = 0


class Method:
    """One way to make batches.

    Args:
        name: As in the table.
        package: The distribution that it comes from.
        cost: "sum" or "padded": what the budget of a batch is compared with.
        make: Batches of one rank; of all of them where ``ranks`` is False.
        ranks: Whether it knows of ranks.
        resume: Position of a batch to the batches from there on, by the sampler's own state; None without one.
        together: The batches of all ranks at once, the same as of each alone.
    """

    def __init__(
        self,
        name: str,
        package: str,
        cost: str,
        make: Make,
        ranks: bool = True,
        resume: Callable[[Sizes, int, int], Iterable[list[int]]] | None = None,
        together: Callable[[Sizes, int, int], list[Batches]] | None = None,
    ) -> None:
        self.together = together
        self.name, self.package, self.cost, self.make, self.ranks, self.resume = (
            name, package, cost, make, ranks, resume
        )  # fmt: skip

    def epoch(self, sizes: Sizes, budget: int, world: int) -> list[Batches]:
        """Return the batches of each rank."""
        if self.together:
            return self.together(sizes, budget, world)
        if self.ranks:
            return [drained(self.make(sizes, budget, world, rank)) for rank in range(world)]
        batches = drained(self.make(sizes, budget, 1, 0))
        whole = len(batches) // world * world
        return [batches[rank:whole:world] for rank in range(world)]


def drained(batches: Iterable[list[int]]) -> Batches:
    """Return the batches as lists; ``list()`` would ask for a length, which some samplers refuse to give."""
    return [list(batch) for batch in iter(batches)]


def headrace(sizes: Sizes, budget: int, world: int, rank: int, **options: Any) -> DistributedSizeAwareBatchSampler:
    return DistributedSizeAwareBatchSampler(sizes, budget, num_replicas=world, rank=rank, seed=SEED, **options)


def headrace_resumed(sizes: Sizes, budget: int, position: int, **options: Any) -> Iterator[list[int]]:
    """State after ``position`` batches, loaded into another sampler."""
    first = headrace(sizes, budget, 1, 0, **options)
    for _ in islice(iter(first), position):
        pass
    second = headrace(sizes, budget, 1, 0, **options)
    second.load_state_dict(first.state_dict())
    return iter(second)


def headrace_stream(sizes: Sizes, budget: int, world: int, rank: int, cost: Literal["sum", "padded"]) -> Any:
    """A shuffled stream whose sizes are known only as it passes, with the buffer of its default."""
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(SEED)).tolist()
    size_of = sizes.tolist().__getitem__
    return bucketed_batching(order, size_of, budget, cost=cost, num_replicas=world, rank=rank, seed=SEED)


def fixed(sizes: Sizes, budget: int, world: int, rank: int) -> Iterator[list[int]]:
    """Equal counts, as many as fit when all are of the largest size: the only safe choice without sizes."""
    listed: Any = range(len(sizes))  # has a length, which is all that is asked of it
    order: Any = DistributedSampler(listed, world, rank, seed=SEED)
    return iter(BatchSampler(order, budget // int(sizes.max()), drop_last=False))


def length_grouped(sizes: Sizes, budget: int, world: int, rank: int, safe: bool = True) -> Iterator[list[int]]:
    """Hugging Face's ``group_by_length``, with a safe batch size or that of our mean batch."""
    count = budget // int(sizes.max() if safe else sizes.mean())
    module = import_module("transformers.trainer_pt_utils")
    generator = torch.Generator().manual_seed(SEED)
    order = module.LengthGroupedSampler(count, lengths=sizes.tolist(), generator=generator)
    return iter(BatchSampler(order, count, drop_last=False))


def bionemo(sizes: Sizes, budget: int, world: int, rank: int) -> Any:
    listed = sizes.tolist()
    order = torch.randperm(len(listed), generator=torch.Generator().manual_seed(SEED)).tolist()
    module = import_module("bionemo.size_aware_batching.sampler")
    return module.SizeAwareBatchSampler(order, sizeof=listed.__getitem__, max_total_size=budget)


def bionemo_buckets(sizes: Sizes, budget: int, world: int, rank: int) -> Any:
    """Buckets from its ``create_buckets``, each with as many samples as fit at its upper boundary."""
    sampler, utils = (import_module(f"bionemo.size_aware_batching.{part}") for part in ("sampler", "utils"))
    buckets = utils.create_buckets(torch.from_numpy(sizes), 64, 256)
    upper = buckets.bucket_boundaries[1:].tolist()  # exclusive
    return sampler.BucketBatchSampler(
        sizes=torch.from_numpy(sizes),
        bucket_boundaries=buckets.bucket_boundaries,
        base_batch_sampler_class=BatchSampler,
        base_batch_sampler_shared_kwargs={"drop_last": False},
        base_batch_sampler_individual_kwargs={"batch_size": [budget // (bound - 1) for bound in upper]},
        shuffle=True,
        generator=torch.Generator().manual_seed(SEED),
    )


@lru_cache(1)
def graphs(sizes: tuple[int, ...]) -> list[Any]:
    """The dataset exists before it is sampled."""
    data = import_module("torch_geometric.data").Data
    return [data(num_nodes=size) for size in sizes]


def geometric(sizes: Sizes, budget: int, world: int, rank: int) -> Any:
    torch.manual_seed(SEED)  # it draws from the global generator
    loader = import_module("torch_geometric.loader")
    return loader.DynamicBatchSampler(graphs(tuple(sizes.tolist())), budget, "node", shuffle=True)


class Atoms:
    """A dataset as far as fairchem's sampler looks into it."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes.tolist()

    def __len__(self) -> int:
        return len(self.sizes)

    def get_metadata(self, name: str, indices: list[int]) -> list[int]:  # noqa: ARG002 -- it is "natoms"
        """What fairchem asks for."""
        return [self.sizes[index] for index in indices]


def fairchem(sizes: Sizes, budget: int, world: int, rank: int, start: int = 0) -> Any:
    module = import_module("fairchem.core.datasets.samplers.max_atom_distributed_sampler")
    sampler = module.MaxAtomDistributedBatchSampler(Atoms(sizes), budget, world, rank, SEED)
    sampler.set_epoch_and_start_iteration(0, start)
    return sampler


@lru_cache(1)
def lhotse_cuts(sizes: tuple[int, ...]) -> Any:
    """One cut a sample, a second a token, streamed as from a manifest."""
    dummies, lhotse = import_module("lhotse.testing.dummies"), import_module("lhotse")
    recording = dummies.dummy_recording(0, duration=float(LONGEST))
    cuts = [
        lhotse.MonoCut(id=str(index), start=0.0, duration=float(size), channel=0, recording=recording)
        for index, size in enumerate(sizes)
    ]
    return lhotse.CutSet(lhotse.lazy.LazyIteratorChain(cuts))


@lru_cache(1)
def lhotse_bins(sizes: tuple[int, ...]) -> list[float]:
    """Thirty buckets, estimated beforehand as its documentation advises."""
    bucketing = import_module("lhotse.dataset.sampling.dynamic_bucketing")
    bins: list[float] = bucketing.estimate_duration_buckets(lhotse_cuts(sizes), num_buckets=30)
    return bins


def lhotse_sampler(sizes: Sizes, budget: int, world: int, rank: int, padded: bool) -> Any:
    sampling = import_module("lhotse.dataset.sampling")
    options = {"shuffle": True, "seed": SEED, "world_size": world, "rank": rank, "drop_last": False}
    cuts = lhotse_cuts(tuple(sizes.tolist()))
    if padded:
        bins = lhotse_bins(tuple(sizes.tolist()))
        return sampling.DynamicBucketingSampler(cuts, max_duration=budget, duration_bins=bins, **options)
    constraint = sampling.base.TimeConstraint(max_duration=budget, concatenate_cuts=True)
    return sampling.DynamicCutSampler(cuts, constraint=constraint, **options)


def numbers(batches: Iterable[Any]) -> Iterator[list[int]]:
    for batch in batches:
        yield [int(cut.id.partition("_dup")[0]) for cut in batch]  # it repeats cuts, so that ranks are even


def lhotse(sizes: Sizes, budget: int, world: int, rank: int, padded: bool) -> Iterator[list[int]]:
    return numbers(lhotse_sampler(sizes, budget, world, rank, padded))


def lhotse_resumed(sizes: Sizes, budget: int, position: int) -> Iterator[list[int]]:
    first, second = (lhotse_sampler(sizes, budget, 1, 0, padded=True) for _ in range(2))
    for _ in islice(iter(first), position):
        pass
    second.load_state_dict(first.state_dict())
    return numbers(second)


def grain_pack(sizes: Sizes, budget: int, world: int, rank: int) -> Iterator[list[int]]:
    """Best-fit packing, a bin for each batch; needs the tokens themselves, here zeros."""
    grain = import_module("grain")
    tokens = np.zeros(LONGEST, np.int32)
    listed = sizes.tolist()
    samples = (
        grain.MapDataset.range(len(listed))
        .shuffle(seed=SEED)[rank::world]
        .map(lambda index: {"tokens": tokens[: listed[index]], "index": index})
        .to_iter_dataset()
    )
    packed = grain.experimental.BestFitPackIterDataset(
        samples, length_struct={"tokens": budget}, num_packing_bins=16, seed=SEED, meta_features=("index",)
    )
    for row in packed:
        yield [int(index) for index in row["index"]]


def axolotl(sizes: Sizes, budget: int, world: int, rank: int) -> Iterator[list[int]]:
    """First fit of the shuffled samples into rows of the budget, a row a batch."""
    path = "axolotl/utils/samplers/multipack.py"
    names = ("pack_group", "_process_group", "pack_parallel", "MultipackBatchSampler")
    listed: Any = range(len(sizes))
    order = RandomSampler(listed, generator=torch.Generator().manual_seed(SEED))
    sampler = definitions("axolotl", path, *names).MultipackBatchSampler(
        order, 1, budget, sizes, bin_size=len(sizes), drop_last=False
    )
    return (rows[0] for rows in sampler)


def trl(sizes: Sizes, budget: int, world: int, rank: int) -> Iterator[list[int]]:
    """Best fit decreasing over all samples, as its ``packing_strategy="bfd"``; the rows shuffled."""
    arrow = import_module("pyarrow")
    names = ("_check_if_columns_can_be_packed", "_SegmentTree", "_pack_bfd")
    pack = definitions("trl", "trl/data_utils.py", *names)._pack_bfd
    offsets = np.append(0, np.cumsum(sizes)).astype(np.int32)
    tokens = arrow.ListArray.from_arrays(offsets, np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))
    packed = pack(arrow.table({"input_ids": tokens}), budget)
    numbers, bounds = (np.asarray(getattr(packed["input_ids"].chunk(0), name)) for name in ("values", "offsets"))
    rows = [numbers[begin:end] for begin, end in pairwise(bounds.tolist())]
    for row in torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED)).tolist():
        yield rows[row][np.append(True, rows[row][1:] != rows[row][:-1])].tolist()


def batch_rebalance(sizes: Sizes, budget: int, world: int, rank: int) -> Any:
    """Hugging Face's, four micro-batches a rank and step, with the count of our mean batch; it knows no budget."""
    names, accumulated = "BatchRebalanceSampler", 4
    kind = definitions("transformers", "transformers/trainer_pt_utils.py", names).BatchRebalanceSampler
    samples = world * accumulated * int(budget // sizes.mean())
    return kind(sizes.tolist(), samples, world, accumulated, rank=rank, seed=SEED, drop_last=False)


def rebalanced(sizes: Sizes, budget: int, world: int) -> list[Batches]:
    """Return the batches of all ranks from the pass of one, which plans for all."""
    sampler, steps = batch_rebalance(sizes, budget, world, 0), []
    assign = sampler._assign

    def noted(*arguments: Any) -> Any:
        steps.append(assign(*arguments))
        return steps[-1]

    sampler._assign = noted
    drained(sampler)
    return [[batch for step in steps for batch in step[rank]] for rank in range(world)]


def methods() -> list[Method]:
    """Every way whose library is installed; headrace's first."""
    stratified: dict[str, Any] = {"strategy": "stratified"}
    packed: dict[str, Any] = {"strategy": "packed"}
    bucketed: dict[str, Any] = {"cost": "padded"}
    found = [
        Method("headrace, stratified", "headrace-size-aware-batching", "sum", partial(headrace, **stratified),
               resume=partial(headrace_resumed, **stratified)),
        Method("headrace, packed", "headrace-size-aware-batching", "sum", partial(headrace, **packed),
               resume=partial(headrace_resumed, **packed)),
        Method("headrace, stream, sum", "headrace-size-aware-batching", "sum", partial(headrace_stream, cost="sum")),
        # its state_dict() refuses a constraint that is not the default one
        Method("lhotse DynamicCutSampler", "lhotse", "sum", partial(lhotse, padded=False)),
        Method("bionemo SizeAwareBatchSampler", "bionemo-size-aware-batching", "sum", bionemo, ranks=False),
        Method("PyG DynamicBatchSampler", "torch_geometric", "sum", geometric, ranks=False),
        Method("fairchem MaxAtomDistributedBatchSampler", "fairchem-core", "sum", fairchem,
               resume=lambda sizes, budget, position: fairchem(sizes, budget, 1, 0, position)),
        Method("grain BestFitPackIterDataset", "grain", "sum", grain_pack),
        Method("axolotl MultipackBatchSampler", "axolotl", "sum", axolotl, ranks=False),
        Method("TRL pack_dataset, bfd", "trl", "sum", trl, ranks=False),
        Method("headrace, bucketed", "headrace-size-aware-batching", "padded", partial(headrace, **bucketed),
               resume=partial(headrace_resumed, **bucketed)),
        Method("headrace, stream, padded", "headrace-size-aware-batching", "padded",
               partial(headrace_stream, cost="padded")),
        Method("lhotse DynamicBucketingSampler", "lhotse", "padded", partial(lhotse, padded=True),
               resume=lhotse_resumed),
        Method("bionemo BucketBatchSampler", "bionemo-size-aware-batching", "padded", bionemo_buckets, ranks=False),
        Method("HF LengthGroupedSampler, safe size", "transformers", "padded", length_grouped, ranks=False),
        Method("HF LengthGroupedSampler, mean size", "transformers", "padded",
               partial(length_grouped, safe=False), ranks=False),
        Method("HF batch_rebalance, mean size", "transformers", "padded", batch_rebalance,
               together=rebalanced),
        Method("fixed count, safe size", "torch", "padded", fixed),
    ]  # fmt: skip
    return [method for method in found if installed(method.package)]


def cost_of(batch: list[int], sizes: Sizes, cost: str) -> int:
    own = sizes[batch]
    return int(own.sum() if cost == "sum" else len(own) * own.max())


def imbalance(ranks: list[Batches], sizes: Sizes, cost: str) -> float | None:
    """Mean over the steps of the largest over the mean rank's work; None without a step that all ranks have."""
    steps = min(len(own) for own in ranks)
    if not steps:
        return None
    work = np.array([[cost_of(batch, sizes, cost) for batch in own[:steps]] for own in ranks])
    return float((work.max(axis=0) / work.mean(axis=0)).mean())


def figures(method: Method, sizes: Sizes, budget: int) -> dict[str, Any]:
    """What an epoch of eight ranks is worth, and the imbalance of 64."""
    ranks = method.epoch(sizes, budget, 8)
    flat = [batch for own in ranks for batch in own]
    costs = np.array([cost_of(batch, sizes, method.cost) for batch in flat])
    real = sum(int(sizes[batch].sum()) for batch in flat)
    seen = Counter(index for batch in flat for index in batch)
    many = method.epoch(sizes, budget, 64)
    return {
        "fill": real / (len(flat) * budget),
        "padding": 1 - real / int(costs.sum()),
        "violations": float((costs > budget).mean()),
        "largest": int(costs.max()) / budget,
        "imbalance_8": imbalance(ranks, sizes, method.cost),
        "imbalance_64": imbalance(many, sizes, method.cost),
        "steps_differ_by": [max(map(len, each)) - min(map(len, each)) for each in (ranks, many)],
        "lost": len(sizes) - len(seen),
        "repeated": sum(seen.values()) - len(seen),
    }


def resumes(method: Method, sizes: Sizes, budget: int) -> bool | None:
    """Whether a state of half an epoch gives exactly the rest of it; None where there is no state."""
    if method.resume is None:
        return None
    whole = drained(method.make(sizes, budget, 1, 0))
    half = len(whole) // 2
    return drained(method.resume(sizes, budget, half)) == whole[half:]


def measure(sizes: Sizes, budget: int, runs: int) -> list[dict[str, Any]]:
    """Return a row for each method: what its batches are worth, and its times over headrace's."""
    rows = []
    for cost in ("sum", "padded"):
        group = [method for method in methods() if method.cost == cost]
        plan = {m.name: partial(lambda make: len(drained(make(sizes, budget, 8, 0))), m.make) for m in group}
        first = {m.name: partial(lambda make: first_only(make(sizes, budget, 8, 0)), m.make) for m in group}
        planned, began = alternating(plan, runs), alternating(first, runs)
        ours = group[0].name
        for method in group:
            print(f"  batching: {method.name}", flush=True)
            rows.append(
                {
                    "name": method.name,
                    "package": method.package,
                    "cost": cost,
                    "knows_ranks": method.ranks,
                    **figures(method, sizes, budget),
                    "exact_resume": resumes(method, sizes, budget),
                    "planning": planned[method.name] / planned[ours],
                    "first_batch": began[method.name] / began[ours],
                }
            )
    return rows
