"""Fingerprints of datasets, and digests of values and of code: a checkpoint with other ones is refused."""

from __future__ import annotations

import itertools
import pickle
import types
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from headrace.webdatamodule._shared.digest import bytes_digest, text_digest

_ROWS = 64  # that are looked at; all of them would take as long as an epoch
_DEEP = 8  # levels of containers
_DIGITS = 12  # of a digest, which messages show
_VALUES = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (tuple, list, dict, set, frozenset)
_EMPTY = types.CellType()  # of a name that a function closes over before it is bound


def dataset_fingerprint(dataset: Any) -> str:
    """Stand for a dataset: its own `fingerprint`, else its length and what can be said of its samples.

    Of a list, an array, a tensor, a `TensorDataset` or a Hugging Face dataset these are samples at even distances, 64
    or a few more; of a `Subset` or `ConcatDataset` the indices and the datasets inside, and of one that wraps as many
    samples, its `dataset`, its class and that. Of any other dataset it is its class, and as many keys if it has
    `key(index)`: to read samples could be slow, and a random transform would give others each time.

    >>> dataset_fingerprint([1, 2, 3]) == dataset_fingerprint([1, 2, 3]) != dataset_fingerprint([1, 2, 4])
    True
    """
    if (own := own_fingerprint(dataset)) is not None:
        return own
    return _of_parts(dataset, len(dataset))


def prefix_fingerprint(dataset: Any, n_samples: int) -> str | None:
    """Stand for the first samples of a dataset, as if there were no others.

    A dataset with a `fingerprint` needs `prefix_fingerprint(n_samples)`, as `IndexedShards` has, which says it; None
    where it has none, or cannot say it.
    """
    if n_samples > len(dataset):
        return None
    if own_fingerprint(dataset) is not None:
        of = getattr(dataset, "prefix_fingerprint", None)
        found: str | None = of(n_samples) if callable(of) else None
        return found
    return _of_parts(dataset, n_samples)


def _of_parts(dataset: Any, n_samples: int) -> str:
    text = f"{n_samples} {digest(_dataset_in_parts(dataset, n_samples))}"
    return text_digest(text)


def own_fingerprint(thing: Any) -> str | None:
    """The `fingerprint` of a dataset, sampler or batch sampler; None where it has none, or a method of that name."""
    own = getattr(thing, "fingerprint", None)
    return None if own is None or callable(own) else str(own)


def _dataset_in_parts(dataset: Any, count: int) -> Any:
    """What can be said of its first `count` samples."""
    if isinstance(dataset, Subset):
        return "subset", dataset_fingerprint(dataset.dataset), np.asarray(dataset.indices)[:count]
    if isinstance(dataset, ConcatDataset):
        return ["concatenated", *_prints(dataset, count)]
    rows = range(0, count, max(1, count // _ROWS))
    chosen = [*rows, count - 1] if count else []
    if isinstance(dataset, TensorDataset):
        return [tensor[chosen] for tensor in dataset.tensors]
    if isinstance(dataset, np.ndarray | torch.Tensor):
        return dataset[chosen]
    if isinstance(dataset, list | tuple):
        return [plain_value(dataset[row]) for row in chosen]
    if hasattr(dataset, "with_format") and hasattr(dataset, "features"):  # of Hugging Face, without its transform
        return str(dataset.features), plain_value(dataset.with_format("arrow")[chosen].to_pylist())
    name: Any = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    if callable(key := getattr(dataset, "key", None)):
        name = name, [str(key(row)) for row in chosen]
    inner: Any = getattr(dataset, "dataset", None)
    if hasattr(inner, "__getitem__") and hasattr(inner, "__len__") and len(inner) == len(dataset):
        return name, dataset_fingerprint(inner) if count == len(inner) else prefix_fingerprint(inner, count)
    return name


def _prints(dataset: ConcatDataset[Any], count: int) -> Iterator[str | None]:
    """The fingerprints of the datasets that hold the first samples, the last one perhaps in part."""
    if count == len(dataset):
        yield from map(dataset_fingerprint, dataset.datasets)
        return
    for part in dataset.datasets:
        held = len(part)  # type: ignore[arg-type]  # of torch's, which declares no length
        yield dataset_fingerprint(part) if held <= count else prefix_fingerprint(part, count)
        count -= held
        if count <= 0:
            break


def plain_value(thing: Any, depth: int = 0) -> Any:
    """Values, containers and arrays as they are; of other objects their class and attributes, but no code."""
    if isinstance(thing, np.generic):
        return thing.item()
    if isinstance(thing, str | bytes | int | float | complex | np.ndarray | torch.Tensor | None):
        return thing
    if depth < _DEEP and isinstance(thing, Mapping):
        return {str(key): plain_value(value, depth + 1) for key, value in thing.items()}
    if depth < _DEEP and isinstance(thing, list | tuple):
        return [plain_value(value, depth + 1) for value in thing]
    name = type(thing).__qualname__
    held = getattr(thing, "__dict__", None)
    return [name, plain_value(held, depth + 1)] if held and depth < _DEEP else name


def digest(*things: Any) -> str:
    """Hash values, code and what they hold; the same in every process."""
    seen: dict[int, Any] = {}  # keeps what it holds, so that no identity is given out twice
    text = b"|".join(_described(thing, seen) for thing in things)
    return bytes_digest(text).hex()[:_DIGITS]


def _described(thing: Any, seen: dict[int, Any]) -> bytes:
    if isinstance(thing, _VALUES):
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
        if isinstance(one, _VALUES + _CONTAINERS)
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
        return name + f" {thing.dtype} {tuple(thing.shape)}".encode() + bytes_digest(_bytes(thing))
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
