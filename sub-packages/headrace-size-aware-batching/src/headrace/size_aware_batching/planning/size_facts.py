"""What a pass over all sizes tells."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from headrace.size_aware_batching._shared.digest import array_digest


@dataclass(frozen=True, eq=False)
class SizeFacts:
    """Facts of the sizes of all samples, each found by a pass over them when it is first asked for.

    Args:
        sizes: Checked, and safe from changes.
    """

    sizes: NDArray[Any]

    @cached_property
    def largest(self) -> int | None:
        """The largest size, where sizes are whole and have one column."""
        if self.sizes.ndim > 1 or self.sizes.dtype.kind not in "iu":
            return None
        return int(self.sizes.max(initial=0))

    @cached_property
    def digest(self) -> str:
        """Stands for the sizes in fingerprints and in names of files, whatever their type."""
        return array_digest(self.sizes)
