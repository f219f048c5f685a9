"""Every way to give sizes, read into one array of int64 or float64 and checked once."""

import gzip
import math
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset, Subset
from tqdm import tqdm

Number: TypeAlias = int | float
Vector: TypeAlias = NDArray[np.int64] | NDArray[np.float64]


def real_number(value: object, name: str) -> Number:
    """Turn a real number of any library into an int, exactly, or a float.

    Args:
        value: A number, or an array or tensor of one element.
        name: What to call it in an error.

    Raises:
        TypeError: If it is not a real number; a bool is none.
        ValueError: If it is NaN.

    >>> real_number(torch.tensor(3), "size"), real_number(np.float32(0.5), "size")
    (3, 0.5)
    """
    plain = value
    if (
        (isinstance(plain, torch.Tensor) and plain.numel() == 1)
        or isinstance(plain, np.generic)
        or (isinstance(plain, np.ndarray) and plain.size == 1)
    ):
        plain = plain.item()
    if isinstance(plain, bool) or not isinstance(plain, Real):
        raise TypeError(f"{name} must be a real number, got {value!r} of type {type(value).__name__}")
    if isinstance(plain, Integral):
        return int(plain)
    if math.isnan(number := float(plain)):
        raise ValueError(f"{name} is NaN, not a number; remove or replace it")
    return number


def size_vector(values: object, name: str) -> Vector:
    """Turn a 1-D array, tensor or sequence of sizes into an array; see ``number_vector``.

    Raises:
        ValueError: Also if a size is negative.
    """
    vector = number_vector(values, name)
    if (wrong := np.flatnonzero(vector < 0)).size:
        raise ValueError(
            f"{name} holds {wrong.size} negative sizes, the first is {vector[wrong[0]]} at index {wrong[0]}; "
            "a size must be a number from 0 on"
        )
    return vector


def number_vector(values: object, name: str) -> Vector:
    """Turn a 1-D array, tensor or sequence of real numbers into an int64 or float64 array.

    Raises:
        TypeError: If it is none of these, or its elements are not real numbers.
        ValueError: If it is not 1-D, holds a NaN or an integer beyond int64.

    >>> number_vector(torch.tensor([1, 2], dtype=torch.uint8), "sizes").dtype
    dtype('int64')
    """
    if isinstance(values, torch.Tensor):
        return _checked_vector(_tensor_to_array(values), name)
    if isinstance(values, np.ndarray):
        return _checked_vector(values, name)
    if isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray):
        return _checked_vector(_sequence_to_array(values, name), name)
    raise TypeError(f"{name} must be a 1-D tensor, array or sequence, got {type(values).__name__}")


def _sequence_to_array(values: Sequence[Any], name: str) -> NDArray[Any]:
    numbers = [real_number(value, f"{name}[{index}]") for index, value in enumerate(values)]
    whole = all(isinstance(number, int) for number in numbers)
    try:
        return np.array(numbers, dtype=np.int64 if whole else np.float64)
    except OverflowError:
        raise ValueError(f"{name} holds {max(numbers)}, beyond the 64-bit integers; use a larger unit") from None


def _tensor_to_array(tensor: torch.Tensor) -> NDArray[Any]:
    plain = tensor.detach().cpu()
    array: NDArray[Any] = (plain.double() if plain.is_floating_point() else plain).numpy()  # numpy has no bf16
    return array


def _checked_vector(array: NDArray[Any], name: str) -> Vector:
    if array.ndim != 1:
        raise ValueError(f"{name} must be 1-D, got shape {array.shape}; flatten it to one number an element")
    if array.dtype.kind in "iu":
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise ValueError(f"{name} holds {array.max()}, beyond the 64-bit integers; use a larger unit")
        return array.astype(np.int64, copy=False)
    if array.dtype.kind != "f":
        raise TypeError(f"{name} must hold integers or floats, got dtype {array.dtype}")
    if (wrong := np.flatnonzero(np.isnan(array))).size:
        raise ValueError(f"{name} holds {wrong.size} NaN, the first at index {wrong[0]}; remove or replace them")
    return array.astype(np.float64, copy=False)


