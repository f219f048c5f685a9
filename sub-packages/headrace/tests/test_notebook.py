"""Reports, plans and mixtures in a notebook: a real kernel, and what the notebook would store and show."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import headrace.runs

pytestmark = pytest.mark.slow
FORMAT: Any = nbformat  # whose functions have no types
SETUP = """
import numpy as np
from headrace.size_aware_batching import BatchMemoryModel, DistributedSizeAwareBatchSampler, Peaks, plan_step
from headrace.webdatamodule import IndexedShards, ResumableLoader, write_shards
from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler

one = {"num_replicas": 1, "rank": 0}
sizes = np.random.default_rng(0).integers(10, 200, 300)
batches = DistributedSizeAwareBatchSampler(sizes, max_total_size=1600, **one)
data = NamedConcatDataset({"web": list(range(200)), "<books>": list(range(100))})
mixture = WeightedDistributedSampler(data, {"web": 3, "<books>": 1}, **one)
loader = ResumableLoader(data, batches, sizes=sizes, **one)
delivered = sum(1 for _ in loader)
model = BatchMemoryModel()
lengths = [(n, length) for n in (1, 2, 4, 8, 16) for length in (64, 128, 256, 512, 1024, 2048, 3072, 4096)]
needed = [500_000_000 + 30_000 * n * length + 2 * n * length**2 for n, length in lengths]
model.fit(Peaks.of([[length] * n for n, length in lengths], needed))
"""
SHOWN = (
    "batches",
    "batches.plan()",
    "batches.report()",
    "data",
    "loader",
    "loader.report()",
    "mixture",
    "mixture.report()",
    "model",
    "plan_step(sizes[:40], num_replicas=2, max_total_size=1600)",
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each cell shows, by its MIME type, after the notebook has been stored and read again."""
    folder = tmp_path_factory.mktemp("notebook")
    cells = [FORMAT.v4.new_code_cell(source) for source in (SETUP, *SHOWN)]
    notebook = FORMAT.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    FORMAT.write(notebook, folder / "run.ipynb")
    stored = FORMAT.read(Path(folder, "run.ipynb"), as_version=4)
    FORMAT.validate(stored)
    shown = {}
    for cell in stored.cells[1:]:
        (output,) = cell.outputs  # nothing on stderr
        shown[cell.source] = dict(output.data)
    return shown


@pytest.mark.parametrize("source", SHOWN)
def test_objects_show_one_to_three_lines(source: str, outputs: dict[str, dict[str, Any]]) -> None:
    assert set(outputs[source]) == {"text/plain"}
    assert 1 <= len(outputs[source]["text/plain"].splitlines()) <= 3
    assert " object at 0x" not in outputs[source]["text/plain"]


def test_runs_says_its_version() -> None:
    assert headrace.runs.__version__ == version("headrace")
