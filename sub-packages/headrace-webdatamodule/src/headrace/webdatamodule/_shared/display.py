"""How objects show themselves: as text that never raises."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import wraps
from itertools import islice
from typing import Any, TypeVar

Shown = TypeVar("Shown")

_PLAIN = bool | int | float | str | None
_PARTS, _LETTERS_OF_A_VALUE = 8, 60  # of values that are shown themselves


def never_raises(show: Callable[[Shown], str]) -> Callable[[Shown], str]:
    """Let a ``__repr__`` name the class alone where the object is half-made or closed.

    >>> class Half:
    ...     @never_raises
    ...     def __repr__(self):
    ...         return f"Half({self.missing})"
    >>> Half()
    <Half, not complete>
    """

    @wraps(show)
    def shown(self: Shown) -> str:
        try:
            return show(self)
        except Exception:
            return f"<{type(self).__name__}, not complete>"

    return shown


def counted(count: int, noun: str) -> str:
    """Return a number of things in words.

    >>> counted(1, "rank"), counted(1200, "micro-batch")
    ('1 rank', '1,200 micro-batches')
    """
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def described(value: object) -> str:
    """Name a value that a user gave: a short plain one as it is, a function by its name, others as `kind_of` does.

    >>> described(3.5), described({"labels": -100}), described(len), described(range(1000))
    ('3.5', "{'labels': -100}", 'len', 'range of 1,000')
    """
    parts: Sequence[object] = [value]
    if isinstance(value, dict):
        parts = [one for pair in islice(value.items(), _PARTS) for one in pair]
    elif isinstance(value, tuple | list):
        parts = value[:_PARTS]
    if all(isinstance(part, _PLAIN) for part in parts):
        text = repr(value)
        if len(text) <= _LETTERS_OF_A_VALUE:
            return text
    name = getattr(value, "__name__", None) if callable(value) else None
    return name if isinstance(name, str) else kind_of(value)


def kind_of(value: object) -> str:
    """Name the class of a value and its length, if it has one: its own ``repr`` may be as long as a dataset."""
    try:
        return f"{type(value).__name__} of {len(value):,}"  # type: ignore[arg-type]  # caught where it has no length
    except Exception:
        return type(value).__name__


def inner(value: object) -> str:
    """Name an object inside another one: by its ``repr`` where that is ours, else by its class; its length may cost."""
    own = (getattr(type(value).__repr__, "__module__", None) or "").startswith("headrace.")
    return repr(value) if own else kind_of(value) if isinstance(value, list | tuple) else type(value).__name__


def shape_of(value: Any) -> str:
    """Name the shape of an array or tensor, or of those in a tuple, list or dict.

    >>> shape_of({"ids": [None, 3]})
    '{ids: [None, int]}'
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {shape_of(one)}' for name, one in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(shape_of, value[:4]))}{', ...' if len(value) > 4 else ''}]"
    shape = getattr(value, "shape", None)
    if shape is None:
        return "None" if value is None else type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {[*shape]}"


def options_of(made: Any) -> str:
    """Return the class of a dataclass and the fields that differ from their defaults.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Options:
    ...     size: int
    ...     shuffle: bool = True
    >>> options_of(Options(3))
    'Options(size=3)'
    """
    shown = []
    for field in fields(made):
        value = getattr(made, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.repr and (value is not default and (type(value) is not type(default) or value != default)):
            shown.append(f"{field.name}={described(value)}")
    return f"{type(made).__name__}({', '.join(shown)})"