SizeOf: TypeAlias = Callable[[Any], Any] | Mapping[Any, Any] | Sequence[Any] | NDArray[Any] | torch.Tensor

_ALLOWED = "a callable, a mapping, a sequence, a numpy array or a torch tensor"


def checked_size(value: object, noun: str, key: object) -> Number:
    """Check what ``sizeof`` gave for one element; infinity is a size that fits no budget.

    Args:
        value: The size as it came.
        noun: What kind of thing ``key`` is, for the error: ``"index"``, ``"the element at position"``.
        key: Names the element.

    Raises:
        TypeError: If it is not a real number.
        ValueError: If it is NaN or negative.
    """
    if (type(value) is int or type(value) is float) and value >= 0:  # the common case needs no name
        return value
    number = real_number(value, name := f"the size of {noun} {key}")
    if number < 0:
        raise ValueError(f"{name} is {number}; a size must be a number from 0 on")
    return number


def checked_budget(max_total_size: object) -> Number:
    """Check a budget; infinity means that everything fits.

    Raises:
        TypeError: If it is not a real number.
        ValueError: If it is NaN, zero or negative.

    >>> checked_budget(4096)
    4096
    """
    number = real_number(max_total_size, "max_total_size")
    if number <= 0:
        raise ValueError(f"max_total_size must be greater than 0, got {number}: nothing would fit")
    return number


def size_lookup(sizeof: SizeOf) -> Callable[[Any], Any]:
    """Turn ``sizeof`` into a function from an index, key or element to its size as it came.

    Arrays and tensors are checked here as a whole; everything else is to be checked value by value.

    Raises:
        TypeError: If ``sizeof`` is none of the forms allowed.
        ValueError: If it is an array or tensor that is not 1-D, or that holds NaN or negative sizes.

    >>> size_lookup({"a": 3})("a"), size_lookup([5, 7])(1), size_lookup(len)("four")
    (3, 7, 4)
    """
    if isinstance(sizeof, np.ndarray | torch.Tensor):
        return partial(_by_position, size_vector(sizeof, "sizeof"))
    if isinstance(sizeof, Mapping):
        return partial(_by_key, sizeof)
    if isinstance(sizeof, Sequence) and not isinstance(sizeof, str | bytes | bytearray):
        return partial(_by_index, sizeof)
    if callable(sizeof):
        return sizeof
    raise TypeError(f"sizeof must be {_ALLOWED}, got {type(sizeof).__name__}")


def size_array(sizeof: SizeOf, n: int, name: str = "sizeof") -> Vector:
    """Evaluate ``sizeof`` once for each of the indices 0 .. n - 1.

    A progress bar appears when a callable takes longer than a second.

    Args:
        sizeof: Any of the forms that the samplers take.
        n: How many.
        name: What to call it in an error.

    Returns:
        Shape ``[n]``, int64 when all sizes are integers, else float64.

    Raises:
        TypeError: If ``sizeof`` or one of the sizes is of the wrong type.
        ValueError: If there are not ``n`` sizes or one of them is NaN or negative.

    >>> size_array(lambda index: index * 10, 3)
    array([ 0, 10, 20])
    """
    lookup = size_lookup(sizeof)
    if isinstance(sizeof, np.ndarray | torch.Tensor | Sequence):
        if len(sizeof) != n:
            raise ValueError(f"{name} has {len(sizeof)} sizes for {n} elements; give one size for each")
        return size_vector(sizeof, name)
    bar = tqdm(range(n), desc="sizes", delay=1, leave=False)
    return size_vector([checked_size(lookup(index), "index", index) for index in bar], name)


def plain_index(key: Any) -> Any:
    """Turn an integer of any library into an int; leave every other key as it is."""
    return operator.index(key) if hasattr(key, "__index__") and getattr(key, "ndim", 0) == 0 else key


