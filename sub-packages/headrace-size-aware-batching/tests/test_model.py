"""A model of peaks by batch: what it recovers, covers, refuses and keeps."""

import json
import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.size_aware_batching import (
    BatchMemoryModel,
    DistributedSizeAwareBatchSampler,
    Peaks,
    PolynomialRegression,
    SimulatedMemory,
    fit_budget,
)

FLOOR = 9e8


def need(n: Any, longest: Any) -> Any:
    """Bytes of a step of a Transformer, about."""
    return np.maximum(FLOOR, 5e8 + 3e4 * n * longest + 2.0 * n * longest**2)


def measured(seed: int, points: int = 40, noise: float = 0.03) -> Peaks:
    generator = np.random.default_rng(seed)
    n = np.rint(np.exp(generator.uniform(0, np.log(64), points))).astype(int)
    longest = np.rint(np.exp(generator.uniform(np.log(32), np.log(2048), points))).astype(int)
    batches = [np.full(count, length) for count, length in zip(n, longest, strict=True)]
    peaks = need(n, longest) * (1 + noise * np.abs(generator.normal(size=points)))
    return Peaks.of(batches, peaks.astype(np.int64).tolist())


def fitted(seed: int = 0, noise: float = 0.03, **options: Any) -> BatchMemoryModel:
    model = BatchMemoryModel(**options)
    model.fit(measured(seed, noise=noise), seed=seed)
    return model


@pytest.mark.slow
@given(st.floats(0, 1e9), st.floats(1e3, 1e5), st.floats(0, 10), st.floats(0, 20_000))
def test_floor_and_slopes_are_recovered(intercept: float, linear: float, quadratic: float, floor: float) -> None:
    def truth(n: Any, longest: Any) -> Any:
        return np.maximum(floor_at, intercept + linear * n * longest + quadratic * n * longest**2)

    floor_at = intercept + linear * floor
    batches = [np.full(n, length) for n in (1, 2, 4, 8, 16, 32, 64) for length in (64, 300, 700, 1024, 1500, 2048)]
    model = BatchMemoryModel()
    model.fit(Peaks.of(batches, [int(truth(len(batch), batch.max())) for batch in batches]))
    for n, longest in ((1, 40), (4, 1000), (16, 700), (60, 2000)):
        assert model.predict(n, longest) == pytest.approx(truth(n, longest), rel=1e-3)
    assert model.margin < 1e-3


@pytest.mark.slow
def test_at_least_95_in_100_new_batches_are_covered_with_19_calibration_points() -> None:
    covered, headrooms = [], []
    for seed in range(200):
        model = BatchMemoryModel()
        model.fit(measured(seed, 21), measured(10_000 + seed, 19))
        new = measured(20_000 + seed, 50)
        upper = np.array(
            [model.upper(int(n), row[0], extrapolate=True) for n, row in zip(new.counts, new.largest, strict=True)]
        )
        covered.append((new.allocated <= upper).mean())
        headrooms.append(np.median(1 - new.allocated / upper))
    assert np.mean(covered) >= 0.95
    assert np.median(headrooms) <= 0.10


@pytest.mark.parametrize(("coverage", "needed"), [(0.95, 19), (0.99, 99), (0.9, 9)])
def test_coverage_needs_enough_calibration_points(coverage: float, needed: int) -> None:
    model = BatchMemoryModel(coverage=coverage)
    with pytest.raises(
        ValueError, match=f"coverage={coverage:g} needs at least {needed} calibration points, got {needed - 1}"
    ):
        model.fit(measured(0), measured(1, needed - 1))
    model.fit(measured(0), measured(1, needed))


def test_what_lies_beyond_the_measurement_is_refused_unless_asked_for() -> None:
    model = fitted()
    longest, most = 2048 * 4, 64
    for arguments, name in (((1, longest), "L0"), ((most * 10, 32), "n"), ((most - 10, 2000), r"n\*L")):
        with pytest.raises(ValueError, match=rf"must be within the measured range, got {name} = .*extrapolate=True"):
            model.predict(*arguments)
        assert model.predict(*arguments, extrapolate=True) > 0
        assert model.cost()(*arguments) == float("inf")
        assert model.cost(extrapolate=True)(*arguments) == model.upper(*arguments, extrapolate=True)
    assert model.max_items(longest, 1e15) == 0
    assert model.max_items(longest, 1e15, extrapolate=True) > 1000


