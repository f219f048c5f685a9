"""The two ways in which torch writes storages to bytes, read without ``torch.load``."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Collection
from typing import Any

from headrace.webdatamodule.shards.decoding.capped import MAX_BYTES, Room, open_zip, room_of
from headrace.webdatamodule.shards.decoding.pickle_memory import Lines
from headrace.webdatamodule.shards.decoding.tokens import Token, need
from headrace.webdatamodule.shards.decoding.torch_pickle import make_storage, storage_type
from headrace.webdatamodule.shards.decoding.unpickler import Allowed, RestrictedUnpickler, checked_load
from headrace.webdatamodule.shards.errors import DecodeError

_HEAD = 1 << 14  # the five pickles have some 200 bytes
MAGIC = 0x1950A86A20F9469CFC6C
ITEM = {"float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4, "": 1}
ITEM |= {"float16": 2, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}


def parse_id(pid: Any) -> tuple[str, str, int]:
    """Take (dtype name, key, bytes) out of a storage's persistent id."""
    fits = isinstance(pid, tuple) and len(pid) in (5, 6) and pid[0] == "storage" and isinstance(pid[1], Token)
    need(fits, "persistent id {} is not that of a tensor's storage", pid)
    _, kind, key, _location, numel, *view = pid
    dtype = storage_type(kind.name)
    need(isinstance(key, str) and type(numel) is int and numel >= 0, "storage {} of {} elements", key, numel)
    need(not any(view), "a storage that is a view of another")
    if dtype is None:
        raise DecodeError(f"storage {key!r} has no known type")
    return dtype, key, numel * ITEM[dtype]


class _StorageUnpickler(RestrictedUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        # A storage in the head of a storage, and so on, could take time exponential in the length.
        known = module in ("torch", "torch.storage") and storage_type(name) is not None
        need(known, "a tensor's bytes ask for {}.{}, which is no storage", module, name)
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        return parse_id(pid)


def storage_from_bytes(data: bytes) -> Any:
    """Read one storage as ``pickle.dumps(tensor)`` holds it (torch's format before zip files).

    Args:
        data: Five pickles (magic number, version, machine, the storage's id, its key), the number of elements
            as a little-endian int64, the bytes.

    Returns:
        The storage, in main memory wherever it was saved from.

    Raises:
        UnsafePickleError: When the bytes are anything but one storage.
    """
    file = io.BytesIO(data[:_HEAD])
    magic, _version, machine = (_StorageUnpickler(file).load() for _ in range(3))
    need(magic == MAGIC and isinstance(machine, dict), "a tensor's bytes do not begin as torch writes them")
    found = _StorageUnpickler(file).load()
    keys = _StorageUnpickler(file).load()
    need(
        isinstance(found, tuple) and len(found) == 3 and keys == [found[1]],
        "a tensor's bytes hold no storage",
    )
    dtype, _, nbytes = found
    begin = file.tell() + 8
    numel, rest = int.from_bytes(data[begin - 8 : begin], "little"), memoryview(data)[begin:]
    need(numel * ITEM[dtype] == nbytes == len(rest), "a storage of {} bytes that holds {}", nbytes, len(rest))
    return make_storage(rest, dtype, "little" if machine.get("little_endian", True) else "big")


class _ZipUnpickler(RestrictedUnpickler):
    def __init__(
        self, data: bytes, allowed: Allowed, nbytes: int, archive: zipfile.ZipFile, folder: str, room: Room
    ) -> None:
        super().__init__(Lines(data, room), allowed, nbytes, room)
        self._archive, self._folder = archive, folder
        self._storages: dict[str, tuple[tuple[str, str, int], Any]] = {}
        names = archive.namelist()
        self._order = archive.read(f"{folder}byteorder").decode() if f"{folder}byteorder" in names else "little"

    def persistent_load(self, pid: Any) -> Any:
        asked = dtype, key, nbytes = parse_id(pid)
        if key not in self._storages:
            data = self._archive.read(f"{self._folder}data/{key}")
            need(len(data) == nbytes, "storage {} of {} bytes holds {}", key, nbytes, len(data))
            self._storages[key] = asked, make_storage(data, dtype, self._order)
        known, storage = self._storages[key]
        need(known == asked, "storage {} is asked for in two ways", key)
        return storage


def load_torch_zip(data: bytes, allowed_classes: Collection[Any] = (), max_bytes: int | Room = MAX_BYTES) -> Any:
    """Read what ``torch.save`` wrote: tensors and builtin containers, on the CPU.

    Args:
        data: A zip file with ``data.pkl`` and one entry per storage.
        allowed_classes: As for :func:`restricted_loads`.
        max_bytes: Most bytes that the zip file may unpack to.

    Returns:
        The saved object. Tensors that shared memory still do.

    Raises:
        DecodeError: When it is not such a file, or unpacks to more than ``max_bytes``.
        UnsafePickleError: When it holds anything else.
    """
    try:
        return _load_zip(data, Allowed(allowed_classes), room_of(max_bytes))
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, KeyError, EOFError) as error:
        raise DecodeError(f"this is no whole file of torch.save: {type(error).__name__}: {error}") from error


def _load_zip(data: bytes, allowed: Allowed, room: Room) -> Any:
    with open_zip(data, room) as archive:
        # A storage's bytes are unpacked, and then copied into it.
        room.take(max((entry.file_size for entry in archive.infolist()), default=0))
        pickles = [name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise DecodeError("a zip file without the one data.pkl that torch.save writes")
        folder = pickles[0].removesuffix("data.pkl")
        return checked_load(_ZipUnpickler(archive.read(pickles[0]), allowed, len(data), archive, folder, room))