def _by_position(values: Vector, key: Any) -> Number:
    return values.item(_position(key, len(values)))  # faster than making a numpy scalar


def _by_index(values: Sequence[Any], key: Any) -> Any:
    return values[_position(key, len(values))]


def _position(key: Any, length: int) -> int:
    index = operator.index(key)
    if not 0 <= index < length:  # a negative one would count from the end, in silence
        raise IndexError(
            f"sizeof holds {length} sizes and was asked for index {index}; "
            "give one size for each index that the sampler or dataset yields"
        )
    return index


def _by_key(values: Mapping[Any, Any], key: Any) -> Any:
    try:
        return values[plain_index(key)]
    except KeyError:
        raise KeyError(f"sizeof has no size for {key!r}; add it to the mapping") from None


def read_sizes(sizes: Any) -> NDArray[Any]:
    """Turn sizes, or a dataset that knows them, into an array; small integers are not copied.

    Args:
        sizes: An array, tensor or sequence of shape ``[n]`` or ``[n, k]``, a mapping from each index to its size,
            or a dataset with an attribute ``sizes`` or a method ``num_tokens(index)``, which is called once a sample.

    Raises:
        TypeError: If it holds no numbers.
        ValueError: If a size is NaN, infinite or negative, or the shape is another one.
    """
    if not isinstance(sizes, np.ndarray | torch.Tensor):
        if hasattr(sizes, "num_tokens"):
            return size_array(sizes.num_tokens, len(sizes), "num_tokens")
        if hasattr(sizes, "sizes"):
            return sizes_of_dataset(sizes)
        if isinstance(sizes, ConcatDataset):
            return np.concatenate([read_sizes(dataset) for dataset in sizes.datasets])
        if isinstance(sizes, Subset):
            return read_sizes(sizes.dataset)[np.asarray(sizes.indices, np.int64)]
        if isinstance(sizes, Dataset):
            raise TypeError(
                f"sizes: got {type(sizes).__name__}, a dataset without sizes or num_tokens(index); give it one of "
                "them, or give the sizes as an array, such as [len(sample) for sample in dataset]"
            )
        if isinstance(sizes, Mapping):
            return size_array(sizes, len(sizes), "sizes")
    if isinstance(sizes, torch.Tensor):
        sizes = sizes.detach().to("cpu", torch.float64 if sizes.is_floating_point() else sizes.dtype).numpy()
    try:
        array = np.asarray(sizes)
    except ValueError as error:
        raise ValueError(f"sizes: expected numbers of shape [n] or [n, k]: {error}") from None
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iuf":
        raise TypeError(
            f"sizes: got {type(sizes).__name__} of {array.dtype}, expected numbers, or a dataset with sizes or "
            "num_tokens(index)"
        )
    if array.dtype.kind == "f":
        array = array.astype(np.float64, copy=False)
    if array.ndim not in (1, 2):
        raise ValueError(f"sizes: got shape {array.shape}, expected [n] or [n, k]")
    refuse_bad(array)
    return array.astype(np.int64) if array.dtype == np.uint64 else array


def sizes_of_dataset(dataset: Any) -> NDArray[Any]:
    """Return the sizes that a dataset knows, one for each of its samples."""
    sizes = read_sizes(dataset.sizes)
    if hasattr(dataset, "__len__") and len(dataset) != len(sizes):
        raise ValueError(f"sizes: {type(dataset).__name__} has {len(dataset)} samples, but {len(sizes)} sizes")
    return sizes


