"""One optimizer step of samples known only now: each loop's own functions, as the loop calls them, on the same lengths.

The functions are taken from the libraries' wheels, see ``wheels.py``.
"""

import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import chain
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from measure import installed
from numpy.typing import NDArray
from wheels import definitions

from headrace.size_aware_batching.integrations import (
    get_seqlen_balanced_partitions,
    micro_batch_indices,
)
from headrace.size_aware_batching.steps import plan_step

Lengths = NDArray[np.int64]
Plan = list[list[list[int]]]  # of each rank, its micro-batches
Groups = list[list[list[list[int]]]]  # between two barriers, of each rank, its passes, each with its samples
SAMPLES, RANKS, CAP = 512, 8, 32_768


def work_of(lengths: Any, linear: int = 24_576) -> Any:
    """Floating-point operations of a Transformer of 7B parameters but for a factor, as verl estimates them."""
    return linear * lengths + lengths**2


def lognormal(rng: np.random.Generator, typical: float, spread: float, longest: int = CAP) -> Lengths:
    return np.clip(rng.lognormal(np.log(typical), spread, SAMPLES), 8, longest).astype(np.int64)


def rollouts(rng: np.random.Generator) -> Lengths:
    """Answers, three tenths of which went on for 20k to 32k tokens."""
    long = rng.random(SAMPLES) < 0.3
    return np.where(long, rng.integers(20_000, 32_001, SAMPLES), lognormal(rng, 2_000, 0.8, 20_000))


@dataclasses.dataclass(frozen=True)
class Case:
    """Lengths by a generator, the cap of a micro-batch (None: the longest), and the linear part of the work."""

    lengths: Callable[[np.random.Generator], Lengths]
    cap: int | None = CAP
    linear: int = 24_576


CASES = {
    "lognormal": Case(partial(lognormal, typical=3_000, spread=0.8)),
    "rollouts": Case(rollouts),
    "short": Case(partial(lognormal, typical=360, spread=0.8, longest=2_048), cap=4_096),
    "proteins": Case(partial(lognormal, typical=290, spread=0.75, longest=2_700), cap=4_096),
    "longest": Case(partial(lognormal, typical=3_000, spread=0.6), cap=None),
    "quadratic": Case(partial(lognormal, typical=3_000, spread=0.8), linear=2_048),
}


class Clock:
    """Seconds that one process waits: what all do one after another, and of what ranks do side by side the slowest."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def alone(self, work: Callable[[], Any]) -> Any:
        """Run it in the controller, or on each rank alike."""
        begin = time.perf_counter()
        found = work()
        self.seconds += time.perf_counter() - begin
        return found

    def on_ranks(self, work: Callable[[int], Any]) -> list[Any]:
        """Run it for each rank."""
        slowest, found = 0.0, []
        for rank in range(RANKS):
            begin = time.perf_counter()
            found.append(work(rank))
            slowest = max(slowest, time.perf_counter() - begin)
        self.seconds += slowest
        return found


Method = Callable[[Lengths, int, Callable[[Any], Any], Clock], Plan]


def headrace(lengths: Lengths, cap: int, work: Callable[[Any], Any], clock: Clock, meet: Any) -> Plan:
    plan = clock.alone(lambda: plan_step(lengths, cap, num_replicas=RANKS, work=work(lengths), meet=meet))
    return [[batch.tolist() for batch in own] for own in plan.micro_batches]


def headrace_in_verl(lengths: Lengths, cap: int, work: Callable[[Any], Any], clock: Clock) -> Plan:
    """The loop of verl with two imports changed."""
    own = clock.alone(lambda: get_seqlen_balanced_partitions(work(lengths), RANKS, equal_size=True))
    of_ranks = [lengths[indices] for indices in own]
    return placed(own, clock.alone(lambda: micro_batch_indices(of_ranks, cap, work=work)))


def placed(own: list[list[int]], local: Plan) -> Plan:
    """Indices into a rank's samples as indices into all."""
    return [
        [[samples[index] for index in batch] for batch in batches] for samples, batches in zip(own, local, strict=True)
    ]


