"""What size-aware batches promise, on a real GPU: coverage, headroom, no step that runs out of memory, tokens a second.

    python benchmarks/gpu.py          # eight minutes on one H200; needs torch, numpy, tqdm, xxhash and matplotlib
    python benchmarks/gpu.py --dry    # every part on the CPU with tiny models; its figures say nothing

The models are like ESM-2 (150M parameters) and Llama (350M), from their dimensions alone, in bfloat16 with
scaled-dot-product attention; the lengths are 100,000 as of proteins. The allocator may use ``--gib`` of the device, so
that a step is short and there are many. Parts, each with what it needs and nothing of another:

``fit``    fits the memory of padded and of packed batches and measures other batches of an epoch: each in an emptied
           allocator (cold), and one after another (warm), at 0.95 of the memory
``speed``  real tokens a second of five ways to batch, by CUDA events, in turns of a random order, each with a warm
           allocator, and how often that asked the device for memory
``oom``    the time of a step that runs out of memory once, and of the next fifty
``feed``   the same batches from workers through pinned memory, and resident on the device

A part that fails, or for which no time is left, is named in the results. They are written to ``gpu.json`` after every
part, and drawn to ``gpu.png`` at the end.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from headrace.size_aware_batching import (
    BatchMemoryModel,
    DistributedSizeAwareBatchSampler,
    OOMGuard,
    SimulatedMemory,
    fit_budget,
    measure_peaks,
)
from headrace.size_aware_batching.memory import free_memory, out_of_memory
from headrace.size_aware_batching.memory.device import alloc_retries, device_memory, reset_peak

try:
    from torch.nn.attention.varlen import varlen_attn  # from torch 2.10 on
except ImportError:
    varlen_attn = None  # type: ignore[assignment]

BLUE, ORANGE, GREY, RED = "#1f6fb4", "#e8833a", "#9a9a9a", "#b3261e"
TARGET = 0.95
MULTIPLE = 8  # of padded lengths, for tensor cores
IGNORED = -100
GOALS = {
    "coverage": "cold batches within the upper prediction, at least 0.95",
    "headroom": "median unused share of the upper prediction, at most 0.10",
    "out of memory": "warm steps at 0.95 of the memory that ran out, 0",
    "speed": "real tokens a second of planned padded batches over the largest safe fixed ones, at least 4",
}
Batches = list[NDArray[np.int64]]


@dataclass(frozen=True)
class Config:
    """The dimensions of a Transformer."""

    vocabulary: int
    width: int
    heads: int
    layers: int
    hidden: int
    causal: bool


CONFIGS = {
    "esm": Config(33, 640, 20, 30, 2560, causal=False),
    "llama": Config(32_000, 1024, 16, 24, 4096, causal=True),
}
TINY = {"esm": Config(33, 32, 2, 1, 64, causal=False), "llama": Config(64, 32, 2, 1, 64, causal=True)}


class Batch(NamedTuple):
    """Tokens ``[n, longest]`` or, packed, ``[1, sum]``; positions likewise; offsets int32, ``[n + 1]``, if packed."""

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor | None
    longest: int
    real: int

    def to(self, device: torch.device) -> Batch:
        """Copy to the device without waiting."""
        tokens, labels, positions = (
            x.to(device, non_blocking=True) for x in (self.tokens, self.labels, self.positions)
        )
        offsets = None if self.offsets is None else self.offsets.to(device, non_blocking=True)
        return Batch(tokens, labels, positions, offsets, self.longest, self.real)


def collate(samples: Sequence[NDArray[np.int64]], packed: bool) -> Batch:
    """Make a batch on the host."""
    lengths = [len(sample) for sample in samples]
    longest, real = max(lengths), sum(lengths)
    if packed:
        tokens = torch.from_numpy(np.concatenate(samples))[None]
        positions = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None]
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        return Batch(tokens, tokens.clone(), positions, offsets, longest, real)
    longest = -(-longest // MULTIPLE) * MULTIPLE
    padded, labels = np.zeros((len(samples), longest), np.int64), np.full((len(samples), longest), IGNORED)
    for row, sample in enumerate(samples):
        padded[row, : len(sample)] = labels[row, : len(sample)] = sample
    positions = torch.arange(longest).expand(len(samples), longest).contiguous()
    return Batch(torch.from_numpy(padded), torch.from_numpy(labels), positions, None, longest, real)


class Layer(torch.nn.Module):
    """Attention within each sample, padded or packed, and a feed-forward network."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.causal = config.heads, config.causal
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(config.width) for _ in range(2))
        self.qkv = torch.nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = torch.nn.Linear(config.width, config.width, bias=False)
        self.up = torch.nn.Linear(config.width, config.hidden)
        self.down = torch.nn.Linear(config.hidden, config.width)

    def forward(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None, batch: Batch
    ) -> torch.Tensor:
        """Return the next hidden states, ``[rows, length, width]``."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k = rotated(q, *rotation), rotated(k, *rotation)
        if batch.offsets is None:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            attended = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal).transpose(1, 2)
        else:
            attended = attention_by_offsets(q[0], k[0], v[0], batch.offsets, batch.longest, self.causal)[None]
        x = x + self.out(attended.flatten(-2))
        change: torch.Tensor = self.down(functional.gelu(self.up(self.norms[1](x))))
        return x + change


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn pairs of features by the angles of their positions."""
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cosine - other * sine, other * cosine + one * sine], dim=-1)


