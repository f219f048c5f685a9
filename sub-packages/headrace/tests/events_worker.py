"""One rank of one life of a run, from a start or a resume to a kill or the end, in training loops of several kinds.

What a rank is given is written to its log before the step is done, and so before any checkpoint of that step.
"""

import json
import os
import signal
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import lightning
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import DistributedBatchSampler, MapDataModule, ResumableLoader

SIZES = np.random.default_rng(0).integers(1, 50, 2000)
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Life:
    """What the ranks of a life are told.

    Args:
        folder: Of the run: logs and checkpoints.
        number: Of this life.
        world: Ranks that begin.
        processes: Processes; those beyond `world` wait until a reshard needs them.
        n: Samples that there are.
        options: Of the batches; those with a `batch_size` are of equal size.
        accept: What differs from the checkpoint and is meant.
        workers: Of each loader.
        begin: Steps in the checkpoint; 0 for none.
        every: Steps from one checkpoint to the next.
        events: Behind which step of the run what happens, with what.
        die_at: Steps that were done when all ranks are killed; None for a life that ends by itself.
        delivered: Whether they have received the next batch by then.
        epochs: Where a life ends that is not killed, in epochs of the loop's own counting.
    """

    folder: Path
    number: int
    world: int
    processes: int
    n: int
    options: dict[str, Any]
    accept: tuple[str, ...]
    workers: int
    begin: int
    every: int
    events: tuple[tuple[int, str, Any], ...]
    die_at: int | None
    delivered: bool
    epochs: int

    @property
    def checkpoint(self) -> Path | None:
        """Where it resumes."""
        return self.path(self.begin) if self.begin else None

    def path(self, steps: int) -> Path:
        """The checkpoint behind so many steps of the run."""
        return self.folder / f"checkpoint-{steps}"

    def batches(self, **ranks: Any) -> Any:
        """The batch sampler."""
        if "batch_size" in self.options:
            return DistributedBatchSampler(self.n, **self.options, **ranks)
        return DistributedSizeAwareBatchSampler(SIZES[: self.n], cost="sum", **self.options, **ranks)

    def loader(self, mesh: DeviceMesh | None = None, **ranks: Any) -> ResumableLoader:
        """The loader, of these ranks or of those that there are."""
        of: dict[str, Any] = ranks if mesh is None else {"mesh": mesh}
        batches = self.batches(**of)
        return ResumableLoader(list(range(self.n)), batches, collate_fn=collate, num_workers=self.workers, **of)


def collate(samples: list[int]) -> Batch:
    return {"ids": torch.tensor(samples)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight - ids.float().mean()).square() * 1e-9}


class Rank:
    """What a loop tells of its steps, and where things happen to it.

    Args:
        life: What the ranks are told.
        number: This rank.
        parent: Who kills it.
    """

    def __init__(self, life: Life, number: int, parent: Connection) -> None:
        self.life, self.number, self._parent = life, number, parent
        self._log = (life.folder / f"{life.number}-{number}.log").open("a")
        self._events = deque(life.events)

    def note(self, **line: Any) -> None:
        """Write a line of the log."""
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()

    def received(self, step: int, epoch: int, batch: Batch, loop_epoch: int | None = None) -> None:
        """A step begins with a batch; the loop counts the steps of the run by itself."""
        ids = batch["ids"].tolist()
        self.note(step=step, epoch=epoch, ids=ids, loop_epoch=epoch if loop_epoch is None else loop_epoch)
        if step == self.life.die_at and self.life.delivered:
            self.die()

    def done(self, steps: int, loader: Any) -> int | None:
        """So many steps of the run are done; returns with how many ranks it goes on, if that is another number."""
        world = None
        while self._events and self._events[0][0] < steps:  # before this rank joined
            self._events.popleft()
        while self._events and self._events[0][0] == steps:
            _, what, value = self._events.popleft()
            line: dict[str, Any] = {"at": steps, "event": what, "value": value}
            if what == "skip":
                coming = [self._coming(loader, number) for number in range(min(value, loader.remaining))]
                line |= {"coming": coming, "skipped": loader.skip(value).tolist()}
            elif what == "exclude":
                loader.exclude(value)
            else:
                world = value
            self.note(**line)
        return world

    @staticmethod
    def _coming(loader: Any, number: int) -> list[int]:
        """The samples of a step that comes, without those that it repeats."""
        ranks = loader.step(run_steps_of(loader) + number)
        return list(dict.fromkeys(index for indices in ranks for index in indices))

    def saves(self, steps: int) -> bool:
        """Whether there is a checkpoint behind that step."""
        return steps % self.life.every == 0

    def may_die(self, steps: int) -> None:
        """The checkpoint of a step is there, if there is one."""
        if steps == self.life.die_at and not self.life.delivered:
            self.die()

    def die(self) -> NoReturn:
        """Wait to be killed."""
        self._parent.send("there")
        while True:
            signal.pause()

    def end(self, state: dict[str, Any] | None) -> NoReturn:
        """All epochs are over; the loader's state is written down."""
        if self.life.die_at is not None:
            raise AssertionError(f"the epochs ended before step {self.life.die_at}")
        self.note(state=state)
        # gloo's threads race with the end of the interpreter, which may abort.
        dist.barrier()
        os._exit(0)


def run_steps_of(loader: Any) -> int:
    """The number of the next step, of a loader or a batch sampler."""
    steps: int = loader.run_steps if hasattr(loader, "run_steps") else loader.state_dict()["step"]
    return steps


