"""The same texts in every library's format: written once, opened, and read in the library's own way."""

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from measure import installed
from torch.utils.data import DataLoader

from headrace.webdatamodule import IndexedShards, write_shards

BATCH = 64
SHARDS = 4
Texts = list[bytes]


def texts(samples: list[Any]) -> list[bytes]:
    """What a worker sends."""
    return [bytes(text_of(sample)) for sample in samples]


def text_of(sample: Any) -> Any:
    """Return the text of a sample, which libraries wrap in dictionaries."""
    return sample["txt"] if isinstance(sample, dict) else sample


class Format:
    """A library's way to keep samples on disk.

    Subclasses give ``write``, ``open``, ``stream`` and, where samples are found by their number, ``read``.
    """

    name = package = ""
    random = True

    def write(self, samples: Texts, folder: Path) -> None:
        """Write the samples below a folder that exists."""
        raise NotImplementedError

    def open(self, folder: Path) -> Any:
        """Return a dataset of the texts, in order."""
        raise NotImplementedError

    def open_random(self, folder: Path) -> Any:
        """Return a dataset that is best read by number."""
        return self.open(folder)

    def stream(self, dataset: Any) -> Iterable[Any]:
        """Return its samples in a row."""
        return dataset  # type: ignore[no-any-return]  # of an untyped library

    def read(self, dataset: Any, indices: list[int]) -> list[Any]:
        """Return samples by their numbers."""
        return [dataset[index] for index in indices]

    def workers(self, folder: Path, count: int) -> Iterable[list[bytes]]:
        """Return batches of texts that processes have read, which stay from pass to pass."""
        return DataLoader(
            self.open(folder), batch_size=BATCH, num_workers=count, collate_fn=texts, persistent_workers=True
        )


class Headrace(Format):
    """Tar shards with an index; every read is checked."""

    name, package = "headrace shards", "headrace-webdatamodule"

    def write(self, samples: Texts, folder: Path) -> None:
        write_shards([(f"s{i:07d}", {"txt": text}) for i, text in enumerate(samples)], folder, n_shards=SHARDS)

    def open(self, folder: Path) -> Any:
        return IndexedShards(folder, decode=None)

    def stream(self, dataset: Any) -> Iterable[Any]:
        found: Iterable[Any] = dataset.iterate()
        return found

    def read(self, dataset: Any, indices: list[int]) -> list[Any]:
        found: list[Any] = dataset.__getitems__(indices)
        return found


class HeadracePacked(Headrace):
    """The same, with many texts in one member of a tar."""

    name = "headrace shards, packed"

    def write(self, samples: Texts, folder: Path) -> None:
        texts = [(f"s{i:07d}", {"txt": text}) for i, text in enumerate(samples)]
        write_shards(texts, folder, n_shards=SHARDS, bytes_per_pack=1 << 16)


