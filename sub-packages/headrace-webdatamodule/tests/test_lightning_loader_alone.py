"""A real trainer that is given a loader, without a data module of headrace: whole epochs, and exact resume."""

from collections import Counter
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from indexed_runs import RESTORE, TRAIN, Bare, Model, Save, Stateful, keys, trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from streams import module as stream_module
from streams import number, write

from headrace.webdatamodule import DistributedBatchSampler, MapDataModule, ResumableLoader

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:You requested to overfit"),
]
SAMPLES = [{"__key__": f"t{i:02d}", "txt": "x" * (1 + i * 7 % 10)} for i in range(TRAIN)]
SIZES = [len(sample["txt"]) for sample in SAMPLES]


def batches(kind: str) -> Any:
    if kind == "plain":
        return DistributedBatchSampler(TRAIN, 3, num_replicas=1, rank=0, seed=1)
    return (Stateful if kind == "uneven" else Bare)(SIZES, sampler=None, num_replicas=1, rank=0, seed=1)


def loader(kind: str, **options: Any) -> ResumableLoader:
    return ResumableLoader(SAMPLES, batches(kind), collate_fn=keys, **options)


def fit(
    given: Any, *callbacks: Callback, path: Any = None, model: Model | None = None, asks: bool = True, **options: Any
) -> Model:
    model = Model(asks=asks) if model is None else model
    trainer(*callbacks, **options).fit(model, given, ckpt_path=path, **RESTORE)
    return model


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_steps": {"max_epochs": -1, "max_steps": 17},
    "limit": {"limit_train_batches": 4},
    "half": {"limit_train_batches": 0.5},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
    "overfit": {"overfit_batches": 3},
    "accumulate": {"accumulate_grad_batches": 2},
}
BY_DEFAULT = {("plain", "plain"), ("uneven", "plain"), ("uneven", "half"), ("bare", "max_steps")}
MATRIX = [
    pytest.param(kind, name, asks, marks=() if (kind, name) in BY_DEFAULT else pytest.mark.nightly)
    for kind in ("plain", "uneven", "bare")
    for name in OPTIONS
    for asks in (True, False)
]


def counted(model: Model, done: int, options: dict[str, Any]) -> int:
    """The steps whose gradients have reached the optimizer: those of a group come again."""
    if done == 0:
        return 0
    epoch = model.seen[done - 1][0]
    begin = min(step for step, (at, _) in enumerate(model.seen) if at == epoch)
    last = done == len(model.seen) or model.seen[done][0] != epoch
    return done if last else done - (done - begin) % options.get("accumulate_grad_batches", 1)


@pytest.mark.parametrize(("kind", "name", "asks"), MATRIX)
def test_a_checkpoint_of_any_moment_goes_on_exactly(tmp_path: Path, kind: str, name: str, asks: bool) -> None:
    saving = Save(tmp_path)
    model = fit(loader(kind), saving, asks=asks, **OPTIONS[name])
    first_of_each = {(hook, done): path for path, hook, done in saving.saved}
    wrong = []
    for (hook, done), path in list(first_of_each.items())[:: 5 if (kind, name) in BY_DEFAULT else 1]:
        done = counted(model, done, OPTIONS[name])
        rest = fit(loader(kind), path=path, asks=asks, **OPTIONS[name]).seen
        if rest != model.seen[done:]:
            wrong.append((hook, done, rest[:2], model.seen[done : done + 2]))
    assert wrong == []


@pytest.mark.parametrize("kind", ["plain", "uneven", "bare"])
def test_epochs_are_whole_and_their_lengths_known(kind: str) -> None:
    model = fit(loader(kind))
    lengths = Counter(epoch for epoch, _ in model.seen)
    assert model.lengths == lengths
    assert len(set(lengths.values())) == (1 if kind == "plain" else 3)
    for epoch in range(3):
        assert sorted(key for at, batch in model.seen if at == epoch for key in batch) == [
            f"t{i:02d}" for i in range(TRAIN)
        ]


def of_module() -> Any:
    module = MapDataModule(
        {"train": SAMPLES}, batch_sampler=Stateful, sizes=SIZES, collate_fn=keys, seed=1, num_replicas=1, rank=0
    )
    module.setup("fit")
    return module.train_dataloader()


