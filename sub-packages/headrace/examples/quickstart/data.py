"""From sources to shards, from shards to samples, from samples to batches."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from corpus import Sources
from model import PAD
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from tqdm import tqdm

from headrace.webdatamodule.datamodule import Split, WebDataModule
from headrace.webdatamodule.shards import write_tars
from headrace.weighted_sampler import NamedConcatDataset

SAMPLES_PER_SHARD = 8192
Batches = list[list[int]]


class ByteDataset(Dataset[Tensor]):
    """Byte sequences as integer tensors, each cut at ``max_length`` bytes."""

    def __init__(self, texts: Sequence[bytes], max_length: int) -> None:
        self.texts = [text[:max_length] for text in texts]
        self.sizes = np.array([len(text) for text in self.texts], dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        """Return one sample, shape ``[bytes]``."""
        return torch.frombuffer(bytearray(self.texts[index]), dtype=torch.uint8).long()


def shards(make: Callable[[], Sources], directory: Path) -> dict[str, Path]:
    """Write each source to a folder of shards, unless an earlier run did; return the folders by name."""
    finished = directory / "finished"
    if not finished.exists():
        sources = make()
        for name, texts in sources.items():
            samples = [(f"{number:07d}", {"bytes": text}) for number, text in enumerate(texts)]
            write_tars(samples, directory / name, n_shards=-(-len(texts) // SAMPLES_PER_SHARD))
        finished.write_text("\n".join(f"{name} {len(texts)}" for name, texts in sources.items()))
    lines = (line.rsplit(" ", 1) for line in finished.read_text().splitlines())
    return {name: directory / name for name, _ in lines}


def read(name: str, directory: Path, max_length: int) -> ByteDataset:
    """Read all samples of a folder of shards through the data module."""
    counts = dict(line.rsplit(" ", 1) for line in (directory.parent / "finished").read_text().splitlines())
    module = WebDataModule(
        n_samples={Split.train: int(counts[name])},
        suffix_keys_wds="bytes",
        dirs_tars_wds={Split.train: str(directory)},
        global_batch_size=1,
        kwargs_wds={Split.train: {"shardshuffle": False}},
    )
    module.setup("fit")
    loader = module.train_dataloader()
    return ByteDataset(
        [text for (text,) in tqdm(loader, desc=f"reading {name}", unit="sample", disable=None)], max_length
    )


def padded(samples: Sequence[Tensor]) -> Tensor:
    """Collate samples to ``[batch, longest]``."""
    return pad_sequence(list(samples), batch_first=True, padding_value=PAD)


def fixed_batches(order: NDArray[np.int64], size: int) -> Batches:
    """Cut the order into batches of ``size`` samples."""
    return [order[start : start + size].tolist() for start in range(0, len(order), size)]


def concatenated_sizes(datasets: Mapping[str, ByteDataset]) -> tuple[NamedConcatDataset[Tensor], NDArray[np.int64]]:
    """Return the datasets as one, with the sizes of its samples."""
    return NamedConcatDataset(datasets), np.concatenate([dataset.sizes for dataset in datasets.values()])
