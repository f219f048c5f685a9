"""One rank of a life of a run, in the training loops of other libraries; see `events_worker.py`."""

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from events_worker import Accepting, Batch, Model, Rank, collate, epochs_of, save
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from headrace.size_aware_batching.integrations import TrainerLoader, sampler_state


def registered(rank: Rank) -> None:
    """accelerate, with a registered loader."""
    life = rank.life
    accelerator, model, loader, steps = Accelerator(cpu=True), Model(), life.loader(), life.begin
    assert accelerator.num_processes == life.world
    parallel, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.register_for_checkpointing(Accepting(loader, life.accept))
    if life.checkpoint:
        accelerator.load_state(str(life.checkpoint))
    for batch in epochs_of(loader, life.epochs):
        rank.received(steps, loader.epoch, batch)
        optimizer.zero_grad()
        accelerator.backward(parallel(**batch)["loss"])
        optimizer.step()
        steps += 1
        rank.done(steps, loader)
        if rank.saves(steps):
            accelerator.save_state(str(life.path(steps)))
        rank.may_die(steps)
    loader.close()
    rank.end(loader.state_dict())


class Told(TrainerCallback):  # type: ignore[misc]  # of a library that may not be there
    """What a Trainer tells of its steps."""

    def __init__(self, rank: Rank, loader: Any) -> None:
        self.rank, self.loader, self.steps = rank, loader, rank.life.begin

    def received(self, batch: Batch) -> None:
        self.rank.received(self.steps, self.loader.epoch, batch)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps = state.global_step
        self.rank.done(self.steps, self.loader)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.rank.may_die(self.steps)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.rank.may_die(self.steps)  # where that step was not saved


class Telling(Model):
    """A model that tells of its batches."""

    told: Told

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        self.told.received({"ids": ids})
        return super().forward(ids)


def hf_trainer(rank: Rank) -> None:
    """Hugging Face's Trainer, with a TrainerLoader."""
    life, model = rank.life, Telling()
    inner = life.loader()
    model.told = told = Told(rank, inner)
    loader = TrainerLoader(inner, accept=life.accept)
    path = str(life.checkpoint) if life.checkpoint else None
    arguments = TrainingArguments(
        str(life.folder),
        max_steps=loader.max_steps(life.epochs, path) if life.die_at is None else 10**6,
        ignore_data_skip=True,
        save_steps=life.every,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    assert arguments.world_size == life.world
    trainer: Any = Trainer(model, arguments, train_dataset=list(range(life.n)), callbacks=[told, loader])
    trainer.get_train_dataloader = lambda: loader
    trainer.train(resume_from_checkpoint=path)
    inner.close()
    rank.end(inner.state_dict())


def stateful(rank: Rank) -> None:
    """torchdata's StatefulDataLoader."""
    life, model, steps = rank.life, Model(), rank.life.begin
    dist.init_process_group("gloo")
    batches = life.batches()
    loader: Any = StatefulDataLoader(
        list(range(life.n)), batch_sampler=batches, collate_fn=collate, num_workers=life.workers
    )
    if life.checkpoint:
        held = torch.load(life.checkpoint, weights_only=True)
        model.load_state_dict(held["model"])
        batches.load_state_dict(sampler_state(held["loader"]), accept=life.accept)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for epoch in range(batches.epoch, life.epochs):
        batches.set_epoch(epoch)
        for batch in loader:
            rank.received(steps, epoch, batch)
            optimizer.zero_grad()
            parallel(**batch)["loss"].backward()
            optimizer.step()
            steps += 1
            rank.done(steps, batches)
            if rank.number == 0 and rank.saves(steps):
                save(life.path(steps), model=model, loader=loader)
            rank.may_die(steps)
    rank.end(batches.state_dict())
