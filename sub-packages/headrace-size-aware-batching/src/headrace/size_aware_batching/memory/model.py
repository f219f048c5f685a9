"""A model of the memory of a batch, with a stated coverage."""

import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.checks import checked_int
from headrace.size_aware_batching._shared.display import counted, never_raises
from headrace.size_aware_batching._shared.ranks import Ranks
from headrace.size_aware_batching._shared.warnings import warn
from headrace.size_aware_batching._validation import one_of, real_number, whole_number
from headrace.size_aware_batching.memory.device import DeviceMemory, device_memory, device_size
from headrace.size_aware_batching.memory.least_squares import conformal_margin, fit_floor
from headrace.size_aware_batching.memory.peaks import Peaks
from headrace.size_aware_batching.memory.polynomial import PolynomialRegression
from headrace.size_aware_batching.memory.terms import MemoryCost, Term, candidate_terms, default_terms
from headrace.size_aware_batching.planning.costs import largest_count
from headrace.size_aware_batching.planning.gather import gather_json
from headrace.size_aware_batching.sizes.read import read_sizes

Floats = NDArray[np.float64]
MOST_TERMS = 6  # each subset of them is tried
_FORMAT = 1  # of a saved model
_ROUNDED = 0.001  # by which the costs of samples may be too high in the mean
_FINEST = 1024  # parts of a unit of size in which they are counted
_SLACK = (
    1e-9  # of a cost that rounding errors of the fit may lift above a whole number, and of the largest sum for that
)
_WARM = ("warm_steps", "alloc_retries")
_SAME_SIZE = 0.01  # by which drivers report another size of the same device


@dataclass(frozen=True)
class MemoryReport:
    """Figures about a fitted `BatchMemoryModel`.

    Args:
        points: Number of batches for the curve.
        calibration: Number of batches for the margin.
        bounds: Number of batches that ran out of memory.
        floor: Minimum bytes of every batch; 0 if no floor was found.
        intercept: Bytes at zero.
        slopes: Bytes per unit of each feature, by name.
        median_error: Median relative error at the calibration points.
        coverage: Guaranteed share of new batches that need at most the upper prediction.
        margin: Increase of the upper prediction over the prediction, as a share.
        headroom: Median unused share of the upper prediction at the calibration points.
        alternatives: The median error with other features, by these.
        warm_steps: Batches that `fit_budget` ran one after another; 0 if the model was fitted by hand.
        alloc_retries: How often the allocator had to release all that it had cached meanwhile.
    """

    points: int
    calibration: int
    bounds: int
    floor: float
    intercept: float
    slopes: dict[str, float]
    median_error: float
    coverage: float
    margin: float
    headroom: float
    alternatives: dict[str, float]
    warm_steps: int = 0
    alloc_retries: int = 0

    def __str__(self) -> str:
        return "\n".join(f"{name:14}{text}" for name, text in self._cells().items())

    def _cells(self) -> dict[str, str]:
        slopes = "".join(f" + {slope:.6g} {name}" for name, slope in self.slopes.items())
        warm = f"{counted(self.warm_steps, 'step')} one after another, allocator retries: {self.alloc_retries:,}"
        others = "".join(f"; with {name} {error:.2%}" for name, error in self.alternatives.items())
        return {
            "bytes": f"max({self.floor:,.0f}, {self.intercept:,.0f}{slopes})",
            "points": f"{self.points} fitted, {self.calibration} for calibration, {self.bounds} out of memory",
            "median error": f"{self.median_error:.2%}{others}",
            "margin": f"{self.margin:.2%}, covers {self.coverage:.0%} of new batches",
            "headroom": f"{self.headroom:.2%} in the median",
        } | ({"warm": warm} if self.warm_steps else {})


