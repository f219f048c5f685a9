"""A restricted unpickler: data loads as it is, everything that could run code is refused.

The base is Python's own pure-Python unpickler, not the one in C. In C, one five-byte instruction can make the
memo allocate gigabytes, and the instructions that call functions or set state cannot be overridden. The price
is speed: long lists of Python objects load some 10 to 30 times slower; arrays and tensors are copied as a
whole either way.
"""

# What each instruction does, `pickletools` says.
# ruff: noqa: D102

from __future__ import annotations

import _compat_pickle
import collections
import copyreg
import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from headrace.webdatamodule.shards.decoding import numpy_pickle
from headrace.webdatamodule.shards.decoding.allowed import (
    BUILTIN_NAMES,
    CALLS,
    AllowedClasses,
    AllowedGlobal,
    Memo,
    Placeholder,
    as_tuple,
    check_keys,
    check_values,
    default_dict,
    require,
    short,
)
from headrace.webdatamodule.shards.decoding.limits import MemoryBudget, text_bytes
from headrace.webdatamodule.shards.errors import DecodeError, ShardError, UnsafePickleError

# Freeing one of these inside another recurses in C without a guard, and enough levels end the process. Numbers
# of them are simpler to bound than depths; object arrays crash below 5,000 levels, defaultdicts below 100,000.
_MOST = {np.ndarray: 1_000, collections.defaultdict: 10_000}
_LISTS = (list, collections.deque)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
# What an instruction makes at the most, with its places on the stack and in a container: an empty set has 216 bytes,
# the three instructions of a deque 760. And an item of a container that a call copies, or that is added to a set.
_PER_INSTRUCTION, _PER_ITEM = 256, 128
_SIZED = (list, tuple, dict, set, frozenset)
_LONGEST_NAME = 1000
_OBJECTS = "the objects of this pickle take"
_BASES = (dict, list, tuple, set, frozenset, int, float, complex, str, bytes)


class _ChargedDispatch(dict[int, Callable[..., None]]):
    """The handlers of instructions; each look-up is paid for."""

    def __init__(self, handlers: Mapping[int, Callable[..., None]], budget: MemoryBudget) -> None:
        super().__init__(handlers)
        self._budget = budget

    def __getitem__(self, code: int) -> Callable[..., None]:
        self._budget.reserve(_PER_INSTRUCTION, _OBJECTS)
        return super().__getitem__(code)


