"""Any batch sampler, of headrace, torch or a user: its ranks, epoch, length and position, where it has them."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np

OTHER_ORDER = (
    "the order of {kind} is not the one that the checkpoint was saved in: samples would be lost and repeated. Use a "
    "sampler whose order depends on a seed and the epoch alone, or start without the checkpoint"
)


def has_state(batch_sampler: Any) -> bool:
    """Whether a batch sampler can be resumed by itself."""
    return callable(getattr(batch_sampler, "state_dict", None)) and hasattr(batch_sampler, "load_state_dict")


def tells_draws(batch_sampler: Any) -> bool:
    """Whether a batch sampler has `draws`, and no method of that name."""
    return hasattr(batch_sampler, "draws") and not callable(batch_sampler.draws)


def draws_of(batch_sampler: Any, batch: Sequence[int]) -> Sequence[int] | None:
    """The `draws` of a batch sampler's latest batch; None where it has none, or something else of that name."""
    draws: Any = getattr(batch_sampler, "draws", None)
    if isinstance(draws, np.ndarray):
        draws = draws.tolist()
    return draws if isinstance(draws, Sequence) and len(draws) == len(batch) else None


def counts_sizes(batch_sampler: Any) -> bool:
    """Whether its `sizes` and `n_samples` mean what those of headrace's batch samplers mean."""
    return hasattr(type(batch_sampler), "fingerprint")


def sizes_of(batch_sampler: Any) -> Any:
    """The size of each sample by which a batch sampler fills its batches; None if it does not say."""
    return getattr(batch_sampler, "sizes", None) if counts_sizes(batch_sampler) else None


def longest_of(batch_sampler: Any) -> float:
    """The size up to which a batch sampler counts a sample, which `collate_fn` truncates; else infinite."""
    longest: Any = getattr(batch_sampler, "max_length", None) if counts_sizes(batch_sampler) else None
    if isinstance(longest, Sequence) and longest:
        longest = longest[0]
    return float(longest) if isinstance(longest, int | float) else math.inf


def budget_of(batch_sampler: Any) -> tuple[Any, float | None]:
    """The cost of a batch, such as "sum", and its budget, the first one of several; None where it does not say."""
    cost = getattr(getattr(batch_sampler, "options", None), "cost", None)
    budget: Any = getattr(batch_sampler, "max_total_size", None)
    budget = budget[0] if isinstance(budget, Sequence) and budget else budget
    return cost, float(budget) if isinstance(budget, int | float) else None


def asked_shares(batch_sampler: Any) -> Any:
    """What the shares of its mixture refer to, and the requested share of each source; None where it has none."""
    asked = getattr(batch_sampler, "asked_shares", None)
    return asked() if callable(asked) else None


def check_batch_sampler(batch_sampler: Any, dataset: Any) -> Any:
    """Refuse what is no batch sampler, or one that says it was made for another number of samples."""
    if not (hasattr(batch_sampler, "__len__") and hasattr(batch_sampler, "__iter__")):
        kind = type(batch_sampler).__name__
        raise TypeError(
            f"batch_sampler must give lists of indices in every epoch and have a length, got {kind}: give one such as "
            "DistributedBatchSampler(len(dataset), batch_size)"
        )
    if not counts_sizes(batch_sampler):
        return batch_sampler
    sizes = sizes_of(batch_sampler)
    count = getattr(batch_sampler, "n_samples", None) if sizes is None else len(sizes)
    if isinstance(count, int) and count not in (0, len(dataset)):
        kind, sampler = type(batch_sampler).__name__, getattr(batch_sampler, "sampler", None)
        cure = "give it len(dataset)" if sizes is None else "give it the sizes of this dataset"
        if sizes is None and isinstance(sampler, Sized) and len(sampler) == count:
            cure += f", not the length of its {type(sampler).__name__}"
        message = f"dataset must have the {count} samples that {kind} was made for, got {len(dataset)}"
        raise ValueError(f"{message}: {cure}")
    return batch_sampler


def samples_of(batch: Iterable[Any]) -> list[int]:
    """The index of each sample of a batch, whose keys may say it by `int()`, as pieces of samples do."""
    found = list[int]()
    for key in batch:
        try:
            found.append(int(key))
        except (TypeError, ValueError):
            raise TypeError(
                "batch_sampler must give indices, or keys that int() makes the sample's index of, such as Piece, got "
                f"{key!r}"
            ) from None
    return found