def attention_by_offsets(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, longest: int, causal: bool
) -> torch.Tensor:
    """Attend within each sample: one kernel on a GPU, else sample by sample; ``[sum, heads, features]``."""
    if q.is_cuda and varlen_attn is not None:
        windows = "window_size" in inspect.signature(varlen_attn).parameters  # torch 2.11 and later
        options: dict[str, Any] = {"window_size": (-1, 0 if causal else -1)} if windows else {"is_causal": causal}
        found = varlen_attn(q, k, v, offsets, offsets, longest, longest, **options)
        assert isinstance(found, torch.Tensor)
        return found
    if not q.is_cuda:
        return q * k + v  # for a dry run: as much memory by the sum as the kernel, and no attention at all
    bounds = offsets.tolist()
    pieces = []
    for start, stop in pairwise(bounds):
        one = (each[start:stop].transpose(0, 1)[None] for each in (q, k, v))
        pieces.append(functional.scaled_dot_product_attention(*one, is_causal=causal)[0].transpose(0, 1))
    return torch.cat(pieces)


class Transformer(torch.nn.Module):
    """Predicts each token (ESM-like) or the next one (Llama-like)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = torch.nn.Embedding(config.vocabulary, config.width)
        self.layers = torch.nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = torch.nn.LayerNorm(config.width)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss of the tokens."""
        x = self.embedding(batch.tokens)
        half = self.config.width // self.config.heads // 2
        rates = 1e4 ** (-torch.arange(half, device=x.device) / half)
        angles = batch.positions[..., None, None] * rates
        rotation = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        padded = batch.offsets is None and not self.config.causal
        mask = (batch.labels != IGNORED)[:, None, None] if padded else None
        for layer in self.layers:
            x = layer(x, rotation, mask, batch)
        logits, labels = functional.linear(self.norm(x), self.embedding.weight), batch.labels
        if self.config.causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Proteins(Dataset[NDArray[np.int64]]):
    """Random tokens of lengths as proteins have: lognormal with a median of 300."""

    def __init__(self, count: int, longest: int, vocabulary: int) -> None:
        drawn = np.random.default_rng(0).lognormal(np.log(300 if longest > 300 else 24), 0.75, count)
        self.lengths = np.clip(drawn, 16 if longest > 300 else 4, longest).astype(np.int64)
        self.tokens = np.random.default_rng(1).integers(1, vocabulary, 2**20)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        start = index * 131 % (len(self.tokens) - int(self.lengths.max()))
        return self.tokens[start : start + int(self.lengths[index])]

    def __len__(self) -> int:
        return len(self.lengths)


