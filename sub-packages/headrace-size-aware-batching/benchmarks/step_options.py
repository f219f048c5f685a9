"""What options of `plan_step` are worth and cost: kinds of work, context-parallel groups, groups of samples.

    python benchmarks/step_options.py             # 4,096 samples on 64 ranks; a minute
    python benchmarks/step_options.py --draws 3

**Kinds of work**: an encoder and a language model.

- ``lockstep``, ``totals``: of each kind, over the mean rank's work, for ``meet="micro_batch"`` and ``"step"``;
- ``varies``: standard deviation over the micro-batches, over their mean;
- ``least``: what the encoder's ``varies`` is at least in so many micro-batches: large samples alone, the rest even;
- ``/KK``: time over that of Karmarkar-Karp by the sum of both shares over the ranks and then on each rank, in the
  same run; the row below has its figures.

**Context-parallel groups** of 1, 2, 4 or 8 ranks: work over the mean rank's, waits for other ranks, micro-batches of a
rank, and time over that of ``meet="micro_batch"``.

**Groups of samples on one rank**: lockstep, micro-batches of a rank and time over those without groups.
"""

import argparse
from functools import partial
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from steps import Step, lognormal, steps, timed, verl

from headrace.size_aware_batching import StepPlan, plan_step

Ints = NDArray[np.int64]
SAMPLES, RANKS = 4096, 64


class Kinds(NamedTuple):
    """Samples with two kinds of work, and the tokens that are bounded."""

    tokens: Ints
    cap: int
    work: dict[str, Ints]


def kinds(seed: int) -> dict[str, Kinds]:
    """Return steps of samples with images and text; ``few``: three tenths have images."""
    draw = np.random.default_rng(seed)
    patches = np.array([draw.choice([256, 576, 1024, 2304], count).sum() for count in draw.poisson(1.5, SAMPLES)])
    tokens = lognormal(draw, SAMPLES, 245, 0.8, 4000) + patches // 4
    text = lognormal(draw, SAMPLES, 360, 0.8, 2048)
    images = np.where(draw.random(SAMPLES) < 0.3, text * draw.uniform(0.1, 0.9, SAMPLES), 0).astype(np.int64)
    long = lognormal(draw, SAMPLES, 3000, 0.8, 32768)
    heavy = np.where(draw.random(SAMPLES) < 0.5, draw.lognormal(6, 1, SAMPLES), 0).astype(np.int64)

    def step(tokens: Ints, cap: int, encoder: Ints) -> Kinds:
        return Kinds(tokens, cap, {"encoder": encoder, "decoder": 24_576 * tokens + tokens**2})

    return {
        "images": step(tokens, 8192, patches),
        "few": step(text, 4096, images),
        "few, short": step(text, 16384, images),
        "long, heavy": step(long, 32768, heavy),
    }


def shown(name: str, way: str, works: list[list[NDArray[Any]]], share: float) -> None:
    """Print a row from the works ``[ranks, k]`` of each kind in each draw."""
    text = ""
    for of_kind in zip(*works, strict=True):
        means = [float(work.sum()) / RANKS for work in of_kind]
        lockstep = mean(
            np.sort(work, axis=1).max(axis=0).sum() / unit for work, unit in zip(of_kind, means, strict=True)
        )
        totals = mean(work.sum(axis=1).max() / unit for work, unit in zip(of_kind, means, strict=True))
        varies = mean(float(work.std() / work.mean()) for work in of_kind)
        text += f" {lockstep:9.4f} {totals:7.4f} {varies:6.3f}"
    print(f"{name:12} {way:20}{text} {share:6.2f}", flush=True)


def planned(case: Kinds, meet: Any) -> StepPlan:
    return plan_step(case.tokens, case.cap, num_replicas=RANKS, work=case.work, meet=meet)


def least_variation(work: Ints, n_batches: int) -> float:
    """Return the least variation over micro-batches: samples above what is left for each of the others are alone."""
    descending = np.sort(work)[::-1].astype(np.float64)
    left = work.sum() - np.append(0, np.cumsum(descending))[:n_batches]
    each = left / np.arange(n_batches, 0, -1)
    alone = int((descending[:n_batches] <= each).argmax())
    sums = np.append(descending[:alone], np.full(n_batches - alone, each[alone]))
    return float(sums.std() / sums.mean())