def any_column(flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which rows hold a true value, shape ``[n]``; flags of shape ``[n]`` are rows themselves."""
    return flags if flags.ndim == 1 else np.asarray(flags.any(axis=1))


def refuse_bad(array: NDArray[Any]) -> None:
    """Refuse NaN, infinite and negative sizes, and integers beyond 63 bits."""
    if array.size and not (array.min() >= 0 and array.max() < 2**62):
        bad = np.flatnonzero(any_column(~((array >= 0) & (array < 2**62))))
        raise ValueError(
            f"sizes: {len(bad)} of {len(array)} are negative, NaN or 2**62 and more, the first at index {bad[0]}: "
            f"{array[bad[0]]}"
        )


FASTA = (".fasta", ".fa", ".faa", ".fna")
ENDINGS = (".npy", ".txt", *FASTA, *(ending + ".gz" for ending in FASTA))


def sizes_of_files(paths: list[Path]) -> NDArray[Any]:
    """Read the sizes of several files, one after the other.

    Args:
        paths: Files as `sizes_of_file` takes them.

    Returns:
        Shape ``[n]``, or ``[n, k]`` where the files hold k sizes a sample.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If a file is damaged, holds no size, or files differ in their number of columns.
    """
    arrays = [sizes_of_file(path) for path in paths]
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1:
        found = ", ".join(f"{path}: {array.shape}" for path, array in zip(paths, arrays, strict=True))
        raise ValueError(f"the files differ in columns ({found}): give files of one kind")
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def sizes_of_file(path: Path) -> NDArray[Any]:
    """Read the sizes that a file holds; its ending says how.

    Args:
        path: ``.npy`` of shape ``[n]`` or ``[n, k]``; ``.txt`` with a number a line; or FASTA (``.fasta``, ``.fa``,
            ``.faa``, ``.fna``, each also with ``.gz``), where a size is the number of letters of a sequence.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is of another kind, damaged, holds no size, or one that is negative or no number.
    """
    name = path.name.lower()
    if not name.endswith(ENDINGS):
        raise ValueError(f"{path}: allowed endings are {', '.join(ENDINGS)}")
    read = from_npy if name.endswith(".npy") else from_text if name.endswith(".txt") else from_fasta
    try:
        sizes = read_sizes(read(path))
    except (EOFError, TypeError, ValueError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: {error}") from error
    if not len(sizes):
        raise ValueError(f"{path}: it holds no size")
    return sizes


def from_npy(path: Path) -> NDArray[Any]:
    """Read a numpy array; one that would run code when it is read is refused."""
    with path.open("rb") as file:
        if file.read(6) != b"\x93NUMPY":
            raise ValueError("it does not begin as a .npy file does; write it with numpy.save")
        file.seek(0)
        array: NDArray[Any] = np.load(file, allow_pickle=False)
    return array


def from_text(path: Path) -> NDArray[Any]:
    """Read one number a line; empty lines may only stand at the end."""
    try:
        lines = path.read_text(encoding="utf-8").rstrip().split("\n")
    except UnicodeDecodeError:
        raise ValueError("it is no text in UTF-8") from None
    if lines == [""]:
        return np.zeros(0, np.int64)
    return np.array([number(line, place) for place, line in enumerate(lines, 1)])


def number(line: str, place: int) -> int | float:
    """Read a line as an integer where it is one, else as a real number.

    >>> number("12", 1), number(" 1.5 ", 2)
    (12, 1.5)
    """
    try:
        return int(line)
    except ValueError:
        pass
    try:
        return float(line)
    except ValueError:
        raise ValueError(f"line {place}: got {line.strip()[:40]!r}, expected one number") from None


def from_fasta(path: Path) -> NDArray[np.int64]:
    """Count the letters of each sequence; white space does not count."""
    with opened(path) as lines:
        return np.fromiter(fasta_lengths(lines), np.int64)


def opened(path: Path) -> gzip.GzipFile | IO[bytes]:
    """Open a file that may be compressed with gzip."""
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")


def fasta_lengths(lines: Iterable[bytes]) -> Iterator[int]:
    """Yield the length of each sequence.

    >>> list(fasta_lengths([b">one", b"MK V", b"LA", b">two", b"G"]))
    [5, 1]
    """
    length = None
    for place, line in enumerate(lines, 1):
        if line.startswith(b">"):
            if length is not None:
                yield length
            length = 0
        elif letters := b"".join(line.split()):
            if length is None:
                raise ValueError(f"line {place}: letters before the first '>': it is no FASTA file")
            length += len(letters)
    if length is not None:
        yield length
