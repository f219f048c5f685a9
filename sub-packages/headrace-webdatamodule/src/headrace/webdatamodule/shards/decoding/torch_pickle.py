"""Tensors out of a pickle. Torch is imported when a pickle first names it.

``torch.load`` is not used. A tensor's bytes are read by the restricted unpickler, and its size and strides
are checked against them: ``Tensor.set_`` would quietly enlarge the storage over foreign memory.
"""

from __future__ import annotations

import io
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.webdatamodule.shards.decoding.allowed import AllowedClasses, AllowedGlobal, is_ints, require
from headrace.webdatamodule.shards.decoding.limits import MemoryBudget, open_zip
from headrace.webdatamodule.shards.decoding.unpickler import RestrictedUnpickler, checked_load
from headrace.webdatamodule.shards.errors import DecodeError

if TYPE_CHECKING:
    import torch

# The dtype that each class of storages holds, "" for bytes without one, and the bytes of an item.
STORAGES = {
    "DoubleStorage": ("float64", 8),
    "FloatStorage": ("float32", 4),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1),
    "ComplexDoubleStorage": ("complex128", 16),
    "ComplexFloatStorage": ("complex64", 8),
    "UntypedStorage": ("", 1),
}
ITEM_BYTES = dict(STORAGES.values())
_HEAD_BYTES = 1 << 14  # the five pickles have some 200 bytes
_MAGIC = 0x1950A86A20F9469CFC6C
_LAYOUTS = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")


def make_storage(data: bytes | memoryview, dtype: str, byteorder: str = "little") -> Any:
    """Make a storage that owns a copy of the bytes."""
    import torch

    require(byteorder == sys.byteorder, "a tensor saved on a {}-endian machine", byteorder)
    owner = torch.empty(len(data), dtype=torch.uint8)
    if data:
        owner.numpy()[:] = np.frombuffer(data, np.uint8)
    untyped = owner.untyped_storage()
    if not dtype:
        return untyped
    classes: Any = torch.storage  # carries no type information
    return classes.TypedStorage(wrap_storage=untyped, dtype=getattr(torch, dtype), _internal=True)


def check_extent(nbytes: int, itemsize: int, offset: Any, size: Any, stride: Any) -> None:
    """Refuse a view that reaches outside its storage."""
    size, stride = (tuple(item) if isinstance(item, tuple) else item for item in (size, stride))
    fits = type(offset) is int and offset >= 0 and is_ints(size) and is_ints(stride) and len(size) == len(stride)
    require(fits, "a tensor of size {}, stride {} and offset {}", size, stride, offset)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else offset - 1
    inside = (last + 1) * itemsize <= nbytes
    require(
        inside,
        "a tensor of size {}, stride {} and offset {} reaches past its {} bytes",
        size,
        stride,
        offset,
        nbytes,
    )


def _view(storage: Any, dtype: torch.dtype, offset: Any, size: Any, stride: Any) -> torch.Tensor:
    import torch

    untyped = storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage
    require(untyped.device.type == "cpu", "a tensor's storage is not in memory")
    check_extent(untyped.nbytes(), dtype.itemsize, offset, size, stride)
    return torch.empty(0, dtype=dtype).set_(untyped, offset, size, stride)


def _finish(tensor: torch.Tensor, grad: Any, hooks: Any, metadata: Any) -> torch.Tensor:
    from torch import _utils

    utils: Any = _utils  # carries no type information
    require(type(grad) is bool, "requires_grad {}", grad)
    require(isinstance(hooks, dict) and not hooks, "a tensor with hooks")
    if metadata is not None:
        fits = type(metadata) is dict and metadata.keys() <= {"conj", "neg"}
        require(fits and all(type(value) is bool for value in metadata.values()), "tensor metadata {}", metadata)
        require(tensor.is_complex() or not metadata.get("conj"), "a conjugate view of real numbers")
        utils.set_tensor_metadata(tensor, metadata)
    return tensor.requires_grad_(grad)