def ranks_of(batch_sampler: Any) -> tuple[int, int] | None:
    """The number of ranks and the rank that a batch sampler, or its sampler, is for; None if it does not say."""
    for one in (batch_sampler, getattr(batch_sampler, "sampler", None)):
        found = getattr(one, "num_replicas", None), getattr(one, "rank", None)
        if all(isinstance(number, int) for number in found):
            return found  # type: ignore[return-value]  # of two ints
    return None


def set_epoch(batch_sampler: Any, epoch: int) -> None:
    """Tell a batch sampler, or its sampler, the epoch."""
    setter = getattr(batch_sampler, "set_epoch", None)
    setter = setter or getattr(getattr(batch_sampler, "sampler", None), "set_epoch", None)
    if callable(setter):
        setter(epoch)


def rewind(batch_sampler: Any, epoch: int) -> None:
    """Put a batch sampler at the beginning of an epoch: it forgets its position with its epoch."""
    set_epoch(batch_sampler, epoch + 1)
    begin_epoch(batch_sampler, epoch)


def begin_epoch(batch_sampler: Any, epoch: int) -> None:
    """Put a batch sampler at the beginning of another epoch; its record forgets what came after that."""
    set_epoch(batch_sampler, epoch)
    state = batch_sampler.state_dict() if has_state(batch_sampler) else {}
    if "run" not in state:
        return
    begun = at_beginning(state, epoch)
    if begun == state:
        return
    excluded = batch_sampler.excluded_indices.tolist()  # also where it was behind
    batch_sampler.load_state_dict(begun)
    batch_sampler.exclude(excluded)


def at_beginning(state: Mapping[str, Any], epoch: int, position: int = 0) -> dict[str, Any]:
    """A state at the beginning of its epoch, `position` samples of which were skipped."""
    starts, run = state["starts"], [one for one in state["run"] if (one["epoch"], one["position"]) <= (epoch, position)]
    if not position:
        last = {name: value for name, value in run[-1].items() if name != "skip"} if run else {}
        run = [*run[:-1], last] if (last.get("epoch"), last.get("position")) == (epoch, 0) else run
    step = next((first for begun, first in starts if begun >= epoch), state["step"])
    if lacking := _lacking(state["run"], run):
        run.append({"epoch": epoch, "position": position, "step": step, "reweight": lacking})
    return {
        **state,
        "position": position,
        "step": step,
        "starts": [start for start in starts if start[0] <= epoch],
        "run": tuple(run),
    }


