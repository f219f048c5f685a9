"""Data that people have, resumed exactly: Hugging Face datasets, Parquet, LMDB, PyTorch Geometric, lists."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import MapDataModule, ResumableLoader
from headrace.weighted_sampler import NamedConcatDataset

N, BUDGET, EPOCHS = 200, 120, 3
SIZES = [1 + i * 7 % 23 for i in range(N)]
by_size = partial(DistributedSizeAwareBatchSampler, max_total_size=BUDGET)


def from_hugging_face(folder: Path) -> tuple[Any, Any]:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"id": range(N), "text": ["x" * n for n in SIZES], "n": SIZES}), "n"


def from_hugging_face_shuffled(folder: Path) -> tuple[Any, Any]:
    dataset, _ = from_hugging_face(folder)
    shuffled = dataset.shuffle(seed=1).with_format("numpy")
    return shuffled, shuffled["n"]


def from_several_of_hugging_face(folder: Path) -> tuple[Any, Any]:
    dataset, _ = from_hugging_face(folder)
    return NamedConcatDataset({"first": dataset.select(range(70)), "rest": dataset.select(range(70, N))}), "n"


def from_parquet_through_datasets(folder: Path) -> tuple[Any, Any]:
    datasets = pytest.importorskip("datasets")
    from_hugging_face(folder)[0].to_parquet(folder / "data.parquet")
    return datasets.Dataset.from_parquet(str(folder / "data.parquet"), cache_dir=str(folder)), "n"


class Rows:
    """The rows of an Arrow table, a batch at a time."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        rows: list[Any] = self.table.take(indices).to_pylist()
        return rows


def from_parquet_through_arrow(folder: Path) -> tuple[Any, Any]:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"id": range(N), "n": SIZES}), folder / "data.parquet")
    return Rows(parquet.read_table(folder / "data.parquet", memory_map=True)), (folder / "data.parquet", "n")