def _tensor_v2(storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, metadata: Any = None) -> Any:
    import torch

    require(isinstance(storage, torch.TypedStorage), "a tensor without a storage")
    return _finish(_view(storage, storage.dtype, offset, size, stride), grad, hooks, metadata)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> Any:
    import torch

    require(
        isinstance(storage, torch.UntypedStorage) and isinstance(dtype, torch.dtype),
        "a tensor without a storage",
    )
    return _finish(_view(storage, dtype, offset, size, stride), grad, hooks, metadata)


def _parameter(data: Any, grad: Any, hooks: Any) -> Any:
    import torch

    require(isinstance(data, torch.Tensor) and type(grad) is bool, "a parameter without a tensor")
    require(isinstance(hooks, dict) and not hooks, "a parameter with hooks")
    return torch.nn.Parameter(data, grad)


def _sparse(layout: Any, data: Any) -> Any:
    import torch

    fits = layout in _LAYOUTS and isinstance(data, tuple)
    fits = fits and all(isinstance(part, torch.Tensor | tuple | list | bool) for part in data)
    require(fits, "a sparse tensor of layout {}", layout)
    # Without the check, indices outside the tensor are memory outside it.
    if layout == "sparse_coo":
        indices, values, size, *coalesced = data
        made = torch.sparse_coo_tensor(indices, values, size, check_invariants=True)
        return made.coalesce() if coalesced and coalesced[0] else made
    outer, inner, values, size = data
    kind = getattr(torch, layout)
    return torch.sparse_compressed_tensor(outer, inner, values, size, layout=kind, check_invariants=True)


def _sparse_cost(args: Any) -> int:
    # Coalescing copies; checking the invariants of an expanded tensor reads what no memory holds.
    import torch

    parts = [part for data in args if isinstance(data, tuple) for part in data]
    return sum(part.numel() * part.element_size() for part in parts if isinstance(part, torch.Tensor))


def _layout(name: object) -> str:
    # Not str(name) of anything: the text of a hostile value may be longer than the memory.
    text = name.removeprefix("torch.") if isinstance(name, str) else ""
    require(text in _LAYOUTS, "tensor layout {}", name)
    return text


def _size(dims: Any = ()) -> Any:
    import torch

    require(is_ints(tuple(dims) if type(dims) in (tuple, list) else None), "torch.Size of {}", dims)
    return torch.Size(dims)


def _device(kind: Any, index: Any = None) -> Any:
    import torch

    require(
        isinstance(kind, str) and (index is None or type(index) is int),
        "torch.device of {}, {}",
        kind,
        index,
    )
    return torch.device(str(kind)) if index is None else torch.device(str(kind), index)


