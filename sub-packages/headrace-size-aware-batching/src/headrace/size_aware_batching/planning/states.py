"""How a loaded state is compared and refused; what is compared are the `fingerprint_parts` of a planner."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from numbers import Real
from typing import Any, Protocol

from headrace.size_aware_batching._shared.checks import checked_int, shown
from headrace.size_aware_batching._shared.record import RECORD
from headrace.size_aware_batching._shared.run import SamplerAdapter
from headrace.size_aware_batching._shared.state_mismatch import StateMismatchError
from headrace.size_aware_batching._validation import checked_epoch, shortlist
from headrace.size_aware_batching.planning.fingerprint import differing, has_parts
from headrace.size_aware_batching.planning.options import CHANGEABLE, DATA, FUNCTION, RECORDED_IF_GIVEN

STATE_VERSION = 1  # raised when a key changes, or the same state stands for other batches
STATE = ("version", "seed", "epoch", "position", "fingerprint")
_CURES = {
    "version": "it comes from another version of headrace or another class",
    "seed": "construct the sampler with seed={seed}, or start a new run",
}
# What the fingerprint of a mixture covers, as it says itself, and the usual cause of another one.
_OF_A_MIXTURE = "its data, weights, semantics, sizes, epoch_length, drop_last or an earlier part of its schedule"
_EXPECTED = "state['fingerprint'] must be that of the same sizes, budget, options and sampler, got"
_OTHER_CLASS = "of another class or version of headrace", "load it where it was saved"
_REWEIGHTED = (
    "; the state holds a reweight of its run at draw {draw:,} and applies it by itself: construct the mixture with "
    "the weights of the run's beginning"
)


def checked_state(state: Any, name: str, version: int, seed: int, more: Sequence[str] = ()) -> dict[str, Any]:
    """Return a state with plain ints; refuse what is none, or one of another version or seed.

    Args:
        state: As a user gives it.
        name: Class of the sampler.
        version: Of its states.
        seed: Of the sampler.
        more: Keys that its states have beside the usual ones.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a dict that state_dict() returned, got {type(state).__name__}")
    keys = (*STATE, *more)
    if not set(state) >= set(keys):
        present = shortlist(list(map(str, islice(state, 10))), len(state))
        raise ValueError(
            f"state must be one of {name}.state_dict(), a dict of {', '.join(keys)}, got a dict with the keys {present}"
        )
    for key, own in (("version", version), ("seed", seed)):
        if state[key] != own:
            cure = _CURES[key].format(seed=shown(state["seed"]))
            reason = f"state[{key!r}] must be {own!r} for this sampler, got {shown(state[key])}"
            raise StateMismatchError(reason, cure, [key])
    if not set(state) >= set(RECORD):
        raise ValueError("state must have step, starts and run as state_dict() returned them: it was changed")
    position = checked_int("position", state["position"], high=2**62 - 1)
    return {**state, "epoch": checked_epoch(state["epoch"]), "position": position}


class _Compared(Protocol):
    """A planner, as `settings_changed` reads it."""

    @property
    def settings(self) -> dict[str, Any]: ...
    @property
    def has_cost_function(self) -> bool: ...
    @property
    def is_mixture(self) -> bool: ...
    @property
    def user_sampler(self) -> SamplerAdapter: ...
    def at(self, settings: Mapping[str, Any], /) -> _Compared: ...
    def fingerprint_parts(self, order: str | None = None) -> dict[str, Any]: ...
    def fingerprint_at(self, epoch: int, /) -> str: ...