@pytest.mark.parametrize("longest", [33, 200, 1500])
def test_max_items_is_the_largest_count_that_fits(longest: int) -> None:
    model = fitted()
    count = model.max_items(longest, 2e9)
    assert model.upper(count, longest) <= 2e9
    assert model.cost()(count + 1, longest) > 2e9


def test_a_sampler_takes_it_and_workers_do() -> None:
    model = fitted()
    sizes = np.random.default_rng(0).integers(32, 1000, 2000)
    cost = pickle.loads(pickle.dumps(model.cost()))
    sampler = DistributedSizeAwareBatchSampler(sizes, 2e9, cost=cost, strategy="bucketed")
    batches = list(sampler)
    assert sorted(chain.from_iterable(batches)) == list(range(2000))
    assert all(need(len(batch), sizes[batch].max()) <= 2e9 for batch in batches)


def test_several_sizes_a_sample() -> None:
    generator = np.random.default_rng(0)
    batches = [generator.integers(1, [100, 400], (n, 2)) for n in generator.integers(1, 30, 60)]
    bytes_needed = [
        int(1e6 + len(b) * (50.0 * b[:, 0].max() + 9.0 * b[:, 1].max() + 0.5 * b[:, 1].max() ** 2)) for b in batches
    ]
    model = BatchMemoryModel()
    model.fit(Peaks.of(batches, bytes_needed))
    assert set(model.report().slopes) == {"n*L0", "n*L0^2", "n*L1", "n*L1^2"}
    assert model.report().slopes["n*L0"] == pytest.approx(50, rel=1e-3)
    sizes = generator.integers(1, [90, 300], (500, 2))
    sampler = DistributedSizeAwareBatchSampler(sizes, 2e6, cost=model.cost(), strategy="bucketed")
    for batch in sampler:
        n, (a, b) = len(batch), sizes[batch].max(axis=0)
        assert 1e6 + n * (50.0 * a + 9.0 * b + 0.5 * b**2) <= 2e6


@pytest.mark.parametrize("extrapolate", [False, True])
def test_other_columns_than_were_measured_are_refused(extrapolate: bool) -> None:
    model = fitted()
    sizes = np.random.default_rng(0).integers(1, 20, (100, 2))
    with pytest.raises(ValueError, match=r"1 size for each sample, got 2: .* shape \[n\]"):
        DistributedSizeAwareBatchSampler(sizes, 1e9, cost=model.cost(extrapolate=extrapolate), strategy="bucketed")
    with pytest.raises(ValueError, match="1 size for each sample, got 2"):
        model.predict(4, [10, 20], extrapolate=extrapolate)
    with pytest.raises(ValueError, match="1 size for each sample, got 3"):
        model.predict(4, 10, [40, 40, 40], extrapolate=extrapolate)


def test_packed_batches_by_the_sum_of_their_sizes() -> None:
    generator = np.random.default_rng(0)
    batches = [generator.integers(1, 100, n) for n in generator.integers(1, 200, 60)]
    model = BatchMemoryModel(features=("S",))
    model.fit(Peaks.of(batches, [int(1e8 + 1e4 * batch.sum()) for batch in batches]))
    assert model.predict(3, 50, 100) == pytest.approx(1e8 + 1e6, rel=1e-4)
    total = model.max_total(1.3e8)
    assert total == pytest.approx(3000, rel=1e-3)
    assert model.max_total(1e7) == 0
    assert model.max_total(1e12) == max(batch.sum() for batch in batches)
    sampler = DistributedSizeAwareBatchSampler(generator.integers(1, 100, 1000), total)
    assert sampler.report().fill > 0.95
    with pytest.raises(ValueError, match=r"max_total needs a model with features of S alone"):
        fitted().max_total(1e9)


@given(
    st.floats(0, 1e4),
    st.floats(0, 1e6),
    st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    st.floats(1.1e8, 1e10),
)
def test_samples_that_fit_by_their_costs_fit_into_the_bytes(
    size: float, sample: float, sizes: list[int], budget: float
) -> None:
    generator = np.random.default_rng(0)
    batches = [generator.integers(1, 3000, n) for n in generator.integers(1, 40, 60)]
    model = BatchMemoryModel(features=("S", "n"))
    model.fit(Peaks.of(batches, [int(1e8 + size * batch.sum() + sample * len(batch)) for batch in batches]))
    costs, most = model.sample_costs(sizes, budget)
    if costs.sum() <= np.floor(most):  # as the sampler compares
        assert model.upper(len(sizes), 0, sum(sizes), extrapolate=True) <= budget * (1 + 1e-12)


