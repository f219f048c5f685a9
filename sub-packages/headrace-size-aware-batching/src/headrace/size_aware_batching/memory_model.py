"""The documented import path of the models that predict memory; they live in `headrace.size_aware_batching.memory`."""

from headrace.size_aware_batching.memory.model import BatchMemoryModel
from headrace.size_aware_batching.memory.polynomial import PolynomialRegression

__all__ = ["BatchMemoryModel", "PolynomialRegression"]