class RestrictedUnpickler(pickle._Unpickler):
    """Pickle's machine with a gate at every instruction that calls or changes an object.

    A byte of a pickle may make hundreds in memory, so each instruction and each argument of a call has a price. Pickles
    so short that they fit whatever they hold are not charged for instructions, which would take a fifth longer.
    """

    # The base class sets these; its stub does not name them.
    stack: list[Any]
    memo: dict[int, Any]
    proto: int
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]
    readline: Callable[[], bytes]
    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(pickle._Unpickler.dispatch)

    def __init__(
        self, file: io.BytesIO, allowed: AllowedClasses | None = None, budget: MemoryBudget | None = None
    ) -> None:
        super().__init__(file)
        self.memo = Memo()
        self._allowed = allowed or AllowedClasses(())
        self._budget = budget or MemoryBudget()
        nbytes = _length(file)
        self._budget.reserve(nbytes, "the bytes and texts of this pickle take")
        if _PER_INSTRUCTION * nbytes > self._budget.left:
            vars(self)["dispatch"] = _ChargedDispatch(type(self).dispatch, self._budget)
        self.placeholders: list[Placeholder] = []
        self._made = dict.fromkeys(_MOST, 0)

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for: a harmless class, a stand-in for a function, or what the user allowed."""
        length = len(module) + len(name)
        require(length <= _LONGEST_NAME, "the pickle has a name of {} characters", length)
        if self.proto < 3:
            module, name = _modern(module, name)
        for names in (BUILTIN_NAMES, numpy_pickle.NUMPY_NAMES):
            if (module, name) in names:
                return names[module, name]
        if (module, name) == ("copyreg", "_reconstructor"):
            return AllowedGlobal("copyreg._reconstructor", self._reconstructor)
        return self._allowed.find(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """Refuse: a persistent id means whatever its reader makes of it."""
        raise UnsafePickleError(f"the pickle has a persistent id, {short(pid)}, which has no meaning here")

    def get_extension(self, code: int) -> None:
        """Look an extension code up by its name; the base class would keep a cache past the gate."""
        registry: dict[int, tuple[str, str]] = copyreg._inverted_registry  # type: ignore[attr-defined]  # not in the stub
        require(code in registry, "the pickle has the extension code {}, which is not registered", code)
        self.append(self.find_class(*registry[code]))

    def _reconstructor(self, cls: Any, base: Any, state: Any) -> Any:
        require(self._allowed.holds(cls) and isinstance(cls, type), "the pickle makes a {}", cls)
        if base is object:
            return object.__new__(cls)
        require(base in _BASES and type(state) is base and issubclass(cls, base), "{} on top of {}", cls, base)
        made = base.__new__(cls, state)
        base.__init__(made, state)
        return made

    def _call(self, func: Any, args: Any, kwargs: Any, new: bool) -> Any:
        require(isinstance(args, tuple | list) and isinstance(kwargs, dict), "a call without a tuple of arguments")
        if not (isinstance(func, AllowedGlobal) and func.takes_names):
            check_values([args])
        if isinstance(func, AllowedGlobal):
            self._charge([*args, *kwargs.values()], func.cost(args) if func.cost else 0)
            made = func.make(*args, **kwargs)
            if isinstance(made, Placeholder):
                self.placeholders.append(made)
            return made
        if func is collections.defaultdict:
            factory = args[0] if args else None
            self._count(collections.defaultdict)
            return default_dict(factory, self._allowed.holds(factory))
        if isinstance(func, type) and func in CALLS:
            self._charge([*args, *kwargs.values()])
            return CALLS[func](*args, **kwargs)
        require(self._allowed.holds(func), "the pickle calls {}", func)
        return func.__new__(func, *args, **kwargs) if new else func(*args, **kwargs)

    def _charge(self, values: Iterable[Any], more: int = 0) -> None:
        for value in values:
            if isinstance(value, _SIZED):
                more += _PER_ITEM * len(value)
            elif isinstance(value, bytes | bytearray | str):
                more += len(value)
        self._budget.reserve(more, "what the calls of this pickle make takes")

    def _count(self, kind: type) -> None:
        self._made[kind] += 1
        fits = self._made[kind] <= _MOST[kind]
        require(fits, "the pickle has more than {} of {} (arrays: of dtype object)", _MOST[kind], kind)

    def _check_target(self, what: str, target: Any, kinds: tuple[type, ...] = ()) -> None:
        if type(target) not in kinds and not self._allowed.holds(type(target)):
            raise UnsafePickleError(f"the pickle {what} a {type(target).__qualname__}")

    def load_reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], args, {}, new=False)

    def load_newobj(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], args, {}, new=True)

    def load_newobj_ex(self) -> None:
        kwargs, args = self.stack.pop(), self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], args, kwargs, new=True)

    def _instantiate(self, klass: Any, args: list[Any]) -> None:
        # INST and OBJ of protocol 0 and 1 end here.
        self.append(self._call(klass, as_tuple(args), {}, new=False))

    def load_build(self) -> None:
        """Give an object its state: only dtypes, arrays, and objects of classes that the user allowed."""
        state, made = self.stack.pop(), self.stack[-1]
        check_values([state])
        if isinstance(made, Placeholder):
            self._finish(made, state)
        elif type(made) is collections.OrderedDict:
            require(type(state) is dict and state.keys() <= {"_metadata"}, "an OrderedDict with attributes")
            made.__dict__.update(state)  # torch's state_dict() carries this one
        else:
            self._check_target("sets the state of", made)
            _set_state(made, state)

    def _finish(self, placeholder: Placeholder, state: Any) -> None:
        self._charge(state if isinstance(state, tuple) else ())
        self.stack[-1] = made = placeholder.finish(state)
        placeholder.done = True
        if isinstance(made, np.ndarray) and made.dtype.hasobject:
            self._count(np.ndarray)
        for place in placeholder.places:
            if self.memo[place] is placeholder:
                self.memo[place] = made

    def load_list(self) -> None:
        items = self.pop_mark()
        check_values(items)
        self.append(items)

    def load_tuple(self) -> None:
        items = self.pop_mark()
        self.append(as_tuple(items))

    def load_tuple1(self) -> None:
        self.stack[-1] = as_tuple((self.stack[-1],))

    def load_tuple2(self) -> None:
        self.stack[-2:] = [as_tuple((self.stack[-2], self.stack[-1]))]

    def load_tuple3(self) -> None:
        self.stack[-3:] = [as_tuple((self.stack[-3], self.stack[-2], self.stack[-1]))]

    def load_append(self) -> None:
        item = self.stack.pop()
        self._extend(self.stack[-1], [item])

    def load_appends(self) -> None:
        items = self.pop_mark()
        self._extend(self.stack[-1], items)

    def _extend(self, target: Any, items: list[Any]) -> None:
        self._check_target("appends to", target, _LISTS)
        check_values(items)
        target.extend(items)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._put(self.stack[-1], items)

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._put(self.stack[-1], items)

    def _put(self, target: Any, items: list[Any]) -> None:
        self._check_target("sets items of", target, _DICTS)
        check_values(items)
        check_keys(items[::2])
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[key] = value

    def load_additems(self) -> None:
        items, target = self.pop_mark(), self.stack[-1]
        self._check_target("adds to", target, (set,))
        check_values(items)
        check_keys(items)
        for item in items:
            target.add(item)

    def load_frozenset(self) -> None:
        items = self.pop_mark()
        check_values(items)
        check_keys(items)
        self.append(frozenset(items))

    def load_bytearray8(self) -> None:
        """Make a bytearray; the base class would allocate the promised size before it reads."""
        nbytes = int.from_bytes(self.read(8), "little")
        self.append(bytearray(self.read(nbytes)))

    def load_short_binunicode(self) -> None:
        self._text(1)

    def load_binunicode(self) -> None:
        self._text(4)

    def load_binunicode8(self) -> None:
        self._text(8)

    def _text(self, width: int) -> None:
        data = self.read(int.from_bytes(self.read(width), "little"))
        self._budget.reserve(text_bytes(data), _OBJECTS)  # up to 4 bytes a character
        self.append(str(data, "utf-8", "surrogatepass"))

    def load_unicode(self) -> None:
        line = self.readline()[:-1]
        self._budget.reserve(4 * len(line), _OBJECTS)
        self.append(str(line, "raw-unicode-escape"))

    def load_next_buffer(self) -> None:
        raise UnsafePickleError("the pickle asks for buffers beside it")

    load_readonly_buffer = load_next_buffer


def _length(file: io.BytesIO) -> int:
    here = file.tell()  # getbuffer() would copy the bytes
    length = file.seek(0, io.SEEK_END)
    file.seek(here)
    return length


def _modern(module: str, name: str) -> tuple[str, str]:
    # Protocols 0 to 2 write Python 2's names.
    if (module, name) in _compat_pickle.NAME_MAPPING:
        return _compat_pickle.NAME_MAPPING[module, name]
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


def _set_state(made: Any, state: Any) -> None:
    custom = getattr(type(made), "__setstate__", None)
    if custom is not None:
        custom(made, state)
        return
    plain, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    for part in (plain, slots):
        names = part if isinstance(part, dict) else {} if part is None else None
        fits = names is not None and all(isinstance(name, str) and name[:2] != "__" for name in names)
        require(fits, "the state of a {} is not attributes with plain names", type(made).__qualname__)
    made.__dict__.update(plain) if plain else None
    for name, value in (slots or {}).items():
        setattr(made, name, value)


for _name, _load in vars(RestrictedUnpickler).items():
    if _name.startswith("load_"):
        RestrictedUnpickler.dispatch[getattr(pickle, _name.removeprefix("load_").upper())[0]] = _load


def checked_load(unpickler: RestrictedUnpickler) -> Any:
    """Run the unpickler; whatever a damaged or hostile pickle makes it raise becomes a DecodeError."""
    try:
        made = unpickler.load()
        for placeholder in unpickler.placeholders:
            require(placeholder.done, "the pickle leaves a {} as it is", placeholder)
    except ShardError:
        raise
    except Exception as error:
        raise DecodeError(f"the pickle cannot be read: {type(error).__name__}: {str(error)[:500]}") from error
    check_values([made])
    return made