class Clock:
    """Seconds between marks: CUDA events on a GPU, which do not make the host wait for the device."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Take note of the moment; keep the host at most eight marks ahead of the device."""
        if not self.cuda:
            self.marks.append(time.perf_counter())
            return
        self.marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]  # torch's
        self.marks[-1].record()
        if len(self.marks) > 8:
            self.marks[-9].synchronize()

    def seconds(self) -> list[float]:
        """Return the seconds between neighbouring marks."""
        pairs = pairwise(self.marks)
        if not self.cuda:
            return [after - before for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairs]


FITTED: dict[tuple[str, bool], BatchMemoryModel] = {}


@dataclass
class Trained:
    """A model in training, its data and the device."""

    name: str
    options: argparse.Namespace
    where: torch.device = field(init=False)
    device: Any = field(init=False)

    def __post_init__(self) -> None:
        dry = self.options.dry
        config = (TINY if dry else CONFIGS)[self.name]
        self.where = torch.device("cpu" if dry else "cuda:0")
        self.device = SimulatedMemory(int(self.options.gib * 2**30)) if dry else "cuda:0"
        self.data = Proteins(self.options.samples, 128 if dry else 2048, config.vocabulary)
        self.lengths = self.data.lengths
        torch.manual_seed(0)
        self.model = Transformer(config).to(self.where, torch.float32 if dry else torch.bfloat16)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-5, fused=not dry, foreach=None if dry else False
        )

    def simulated(self) -> Any:
        """Return a block in which the memory is simulated, where there is no device."""
        return self.device if self.options.dry else nullcontext()

    def batch(self, indices: Iterable[int], packed: bool) -> Batch:
        """Make a batch on the device."""
        return collate([self.data[int(index)] for index in indices], packed).to(self.where)

    def step(self, batch: Batch) -> None:
        """Train."""
        self.optimizer.zero_grad()
        torch.autograd.backward(self.model(batch))
        self.optimizer.step()

    def fitted(self, packed: bool) -> BatchMemoryModel:
        """Return the memory of a batch, fitted once for all parts."""
        if (self.name, packed) not in FITTED:
            FITTED[self.name, packed] = self.fit(packed)
        return FITTED[self.name, packed]

    def fit(self, packed: bool) -> BatchMemoryModel:
        """Fit the memory of a batch."""
        return fit_budget(
            self.step,
            lambda indices: self.batch(indices, packed),
            self.sizes(packed),
            self.device,
            TARGET,
            model=self.model,
            optimizer=self.optimizer,
            features=("S",) if packed else None,
        )

    def sizes(self, packed: bool) -> NDArray[np.int64]:
        """Return the sizes as batches count them."""
        return self.lengths if packed else -(-self.lengths // MULTIPLE) * MULTIPLE

    def planned(self, memory: BatchMemoryModel, packed: bool, epoch: int) -> Batches:
        """Return the batches of an epoch at the budget."""
        options: dict[str, Any] = {"num_replicas": 1, "rank": 0, "oversize": "skip", "seed": 1}
        if packed:
            sampler = DistributedSizeAwareBatchSampler(self.lengths, memory.max_total(memory.budget()), **options)
        else:
            options["cost"] = memory.cost()
            sampler = DistributedSizeAwareBatchSampler(self.sizes(packed), memory.budget(), **options)
        sampler.set_epoch(epoch)
        return [np.array(batch) for batch in sampler]

    def close(self) -> None:
        """Free the device."""
        del self.model, self.optimizer
        free_memory()


def fit(name: str, packed: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Fit the memory of a step; measure batches of an epoch cold, then warm."""
    trained = Trained(name, options)
    with trained.simulated():
        begin = time.perf_counter()
        memory = trained.fitted(packed)
        seconds = time.perf_counter() - begin
        batches = trained.planned(memory, packed, epoch=3)
        cold = measure_peaks(
            lambda indices: trained.step(trained.batch(indices, packed)),
            islice(cycle(batches), options.cold),
            trained.device,
            sizes_of=lambda indices: trained.sizes(packed)[indices],
            warm_up=1,
        )
        upper = np.array([memory.upper(int(n), row, total) for n, row, total in rows_of(cold)])
        warm = warm_steps(trained, memory, packed, batches)
    report = memory.report()
    trained.close()
    return {
        "seconds": seconds,
        "report": str(report),
        "budget": memory.budget(),
        "capacity": memory.capacity,
        "coverage": float((cold.reserved <= upper).mean()),
        "headroom": float(np.median(1 - cold.reserved / upper)),
        "reserved over allocated": float(np.median(cold.reserved / cold.allocated)),
        "cold": {"upper": upper.tolist(), "reserved": cold.reserved.tolist(), "fits": cold.fits.tolist()},
        "warm": warm,
        "warm coverage": float((np.array(warm["allocated"]) <= np.array(warm["upper"])).mean()),
    }


def rows_of(peaks: Any) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.float64]]]:
    """Return count, largest and sum of each batch."""
    return zip(peaks.counts.tolist(), peaks.largest, peaks.sums, strict=True)


def warm_steps(trained: Trained, memory: BatchMemoryModel, packed: bool, batches: Batches) -> dict[str, Any]:
    """Run batches one after another, as training does: nothing is freed in between, but after one that runs out."""
    found: dict[str, Any] = {"allocated": [], "reserved": [], "retries": [], "upper": [], "out of memory": 0}
    device = device_memory(trained.device)
    free_memory()
    before = alloc_retries(device)

    def step_of(own: NDArray[np.int64]) -> None:
        trained.step(trained.batch(own, packed))

    for indices in islice(cycle(batches), trained.options.warm):
        sizes = trained.sizes(packed)[indices]
        reset_peak(device)
        if out_of_memory(partial(step_of, indices)) is not None:
            found["out of memory"] += 1
            free_memory()
            continue
        found["upper"].append(memory.upper(len(sizes), int(sizes.max()), int(sizes.sum())))
        found["allocated"].append(device.peak())
        found["reserved"].append(device.reserved_peak())
        found["retries"].append(alloc_retries(device) - before)
    return found


def fixed(lengths: NDArray[np.int64], count: int, epoch: int) -> Batches:
    """Return random batches of a fixed number of samples."""
    order = np.random.default_rng(epoch).permutation(len(lengths))
    return np.split(order, range(count, len(order), count))


def grouped(lengths: NDArray[np.int64], count: int, epoch: int) -> Batches:
    """Return batches of a fixed number of samples of like length, as Hugging Face's LengthGroupedSampler makes them."""
    rng = np.random.default_rng(epoch)
    pools = np.split(rng.permutation(len(lengths)), range(50 * count, len(lengths), 50 * count))
    ordered = np.concatenate([pool[np.argsort(-lengths[pool], kind="stable")] for pool in pools])
    batches = np.split(ordered, range(count, len(ordered), count))
    return [batches[place] for place in rng.permutation(len(batches))]


def lhotse_buckets(lengths: NDArray[np.int64], tokens: int) -> Batches:
    """Return the batches of lhotse's DynamicBucketingSampler with thirty buckets."""
    sys.path.insert(0, str(Path(__file__).parent / "peers"))
    batching = importlib.import_module("batching")
    return [np.array(batch) for batch in batching.lhotse(lengths, tokens, 1, 0, padded=True)]


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the real tokens a second of ways to batch, in turns."""
    trained = Trained("esm", options)
    sizes = trained.sizes(packed=False)
    with trained.simulated():
        memory, of_packed = trained.fitted(packed=False), trained.fitted(packed=True)
        safe = memory.max_items(int(sizes.max()), memory.budget())
        levels = np.unique(np.quantile(sizes, (0.05, 0.25, 0.5, 0.75, 1.0)).astype(int)).tolist()
        tokens = int(min(memory.max_items(length, memory.budget()) * length for length in levels))
        arms: dict[str, tuple[bool, Batches]] = {
            f"fixed, {safe} samples": (False, fixed(sizes, safe, 0)),
            f"length-grouped, {safe} samples": (False, grouped(sizes, safe, 0)),
            "planned, padded": (False, trained.planned(memory, packed=False, epoch=0)),
            "planned, packed": (True, trained.planned(of_packed, packed=True, epoch=0)),
        }
        if importlib.util.find_spec("lhotse") is not None:
            arms["lhotse, 30 buckets"] = False, lhotse_buckets(sizes, tokens)
        found: dict[str, Any] = {
            name: dict.fromkeys(("tokens", "padded", "seconds", "steps", "allocations", "retries", "out of memory"), 0)
            for name in arms
        }
        endless = {name: cycle(batches) for name, (_, batches) in arms.items()}
        rng = np.random.default_rng(options.seed)
        for _ in range(options.turns):
            for name in rng.permutation([*arms]).tolist():
                turn(trained, arms[name][0], endless[name], found[name])
    trained.close()
    for each in found.values():
        each["tokens a second"] = each["tokens"] / each["seconds"] if each["seconds"] else None
    base = found[f"fixed, {safe} samples"]["tokens a second"]
    for each in found.values():
        each["over fixed"] = each["tokens a second"] / base if base and each["tokens a second"] else None
    return {"arms": found, "lhotse": "lhotse, 30 buckets" in arms, "safe": safe, "tokens of a bucket": tokens}


def turn(trained: Trained, packed: bool, batches: Iterator[NDArray[np.int64]], found: dict[str, Any]) -> None:
    """Train with one way for its share of the time, after a third of it as a warm-up; a step that runs out ends it."""
    cuda = not trained.options.dry
    free_memory()  # what the way before has cached
    share, clock, real, padded = trained.options.seconds / trained.options.turns, Clock(cuda), 0, 0
    try:
        until = time.perf_counter() + share / 3
        while time.perf_counter() < until:
            trained.step(trained.batch(next(batches), packed))
            if cuda:
                torch.cuda.synchronize()
        before, allocations = alloc_retries(), device_allocations(cuda)
        until = time.perf_counter() + share
        clock.mark()
        while time.perf_counter() < until:
            batch = trained.batch(next(batches), packed)
            trained.step(batch)
            clock.mark()
            real += batch.real
            padded += batch.tokens.numel()
    except torch.OutOfMemoryError:
        found["out of memory"] += 1
        return
    seconds = clock.seconds()
    found["tokens"] += real
    found["padded"] += padded
    found["allocations"] += device_allocations(cuda) - allocations
    found["steps"] += len(seconds)
    found["seconds"] += sum(seconds)
    found["retries"] += alloc_retries() - before


def device_allocations(cuda: bool) -> int:
    """Return how often the allocator asked the device for memory so far."""
    return int(torch.cuda.memory_stats(0)["num_device_alloc"]) if cuda else 0


def oom(options: argparse.Namespace) -> dict[str, Any]:
    """Let one step run out of memory; time it and its neighbours."""
    trained = Trained("esm", options)
    inject = False

    def loss_of(part: Batch) -> torch.Tensor:
        nonlocal inject
        loss: torch.Tensor = trained.model(part)
        if inject:
            inject = False
            torch.empty(2**50, dtype=torch.uint8, device=trained.where)  # no device has it
        return loss

    with trained.simulated():
        memory = trained.fitted(packed=False)
        planned = trained.planned(memory, packed=False, epoch=0)
        batch = trained.batch(planned[int(np.argmax([len(each) for each in planned]))], packed=False)
        clock = Clock(not options.dry)
        with OOMGuard(trained.model, trained.optimizer, length=lambda part: len(part.tokens), split=halves) as guard:
            for number in range(3 + 2 * options.after + 1):
                inject = number == 3 + options.after
                guard.step(batch, loss_of)
                clock.mark()
        events = len(guard.events)
    seconds = clock.seconds()[2:]
    trained.close()
    usual = median(seconds[: options.after])
    return {
        "events": events,
        "usual": usual,
        "the step": seconds[options.after],
        "after": seconds[options.after + 1 :],
        "the step over usual": seconds[options.after] / usual,
        "median after over usual": median(seconds[options.after + 1 :]) / usual,
    }


def halves(batch: Batch) -> list[Batch]:
    """Cut a padded batch in two."""
    count = len(batch.tokens)
    if count < 2:
        return [batch]
    return [
        batch._replace(tokens=batch.tokens[rows], labels=batch.labels[rows], positions=batch.positions[rows])
        for rows in (slice(0, count // 2), slice(count // 2, count))
    ]


def padded(samples: Sequence[NDArray[np.int64]]) -> Batch:
    """Collate in a worker."""
    return collate(samples, packed=False)


def feed(options: argparse.Namespace) -> dict[str, Any]:
    """Train on the same batches from workers and resident on the device."""
    trained = Trained("esm", options)
    cuda = not options.dry
    with trained.simulated():
        memory = trained.fitted(packed=False)
    batches = trained.planned(memory, packed=False, epoch=0)[: options.fed]

    def rate(made: Iterable[Batch]) -> float:
        clock, real = Clock(cuda), 0
        for number, batch in enumerate(made):
            trained.step(batch.to(trained.where))
            clock.mark()
            real += batch.real * (number > 0)  # the clock begins after the first
        return real / sum(clock.seconds())

    resident = [trained.batch(indices, packed=False) for indices in batches]
    rate(resident[:3])
    loader: Any = DataLoader(
        trained.data,
        batch_sampler=[batch.tolist() for batch in batches],
        collate_fn=padded,
        num_workers=options.workers,
        pin_memory=cuda,
        prefetch_factor=4,
    )
    rates = {"resident": rate(resident), "workers": rate(loader)}
    rates |= {"resident again": rate(resident)}
    trained.close()
    return rates | {"workers over resident": 2 * rates["workers"] / (rates["resident"] + rates["resident again"])}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "fit esm padded": lambda options: fit("esm", packed=False, options=options),
    "fit esm packed": lambda options: fit("esm", packed=True, options=options),
    "speed": speed,
    "oom": oom,
    "feed": feed,
    "fit llama padded": lambda options: fit("llama", packed=False, options=options),
    "fit llama packed": lambda options: fit("llama", packed=True, options=options),
}


def goals(parts: dict[str, Any]) -> dict[str, Any]:
    """Return what was reached of each goal, None where its part is missing."""
    fits = [found for name, found in parts.items() if name.startswith("fit") and "error" not in found]
    arms = parts.get("speed", {}).get("arms", {})
    return {
        "coverage": min((each["coverage"] for each in fits), default=None),
        "headroom": max((each["headroom"] for each in fits), default=None),
        "out of memory": sum(each["warm"]["out of memory"] for each in fits) if fits else None,
        "speed": arms.get("planned, padded", {}).get("over fixed"),
    }


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="gpu", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on the CPU with tiny models: shows only that it runs")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder of gpu.json and gpu.png")
    parser.add_argument("--gib", type=float, help="memory that the allocator may use (default 40; dry 0.006)")
    parser.add_argument("--seconds", type=float, help="of each way to batch, a third more to warm up (default 30)")
    parser.add_argument("--minutes", type=float, default=8, help="after which no part begins")
    parser.add_argument("--parts", nargs="*", choices=[*PARTS], default=[*PARTS], help="leave out the others")
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns")
    options = parser.parse_args(words)
    dry = options.dry
    options.gib = options.gib or (0.006 if dry else 40)
    options.seconds = options.seconds or (0.2 if dry else 30)
    options.samples, options.cold, options.warm = (300, 4, 6) if dry else (100_000, 40, 200)
    options.turns, options.after, options.fed, options.workers = (1, 3, 4, 1) if dry else (2, 50, 100, 8)
    if not dry and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: use a machine that has one, or --dry")
    return options


def main(words: Sequence[str] | None = None) -> None:
    """Run the parts, write what they found, and draw it."""
    options = arguments(words)
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    machine = {"torch": torch.__version__, "python": platform.python_version(), "processors": os.cpu_count()}
    if not options.dry:
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.gib * 2**30 / torch.cuda.mem_get_info(0)[1]), 0)
        machine |= {"device": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
    parts: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name in options.parts:
        started = time.perf_counter()
        if started - begin > 60 * options.minutes:
            left_out[name] = f"{options.minutes:g} minutes had passed"
        else:
            try:
                parts[name] = PARTS[name](options)
            except Exception:
                parts[name] = {"error": traceback.format_exc()}
                free_memory()
            parts[name]["part took"] = time.perf_counter() - started
            print(f"{name}: {parts[name].get('error', 'done')} ({parts[name]['part took']:.0f} s)", flush=True)
        result = {"dry": options.dry, "machine": machine, "gib": options.gib, "goals": goals(parts)}
        text = json.dumps(result | {"left out": left_out, "parts": parts}, indent=1)
        unfinished = options.out / "gpu.json.unfinished"
        unfinished.write_text(text)
        unfinished.replace(options.out / "gpu.json")  # whoever ends this in between keeps the parts before
    for name, reached in goals(parts).items():
        print(f"{GOALS[name]}: {'not measured' if reached is None else f'{reached:.3g}'}")
    draw(parts, options)
    if any("error" in each for each in parts.values()):
        sys.exit(1)


def draw(parts: dict[str, Any], options: argparse.Namespace) -> None:
    """Draw each part that was measured."""
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10}):
        figure = Figure(figsize=(12, 8), layout="constrained")
        (cold, warm), (bars, times) = figure.subplots(2, 2)
        measured = {name: each for name, each in parts.items() if "error" not in each}
        fits = {name: each for name, each in measured.items() if name.startswith("fit")}
        for number, (name, each) in enumerate(fits.items()):
            color, label = (BLUE, ORANGE, GREY, RED)[number % 4], name.removeprefix("fit ")
            upper, reserved = (np.array(each["cold"][key]) / 2**30 for key in ("upper", "reserved"))
            cold.plot(upper, reserved, "o", markersize=3, color=color, label=f"{label}: {each['coverage']:.0%} within")
            steps = each["warm"]
            warm.plot(np.array(steps["reserved"]) / 2**30, color=color, linewidth=1.5, label=f"{label}, reserved")
            warm.plot(np.array(steps["allocated"]) / 2**30, ".", color=color, markersize=3)
            for step in np.flatnonzero(np.diff(steps["retries"], prepend=0)):
                warm.axvline(step, color=color, linewidth=0.5)
        if fits:
            capacity = max(each["capacity"] for each in fits.values()) / 2**30
            cold.plot([0, capacity], [0, capacity], color=GREY, linewidth=1)
            warm.axhline(capacity, color=RED, linewidth=1, label="memory")
            lowest = 0.98 * min(min(each["cold"]["reserved"]) for each in fits.values()) / 2**30
            cold.set(xlim=(lowest, capacity), ylim=(lowest, capacity))
            warm.set_ylim(0, 1.05 * capacity)
            for axes in (cold, warm):
                axes.legend(frameon=False, fontsize=8, loc="lower right")
        cold.set(
            title="In an emptied allocator (below the line: within)",
            xlabel="upper prediction, GiB",
            ylabel="reserved, GiB",
        )
        warm.set(title="Steps one after another (dots: tensors; lines: retries)", xlabel="step", ylabel="GiB")
        if "speed" in measured:
            arms = {name: each["over fixed"] for name, each in measured["speed"]["arms"].items() if each["over fixed"]}
            bars.barh([*arms], [*arms.values()], color=[BLUE if name.startswith("planned") else GREY for name in arms])
            for place, over in enumerate(arms.values()):
                bars.text(over, place, f" {over:.1f}", va="center")
            bars.set_xlim(0, 1.15 * max(arms.values(), default=1))
            bars.invert_yaxis()
        bars.set(title="Real tokens a second, over those of the fixed batches")
        if "oom" in measured:
            found = measured["oom"]
            seconds = np.array([found["the step"], *found["after"]]) / found["usual"]
            times.plot(seconds, "o-", color=BLUE, markersize=3)
            times.axhline(1, color=GREY, linewidth=1, label="median of the steps before")
            times.set_ylim(0, 1.1 * seconds.max())
            times.legend(frameon=False)
        times.set(title="A step that runs out of memory once, and the next", xlabel="step", ylabel="time over usual")
        if options.dry:
            figure.suptitle("A dry run: these figures say nothing", color=RED)
        figure.savefig(options.out / "gpu.png", dpi=110)


if __name__ == "__main__":
    main()