class Entries(torch.utils.data.Dataset[Any]):
    """The values of an LMDB; each process opens it for itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened: Any = None

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        if self.opened is None:
            self.opened = pytest.importorskip("lmdb").open(str(self.path), readonly=True, lock=False).begin()
        value = self.opened.get(b"%06d" % index)
        return {"id": index, "n": len(value)}

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "opened": None}

    def num_tokens(self, index: int) -> int:
        return int(self[index]["n"])


def from_lmdb(folder: Path) -> tuple[Any, Any]:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(folder / "lmdb")) as store, store.begin(write=True) as writing:
        for index, size in enumerate(SIZES):
            writing.put(b"%06d" % index, b"x" * size)
    return Entries(folder / "lmdb"), None  # it knows its sizes


def from_graphs(folder: Path) -> tuple[Any, Any]:
    data = pytest.importorskip("torch_geometric.data")
    graphs = [data.Data(x=torch.zeros(n, 1), id=torch.tensor([i])) for i, n in enumerate(SIZES)]
    return graphs, lambda graph: graph.num_nodes


def from_graphs_in_memory(folder: Path) -> tuple[Any, Any]:
    data = pytest.importorskip("torch_geometric.data")
    graphs, _ = from_graphs(folder)

    class Molecules(data.InMemoryDataset):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.data, self.slices = self.collate(graphs)

    return Molecules(), np.array(SIZES)


def from_lists(folder: Path) -> tuple[Any, Any]:
    return [{"id": i} for i in range(N)], SIZES


KINDS = [
    from_hugging_face,
    from_hugging_face_shuffled,
    from_several_of_hugging_face,
    from_parquet_through_datasets,
    from_parquet_through_arrow,
    from_lmdb,
    from_graphs,
    from_graphs_in_memory,
    from_lists,
]


def ids(samples: list[Any]) -> list[int]:
    return [int(sample["id"]) for sample in samples]


class Noting(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), list[tuple[int, list[int]]]()

    def training_step(self, batch: list[int], batch_idx: int) -> torch.Tensor:
        self.seen.append((self.trainer.current_epoch, batch))
        return torch.Tensor(self.layer(torch.ones(1, 1)).sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Saving(lightning.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder, self.saved = folder, list[Path]()

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.saved.append(self.folder / f"{trainer.global_step}.ckpt")
        trainer.save_checkpoint(self.saved[-1])


def fitted(data: MapDataModule, *callbacks: lightning.Callback, path: Path | None = None) -> Noting:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    model = Noting()
    running = lightning.Trainer(accelerator="cpu", max_epochs=EPOCHS, callbacks=list(callbacks), **quiet)  # type: ignore[arg-type]
    running.fit(model, datamodule=data, ckpt_path=path)
    return model


@pytest.mark.parametrize("make", KINDS)
def test_a_fit_over_any_data_resumes_exactly(make: Callable[[Path], tuple[Any, Any]], tmp_path: Path) -> None:
    dataset, sizes = make(tmp_path)

    def data(**options: Any) -> MapDataModule:
        return MapDataModule({"train": dataset}, batch_sampler=by_size, sizes=sizes, collate_fn=ids, seed=3, **options)

    saving = Saving(tmp_path)
    whole = fitted(data(num_workers=1), saving)
    for epoch in range(EPOCHS):
        counts = Counter(one for at, batch in whole.seen if at == epoch for one in batch)
        assert counts == dict.fromkeys(range(N), 1)
    for path in saving.saved[4::13]:
        assert fitted(data(), path=path).seen == whole.seen[int(path.stem) :]


@pytest.mark.parametrize("make", KINDS)
def test_a_loop_over_any_data_is_killed_five_times(make: Callable[[Path], tuple[Any, Any]], tmp_path: Path) -> None:
    dataset, _ = make(tmp_path)
    state: Any = None
    seen: list[tuple[int, int]] = []
    for stop in (3, 5, 20, 7, 11, 10**6):
        batches = DistributedSizeAwareBatchSampler(SIZES, BUDGET, num_replicas=1, rank=0, seed=3)
        loader = ResumableLoader(dataset, batches, collate_fn=ids, num_workers=stop % 2)
        if state is not None:
            loader.load_state_dict(state)
        for _ in range(loader.epoch, EPOCHS):
            taken = list(islice(loader, stop))
            seen += [(loader.epoch, one) for batch in taken for one in batch]
            if len(taken) == stop:
                break  # killed
        state = loader.state_dict()
        loader.close()
    assert Counter(seen) == {(epoch, one): 1 for epoch in range(EPOCHS) for one in range(N)}


def test_another_dataset_of_the_same_length_is_refused(tmp_path: Path) -> None:
    dataset, _ = from_hugging_face(tmp_path)

    def data(rows: Any) -> MapDataModule:
        module = MapDataModule({"train": rows}, batch_size=8, collate_fn=ids)
        module.setup("fit")
        return module

    saved = data(dataset)
    next(iter(saved.train_dataloader()))
    for same in (
        from_hugging_face(tmp_path)[0],
        dataset.with_format("torch"),
        dataset.with_transform(lambda rows: rows),
    ):
        other = data(same)
        other.load_state_dict(saved.state_dict())
        assert other.train_dataloader().remaining == 24
    for changed in (dataset.shuffle(seed=1), dataset.map(lambda row: {"n": row["n"] + 1}), dataset.remove_columns("n")):
        other = data(changed)
        other.load_state_dict(saved.state_dict())
        with pytest.raises(ValueError, match="of other train data"):
            other.train_dataloader()


def test_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    dataset, _ = from_hugging_face(tmp_path)
    told = r"sizes='tokens' must be a column of datasets\['train'\], a Dataset that has 'id', 'text', 'n'"
    with pytest.raises(ValueError, match=told):
        MapDataModule({"train": dataset}, batch_sampler=by_size, sizes="tokens")
    with pytest.raises(TypeError, match=r"sizes\['train'\] must be one column, got a datasets"):
        MapDataModule({"train": dataset}, batch_sampler=by_size, sizes=dataset)
