"""The builtin classes that a pickle may name, and the calls of them that it may make."""

from __future__ import annotations

import builtins
import collections
from collections.abc import Callable, Iterable
from typing import Any

from headrace.webdatamodule.shards.decoding.tokens import Token, need

PLAIN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice)
FACTORIES = frozenset({*PLAIN[:-2], collections.OrderedDict, collections.Counter})
_LEAVES = frozenset({str, int, bytes, float, bool, complex, type(None)})
_MAX_KEY_DEPTH = 100
_MAX_KEY_PARTS = 10_000


def check_keys(keys: Iterable[object]) -> None:
    """Refuse keys so deeply nested that hashing them would overflow the C stack.

    ``tuple.__hash__`` recurses in C without a guard, so a tuple a million levels deep crashes the process
    when it becomes a key, and ``(t, t)`` repeated takes time 2 to the depth.

    >>> check_keys(["a", (1, ("b", 2))])
    """
    for key in keys:
        if type(key) not in _LEAVES:
            _check_key(key)


def _check_key(key: object) -> None:
    level, parts = [key], 0
    for _ in range(_MAX_KEY_DEPTH):
        level = [part for item in level if isinstance(item, tuple | frozenset) for part in item]
        parts += len(level)
        need(parts <= _MAX_KEY_PARTS, "a key or set element has more than {} parts", _MAX_KEY_PARTS)
        if not level:
            return
    need(False, "a key or set element is nested more than {} levels deep", _MAX_KEY_DEPTH)


def _set(items: list[Any] | tuple[Any, ...] = ()) -> set[Any]:
    need(type(items) in (list, tuple), "set() is only called on a list or a tuple")
    check_keys(items)
    return set(items)


def _frozenset(items: list[Any] | tuple[Any, ...] = ()) -> frozenset[Any]:
    return frozenset(_set(items))


def _bytes() -> bytes:
    return b""


def _bytearray(data: bytes | str = b"", encoding: str = "latin-1") -> bytearray:
    # An integer here would be a size, and a short pickle would fill the memory.
    return bytearray(data if type(data) is bytes else encode(data, encoding))


def encode(text: object, encoding: object) -> bytes:
    r"""``_codecs.encode`` as protocols 0 to 2 use it for bytes: text to latin-1, nothing else.

    >>> encode("\xff", "latin1")
    b'\xff'
    """
    need(isinstance(text, str) and encoding in ("latin1", "latin-1"), "encode() is only for text to latin1")
    return str(text).encode("latin-1")


def _complex(real: float, imag: float) -> complex:
    need(type(real) is float and type(imag) is float, "complex() takes two floats")
    return complex(real, imag)


def _range(*args: int) -> range:
    need(all(type(arg) is int for arg in args), "range() takes integers")
    return range(*args)


def _slice(*args: Any) -> slice[Any, Any, Any]:
    need(all(type(arg) in _LEAVES for arg in args), "slice() takes numbers, text or None")
    return slice(*args)


def _pairs(pairs: list[Any] | tuple[Any, ...]) -> list[tuple[Any, Any]]:
    need(type(pairs) in (list, tuple), "OrderedDict() is only called on a list of pairs")
    need(all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs), "OrderedDict() takes pairs")
    check_keys(pair[0] for pair in pairs)
    return [(key, value) for key, value in pairs]


def _ordered(pairs: list[Any] | tuple[Any, ...] = ()) -> collections.OrderedDict[Any, Any]:
    return collections.OrderedDict(_pairs(pairs))


def _deque(items: list[Any] | tuple[Any, ...] = (), maxlen: int | None = None) -> collections.deque[Any]:
    need(type(items) in (list, tuple), "deque() is only called on a list or a tuple")
    need(maxlen is None or type(maxlen) is int, "deque() takes an integer length")
    return collections.deque(items, maxlen)


def _counter(counts: dict[Any, int] | None = None) -> collections.Counter[Any]:
    need(counts is None or type(counts) is dict, "Counter() is only called on a dict")
    return collections.Counter(counts or {})


# Classes load as themselves; calling one goes through the function beside it.
CALLS: dict[type, Callable[..., Any]] = {
    set: _set,
    frozenset: _frozenset,
    bytes: _bytes,
    bytearray: _bytearray,
    complex: _complex,
    range: _range,
    slice: _slice,
    collections.OrderedDict: _ordered,
    collections.deque: _deque,
    collections.Counter: _counter,
}


def default_dict(factory: Any, trusted: bool) -> collections.defaultdict[Any, Any]:
    """``defaultdict(factory)`` where the factory is a builtin container or number, or trusted by the user.

    >>> default_dict(list, trusted=False)
    defaultdict(<class 'list'>, {})
    """
    plain = factory is None or (isinstance(factory, type) and factory in FACTORIES)
    need(
        plain or trusted,
        "defaultdict() takes a builtin class or an allowed one as its factory, not {}",
        factory,
    )
    return collections.defaultdict(factory)


NAMES: dict[tuple[str, str], Any] = {
    **{("builtins", cls.__name__): cls for cls in PLAIN},
    ("builtins", "object"): object,
    ("builtins", "Ellipsis"): builtins.Ellipsis,
    ("builtins", "NotImplemented"): builtins.NotImplemented,
    **{("collections", cls.__name__): cls for cls in (collections.OrderedDict, collections.deque)},
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "Counter"): collections.Counter,
    ("_codecs", "encode"): Token("_codecs.encode", encode),
}
