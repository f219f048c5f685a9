import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.size_aware_batching.memory_model import PolynomialRegression


def quadratic(x: torch.Tensor) -> torch.Tensor:
    return 3.0 * x**2 + 2e4 * x + 5e9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e9])
def test_a_quadratic_through_byte_counts_is_recovered(dtype: torch.dtype, scale: float) -> None:
    x = torch.linspace(1, 4096, 50).to(dtype) * scale
    y = quadratic(x.double())
    model = PolynomialRegression(2)
    model.fit(x, y)
    between = (torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4096 * scale).float()
    predicted = model(between)
    assert predicted.dtype == torch.float64
    assert torch.allclose(predicted, quadratic(between.double()), rtol=1e-9, atol=0)


@given(
    st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=6),
    st.floats(-1e6, 1e6),
    st.floats(1e-2, 1e6),
)
def test_a_polynomial_is_recovered_at_any_place_and_width(coefficients: list[int], centre: float, half: float) -> None:
    def truth(x: torch.Tensor) -> torch.Tensor:
        t = (x - centre) / half
        return sum((c * t**k for k, c in enumerate(coefficients)), torch.zeros_like(t))

    x = centre + half * torch.linspace(-1, 1, 20, dtype=torch.float64)
    model = PolynomialRegression(len(coefficients) - 1)
    model.fit(x, truth(x))
    # Where the interval is far narrower than its distance from zero, x itself holds fewer digits.
    loss = 1e-9 + 1e-15 * abs(centre) / half * 100
    assert (model(x) - truth(x)).abs().max() <= loss * max(1, *map(abs, coefficients))


def test_least_squares_agrees_with_numpy() -> None:
    generator = np.random.default_rng(0)
    x = generator.uniform(0, 10, 100)
    y = x**3 - x + generator.normal(size=100)
    model = PolynomialRegression(3)
    model.fit(torch.from_numpy(x), torch.from_numpy(y))
    expected = np.polynomial.Polynomial.fit(x, y, 3)(x)
    assert np.allclose(model(torch.from_numpy(x)).numpy(), expected, rtol=1e-9, atol=1e-9)


def test_degree_zero_is_the_mean_and_a_refit_replaces() -> None:
    model = PolynomialRegression(0)
    model.fit(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 4.0]))
    assert model(torch.tensor([7.0, 8.0])).tolist() == pytest.approx([3.0, 3.0])
    model.fit(torch.tensor([1.0]), torch.tensor([9.0]))
    assert model(torch.tensor([7.0])).tolist() == pytest.approx([9.0])
    model.fit(torch.tensor([1.0, 2.0]), torch.zeros(2))
    assert model(torch.tensor([7.0])).tolist() == [0.0]


def test_shapes_and_kinds_of_points() -> None:
    model = PolynomialRegression(1)
    model.fit(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 3.0]))
    assert model(torch.tensor(2.0)).item() == pytest.approx(5)
    assert model(torch.tensor([[2], [3]])).tolist() == [[pytest.approx(5)], [pytest.approx(7)]]
    assert model(torch.empty(0)).shape == (0,)
    x = torch.tensor([2.0], requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(2)


@given(st.integers(0, 3), st.integers(0, 10**6))
def test_the_upper_prediction_covers_every_point_of_the_fit(degree: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 4096, (30,), generator=generator).float()
    y = quadratic(x.double()) * (1 + 0.1 * torch.randn(30, generator=generator, dtype=torch.float64))
    model = PolynomialRegression(degree)
    assume(len(set(x.tolist())) > degree)
    model.fit(x, y)
    assert (model(x) < y).any()  # least squares alone does not
    assert (model.predict_upper(x, margin=0) >= y).all()
    assert torch.allclose(model.predict_upper(x, margin=0.5), 1.5 * model.predict_upper(x, margin=0))


@pytest.mark.parametrize("margin", [-0.1, float("nan"), float("inf")])
def test_margins_that_are_refused(margin: float) -> None:
    model = PolynomialRegression(0)
    model.fit(torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match="margin must be a finite number >= 0"):
        model.predict_upper(torch.ones(1), margin)


def test_state_survives_a_file_and_a_fresh_instance() -> None:
    x = torch.linspace(1, 100, 10)
    model = PolynomialRegression(2)
    model.fit(x, quadratic(x.double()) + 1e7 * torch.sin(x))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = PolynomialRegression(2)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh(x), model(x))
    assert torch.equal(fresh.predict_upper(x), model.predict_upper(x))
    with pytest.raises(RuntimeError, match="size mismatch"):
        PolynomialRegression(1).load_state_dict(model.state_dict())


