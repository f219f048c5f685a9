"""Run a function over a dataset and note the peak of memory that each item needs."""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch
from tqdm import tqdm

from headrace.size_aware_batching.messages import shortlist, warn

Data = TypeVar("Data")
Feature = TypeVar("Feature")

_NAMED = 10  # items that the closing message names; each has had a warning of its own


class Meter(Protocol):
    """Measures the memory of one device."""

    def start(self) -> None:
        """Free what is not in use and begin anew."""

    def peak(self) -> int:
        """Return the most bytes in use at once since ``start``."""


def collect_peaks(
    dataset: Iterable[Data],
    work: Callable[[Data], Feature],
    meter: Meter,
    cleanup: Callable[[], None] | None = None,
) -> tuple[list[Feature], list[int]]:
    """Run ``work`` on each item and return what it returned beside the peaks in bytes.

    An item that runs out of device memory is left out of both lists, with a warning that names its position.
    ``cleanup`` runs after each item, also after one that failed.
    """
    features: list[Feature] = []
    peaks: list[int] = []
    skipped: list[int] = []
    for position, data in enumerate(tqdm(dataset, desc="peak memory", delay=1, leave=False)):
        try:
            feature, peak = measured(work, data, meter)
        except torch.cuda.OutOfMemoryError as error:
            skipped.append(position)
            warn(f"the item at position {position} does not fit into memory and is left out: {error}")
        else:
            features.append(feature)
            peaks.append(peak)
        finally:
            if cleanup is not None:
                cleanup()
    if len(skipped) > 1:
        named = shortlist(skipped[:_NAMED], len(skipped))
        warn(f"{len(skipped)} of {len(skipped) + len(peaks)} items did not fit into memory: positions {named}")
    return features, peaks


def measured(work: Callable[[Data], Feature], data: Data, meter: Meter) -> tuple[Feature, int]:
    """Run ``work`` on one item between two readings of the meter."""
    meter.start()
    feature = work(data)
    return feature, meter.peak()
