"""Estimates of memory without a device, against the memory that training takes: eleven small models of different kinds.

    python benchmarks/estimates.py                         # some two minutes
    python benchmarks/estimates.py "U-Net" "LSTM"          # only these

A job is a new model with one batch, trained for three steps. The truth is what it takes of a `SimulatedMemory` with a
caching allocator: its tensors, and what the allocator reserves for them. As in xMem (arXiv 2510.21048):

- ``error``: mean of |estimate / truth - 1| over the batches of a model;
- ``fail``: probability of failure, the share of jobs that need more than was estimated, so that they would run out of
  memory on a device of exactly that size; ``fail 5%``: on one of which the budget leaves 5 % free.

``tensors`` and ``reserved`` are the estimates as they are, ``scaled`` the reserved ones after `Peaks.scaled_to` three
measured batches.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from headrace.size_aware_batching import SimulatedMemory, estimate_peaks, measure_peaks

WIDTH, HEADS, CLASSES = 64, 4, 1000
STEPS = 3
FEW = [0, 2, 3]  # the batches that are measured to scale the others: small ones and a middle one

Sizes: TypeAlias = NDArray[np.int64]
Loss: TypeAlias = Callable[[Any, Sizes], torch.Tensor]


class Convolution(nn.Module):
    """A classifier of images with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 16), (16, 32), (32, WIDTH)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> Any:
        return self.head(self.layers(images).mean((2, 3)))


class UNet(nn.Module):
    """Images to images, with connections that keep the early activations."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(self.block(*sizes) for sizes in ((3, 16), (16, 32), (32, WIDTH)))
        self.up = nn.ModuleList(self.block(*sizes) for sizes in ((WIDTH + 32, 32), (32 + 16, 16)))
        self.head = nn.Conv2d(16, 3, 1)

    @staticmethod
    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU())

    def forward(self, images: torch.Tensor) -> Any:
        kept = [self.down[0](images)]
        for block in self.down[1:]:
            kept.append(block(functional.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for block in self.up:
            x = block(torch.cat([functional.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return self.head(x)


class Recurrent(nn.Module):
    """An LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.layers(self.embedding(tokens))[0])


