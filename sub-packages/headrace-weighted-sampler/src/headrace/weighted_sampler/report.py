"""What an epoch was asked for and what it delivers, range by range."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from headrace.weighted_sampler.permutation import Indices
from headrace.weighted_sampler.weights import WeightedRange

HEADINGS = ("range", "size", "ratio", "asked", "draws", "delivered", "share")


@dataclass(frozen=True)
class RangeReport:
    """One line of the report.

    Attributes:
        begin: First index of the range.
        end: One past its last index.
        ratio: As given.
        asked: ``(end - begin) * ratio``, before rounding up.
        draws: Draws an epoch, rounded up.
        delivered: What the ranks together receive: draws, less dropped ones, plus padded ones.
    """

    begin: int
    end: int
    ratio: Fraction
    asked: Fraction
    draws: int
    delivered: int


@dataclass(frozen=True)
class MixtureReport:
    """One epoch of a mixture; ``str()`` of it is a table.

    Attributes:
        epoch: Its number.
        num_replicas: Number of ranks.
        ranges: One entry a range that is drawn from.
        padded: Dataset indices that are delivered once more so that the ranks get equal numbers.
        dropped: Dataset indices that are left out for the same reason.
        not_drawn: Number of samples in no range, or in a range of ratio 0.
    """

    epoch: int
    num_replicas: int
    ranges: tuple[RangeReport, ...]
    padded: tuple[int, ...]
    dropped: tuple[int, ...]
    not_drawn: int

    def __str__(self) -> str:
        total = sum(line.delivered for line in self.ranges)
        rows = [HEADINGS, *(_cells(line, total) for line in self.ranges)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        return "\n".join(
            [
                f"epoch {self.epoch}: {total} samples over {self.num_replicas} ranks, "
                f"{len(self.padded)} padded, {len(self.dropped)} dropped",
                *table,
                f"not drawn: {self.not_drawn} samples in no range or of ratio 0",
            ]
        )


def _cells(line: RangeReport, total: int) -> tuple[str, ...]:
    return (
        f"{line.begin}-{line.end}",
        f"{line.end - line.begin}",
        f"{float(line.ratio):g}",
        f"{float(line.asked):.10g}",
        f"{line.draws}",
        f"{line.delivered}",
        f"{line.delivered / total:.4f}",
    )


def count_by_range(ranges: Sequence[WeightedRange], indices: Indices) -> list[int]:
    """Count the dataset indices that fall in each of the sorted ranges.

    >>> ranges = WeightedRange(0, 3, Fraction(1)), WeightedRange(5, 9, Fraction(1))
    >>> count_by_range(ranges, np.array([1, 8, 5]))
    [1, 2]
    """
    begins = np.array([part.begin for part in ranges], np.int64)
    owner = np.searchsorted(begins, indices, side="right") - 1
    return [int(count) for count in np.bincount(owner, minlength=len(ranges))]


def mixture_report(
    ranges: Sequence[WeightedRange],
    order: Indices,
    padded: Indices,
    dropped: Indices,
    *,
    epoch: int,
    num_replicas: int,
    length: int,
) -> MixtureReport:
    """Count what one epoch delivers.

    Args:
        ranges: Sorted by their first index.
        order: The epoch's global sequence of dataset indices.
        padded: Indices delivered beyond it.
        dropped: Indices at its end that are not delivered.
        epoch: Its number.
        num_replicas: Number of ranks.
        length: Samples in the dataset.
    """
    delivered = np.concatenate([order[: len(order) - len(dropped)], padded])
    return MixtureReport(
        epoch=epoch,
        num_replicas=num_replicas,
        ranges=tuple(
            RangeReport(part.begin, part.end, part.ratio, part.size * part.ratio, part.draws, count)
            for part, count in zip(ranges, count_by_range(ranges, delivered), strict=True)
        ),
        padded=tuple(padded.tolist()),
        dropped=tuple(dropped.tolist()),
        not_drawn=length - sum(part.size for part in ranges),
    )
