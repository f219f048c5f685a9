"""NumPy arrays, scalars and dtypes out of a pickle, each made by numpy's own checked constructors.

``numpy.dtype.__setstate__`` and ``numpy.ndarray.__setstate__`` believe what a pickle says: a forged state
gives an object dtype that claims to hold no objects, and bytes after it become pointers. Neither is called.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import numpy as np

from headrace.webdatamodule.shards.decoding.allowed import AllowedGlobal, Placeholder, is_ints, require

_DTYPE = re.compile(r"[?biufcmMOSUV]\d{0,9}")
_ALIGNED = 0x80  # NPY_ALIGNED_STRUCT
_MOST_EMPTY = 1_000_000  # items that take no bytes: no data says how many there are
_Order = Literal["C", "F"]


def _dtype(name: object, _align: object = False, _copy: object = True) -> Placeholder:
    require(
        isinstance(name, str) and _DTYPE.fullmatch(name) is not None,
        "{} is not the name of a numpy dtype",
        name,
    )
    return Placeholder("numpy dtype", lambda state: finish_dtype(str(name), state))


def finish_dtype(name: str, state: Any) -> np.dtype[Any]:
    """Make a dtype from what its pickle says about it."""
    require(isinstance(state, tuple) and len(state) in (8, 9) and state[0] in (3, 4), "dtype state {}", state)
    _, order, sub, names, fields, itemsize, _, flags, *extra = state
    require(order in ("<", ">", "=", "|"), "dtype byte order {}", order)
    if sub is not None:
        made = _subarray(sub)
    elif names is not None:
        made = _structured(names, fields, itemsize, flags)
    else:
        made = _simple(name, order, extra[0] if extra else None)
    require(itemsize in (-1, made.itemsize), "dtype item size {} where {} has {}", itemsize, made, made.itemsize)
    meta = extra[0][0] if extra and isinstance(extra[0], tuple) else extra[0] if extra else None
    return np.dtype(made, metadata=meta) if isinstance(meta, dict) and meta else made


def _simple(name: str, order: str, extra: Any) -> np.dtype[Any]:
    if name[0] in "mM" and extra is not None:
        require(isinstance(extra, tuple) and len(extra) == 2, "datetime state {}", extra)
        name += _unit(extra[1])
    made: np.dtype[Any] = np.dtype(name)
    return made if order == "|" else made.newbyteorder(order)  # type: ignore[arg-type]  # checked by the caller


def _unit(unit: Any) -> str:
    require(isinstance(unit, tuple) and len(unit) == 4 and isinstance(unit[0], bytes | str), "time unit {}", unit)
    name, count, divisor, _events = unit
    text = name.decode("ascii") if isinstance(name, bytes) else name
    fits = text.isalpha() and type(count) is int and count > 0 and divisor == 1
    require(fits, "time unit {}", unit)
    return "" if text == "generic" else f"[{count}{text}]"


def _subarray(sub: Any) -> np.dtype[Any]:
    require(isinstance(sub, tuple) and len(sub) == 2 and isinstance(sub[0], np.dtype), "subarray dtype {}", sub)
    require(is_ints(sub[1]), "subarray shape {}", sub[1])
    return np.dtype((sub[0], sub[1]))


def _structured(names: Any, fields: Any, itemsize: Any, flags: Any) -> np.dtype[Any]:
    # Only text is hashed: hashing a tuple nested a million levels deep overflows the C stack.
    fits = isinstance(names, tuple) and all(type(name) is str for name in names) and type(fields) is dict
    require(fits and set(names) <= set(fields), "structured dtype without its fields")
    require(is_ints((itemsize, flags), -128), "structured dtype of size {} with flags {}", itemsize, flags)
    parts = [_field(fields[name]) for name in names]
    titles = [title for _, _, title in parts]
    require(set(fields) - set(names) <= set(titles), "structured dtype with fields that it does not name")
    spec = {"names": list(names), "formats": [kind for kind, _, _ in parts], "itemsize": itemsize}
    spec |= {"offsets": [offset for _, offset, _ in parts]} | ({"titles": titles} if any(titles) else {})
    return np.dtype(spec, align=bool(flags & _ALIGNED))  # type: ignore[call-overload, no-any-return]  # a dict of lists is right


def _field(field: Any) -> tuple[np.dtype[Any], int, str | None]:
    fits = isinstance(field, tuple) and len(field) in (2, 3) and isinstance(field[0], np.dtype)
    require(fits and is_ints(field[1:2]), "structured dtype with field {}", field)
    kind, offset, title = (*field, None)[:3]
    require(title is None or isinstance(title, str), "structured dtype with title {}", title)
    return kind, offset, title


def _checked(dtype: Any, shape: Any, data: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    require(isinstance(dtype, np.dtype) and dtype.subdtype is None, "array of dtype {}", dtype)
    require(is_ints(shape), "array shape {}", shape)
    check_empty(dtype, math.prod(shape))
    kinds = (list,) if dtype.hasobject else (bytes, bytearray)
    require(type(data) in kinds, "array of dtype {} with its data as {}", dtype, type(data).__name__)
    expected = math.prod(shape) * (1 if dtype.hasobject else dtype.itemsize)
    require(
        len(data) == expected,
        "array of shape {} and dtype {}: {} instead of {}",
        shape,
        dtype,
        len(data),
        expected,
    )
    return dtype, shape


def check_empty(dtype: np.dtype[Any], count: int) -> None:
    """Refuse an array of very many items without bytes: to copy or list it would take for ever."""
    require(dtype.itemsize > 0 or count <= _MOST_EMPTY, "array of {} items of dtype {}, without bytes", count, dtype)


def _reconstruct(cls: object, _shape: object, _kind: object) -> Placeholder:
    require(cls is NDARRAY, "numpy _reconstruct of {}: only numpy.ndarray itself is known", cls)
    return Placeholder("numpy array", finish_array)


def finish_array(state: Any) -> np.ndarray[Any, Any]:
    """Make an array from (version, shape, dtype, is Fortran order, bytes or list of objects)."""
    require(isinstance(state, tuple) and len(state) == 5 and state[0] == 1, "an array's state has five parts")
    _, shape, dtype, fortran, data = state
    dtype, shape = _checked(dtype, shape, data)
    order: _Order = "F" if fortran else "C"
    if dtype.hasobject:
        return _objects(shape, dtype, order, data)
    return np.ndarray(shape, dtype, buffer=data, order=order).copy(order="K")


def _objects(shape: tuple[int, ...], dtype: np.dtype[Any], order: _Order, data: list[Any]) -> np.ndarray[Any, Any]:
    flat: np.ndarray[Any, Any] = np.empty(len(data), dtype)
    for i, item in enumerate(data):  # slice assignment would look inside items that are sequences
        require(not isinstance(item, Placeholder), "an object array that holds itself is not supported")
        flat[i] = item
    return flat.reshape(shape).copy(order=order)  # the list is in C order whatever the array's is


def _frombuffer(data: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> np.ndarray[Any, Any]:
    dtype, shape = _checked(dtype, shape, data)
    require(not dtype.hasobject and order in ("C", "F", "K"), "array of dtype {} in order {}", dtype, order)
    require(axes is None or is_ints(axes), "axis order {}", axes)
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, buffer=data, order="F" if order == "F" else "C")
    return array.transpose(axes) if order == "K" and axes is not None else array


def _scalar(dtype: Any, data: Any = None) -> Any:
    dtype, _ = _checked(dtype, (), data)
    require(not dtype.hasobject, "numpy scalar of dtype {}", dtype)
    return np.ndarray((), dtype, buffer=data).copy()[()]


NDARRAY = AllowedGlobal("numpy.ndarray", lambda *_: require(False, "numpy.ndarray is not called from a pickle"))
NUMPY_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): NDARRAY,
    ("numpy", "dtype"): AllowedGlobal("numpy.dtype", _dtype),
}
for _core in ("numpy.core", "numpy._core"):  # numpy 2 moved them; either spelling is in files
    NUMPY_NAMES[f"{_core}.multiarray", "_reconstruct"] = AllowedGlobal(
        "numpy _reconstruct", _reconstruct, takes_names=True
    )
    NUMPY_NAMES[f"{_core}.multiarray", "scalar"] = AllowedGlobal("numpy scalar", _scalar)
    NUMPY_NAMES[f"{_core}.numeric", "_frombuffer"] = AllowedGlobal("numpy _frombuffer", _frombuffer)
# The classes of scalars load as values; nothing calls them.
NUMPY_NAMES |= {("numpy", np.dtype(code).type.__name__): np.dtype(code).type for code in "?bBhHiIlLqQefdgFDGSUVMm"}
NUMPY_NAMES["numpy", "bool_"] = np.bool_
