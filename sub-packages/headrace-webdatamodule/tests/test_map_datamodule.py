"""`MapDataModule`: any map-style dataset under a real trainer, killed and resumed."""

import json
import os
import signal
from collections import Counter
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import map_training
import numpy as np
import pytest
import torch
from indexed_runs import TRAIN, VAL, Model, Save, Stateful, fit, keys, trainer
from map_training import EPOCHS, EVERY, N
from processes import SERVER, Meeting
from torch.utils.data import ConcatDataset, Dataset, RandomSampler, Subset, TensorDataset

from headrace.webdatamodule import DistributedBatchSampler, MapDataModule, Split
from headrace.webdatamodule.loading.fingerprint import dataset_fingerprint


def samples(name: str, count: int, word: str = "x") -> list[dict[str, str]]:
    return [{"__key__": f"{name}{i:02d}", "txt": word * (1 + i * 7 % 10)} for i in range(count)]


LENGTHS = [len(sample["txt"]) for sample in samples("t", TRAIN)]
EVERY_VAL = [f"v{i:02d}" for i in range(VAL)]


class Own(Dataset[Any]):
    """A dataset of torch's kind."""

    def __init__(self, held: list[Any]) -> None:
        self.held = held

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: int) -> Any:
        return self.held[index]


def data(kind: str = "list", **options: Any) -> MapDataModule:
    train, val = samples("t", TRAIN), samples("v", VAL)
    by_size = {"batch_sampler": {"train": Stateful}, "batch_size": {"val": 3, "test": 3}}
    given: dict[str, Any] = {"batch_size": 3}
    datasets: dict[Any, Any] = {"train": train, "val": val, Split.test: val}
    if kind == "by size":
        given = {**by_size, "sizes": {"train": LENGTHS}}
    elif kind == "own sizes":
        datasets["train"] = Own(train)
        datasets["train"].sizes = np.array(LENGTHS)
        given = by_size
    elif kind == "own tokens":
        datasets["train"] = Own(train)
        datasets["train"].num_tokens = LENGTHS.__getitem__
        given = by_size
    elif kind == "function":
        given = {**by_size, "sizes": lambda sample: len(sample["txt"])}
    return MapDataModule(datasets, **{"collate_fn": keys, **given, **options})


@pytest.mark.parametrize(("kind", "workers"), [("list", 0), ("by size", 2), ("function", 0)])
@pytest.mark.slow
def test_a_checkpoint_of_any_moment_resumes_exactly(tmp_path: Path, kind: str, workers: int) -> None:
    saving = Save(tmp_path)
    model = fit(data(kind, num_workers=workers), saving)
    for epoch in range(3):
        seen = sorted(key for at, batch in model.seen if at == epoch for key in batch)
        assert seen == [f"t{i:02d}" for i in range(TRAIN)]
    for path, hook, done in saving.saved[::17]:
        assert fit(data(kind), path=path).seen == model.seen[done:], hook


@pytest.mark.slow
def test_sizes_may_be_given_or_the_datasets_own() -> None:
    expected = fit(data("by size"), max_epochs=2).seen
    for kind in ("own sizes", "own tokens", "function"):
        assert fit(data(kind), max_epochs=2).seen == expected
    for sizes in (np.array(LENGTHS), torch.tensor(LENGTHS), tuple(LENGTHS), np.array(LENGTHS, np.uint8)):
        module = data("by size", sizes={"train": sizes})
        assert fit(module, max_epochs=2).seen == expected
    assert module.report()[Split.train].fill is not None


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_and_predictions_come_in_order(workers: int) -> None:
    module, model = data(num_workers=workers), Model()
    running = trainer(max_epochs=2, num_sanity_val_steps=0)
    running.fit(model, datamodule=module)
    assert model.val == EVERY_VAL * 2
    outputs = running.predict(model, datamodule=module)  # of the test split: there is none to predict
    assert isinstance(outputs, list)
    found = module.predictions(outputs)
    assert [index for index, _ in found] == list(range(VAL))
    assert [row["key"] for _, row in found] == EVERY_VAL