TORCH_NAMES: dict[tuple[str, str], AllowedGlobal] = {}
for _module, _name, _make in (
    ("torch.storage", "_load_from_bytes", lambda data: storage_from_bytes(data)),
    ("torch._utils", "_rebuild_tensor_v2", _tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3", _tensor_v3),
    ("torch._utils", "_rebuild_parameter", _parameter),
    ("torch._utils", "_rebuild_sparse_tensor", _sparse),
    ("torch.serialization", "_get_layout", _layout),
    ("torch", "Size", _size),
    ("torch", "device", _device),
):
    _cost = _sparse_cost if _make is _sparse else None
    TORCH_NAMES[_module, _name] = AllowedGlobal(f"{_module}.{_name}", _make, cost=_cost)
for _name in STORAGES:
    for _module in ("torch", "torch.storage"):
        TORCH_NAMES[_module, _name] = AllowedGlobal(
            _name, lambda *_: require(False, "a storage is not called from a pickle")
        )


def find(module: str, name: str) -> Any:
    """What a name of torch stands for, None when it is not known."""
    if (module, name) in TORCH_NAMES:
        return TORCH_NAMES[module, name]
    if module != "torch" or not name.replace("_", "").isalnum():
        return None
    import torch

    value = vars(torch).get(name)
    return value if isinstance(value, torch.dtype) else None


def parse_id(pid: Any) -> tuple[str, str, int]:
    """Take (dtype name, key, bytes) out of a storage's persistent id."""
    fits = isinstance(pid, tuple) and len(pid) in (5, 6) and pid[0] == "storage" and isinstance(pid[1], AllowedGlobal)
    require(fits, "persistent id {} is not that of a tensor's storage", pid)
    _, kind, key, _location, numel, *view = pid
    require(isinstance(key, str) and type(numel) is int and numel >= 0, "storage {} of {} elements", key, numel)
    require(not any(view), "a storage that is a view of another")
    if kind.name not in STORAGES:
        raise DecodeError(f"storage {key!r} has no known type")
    dtype, nbytes = STORAGES[kind.name]
    return dtype, key, numel * nbytes


class TorchUnpickler(RestrictedUnpickler):
    """The restricted unpickler that knows torch's names as well."""

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for: see `RestrictedUnpickler`."""
        found = find(module, name) if module.partition(".")[0] == "torch" else None
        return found if found is not None else super().find_class(module, name)


class _StorageUnpickler(TorchUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        # A storage in the head of a storage, and so on, could take time exponential in the length.
        known = module in ("torch", "torch.storage") and name in STORAGES
        require(known, "a tensor's bytes ask for {}.{}, which is no storage", module, name)
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        return parse_id(pid)


def storage_from_bytes(data: bytes) -> Any:
    """Read one storage as ``pickle.dumps(tensor)`` holds it (torch's format before zip files)."""
    require(type(data) is bytes, "a storage without bytes")
    file = io.BytesIO(data[:_HEAD_BYTES])
    magic, _version, machine = (_StorageUnpickler(file).load() for _ in range(3))
    require(magic == _MAGIC and isinstance(machine, dict), "a tensor's bytes do not begin as torch writes them")
    found = _StorageUnpickler(file).load()
    keys = _StorageUnpickler(file).load()
    require(
        isinstance(found, tuple) and len(found) == 3 and keys == [found[1]],
        "a tensor's bytes hold no storage",
    )
    dtype, _, nbytes = found
    begin = file.tell() + 8
    numel, rest = int.from_bytes(data[begin - 8 : begin], "little"), memoryview(data)[begin:]
    require(numel * ITEM_BYTES[dtype] == nbytes == len(rest), "a storage of {} bytes that holds {}", nbytes, len(rest))
    return make_storage(rest, dtype, "little" if machine.get("little_endian", True) else "big")


class _ZipUnpickler(TorchUnpickler):
    def __init__(
        self, data: bytes, allowed: AllowedClasses, budget: MemoryBudget, archive: zipfile.ZipFile, folder: str
    ) -> None:
        super().__init__(io.BytesIO(data), allowed, budget)
        self._archive, self._folder = archive, folder
        self._storages: dict[str, tuple[tuple[str, str, int], Any]] = {}
        names = archive.namelist()
        self._order = archive.read(f"{folder}byteorder").decode() if f"{folder}byteorder" in names else "little"

    def persistent_load(self, pid: Any) -> Any:
        asked = dtype, key, nbytes = parse_id(pid)
        if key not in self._storages:
            data = self._archive.read(f"{self._folder}data/{key}")
            require(len(data) == nbytes, "storage {} of {} bytes holds {}", key, nbytes, len(data))
            self._storages[key] = asked, make_storage(data, dtype, self._order)
        known, storage = self._storages[key]
        require(known == asked, "storage {} is asked for in two ways", key)
        return storage


def load_torch_zip(data: bytes, allowed: AllowedClasses, budget: MemoryBudget) -> Any:
    """Read what ``torch.save`` wrote: tensors and builtin containers, on the CPU."""
    with open_zip(data, budget) as archive:
        # A storage's bytes are unpacked, and then copied into it.
        budget.reserve(max((entry.file_size for entry in archive.infolist()), default=0))
        pickles = [name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise DecodeError("a zip file without the one data.pkl that torch.save writes")
        folder = pickles[0].removesuffix("data.pkl")
        return checked_load(_ZipUnpickler(archive.read(pickles[0]), allowed, budget, archive, folder))
