"""Pieces of long samples in resumable loaders and data modules: delivered once, resumed exactly, counted."""

import io
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, PackedCollate, Piece, SplitDataset
from headrace.webdatamodule import (
    DamagedSampleWarning,
    IndexedShards,
    IndexedWebDataModule,
    MapDataModule,
    ResumableLoader,
    Split,
    index_shards,
    write_tars,
)
from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler

SIZES = [1 + 37 * n % 251 for n in range(120)]
BUDGET = 64
by_size = partial(DistributedSizeAwareBatchSampler, max_total_size=BUDGET, oversize="split")


class Documents:
    sizes = SIZES

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": torch.arange(SIZES[index]) + 1000 * index}


ALL = Counter(1000 * index + at for index, size in enumerate(SIZES) for at in range(size))
collate = PackedCollate(max_total_size=BUDGET)


def tokens(batches: Any) -> Counter[int]:
    found = Counter[int]()
    for batch in batches:
        assert torch.equal(batch["position_ids"], batch["tokens"] % 1000)
        found.update(batch["tokens"].tolist())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_resumes_inside_a_document_on_other_ranks(workers: int) -> None:
    def loaders(world: int) -> list[ResumableLoader]:
        data = SplitDataset(Documents())
        return [
            ResumableLoader(
                data,
                by_size(data, num_replicas=world, rank=rank),
                collate_fn=collate,
                num_workers=workers,
                check_ranks=False,
            )
            for rank in range(world)
        ]

    before = loaders(2)
    assert len({len(loader) for loader in before}) == 1
    found = tokens(batch for loader in before for batch in islice(loader, 40))
    state = before[0].state_dict()
    for loader in before:
        loader.close()
    after = loaders(3)
    for loader in after:
        loader.load_state_dict(state)
        found += tokens(loader)
        assert sum(loader.report().samples.values()) > 0
        loader.close()
    assert found == ALL


def test_a_batch_sampler_without_a_state_may_give_pieces() -> None:
    batches = [[Piece(0, 0, 2, 5), 1], [Piece(0, 2, 4, 5)], [2, Piece(0, 4, 5, 5)]]
    data = SplitDataset(["abcde", "f", "g"])
    loader = ResumableLoader(data, batches, collate_fn=list)
    whole = list(loader)
    assert whole == [["ab", "f"], ["cd"], ["g", "e"]]
    running = ResumableLoader(data, batches, collate_fn=list)
    first = next(iter(running))
    assert list(running.indices) == [Piece(0, 0, 2, 5), 1]
    state = running.state_dict()
    resumed = ResumableLoader(data, batches, collate_fn=list)
    resumed.load_state_dict(state)
    assert [first, *resumed] == whole
    other = ResumableLoader(data, [[Piece(0, 0, 3, 5), 1], *batches[1:]], collate_fn=list)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="the order of list is not the one that the checkpoint was saved in"):
        list(other)


def test_keys_that_are_no_samples_are_refused() -> None:
    loader = ResumableLoader({"a": 1, "b": 2}, [["a"], ["b"]], collate_fn=list)
    with pytest.raises(TypeError, match=r"batch_sampler must give indices, or keys .* such as Piece, got 'a'"):
        list(loader)


def test_padding_is_that_of_the_pieces() -> None:
    data = SplitDataset(["abcde" * 2, "f" * 5])
    batches = [[Piece(0, 0, 5, 10), 1], [Piece(0, 5, 10, 10)]]
    loader = ResumableLoader(data, batches, collate_fn=list, sizes=[10, 5])
    assert list(loader)
    assert loader.report().fill == 1.0


def test_other_data_behind_the_dataset_of_pieces_is_refused() -> None:
    one, other = (ResumableLoader(SplitDataset(rows), [[0], [1]], collate_fn=list) for rows in (["a", "b"], ["a", "c"]))
    next(iter(one))
    with pytest.raises(ValueError, match="fingerprint"):
        other.load_state_dict(one.state_dict())