class Keyed(Own):
    """Whose attributes have the names of what is asked of datasets, and are something else."""

    key, num_tokens, sizes = "txt", 1000, None

    def fingerprint(self) -> str:
        raise AssertionError("not what is asked for")


def test_attributes_that_mean_something_else_are_left_alone() -> None:
    held = [{"__key__": str(i)} for i in range(5)]
    module, model = MapDataModule({"predict": Keyed(held)}, batch_size=2, collate_fn=keys), Model()
    outputs = trainer().predict(model, datamodule=module)
    assert isinstance(outputs, list)
    assert [(key, row["key"]) for key, row in module.predictions(outputs)] == [(i, str(i)) for i in range(5)]
    with pytest.raises(ValueError, match="'train' has no sizes: give sizes= an array"):
        MapDataModule({"train": Keyed(held)}, batch_sampler=Stateful)
    assert dataset_fingerprint(Keyed(held)) == dataset_fingerprint(Keyed(held))


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_sizes_of_a_function_follow_the_data() -> None:
    held = samples("t", 5)
    module = MapDataModule(
        {"train": held}, batch_sampler=Stateful, sizes=lambda sample: len(sample["txt"]), collate_fn=keys
    )
    assert len(fit(module, max_epochs=1, limit_val_batches=0).seen)
    held += samples("more", 5)
    seen = fit(module, max_epochs=1, limit_val_batches=0).seen
    assert sum(len(batch) for _, batch in seen) == 10


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 1}, "the checkpoint does not fit: checkpoint has seed=0, got seed=1; resume with the options"),
        ({"datasets": {"train": samples("t", TRAIN, "y")}}, "of other train data.*resume with the data"),
        ({"datasets": {"train": samples("t", TRAIN - 1)}, "sizes": LENGTHS[1:]}, "of other train data"),
        ({"sizes": LENGTHS[::-1]}, r"checkpoint has sizes=.*, got sizes="),
    ],
)
def test_changed_data_and_options_are_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    given: dict[str, Any] = {
        "datasets": {"train": samples("t", TRAIN)},
        "sizes": LENGTHS,
        "batch_sampler": Fingerprinted,
        "collate_fn": keys,
    }
    saving = Save(tmp_path)
    fit(MapDataModule(**given), saving, max_steps=3, limit_val_batches=0)
    with pytest.raises(ValueError, match=told):
        fit(MapDataModule(**{**given, **change}), path=saving.saved[-1][0], limit_val_batches=0)