class Accepting:
    """A loader's state for loops that load it by themselves: what differs is accepted."""

    def __init__(self, loader: Any, accept: Collection[str]) -> None:
        self._loader, self._accept = loader, accept

    def state_dict(self) -> dict[str, Any]:
        return dict(self._loader.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state, accept=self._accept)


def save(path: Path, **parts: Any) -> None:
    unfinished = path.with_name("unfinished")
    torch.save({name: part.state_dict() for name, part in parts.items()}, unfinished)
    unfinished.replace(path)


def epochs_of(loader: ResumableLoader, epochs: int) -> Iterator[Batch]:
    for epoch in range(loader.epoch, epochs):
        loader.set_epoch(epoch)
        yield from loader


def plain(rank: Rank) -> None:
    """A loop of one's own; its ranks may change while it runs: processes join and leave."""
    life, model, loader, steps = rank.life, Model(), None, rank.life.begin
    dist.init_process_group("gloo")
    worlds = deque(value for _, what, value in life.events if what == "reshard")
    world, mesh = life.world, DeviceMesh("cpu", list(range(life.world))) if worlds else None
    shared = torch.load(life.checkpoint, weights_only=True) if life.checkpoint else {}

    def finish(steps: int) -> None:
        if rank.number == 0 and rank.saves(steps):
            save(life.path(steps), model=model, loader=loader)
        rank.may_die(steps)

    while True:
        if rank.number < world and loader is None:
            loader = life.loader(mesh)
            if shared:
                model.load_state_dict(shared["model"])
                loader.load_state_dict(shared["loader"], accept=life.accept if steps == life.begin else ())
            batches = epochs_of(loader, life.epochs)
        if loader is not None:
            parallel = DistributedDataParallel(model, process_group=None if mesh is None else mesh.get_group())
            optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
            if steps > life.begin:
                finish(steps)
            for batch in batches:
                rank.received(steps, loader.epoch, batch)
                optimizer.zero_grad()
                parallel(**batch)["loss"].backward()
                optimizer.step()
                steps += 1
                if rank.done(steps, loader) is not None:
                    break
                finish(steps)
            else:
                loader.close()
                rank.end(loader.state_dict())
        if not worlds:  # those that are left go on without this rank
            rank.die()
        world = worlds.popleft()
        told: list[Any] = [None]
        if loader is not None:
            told = [{"model": model.state_dict(), "loader": loader.state_dict(), "steps": steps}]
        dist.broadcast_object_list(told, src=0)
        shared = told[0]
        steps, mesh = shared["steps"], DeviceMesh("cpu", list(range(world)))
        if loader is not None and rank.number < world:
            loader.reshard(mesh=mesh)
        elif loader is not None:
            loader.close()
            loader = None


class Module(lightning.LightningModule):
    """The model, as Lightning trains it."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.rank, self.model = rank, Model()

    def training_step(self, batch: Batch) -> torch.Tensor:
        trainer, loader = self.trainer, self.trainer.train_dataloader
        assert loader is not None
        self.rank.received(trainer.global_step, loader.epoch, batch, trainer.current_epoch)
        loss: torch.Tensor = self.model(**batch)["loss"]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Events(lightning.Callback):
    """What happens behind a step."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        rank, steps = self.rank, trainer.global_step
        rank.done(steps, trainer.train_dataloader)
        if rank.saves(steps):
            trainer.save_checkpoint(rank.life.path(steps))
        rank.may_die(steps)


def lightning_module(rank: Rank) -> None:
    """Lightning, with a data module."""
    life, options = rank.life, dict(rank.life.options)
    own: dict[str, Any] = {"accept": life.accept, "collate_fn": collate, "num_workers": life.workers}
    if "batch_size" not in options:
        own |= {"batch_sampler": partial(DistributedSizeAwareBatchSampler, **options), "sizes": SIZES[: life.n]}
        options = {}
    data = MapDataModule({"train": list(range(life.n))}, **own, **options)
    trainer = lightning.Trainer(
        max_epochs=life.epochs,
        accelerator="cpu",
        devices=1,
        num_nodes=life.world,
        strategy="ddp",
        callbacks=[Events(rank)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(rank), data, ckpt_path=life.checkpoint, weights_only=True)
    loader = trainer.train_dataloader
    assert loader is not None
    loader.close()
    rank.end(loader.state_dict())


def fabric(rank: Rank) -> None:
    """Fabric."""
    life = rank.life
    launched = Fabric(accelerator="cpu", devices=1, num_nodes=life.world, strategy="ddp")
    launched.launch()
    loader, model = life.loader(), Model()
    parallel, optimizer = launched.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = {"model": parallel, "optimizer": optimizer, "loader": Accepting(loader, life.accept), "steps": life.begin}
    if life.checkpoint:
        launched.load(life.checkpoint, state)
    for batch in epochs_of(loader, life.epochs):
        rank.received(state["steps"], loader.epoch, batch)
        optimizer.zero_grad()
        launched.backward(parallel(**launched.to_device(batch))["loss"])
        optimizer.step()
        state["steps"] += 1
        rank.done(state["steps"], loader)
        if rank.saves(state["steps"]):
            launched.save(life.path(state["steps"]), state)
        rank.may_die(state["steps"])
    loader.close()
    rank.end(loader.state_dict())


LOOPS: dict[str, Callable[[Rank], None]] = {"plain": plain, "lightning": lightning_module, "fabric": fabric}


def main(loop: Callable[[Rank], None], life: Life, number: int, parent: Connection, meeting: dict[str, str]) -> None:
    os.environ |= {**meeting, "RANK": str(number), "NODE_RANK": str(number), "LOCAL_RANK": "0"}
    loop(Rank(life, number, parent))
