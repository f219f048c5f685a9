"""What a name in a pickle may stand for: harmless builtins, stand-ins for functions, and what the user allows."""

from __future__ import annotations

import builtins
import collections
import importlib
import reprlib
from collections.abc import Callable, Collection, Iterable
from operator import attrgetter
from types import FunctionType
from typing import Any, NoReturn, TypeAlias

from headrace.webdatamodule.shards.errors import UnsafePickleError


class AllowedGlobal:
    """Stands for a name in a pickle; only the unpickler can call it, through ``make``.

    The real functions (``numpy.ndarray``, ``torch.storage._load_from_bytes``) can be abused, so a pickle
    never holds them, not even as an argument to a class that the user allowed.
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


class Placeholder:
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
    """A tuple with globals in it: good as the arguments of a call, never as a value."""

    __slots__ = ()


class Memo(dict[int, Any]):
    """A pickle's memo that remembers where its placeholders lie, to replace them once they are finished."""

    def __setitem__(self, place: int, value: Any) -> None:
        if type(value) is Placeholder:
            value.places.append(place)
        super().__setitem__(place, value)


class _Short(reprlib.Repr):
    def repr_instance(self, x: Any, level: int) -> str:  # noqa: ARG002  # reprlib passes it
        # A hostile value's full repr may be longer than the memory.
        return repr(x) if isinstance(x, AllowedGlobal | Placeholder | type | FunctionType) else f"<{type(x).__name__}>"


short = _Short().repr


def require(holds: bool, message: str, *values: object) -> None:
    """Raise an :class:`UnsafePickleError` unless the condition holds."""
    if not holds:
        raise UnsafePickleError(message.format(*(v if isinstance(v, str) else short(v) for v in values)))


_STAND_INS = {AllowedGlobal, Placeholder, Arguments}


def check_values(values: Iterable[Any]) -> None:
    """Refuse what only stands in for something: it would pass for data."""
    if not _STAND_INS.isdisjoint(map(type, values)):
        _refuse(next(value for value in values if type(value) in _STAND_INS))


def _refuse(value: AllowedGlobal | Placeholder | Arguments) -> NoReturn:
    if isinstance(value, Placeholder):
        raise UnsafePickleError(f"the pickle has {value!r} as a value: an array cannot hold itself")
    name = (
        value if isinstance(value, AllowedGlobal) else next(item for item in value if isinstance(item, AllowedGlobal))
    )
    raise UnsafePickleError(f"the pickle has {name.name} itself as a value, which is not data: store its name as text")


def as_tuple(items: Iterable[Any]) -> tuple[Any, ...]:
    """A plain tuple of values, or :class:`Arguments` when globals are among them."""
    made = tuple(items)
    if _STAND_INS.isdisjoint(map(type, made)):
        return made
    check_values([item for item in made if type(item) is not AllowedGlobal])
    return Arguments(made)


def is_ints(value: object, least: int = 0) -> bool:
    """Whether the value is a tuple of plain integers, none below ``least``."""
    return isinstance(value, tuple) and all(type(item) is int and item >= least for item in value)


class AllowedClassError(ValueError):
    """An entry of allowed_classes is no class, function or name."""


AllowedClass: TypeAlias = type | Callable[..., Any] | str


class AllowedClasses:
    """Finds allowed names and remembers what they stood for."""

    def __init__(self, classes: Collection[AllowedClass]) -> None:
        if isinstance(classes, str):
            raise AllowedClassError(f"allowed_classes must be a list of classes or names, got the text {classes!r}")
        self._known: dict[str, Any] = dict(_entry(cls) for cls in classes)
        self._given: dict[int, Any] = {id(cls): cls for cls in self._known.values() if cls is not None}

    def find(self, module: str, name: str) -> Any:
        """The allowed object of that name; an UnsafePickleError when there is none."""
        full = f"{module}.{name}"
        if full not in self._known:
            raise UnsafePickleError(
                f"the pickle asks for {full}, which is not allowed by default. If you trust the author of the file, "
                f"pass allowed_classes=[{full!r}]"
            )
        if self._known[full] is None:
            self._known[full] = attrgetter(name)(importlib.import_module(module))
            self._given[id(self._known[full])] = self._known[full]
        return self._known[full]

    def holds(self, value: Any) -> bool:
        """Whether the value is one of the allowed objects itself."""
        return id(value) in self._given


def _entry(cls: AllowedClass) -> tuple[str, Any]:
    if isinstance(cls, str):
        if not all(part.isidentifier() for part in cls.split(".")) or "." not in cls:
            raise AllowedClassError(f"allowed_classes has {cls!r}; write a name as 'module.QualifiedName'")
        return cls, None
    names = getattr(cls, "__module__", None), getattr(cls, "__qualname__", None)
    if not all(isinstance(name, str) for name in names):
        raise AllowedClassError(f"allowed_classes has {cls!r}; give a class, a function or 'module.QualifiedName'")
    return f"{names[0]}.{names[1]}", cls