class BatchMemoryModel:
    """The peak memory of a step by its batch: ``max(floor, a + b*n*L + c*n*L^2)``, with a margin of stated coverage.

    n is the number of samples in the batch and L its largest size; the floor is the memory of weights and optimizer.
    The curve is fitted by relative least squares in float64, with non-negative slopes, so that an additional or larger
    sample never makes a batch cheaper. Least squares is too low for about half of all batches. A margin by
    split-conformal prediction (Vovk et al., 2005; Lei et al., 2018) corrects this: it comes from calibration batches
    that were not used for the curve. It holds for any distribution of the errors, provided that these batches resemble
    those of training. The model does not predict beyond the measured range unless you set ``extrapolate=True``.

    Args:
        features: Products of ``n``, ``L`` and ``S`` (the sum of the sizes), with powers: ``("S",)`` or ``("S", "n")``
            for packed batches, ``("n*L", "n*L^2", "n")`` and so on, at most 6. If a sample has several sizes: ``L0``,
            ``L1``, ``S0``. Or a `PolynomialRegression`, whose degree determines the powers of ``n*L``. By default
            ``n*L`` and ``n*L^2`` of each column.
        coverage: Share of new batches that must need at most ``upper``. 0.95 needs 19 calibration batches, 0.99 needs
            99.
        memory: ``"reserved"``, the allocator's memory on the device, fragments included; or ``"allocated"``, the
            memory of tensors.

    Raises:
        ValueError: If an argument has a value that is not allowed.

    >>> batches = [[length] * n for n in (1, 2, 4, 8, 16) for length in (64, 128, 256, 512, 1024, 2048, 3072, 4096)]
    >>> bytes_needed = [max(9e8, 5e8 + 3e4 * sum(batch) + 2 * len(batch) * max(batch) ** 2) for batch in batches]
    >>> model = BatchMemoryModel()
    >>> model.fit(Peaks.of(batches, bytes_needed))
    >>> round(model.predict(8, 1000)), model.max_items(1000, budget_bytes=1e9)
    (900000000, 15)
    """

    def __init__(
        self,
        features: Sequence[str] | PolynomialRegression | None = None,
        *,
        coverage: float = 0.95,
        memory: Literal["reserved", "allocated"] = "reserved",
    ) -> None:
        if isinstance(features, PolynomialRegression):
            features = [f"n^{power}*L^{power}" for power in range(1, features.degree + 1)]
        several = isinstance(features, Sequence) and all(isinstance(each, str) for each in features)
        if features is not None and (isinstance(features, str) or not several or not 0 < len(features) <= MOST_TERMS):
            raise ValueError(f"features must be 1 to {MOST_TERMS} products such as 'n*L', got {features!r}")
        if not 0 < real_number(coverage, "coverage") < 1:
            raise ValueError(f"coverage must be a number between 0 and 1, such as 0.95, got {coverage!r}")
        one_of("memory", memory, ("reserved", "allocated"))
        self.features = None if features is None else tuple(features)
        self.coverage = float(coverage)
        self.memory = memory
        self.capacity: int | None = None  # bytes of the device that was measured, where fit_budget did it
        self.device_bytes: int | None = None  # all that this device has, free or not
        self.reserve = 0.05
        self.warm_steps = self.alloc_retries = 0
        self.points: Peaks | None = None
        self.calibration: Peaks | None = None
        self._cost: MemoryCost | None = None

    def fit(self, peaks: Peaks, calibration: Peaks | None = None, *, seed: int = 0) -> None:
        """Fit the curve and the margin; replaces an earlier fit.

        Args:
            peaks: The result of `measure_peaks`. Batches that ran out of memory raise the margin until the upper
                prediction reaches the memory that they had.
            calibration: Peaks of other batches, preferably from the plan of an epoch. By default half of ``peaks``,
                one of every two batches adjacent in size, drawn at random.
            seed: Seed of that draw.

        Raises:
            ValueError: If there are too few calibration batches for the coverage, or too few to fit.
        """
        everything = peaks if calibration is None else peaks + calibration
        if calibration is None:
            held_out = _one_of_two(peaks, seed)
            calibration, peaks = peaks[held_out], peaks[~held_out]
        if len(everything) and (least := int(self._bytes(everything).min())) <= 0:
            raise ValueError(
                f"peaks must be greater than 0 bytes, got {least}: does the step run on the device that was measured?"
            )
        columns = everything.largest.shape[1]
        terms = tuple(Term.parse(text, columns) for text in self.features or default_terms(columns))
        points, tested, bounds = peaks[peaks.fits], calibration[calibration.fits], everything[~everything.fits]
        if len(points) < len(terms) + 2:
            raise ValueError(
                f"peaks must hold at least {len(terms) + 2} batches that fit for {len(terms)} features, got "
                f"{len(points)}: measure more batches"
            )
        floor, intercept, slopes = fit_floor(_values(terms, points), self._bytes(points))
        seen = everything[everything.fits]
        measured = np.concatenate([seen.counts[:, None], seen.largest, _values(terms, seen)], axis=1)
        most = tuple(measured.max(axis=0).tolist())
        bare = MemoryCost(terms, tuple(slopes.tolist()), intercept, floor, 1.0, most)
        margin = max(0.0, conformal_margin(self._errors(bare, tested), self.coverage))
        margin *= 1 + 1 / len(tested)  # the largest of m errors lies a little below the largest there is
        margin = max([margin, *self._errors(bare, bounds).tolist()])
        self.points, self.calibration = points + bounds, tested
        self._cost = MemoryCost(terms, bare.slopes, intercept, floor, 1 + margin, most)

    @never_raises
    def __repr__(self) -> str:
        figures = [f"{self.memory} bytes", f"coverage {self.coverage:.0%}"]
        if (cost := self._cost) is None:
            figures += [*([] if self.features is None else [" + ".join(self.features)]), "not fitted yet"]
        else:
            slopes = [f"{slope:.6g} {term.name}" for term, slope in zip(cost.terms, cost.slopes, strict=True)]
            figures += [
                f"max({cost.floor:,.0f}, {' + '.join([f'{cost.intercept:,.0f}', *slopes])})",
                f"margin {cost.factor - 1:.2%}",
            ]
        if self.capacity is not None:
            figures.append(f"measured on {self.capacity:,} bytes")
        return f"{type(self).__name__}({', '.join(figures)})"

    @property
    def margin(self) -> float:
        """The increase of ``upper`` over ``predict``, as a share."""
        return self.cost().factor - 1

    def predict(self, count: int, largest: Any, total: Any = None, *, extrapolate: bool = False) -> float:
        """Predict the bytes of a batch without the margin.

        Args:
            count: Number of samples.
            largest: Largest size, or one for each column.
            total: Sum of the sizes, or one for each column; by default count times largest, the maximum.
            extrapolate: Whether to predict beyond the measured range.

        Raises:
            ValueError: If the batch is beyond the measured range.
            RuntimeError: If nothing has been fitted.
        """
        cost = self.cost(extrapolate=extrapolate)
        columns = np.asarray(largest, np.float64).reshape(-1)
        totals = count * columns if total is None else np.asarray(total, np.float64).reshape(-1)
        values = cost.values(count, columns.tolist(), totals.tolist())
        found = [float(count), *columns.tolist(), *values]
        if cost.most is not None and (place := cost.beyond(found)) is not None:
            names = ["n", *(f"L{column}" for column in range(len(columns))), *(term.name for term in cost.terms)]
            raise ValueError(
                f"the batch must be within the measured range, got {names[place]} = {found[place]:g}, the largest "
                f"measured is {cost.most[place]:g}: measure larger batches, or set extrapolate=True"
            )
        return cost.linear(values)

    def upper(self, count: int, largest: Any, total: Any = None, *, extrapolate: bool = False) -> float:
        """Predict bytes that a share ``coverage`` of batches does not exceed; arguments as for ``predict``."""
        return self.cost().factor * self.predict(count, largest, total, extrapolate=extrapolate)

    def cost(self, *, extrapolate: bool = False) -> MemoryCost:
        """Return bytes by ``(n, largest)``, with the margin, for ``cost=`` of the samplers.

        Args:
            extrapolate: Whether batches beyond the measured range may be planned; otherwise their cost is infinite.

        Raises:
            RuntimeError: If nothing has been fitted.
        """
        if self._cost is None:
            raise RuntimeError("the model has not been fitted yet: call fit(peaks) or load(path) first")
        return replace(self._cost, most=None) if extrapolate else self._cost

    def max_items(self, largest: Any, budget_bytes: float, *, extrapolate: bool = False) -> int:
        """Return the number of samples that fit into a budget if the largest has this size; 0 if none does."""
        return largest_count(self.cost(extrapolate=extrapolate), budget_bytes, largest, 2**40)

    def max_total(self, budget_bytes: float, *, extrapolate: bool = False) -> float | tuple[float, ...]:
        """Return the largest sum of sizes that fits, for ``cost="sum"``; needs features of ``S`` alone.

        Returns:
            The budget of the sampler. For samples of several sizes one for each, in the ratio that the calibration
            batches have, so that both fill up at once.

        Raises:
            ValueError: If the model has other features.
        """
        cost = self.cost(extrapolate=extrapolate)
        if cost.is_of_samples():
            raise ValueError(
                "max_total needs a model with features of S alone, got S and n, by which each sample costs something "
                "besides its size: give the sampler both results of sample_costs(sizes, budget_bytes)"
            )
        if not cost.is_of_sums():
            raise ValueError(
                f"max_total needs a model with features of S alone, such as ('S', 'S^2'), got "
                f"{[term.name for term in cost.terms]}: give cost() to the sampler"
            )
        ratio = self._measured(self.calibration).sums.sum(axis=0)
        ratio /= ratio.max()

        def fits(total: float) -> bool:
            values = cost.values(1, ratio.tolist(), (total * ratio).tolist())
            beyond = cost.most is not None and any(map(float.__gt__, values, cost.most[-len(values) :]))
            return not beyond and cost.factor * cost.linear(values) <= budget_bytes

        low, high = 0.0, 1.0
        while math.isfinite(high) and fits(high):
            low, high = high, 2 * high
        while low < (middle := (low + high) / 2) < high:
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low if len(ratio) == 1 else tuple((low * ratio).tolist())

    def sample_costs(
        self, sizes: Any, budget_bytes: float, *, extrapolate: bool = False
    ) -> tuple[NDArray[Any], float | tuple[float, ...]]:
        """Return the cost of each sample and the largest sum of costs that fits: sizes and budget for ``cost="sum"``.

        With features of ``S`` alone, these are the sizes and ``max_total``. With ``("S", "n")``, a sample costs
        ``scale * size + extra``: whole numbers if the sizes are whole, rounded up by at most a thousandth on average.

        Args:
            sizes: Size of each sample, as for `DistributedSizeAwareBatchSampler`.
            budget_bytes: The bytes that a batch may need: ``budget()``.
            extrapolate: Whether to plan beyond the largest batch that was measured.

        Raises:
            ValueError: If the model has other features.

        >>> batches = [[length] * n for n in (1, 2, 4, 8, 16) for length in (64, 128, 256, 512, 1024, 2048, 3072, 4096)]
        >>> model = BatchMemoryModel(("S", "n"))
        >>> model.fit(Peaks.of(batches, [10**6 + 50 * sum(batch) + 400 * len(batch) for batch in batches]))
        >>> costs, most = model.sample_costs([10, 20], 2_000_000)
        >>> costs.tolist(), round(most)
        ([18, 28], 20000)
        """
        array, cost = read_sizes(sizes), self.cost(extrapolate=extrapolate)
        if not cost.is_of_samples():
            return array, self.max_total(budget_bytes, extrapolate=extrapolate)
        scale, extra, unit = self._sample_cost(cost)
        most = (1 - _SLACK) * (budget_bytes / cost.factor - cost.intercept) / unit if unit else math.inf
        if cost.factor * cost.floor > budget_bytes:
            most = 0.0
        if not extrapolate:
            measured = self._measured(self.points) + self._measured(self.calibration)
            fitting = measured[measured.fits]
            most = min(most, float((scale * fitting.sums[:, 0] + extra * fitting.counts).max()))
        wide = array.astype(np.int64) if array.dtype.kind in "iu" else array
        return scale * wide + extra, max(0.0, most)

    def _sample_cost(self, cost: MemoryCost) -> tuple[int, int, float]:
        """Return ``scale`` and ``extra`` of a sample's cost, ``scale * size + extra``, and the bytes of its unit."""
        slopes = dict(zip((term.name for term in cost.terms), cost.slopes, strict=True))
        if not slopes["S"]:
            return (0, 1, slopes["n"]) if slopes["n"] else (1, 0, 0.0)
        tested = self._measured(self.calibration)
        mean, extra, scale = float(tested.sums.sum() / tested.counts.sum()), slopes["n"] / slopes["S"], 1
        while (rounded := math.ceil((1 - _SLACK) * scale * extra)) > scale * (extra + _ROUNDED * (mean + extra)):
            if scale == _FINEST:
                break
            scale *= 2
        return scale, rounded, slopes["S"] / scale

    def budget(self, device: torch.device | str | DeviceMemory | None = None, reserve: float | None = None) -> float:
        """Return the bytes that a batch may need, for ``max_total_size=``.

        A model without a budget, such as one of estimates, keeps the device's memory and the reserve of the first call:
        later calls and `save` have the same.

        Args:
            device: The device with the memory; by default the device that `fit_budget` measured, `load` was given or an
                earlier call had.
            reserve: Share of the memory to leave free; by default ``1 - target`` of `fit_budget`, else that of the
                first call, else 0.05.

        Raises:
            ValueError: If no device is known, or the reserve is not from 0 to less than 1.
        """
        if device is None and self.capacity is None:
            raise ValueError(
                "budget() needs device= if the model does not come from fit_budget, got None: give it, or load the "
                "model with load(path, device)"
            )
        reserve = self.reserve if reserve is None else checked_reserve(reserve)
        capacity = self.capacity
        if device is not None:
            there = device_memory(device)
            capacity = there.total()
            if self.capacity is None:
                self.capacity, self.device_bytes, self.reserve = capacity, device_size(there), reserve
        return float(capacity or 0) * (1 - reserve)

    def report(self) -> MemoryReport:
        """Return figures about the fit; ``str()`` of them is a short text."""
        cost, points, tested = self.cost(), self._measured(self.points), self._measured(self.calibration)
        errors = self._errors(cost, tested) + 1  # measured over upper
        fitting = points[points.fits]
        return MemoryReport(
            points=int(points.fits.sum()),
            calibration=len(tested),
            bounds=int((~points.fits).sum()),
            floor=cost.floor,
            intercept=cost.intercept,
            slopes={term.name: slope for term, slope in zip(cost.terms, cost.slopes, strict=True)},
            median_error=float(np.median(np.abs(errors * cost.factor - 1))),
            coverage=self.coverage,
            margin=cost.factor - 1,
            headroom=float(np.median(1 - errors)),
            alternatives={
                " + ".join(features): float(np.median(relative_errors(features, fitting, tested, self.memory)))
                for features in candidate_terms(points.largest.shape[1])
                if features != tuple(term.name for term in cost.terms) and len(fitting) > len(features) + 2
            },
            warm_steps=self.warm_steps,
            alloc_retries=self.alloc_retries,
        )

    def draw(self, path: str | Path) -> None:
        """Plot measured against predicted peaks with the margin to a PNG, PDF or SVG file. Needs matplotlib."""
        from headrace.size_aware_batching.plotting import draw_memory

        cost = self.cost()
        drawn = [self._measured(self.points), self._measured(self.calibration)]
        predicted = [self._bytes(peaks) / (self._errors(cost, peaks) + 1) / cost.factor for peaks in drawn]
        budget = None if self.capacity is None else self.budget()
        draw_memory(path, predicted, [self._bytes(peaks) for peaks in drawn], drawn[0].fits, cost.factor, budget)

    def save(self, path: str | Path) -> None:
        """Write the model, with its measurements, atomically to a JSON file."""
        measured = {
            name: {key: array.tolist() for key, array in self._measured(getattr(self, name)).__dict__.items()}
            for name in ("points", "calibration")
        }
        names = ("features", "coverage", "memory", "capacity", "device_bytes", "reserve", *_WARM)
        options = {name: getattr(self, name) for name in names}
        text = json.dumps({"format": _FORMAT, **options, "cost": asdict(self.cost()), **measured}, indent=1)
        part = Path(f"{path}.{secrets.token_hex(4)}.part")  # ranks may write at the same time
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(
        cls, path: str | Path, device: torch.device | str | DeviceMemory | None = None, *, mesh: Any = None
    ) -> Self:
        """Read a model that ``save`` wrote.

        The saved budget is kept, even if less memory is free now: a resumed run then keeps its plan. If the device's
        size differs by more than 1 %, the capacity changes by the difference, with a warning. A model without a budget,
        such as one of estimates, gets the memory that is available on the device.

        Args:
            path: The file.
            device: The device that trains, as for `fit_budget`; None to keep the saved capacity. With a process group,
                every rank must give its device; the smallest one counts.
            mesh: A 1-D ``DeviceMesh`` of the data-parallel ranks, if these are not all ranks.

        Raises:
            ValueError: If the file does not contain a saved model.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            if found["format"] != _FORMAT:
                raise ValueError(f"format {found['format']}")
            model = cls(found["features"], coverage=found["coverage"], memory=found["memory"])
            model.capacity = whole_number("capacity", found["capacity"])
            model.device_bytes = whole_number("device_bytes", found.get("device_bytes"))
            model.reserve = checked_reserve(found["reserve"])
            for name in _WARM:
                setattr(model, name, checked_int(name, found.get(name, 0)))
            model._cost = MemoryCost.of_dict(found["cost"])
            for name in ("points", "calibration"):
                setattr(model, name, Peaks.of_lists(found[name], len(model._cost.terms[0].largest)))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"{path} must be a file that BatchMemoryModel.save wrote: {error!r}") from None
        if device is not None:
            there = device_memory(device)
            sizes, available = zip(
                *gather_json([device_size(there), there.total()], Ranks(mesh=mesh).mesh), strict=True
            )
            model._move_to(min(sizes), min(available), path)
        return model

    def _move_to(self, device_bytes: int, available: int, path: str | Path) -> None:
        """Take over the capacity of a device of this size, of which some bytes are available."""
        if self.capacity is None:
            self.capacity, self.device_bytes = available, device_bytes
        if self.device_bytes is None:
            return
        if abs(device_bytes / self.device_bytes - 1) <= _SAME_SIZE:
            return
        capacity = max(1, self.capacity + device_bytes - self.device_bytes)
        rest = ""
        if capacity > self.capacity:
            rest = "; batches beyond the measured range stay out: measure anew with fit_budget to use all of it"
        warn(
            f"{path} was measured on a device of {self.device_bytes:,} bytes, this one has {device_bytes:,}: the "
            f"capacity is now {capacity:,} bytes, was {self.capacity:,}{rest}"
        )
        self.capacity, self.device_bytes = capacity, device_bytes

    def _bytes(self, peaks: Peaks) -> Floats:
        found: Floats = getattr(peaks, self.memory).astype(np.float64)
        return found

    def _errors(self, cost: MemoryCost, peaks: Peaks) -> Floats:
        """Return the excess of the peaks over the prediction, as a share of the prediction."""
        predicted = cost.factor * np.maximum(cost.floor, cost.intercept + _values(cost.terms, peaks) @ cost.slopes)
        errors: Floats = self._bytes(peaks) / predicted - 1
        return errors

    def _measured(self, peaks: Peaks | None) -> Peaks:
        self.cost()
        if peaks is None:
            raise RuntimeError("the model has not been fitted yet: call fit(peaks) first")
        return peaks


def _values(terms: Sequence[Term], peaks: Peaks) -> Floats:
    """Return the terms of each batch, shape ``[m, t]``."""
    counts = peaks.counts.astype(np.float64)
    return np.stack([term(counts, peaks.largest.T, peaks.sums.T) for term in terms], axis=1)


def relative_errors(features: Sequence[str], points: Peaks, tested: Peaks, memory: str) -> Floats:
    """Return the errors at some batches of a curve of these features through others, as shares."""
    terms = [Term.parse(text, points.largest.shape[1]) for text in features]
    floor, intercept, slopes = fit_floor(_values(terms, points), getattr(points, memory).astype(np.float64))
    predicted = np.maximum(floor, intercept + _values(terms, tested) @ slopes)
    errors: Floats = np.abs(getattr(tested, memory) / predicted - 1)
    return errors


def checked_reserve(reserve: Any) -> float:
    """Return the share of a memory that is left free."""
    if not 0 <= real_number(reserve, "reserve") < 1:
        raise ValueError(f"reserve must be from 0 to less than 1, got {reserve}")
    return float(reserve)


def _one_of_two(peaks: Peaks, seed: int) -> NDArray[np.bool_]:
    """Draw one of every two batches adjacent in bytes, so that both halves cover the full range."""
    order = np.flatnonzero(peaks.fits)[np.argsort(peaks.allocated[peaks.fits], kind="stable")]
    pairs = order[: len(order) // 2 * 2].reshape(-1, 2)
    drawn = pairs[np.arange(len(pairs)), np.random.default_rng(seed).integers(0, 2, len(pairs))]
    return np.isin(np.arange(len(peaks)), drawn)