class Attention(nn.Module):
    """Attention by torch's fused kernel, or by single operators, which keep all weights."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused, self.inner, self.outer = fused, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        query, key, value = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.inner(x).chunk(3, -1))
        if self.fused:
            mixed = functional.scaled_dot_product_attention(query, key, value)
        else:
            mixed = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1) @ value
        return self.outer(mixed.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """A mixture of experts that take at most so many tokens each, as in the Switch Transformer."""

    def __init__(self, experts: int = 4, capacity: float = 1.25) -> None:
        super().__init__()
        self.experts, self.capacity, self.router = experts, capacity, nn.Linear(WIDTH, experts)
        self.first = nn.Parameter(torch.randn(experts, WIDTH, 4 * WIDTH) / 8)
        self.second = nn.Parameter(torch.randn(experts, 4 * WIDTH, WIDTH) / 16)

    def forward(self, x: torch.Tensor) -> Any:
        tokens = x.flatten(0, 1)
        room = int(self.capacity * len(tokens) / self.experts) + 1
        gates, chosen = self.router(tokens).softmax(-1).max(-1)
        of_expert = functional.one_hot(chosen, self.experts)
        place = (of_expert.cumsum(0) * of_expert).sum(-1) - 1
        slot = torch.where(place < room, chosen * room + place, self.experts * room)  # the last one is for the rest
        slots = tokens.new_zeros(self.experts * room + 1, WIDTH).index_copy(0, slot, tokens)[:-1]
        hidden = functional.gelu(torch.bmm(slots.view(self.experts, room, WIDTH), self.first))
        results = torch.bmm(hidden, self.second).flatten(0, 1)
        return (torch.cat([results, results.new_zeros(1, WIDTH)])[slot] * gates[:, None]).view_as(x)


class Layer(nn.Module):
    """A layer of a transformer."""

    def __init__(self, fused: bool, experts: bool) -> None:
        super().__init__()
        dense = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.attention, self.mixer = Attention(fused), Experts() if experts else dense
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attention(self.norms[0](x))
        return x + self.mixer(self.norms[1](x))


class Transformer(nn.Module):
    """A language model."""

    def __init__(
        self,
        *,
        layers: int = 3,
        fused: bool = True,
        experts: bool = False,
        checkpointed: bool = False,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.layers = nn.ModuleList(Layer(fused, experts) for _ in range(layers))
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)


class Graph(nn.Module):
    """Messages along the edges of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 1)
        self.messages = nn.ModuleList(nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.SiLU()) for _ in range(3))
        self.updates = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

    def forward(self, nodes: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> Any:
        x = self.embedding(nodes)
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = message(torch.cat([x[source], x[target]], -1))
            x = x + update(torch.cat([x, torch.zeros_like(x).index_add(0, target, sent)], -1))
        return self.head(x)


class Recommender(nn.Module):
    """Large tables of embeddings under a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20_000, 16, mode="sum") for _ in range(3))
        self.layers = nn.Sequential(nn.Linear(48, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, items: torch.Tensor) -> Any:
        return self.layers(torch.cat([table(items) for table in self.tables], -1))


def of_images(model: nn.Module, sizes: Sizes) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(len(sizes), 3, int(sizes.max()), int(sizes.max()))).square().mean()
    return loss


def of_tokens(model: nn.Module, sizes: Sizes) -> torch.Tensor:
    tokens = torch.randint(CLASSES, (len(sizes), int(sizes.max())))
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def in_mixed_precision(model: nn.Module, sizes: Sizes) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return of_tokens(model, sizes)


def of_graphs(model: nn.Module, sizes: Sizes) -> torch.Tensor:
    nodes, edges = sizes.sum(0).tolist()
    graph = (torch.randint(high, (count,)) for high, count in ((100, nodes), (nodes, edges), (nodes, edges)))
    loss: torch.Tensor = model(*graph).square().mean()
    return loss


def of_items(model: nn.Module, sizes: Sizes) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randint(20_000, (len(sizes), int(sizes.max())))).square().mean()
    return loss


def batches(counts: Sequence[int], lengths: Sequence[Any]) -> list[Sizes]:
    """Return batches of equal samples."""
    return [np.array([length] * count) for count in counts for length in lengths]


class Kind(NamedTuple):
    """A model, its loss, and six batches in ascending order."""

    make: Callable[[], nn.Module]
    loss: Loss
    batches: list[Sizes]

    def make_step(self) -> Callable[[Sizes], None]:
        """Return a step of a new model."""
        torch.manual_seed(0)
        model = self.make()
        optimizer = torch.optim.AdamW(model.parameters())

        def step(sizes: Sizes) -> None:
            optimizer.zero_grad()
            torch.autograd.backward(self.loss(model, sizes))
            optimizer.step()

        return step


TEXTS = batches((4, 16, 48), (48, 160))
KINDS = {
    "convolution": Kind(Convolution, of_images, batches((4, 16, 32), (32, 64))),
    "U-Net": Kind(UNet, of_images, batches((4, 12, 24), (32, 64))),
    "LSTM": Kind(Recurrent, of_tokens, batches((4, 16, 48), (24, 80))),
    "transformer": Kind(Transformer, of_tokens, TEXTS),
    "without fused attention": Kind(partial(Transformer, fused=False), of_tokens, TEXTS),
    "mixture of experts": Kind(partial(Transformer, experts=True), of_tokens, TEXTS),
    "checkpointed activations": Kind(partial(Transformer, layers=6, checkpointed=True), of_tokens, TEXTS),
    "mixed precision": Kind(Transformer, in_mixed_precision, TEXTS),
    "tied weights": Kind(partial(Transformer, tied=True), of_tokens, TEXTS),
    "graph network": Kind(Graph, of_graphs, batches((4, 16, 48), ((30, 60), (40, 240)))),
    "tables of embeddings": Kind(Recommender, of_items, batches((64, 512, 4096), (8, 64))),
}


class Figures(NamedTuple):
    """Errors and failures of the estimates of a model, or their means over models."""

    tensors_error: float
    tensors_fail: float
    reserved_error: float
    reserved_fail: float
    reserved_fail_5: float
    scaled_error: float
    scaled_fail: float
    scaled_fail_5: float


def of_job(kind: Kind, batch: Sizes) -> tuple[int, int]:
    """Return the bytes of the tensors of a job at its peak, and those that the allocator reserves."""
    memory = SimulatedMemory(caching=True)
    with memory:
        step = kind.make_step()
        for _ in range(STEPS):
            step(batch)
    return memory.peak(), memory.reserved_peak()


def figures(kind: Kind) -> Figures:
    """Estimate the peaks of a model, and train it."""
    estimated = estimate_peaks(kind.make_step, kind.batches)
    tensors, reserved = np.array([of_job(kind, batch) for batch in kind.batches]).T
    memory = SimulatedMemory(caching=True)
    with memory:
        measured = measure_peaks(kind.make_step(), [kind.batches[place] for place in FEW], memory)
    scaled = estimated.scaled_to(measured)

    def error(estimate: NDArray[Any], truth: NDArray[Any]) -> float:
        return float(np.abs(estimate / truth - 1).mean())

    def fail(estimate: NDArray[Any], truth: NDArray[Any], free: float = 0.0) -> float:
        return float((truth > estimate / (1 - free)).mean())

    return Figures(
        error(estimated.allocated, tensors),
        fail(estimated.allocated, tensors),
        error(estimated.reserved, reserved),
        fail(estimated.reserved, reserved),
        fail(estimated.reserved, reserved, 0.05),
        error(scaled.reserved, reserved),
        fail(scaled.reserved, reserved),
        fail(scaled.reserved, reserved, 0.05),
    )


if __name__ == "__main__":
    groups = ("tensors: error", "fail", "reserved: error", "fail", "fail 5%", "scaled: error", "fail", "fail 5%")
    print(f"{'':26}" + "".join(f"{group:>16}" for group in groups))
    rows = []
    for name in sys.argv[1:] or KINDS:
        rows.append(figures(KINDS[name]))
        print(f"{name:26}" + "".join(f"{value:16.3f}" for value in rows[-1]), flush=True)
    print(f"{'mean':26}" + "".join(f"{value:16.3f}" for value in np.mean(rows, axis=0)))