def _reweights(run: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The weights of a mixture that changed in a run: those at a draw stand for all before them from there on."""
    found = list[Any]()
    for change in run:
        if "mixture" in change and "n" in change:  # they end where the data of the mixture grow
            found = []
        if new := [list(one) for one in change.get("reweight", ())]:
            found = [one for one in found if one[0] < new[0][0]] + new
    return found


def _lacking(run: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The weights that changed in a run after an earlier place; they hold there, too."""
    known = _reweights(earlier)
    return [one for one in _reweights(run) if one not in known]


def load_state(batch_sampler: Any, state: Mapping[str, Any], epoch: int, accept: Collection[str] = ()) -> None:
    """Resume a batch sampler, whichever epoch was set before; what may differ is given to one that takes it."""
    accepted = {"accept": accept} if accept else {}
    batch_sampler.load_state_dict(state, **accepted)
    if batch_sampler.state_dict().get("epoch", epoch) != epoch:  # a later epoch was set, which it keeps
        set_epoch(batch_sampler, epoch)
        batch_sampler.load_state_dict(state, **accepted)


def take_over(batch_sampler: Any, state: Mapping[str, Any], epoch: int, *, within_epoch: bool) -> None:
    """Let a batch sampler that was just made go on with the run of another one, whose state is given.

    Where no epoch is interrupted it may have other options, as a batch size by the number of ranks, which the record
    notes; and one without a record has nothing to go on with.
    """
    if within_epoch:
        load_state(batch_sampler, state, epoch)
    elif "run" in state:
        options = {name for change in state["run"] for name in change.get("options", ())}
        load_state(batch_sampler, state, epoch, options)


def place(batch_sampler: Any, epoch: int, steps: int, state: Mapping[str, Any] | None) -> None:
    """Put a batch sampler at a position of an epoch, where it has a state; else at the beginning of the epoch.

    What was excluded and which weights a mixture got stays so, also where the state is an earlier one.
    """
    excluded = getattr(batch_sampler, "excluded_indices", None)
    run = batch_sampler.state_dict().get("run", ()) if has_state(batch_sampler) else ()
    rewind(batch_sampler, epoch)
    if state is not None and (steps or state.get("position")) and has_state(batch_sampler):
        load_state(batch_sampler, state, epoch)
        if excluded is not None and len(excluded):
            batch_sampler.exclude(excluded.tolist())
        for draw, weights in _lacking(run, state.get("run", ())):
            batch_sampler.reweight(weights, draw)


def go_back(batch_sampler: Any, epoch: int, state: Mapping[str, Any] | None) -> None:
    """Put a batch sampler back to a position that it has passed; one that reads no order anew for that."""
    if state is None:
        rewind(batch_sampler, epoch)
    else:
        load_state(batch_sampler, state, epoch)


def recorded_ranks(state: Mapping[str, Any] | None) -> int | None:
    """The number of ranks that a state's run had last; None if it says none."""
    worlds = [change["world"] for change in (state or {}).get("run", ()) if "world" in change]
    return worlds[-1] if worlds else None


def need(batch_sampler: Any, method: str) -> None:
    """Refuse a batch sampler that keeps no record of the run."""
    if not callable(getattr(batch_sampler, method, None)):
        raise TypeError(
            f"batch_sampler must have {method}() for that, got {type(batch_sampler).__name__}: use "
            "DistributedBatchSampler or DistributedSizeAwareBatchSampler, which keep a record of the run"
        )


def check_accept(batch_sampler: Any, accept: Collection[str]) -> None:
    """Refuse to accept changes where a batch sampler does not."""
    load = getattr(batch_sampler, "load_state_dict", None)
    if accept and (load is None or "accept" not in inspect.signature(load).parameters):
        raise TypeError(
            f"accept={sorted(accept)} needs a batch_sampler with load_state_dict(state, accept), got "
            f"{type(batch_sampler).__name__}: use DistributedBatchSampler or DistributedSizeAwareBatchSampler"
        )


def copied(batch_sampler: Any, dataset: Any, name: str) -> Any:
    """A batch sampler of the same order, for an iteration beside another one; the dataset stays the same."""
    try:
        return copy.deepcopy(batch_sampler, {id(dataset): dataset})
    except TypeError as error:
        kind = type(batch_sampler).__name__
        raise TypeError(
            f"a second iteration of the {name} loader, while one is under way, needs a copy of {kind}, and it cannot "
            f"be copied ({error}): keep no iterators in its attributes, give batch_sampler as a function of "
            "num_replicas and rank that makes it, or begin anew with set_epoch"
        ) from error


def length_of(batch_sampler: Any, before: int, state: Mapping[str, Any] | None = None) -> int:
    """Batches of the whole epoch, of which some came before the position that the batch sampler was resumed at.

    Those that were skipped before do not count; `state` is that of the position.
    """
    inside = before or (state or {}).get("position")
    remaining = getattr(batch_sampler, "remaining", None) if inside and has_state(batch_sampler) else None
    if remaining is not None and not callable(remaining):
        return before + int(remaining)
    return len(batch_sampler)


def resume(
    batch_sampler: Any, state: Mapping[str, Any], present: int, ranks: tuple[int, int], accept: Collection[str] = ()
) -> dict[str, Any] | None:
    """Resume a batch sampler from a loader's state that was checked; if that is refused, it is in the `present` epoch.

    Returns the hash of the batches before, of a batch sampler without a state, if this rank saved it.
    """
    own, epoch, steps = state["batch_sampler"], state["epoch"], state["steps"]
    check_accept(batch_sampler, accept)
    if has_state(batch_sampler):
        load_state(batch_sampler, own, epoch, accept)
        if 0 < steps < len(batch_sampler) and state.get("order", "") != getattr(batch_sampler, "order_digest", ""):
            rewind(batch_sampler, present)
            raise ValueError(OTHER_ORDER.format(kind=type(getattr(batch_sampler, "sampler", batch_sampler)).__name__))
        return None
    num_replicas, rank = ranks
    if own.get("num_replicas") != num_replicas:
        raise ValueError(
            f"checkpoint has num_replicas={own.get('num_replicas')}, got num_replicas={num_replicas}, "
            f"and {type(batch_sampler).__name__} has no state_dict to share the rest among them: resume with as many "
            "ranks, or give a batch sampler that has one"
        )
    set_epoch(batch_sampler, epoch)
    if steps > (length := len(batch_sampler)):
        set_epoch(batch_sampler, present)
        raise ValueError(f"state has steps={steps}, more than the {length} batches of its epoch")
    return {"delivered": own["delivered"]} if own.get("delivered") is not None and own.get("rank") == rank else None
