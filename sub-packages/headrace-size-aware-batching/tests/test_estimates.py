"""Estimates of eleven kinds of models are near to what training takes: a short form of benchmarks/estimates.py."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "estimates.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SCRIPT.is_file(), reason="benchmarks lie in the repository"),
]


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("estimates", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_estimates_of_all_kinds_of_models_are_near_to_what_training_takes() -> None:
    module = benchmark()
    rows = {name: module.figures(kind._replace(batches=kind.batches[:4])) for name, kind in module.KINDS.items()}
    assert len(rows) == 11
    lstm = rows.pop("LSTM")  # of whose workspace on the CPU an estimate knows nothing
    assert max(row.tensors_error for row in rows.values()) < 0.001
    assert max(row.reserved_error for row in rows.values()) < 0.05
    assert np.mean([row.reserved_fail_5 for row in rows.values()]) < 0.06
    assert lstm.tensors_error < 0.22
    assert lstm.scaled_error < 0.15
