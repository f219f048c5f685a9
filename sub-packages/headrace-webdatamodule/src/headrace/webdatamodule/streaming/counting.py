"""Which stages give as many as they get, so that a position can be worked out."""

import inspect
import random
from collections.abc import Iterable, Mapping
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import webdataset as wds

_ONE_TO_ONE = (
    wds.map,
    wds.map_dict,
    wds.map_tuple,
    wds.to_tuple,
    wds.rename,
    wds.rename_keys,
    wds.extract_keys,
    wds.associate,
    wds.decode,
)
_FUNCTIONS = {stage.f for stage in _ONE_TO_ONE}
STRICT = (wds.reraise_exception, wds.filters.reraise_exception)  # webdataset has it twice


class Batched(NamedTuple):
    """How many things become one.

    Attributes:
        size: So many.
        partial: Whether fewer at the end become one, too.
    """

    size: int = 1
    partial: bool = True

    def count(self, n: int) -> int:
        """How many come out when `n` go in.

        >>> Batched(4).count(9), Batched(4, partial=False).count(9)
        (3, 2)
        """
        return -(-n // self.size) if self.partial else n // self.size


def counted(stages: Iterable[Any]) -> Batched | str:
    """What stages do to a number of things.

    Args:
        stages: Composables: those of webdataset's that map one thing to one, and at most one `batched`.

    Returns:
        How many become one; or, when that is not known, the name of the first stage that is to blame.

    >>> counted([wds.map(str), wds.batched(16)]), counted([wds.shuffle(100)])
    (Batched(size=16, partial=True), 'shuffle')
    """
    found = Batched()
    for stage in stages:
        one = _one(stage)
        if one is None or (one.size > 1 and found.size > 1):
            return name_of(stage)
        if one != Batched():
            found = one
    return found


def _one(stage: Any) -> Batched | None:
    """What one stage does; None when that is not known."""
    if not isinstance(stage, wds.filters.FilterFunction):
        return None
    given = inspect.signature(stage.f).bind(None, *stage.args, **stage.kw)
    given.apply_defaults()
    options = given.arguments
    if any(isinstance(value, random.Random) for value in [*stage.args, *stage.kw.values()]):
        return None
    if stage.f is wds.batched.f:
        return Batched(options["batchsize"], bool(options["partial"]))
    strict = options.get("handler", wds.reraise_exception) in STRICT
    return Batched() if strict and stage.f in _FUNCTIONS else None


def name_of(stage: Any) -> str:
    """What to call a stage in messages.

    >>> name_of(wds.shuffle(100)), name_of(len), name_of(partial(sorted, reverse=True))
    ('shuffle', 'len', 'sorted')
    """
    if isinstance(stage, partial):
        return name_of(stage.func)
    if isinstance(stage, wds.filters.FilterFunction):
        return str(stage.f.__name__).lstrip("_")
    return str(getattr(stage, "__qualname__", type(stage).__name__))


def description(stages: Iterable[Any]) -> str:
    """Stages with their plain options: what can be told about an order.

    Args:
        stages: Stages of webdataset's and `functools.partial`s are told; other functions are renamed and moved, which
            is no other order.

    >>> description([wds.shuffle(100, seed=3), partial(sorted, key=len, reverse=True), len])
    'shuffle(100, seed=3), sorted(key=..., reverse=True), ...'
    """
    return ", ".join(map(_described, stages))


def _described(stage: Any) -> str:
    match stage:
        case wds.filters.FilterFunction():
            args, named = stage.args, stage.kw
        case partial():
            args, named = stage.args, stage.keywords
        case _:
            return "..."
    options = [plain(value) for value in args]
    options += [f"{name}={plain(value)}" for name, value in sorted(named.items())]
    return f"{name_of(stage)}({', '.join(options)})"


def plain(value: Any) -> str:
    """An option as text: numbers, text and containers of them; whatever else may be is the same text.

    >>> plain({"a": [1, 0.5, len]}), plain(random.Random(1))
    ("{'a': [1, 0.5, ...]}", 'random 0d344c5b4a37')
    """
    match value:
        case random.Random():
            return f"random {blake2b(repr(value.getstate()).encode(), digest_size=6).hexdigest()}"
        case Mapping():
            return f"{{{', '.join(f'{plain(key)}: {plain(held)}' for key, held in value.items())}}}"
        case list() | tuple():
            return f"[{', '.join(map(plain, value))}]"
        case bool() | int() | float() | str() | None:
            return repr(value)
    return "..."
