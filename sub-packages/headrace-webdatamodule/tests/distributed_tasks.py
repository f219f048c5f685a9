"""What the ranks of the tests do; see `processes.py`."""

import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
import webdataset as wds
from indexed_runs import Stateful
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import DeviceMesh

from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedShards,
    IndexedWebDataModule,
    RankMismatchError,
    ResumableLoader,
    WebDataModule,
)
from headrace.webdatamodule.loading import distributed
from headrace.webdatamodule.loading.distributed import compare_plans


def keys(samples: list[Any]) -> list[str]:
    return [sample["__key__"] for sample in samples]


def two_epochs(rank: int, folders: list[str], options: list[dict[str, Any]]) -> dict[str, Any]:
    """Loads two epochs, or says how it ended."""
    dist.init_process_group("gloo")
    own = options[rank]
    shards, seed = IndexedShards(folders[rank]), own.get("seed", 0)
    order = None
    if "order" in own:  # a sampler that draws from a generator of its own
        generator = torch.Generator().manual_seed(own["order"])
        order = torch.utils.data.SubsetRandomSampler(range(len(shards)), generator=generator)
    batches = DistributedBatchSampler(len(shards), own.get("size", 3), seed=seed, sampler=order)
    loader = ResumableLoader(shards, batches, collate_fn=keys, seed=seed, num_workers=own.get("workers", 0))
    loader.set_epoch(own.get("epoch", 0))
    if state := own.get("state"):
        loader.load_state_dict(state)
    came: list[Any] = []
    try:
        for epoch in range(loader.epoch, loader.epoch + 2):
            loader.set_epoch(epoch)
            came += list(loader)
    except RankMismatchError as error:
        return {"came": came, "said": str(error)}
    finally:
        loader.close()
    return {"came": came}


def excluding(rank: int, at: list[int], workers: int) -> dict[str, Any]:
    """Leaves samples out, each rank at a step of its own, or says how it ended."""
    dist.init_process_group("gloo")
    loader = ResumableLoader(list(range(60)), DistributedBatchSampler(60, 3), collate_fn=list, num_workers=workers)
    came: list[Any] = []
    try:
        for epoch in range(2):
            loader.set_epoch(epoch)
            for batch in loader:
                came.append(batch)
                if epoch == 0 and loader.steps == at[rank]:
                    loader.exclude([1, 2, 3])
    except RankMismatchError as error:
        return {"came": came, "said": str(error)}
    finally:
        loader.close()
    return {"came": came, "record": loader.state_dict()["batch_sampler"]["run"]}


def joined(rank: int, workers: int) -> dict[str, Any]:
    """Two ranks train, and go on as three; the third begins with their state. Their steps meet in a sum."""
    dist.init_process_group("gloo")
    pair = DeviceMesh("cpu", [0, 1])

    def loader(mesh: Any) -> ResumableLoader:
        batches = DistributedBatchSampler(60, 3, mesh=mesh)
        return ResumableLoader(list(range(60)), batches, collate_fn=list, num_workers=workers, mesh=mesh)

    came: list[list[int]] = []
    one, mesh = loader(pair) if rank < 2 else None, pair
    batches: Iterator[list[int]] = iter(one or ())
    for batch in islice(batches, 4):
        came.append(batch)
        dist.all_reduce(torch.ones(1), group=mesh.get_group())
    told: list[Any] = [None if one is None else one.state_dict()]
    dist.broadcast_object_list(told, src=0)
    mesh = DeviceMesh("cpu", [0, 1, 2])
    if one is None:
        one = loader(mesh)
        one.load_state_dict(told[0])
        batches = iter(one)
    else:
        one.reshard(mesh=mesh)
    for batch in batches:
        came.append(batch)
        steps = torch.tensor([one.steps])
        dist.all_reduce(steps, group=mesh.get_group())
        assert steps.item() == 3 * one.steps
    one.close()
    return {"came": came}


SAVED = 101  # samples of the checkpoints below


def _checkpoint_parts() -> dict[str, Any]:
    dist.init_process_group("gloo")
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    loader = ResumableLoader(list(range(SAVED)), DistributedBatchSampler(SAVED, 3), collate_fn=list)
    return {"model": model, "loader": loader}


