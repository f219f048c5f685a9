"""Length-balanced micro-batches, under the function names that loops of RL and fine-tuning already call.

All functions plan with `headrace.size_aware_batching.steps.plan_step`: change the import and keep the loop. If you can
change the loop, call `plan_step` itself, which sees all ranks and micro-batches of a step at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.checks import checked_int
from headrace.size_aware_batching._shared.display import counted
from headrace.size_aware_batching._validation import checked_flag
from headrace.size_aware_batching.sizes.read import size_vector
from headrace.size_aware_batching.steps import plan_step

Groups = list[list[int]]
Work = Callable[[NDArray[Any]], Any]


def get_seqlen_balanced_partitions(seqlen_list: Any, k_partitions: int, equal_size: bool) -> Groups:
    """Divide samples among partitions of nearly equal sums, as verl, slime and OpenRLHF do by Karmarkar-Karp.

    Arguments and result have the same form as theirs. There is no token limit: if you need one, use
    `micro_batch_indices` or `plan_step`.

    Args:
        seqlen_list: Length or work of each sample, integers or floats >= 0: a list, array or tensor, shape ``[n]``.
        k_partitions: Number of partitions, at most ``n``.
        equal_size: Whether all partitions get the same number of samples; ``n`` must then be a multiple of
            ``k_partitions``.

    Returns:
        ``k_partitions`` lists of indices, each ascending and none empty; every index is in one of them.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If there are fewer samples than partitions, or they cannot be divided into equal numbers. verl and
            slime raise an ``AssertionError`` there.

    >>> sorted(get_seqlen_balanced_partitions([900, 300, 200, 100], 2, equal_size=False))
    [[0], [1, 2, 3]]
    >>> sorted(get_seqlen_balanced_partitions([900, 300, 200, 100], 2, equal_size=True))
    [[0, 3], [1, 2]]
    """
    lengths = _lengths(seqlen_list, "seqlen_list")
    count, equal = checked_int("k_partitions", k_partitions, low=1), checked_flag("equal_size", equal_size)
    if len(lengths) < count:
        raise ValueError(
            f"k_partitions must be at most the number of samples, {len(lengths)}, got {count}: take "
            "more samples, or fewer partitions"
        )
    if equal and len(lengths) % count:
        raise ValueError(
            f"k_partitions must divide the number of samples, {len(lengths)}, where equal_size is True, got {count}: "
            "take another number of samples, or equal_size=False"
        )
    # Every sample is one item, and the budget a number of items.
    items = len(lengths) // count if equal else len(lengths)
    plan = plan_step(np.ones(len(lengths), np.int64), items, num_replicas=count, work=lengths, meet="step")
    return [indices.tolist() for [indices] in plan.micro_batches]


def micro_batch_indices(
    lengths_of_ranks: Sequence[Any],
    max_token_len: int,
    *,
    num_batches_divided_by: int | None = None,
    min_num_micro_batch: int | None = None,
    work: Work | None = None,
    pad: bool = False,
) -> list[Groups]:
    """Divide the samples of each rank into micro-batches within a cap, the same number on all ranks.

    These are the indices by which verl's ``rearrange_micro_batches`` selects samples. Every rank passes the lengths of
    all ranks (from one ``all_gather_object``) and takes its own part of the result. No further communication is needed
    to agree on the number of micro-batches. Samples stay on their ranks; `plan_step` also assigns samples to ranks.

    Args:
        lengths_of_ranks: For each rank, the tokens of each of its samples; ``[lengths]`` for a single rank.
        max_token_len: Maximum number of tokens in a micro-batch.
        num_batches_divided_by: The number of micro-batches is a multiple of it; None: 1. A pipeline with virtual
            stages needs it.
        min_num_micro_batch: Minimum number of micro-batches; None: 1.
        work: Function from an int64 array of lengths to the work of each sample; micro-batches are balanced by work.
            None: the lengths. verl uses ``lambda lengths: 24576 * lengths + lengths**2``.
        pad: Whether a rank with fewer samples than there are micro-batches repeats its sample with the least work, in
            micro-batches that hold it alone: give these no weight in the loss. False: raise an error.

    Returns:
        For each rank its micro-batches: lists of ascending indices into its own lengths, in descending order of work,
        so that micro-batches that run at the same time have similar work. Repeats come last.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a sample is over the cap, or a rank has fewer samples than there are micro-batches.

    >>> micro_batch_indices([[6, 2, 5, 4, 3], [7, 2]], 10)
    [[[0, 3], [1, 2, 4]], [[0], [1]]]
    >>> micro_batch_indices([[6, 2, 5, 4, 3], [7]], 10, pad=True)
    [[[0, 3], [1, 2, 4]], [[0], [0]]]
    """
    cap = checked_int("max_token_len", max_token_len, low=1)
    multiple = checked_int("num_batches_divided_by", num_batches_divided_by or 1, low=1)
    least = checked_int("min_num_micro_batch", min_num_micro_batch or 1, low=1)
    lengths = [
        _lengths(own, f"lengths_of_ranks[{rank}]", cap, "max_token_len") for rank, own in enumerate(lengths_of_ranks)
    ]
    if not lengths:
        raise ValueError("lengths_of_ranks must hold the lengths of each rank, got no rank: give [lengths] for one")
    loads = lengths if work is None else [_work_of(own, work) for own in lengths]
    ranks = _same_number(lengths, loads, cap, least, multiple, checked_flag("pad", pad))
    return [
        sorted(groups, key=lambda group, of=own: (-of[group].sum(), group))  # type: ignore[misc]  # binds own of this rank
        for groups, own in zip(ranks, loads, strict=True)
    ]


def _same_number(
    lengths: list[NDArray[Any]], work: list[NDArray[Any]], cap: int, least: int, multiple: int, pad: bool = False
) -> list[Groups]:
    """Return the groups of each list within the cap, balanced by work: the least number that all lists can have."""
    count = max([least, *(_fewest(own, cap) for own in lengths)])
    count = -(-count // multiple) * multiple
    while pad or min(map(len, lengths)) >= count:
        plans = [
            plan_step(own, cap, num_replicas=count, work=loads, meet="step", pad=pad)
            for own, loads in zip(lengths, work, strict=True)
        ]
        if all(plan.num_micro_batches == 1 for plan in plans):
            return [[indices.tolist() for [indices] in plan.micro_batches] for plan in plans]
        count += multiple
    few = [(rank, len(own)) for rank, own in enumerate(lengths) if len(own) < count]
    where = "" if len(lengths) == 1 else f" of rank {few[0][0]}" + f" and {len(few) - 1} more" * (len(few) > 1)
    cure = "" if len(lengths) == 1 else ", or pad=True, which repeats the sample with least work"
    raise ValueError(
        f"there must be a sample for each of {counted(count, 'micro-batch')}, got {counted(few[0][1], 'sample')}"
        f"{where}: take more samples, or a smaller minimum or multiple of micro-batches{cure}"
    )


def _fewest(lengths: NDArray[Any], cap: int) -> int:
    """Return how many groups within the cap there are at least."""
    return plan_step(lengths, cap, num_replicas=1).num_micro_batches


def _lengths(values: Any, name: str, cap: int | None = None, cap_name: str = "") -> NDArray[Any]:
    """Return an array of at least one length, all up to the cap."""
    lengths = size_vector(values, name)
    if not len(lengths):
        raise ValueError(f"{name} must hold at least one length, got none")
    if cap is not None and (over := np.flatnonzero(lengths > cap)).size:
        raise ValueError(
            f"{name} must hold lengths up to {cap_name}={cap}, got {lengths[over[0]]} at index {over[0]} "
            f"({over.size} are over it): leave such samples out, or raise {cap_name}"
        )
    return lengths


def _work_of(lengths: NDArray[Any], work: Work) -> NDArray[Any]:
    found = size_vector(work(lengths), "work")
    if len(found) != len(lengths):
        raise ValueError(f"work must return one number for each of {len(lengths)} lengths, got {len(found)} numbers")
    return found