def settings_changed(
    planner: _Compared, state: Mapping[str, Any], recorded: Mapping[str, Any], accept: Collection[str]
) -> bool:
    """Return whether a state is of other settings, all of them accepted; refuse those that are not.

    Args:
        planner: With the weights that the state holds.
        state: Of this version and seed.
        recorded: The settings that the state holds.
        accept: Names of arguments, and ``"data"``.

    Raises:
        StateMismatchError: If the state differs in what is not accepted.
    """
    epoch, other, own = state["epoch"], state["fingerprint"], planner.fingerprint_at(state["epoch"])
    if other == own:
        return False
    parts, settings = planner.fingerprint_parts(), planner.settings
    if not has_parts(parts, other):
        raise StateMismatchError(f"{_EXPECTED} that {_OTHER_CLASS[0]}", _OTHER_CLASS[1], ["version"])
    n, options = settings["n"], {**dict.fromkeys(RECORDED_IF_GIVEN), **recorded["options"]}
    n_recorded = recorded.get("n", n)
    grew = n_recorded < n or (n_recorded == n and planner.user_sampler.has_other_sources(recorded))
    # Which function it was, a state does not say.
    functions = {name for name, value in options.items() if value == FUNCTION != settings["options"].get(name)}
    accept = {*accept} - functions

    def with_recorded(names: Collection[str]) -> _Compared:
        """Return the planner with some of the state's arguments, and its number of samples."""
        changed = {name: value for name, value in options.items() if name in names}
        mixed = {name: recorded[name] for name in ("mixture", "reweight") if grew and name in recorded}
        return planner.at({**settings, **mixed, "options": {**settings["options"], **changed}, "n": n_recorded})

    if accept and (DATA in accept or not grew) and n_recorded <= n:
        with suppress(ValueError):  # of arguments that do not go together, as a cost without its strategy
            accepted = with_recorded(accept)
            if (own := accepted.fingerprint_at(epoch)) == other:
                return True
            parts = accepted.fingerprint_parts()
    names = differing(parts, own, other)
    # A function is compared by what it allows at these sizes within the budget.
    other_function = "cost" in names and "sizes" not in names and options.get("cost") == FUNCTION
    other_function = other_function and planner.has_cost_function
    if other_function:
        same = with_recorded([name for name in CHANGEABLE if name != "cost"])
        if not (other_function := "cost" in differing(same.fingerprint_parts(), same.fingerprint_at(epoch), other)):
            names.remove("cost")
    other_function = other_function or not functions.isdisjoint(names)
    acceptable = {*names} if {*names} <= {*CHANGEABLE} and not other_function else set[str]()
    if grew and (names == ["sizes"] or with_recorded(()).fingerprint_at(epoch) == other):
        acceptable = {DATA}
    details = {name: _short(parts[name]) for name in names if name not in ("sampler", "sizes")}
    if "sizes" in names and "n" in recorded:
        count = f"{n_recorded:,} samples, here {n:,}"
        details["sizes"] = "others, or in another order" if n_recorded == n else count
    if "sampler" in names and planner.is_mixture:
        details["sampler"] = _OF_A_MIXTURE
    if other_function:
        other = "a function in the run" if "cost" in functions else "another function"
        details["cost"] = f"{other}, which cannot be accepted: give that of the run"
    saved = {name: options[name] for name in names if name in options}
    saved = {name: value for name, value in saved.items() if value is None or isinstance(value, Real)}
    cure = f" ({', '.join(f'{name}={value!r}' for name, value in saved.items())})" if saved else ""
    cure += f", go on with accept={shown(sorted({*accept, *acceptable}))}" if acceptable else ""
    cure += ", or start a new run"
    if _OF_A_MIXTURE in details.values() and recorded["reweight"]:
        cure += _REWEIGHTED.format(draw=recorded["reweight"][-1][0])
    raise StateMismatchError(
        f"{_EXPECTED} one that differs in {_listed(names, details)}",
        f"construct the sampler as in the run that saved it{cure}",
        names,
        acceptable,
    )


def refuse_other_settings(parts: Mapping[str, Any], own: str, other: str) -> None:
    """Refuse a state of a sampler whose settings cannot change, if it is of others."""
    if other == own:
        return
    expected = "state['fingerprint'] must be that of the same shards, budget and options, got"
    if not has_parts(parts, other):
        raise StateMismatchError(f"{expected} that {_OTHER_CLASS[0]}", _OTHER_CLASS[1], ["version"])
    names = differing(parts, own, other)
    raise StateMismatchError(
        f"{expected} one that differs in {_listed(names, {name: _short(parts[name]) for name in names})}",
        "construct the sampler as in the run that saved it, or start a new run",
        names,
    )


def _short(value: Any) -> str:
    return f"here {shown(value)}" if value is None or isinstance(value, str | Real) else ""


def _listed(names: Sequence[str], details: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({details[name]})" if details.get(name) else name for name in names)