PLAIN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice)
FACTORIES = frozenset({*PLAIN[:-2], collections.OrderedDict, collections.Counter})
_LEAVES = frozenset({str, int, bytes, float, bool, complex, type(None)})
_MAX_KEY_DEPTH = 100
_MAX_KEY_PARTS = 10_000


def check_keys(keys: Iterable[object]) -> None:
    """Refuse keys so deeply nested that hashing them would overflow the C stack.

    ``tuple.__hash__`` recurses in C without a guard, so a tuple a million levels deep crashes the process
    when it becomes a key, and ``(t, t)`` repeated takes time 2 to the depth.
    """
    for key in keys:
        if type(key) not in _LEAVES:
            _check_key(key)


def _check_key(key: object) -> None:
    level, parts = [key], 0
    for _ in range(_MAX_KEY_DEPTH):
        level = [part for item in level if isinstance(item, tuple | frozenset) for part in item]
        parts += len(level)
        require(parts <= _MAX_KEY_PARTS, "a key or set element has more than {} parts", _MAX_KEY_PARTS)
        if not level:
            return
    require(False, "a key or set element is nested more than {} levels deep", _MAX_KEY_DEPTH)


def _set(items: list[Any] | tuple[Any, ...] = ()) -> set[Any]:
    require(type(items) in (list, tuple), "set() is only called on a list or a tuple")
    check_keys(items)
    return set(items)


def _bytearray(data: bytes | str = b"", encoding: str = "latin-1") -> bytearray:
    # An integer here would be a size, and a short pickle would fill the memory.
    return bytearray(data if type(data) is bytes else encode(data, encoding))


def encode(text: object, encoding: object) -> bytes:
    """``_codecs.encode`` as protocols 0 to 2 use it for bytes: text to latin-1, nothing else."""
    require(isinstance(text, str) and encoding in ("latin1", "latin-1"), "encode() is only for text to latin1")
    return str(text).encode("latin-1")


def _complex(real: float, imag: float) -> complex:
    require(type(real) is float and type(imag) is float, "complex() takes two floats")
    return complex(real, imag)


def _range(*args: int) -> range:
    require(all(type(arg) is int for arg in args), "range() takes integers")
    return range(*args)


def _slice(*args: Any) -> slice[Any, Any, Any]:
    require(all(type(arg) in _LEAVES for arg in args), "slice() takes numbers, text or None")
    return slice(*args)


def _ordered(pairs: list[Any] | tuple[Any, ...] = ()) -> collections.OrderedDict[Any, Any]:
    require(type(pairs) in (list, tuple), "OrderedDict() is only called on a list of pairs")
    require(all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs), "OrderedDict() takes pairs")
    check_keys(pair[0] for pair in pairs)
    return collections.OrderedDict(pairs)


def _deque(items: list[Any] | tuple[Any, ...] = (), maxlen: int | None = None) -> collections.deque[Any]:
    require(type(items) in (list, tuple), "deque() is only called on a list or a tuple")
    require(maxlen is None or type(maxlen) is int, "deque() takes an integer length")
    return collections.deque(items, maxlen)


def _counter(counts: dict[Any, int] | None = None) -> collections.Counter[Any]:
    require(counts is None or type(counts) is dict, "Counter() is only called on a dict")
    return collections.Counter(counts or {})


# Classes load as themselves; calling one goes through the function beside it.
CALLS: dict[type, Callable[..., Any]] = {
    set: _set,
    frozenset: lambda *items: frozenset(_set(*items)),
    bytes: lambda: b"",
    bytearray: _bytearray,
    complex: _complex,
    range: _range,
    slice: _slice,
    collections.OrderedDict: _ordered,
    collections.deque: _deque,
    collections.Counter: _counter,
}


def default_dict(factory: Any, trusted: bool) -> collections.defaultdict[Any, Any]:
    """``defaultdict(factory)`` where the factory is a builtin container or number, or trusted by the user."""
    plain = factory is None or (isinstance(factory, type) and factory in FACTORIES)
    require(
        plain or trusted,
        "defaultdict() takes a builtin class or an allowed one as its factory, not {}",
        factory,
    )
    return collections.defaultdict(factory)


BUILTIN_NAMES: dict[tuple[str, str], Any] = {
    **{("builtins", cls.__name__): cls for cls in PLAIN},
    ("builtins", "object"): object,
    ("builtins", "Ellipsis"): builtins.Ellipsis,
    ("builtins", "NotImplemented"): builtins.NotImplemented,
    **{("collections", cls.__name__): cls for cls in (collections.OrderedDict, collections.deque)},
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "Counter"): collections.Counter,
    ("_codecs", "encode"): AllowedGlobal("_codecs.encode", encode),
}
