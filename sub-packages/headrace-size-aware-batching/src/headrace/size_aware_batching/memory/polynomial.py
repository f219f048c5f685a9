"""A polynomial of one variable, fitted by least squares."""

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.checks import shown
from headrace.size_aware_batching._shared.display import never_raises
from headrace.size_aware_batching._shared.warnings import warn
from headrace.size_aware_batching.sizes.read import number_vector

Floats = NDArray[np.float64]


class PolynomialRegression(torch.nn.Module):
    """Least-squares polynomial of one variable, in float64.

    The fit is ``numpy.polynomial.Polynomial.fit``: ``x`` is mapped to [-1, 1] first, so that byte counts and their
    squares lose no digits. ``forward`` always returns float64, because float32 is exact only for integers up to 2**24
    (16 MiB in bytes). ``.half()``, ``.to(dtype)`` and similar calls leave the model in float64.

    The coefficients are buffers: they move with ``.to(device)``, and another instance of the same degree can load the
    ``state_dict``.

    Args:
        degree: Degree of the polynomial, >= 0.

    Raises:
        ValueError: If ``degree`` is not a non-negative integer.

    >>> model = PolynomialRegression(degree=2)
    >>> lengths = torch.tensor([100.0, 200.0, 300.0, 400.0])
    >>> model.fit(lengths, 5e8 + 1e4 * lengths.double() ** 2)
    >>> model(torch.tensor([1000.0])).round()
    tensor([1.0500e+10], dtype=torch.float64)
    """

    center: torch.Tensor
    scale: torch.Tensor
    coefficients: torch.Tensor
    shortfall: torch.Tensor

    def __init__(self, degree: int) -> None:
        super().__init__()
        self.degree = _checked_degree(degree)
        unknown = torch.tensor(torch.nan, dtype=torch.float64)
        for name in ("center", "scale", "shortfall"):
            self.register_buffer(name, unknown.clone())
        self.register_buffer("coefficients", unknown.repeat(self.degree + 1))

    def fit(self, x: torch.Tensor | Sequence[float], y: torch.Tensor | Sequence[float]) -> None:
        """Fit the polynomial to points; replaces an earlier fit.

        Args:
            x: Shape ``[n]``, with at least ``degree + 1`` distinct values: a tensor, or a list of numbers, as
                ``collect_cuda_peak_alloc`` returns. Integers are allowed.
            y: Shape ``[n]``, a tensor or a list of numbers.

        Raises:
            TypeError: If ``x`` or ``y`` is not a 1-D tensor or sequence of real numbers.
            ValueError: If ``x`` and ``y`` differ in length, a value is NaN or infinite, or ``x`` has too few distinct
                values.
        """
        points, values = _points(x, "x"), _points(y, "y")
        if len(points) != len(values):
            raise ValueError(
                f"the number of samples in x and y must be equal, got {len(points)} and {len(values)}: "
                "give one y for each x"
            )
        if (distinct := len(np.unique(points))) <= self.degree:
            raise ValueError(
                f"x must have at least {self.degree + 1} distinct values for degree {self.degree}, got {distinct}: "
                "measure at more sizes or lower the degree"
            )
        fit = np.polynomial.Polynomial.fit
        polynomial, (_, rank, _, _) = fit(points, values, self.degree, full=True)
        polynomial += fit(points, values - polynomial(points), self.degree, full=True)[0]  # takes out rounding errors
        if rank <= self.degree:
            warn(
                f"x determines only {rank} of {self.degree + 1} coefficients: measure at sizes that are further apart "
                "or lower the degree"
            )
        low, high = polynomial.domain
        self.center.fill_((low + high) / 2)
        self.scale.fill_((high - low) / 2)
        self.coefficients.copy_(torch.from_numpy(polynomial.coef))
        self._measure_shortfall(torch.from_numpy(points), torch.from_numpy(values))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Evaluate the polynomial at each element of ``x``.

        Args:
            x: Any shape; real numbers of any dtype.

        Returns:
            The shape of ``x``, float64.

        Raises:
            TypeError: If ``x`` is not a tensor of real numbers.
            RuntimeError: If nothing has been fitted.
        """
        _check_real(x)
        if self.coefficients.isnan().any():
            raise RuntimeError("the model has no coefficients yet; call fit(x, y) or load_state_dict first")
        scaled = (x.double() - self.center) / self.scale
        value = torch.zeros_like(scaled)
        for coefficient in reversed(self.coefficients.unbind()):  # Horner's rule
            value = value * scaled + coefficient
        return value

    def predict_upper(self, x: torch.Tensor, margin: float = 0.1) -> torch.Tensor:
        """Predict an upper estimate; least squares alone is too low for about half of the fitted points.

        With ``margin=0`` no fitted point lies above the estimate. Use a larger margin for ``x`` outside the fitted
        range.

        Args:
            x: As for ``forward``.
            margin: Share of the prediction to add, >= 0.

        Returns:
            ``forward(x)``, plus the largest amount by which a fitted point exceeds it, plus the margin.

        Raises:
            ValueError: If ``margin`` is negative or not finite.

        >>> model = PolynomialRegression(degree=0)
        >>> model.fit(torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]))
        >>> x = torch.tensor(3.0)
        >>> round(model(x).item(), 6), round(model.predict_upper(x, margin=0).item(), 6)
        (15.0, 20.0)
        """
        if not 0 <= margin < float("inf"):
            raise ValueError(f"margin must be a finite number >= 0, such as 0.1, got {margin}")
        raised = self.forward(x) + self.shortfall
        return raised + margin * raised.abs()

    def extra_repr(self) -> str:
        """Name the degree in ``repr``."""
        return f"degree={self.degree}"

    @never_raises
    def __repr__(self) -> str:
        return super().__repr__()

    def _measure_shortfall(self, points: torch.Tensor, values: torch.Tensor) -> None:
        device = self.center.device
        predicted = self.forward(points.to(device))
        rounding = 4 * torch.finfo(torch.float64).eps * predicted.abs().max()
        self.shortfall.copy_((values.to(device) - predicted).max().clamp(min=0) + rounding)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # torch casts buffers to the module's new dtype; these move to its device and stay float64
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's own has no annotations
        for name, buffer in before.items():
            setattr(self, name, buffer.to(self.get_buffer(name).device))
        return self


def _checked_degree(degree: object) -> int:
    if isinstance(degree, bool) or not isinstance(degree, int | np.integer) or degree < 0:
        raise ValueError(f"degree must be a non-negative integer, got {shown(degree)}")
    return int(degree)


def _check_real(x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a tensor of real numbers, got {type(x).__name__}")
    if x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"x must be a tensor of real numbers, got {x.dtype}")


def _points(values: object, name: str) -> Floats:
    allowed = f"{name} must be a 1-D tensor or sequence of real numbers"
    if isinstance(values, torch.Tensor):
        if values.ndim != 1 or values.is_complex() or values.dtype == torch.bool:
            raise TypeError(
                f"{allowed}, got shape {tuple(values.shape)} of {values.dtype}: use {name}.flatten().double()"
            )
        array: Floats = values.detach().double().cpu().numpy()
    elif isinstance(values, Sequence | np.ndarray) and not isinstance(values, str | bytes):
        array = number_vector(values, name).astype(np.float64)
    else:
        raise TypeError(f"{allowed}, got {type(values).__name__}")
    if (wrong := np.flatnonzero(~np.isfinite(array))).size:
        raise ValueError(
            f"{name} must be finite, got {array[wrong[0]]} at index {wrong[0]} ({wrong.size} such values): "
            "leave these points out"
        )
    return array
