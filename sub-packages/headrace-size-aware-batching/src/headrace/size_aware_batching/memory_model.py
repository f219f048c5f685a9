"""Predict memory from a size, by a polynomial."""

from collections.abc import Callable
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.size_aware_batching._validation import warn

Floats = NDArray[np.float64]


def interval(x: Floats) -> tuple[float, float]:
    """Return centre and half-width of the values; the half-width is 1 where all are the same.

    >>> interval(np.array([2.0, 10.0]))
    (6.0, 4.0)
    """
    low, high = float(x.min()), float(x.max())
    return low / 2 + high / 2, (high / 2 - low / 2) or 1.0


def least_squares(t: Floats, y: Floats, degree: int) -> tuple[Floats, int]:
    """Fit ``sum(c[k] * T_k(t))`` to ``y``.

    On [-1, 1] the Chebyshev polynomials are close to orthogonal, so the problem is well conditioned where
    powers of the raw values would not be.

    Args:
        t: Shape ``[n]``, in [-1, 1].
        y: Shape ``[n]``.
        degree: From 0.

    Returns:
        Coefficients of shape ``[degree + 1]``, and the rank of the problem.
    """
    basis = np.polynomial.chebyshev.chebvander(t, degree)
    coefficients, _, rank, _ = np.linalg.lstsq(basis, y, rcond=None)
    # fitting what is left once more takes out the rounding of the first solution
    coefficients += np.linalg.lstsq(basis, y - np.polynomial.chebyshev.chebval(t, coefficients), rcond=None)[0]
    return coefficients.astype(np.float64, copy=False), int(rank)


def evaluate(coefficients: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Evaluate by the recurrence of C. W. Clenshaw (1955), elementwise.

    >>> evaluate(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.5, 2.0]))  # 1 + (2 t^2 - 1)
    tensor([0.5000, 8.0000])
    """
    next_one = after = torch.zeros_like(t)
    for coefficient in reversed(coefficients[1:].unbind()):
        next_one, after = coefficient + 2 * t * next_one - after, next_one
    return coefficients[0] + t * next_one - after


class PolynomialRegression(torch.nn.Module):
    """Least-squares polynomial of one variable, exact to the byte where the data are.

    All is done in float64, on values scaled to [-1, 1]; ``forward`` returns float64 whatever it is given,
    since float32 cannot hold byte counts beyond 16 MiB. ``.half()``, ``.to(dtype)`` and the like leave it so.

    The fit is kept in buffers: it moves with ``.to(device)``, and ``state_dict`` carries it into a fresh
    instance of the same degree.

    Args:
        degree: Of the polynomial, from 0.

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

    def fit(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Fit to points, in place of what was fitted before.

        Args:
            x: Shape ``[n]``, floating point, with at least ``degree + 1`` distinct values.
            y: Shape ``[n]``, floating point.

        Raises:
            TypeError: If one is not a 1-D floating-point tensor.
            ValueError: If they differ in length or hold a NaN or infinity, or ``x`` has too few distinct
                values.
        """
        points, values = _points(x, "x"), _points(y, "y")
        if len(points) != len(values):
            raise ValueError(f"x and y must have the same length, got {len(points)} and {len(values)}")
        if (distinct := len(np.unique(points))) <= self.degree:
            raise ValueError(
                f"x has {distinct} distinct values, a polynomial of degree {self.degree} needs at least "
                f"{self.degree + 1}; measure at more sizes or lower the degree"
            )
        center, scale = interval(points)
        coefficients, rank = least_squares((points - center) / scale, values, self.degree)
        if rank <= self.degree:
            warn(
                f"x determines only {rank} of {self.degree + 1} coefficients; measure at sizes further apart "
                "or lower the degree"
            )
        self._store(center, scale, coefficients)
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
        return evaluate(self.coefficients, (x.double() - self.center) / self.scale)

    def predict_upper(self, x: torch.Tensor, margin: float = 0.1) -> torch.Tensor:
        """Predict on the safe side: least squares is too low for about half of its own points.

        With ``margin=0`` no point of the fit lies above. Raise it where ``x`` goes beyond the fit.

        Args:
            x: As for ``forward``.
            margin: Share of the prediction to add, from 0.

        Returns:
            ``forward(x)``, plus the most by which it fell short of a fitted point, plus the margin.

        Raises:
            ValueError: If ``margin`` is negative or not finite.

        >>> model = PolynomialRegression(degree=0)
        >>> model.fit(torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]))
        >>> x = torch.tensor(3.0)
        >>> round(model(x).item(), 6), round(model.predict_upper(x, margin=0).item(), 6)
        (15.0, 20.0)
        """
        if not 0 <= margin < float("inf"):
            raise ValueError(f"margin must be a share from 0 on, such as 0.1, got {margin}")
        raised = self.forward(x) + self.shortfall
        return raised + margin * raised.abs()

    def extra_repr(self) -> str:
        """Name the degree in ``repr``."""
        return f"degree={self.degree}"

    def _store(self, center: float, scale: float, coefficients: Floats) -> None:
        for buffer, value in ((self.center, center), (self.scale, scale)):
            buffer.fill_(value)
        self.coefficients.copy_(torch.from_numpy(coefficients))

    def _measure_shortfall(self, points: torch.Tensor, values: torch.Tensor) -> None:
        device = self.center.device
        predicted = self.forward(points.to(device))
        rounding = 4 * torch.finfo(torch.float64).eps * predicted.abs().max()
        self.shortfall.copy_((values.to(device) - predicted).max().clamp(min=0) + rounding)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # torch casts a module's buffers along with everything else; these follow to the device only
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's own has no annotations
        for name, buffer in before.items():
            setattr(self, name, buffer.to(self.get_buffer(name).device))
        return self


def _checked_degree(degree: object) -> int:
    if isinstance(degree, bool) or not isinstance(degree, int | np.integer) or degree < 0:
        raise ValueError(f"degree must be a non-negative integer, got {degree!r}")
    return int(degree)


def _check_real(x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a tensor of real numbers, got {type(x).__name__}")
    if x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"x must be a tensor of real numbers, got {x.dtype}")


def _points(values: object, name: str) -> Floats:
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"{name} must be a 1-D floating-point tensor, got {type(values).__name__}")
    if values.ndim != 1 or not values.is_floating_point():
        raise TypeError(
            f"{name} must be a 1-D floating-point tensor, got shape {tuple(values.shape)} of {values.dtype}; "
            "use values.flatten().double()"
        )
    if len(wrong := (~values.isfinite()).nonzero()):
        raise ValueError(
            f"{name} holds {len(wrong)} values that are not finite, the first at index {int(wrong[0])}; leave "
            "such points out"
        )
    array: Floats = values.detach().double().cpu().numpy()
    return array