def test_costs_of_samples_stay_inside_what_was_measured() -> None:
    batches = [np.full(n, length) for n in (1, 3, 9) for length in range(10, 120, 10)]
    model = BatchMemoryModel(features=("S", "n"), coverage=0.8)
    model.fit(Peaks.of(batches, [10**6 + 100 * int(batch.sum()) + 1000 * len(batch) for batch in batches]))
    costs, most = model.sample_costs(batches[-1], 1e12)
    assert most == pytest.approx(costs.sum(), rel=1e-8)
    assert costs.tolist() == [120] * 9  # ten units of size for each sample
    assert np.min(model.sample_costs([1], 1e12, extrapolate=True)[1]) > 1e9
    assert model.sample_costs([1], 10**5)[1] == 0


def test_costs_of_small_samples_are_rounded_by_a_thousandth_at_most() -> None:
    batches = [np.full(n, length) for n in (10, 30, 90) for length in range(1, 11)]
    model = BatchMemoryModel(features=("S", "n"), coverage=0.8)
    model.fit(Peaks.of(batches, [10**6 + 1000 * int(batch.sum()) + 1300 * len(batch) for batch in batches]))
    costs, most = model.sample_costs([5], 10**8, extrapolate=True)
    assert 0.998 < np.floor(most / costs[0]) / ((10**8 - 10**6) / (5 * 1000 + 1300)) <= 1


def test_a_polynomial_of_the_padded_batch() -> None:
    batches = [np.full(n, length) for n in (1, 2, 4, 8) for length in range(10, 120, 10)]
    peaks = Peaks.of(batches, [int(1e6 + 40.0 * b.sum() + 0.01 * b.sum() ** 2) for b in batches])
    model = BatchMemoryModel(PolynomialRegression(degree=2))
    model.fit(peaks)
    assert model.predict(4, 55) == pytest.approx(1e6 + 40 * 220 + 0.01 * 220**2, rel=1e-6)


def test_reserved_bytes_count_unless_allocated_ones_are_asked_for() -> None:
    batches = [np.full(n, 10) for n in range(1, 60)]
    allocated = [10**6 * len(batch) for batch in batches]
    peaks = Peaks.of(batches, allocated, [2 * value for value in allocated])
    for memory, factor in (("reserved", 2e6), ("allocated", 1e6)):
        model = BatchMemoryModel(memory=memory)  # type: ignore[arg-type]  # one of them
        model.fit(peaks)
        assert model.predict(30, 10) == pytest.approx(30 * factor)


def test_batches_that_ran_out_raise_the_margin() -> None:
    peaks = measured(0, noise=0.0)
    bound = Peaks.of([np.full(8, 1000)], [int(1.2 * need(8, 1000))], fits=[False])
    model = BatchMemoryModel()
    model.fit(peaks + bound)
    assert model.margin == pytest.approx(0.2, abs=0.01)
    assert model.report().bounds == 1