class Webdataset(Format):
    """The same tars, in a row."""

    name, package, random = "webdataset", "webdataset", False

    def write(self, samples: Texts, folder: Path) -> None:
        writer = import_module("webdataset").ShardWriter(
            str(folder / "%06d.tar"), maxcount=-(-len(samples) // SHARDS), verbose=0
        )
        with writer:
            for i, text in enumerate(samples):
                writer.write({"__key__": f"s{i:07d}", "txt": text})

    def open(self, folder: Path) -> Any:
        wds = import_module("webdataset")
        return wds.WebDataset(sorted(map(str, folder.glob("*.tar"))), shardshuffle=False)


class Litdata(Format):
    """Chunks of 64 MB; texts are views of them until a worker sends them."""

    name, package = "litdata chunks", "litdata"

    def write(self, samples: Texts, folder: Path) -> None:
        writer = import_module("litdata.streaming.writer").BinaryWriter(str(folder), chunk_bytes="64MB")
        for i, text in enumerate(samples):
            writer[i] = {"txt": text}
        writer.done()
        writer.merge()

    def open(self, folder: Path) -> Any:
        return import_module("litdata").StreamingDataset(str(folder), shuffle=False)

    def open_random(self, folder: Path) -> Any:
        """Decode no neighbours of a sample."""
        return import_module("litdata").StreamingDataset(str(folder), shuffle=False, batch_decode=0)

    def workers(self, folder: Path, count: int) -> Iterable[list[bytes]]:
        loader: Iterable[list[bytes]] = import_module("litdata").StreamingDataLoader(
            self.open(folder), batch_size=BATCH, num_workers=count, collate_fn=texts, persistent_workers=True
        )
        return loader


class Mosaic(Format):
    """MDS shards of 64 MiB."""

    name, package = "mosaic MDS", "mosaicml-streaming"
    shard_bytes = 1 << 26

    def write(self, samples: Texts, folder: Path) -> None:
        columns, module = {"txt": "bytes"}, import_module("streaming")
        with module.MDSWriter(out=str(folder), columns=columns, size_limit=self.shard_bytes) as writer:
            for text in samples:
                writer.write({"txt": text})

    def open(self, folder: Path) -> Any:
        streaming = import_module("streaming")
        streaming.base.util.clean_stale_shared_memory()
        return streaming.StreamingDataset(local=str(folder), batch_size=BATCH, shuffle=False)

    def workers(self, folder: Path, count: int) -> Iterable[list[bytes]]:
        loader: Iterable[list[bytes]] = import_module("streaming").StreamingDataLoader(
            self.open(folder), batch_size=BATCH, num_workers=count, collate_fn=texts, persistent_workers=True
        )
        return loader


class Energon(Format):
    """Tars with Energon's index and metadata, in a row; single samples are not found by number."""

    name, package, random = "Energon", "megatron-energon", False

    def write(self, samples: Texts, folder: Path) -> None:
        Webdataset().write(samples, folder)
        prepare_energon(folder)

    def open(self, folder: Path) -> Any:
        return energon_dataset(folder, 0, repeat=False)

    def stream(self, dataset: Any) -> Iterable[Any]:
        found: Iterable[Any] = import_module("megatron.energon").get_loader(dataset)
        return found

    def workers(self, folder: Path, count: int) -> Iterable[list[bytes]]:
        return EnergonBatches(folder, count)


class EnergonBatches:
    """Batches of its loader without their keys."""

    def __init__(self, folder: Path, count: int) -> None:
        self.loader = import_module("megatron.energon").get_loader(
            energon_dataset(folder, count, repeat=False, batch_size=BATCH)
        )

    def __iter__(self) -> Iterator[list[bytes]]:
        for batch in self.loader:
            yield batch["txt"]


def prepare_energon(folder: Path) -> None:
    """Run ``energon prepare`` and describe the dataset as one of dictionaries."""
    preparator = import_module("megatron.energon.flavors.webdataset.prepare").WebdatasetPreparator
    names = [path.name for path in sorted(folder.glob("*.tar"))]
    with contextlib.redirect_stdout(io.StringIO()):
        preparator.prepare_dataset(
            folder, names, split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=2
        )  # fmt: skip
    (folder / ".nv-meta" / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")


def energon_encoder() -> Any:
    """A task encoder that hands on the bytes of a text and its key."""
    energon = import_module("megatron.energon")

    class Encoder(energon.TaskEncoder):  # type: ignore[misc, name-defined]  # of an untyped library
        decoder = None
        cookers = [energon.Cooker(energon.stateless(cooked))]  # noqa: RUF012 -- as its documentation has it

        def batch(self, samples: list[Any]) -> dict[str, Any]:
            return {"txt": [sample["txt"] for sample in samples], "key": [sample["__key__"] for sample in samples]}

    return Encoder()


def cooked(sample: Any) -> Any:
    """Keep the text as bytes."""
    return {
        "txt": sample["txt"], "__key__": sample["__key__"], "__restore_key__": sample["__restore_key__"],
        "__subflavors__": sample.get("__subflavors__"),
    }  # fmt: skip


def energon_dataset(folder: Path, workers: int, **options: Any) -> Any:
    """A training dataset of one rank, unshuffled unless the options say otherwise."""
    energon = import_module("megatron.energon")
    given: dict[str, Any] = {
        "batch_size": None,
        "shuffle_buffer_size": None,
        "max_samples_per_sequence": None,
        "worker_config": energon.WorkerConfig(rank=0, world_size=1, num_workers=workers),
        **options,
    }
    return energon.get_train_dataset(folder, task_encoder=energon_encoder(), **given)


class ArrayRecord(Format):
    """Grain's format for random access, one record a group."""

    name, package = "grain ArrayRecord", "grain"

    def write(self, samples: Texts, folder: Path) -> None:
        module = import_module("array_record.python.array_record_module")
        per = -(-len(samples) // SHARDS)
        for shard in range(SHARDS):
            writer = module.ArrayRecordWriter(str(folder / f"{shard}.arrayrecord"), "group_size:1")
            for text in samples[shard * per : (shard + 1) * per]:
                writer.write(text)
            writer.close()

    def open(self, folder: Path) -> Any:
        return import_module("grain").sources.ArrayRecordDataSource(sorted(map(str, folder.glob("*.arrayrecord"))))

    def stream(self, dataset: Any) -> Iterable[Any]:
        """In batches, which it reads in one call."""
        for first in range(0, len(dataset), BATCH):
            yield from dataset.__getitems__(range(first, min(first + BATCH, len(dataset))))

    def read(self, dataset: Any, indices: list[int]) -> list[Any]:
        found: list[Any] = dataset.__getitems__(indices)
        return found

    def workers(self, folder: Path, count: int) -> Iterable[list[bytes]]:
        grain = import_module("grain")
        pipeline = grain.MapDataset.source(self.open(folder)).batch(BATCH, batch_fn=list).to_iter_dataset()
        found: Iterable[list[bytes]] = pipeline.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(count))
        return found


class Lance(Format):
    """A columnar file that finds rows by their numbers; compressed."""

    name, package = "Lance", "pylance"

    def write(self, samples: Texts, folder: Path) -> None:
        table = import_module("pyarrow").table({"txt": samples})
        import_module("lance").write_dataset(table, str(folder / "texts.lance"))

    def open(self, folder: Path) -> Any:
        return LanceDataset(str(folder / "texts.lance"))

    def stream(self, dataset: Any) -> Iterable[Any]:
        for batch in dataset.reading().to_batches(columns=["txt"]):
            yield from batch.column("txt").to_pylist()

    def read(self, dataset: Any, indices: list[int]) -> list[Any]:
        found: list[Any] = dataset.__getitems__(indices)
        return found

    def workers(self, folder: Path, count: int) -> Iterable[list[bytes]]:
        """Its threads do not survive a fork."""
        return DataLoader(
            self.open(folder),
            batch_size=BATCH,
            num_workers=count,
            collate_fn=texts,
            persistent_workers=True,
            multiprocessing_context="spawn",
        )


class LanceDataset:
    """Opened by each process that reads."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.opened: Any = None
        self.length: int = self.reading().count_rows()
        self.opened = None

    def reading(self) -> Any:
        """The dataset of this process."""
        if self.opened is None:
            self.opened = import_module("lance").dataset(self.folder)
        return self.opened

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> list[bytes]:
        found: list[bytes] = self.reading().take(indices, columns=["txt"]).column("txt").to_pylist()
        return found

    def __getitem__(self, index: int) -> bytes:
        return self.__getitems__([index])[0]


class Lmdb(Format):
    """A database: the floor for reading samples by their numbers."""

    name, package = "LMDB", "lmdb"

    def write(self, samples: Texts, folder: Path) -> None:
        room = 2 * sum(map(len, samples)) + 200 * len(samples) + (1 << 24)
        with import_module("lmdb").open(str(folder), map_size=room) as database, database.begin(write=True) as writing:
            for i, text in enumerate(samples):
                writing.put(b"%07d" % i, text, append=True)

    def open(self, folder: Path) -> Any:
        return LmdbDataset(str(folder))

    def stream(self, dataset: Any) -> Iterable[Any]:
        with dataset.reading().cursor() as cursor:
            for _, text in cursor:
                yield text


class LmdbDataset:
    """Opened by each process that reads."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.transaction: Any = None
        self.length: int = self.reading().stat()["entries"]
        self.transaction = None

    def reading(self) -> Any:
        """A transaction of this process."""
        if self.transaction is None:
            database = import_module("lmdb").open(self.folder, readonly=True, lock=False, readahead=False)
            self.transaction = database.begin(buffers=False)
        return self.transaction

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < self.length:
            raise IndexError(index)
        found: bytes = self.reading().get(b"%07d" % index)
        return found


def formats() -> list[Format]:
    """Those whose library is installed; headrace's first."""
    every: list[Callable[[], Format]] = [
        Headrace, HeadracePacked, Webdataset, Energon, Litdata, Mosaic, ArrayRecord, Lance, Lmdb,
    ]  # fmt: skip
    return [one for one in (make() for make in every) if installed(one.package)]