def checkpointing(rank: int, folder: str, how: str) -> dict[str, Any]:
    """Trains a little, leaves samples out, and saves in mid-epoch; with "async_save" it trains on meanwhile."""
    parts = _checkpoint_parts()
    loader, came, excluded, saving = parts["loader"], list[int](), list[int](), None
    for batch in loader:
        came += batch
        with torch.no_grad():
            parts["model"].weight += 1
        if loader.steps == 2:
            excluded = loader.step(3, rank=0)[:2]
            loader.exclude(excluded)
        if loader.steps == 4:
            if how == "save":
                save(parts, checkpoint_id=folder)
                break
            saving = async_save(parts, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
            saved = list(came)
        if loader.steps == 6:
            saving.result()  # type: ignore[union-attr]  # a future, as torch documents it
            came = saved
            break
    return {"came": came, "excluded": excluded, "steps": [loader.step(number) for number in range(4)]}


def checkpointed(rank: int, folder: str) -> dict[str, Any]:
    """Loads what `checkpointing` saved, and reads the rest of the epoch and the next one."""
    parts = _checkpoint_parts()
    load(parts, checkpoint_id=folder)
    loader = parts["loader"]
    steps = [loader.step(number) for number in range(4)]
    rest = [number for batch in loader for number in batch]
    return {
        "rest": rest,
        "next": [number for batch in loader for number in batch],
        "steps": steps,
        "weight": float(parts["model"].weight),
    }


def compared(rank: int, plans: list[dict[str, Any]]) -> str:
    """Compares plans."""
    dist.init_process_group("gloo")
    try:
        compare_plans(plans[rank], "train", 2)
    except RankMismatchError as error:
        return str(error)
    return ""


class Model(lightning.LightningModule):
    """Notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[list[str]]] = {"train": [], "val": []}

    def configure_model(self) -> None:
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: list[str], batch_idx: int) -> torch.Tensor:
        self.seen["train"].append(batch)
        return torch.Tensor(self.layer(torch.ones(1, 1)).sum())

    def validation_step(self, batch: list[str], batch_idx: int) -> None:
        self.seen["val"].append(batch)

    def predict_step(self, batch: list[str], batch_idx: int) -> list[str]:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(world: int, strategy: Any = "ddp", **options: Any) -> lightning.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    chosen = {"max_epochs": 2, "num_sanity_val_steps": 0, **quiet, **options}
    return lightning.Trainer(accelerator="cpu", devices=1, num_nodes=world, strategy=strategy, **chosen)


def tensor_parallel(rank: int, folder: str, data_parallel: int, tensor_parallel: int) -> dict[str, list[list[str]]]:
    """Trains under a model-parallel strategy."""
    strategy = ModelParallelStrategy(data_parallel_size=data_parallel, tensor_parallel_size=tensor_parallel)
    model = Model()
    module = IndexedWebDataModule({"train": folder, "val": folder}, batch_size=2, collate_fn=keys, seed=1)
    trainer(data_parallel * tensor_parallel, strategy).fit(model, datamodule=module)
    return model.seen


def meet() -> None:
    """All ranks meet; ranks that are in different collectives do not get this far."""
    met: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(met, "here")
    assert met == ["here"] * len(met)


def look(make: Any) -> None:
    """Rank 0 alone looks at a batch of a loader."""
    if dist.get_rank() == 0:
        assert len(next(iter(make())))


class LooksAtAll(lightning.Callback):
    """Rank 0 alone looks at training and validation data, wherever it can."""

    def look(self, trainer: Any, *rest: Any) -> None:
        module = trainer.datamodule
        looks: list[Any] = [
            lambda: module.train_dataloader(),
            lambda: module.val_dataloader(),
            lambda: trainer.train_dataloader,
            lambda: trainer.val_dataloaders,
        ]
        if trainer.state.fn != "fit":
            own = {"validate": "val_dataloaders", "predict": "predict_dataloaders"}[trainer.state.fn.value]
            looks = [lambda: getattr(trainer, own)]
        for one in looks:
            if one() is not None:  # a trainer has its validation loader when it is needed
                look(one)
        meet()

    on_train_start = on_train_epoch_start = on_train_batch_start = on_train_end = look  # type: ignore[assignment]
    on_validation_start = on_validation_batch_start = on_validation_end = look  # type: ignore[assignment]
    on_predict_start = on_predict_batch_start = look  # type: ignore[assignment]


def streamed(folder: str) -> WebDataModule:
    splits = ("train", "val", "predict")
    return WebDataModule(
        dict.fromkeys(splits, 20),
        "__key__",
        dict.fromkeys(splits, folder),
        4,
        pipeline_wds=dict.fromkeys(splits, wds.map(first)),
        pipeline_prebatch_wld=dict.fromkeys(splits, wds.batched(2, collation_fn=list)),
    )


def first(sample: tuple[str]) -> str:
    return sample[0]


def pairs(sizes: Any, **options: Any) -> DistributedBatchSampler:
    return DistributedBatchSampler(len(sizes), 2, **options)


def n_letters(sample: dict[str, Any]) -> int:
    return len(sample["txt"])


def looks_of_one_rank(rank: int, folder: str, kind: str) -> dict[str, Any]:
    """Fits, validates and predicts while rank 0 looks at batches; also before, and afterwards."""
    dist.init_process_group("gloo")
    shards = dict.fromkeys(("train", "val", "predict"), folder)
    batches = {"batch_sampler": pairs, "sizes": n_letters} if kind == "sized" else {"batch_size": 2}
    module: Any = streamed(folder)
    if kind != "stream":
        module = IndexedWebDataModule(shards, collate_fn=keys, seed=1, **batches)
    module.setup("fit")
    loaders = (module.train_dataloader, module.val_dataloader)
    for one in loaders:
        look(one)
    meet()
    model, running = Model(), trainer(2, num_sanity_val_steps=1, callbacks=[LooksAtAll()])
    running.fit(model, datamodule=module)
    for one in loaders:
        look(one)
    meet()
    found = dict(model.seen)
    model.seen = {"train": [], "val": []}
    running.validate(model, datamodule=module)
    outputs = running.predict(model, datamodule=module)
    predicted = None if kind == "stream" else module.predictions(outputs, gather=True)
    return {**found, "validated": model.seen["val"], "outputs": outputs, "predicted": predicted}


def looks_in_a_loop(rank: int, folder: str) -> dict[str, Any]:
    """The same in a loop of one's own, where rank 0 also evaluates alone."""
    dist.init_process_group("gloo")
    shards = IndexedShards(folder)
    loader = ResumableLoader(shards, DistributedBatchSampler(len(shards), 3), collate_fn=keys)
    ordered = DistributedBatchSampler(len(shards), 3, shuffle=False)
    val = ResumableLoader(shards, ordered, collate_fn=keys, name="val", fixed_epoch=True)
    batches = DistributedBatchSampler(len(shards), 3, num_replicas=1, rank=0)
    own = ResumableLoader(shards, batches, collate_fn=keys, num_replicas=1, rank=0)
    came, steps = list[list[str]](), list[int]()
    look(lambda: loader)
    for epoch in range(2):
        loader.set_epoch(epoch)
        look(lambda: loader)
        for batch in loader:
            came.append(batch)
            look(lambda: loader)
            if rank == 0:
                assert len(list(val)) == 4
                assert len(list(own)) == 7
            meet()
            steps.append(loader.state_dict()["steps"])
        look(lambda: loader)
    meet()
    return {"came": came, "steps": steps}


def differing(rank: int, folder: str, threaded: bool) -> dict[str, Any]:
    """Trains on plans that differ; each step talks to the other ranks."""
    dist.init_process_group("gloo")
    shards, came, said = IndexedShards(folder), list[Any](), list[str]()
    before, loader = (
        ResumableLoader(shards, DistributedBatchSampler(len(shards), 3), collate_fn=keys, check_ranks=checks)
        for checks in (False, True)
    )
    if rank:  # alone resumes, at the end of an epoch
        assert len(list(before)) == 4
        loader.load_state_dict(before.state_dict())

    def train() -> None:
        try:
            for epoch in range(loader.epoch, 2):
                loader.set_epoch(epoch)
                for batch in loader:
                    came.append(batch)
                    dist.all_reduce(torch.ones(3))
        except RankMismatchError as error:
            said.append(str(error))

    if threaded:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    else:
        train()
    return {"came": len(came), "said": said}


def validated(rank: int, folders: list[str], kind: str) -> str:
    """Validates on shards that differ."""
    if kind == "stream":
        module: Any = streamed(folders[rank])
    else:
        module = IndexedWebDataModule({"val": folders[rank]}, batch_size=2, collate_fn=keys)
    model, running = Model(), trainer(2)
    try:
        running.validate(model, datamodule=module)
    except RankMismatchError as error:
        assert not model.seen["val"]
        return str(error)
    return ""


def one_of_each_model(rank: int, folder: str, seeds: list[int]) -> dict[str, Any]:
    """Of ranks that share a model the first one reads, as in pipeline parallelism."""
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    shards, came, said = IndexedShards(folder), list[Any](), ""
    if mesh["pipeline"].get_local_rank() == 0:
        data = mesh["data"]
        batches = DistributedBatchSampler(len(shards), 3, mesh=data, seed=seeds[data.get_local_rank()])
        loader = ResumableLoader(shards, batches, collate_fn=keys, mesh=data)
        try:
            came += [*loader, *loader]
        except RankMismatchError as error:
            said = str(error)
    meet()
    return {"came": came, "said": said}


def late(rank: int, folder: str, begun: str) -> list[str]:
    """Rank 1 begins an epoch when rank 0 has said what it waits for."""
    dist.init_process_group("gloo")
    distributed._PATIENCE = 0.2
    shards, said = IndexedShards(folder), list[str]()

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            Path(begun).touch()

    logging.getLogger("headrace.webdatamodule").addHandler(Noting())
    loader = ResumableLoader(shards, DistributedBatchSampler(len(shards), 3), collate_fn=keys)
    loader.set_epoch(3)
    while rank == 1 and not Path(begun).exists():
        time.sleep(0.01)
    assert len(list(loader)) == 4
    return said


class Looks(lightning.Callback):
    """Rank 0 alone looks at a batch; then all ranks meet."""

    def look(self, trainer: Any, *rest: Any) -> None:
        if dist.get_rank() == 0:
            assert next(iter(trainer.train_dataloader))
        meet()

    on_train_start = on_train_epoch_start = on_train_batch_start = look  # type: ignore[assignment]


def looked_at(rank: int, folder: str) -> list[list[str]]:
    """Trains while rank 0 looks at batches, also before the first one."""
    model = Model()
    module = IndexedWebDataModule({"train": folder}, batch_size=2, collate_fn=keys, seed=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You defined a `validation_step`")
        trainer(2, callbacks=[Looks()]).fit(model, datamodule=module)
    return model.seen["train"]


def early_loader(rank: int, folder: str, by_size: bool) -> list[list[str]]:
    """Reads an epoch of a loader that was made before the process group."""
    options: dict[str, Any] = {"batch_size": 2}
    if by_size:
        options = {"batch_sampler": Strided, "sizes": "txt"}
    module = IndexedWebDataModule({"train": folder}, collate_fn=keys, seed=1, **options)
    module.setup("fit")
    loader = without_environment(module.train_dataloader)
    assert loader.num_workers == 0
    dist.init_process_group("gloo")
    return list(loader)


def asked_early(rank: int, kind: str) -> dict[str, Any]:
    """Asks for the length, and reads an epoch, before there is a process group; then reads two among the ranks."""
    makes: dict[str, Any] = {
        "instance": lambda: DistributedBatchSampler(COUNT, 4),
        "function": lambda: lambda world, rank: DistributedBatchSampler(COUNT, 4, num_replicas=world, rank=rank),
        "without a state": WithoutState,
    }

    def alone() -> ResumableLoader:
        loader = ResumableLoader(list(range(COUNT)), makes[kind](), collate_fn=list)
        assert len(loader) == loader.remaining == 14
        return loader

    asked, read = (without_environment(make) for make in (alone, lambda: read_epoch(alone())))
    dist.init_process_group("gloo")
    assert (len(asked), asked.remaining, len(read)) == (7, 7, 7)
    return {"came": [*asked, *asked], "read": list(read)}


COUNT = 53


class WithoutState:
    """This rank's batches, as of the moment; without a state."""

    def batches(self) -> list[list[int]]:
        return list(DistributedBatchSampler(COUNT, 4))

    def __len__(self) -> int:
        return len(self.batches())

    def __iter__(self) -> Any:
        return iter(self.batches())


def read_epoch(loader: ResumableLoader) -> ResumableLoader:
    assert len(list(loader)) == 14
    return loader


def without_environment(make: Any) -> Any:
    """Calls a function as in a process that no launcher has told its rank."""
    hidden = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    try:
        loader = make()
        assert loader.ranks == (1, 0)
    finally:
        os.environ.update(hidden)
    return loader


class Strided(Stateful):
    """Batches by size, dealt to the ranks in turn."""

    def __init__(self, sizes: Any, /, *, num_replicas: int, rank: int, **options: Any) -> None:
        super().__init__(sizes, num_replicas=num_replicas, rank=rank, **options)
        self.num_replicas, self.rank = num_replicas, rank

    def batches(self) -> list[list[int]]:
        made = super().batches()
        return made[self.rank : len(made) - len(made) % self.num_replicas : self.num_replicas]


def sized(rank: int, shards: Any, log: str) -> dict[str, Any]:
    """Sizes samples by a function that writes down each call."""
    dist.init_process_group("gloo")
    if os.getuid() == 0:
        os.seteuid(65534)  # whom permissions bind
    try:
        measure = partial(length, log)
        module = IndexedWebDataModule({"train": shards}, batch_sampler=Strided, sizes=measure, collate_fn=keys)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module.setup("fit")
            came = list(module.train_dataloader())
    finally:
        os.seteuid(os.getuid())
    names = [warning.category.__name__ for warning in caught]
    return {"came": came, "warned": [name for name in names if name == "SizesInMemoryWarning"]}


def length(log: str, sample: dict[str, Any]) -> int:
    with Path(log).open("a") as file:
        file.write("x")
    return len(sample["txt"])


def forked_beside_gloo(rank: int, folder: str, epochs: int) -> int:
    """Makes a loader with two workers again and again, each right after a collective."""
    dist.init_process_group("gloo")
    shards, count = IndexedShards(folder), 0
    for epoch in range(epochs):
        loader = ResumableLoader(shards, DistributedBatchSampler(len(shards), 3), collate_fn=keys, num_workers=2)
        loader.set_epoch(epoch)
        count += sum(map(len, loader))
        loader.close()
    return count
