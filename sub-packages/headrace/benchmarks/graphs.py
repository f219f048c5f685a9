"""Batches of molecules by nodes and edges, against those of PyTorch Geometric and fairchem.

    python benchmarks/graphs.py               # half a minute; needs rdkit, safetensors and torch_geometric

The molecules are those of examples/graphs. PyTorch Geometric's ``DynamicBatchSampler`` and fairchem's
``MaxAtomDistributedBatchSampler`` (left out where fairchem-core is not installed) know one budget each. The former
knows no ranks: its batches are dealt to them in turn, and the last step is left out where it is not whole.
"""

import argparse
import importlib
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler

Epochs = list[list[list[list[int]]]]  # samples, by epoch, rank and step
SEED = 0


class Sizes:
    """A dataset as far as samplers look into it.

    Args:
        sizes: Nodes and edges, shape ``[samples, 2]``.
    """

    def __init__(self, sizes: NDArray[np.int64], data: Callable[..., Any]) -> None:
        self.nodes = sizes[:, 0].tolist()
        self.graphs = [data(num_nodes=n, edge_index=torch.empty(2, e, dtype=torch.int64)) for n, e in sizes.tolist()]

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, index: int) -> Any:
        return self.graphs[index]

    def get_metadata(self, name: str, indices: list[int]) -> list[int]:  # noqa: ARG002 -- it is "natoms"
        """What fairchem asks for."""
        return [self.nodes[index] for index in indices]


def ours(sizes: NDArray[np.int64], budget: tuple[int, int], world: int) -> Epochs:
    ranks = [
        DistributedSizeAwareBatchSampler(sizes, budget, num_replicas=world, rank=rank, seed=SEED)
        for rank in range(world)
    ]
    epochs = []
    for epoch in range(2):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        epochs.append([list(sampler) for sampler in ranks])
        assert [len(own) for own in epochs[-1]] == [len(sampler) for sampler in ranks]
    return epochs


def geometric(dataset: Sizes, budget: int, mode: str, world: int) -> Epochs:
    sampler = importlib.import_module("torch_geometric.loader").DynamicBatchSampler(dataset, budget, mode, shuffle=True)
    torch.manual_seed(SEED)
    epochs = []
    for _ in range(2):
        batches = [batch for batch in sampler]  # noqa: C416 -- list() asks for its length, which raises
        whole = len(batches) // world * world
        epochs.append([batches[rank:whole:world] for rank in range(world)])
    return epochs


def fairchem(dataset: Sizes, budget: int, world: int) -> Epochs | None:
    try:
        module = importlib.import_module("fairchem.core.datasets.samplers.max_atom_distributed_sampler")
    except ImportError as error:
        print(f"fairchem-core is left out: {error}", file=sys.stderr)
        return None
    ranks = [module.MaxAtomDistributedBatchSampler(dataset, budget, world, rank, SEED) for rank in range(world)]
    epochs = []
    for epoch in range(2):
        for sampler in ranks:
            sampler.set_epoch_and_start_iteration(epoch, 0)
        epochs.append([list(sampler) for sampler in ranks])
    return epochs


def again(epochs: Epochs, samples: int) -> float:
    """How often two samples of a batch share one in the next epoch too, times chance."""
    owner = np.full((2, samples), -1)
    pairs = [0.0, 0.0]
    for epoch, ranks in enumerate(epochs):
        for number, batch in enumerate(batch for own in ranks for batch in own):
            owner[epoch, batch] = number
        pairs[epoch] = sum(math.comb(count, 2) for count in Counter(owner[epoch, owner[epoch] >= 0].tolist()).values())
    both = Counter(map(tuple, owner[:, (owner >= 0).all(axis=0)].T.tolist()))
    return sum(math.comb(count, 2) for count in both.values()) / (pairs[0] * pairs[1] / math.comb(samples, 2))


def row(epochs: Epochs, sizes: NDArray[np.int64], budget: tuple[int, int]) -> list[str]:
    """Return the figures of a sampler."""
    ranks = epochs[0]
    totals = np.array([[sizes[batch].sum(axis=0) for batch in own] for own in ranks])  # [ranks, steps, 2]
    flat = totals.reshape(-1, 2) / budget
    bound = (sizes.sum(axis=0) / budget).max()
    work = totals[..., 1]
    seen = Counter(index for own in ranks for batch in own for index in batch)
    lost, repeated = len(sizes) - len(seen), sum(seen.values()) - len(seen)
    return [
        f"{len(flat) / bound:.3f}",
        f"{flat[:, 0].max():.3f}",
        f"{flat[:, 1].max():.3f}",
        f"{(flat > 1).any(axis=1).mean():.0%}",
        f"{(work.max(axis=0) / work.mean(axis=0)).mean():.3f}",
        f"{lost}, {repeated}",
        f"{again(epochs, len(sizes)):.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--edges", type=int, default=10_000)
    parser.add_argument("--world", type=int, default=8)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "graphs"))
    graphs = list(importlib.import_module("molecules").molecules())
    sizes = np.array([[len(graph.element), len(graph.distance)] for graph in graphs])
    dataset = Sizes(sizes, importlib.import_module("torch_geometric.data").Data)
    budget, world = (options.nodes, options.edges), options.world
    found = {
        "headrace, both budgets": ours(sizes, budget, world),
        "DynamicBatchSampler, nodes": geometric(dataset, options.nodes, "node", world),
        "DynamicBatchSampler, edges": geometric(dataset, options.edges, "edge", world),
        "MaxAtomDistributedBatchSampler": fairchem(dataset, options.nodes, world),
    }
    print(f"{len(sizes)} molecules, {options.nodes} nodes and {options.edges} edges, {world} ranks\n")
    print("| | batches, times the bound | most nodes | most edges | batches over a budget | step imbalance | lost, "
          "repeated | co-occurrence |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    for name, epochs in found.items():
        if epochs is not None:
            print(f"| {name} | {' | '.join(row(epochs, sizes, budget))} |")


if __name__ == "__main__":
    main()
