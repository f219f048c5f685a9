"""Figures of the delivered batches for a logger: of a loop of one's own, and of Lightning's."""

import csv
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from indexed_runs import TRAIN, VAL, Stateful, data, fit, make_shards
from lightning.pytorch.loggers import CSVLogger

from headrace.webdatamodule import DistributedBatchSampler, IndexedShards, ResumableLoader

SIZES = [1 + 7 * number % 10 for number in range(40)]


class Slow(list[int]):
    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.002)
        return super().__getitem__(index)


def loader(dataset: Any = None, batches: Any = None, **options: Any) -> ResumableLoader:
    batches = DistributedBatchSampler(40, 4, num_replicas=1, rank=0) if batches is None else batches
    dataset = list(range(40)) if dataset is None else dataset
    return ResumableLoader(dataset, batches, collate_fn=list, num_replicas=1, rank=0, **options)


def test_figures_are_those_since_the_last_ones() -> None:
    loading = loader(sizes=SIZES)
    assert loading.metrics() == {}
    batches = iter(loading)
    began = time.perf_counter()
    for count in (1, 3):
        seen = list(islice(batches, count))
        asked = time.perf_counter()
        figures, seconds = loading.metrics(), time.perf_counter() - began
        began = asked
        tokens = sum(SIZES[index] for batch in seen for index in batch)
        padded = sum(len(batch) * max(SIZES[index] for index in batch) for batch in seen)
        assert figures["data/padding"] == pytest.approx(1 - tokens / padded)
        assert figures["data/samples_per_second"] >= 4 * count / seconds
        ratio = figures["data/tokens_per_second"] / figures["data/samples_per_second"]
        assert ratio == pytest.approx(tokens / (4 * count))
        assert set(figures) == {
            "data/padding",
            "data/samples_per_second",
            "data/tokens_per_second",
            "data/wait_seconds",
            "data/wait_share",
        }
        assert loading.metrics() == {}
    assert loading.report().batches == 4  # which counts them all


def test_the_time_waited_for_data_is_known() -> None:
    loading = loader(Slow(range(40)))
    for number, _ in enumerate(loading):
        time.sleep(0.03)
        if number == 3:
            break
    figures = loading.metrics()
    assert 4 * 4 * 0.002 <= figures["data/wait_seconds"] < 1
    assert 0 < figures["data/wait_share"] < 0.7
    assert "data/tokens_per_second" not in figures  # there are no sizes
    assert "data/padding" not in figures


@pytest.mark.parametrize(("cost", "left_out"), [("sum", "data/padding"), ("padded", ""), ("square", "data/fill")])
def test_fill_is_of_the_budget_and_packed_batches_have_no_padding(cost: str, left_out: str) -> None:
    class Options:
        pass

    batches: Any = Stateful(SIZES, sampler=None, num_replicas=1, rank=0, seed=0)
    batches.options, batches.max_total_size = Options(), (25,)
    batches.options.cost = cost
    loading = loader(batches=batches, sizes=SIZES)
    seen = list(islice(loading, 5))
    figures = loading.metrics()
    sizes = [[SIZES[index] for index in batch] for batch in seen]
    held = sum(map(sum, sizes)) if cost == "sum" else sum(len(one) * max(one) for one in sizes)
    assert {"data/fill", "data/padding"} - set(figures) == ({left_out} - {""})
    if cost != "square":
        assert figures["data/fill"] == pytest.approx(held / (5 * 25))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    train, val = (make_shards(tmp_path_factory.mktemp(name), name, count) for name, count in (("t", TRAIN), ("v", VAL)))
    return train, val


def test_shares_of_the_sources_are_figures(folders: tuple[Path, Path]) -> None:
    both = IndexedShards(dict(zip("ab", folders, strict=True)))
    batches = DistributedBatchSampler(len(both), 9, shuffle=False, num_replicas=1, rank=0)
    loading = loader(both, batches)
    next(batch := iter(loading))
    assert loading.metrics()["data/share/a"] == 1.0
    list(batch)
    figures = loading.metrics()
    assert figures["data/share/a"] == pytest.approx(11 / 18)
    assert figures["data/share/a"] + figures["data/share/b"] == pytest.approx(1)


def rows(folder: Path) -> list[dict[str, str]]:
    [path] = folder.glob("**/metrics.csv")
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row.get("data/samples_per_second")]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_lightning_logger_gets_them_every_few_steps(folders: tuple[Path, Path], tmp_path: Path, workers: int) -> None:
    options: dict[str, Any] = {"log_every_n_steps": 2, "max_epochs": 3}
    fit(data(folders, "uneven", num_workers=workers), logger=CSVLogger(tmp_path / "without"), **options)
    assert not list(tmp_path.glob("**/metrics.csv"))
    module = data(folders, "uneven", num_workers=workers, log_stats=True)
    steps = len(fit(module, logger=CSVLogger(tmp_path / "with"), **options).seen)
    found = rows(tmp_path / "with")
    assert [int(row["step"]) for row in found] == list(range(1, steps - 1, 2))  # numbered as Lightning's own
    assert all(0 <= float(row["data/padding"]) < 1 for row in found)
    assert all(float(row["data/tokens_per_second"]) > float(row["data/samples_per_second"]) for row in found)
    assert all(0 <= float(row["data/wait_share"]) <= 1 for row in found)


def test_accumulated_batches_are_logged_by_optimizer_steps(folders: tuple[Path, Path], tmp_path: Path) -> None:
    module = data(folders, batch_size=1, log_stats=True)  # 20 batches an epoch
    fit(module, logger=CSVLogger(tmp_path), log_every_n_steps=2, max_epochs=1, accumulate_grad_batches=5)
    assert [int(row["step"]) for row in rows(tmp_path)] == [1]
