"""States that a checkpoint holds: made here, checked here key by key, and refused with the cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.webdatamodule._shared.state_mismatch import StateMismatchError

# Of the states of loaders, data modules and batch samplers, which lie in one another in a checkpoint; raised when a key
# comes, goes or means something else in any of them, or when the same state stands for other batches.
STATE_VERSION = 1
DATA = "data"  # samples that were appended, in `accept=`
LARGEST = 2**62  # no number in a state is as large
_CURES = {
    "seed": "use that seed, or start without the checkpoint",
}
_OTHER_DATA = "another kind of dataset, other samples or shards, another number or order, or other names of sources"


def check_state(
    state: Any,
    kind: str,
    own: Mapping[str, Any],
    counts: Sequence[str],
    more: Sequence[str] = (),
) -> None:
    """Refuse a state of something else, or one that was damaged.

    `own` has its owner's "version", and other values that may not differ; `counts` are fields that are numbers, `more`
    are others.
    """
    fields = [*own, *more, *counts]
    expected = f"{kind}: state must be what state_dict() returned, with {', '.join(fields)}"
    if not isinstance(state, Mapping):
        raise TypeError(f"{expected}; got {type(state).__name__}")
    lacks = [name for name in fields if name not in state]
    if lacks or set(state) - {*fields}:
        fault = f"this state lacks {', '.join(lacks)}" if lacks else "this state has others"
        raise ValueError(f"{expected}; {fault}: got {', '.join(sorted(map(str, state)))}")
    for name in (*counts, "version"):
        if type(state[name]) is not int or not 0 <= state[name] < LARGEST:
            message = f"state[{name!r}] must be an int from 0 to 2**62, got {state[name]!r}"
            raise ValueError(f"{kind}: {message}: the checkpoint was damaged or changed; take another one")
    if state["version"] != own["version"]:
        versions = f"checkpoint has version={state['version']}, this release reads {own['version']}"
        cure = "it was saved by another version of headrace; resume with that one, or start without the checkpoint"
        raise StateMismatchError(f"{kind}: {versions}", cure, ["version"])
    for name, value in own.items():
        if name != "version" and state[name] != value:
            reason = f"{kind}: checkpoint has {name}={state[name]!r}, got {name}={value!r}"
            raise StateMismatchError(reason, _CURES[name], [name])


def loader_state(
    seed: int,
    epoch: int,
    steps: int,
    fingerprint: str,
    batch_sampler: Mapping[str, Any] | None,
    order: str,
    seed_per: str,
) -> dict[str, Any]:
    """The state of a `ResumableLoader`; `order` stands for an order that the batch sampler's state does not name.

    Every state has all keys: torch.distributed.checkpoint writes into the dict that a loader returns, and reads no key
    which that one lacks.
    """
    return {
        "version": STATE_VERSION,
        "seed": seed,
        "epoch": epoch,
        "steps": steps,
        "fingerprint": fingerprint,
        "batch_sampler": None if batch_sampler is None else {**batch_sampler},
        "order": order,
        "seed_per": seed_per,
    }


def check_loader_state(
    state: Any,
    fingerprint: str,
    seed: int,
    name: str,
    seed_per: str,
    prefix: Callable[[int], str | None] | None = None,
) -> None:
    """Refuse a `ResumableLoader`'s state of other data or another seed, or one that was changed.

    With `prefix`, the fingerprint of the first so many samples, data may have grown.
    """
    own = {"version": STATE_VERSION, "seed": seed}
    more = ("fingerprint", "batch_sampler", "order", "seed_per")
    check_state(state, "ResumableLoader", own, ("epoch", "steps"), more)
    if prefix is not None and state["fingerprint"] != fingerprint:
        _check_growth(state, name, prefix)
    elif state["fingerprint"] != fingerprint:
        raise StateMismatchError(
            f"checkpoint is of other {name} data ({_OTHER_DATA}): it has fingerprint={state['fingerprint']!r}, "
            f"got {fingerprint!r}",
            "resume with the data it was saved with, go on with accept={'data'} where samples were appended, or start "
            "without the checkpoint",
            [DATA],
            [DATA],
        )
    if (was := state["seed_per"]) != seed_per:
        raise StateMismatchError(
            f"checkpoint has seed_per={was!r}, got seed_per={seed_per!r}, with which transforms draw other random "
            "numbers",
            "use that of the checkpoint, or start without it",
            ["seed_per"],
        )
    batches, steps, epoch = state["batch_sampler"], state["steps"], state["epoch"]
    if not isinstance(batches, Mapping):
        raise TypeError(f"state['batch_sampler'] must be a mapping, got {type(batches).__name__}")
    if batches.get("epoch", epoch) != epoch:
        raise ValueError(f"state is of epoch {epoch}, but its batch sampler is in {batches['epoch']!r}: it was changed")
    position = batches.get("position", steps)
    run = batches.get("run", ())
    if not isinstance(run, list | tuple):
        raise ValueError(f"state['batch_sampler']['run'] must be a list of changes, got {run!r}: it was changed")
    skipped = any("skip" in change for change in run if isinstance(change, Mapping))
    if type(position) is int and (position > 0) != (steps > 0) and not (skipped and position > 0):
        raise ValueError(f"state has steps={steps}, but its batch sampler's position={position}: it was changed")


def _check_growth(state: Mapping[str, Any], name: str, prefix: Callable[[int], str | None]) -> None:
    """Refuse data that are not those of a state and more after them."""
    batches = state["batch_sampler"]
    changes = batches.get("run") if isinstance(batches, Mapping) else None
    counts = [change["n"] for change in changes or () if isinstance(change, Mapping) and "n" in change]
    if not counts or type(counts[-1]) is not int:
        raise ValueError(
            f"accept={{'data'}} needs a state that holds the number of {name} samples, in its batch sampler's record "
            "of the run: resume with the data it was saved with"
        )
    if (found := prefix(counts[-1])) != state["fingerprint"]:
        cure = "append samples or whole shards after those there are, and leave these as they were"
        cure += f", with the names of their sources; a single source without a name is called {name!r}"
        if found is None:
            cure = "append whole shards after those there are, which keep their order; a dataset with a fingerprint "
            cure += "needs prefix_fingerprint(n_samples), too"
        raise ValueError(
            f"accept={{'data'}} needs {name} data whose first {counts[-1]} samples are those of the checkpoint, "
            f"fingerprint={state['fingerprint']!r}, got {found!r} for them: {cure}"
        )


def module_state(
    train: Mapping[str, Any], trainer: Any = None, options: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The state of a data module: of its train loader, of a trainer's epochs, and the options, where it has these."""
    state: dict[str, Any] = {} if options is None else {"version": STATE_VERSION, "options": options}
    state["train"] = train
    return state if trainer is None else {**state, "trainer": trainer}


def is_module_state(thing: Any) -> bool:
    """Whether something in a checkpoint is the state of a data module."""
    keys = {"version", "options", "train", "trainer"}
    return isinstance(thing, Mapping) and isinstance(thing.get("train"), Mapping) and set(thing) <= keys


def check_module_state(state: Any) -> None:
    """Refuse a state with options that is no state of a data module, or of another version."""
    if not isinstance(state, Mapping):
        raise TypeError(f"the checkpoint's data state must be a mapping, got {type(state).__name__}")
    if state and (state.get("version") != STATE_VERSION or "train" not in state):
        found, cure = state.get("version"), "resume with the data module and the release that saved it"
        raise ValueError(
            f"the checkpoint's data state has version {found!r}, this release reads {STATE_VERSION}: {cure}, or start "
            "without the checkpoint"
        )
