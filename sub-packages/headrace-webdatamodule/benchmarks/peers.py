"""The same samples in other libraries' formats, for those that are installed."""

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
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
    makers = {"datasets": arrow, "litdata": lit, "LMDB": Lmdb}
    return {name: make(corpus, folder / name) for name, make in makers.items() if find_spec(name.lower())}


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


class Lmdb:
    """A database of pickled samples, which workers get by being forked; nothing is verified."""

    def __init__(self, corpus: Corpus, folder: Path) -> None:
        folder.mkdir(parents=True)
        with (
            import_module("lmdb").open(str(folder), map_size=1 << 31) as database,
            database.begin(write=True) as writing,
        ):
            for index in range(len(corpus)):
                key, members = corpus[index]
                writing.put(b"%08d" % index, pickle.dumps({"__key__": key, **members}), append=True)
        self._reading = import_module("lmdb").open(str(folder), readonly=True, lock=False, readahead=False).begin()
        self._reads_json = False

    def decoded(self) -> "Lmdb":
        """The same with members of JSON decoded."""
        made = object.__new__(Lmdb)
        made._reading, made._reads_json = self._reading, True
        return made

    def __iter__(self) -> Iterator[Any]:
        for _, sample in self._reading.cursor():
            yield pickle.loads(sample)

    def __getitem__(self, index: int) -> Any:
        sample = pickle.loads(self._reading.get(b"%08d" % index))
        if self._reads_json and "json" in sample:
            sample["json"] = json.loads(sample["json"])
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return list(map(self.__getitem__, indices))
