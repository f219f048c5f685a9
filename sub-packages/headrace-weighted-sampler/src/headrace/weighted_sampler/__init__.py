"""Several datasets mixed by weight across ranks, exactly and reproducibly."""

from headrace.weighted_sampler._validation import Weight
from headrace.weighted_sampler.interleaved import InterleavedDataset
from headrace.weighted_sampler.report import MixtureReport, SourceReport, plot_mixture
from headrace.weighted_sampler.sampler import WeightedDistributedSampler
from headrace.weighted_sampler.weights import NamedConcatDataset

__all__ = [
    "InterleavedDataset",
    "MixtureReport",
    "NamedConcatDataset",
    "SourceReport",
    "Weight",
    "WeightedDistributedSampler",
    "plot_mixture",
]
