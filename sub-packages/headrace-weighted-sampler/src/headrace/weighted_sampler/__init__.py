"""Several datasets mixed by weight across ranks, exactly and reproducibly."""

from importlib.metadata import version

from headrace.weighted_sampler._stopping import Stopping
from headrace.weighted_sampler.interleaved import InterleavedDataset
from headrace.weighted_sampler.plotting import plot_mixture
from headrace.weighted_sampler.report import MixtureReport, SourceReport
from headrace.weighted_sampler.sampler import WeightedDistributedSampler
from headrace.weighted_sampler.schedule import cosine_schedule
from headrace.weighted_sampler.subset import repetition_matched_subset
from headrace.weighted_sampler.weights import NamedConcatDataset, Weight

__all__ = [
    "InterleavedDataset",
    "MixtureReport",
    "NamedConcatDataset",
    "SourceReport",
    "Stopping",
    "Weight",
    "WeightedDistributedSampler",
    "cosine_schedule",
    "plot_mixture",
    "repetition_matched_subset",
]

__version__: str  # of the distribution; the sources also run from a folder on the path


def __getattr__(name: str) -> str:
    if name == "__version__":
        return version("headrace-weighted-sampler")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
