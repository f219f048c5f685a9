"""Train a small graph network on molecules, in batches of so many nodes and edges; stop it whenever you like."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from molecules import sizes, to_batch, write
from torch_geometric.data import Batch
from torch_geometric.nn import GINEConv, global_mean_pool

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import IndexedShards, ResumableLoader


class GraphNetwork(torch.nn.Module):
    """Two rounds of messages, averaged over each molecule."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.atoms, self.bonds = torch.nn.Embedding(128, width), torch.nn.Embedding(8, width)
        self.rounds = torch.nn.ModuleList(GINEConv(torch.nn.Linear(width, width)) for _ in range(2))
        self.head = torch.nn.Linear(width, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return a number for each molecule, shape ``[molecules]``."""
        nodes, edges = self.atoms(batch.x), self.bonds(batch.edge_attr)
        for layer in self.rounds:
            nodes = nodes + layer(nodes, batch.edge_index, edges).relu()
        numbers: torch.Tensor = self.head(global_mean_pool(nodes, batch.batch, batch.num_graphs))
        return numbers.squeeze(1)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="graphs", description=__doc__)
    parser.add_argument("folder", type=Path, help="for shards and the checkpoint; a run that was stopped resumes there")
    parser.add_argument("--nodes", type=int, default=1024, help="most nodes of a batch")
    parser.add_argument("--edges", type=int, default=10_000, help="most edges of a batch")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--workers", type=int, default=2, help="processes that read")
    return parser.parse_args(words)


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint that is whole or not there."""
    torch.save(checkpoint, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)  # noqa: PTH105 -- one step, over what is there


def train(options: argparse.Namespace) -> None:
    """Train, from the last checkpoint if there is one, and say how often each molecule was trained on."""
    write(options.folder / "shards")
    shards = IndexedShards(options.folder / "shards")
    batches = DistributedSizeAwareBatchSampler(sizes(shards), (options.nodes, options.edges), seed=0)
    loader = ResumableLoader(shards, batches, collate_fn=to_batch, num_workers=options.workers)

    torch.manual_seed(0)
    model = GraphNetwork()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trained = torch.zeros(len(shards), dtype=torch.int64)  # on each molecule, as often; kept with the weights
    keeps: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    path = options.folder / "checkpoint.pt"
    if path.exists():
        checkpoint = torch.load(path, weights_only=True)
        trained = checkpoint.pop("trained")
        for name, state in checkpoint.items():
            keeps[name].load_state_dict(state)
        print(f"resumes in epoch {loader.epoch}, {loader.remaining} of {len(loader)} steps remain", flush=True)

    for epoch in range(loader.epoch, options.epochs):
        for batch in loader:
            loss = torch.nn.functional.mse_loss(model(batch), batch.y)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            trained[batch.number] += 1
            step = len(loader) - loader.remaining
            print(
                f"epoch {epoch} step {step}: {batch.num_nodes} nodes, {batch.num_edges} edges, {loss:.3f}", flush=True
            )
            if step % options.every == 0 or loader.remaining == 0:
                states = {name: value.state_dict() for name, value in keeps.items()}
                save(path, {**states, "trained": trained})
    counts = np.unique(trained.numpy(), return_counts=True)
    print("times trained on: molecules", dict(zip(*(part.tolist() for part in counts), strict=True)))


if __name__ == "__main__":
    train(arguments())