class Fingerprinted(Stateful):
    """Says what its batches are made of."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "fingerprint": f"{self.seed} {self.most} {self.sizes}"}


def test_what_stands_for_a_dataset() -> None:
    rows = samples("t", 1000)
    changed = [*rows[:-1], {**rows[-1], "txt": "other"}]
    tensors = torch.arange(12.0).reshape(6, 2)
    one = dataset_fingerprint
    assert one(rows) == one(samples("t", 1000)) != one(changed)
    assert len({one(rows), one(rows[::-1]), one(rows[:-1]), one(changed), one([]), one(range(1000))}) == 6
    assert one(tensors.numpy()) != one(tensors.numpy() + 1)
    assert one(TensorDataset(tensors)) == one(TensorDataset(tensors.clone())) != one(TensorDataset(tensors + 1))
    subset = Subset(Own(rows), [3, 1])
    assert one(subset) == one(Subset(Own(rows), np.array([3, 1]))) != one(Subset(Own(rows), [1, 3]))  # type: ignore[arg-type]
    assert one(ConcatDataset([Own(rows), Own(changed)])) == one(ConcatDataset([Own(changed), Own(rows)]))  # not read
    named = Own(rows)
    named.fingerprint = "version 2"  # type: ignore[attr-defined]
    assert one(named) == "version 2"
    graph = partial(GraphLike, np.ones(3))
    assert one([graph(bonds=1)]) == one([graph(bonds=1)]) != one([graph(bonds=2)])


class GraphLike:
    def __init__(self, atoms: Any, bonds: int) -> None:
        self.atoms, self.bonds, self.parent = atoms, bonds, self


def some_of_them(dataset: Any, *, num_replicas: int, rank: int, seed: int) -> list[int]:
    """As a sampler of weights with an `epoch_length`: some samples not at all, others twice."""
    return [0, 0, *range(len(dataset) - 1, 3, -1)]


FACTORY = r"sampler\(dataset, num_replicas=1, rank=0, seed=seed\).*lambda dataset, \*, seed, \*\*ranks: RandomSampler"
BY_SIZE: dict[str, Any] = {"batch_size": None, "batch_sampler": Stateful, "sizes": [1, 2]}


@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ({"datasets": {}}, ValueError, "datasets is empty: give at least one"),
        ({"datasets": [1, 2]}, TypeError, r"datasets must be a mapping from Split.*: give \{'train': dataset\}$"),
        ({"datasets": {"validation": [1]}}, TypeError, "or members of Split, got 'validation': it is 'val' here"),
        ({"datasets": {"train": iter([1])}}, TypeError, r"datasets\['train'\] must have len\(\) and integer"),
        ({"batch_size": None}, ValueError, "no batch_size for 'train'"),
        ({"batch_sampler": Stateful}, ValueError, "has both batch_size=3 and batch_sampler"),
        ({"batch_size": None, "batch_sampler": Stateful}, ValueError, "'train' has no sizes: give sizes= an array"),
        ({"sizes": [1, 2]}, ValueError, "sizes is for batch_sampler, and there is none"),
        ({"batch_size": None, "batch_sampler": Stateful, "sizes": "n"}, ValueError, "must be a column of datasets"),
        ({"batch_size": None, "batch_sampler": Stateful, "sizes": [1]}, ValueError, "each of the 2 samples, got 1"),
        ({"batch_size": None, "batch_sampler": Stateful, "sizes": 5}, ValueError, r"of the 2 samples, got shape \[\]"),
        ({"batch_size": None, "batch_sampler": Stateful, "sizes": ["a", "b"]}, TypeError, "must be numbers or a func"),
        ({"collate_fn": 3}, TypeError, "collate_fn must be a function"),
        ({"shuffle": 1}, TypeError, "shuffle must be True or False"),
        (
            {**BY_SIZE, "shuffle": False},
            ValueError,
            "shuffle=False is for batch_size.*: give it to batch_sampler.*",
        ),
        ({**BY_SIZE, "drop_last": True}, ValueError, "drop_last=True is for batch_size.*: give it to batch_sampler, "),
        ({"sampler": RandomSampler}, TypeError, FACTORY),
        ({"sampler": {"val": RandomSampler}, "datasets": {"val": [1, 2]}}, TypeError, FACTORY),
        ({"sampler": partial(RandomSampler, replacement=True)}, TypeError, FACTORY),
        (
            {"sampler": partial(some_of_them), "shuffle": False},
            ValueError,
            "shuffle=False and sampler .*: drop one of them",
        ),
        ({"sampler": {"train": some_of_them}, "shuffle": False}, ValueError, "shuffle=False and sampler both"),
        ({"num_workers": -1}, ValueError, "num_workers must be an int >= 0, got -1"),
    ],
)
def test_arguments_that_are_not_allowed(options: dict[str, Any], kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        MapDataModule(**{"datasets": {"train": [1, 2]}, "batch_size": 3, **options})


class Table:
    """What the tables of pyarrow, pandas and polars have; these packages are not needed here."""

    def __init__(self, *methods: str) -> None:
        vars(self).update(dict.fromkeys(methods))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, column: str) -> list[int]:
        return [1, 2]


SOURCES = {"web": [1, 2], "books": [3]}


@pytest.mark.parametrize(
    ("dataset", "kind", "told"),
    [
        ("train.parquet", TypeError, r"is a path, 'train.parquet': .*datasets\.Dataset\.from_parquet\(path\)"),
        (Path("train.parquet"), TypeError, r"is a path, .*from_parquet\(path\)"),
        (b"train.parquet", TypeError, "is a path"),
        (Table("to_pylist", "column_names"), TypeError, r"is a table.*, a Table.*rows, table\.to_pylist\(\), or data"),
        (Table("to_dict", "iloc", "columns"), TypeError, r'is a table.*rows, table\.to_dict\("records"\)'),
        (Table("to_dicts", "columns"), TypeError, r"is a table.*rows, table\.to_dicts\(\)"),
        ({"x": np.ones(3), "y": [1, 2, 3]}, TypeError, r"mapping with the keys 'x', 'y', .*columns.*TensorDataset"),
        (SOURCES, TypeError, r"'web', 'books'.*several sources as a ConcatDataset, or NamedConcatDataset"),
        ({0: "a", 2: "b"}, TypeError, "mapping with the keys 0, 2"),
        ([], ValueError, r"datasets\['train'\] is empty: training needs samples"),
        (np.ones((0, 3)), ValueError, r"datasets\['train'\] is empty"),
    ],
)
def test_what_is_no_dataset_is_refused_with_the_cure(dataset: Any, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told) as caught:
        MapDataModule({"train": dataset}, batch_size=3)
    assert len(str(caught.value)) < 500


def test_options_of_training_are_free_where_they_hold() -> None:
    datasets: dict[str, Any] = {"train": [1, 2], "val": [1, 2]}
    by_size: Any = {"batch_sampler": {"val": Stateful}, "batch_size": {"train": 2}, "sizes": {"val": [1, 2]}}
    MapDataModule(datasets, shuffle=False, drop_last=True, **by_size)
    MapDataModule(datasets, batch_size=2, sampler={"val": some_of_them}, shuffle=False)
    MapDataModule(datasets, batch_size=2, sampler=some_of_them, drop_last=True)


def test_a_dataset_without_its_split_is_not_printed_whole() -> None:
    with pytest.raises(TypeError, match=r"got \[0, 1, 2.*\]: give \{'train': dataset\}") as caught:
        MapDataModule(list(range(10_000)), batch_size=3)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


def test_a_mapping_of_indices_is_a_dataset() -> None:
    module = MapDataModule({"train": {0: 1.0, 1: 2.0}, "val": []}, batch_size=3)
    assert sorted(module.train_dataloader().dataset.values()) == [1.0, 2.0]
    assert sorted(np.concatenate([batch.numpy() for batch in module.train_dataloader()])) == [1.0, 2.0]


def test_splits_that_are_missing_are_named() -> None:
    module = MapDataModule({"train": [1, 2]}, batch_size=2)
    told = r"needs 'predict' or 'test', but datasets has 'train': add datasets\['predict'\]"
    with pytest.raises(ValueError, match=told):
        module.setup("predict")
    with pytest.raises(ValueError, match=r"val_dataloader\(\) needs 'val', but datasets has 'train'"):
        module.val_dataloader()


def test_a_batch_size_that_is_set_holds_for_the_splits_that_had_the_same() -> None:
    def sizes(**options: Any) -> list[int]:
        module = data(**options)
        assert module.batch_size == 3
        module.batch_size = 5
        module.setup("fit")
        return [len(next(iter(loader))) for loader in (module.train_dataloader(), module.val_dataloader())]

    assert sizes() == [5, 5]
    assert sizes(batch_size={"train": 3, "val": 4, "test": 4}) == [5, 4]
    with pytest.raises(AttributeError, match="no batch_size to set: batch_sampler makes the batches"):
        data("by size").batch_size = 5


def test_a_sampler_of_weights_makes_the_order() -> None:
    def reversed_order(dataset: Any, **options: Any) -> list[int]:
        return list(range(len(dataset)))[::-1]

    module = data(sampler={"train": reversed_order})
    module.setup("fit")
    assert [key for batch in module.train_dataloader() for key in batch] == [f"t{i:02d}" for i in range(TRAIN)][::-1]


def test_one_sampler_orders_training_alone() -> None:
    module = data(sampler=some_of_them)
    running, model = trainer(max_epochs=1), Model()
    running.fit(model, datamodule=module)
    assert [key for _, batch in model.seen for key in batch][:3] == ["t00", "t00", "t19"]
    for stage in (running.validate, running.test):
        model.val.clear()
        stage(model, datamodule=module, verbose=False)
        assert model.val == EVERY_VAL
    outputs = running.predict(model, datamodule=module)
    assert isinstance(outputs, list)
    assert [row["key"] for _, row in module.predictions(outputs)] == EVERY_VAL


def test_a_sampler_named_for_a_split_orders_that_split() -> None:
    module = data(sampler={"val": some_of_them})
    module.setup("fit")
    assert [key for batch in module.val_dataloader() for key in batch] == ["v00", "v00", "v06", "v05", "v04"]
    assert sorted(key for batch in module.train_dataloader() for key in batch) == [f"t{i:02d}" for i in range(TRAIN)]


def drawn(dataset: Any, *, seed: int, **ranks: Any) -> RandomSampler:
    """A seeded order that says nothing of itself."""
    return RandomSampler(dataset, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("asks", [False, True])
def test_a_seeded_order_is_resumed_in_the_epoch_it_was_stopped_in(tmp_path: Path, asks: bool) -> None:
    whole = [batch for _, batch in fit(data(sampler=drawn), max_epochs=2).seen]
    stopped, running = Model(asks=asks), trainer(max_steps=3)
    running.fit(stopped, datamodule=data(sampler=drawn))
    running.save_checkpoint(tmp_path / "stopped.ckpt")
    rest = fit(data(sampler=drawn), path=tmp_path / "stopped.ckpt", max_epochs=2).seen
    assert len(stopped.seen) == 3
    assert [batch for _, batch in stopped.seen + rest] == whole
    with pytest.raises(ValueError, match=r"checkpoint has sampler=|is not the one that the checkpoint was saved in"):
        fit(data(sampler=lambda dataset, **options: RandomSampler(dataset)), path=tmp_path / "stopped.ckpt")


def in_given_order(sizes: Any, /, *, sampler: Any, **options: Any) -> DistributedBatchSampler:
    return DistributedBatchSampler(len(sizes), 3, sampler=sampler, **options)


def test_evaluation_by_size_takes_the_samples_in_their_order() -> None:
    options: dict[str, Any] = {
        "batch_size": None,
        "batch_sampler": in_given_order,
        "sizes": lambda sample: len(sample["txt"]),
    }
    for sampler in (None, some_of_them):
        module = data(sampler=sampler, **options)
        for stage, make in (("validate", module.val_dataloader), ("test", module.test_dataloader)):
            module.setup(stage)
            assert [key for batch in make() for key in batch] == EVERY_VAL
        module.setup("fit")
        drawn = [key for batch in module.train_dataloader() for key in batch]
        assert len(set(drawn)) == (TRAIN if sampler is None else TRAIN - 3)
        assert drawn != sorted(drawn)


# Real processes


def run(folder: Path, world: int, name: str, *more: Any) -> list[int | None]:
    """Exit codes of the ranks; when one of them fails, the others are not waited for."""
    meeting = Meeting(world) if world > 1 else None
    environment = meeting.environment if meeting else {}
    ranks: list[BaseProcess] = [
        SERVER.Process(target=map_training.main, args=(rank, environment, folder, name, *more)) for rank in range(world)
    ]
    try:
        for rank in ranks:
            rank.start()
        while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
            ranks[0].join(0.05)
    finally:
        for rank in ranks:
            if rank.pid is not None and rank.is_alive():
                os.killpg(rank.pid, signal.SIGKILL)
            rank.join()
    return [rank.exitcode for rank in ranks]


def noted(folder: Path, name: str, before: int = 10**6) -> list[Any]:
    """[epoch, step, indices] of all ranks, up to a step."""
    lines = [line for path in folder.glob(f"{name}?.jsonl") for line in path.read_text().splitlines()]
    return [note for note in map(json.loads, lines) if note[1] <= before]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "kills"), [(2, [10]), pytest.param(2, [3, 7, 10, 14, 19], marks=pytest.mark.nightly)]
)
def test_a_killed_fit_loses_and_repeats_nothing(tmp_path: Path, world: int, kills: list[int]) -> None:
    done: list[Any] = []
    path, saved = None, 0
    for kill_at in kills:
        codes = run(tmp_path, world, f"killed{kill_at}-", kill_at, path)
        assert codes[-1] == -signal.SIGKILL, (tmp_path / f"killed{kill_at}-{world - 1}.err").read_text()
        now = kill_at // EVERY * EVERY
        done += [note for note in noted(tmp_path, f"killed{kill_at}-", now) if note[1] > saved]
        path, saved = str(tmp_path / f"step{now}.ckpt"), now
    for again in (world, 1):
        assert run(tmp_path, again, f"resumed{again}-", -1, path) == [0] * again
        every = done + noted(tmp_path, f"resumed{again}-")
        for epoch in range(EPOCHS):
            counts = Counter(index for at, _, indices in every if at == epoch for index in indices)
            assert counts == dict.fromkeys(range(N), 1)


@pytest.mark.slow
@pytest.mark.nightly  # two ranks, and a resume on one, are above
def test_a_killed_fit_of_one_process(tmp_path: Path) -> None:
    assert run(tmp_path, 1, "killed", 21) == [-signal.SIGKILL]
    assert run(tmp_path, 1, "resumed", -1, str(tmp_path / "step20.ckpt")) == [0]
    every = noted(tmp_path, "killed", 20) + noted(tmp_path, "resumed")
    for epoch in range(EPOCHS):
        assert sorted(index for at, _, indices in every if at == epoch for index in indices) == list(range(N))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_of_ones_own_that_validates_with_a_trainer(workers: int) -> None:
    whole = list(data().train_dataloader())
    module, came, states = data(num_workers=workers), [], []
    for batch in module.train_dataloader():
        came.append(batch)
        if len(came) == 2:
            trainer().validate(Model(), datamodule=module, verbose=False)
        states.append(module.state_dict())
    assert came == whole
    for done in (2, 3):
        again = data()
        again.load_state_dict(states[done - 1])
        assert list(again.train_dataloader()) == whole[done:]


def test_a_state_that_is_loaded_by_hand_after_a_validation_counts() -> None:
    whole, module, again = list(data().train_dataloader()), data(), data()
    running = iter(module.train_dataloader())
    assert [next(running) for _ in range(2)] == whole[:2]
    trainer().validate(Model(), datamodule=again, verbose=False)
    again.load_state_dict(module.state_dict())
    assert list(again.train_dataloader()) == whole[2:]


class Closed(Own):
    """Holds a file that does not come back when it is closed."""

    def close(self) -> None:
        self.held = []


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_a_dataset_that_others_opened_is_not_closed() -> None:
    module = MapDataModule({"train": Closed(samples("t", 5))}, batch_size=2, collate_fn=keys)
    first, second = (fit(module, max_epochs=1, limit_val_batches=0).seen for _ in range(2))
    assert first == second


def test_ranks_that_are_none_count_as_not_given() -> None:
    def order(dataset: Any, *, num_replicas: int, rank: int, seed: int, mesh: Any) -> Any:
        assert (num_replicas, rank, mesh) == (1, 0, None)
        return range(len(dataset))

    def batches(sizes: Any, /, *, sampler: Any, num_replicas: int, rank: int, seed: int, mesh: Any) -> Any:
        assert (num_replicas, rank, mesh) == (1, 0, None)
        return DistributedBatchSampler(len(sizes), batch_size=2, num_replicas=num_replicas, rank=rank, seed=seed)

    module = MapDataModule(
        {"train": list(range(4))},
        sizes=[1, 1, 1, 1],
        sampler=partial(order, mesh=None),
        batch_sampler=partial(batches, mesh=None),
        collate_fn=list,
    )
    module.setup("fit")
    assert sorted(index for batch in module.train_dataloader() for index in batch) == [0, 1, 2, 3]