def test_a_model_survives_a_file(tmp_path: Path) -> None:
    model = fitted()
    model.capacity = 10**10
    model.save(tmp_path / "model.json")
    again = BatchMemoryModel.load(tmp_path / "model.json")
    assert again.cost() == model.cost()
    assert again.report() == model.report()
    assert again.budget() == model.budget() == 9.5e9
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "model.json").read_text()
    (tmp_path / "wrong.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match=r"wrong.json must be a file that BatchMemoryModel.save wrote"):
        BatchMemoryModel.load(tmp_path / "wrong.json")


class Shared(SimulatedMemory):  # type: ignore[no-untyped-call]  # torch's mode has no annotations
    """A device of which other processes hold a part."""

    def __init__(self, size: int, held: int) -> None:
        super().__init__(size - held)
        self.whole = size

    def size(self) -> int:
        return self.whole


def measured_on(device: SimulatedMemory) -> BatchMemoryModel:
    lengths = np.arange(10, 210)
    with device:
        return fit_budget(
            lambda shape: torch.zeros(shape, dtype=torch.uint8),
            lambda indices: (len(indices), int(lengths[indices].max()), 100),
            lengths,
            device,
            memory="allocated",
        )


@pytest.mark.slow
def test_a_run_goes_on_with_the_saved_model_where_less_memory_is_free(tmp_path: Path) -> None:
    lengths, path = np.arange(10, 210), tmp_path / "model.json"

    def sampler_of(model: BatchMemoryModel) -> DistributedSizeAwareBatchSampler:
        return DistributedSizeAwareBatchSampler(lengths, model.budget(), cost=model.cost(), strategy="bucketed")

    model = measured_on(Shared(4_000_000, held=300_000))
    model.save(path)
    sampler = sampler_of(model)
    steps = iter(sampler)
    next(steps)
    state, rest = sampler.state_dict(), [list(step) for step in steps]
    later = Shared(4_000_000, held=300_000 + 2**17)
    with pytest.raises(ValueError, match=r"another function.*the run that saved it \(max_total_size=3515000\)"):
        sampler_of(measured_on(later)).load_state_dict(state)
    again = sampler_of(BatchMemoryModel.load(path, later))
    again.load_state_dict(state)
    assert [list(step) for step in again] == rest


def test_a_model_of_estimates_gets_the_budget_of_the_device_that_it_is_loaded_on(tmp_path: Path) -> None:
    batches = [np.full(count, size) for count in (1, 4, 16, 64) for size in range(10, 200, 10)]
    model = BatchMemoryModel()
    model.fit(Peaks.of(batches, [1000 + 70 * int(sizes.sum()) for sizes in batches]))
    model.save(tmp_path / "model.json")
    with pytest.raises(ValueError, match=r"give it, or load the model with load\(path, device\)"):
        BatchMemoryModel.load(tmp_path / "model.json").budget()
    device = SimulatedMemory(800_000)
    loaded = BatchMemoryModel.load(tmp_path / "model.json", device)
    assert loaded.budget() == loaded.budget(device) == 0.95 * 800_000
    assert BatchMemoryModel.load(tmp_path / "model.json", device).budget(reserve=0.5) == 400_000
    loaded.save(tmp_path / "placed.json")
    assert BatchMemoryModel.load(tmp_path / "placed.json").budget() == loaded.budget()
    assert BatchMemoryModel.load(tmp_path / "placed.json", device).budget() == loaded.budget()


def test_a_saved_model_of_estimates_keeps_the_budget_that_it_had_first(tmp_path: Path) -> None:
    path, batches = tmp_path / "model.json", [np.full(count, size) for count in (1, 4, 16) for size in range(9, 99, 6)]
    model = BatchMemoryModel()
    model.fit(Peaks.of(batches, [1000 + 70 * int(sizes.sum()) for sizes in batches]))
    with pytest.raises(ValueError, match="reserve"):
        model.budget(SimulatedMemory(500_000), reserve=1)
    assert model.budget(SimulatedMemory(800_000), reserve=0.3) == model.budget() == pytest.approx(560_000)
    assert model.budget(SimulatedMemory(100_000)) == pytest.approx(70_000)  # another device, with the same reserve
    model.save(path)
    assert BatchMemoryModel.load(path).budget() == model.budget()
    assert BatchMemoryModel.load(path, SimulatedMemory(799_000)).budget() == model.budget()  # a little less is free


def test_a_model_loaded_on_another_device_has_its_capacity(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    measured_on(Shared(4_000_000, held=300_000)).save(path)
    for size in (3_000_000, 6_000_000):
        with pytest.warns(UserWarning, match=f"device of 4,000,000 bytes, this one has {size:,}") as warned:
            model = BatchMemoryModel.load(path, Shared(size, held=0))
        assert ("measure anew" in str(warned[0].message)) == (size > 4_000_000)
        assert (model.capacity, model.device_bytes) == (size - 300_000, size)
        assert model.budget() == 0.95 * (size - 300_000)
    for same in (None, Shared(3_970_000, held=0)):
        assert BatchMemoryModel.load(path, same).capacity == 3_700_000


@pytest.mark.parametrize(
    "change",
    [
        {"capacity": "much"},
        {"device_bytes": 0},
        {"capacity": -1},
        {"reserve": 1.5},
        {"points": {}},
        {"cost": {}},
        {"cost.slopes": [1.0]},
        {"cost.slopes": [-1.0, 0.0]},
        {"cost.slopes": ["a", "b"]},
        {"cost.factor": 0.5},
        {"cost.floor": float("nan")},
        {"cost.terms": []},
        {"cost.most": [1.0, [1.0], [1.0]]},
        {"cost.most": [1.0]},
        {"points.counts": [10**30]},
        {"points.counts": [1, 2]},
        {"calibration.fits": [True]},
    ],
)
def test_damaged_files_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    model = fitted()
    model.capacity = 10**10
    path = tmp_path / "model.json"
    model.save(path)
    saved = json.loads(path.read_text())
    for name, value in change.items():
        first, _, second = name.partition(".")
        if second:
            saved[first][second] = value
        else:
            saved[first] = value
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"model.json must be a file that BatchMemoryModel.save wrote"):
        BatchMemoryModel.load(path)


def test_whole_numbers_in_a_file(tmp_path: Path) -> None:
    model, path = fitted(), tmp_path / "model.json"
    model.save(path)
    saved = json.loads(path.read_text())
    saved["cost"] |= {"slopes": [2, 0], "floor": 1000, "intercept": 0, "factor": 1}
    path.write_text(json.dumps(saved))
    assert BatchMemoryModel.load(path).cost()(10, 100) == 2000


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = fitted(), tmp_path / "model.json"
    model.save(path)
    before = path.read_bytes()

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_every_measured_batch_is_within_what_was_measured() -> None:
    generator = np.random.default_rng(0)
    batches = [np.full(n, longest) for n in (1, 3, 7, 30) for longest in generator.uniform(0.1, 5, 30)]
    model = BatchMemoryModel(("n*L", "n*L^3", "n^3*L^3"))
    model.fit(Peaks.of(batches, [int(1e6 + 1e4 * batch.sum()) for batch in batches]))
    assert all(np.isfinite(model.cost()(len(batch), batch[0])) for batch in batches)


def test_no_calibration_batch_that_fits() -> None:
    peaks = measured(0, 30)
    with pytest.raises(ValueError, match=r"coverage=0\.95 needs at least 19 calibration points, got 0"):
        BatchMemoryModel().fit(peaks, peaks[:0])


def test_a_step_on_another_device_takes_no_memory() -> None:
    batches = [np.full(n, 10) for n in range(1, 60)]
    with pytest.raises(ValueError, match="peaks must be greater than 0 bytes, got 0: does the step run on the device"):
        BatchMemoryModel().fit(Peaks.of(batches, [0] * len(batches)))


def test_report_and_picture(tmp_path: Path) -> None:
    model = fitted()
    report = model.report()
    assert (report.points, report.calibration, report.bounds) == (20, 20, 0)
    assert report.headroom < 0.1
    assert "covers 95% of new batches" in str(report)
    model.capacity = 10**10
    model.draw(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_the_budget_of_a_device() -> None:
    model = fitted()
    with pytest.raises(ValueError, match=r"budget\(\) needs device="):
        model.budget()
    assert model.budget(SimulatedMemory(1000)) == 950
    assert model.budget(SimulatedMemory(1000), reserve=0.1) == 900
    assert model.budget() == 950
    with pytest.raises(ValueError, match="reserve must be from 0 to less than 1, got 1"):
        model.budget(SimulatedMemory(1000), reserve=1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"features": ()}, "features must be 1 to 6 products"),
        ({"features": "n*L"}, "features must be 1 to 6 products"),
        ({"features": [1]}, "features must be 1 to 6 products"),
        ({"features": 1}, "features must be 1 to 6 products"),
        ({"coverage": 1.0}, "coverage must be a number between 0 and 1"),
        ({"memory": "virtual"}, "memory must be one of reserved, allocated"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        BatchMemoryModel(**options)


@pytest.mark.parametrize("feature", ["n*X", "n*L1", "", "L^", "n+L"])
def test_features_that_are_refused(feature: str) -> None:
    with pytest.raises(ValueError, match=r"a feature must be a product such as 'n\*L\^2'"):
        fitted(features=[feature])


def test_nothing_fitted_yet_and_too_few_points() -> None:
    for call in (BatchMemoryModel().cost, BatchMemoryModel().report, lambda: BatchMemoryModel().predict(1, 1)):
        with pytest.raises(RuntimeError, match="has not been fitted yet"):
            call()
    with pytest.raises(ValueError, match="peaks must hold at least 4 batches that fit for 2 features, got 3"):
        BatchMemoryModel().fit(measured(0, 3), measured(1, 19))
