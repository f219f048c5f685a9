"""The same samples in other libraries' formats, for those that are installed."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Corpus = Sequence[tuple[str, Mapping[str, bytes]]]


def peers(corpus: Corpus, folder: Path) -> dict[str, Any]:
    """Write a corpus once for each library, and open it.

    Args:
        corpus: Pairs of a key and members.
        folder: Where to write; new.

    Returns:
        Datasets that can be iterated; those that read batches at random have `__getitems__`.
    """
    makers = {"datasets": arrow, "litdata": lit}
    return {name: make(corpus, folder / name) for name, make in makers.items() if find_spec(name)}


def arrow(corpus: Corpus, folder: Path) -> Any:
    """Hugging Face's datasets on an Arrow file, memory-mapped."""
    pyarrow, ipc = import_module("pyarrow"), import_module("pyarrow.ipc")
    folder.mkdir(parents=True)
    rows = [{"__key__": corpus[index][0], **corpus[index][1]} for index in range(len(corpus))]
    table = pyarrow.Table.from_pylist(rows)
    with ipc.new_stream(folder / "data.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=1000)
    return import_module("datasets").Dataset.from_file(str(folder / "data.arrow"))


def lit(corpus: Corpus, folder: Path) -> Any:
    """Chunks of litdata, of 64 MB."""
    folder.mkdir(parents=True)
    writer = import_module("litdata.streaming.writer").BinaryWriter(str(folder), chunk_bytes="64MB")
    for index in range(len(corpus)):
        key, members = corpus[index]
        writer[index] = {"__key__": key, **members}
    writer.done()
    writer.merge()
    return import_module("litdata").StreamingDataset(str(folder), shuffle=False)
