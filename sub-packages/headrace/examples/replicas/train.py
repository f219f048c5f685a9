"""Replicas that come and go, with torchft: each optimizer step has the tokens asked for, no sample is lost or repeated.

    pip install torchft-nightly
    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000
    TORCHFT_LIGHTHOUSE=http://localhost:29510 python train.py   # one for each replica: start, kill and add them

A replica that joins gets weights, optimizer and the position in the data from another one. A step in which a replica
died is done again by those that are left, with the same samples.
"""

import os
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo

from headrace.size_aware_batching import OptimizerStepBatchSampler
from headrace.webdatamodule import ResumableLoader

EPOCHS, TOKENS, BUDGET = int(os.environ.get("EPOCHS", "2")), 3000, 1000
SIZES = np.random.default_rng(0).integers(5, 121, 602)
TEXTS = [{"number": number, "tokens": (torch.arange(size) * 31 + number) % 97} for number, size in enumerate(SIZES)]


def collate(texts: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Lay the texts end to end."""
    numbers = torch.tensor([text["number"] for text in texts])
    return {"numbers": numbers, "tokens": torch.cat([text["tokens"] for text in texts])}


batches = OptimizerStepBatchSampler(SIZES, BUDGET, tokens_per_step=TOKENS, num_replicas=1, rank=0)
loader = ResumableLoader(TEXTS, batches, collate_fn=collate, num_workers=int(os.environ.get("WORKERS", "0")))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(97, 8), torch.nn.Linear(8, 97))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = torch.zeros(len(TEXTS), dtype=torch.int64)  # how often each text was trained on, by all replicas: to show it
committed: dict[str, Any] = loader.state_dict()  # the position after the last step that counts
ranks: tuple[int, int | None] | None = None  # those that the loader is at `committed` for


def state_dict() -> dict[str, Any]:
    """What a replica that joins receives."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "seen": seen, "data": committed}


def load_state_dict(state: dict[str, Any]) -> None:
    """Take over what another replica has."""
    global committed, ranks
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    seen.copy_(state["seen"])
    committed, ranks = state["data"], None


store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    min_replica_size=1,
    use_async_quorum=False,  # the ranks are known before the batches are read
    timeout=timedelta(seconds=10),
    rank=0,
    world_size=1,
    store_addr="localhost",
    store_port=store.port,
)
while True:
    manager.start_quorum()
    if ranks != (now := (manager.num_participants(), manager.participating_rank())):
        loader.load_state_dict(committed)
        loader.reshard(*now)
        ranks, steps = now, batches.optimizer_steps(loader)
    if (step := next(steps, None)) is None:  # the epoch is over
        if loader.epoch == EPOCHS - 1:
            break
        loader.set_epoch(loader.epoch + 1)
        committed = loader.state_dict()
        steps = batches.optimizer_steps(loader)
        step = next(steps)
    optimizer.zero_grad()
    counts = torch.zeros_like(seen)
    for batch in step:
        tokens = batch["tokens"]
        loss = torch.nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:], reduction="sum")
        (loss / TOKENS).backward()  # type: ignore[no-untyped-call]  # of torch
        counts += torch.bincount(batch["numbers"], minlength=len(seen))
    for tensor in [counts, *(parameter.grad for parameter in model.parameters())]:
        manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()
    if manager.should_commit():
        optimizer.step()
        seen += counts
        committed = loader.state_dict()
        trained = int(SIZES[counts.numpy() > 0].sum())
        done = f"{trained} tokens, {counts.sum()} texts, {now[0]} replicas"
        print(f"step {manager.current_step()}: {done}", flush=True)
    else:
        ranks = None  # the step is done again
lost, repeated = (int(difference.clamp(min=0).sum()) for difference in (EPOCHS - seen, seen - EPOCHS))
print(f"{EPOCHS} epochs: {lost} lost, {repeated} repeated")
manager.shutdown()