def in_order() -> list[list[int]]:
    """As many samples for each rank, as they come."""
    return [list(range(rank * SAMPLES // RANKS, (rank + 1) * SAMPLES // RANKS)) for rank in range(RANKS)]


def agreed(clock: Clock, local: Callable[..., list[list[int]]], least: int = 1) -> Plan:
    """Ask for more micro-batches on each rank until all have the same number, as ranks do by a collective."""
    while True:
        found = clock.on_ranks(partial(local, least=least))
        if len({len(batches) for batches in found}) == 1:
            return found
        least = max(map(len, found))


def verl_functions() -> SimpleNamespace:
    return definitions(
        "verl",
        "verl/utils/seqlen_balancing.py",
        *("karmarkar_karp", "get_seqlen_balanced_partitions", "calculate_workload", "ceildiv", "roundup_divisible"),
        "rearrange_micro_batches",
    )


def karmarkar_karp(lengths: Lengths, cap: int, work: Callable[[Any], Any], clock: Clock) -> Plan:
    """As many micro-batches as headrace has, without a cap; neighbours by work meet."""
    count = plan_step(lengths, cap, num_replicas=RANKS, work=work(lengths)).num_micro_batches
    loads = work(lengths)
    groups = clock.alone(
        lambda: verl_functions().get_seqlen_balanced_partitions(loads.tolist(), RANKS * count, equal_size=False)
    )
    groups = sorted(groups, key=lambda group: -loads[group].sum())
    return [groups[rank::RANKS] for rank in range(RANKS)]


class Nested:
    """A batch of rows of uneven length, as far as verl looks into it."""

    is_nested = True

    def __init__(self, lengths: Lengths) -> None:
        self._offsets = torch.from_numpy(np.append(0, np.cumsum(lengths)))

    def offsets(self) -> torch.Tensor:
        return self._offsets


def verl(lengths: Lengths, cap: int, work: Callable[[Any], Any], clock: Clock) -> Plan:
    """Samples to ranks in the controller; on each rank Karmarkar-Karp until it fits. Its work is always its own."""
    functions = verl_functions()
    loads = torch.from_numpy(work(lengths))
    own = clock.alone(lambda: functions.get_seqlen_balanced_partitions(loads, RANKS, equal_size=True))
    batches = [{"input_ids": Nested(lengths[indices])} for indices in own]

    def rearranged(rank: int, least: int) -> list[list[int]]:
        indices: list[list[int]] = functions.rearrange_micro_batches(batches[rank], cap, min_num_micro_batch=least)[1]
        return indices

    # Ranks try the same numbers side by side, from what the fullest needs at least; the rank that needs most tries all.
    least = max(-(-int(lengths[indices].sum()) // cap) for indices in own)
    tried = clock.on_ranks(partial(rearranged, least=least))
    return placed(own, agreed(Clock(), rearranged, max(map(len, tried))))


def openrlhf_functions() -> SimpleNamespace:
    path = "openrlhf/utils/seqlen_balancing.py"
    return definitions(
        "openrlhf", path, "karmarkar_karp", "get_seqlen_balanced_partitions", "get_minimum_num_micro_batch_size"
    )


def openrlhf(lengths: Lengths, cap: int, work: Callable[[Any], Any], clock: Clock) -> Plan:
    """A count by first fit, then Karmarkar-Karp, which knows no cap."""
    functions, own = openrlhf_functions(), in_order()
    local = [lengths[indices].tolist() for indices in own]
    count = max(clock.on_ranks(lambda rank: functions.get_minimum_num_micro_batch_size(local[rank], cap, 1, 1)))
    divide = functions.get_seqlen_balanced_partitions
    return placed(own, clock.on_ranks(lambda rank: divide(local[rank], count, equal_size=False)))


def areal_functions() -> SimpleNamespace:
    path = "areal/utils/seqpack.py"
    return definitions(
        "areal", path, "_ffd_allocate", "ffd_allocate", "_KKSet", "_KKState", "_kk_partition", "kk_allocate"
    )


def areal(lengths: Lengths, cap: int, work: Callable[[Any], Any], clock: Clock, name: str) -> Plan:
    """Samples to ranks by tokens without a cap, then micro-batches on each rank."""
    allocate = getattr(areal_functions(), name)
    own = clock.alone(lambda: allocate(lengths.tolist(), capacity=10**12, min_groups=RANKS))
    local = [lengths[indices].tolist() for indices in own]
    return placed(own, agreed(clock, lambda rank, least: sorted(map(sorted, allocate(local[rank], cap, least)))))


def skyrl_functions() -> SimpleNamespace:
    return definitions("skyrl", "skyrl/train/dataset/bin_packing.py", "SeqPacker", "FirstFitDecreasing", "Balanced")


def skyrl(lengths: Lengths, cap: int, work: Callable[[Any], Any], clock: Clock) -> Plan:
    """For reinforcement learning: each rank the emptiest one that fits; ranks with fewer get empty ones."""
    packer, own = skyrl_functions().Balanced(cap), in_order()
    return placed(own, clock.on_ranks(lambda rank: packer.pack(lengths[own[rank]].tolist())))


def skyrl_tuning(lengths: Lengths, cap: int, work: Callable[[Any], Any], clock: Clock) -> Plan:
    """For fine-tuning: first fit decreasing over all, dealt to ranks in turn."""
    packer = skyrl_functions().FirstFitDecreasing(cap, RANKS, RANKS)
    groups = clock.alone(lambda: packer.pack(lengths.tolist()))
    return [groups[rank::RANKS] for rank in range(RANKS)]


def torchtitan(lengths: Lengths, cap: int, work: Callable[[Any], Any], clock: Clock) -> Plan:
    """Next fit in the order in which they come, rows dealt to ranks in turn; the last ones are empty."""
    config = SimpleNamespace(batch=SimpleNamespace(local_batch_size=1, seq_len=cap), per_sample_pad_multiple=None)
    kind = definitions("torchtitan", "torchtitan/experiments/rl/components/batcher.py", "Batcher").Batcher
    batcher = kind(config, num_prompts_per_train_step=1, dp_degree=RANKS, pad_id=0)
    batcher._pack_training_sample_row = lambda _: []
    batcher.collate = lambda rows: rows[0]
    samples = [SimpleNamespace(token_ids=range(length + 1), number=index) for index, length in enumerate(lengths)]
    rows = clock.alone(lambda: batcher._assign_training_samples_to_rows(samples))
    grid = batcher._build_microbatch_grid([[sample.number for sample in row] for row in rows])
    return [[step[rank] for step in grid] for rank in range(RANKS)]


def trl(lengths: Lengths, cap: int, work: Callable[[Any], Any], clock: Clock) -> Plan:
    """Of GRPO in the background: each sample, as it comes, to the rank with least work where it fits."""
    row = definitions("trl", f"{TRL}/packing.py", "TreeRow").TreeRow
    kind = definitions("trl", f"{TRL}/async_grpo_trainer.py", "TokenBudgetBatcher", TreeRow=row).TokenBudgetBatcher
    # No two samples begin alike, so none shares a token. The last ones, each as long as the cap, only end the step.
    samples = [
        {"input_ids": torch.full((n,), at), "completion_mask": torch.ones(n, dtype=torch.int64), "group_id": at}
        for at, n in enumerate([*lengths.tolist(), *[cap] * RANKS])
    ]
    batcher = kind(samples, RANKS, cap, defaultdict(list))
    steps = clock.alone(lambda: [[[s["group_id"] for s in own.samples] for own in rows] for rows in batcher])
    return [[[index for index in rows[rank] if index < SAMPLES] for rows in steps] for rank in range(RANKS)]


def transformers(lengths: Lengths, cap: int, work: Callable[[Any], Any], clock: Clock) -> Plan:
    """Batch rebalance: as many micro-batches as headrace has. It knows no cap, and pads: its cost is its own."""
    count = plan_step(lengths, cap, num_replicas=RANKS, work=work(lengths)).num_micro_batches
    kind = definitions(
        "transformers", "transformers/trainer_pt_utils.py", "BatchRebalanceSampler"
    ).BatchRebalanceSampler
    sampler = kind(lengths.tolist(), SAMPLES, RANKS, count)
    plan: Plan = clock.alone(lambda: sampler._assign(range(SAMPLES), sampler.lengths))
    return plan


def miles(lengths: Lengths, cap: int, work: Callable[[Any], Any], clock: Clock) -> Plan:
    """Equal counts to ranks by tokens; on each rank a count by first fit, then Karmarkar-Karp, which knows no cap."""
    path = "miles/utils/seqlen_balancing.py"
    divide = definitions("miles-rl", path, "karmarkar_karp", "get_seqlen_balanced_partitions")
    divide = divide.get_seqlen_balanced_partitions
    first_fit = definitions("miles-rl", "miles/utils/data.py", "get_minimum_num_micro_batch_size")
    own = clock.alone(lambda: divide(lengths.tolist(), RANKS, equal_size=True))
    local = [lengths[indices].tolist() for indices in own]
    count = max(clock.on_ranks(lambda rank: first_fit.get_minimum_num_micro_batch_size(local[rank], cap)))
    return placed(own, clock.on_ranks(lambda rank: divide(local[rank], count, equal_size=False)))


def megatron(lengths: Lengths, cap: int, clock: Clock) -> Groups:
    """Its scheduler of hybrid context parallelism: samples one by one, in groups between two barriers."""
    path = "megatron/core/pipeline_parallel/hybrid_cp_schedule.py"
    group = SimpleNamespace(size=lambda: RANKS)
    scheduler = definitions("megatron-core", path, "BalancedCPScheduler").BalancedCPScheduler(cap, group)
    _, groups = clock.alone(lambda: scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None))
    return [[[[index] for index in own] for own in ranks] for ranks in groups]


def headrace_contexts(lengths: Lengths, cap: int, clock: Clock) -> Groups:
    plan = clock.alone(
        lambda: plan_step(lengths, cap, num_replicas=RANKS, contexts=WIDTHS, work=work_of(lengths)).micro_batches
    )
    return [[[batch.tolist()] for batch in step] for step in zip(*plan, strict=True)]


WIDTHS = (1, 2, 4, 8)
CONTEXTS: list[tuple[str, str, Callable[[Lengths, int, Clock], Groups]]] = [
    ("headrace plan_step(contexts=)", "headrace-size-aware-batching", headrace_contexts),
    ("Megatron BalancedCPScheduler", "megatron-core", megatron),
]
CONTEXT_CASES = {
    "few long": partial(lognormal, typical=3_000, spread=1.2, longest=RANKS * CAP),
    "many long": partial(lognormal, typical=12_000, spread=1.2, longest=RANKS * CAP),
}


def measure_contexts(seeds: int) -> dict[str, list[dict[str, Any]]]:
    """Steps with samples that are too long for a rank: rows of means over the seeds, broken caps as sums."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, draw in CONTEXT_CASES.items():
        rows[name] = []
        for title, package, method in CONTEXTS:
            if not installed(package):
                continue
            runs = []
            for seed in range(-1, seeds):  # the first one is for warmth
                clock, lengths = Clock(), draw(np.random.default_rng(max(seed, 0)))
                groups = method(lengths, CAP, clock)
                if seed >= 0:
                    runs.append({**context_figures(groups, lengths), "seconds": clock.seconds})
            rows[name].append(
                {
                    "name": title,
                    "package": package,
                    "broken": sum(run["broken"] for run in runs),
                    **{key: mean(run[key] for run in runs) for key in ("lockstep", "barriers", "passes")},
                    "time": median(run["seconds"] for run in runs),
                }
            )
            print(f"  steps, contexts: {name}, {title}", flush=True)
        reference = rows[name][0]["time"]
        rows[name] = [{**row, "time": row["time"] / reference} for row in rows[name]]
    return rows


def context_figures(groups: Groups, lengths: Lengths) -> dict[str, float]:
    """What a step of samples on several ranks is worth; a sample's tokens and work are divided among its ranks."""
    broken, waited, total = 0, 0.0, 0.0  # waited: the busiest rank's work, over the groups
    seen: set[int] = set()
    loads = work_of(lengths)
    for ranks in groups:
        width = Counter(index for own in ranks for batch in own for index in batch)
        if seen & width.keys():
            raise ValueError("a sample came in two groups")
        seen |= width.keys()
        shares = [[sum(loads[index] / width[index] for index in batch) for batch in own] for own in ranks]
        tokens = [sum(lengths[index] / width[index] for index in batch) for own in ranks for batch in own]
        broken += sum(count > CAP for count in tokens)
        waited += max(map(sum, shares))
        total += sum(map(sum, shares))
    if len(seen) < len(lengths):
        raise ValueError("a sample was lost")
    passes = [sum(len(ranks[rank]) for ranks in groups) for rank in range(RANKS)]
    return {
        "broken": float(broken),
        "lockstep": float(waited / (total / RANKS)),
        "barriers": len(groups),
        "passes": max(passes),
    }


TRL = "trl/experimental/async_grpo"
OURS = "headrace-size-aware-batching"
METHODS: list[tuple[str, str, Method]] = [
    ("headrace plan_step, lockstep", OURS, partial(headrace, meet="micro_batch")),
    ("headrace plan_step, totals", OURS, partial(headrace, meet="step")),
    ("headrace in verl's loop", OURS, headrace_in_verl),
    ("verl", "verl", verl),
    ("OpenRLHF", "openrlhf", openrlhf),
    ("AReaL ffd", "areal", partial(areal, name="ffd_allocate")),
    ("AReaL kk", "areal", partial(areal, name="kk_allocate")),
    ("SkyRL, reinforcement learning", "skyrl", skyrl),
    ("SkyRL, fine-tuning", "skyrl", skyrl_tuning),
    ("torchtitan", "torchtitan", torchtitan),
    ("TRL TokenBudgetBatcher", "trl", trl),
    ("miles", "miles-rl", miles),
    ("transformers batch_rebalance", "transformers", transformers),
    ("Karmarkar-Karp over all micro-batches", "verl", karmarkar_karp),
]
REFERENCE = METHODS[-1][0]  # of times


def figures(plan: Plan, lengths: Lengths, cap: int, loads: NDArray[Any], fewest: int) -> dict[str, float]:
    """What one step is worth. A rank with fewer micro-batches waits for the others."""
    seen = Counter(index for own in plan for batch in own for index in batch)
    if seen.keys() != set(range(SAMPLES)) or max(seen.values()) > 1:
        raise ValueError("a sample was lost or came twice")
    count = max(map(len, plan))
    work, tokens = np.zeros((RANKS, count)), np.zeros((RANKS, count), np.int64)
    for rank, own in enumerate(plan):
        for number, batch in enumerate(own):
            work[rank, number], tokens[rank, number] = loads[batch].sum(), lengths[batch].sum()
    share = loads.sum() / RANKS
    return {
        "broken": float((tokens > cap).sum()),
        "largest": float(tokens.max() / cap),
        "empty": float((tokens == 0).sum()),
        "micro_batches": count / fewest,
        "lockstep": float(work.max(axis=0).sum() / share),
        "totals": float(work.sum(axis=1).max() / share),
    }


def measure(seeds: int) -> dict[str, Any]:
    """Return a row for each case and method: means over the seeds, broken caps and empty micro-batches as sums.

    ``bounds`` are what no plan of as many micro-batches as headrace's goes below.
    """
    methods = [method for method in METHODS if installed(method[1])]
    rows: dict[str, Any] = {}
    bounds: dict[str, Any] = {}
    for name, case in CASES.items():
        each: dict[str, list[dict[str, float]]] = defaultdict(list)
        least: dict[str, list[float]] = defaultdict(list)
        work = partial(work_of, linear=case.linear)
        for seed in range(-1, seeds):  # the first one is for warmth
            lengths = case.lengths(np.random.default_rng(max(seed, 0)))
            cap = int(lengths.max()) if case.cap is None else case.cap
            best = {
                "lockstep": plan_step(lengths, cap, num_replicas=RANKS, work=work(lengths)),
                "totals": plan_step(lengths, cap, num_replicas=RANKS, work=work(lengths), meet="step"),
            }
            for title, _, method in methods:
                clock = Clock()
                plan = method(lengths, cap, work, clock)
                row = figures(plan, lengths, cap, work(lengths), best["lockstep"].fewest)
                if seed >= 0:
                    each[title].append({**row, "seconds": clock.seconds})
            if seed >= 0:
                for key, found in best.items():
                    least[key].append(found.bound)
        rows[name] = [summary(title, package, each[title], each[REFERENCE]) for title, package, _ in methods]
        bounds[name] = {key: mean(found) for key, found in least.items()}
        print(f"  steps: {name}", flush=True)
    return {"bounds": bounds, "rows": rows}


def summary(
    title: str, package: str, runs: list[dict[str, float]], reference: list[dict[str, float]]
) -> dict[str, Any]:
    """Return the row of a method."""
    ratios = [own["seconds"] / other["seconds"] for own, other in zip(runs, reference, strict=False)]
    return {
        "name": title,
        "package": package,
        **{key: sum(run[key] for run in runs) for key in ("broken", "empty")},
        "largest": max(run["largest"] for run in runs),
        **{key: mean(run[key] for run in runs) for key in ("micro_batches", "lockstep", "totals")},
        "time": median(ratios) if ratios else None,
    }


def contracts(seeds: int) -> dict[str, int]:
    """Call our functions and those that they replace with the same arguments; return how often they agreed.

    Raises:
        ValueError: If ours break what theirs promise.
    """
    agreed: Counter[str] = Counter()

    def held(name: str, truth: bool) -> None:
        if not truth:
            raise ValueError(f"{name} breaks the contract of the function that it replaces")
        agreed[name] += 1

    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        for case in CASES.values():
            lengths = case.lengths(rng)[: int(rng.integers(32, 256))]
            lengths = lengths[: len(lengths) // 8 * 8]
            cap, count, listed = max(case.cap or 0, int(lengths.max())), int(rng.choice([2, 4, 8])), lengths.tolist()
            for package, functions in (("verl", verl_functions), ("openrlhf", openrlhf_functions)):
                for equal in (True, False) if installed(package) else ():
                    theirs = functions().get_seqlen_balanced_partitions(listed, count, equal)
                    ours = get_seqlen_balanced_partitions(listed, count, equal)
                    held("get_seqlen_balanced_partitions", alike(ours, theirs, equal))
            if installed("openrlhf"):
                first_fit = openrlhf_functions().get_minimum_num_micro_batch_size(listed, cap, 2, 1)
                least = plan_step(listed, 2 * cap, num_replicas=1).num_micro_batches
                fits = largest(get_seqlen_balanced_partitions(listed, least, False), lengths) <= 2 * cap
                # First fit counts fewer at times, into which Karmarkar-Karp then does not fit the samples.
                theirs = openrlhf_functions().get_seqlen_balanced_partitions(listed, first_fit, False)
                fewer = least <= first_fit or largest(theirs, lengths) > 2 * cap
                held("get_minimum_num_micro_batch_size", fits and fewer)
            if installed("areal"):
                for least, divisor in ((1, 1), (count, 1), (1, 2), (3, 4)):
                    theirs = areal_functions().ffd_allocate(listed, cap, least, divisor)
                    [ours] = micro_batch_indices(
                        [listed], cap, min_num_micro_batch=least, num_batches_divided_by=divisor
                    )
                    lawful = largest(ours, lengths) <= cap and len(ours) % divisor == 0
                    held("ffd_allocate", lawful and least <= len(ours) <= len(theirs) and alike(ours, theirs))
            if installed("verl"):
                batch = {"input_ids": Nested(lengths)}
                for divisor in (1, 2):
                    _, theirs = verl_functions().rearrange_micro_batches(batch, cap, num_batches_divided_by=divisor)
                    [ours] = micro_batch_indices([listed], cap, num_batches_divided_by=divisor, work=work_of)
                    lawful = largest(ours, lengths) <= cap and len(ours) % divisor == 0
                    held("micro_batch_indices", lawful and len(ours) <= len(theirs) and alike(ours, theirs))
    return dict(agreed)


def largest(groups: list[list[int]], lengths: Lengths) -> int:
    return max(int(lengths[group].sum()) for group in groups)


def alike(ours: list[list[int]], theirs: list[list[int]], equal: bool = False) -> bool:
    """Whether both divide the same samples into lists of ints that are not empty; if ``equal`` into lists as long."""
    same = sorted(chain.from_iterable(ours)) == sorted(chain.from_iterable(theirs)) and all(ours)
    kinds = all(type(index) is int for group in ours for index in group) and all(g == sorted(g) for g in ours)
    return same and kinds and (not equal or sorted(map(len, ours)) == sorted(map(len, theirs)))
