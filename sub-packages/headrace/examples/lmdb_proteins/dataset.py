"""Proteins in an LMDB file as a dataset that knows its sizes without reading them."""

import operator
import os
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import torch
from numpy.typing import NDArray
from store import letters, opened, read_lengths
from torch import Tensor
from torch.utils.data import Dataset

PAD = 0  # no letter of a protein


class ProteinLMDBDataset(Dataset[Tensor]):
    """Proteins as tensors of bytes, shape ``[length]``.

    Each process opens the file for itself, at its first access: an LMDB environment must not cross a fork, and
    cannot be pickled.

    Args:
        path: File that ``convert.py`` made.
        max_length: Longer proteins are cut here; give the same number to the batch sampler.
    """

    def __init__(self, path: str | Path, max_length: int | None = None) -> None:
        self.path, self.max_length = Path(path), max_length
        self._opened: tuple[int, lmdb.Environment, NDArray[np.int32]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the open file behind."""
        return {**self.__dict__, "_opened": None}

    def _file(self) -> tuple[lmdb.Environment, NDArray[np.int32]]:
        if self._opened is None or self._opened[0] != os.getpid():
            environment = opened(self.path)
            self._opened = os.getpid(), environment, read_lengths(environment)
        return self._opened[1:]

    def __len__(self) -> int:
        return len(self._file()[1])

    def num_tokens(self, index: int) -> int:
        """Return how many letters a protein has as it is stored, without reading it."""
        return int(self._file()[1][self._checked(index)])

    def __getitem__(self, index: int) -> Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        """Return several proteins in one transaction; a DataLoader asks for whole batches."""
        found = letters(self._file()[0], map(self._checked, indices))
        return [torch.frombuffer(bytearray(protein[: self.max_length]), dtype=torch.uint8) for protein in found]

    def _checked(self, index: int) -> int:
        place = operator.index(index)
        if not 0 <= place < len(self):
            raise IndexError(f"index: got {index}, {self.path} holds {len(self)} proteins")
        return place


def padded(proteins: list[Tensor]) -> Tensor:
    """Stack proteins, padded to the longest: shape ``[batch, longest]``."""
    return torch.nn.utils.rnn.pad_sequence(proteins, batch_first=True, padding_value=PAD)