def test_stays_float64_inside_another_module() -> None:
    x = torch.linspace(1, 100, 10)
    model = PolynomialRegression(2)
    model.fit(x, quadratic(x.double()))
    before = model(x)
    outer = torch.nn.Sequential(torch.nn.Linear(1, 1), model).half()
    assert outer[0].weight.dtype == torch.float16
    assert torch.equal(model(x), before)


def test_nothing_fitted_yet() -> None:
    for call in (PolynomialRegression(1), PolynomialRegression(1).predict_upper):
        with pytest.raises(RuntimeError, match="call fit"):
            call(torch.ones(1))


@pytest.mark.parametrize("degree", [-1, 1.5, 2.0, "2", None, True])
def test_degrees_that_are_refused(degree: Any) -> None:
    with pytest.raises(ValueError, match="degree must be a non-negative integer, got"):
        PolynomialRegression(degree)


GOOD = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("x", "y", "error", "match"),
    [
        (GOOD.unsqueeze(0), GOOD, TypeError, r"x must be a 1-D tensor or sequence of real .* got shape \(1, 3\)"),
        (GOOD, GOOD.unsqueeze(1), TypeError, "y must be a 1-D tensor or sequence of real numbers"),
        (GOOD > 1, GOOD, TypeError, "x must be a 1-D tensor .*torch.bool"),
        ("123", GOOD, TypeError, "x must be a 1-D tensor .*got str"),
        (["a"], GOOD, TypeError, r"x\[0\] must be a real number"),
        (GOOD, GOOD[:2], ValueError, "the number of samples in x and y must be equal, got 3 and 2"),
        (GOOD / 0, GOOD, ValueError, r"x must be finite, got inf at index 0 \(3 such values\)"),
        (GOOD, GOOD * float("nan"), ValueError, "y must be finite, got nan"),
        (torch.ones(3), GOOD, ValueError, "x must have at least 3 distinct values for degree 2, got 1"),
        (torch.empty(0), torch.empty(0), ValueError, "x must have at least 3 distinct values for degree 2, got 0"),
    ],
)
def test_points_that_are_refused(x: Any, y: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        PolynomialRegression(2).fit(x, y)


def test_lists_and_integers_are_fitted_as_they_come_from_a_measurement() -> None:
    lengths, peaks = [64, 128, 192, 256], [10**9 + 3 * n**2 for n in (64, 128, 192, 256)]
    fitted = []
    forms: list[Any] = [
        (lengths, peaks),
        (torch.tensor(lengths), torch.tensor(peaks)),
        (np.array(lengths), tuple(peaks)),
    ]
    for x, y in forms:
        model = PolynomialRegression(2)
        model.fit(x, y)
        fitted.append(model(torch.tensor([160, 512])).tolist())
    assert fitted[0] == fitted[1] == fitted[2]
    assert fitted[0] == pytest.approx([10**9 + 3 * 160**2, 10**9 + 3 * 512**2], rel=1e-12)


def test_forward_wants_a_tensor() -> None:
    with pytest.raises(TypeError, match="x must be a tensor of real numbers, got list"):
        PolynomialRegression(0)([1.0])


def test_points_too_close_for_the_degree_are_warned_about() -> None:
    x = torch.tensor([0.0, 1e-17, 2e-17, 3e-17, 1.0], dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"x determines only . of 5 coefficients"):
        PolynomialRegression(4).fit(x, x)


def test_a_quadratic_is_recovered_over_eight_orders_of_magnitude() -> None:
    x = torch.linspace(2.5e5, 1e9, 100)
    y = 1e9 + 2e4 * x.double() + 3 * x.double() ** 2
    model = PolynomialRegression(2)
    model.fit(x, y)
    assert ((model(x) - y) / y).abs().max() < 1e-9
