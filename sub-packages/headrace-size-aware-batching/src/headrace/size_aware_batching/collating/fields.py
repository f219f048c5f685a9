"""Which fields a batch has, and how long they are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from headrace.size_aware_batching.collating.rows import lengths_of, refuse_other_shape
from headrace.size_aware_batching.collating.tree import Path

Name = str | int


@dataclass
class Fields:
    """Which fields with a first dimension were met in a batch.

    Args:
        fixed: Names of those whose first dimension is no length.
    """

    fixed: Sequence[Name]
    lengths: dict[Path, list[int]] = field(default_factory=dict)
    names: set[Name] = field(default_factory=set)

    def enter(self, tensors: list[torch.Tensor], path: Path) -> bool:
        """Note a field, check its shapes, and return whether it is a fixed one."""
        self.names.update(path[-1:])
        is_fixed = bool(path) and path[-1] in self.fixed
        refuse_other_shape(tensors, path, is_fixed)
        if not is_fixed:
            self.lengths[path] = lengths_of(tensors)
        return is_fixed

    def refuse_unknown(self, names: Iterable[Name], argument: str) -> None:
        """Raise a ValueError where a name fits no field."""
        if unknown := [name for name in names if name not in self.names]:
            have = ", ".join(sorted(map(repr, self.names))) or "no name"
            raise ValueError(f"{argument}: got {unknown}, but the samples' tensors have {have}")
