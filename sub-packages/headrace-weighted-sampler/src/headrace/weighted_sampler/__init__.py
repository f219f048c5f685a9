"""Several datasets mixed by weight across ranks, exactly and reproducibly."""

from headrace.weighted_sampler.report import MixtureReport, RangeReport
from headrace.weighted_sampler.sampler import WeightedDistributedSampler
from headrace.weighted_sampler.weights import Ratio, WeightedRange, weighted_ranges

__all__ = [
    "MixtureReport",
    "RangeReport",
    "Ratio",
    "WeightedDistributedSampler",
    "WeightedRange",
    "weighted_ranges",
]
