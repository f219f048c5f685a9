"""Sizes as real data sets have them, drawn with a fixed seed, and what a plan over them is worth."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Sizes = NDArray[np.int64]


def integers(count: int = 10_000) -> Sizes:
    """Lengths from 10 to 120, each as frequent as any other."""
    return np.random.default_rng(1).integers(10, 121, count)


def speech(count: int = 10_000) -> Sizes:
    """Durations of 10 to 17 s in hundredths of a second, most of them long, as utterances are cut."""
    return (1000 + 700 * np.random.default_rng(2).beta(2.5, 1.2, count)).astype(np.int64)


def atoms(count: int = 20_000) -> Sizes:
    """Heavy atoms of drug-like molecules."""
    return np.clip(np.random.default_rng(3).normal(27, 8, count), 5, 70).astype(np.int64)


def proteins(count: int = 10_000, longest: int = 2000) -> Sizes:
    """Residues of proteins."""
    return np.clip(np.random.default_rng(4).lognormal(np.log(250), 0.7, count), 20, longest).astype(np.int64)


def molecules(count: int = 20_000) -> Sizes:
    """Nodes and edges of molecules: the edges follow the nodes."""
    generator = np.random.default_rng(5)
    nodes = np.clip(generator.normal(27, 8, count), 5, 70).astype(np.int64)
    return np.stack([nodes, (nodes * generator.normal(2.15, 0.12, count)).astype(np.int64)], axis=1)


def crystals(count: int = 20_000) -> Sizes:
    """Nodes and edges of crystals: edges for each node from 5 to 60, by density."""
    generator = np.random.default_rng(6)
    nodes = np.clip(generator.lognormal(np.log(20), 0.8, count), 1, 200).astype(np.int64)
    return np.stack([nodes, (nodes * generator.uniform(5, 60, count)).astype(np.int64)], axis=1)


def mixture(count: int = 20_000) -> Sizes:
    """Nodes and edges of molecules and crystals together."""
    both = np.concatenate([molecules(count // 2), crystals(count - count // 2)])
    return both[np.random.default_rng(7).permutation(count)]


class Dataset:
    """A dataset that knows its tokens."""

    def __init__(self, num_tokens: Any, samples: int) -> None:
        self.num_tokens, self.samples = num_tokens, samples

    def __len__(self) -> int:
        return self.samples