class OfOneself(lightning.LightningDataModule):
    """A data module that is not of headrace."""

    def train_dataloader(self) -> Any:
        return loader("uneven")


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("make", [lambda: loader("uneven", num_workers=1), of_module, OfOneself])
def test_the_ways_to_give_a_loader_alone(tmp_path: Path, make: Any, asks: bool) -> None:
    saving, model, resumed = Save(tmp_path), Model(asks=asks), Model(asks=asks)
    given = make()
    is_module = isinstance(given, lightning.LightningDataModule)
    name = "datamodule" if is_module else "train_dataloaders"
    trainer(saving).fit(model, **{name: given})
    path = next(path for path, hook, done in saving.saved if (hook, done) == ("batch end", 5))
    trainer().fit(resumed, **{name: make()}, ckpt_path=path, **RESTORE)
    assert resumed.seen == model.seen[5:]


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("done", [1, 3])
def test_another_number_of_ranks_goes_on_exactly(
    tmp_path: Path, before: int, after: int, done: int, asks: bool
) -> None:
    def sampler(num_replicas: int) -> DistributedBatchSampler:
        return DistributedBatchSampler(TRAIN, 2, num_replicas=num_replicas, rank=0, seed=1)

    def of_ranks(num_replicas: int) -> ResumableLoader:
        return ResumableLoader(SAMPLES, sampler(num_replicas), collate_fn=keys, check_ranks=False)

    saving = Save(tmp_path)
    fit(of_ranks(before), saving, asks=asks)
    path = next(path for path, hook, steps in saving.saved if (hook, steps) == ("batch end", done))
    taken, rest = sampler(before), sampler(after)
    batches = iter(taken)
    for _ in range(done):
        next(batches)
    rest.load_state_dict(taken.state_dict())
    expected = [(0, batch) for batch in rest]
    rest.set_epoch(1)
    expected += [(1, batch) for batch in rest]
    resumed = fit(of_ranks(after), path=path, asks=asks, max_epochs=2)
    assert resumed.seen == [(epoch, tuple(SAMPLES[index]["__key__"] for index in batch)) for epoch, batch in expected]


@pytest.mark.parametrize("asks", [True, False])
def test_two_loaders_go_on_where_they_were(tmp_path: Path, asks: bool) -> None:
    class Two(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step([*batch["one"], *batch["two"]], batch_idx)

    def of_ranks(num_replicas: int) -> ResumableLoader:
        sampler = DistributedBatchSampler(TRAIN, 3, num_replicas=num_replicas, rank=0)
        return ResumableLoader(SAMPLES, sampler, collate_fn=keys, check_ranks=False)

    def both(num_replicas: int = 1) -> CombinedLoader:
        return CombinedLoader({"one": loader("plain"), "two": of_ranks(num_replicas)}, "max_size_cycle")

    saving, model, resumed = Save(tmp_path), Two(asks=asks), Two(asks=asks)
    fit(both(), saving, model=model)
    path = next(path for path, hook, done in saving.saved if (hook, done) == ("batch end", 5))
    fit(both(), path=path, model=resumed)
    assert resumed.seen == model.seen[5:]
    with pytest.raises(ValueError, match=r"must be one loader .* got 2, .* Resume with the number of ranks that saved"):
        fit(both(2), path=path, model=Two(asks=asks))


@pytest.mark.parametrize("asks", [True, False])
def test_a_stream_alone_goes_on_exactly(tmp_path: Path, asks: bool) -> None:
    place = write(tmp_path / "stream", [TRAIN])

    def stream() -> Any:
        made = stream_module(place, TRAIN, 3, pipeline_wds=number, kwargs_wds={"shardshuffle": True})
        made.setup("fit")
        return made.train_dataloader()

    saving, model, resumed = Save(tmp_path), Model(asks=asks), Model(asks=asks)
    fit(stream(), saving, model=model)
    for path, hook, done in saving.saved:
        if hook == "batch end" and done in (1, 5, 9):
            fit(stream(), path=path, model=(resumed := Model(asks=asks)))
            assert resumed.seen == model.seen[done:]


def test_a_loader_goes_on_by_itself_after_a_fit(tmp_path: Path) -> None:
    kept, saving = loader("uneven"), Save(tmp_path)
    running, model = trainer(saving, max_epochs=2), Model()
    running.fit(model, kept)
    running.fit_loop.max_epochs = 3
    running.fit(model, kept)
    assert model.seen == fit(loader("uneven")).seen
    fresh = loader("uneven")
    kept.set_epoch(3)
    fresh.set_epoch(3)
    assert list(kept) == list(fresh)
    path = next(path for path, hook, done in saving.saved if (hook, done) == ("batch end", 5))
    assert fit(kept, path=path).seen == model.seen[5:]
    kept.load_state_dict(loader("uneven").state_dict())
    assert list(kept) == [list(batch) for epoch, batch in model.seen if epoch == 0]