class Model(lightning.LightningModule):
    """Keeps the tokens of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.batches.append(batch)
        loss: torch.Tensor = self.layer(torch.ones(1, 1)).sum()
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch["piece_start"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(folder: Path, **options: Any) -> lightning.Trainer:
    quiet: Any = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return lightning.Trainer(default_root_dir=folder, **quiet, **options)


def module(data: Any, **options: Any) -> MapDataModule:
    return MapDataModule(data, batch_sampler=by_size, collate_fn=collate, **options)


@pytest.mark.slow
def test_a_trainer_resumes_inside_a_document(tmp_path: Path) -> None:
    first, second = Model(), Model()
    stopped = trainer(tmp_path, max_steps=30, enable_checkpointing=False)
    stopped.fit(first, datamodule=module({"train": SplitDataset(Documents())}))
    stopped.save_checkpoint(tmp_path / "at_30.ckpt")
    going_on = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    going_on.fit(second, datamodule=module({"train": SplitDataset(Documents())}), ckpt_path=tmp_path / "at_30.ckpt")
    assert len(first.batches) == 30
    assert tokens(first.batches + second.batches) == ALL


def test_shards_are_cut_and_a_damaged_document_is_skipped(tmp_path: Path) -> None:
    def npy(index: int) -> bytes:
        buffer = io.BytesIO()
        np.save(buffer, np.arange(SIZES[index]) + 1000 * index)
        return b"no array" if index == 5 else buffer.getvalue()

    write_tars([(f"s{n:03}", {"tokens.npy": npy(n)}) for n in range(len(SIZES))], tmp_path, n_shards=2)
    index_shards(tmp_path)
    data = SplitDataset(IndexedShards(tmp_path), start=None)
    assert SIZES[5] > BUDGET, "it comes in several pieces"
    run = MapDataModule(
        {"train": data},
        batch_sampler=partial(by_size, max_length=20),
        sizes=SIZES,
        collate_fn=list,
        on_error="skip",
        num_workers=2,
    )
    run.setup("fit")
    with pytest.warns(DamagedSampleWarning, match="s005"):
        delivered = [sample for batch in run.train_dataloader() for sample in batch]
    found = Counter[int](token for sample in delivered for token in sample["tokens.npy"].tolist())
    assert found == Counter(token for token in ALL if token // 1000 != 5)
    assert {sample["__key__"] for sample in delivered} == {f"s{n:03}" for n in range(len(SIZES)) if n != 5}
    report = run.report()[Split.train]
    assert [sample.sample for sample in report.skipped] == [5]
    run.teardown("fit")


def test_a_mixture_gives_all_pieces_of_its_samples(tmp_path: Path) -> None:
    documents = Documents()
    rows = [documents[n] for n in range(len(SIZES))]
    sources = NamedConcatDataset({"first": rows[:40], "rest": rows[40:]})
    run = module(
        {"train": SplitDataset(sources)},
        sizes=SIZES,
        sampler=partial(WeightedDistributedSampler, weights={"first": 0.5, "rest": 0.5}),
    )
    run.setup("fit")
    found = tokens(run.train_dataloader())
    for index, size in enumerate(SIZES):
        assert len({found[1000 * index + at] for at in range(size)}) == 1
    counts = run.report()[Split.train].samples
    assert set(counts) == {"first", "rest"}
    assert min(counts.values()) > 40


def test_predictions_of_pieces_are_refused(tmp_path: Path) -> None:
    data = module({"predict": SplitDataset(Documents())})
    outputs = trainer(tmp_path).predict(Model(), datamodule=data)
    with pytest.raises(ValueError, match="predictions are of whole samples, got Piece"):
        data.predictions(outputs)  # type: ignore[arg-type]  # a list of outputs


def test_shards_that_do_not_know_pieces_are_refused(tmp_path: Path) -> None:
    write_tars([(f"s{n}", {"txt": b"x" * size}) for n, size in enumerate(SIZES)], tmp_path, n_shards=1)
    index_shards(tmp_path)
    run = IndexedWebDataModule({"train": tmp_path}, batch_sampler=by_size, sizes="txt", collate_fn=list)
    run.setup("fit")
    with pytest.raises(TypeError, match="Piece"):
        list(run.train_dataloader())
