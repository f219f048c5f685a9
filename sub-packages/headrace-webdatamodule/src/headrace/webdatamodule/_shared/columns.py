"""Columns of Arrow, Hugging Face datasets, Parquet files, pandas and polars, read as arrays.

None of these libraries is a dependency: the user's code has imported the library of a column.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUMBERS = ("int", "uint", "float", "double", "halffloat")


def array_of_column(column: Any, name: str = "sizes") -> Any:
    """Convert a column of another library to an array; return any other value unchanged.

    Args:
        column: An Arrow array; a column of a Hugging Face dataset, also after ``select`` and ``shuffle``; a pair of a
            Parquet file, a folder or a list of them and the name of a column; or a pandas or polars Series. Copied only
            if its buffer is not a plain array of numbers.
        name: Name of the argument, for errors.

    Raises:
        ImportError: If a Parquet file is named and pyarrow is not installed.
        OSError: If the file cannot be read, or its name is a pattern.
        TypeError: If it is a table or a dataset instead of a column.
        ValueError: If the file has no such column, a folder contains no file, the dataset has a transform, which may
            change the column, or a masked array has masked values.
    """
    if is_parquet_column(column):
        column = _parquet_column(column[0], column[1], name)
    if isinstance(column, np.ma.MaskedArray):
        if (masked := np.flatnonzero(np.ma.getmaskarray(column).reshape(len(column), -1).any(axis=1))).size:
            raise ValueError(
                f"{name} must hold a value for each sample, got a masked array without one at index {masked[0]} "
                f"({masked.size} are masked): fill them with {name}.filled(...), or leave those samples out"
            )
        return column.data
    kind = type(column)
    library = kind.__module__.partition(".")[0]
    if library == "datasets" and hasattr(column, "column_name") and hasattr(_rooted(column)[0], "data"):
        return _dataset_column(column, name)
    if library in ("datasets", "pyarrow") and hasattr(column, "column_names"):  # users have modules of that name, too
        raise _no_column(column, name)
    if library == "pyarrow" and hasattr(column, "chunks"):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if library == "pyarrow":
        return column.to_numpy(zero_copy_only=False)
    return column.to_numpy() if library in ("pandas", "polars") and kind.__name__ == "Series" else column


def is_parquet_column(column: Any) -> bool:
    """Whether a value names a column of a Parquet file: a pair, in a config a list of FILE.parquet and the name."""
    if not isinstance(column, Sequence) or isinstance(column, str | bytes) or len(column) != 2:
        return False
    file, name = column
    return isinstance(name, str) and (isinstance(column, tuple) or str(file).endswith(".parquet"))


def _dataset_column(column: Any, name: str) -> NDArray[Any]:
    dataset, (outer, *inner) = _rooted(column)
    _refuse_transform(dataset, outer, name)
    if not hasattr(dataset, "_indices"):
        values = array_of_column(dataset.with_format("arrow")[outer][:])
        return np.asarray(values)
    stored = dataset.data.column(outer)
    for field in inner:
        stored = import_module("pyarrow.compute").struct_field(stored, field)
    return _in_rows(array_of_column(stored), dataset)


def list_lengths(dataset: Any, column: str) -> NDArray[np.int64]:
    """Return the length of each list in a column of a Hugging Face dataset, without reading the lists."""
    _refuse_transform(dataset, column, "sizes")
    lengths = import_module("pyarrow.compute").list_value_length(dataset.data.column(column))
    return _in_rows(np.asarray(array_of_column(lengths.fill_null(0)), np.int64), dataset)


def _in_rows(stored: NDArray[Any], dataset: Any) -> NDArray[Any]:
    """Return the values of a stored column in the order of the rows, after ``select`` and ``shuffle``."""
    # Arrow would take the rows one by one: 10 seconds for a million.
    return stored if dataset._indices is None else stored[array_of_column(dataset._indices.column(0))]


def _refuse_transform(dataset: Any, column: str, name: str) -> None:
    """Refuse a dataset whose samples may have other values than its columns."""
    if (getattr(dataset, "format", None) or {}).get("type") == "custom":
        raise ValueError(
            f"{name} must be those of the samples, got column {column!r} of a dataset with a transform, which may "
            f"change it: give dataset.with_format(None)[{column!r}] where the transform does not, else the sizes of "
            "what it returns, as an array"
        )


def _rooted(column: Any) -> tuple[Any, list[str]]:
    """The dataset of a column, and the path of names from the dataset to the column."""
    names: list[str] = []
    while hasattr(column, "column_name"):
        names.insert(0, column.column_name)
        column = column.source
    return column, names


def _parquet_column(path: Any, column: str, name: str) -> Any:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(f"{name} in Parquet files need pyarrow, to read {path}: pip install pyarrow") from error
    try:
        files = parquet.ParquetDataset(path)
    except FileNotFoundError as error:
        if "*" not in str(path):
            raise
        raise FileNotFoundError(f"{path} is a pattern, not a path: give the folder, or a list of files") from error
    names = files.schema.names
    if not files.files:
        raise ValueError(f"{path} holds no Parquet files: give the folder of them, or a list of files")
    if column not in names:
        raise ValueError(f"{path} has no column {column!r}, only {', '.join(map(repr, names))}")
    return parquet.read_table(path, columns=[column]).column(0)


def _no_column(table: Any, name: str) -> TypeError:
    kind = type(table)
    got = f"{name} must be one column, got a {kind.__module__}.{kind.__name__}"
    if isinstance(table, Mapping):
        return TypeError(f"{got} with the splits {', '.join(map(repr, table))}: give {name} of one of them")
    columns = table.column_names or []
    if not hasattr(table, "__len__"):
        return TypeError(f"{got}, a stream: it has no {name} beforehand; batch it with bucketed_batching")
    fields: Any = getattr(table, "features", None) or {field.name: field.type for field in getattr(table, "schema", ())}
    numbers = [
        column for column in columns if str(getattr(fields[column], "dtype", fields[column])).startswith(_NUMBERS)
    ]
    what = "table" if kind.__module__.startswith("pyarrow") else "dataset"
    message = f"{got} with {', '.join(map(repr, columns))}: "
    if numbers:
        return TypeError(f"{message}give {' or '.join(f'{what}[{column!r}]' for column in numbers)}")
    cure = f"add one, such as {what}.map(lambda row: {{'length': len(row[...])}})"
    return TypeError(f"{message}none holds numbers; {cure}")
