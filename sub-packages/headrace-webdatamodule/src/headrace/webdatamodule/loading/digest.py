"""A digest of values and of code, so that a function that changed is noticed."""

from __future__ import annotations

import hashlib
import itertools
import pickle
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from headrace.webdatamodule.shards.index.manifest import DERIVED

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (tuple, list, dict, set, frozenset)
_EMPTY = types.CellType()  # of a name that a function closes over before it is bound


def column_name(function: Callable[[Any], Any], *reading: Any) -> str:
    """The name of the column that keeps a function's results; another one when its code changes.

    Its code is that of the function, of functions of the same module that it names, their constants, defaults, what
    they close over, and the plain values, containers and arrays that they find in the module; of an object also the
    methods of its class and what it holds. What it calls elsewhere does not count. A function that changes such a
    container itself is another one afterwards. `reading` is what else decides what it gets, such as a decoder.
    """
    called = getattr(function, "__name__", type(function).__name__)
    plain = "".join(letter if letter.isalnum() or letter == "_" else "" for letter in called)[:40]
    return f"{DERIVED}{plain}-{digest(function, *reading)}"


def digest(*things: Any) -> str:
    """Hash values, code and what they hold; the same in every process."""
    seen: dict[int, Any] = {}  # keeps what it holds, so that no identity is given out twice
    text = b"|".join(_described(thing, seen) for thing in things)
    return hashlib.blake2b(text, digest_size=6).hexdigest()


def _described(thing: Any, seen: dict[int, Any]) -> bytes:
    if isinstance(thing, _PLAIN):
        return f"{type(thing).__name__} {thing!r}".encode("utf-8", "surrogatepass")
    if id(thing) in seen:
        return b"again"
    seen[id(thing)] = thing
    if isinstance(thing, types.BuiltinFunctionType | type):
        return f"{thing.__module__}.{thing.__qualname__}".encode()
    if isinstance(thing, set | frozenset):  # whose order is another one in each process
        return b"set " + b"|".join(sorted(_described(one, {}) for one in thing))
    parts = _parts(thing)
    if parts is not None:
        return b"(" + b"|".join(_described(part, seen) for part in parts) + b")"
    return _object(thing, seen)


def _parts(thing: Any) -> tuple[Any, ...] | None:
    """The parts of a thing; None when it is described as a whole."""
    if isinstance(thing, partial):
        return thing.func, thing.args, thing.keywords
    if isinstance(thing, types.MethodType):
        return thing.__func__, thing.__self__
    if not isinstance(thing, types.FunctionType) and hasattr(thing, "__wrapped__"):  # such as of lru_cache
        return (thing.__wrapped__,)
    if isinstance(thing, types.FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or () if cell != _EMPTY]
        return thing.__code__, thing.__defaults__, thing.__kwdefaults__, tuple(cells), _named(thing)
    if isinstance(thing, types.CodeType):
        return thing.co_code, thing.co_names, thing.co_consts
    if isinstance(thing, dict):
        return tuple(part for pair in thing.items() for part in pair)
    return tuple(thing) if type(thing) in (tuple, list) else None


def _named(function: types.FunctionType) -> tuple[Any, ...]:
    """The objects that a function finds by name in its module: values, containers, and functions defined there."""
    found = [function.__globals__.get(name) for name in _names(function.__code__)]
    own = function.__module__
    return tuple(
        one
        for one in found
        if isinstance(one, _PLAIN + _CONTAINERS)
        or _is_array(one)
        or (callable(one) and not isinstance(one, type) and getattr(one, "__module__", None) == own)
    )


def _names(code: types.CodeType) -> list[str]:
    """The names that code uses, and the code inside it: comprehensions and lambdas."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return [*code.co_names, *itertools.chain(*inner)]


def _object(thing: Any, seen: dict[int, Any]) -> bytes:
    """A thing of some class: its name, its code and its attributes."""
    kind = type(thing)
    name = f"{kind.__module__}.{kind.__qualname__}".encode()
    if _is_array(thing):
        return name + f" {thing.dtype} {tuple(thing.shape)}".encode() + hashlib.blake2b(_bytes(thing)).digest()
    state = getattr(thing, "__dict__", None)
    if isinstance(state, dict):
        methods = [one for one in kind.__dict__.values() if isinstance(one, types.FunctionType)]
        return b"|".join([name, _described(state, seen), *(_described(method, seen) for method in methods)])
    try:
        return pickle.dumps(thing, protocol=5)
    except Exception:
        return name


def _is_array(thing: Any) -> bool:
    if isinstance(thing, torch.Tensor):
        return thing.layout == torch.strided and not thing.is_quantized and not thing.is_meta
    return isinstance(thing, np.ndarray) and not thing.dtype.hasobject


def _bytes(array: Any) -> bytes:
    if isinstance(array, torch.Tensor):  # numpy does not know all of torch's types
        whole = array.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
        array = whole.view(torch.uint8).numpy()
    data: bytes = array.tobytes()
    return data