def compare_kinds(draws: int, runs: int) -> None:
    head = f"{'lockstep':>9} {'totals':>7} {'varies':>6}"
    print(f"kinds of work: encoder, then decoder\n{'':33} {head} {head} {'/KK':>6}")
    for name in kinds(0):
        seconds: dict[str, list[float]] = {}
        works: dict[str, list[list[NDArray[Any]]]] = {}
        least = []
        for seed in range(draws):
            case = kinds(seed)[name]
            for meet in ("micro_batch", "step"):
                plan, taken = timed(partial(planned, case, meet=meet), runs)
                works.setdefault(meet, []).append(list(plan.works.values()))
                seconds.setdefault(meet, []).append(taken)
            least.append(least_variation(case.work["encoder"], RANKS * plan.num_micro_batches))
            both = np.rint(1e9 * sum(work / work.sum() for work in case.work.values())).astype(np.int64)
            batches, taken = timed(partial(verl, Step(case.tokens, case.cap, both), RANKS), 1)
            seconds.setdefault("Karmarkar-Karp twice", []).append(taken)
            works.setdefault("Karmarkar-Karp twice", []).append(
                [np.array([[work[batch].sum() for batch in rank] for rank in batches]) for work in case.work.values()]
            )
        for way, found in works.items():
            shown(name, way, found, median(seconds[way]) / median(seconds["Karmarkar-Karp twice"]))
        print(f"{name:12} {'least':20} {'':9} {'':7} {mean(least):6.3f}", flush=True)


def compare_contexts(draws: int, runs: int) -> None:
    print(f"\ncontext-parallel groups\n{'':28} {'longest rank':>12} {'waits':>6} {'micro-batches':>13} {'time':>6}")
    for cap in (16_384, 32_768):
        units: list[float] = []
        for meet in ("micro_batch", "step"):
            plans, seconds = [], []
            for seed in range(draws):
                sizes = lognormal(np.random.default_rng(seed), SAMPLES, 4000, 1.2, 8 * cap)
                plan, taken = timed(partial(shared, sizes, cap, meet), runs)
                plans.append(plan)
                seconds.append(taken)
            units = units or seconds
            count = mean(plan.num_micro_batches for plan in plans)
            waits, share = count if meet == "micro_batch" else 1, median(seconds) / median(units)
            largest = mean(plan.imbalance for plan in plans)
            print(f"cap {cap:6} {meet:17} {largest:12.4f} {waits:6.1f} {count:13.1f} {share:6.2f}", flush=True)


def shared(sizes: Ints, cap: int, meet: Any) -> StepPlan:
    work = 24_576 * sizes + sizes**2
    return plan_step(sizes, cap, num_replicas=RANKS, work=work, contexts=(1, 2, 4, 8), meet=meet)


def compare_groups(draws: int, runs: int) -> None:
    print(f"\ngroups on one rank, over no groups\n{'':20} {'lockstep':>9} {'micro-batches':>13} {'time':>6}")
    for name in ("lognormal", "rollouts", "quadratic"):
        for together in (4, 8, 16):
            shares = []
            for seed in range(draws):
                step = steps(SAMPLES, seed)[name]
                free, unit = timed(partial(grouped, step, None), runs)
                plan, taken = timed(partial(grouped, step, np.arange(SAMPLES) // together), runs)
                counts = plan.num_micro_batches / free.num_micro_batches
                shares.append((plan.imbalance / free.imbalance, counts, taken / unit))
            lockstep, counts, share = map(mean, zip(*shares, strict=True))
            print(f"{name:12} of {together:2}    {lockstep:9.4f} {counts:13.2f} {share:6.1f}", flush=True)


def grouped(step: Step, groups: Ints | None) -> StepPlan:
    return plan_step(step.sizes, step.cap, num_replicas=RANKS, work=step.work, group_by=groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--draws", type=int, default=5, help="steps of each kind")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each, of which the median counts")
    options = parser.parse_args()
    compare_kinds(options.draws, options.runs)
    compare_contexts(options.draws, options.runs)
    compare_groups(options.draws, options.runs)


if __name__ == "__main__":
    main()
