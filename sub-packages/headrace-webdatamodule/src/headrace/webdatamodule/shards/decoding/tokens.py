"""What stands in for a function, a class or a half-made object while a pickle is read."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, NoReturn

from headrace.webdatamodule.shards.errors import UnsafePickleError


class Token:
    """Stands for a name in a pickle; only the unpickler can call it, through ``make``.

    The real functions (``numpy.ndarray``, ``torch.storage._load_from_bytes``) can be abused, so a pickle
    never holds them, not even as an argument to a class that the user allowed.

    Args:
        name: The name, for messages.
        make: Called in place of the real thing.
        cost: Bytes that a call copies, of its arguments; None counts the arguments themselves.
        takes_names: Whether tokens may be among the arguments.
    """

    __slots__ = ("cost", "make", "name", "takes_names")

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        *,
        cost: Callable[[Any], int] | None = None,
        takes_names: bool = False,
    ) -> None:
        self.name = name
        self.make = make
        self.cost = cost
        self.takes_names = takes_names

    def __repr__(self) -> str:
        return f"<{self.name} named in a pickle>"

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        """Refuse: a name out of a pickle is not a function."""
        raise UnsafePickleError(f"{self.name} came out of a pickle as a value and cannot be called")


class Seed:
    """An object that its pickle describes in two steps: a call, then a state."""

    __slots__ = ("done", "finish", "name", "places")

    def __init__(self, name: str, finish: Callable[[Any], Any]) -> None:
        self.name = name
        self.finish = finish
        self.places: list[int] = []  # of the memo
        self.done = False

    def __repr__(self) -> str:
        return f"<{self.name} without its state>"


class Arguments(tuple[Any, ...]):
    """A tuple with tokens in it: good as the arguments of a call, never as a value."""

    __slots__ = ()


class Memo(dict[int, Any]):
    """A pickle's memo that remembers where its seeds lie, to replace them once they are finished."""

    def __setitem__(self, place: int, value: Any) -> None:
        if type(value) is Seed:
            value.places.append(place)
        super().__setitem__(place, value)


class _Short(reprlib.Repr):
    def repr_instance(self, x: Any, level: int) -> str:  # noqa: ARG002  # reprlib passes it
        # A hostile value's full repr may be longer than the memory.
        return repr(x) if isinstance(x, Token | Seed | type | FunctionType) else f"<{type(x).__name__}>"


short = _Short().repr


def need(holds: bool, message: str, *values: object) -> None:
    """Raise an :class:`UnsafePickleError` unless the condition holds.

    Args:
        holds: The condition.
        message: What is wrong, with ``{}`` where the values go.
        values: Shown in short, and only when needed.

    >>> need(False, "{} is too large", 7)
    Traceback (most recent call last):
        ...
    headrace.webdatamodule.shards.errors.UnsafePickleError: 7 is too large
    """
    if not holds:
        raise UnsafePickleError(message.format(*(v if isinstance(v, str) else short(v) for v in values)))


_STAND_INS = {Token, Seed, Arguments}


def check_values(values: Iterable[Any]) -> None:
    """Refuse what only stands in for something: nobody would notice it among the data.

    >>> check_values([1, int, (2,)])
    """
    if not _STAND_INS.isdisjoint(map(type, values)):
        _refuse(next(value for value in values if type(value) in _STAND_INS))


def _refuse(value: Token | Seed | Arguments) -> NoReturn:
    if isinstance(value, Seed):
        raise UnsafePickleError(f"the pickle has {value!r} as a value: an array cannot hold itself")
    name = value if isinstance(value, Token) else next(item for item in value if isinstance(item, Token))
    raise UnsafePickleError(f"the pickle has {name.name} itself as a value, which is not data: store its name as text")


def as_tuple(items: Iterable[Any]) -> tuple[Any, ...]:
    """A plain tuple of values, or :class:`Arguments` when tokens are among them.

    >>> type(as_tuple([1, 2])), type(as_tuple([Token("f", len)]))
    (<class 'tuple'>, <class 'headrace.webdatamodule.shards.decoding.tokens.Arguments'>)
    """
    made = tuple(items)
    if _STAND_INS.isdisjoint(map(type, made)):
        return made
    check_values([item for item in made if type(item) is not Token])
    return Arguments(made)


def is_ints(value: object, least: int = 0) -> bool:
    """Whether the value is a tuple of plain integers, none below ``least``.

    >>> is_ints((2, 0)), is_ints((2, -1)), is_ints([2])
    (True, False, False)
    """
    return isinstance(value, tuple) and all(type(item) is int and item >= least for item in value)
