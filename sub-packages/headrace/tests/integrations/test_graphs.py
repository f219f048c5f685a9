"""The example with molecules: its batches, and that a run that is killed again and again loses and repeats nothing."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import IndexedShards

pytest.importorskip("torch_geometric")
pytest.importorskip("rdkit")
pytest.importorskip("safetensors")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "graphs"
# torch_geometric 2.8 scripts a class when it is imported, which torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.fixture(scope="module")
def molecules() -> Any:
    specification = importlib.util.spec_from_file_location("graphs_molecules", EXAMPLE / "molecules.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, molecules: Any) -> Path:
    """A folder with the shards."""
    folder = tmp_path_factory.mktemp("graphs")
    molecules.write(folder / "shards")
    return folder


def test_what_is_stored_comes_back_as_a_batch_of_graphs(home: Path, molecules: Any) -> None:
    shards = IndexedShards(home / "shards")
    expected = list(molecules.molecules())
    assert len(shards) == len(expected) > 4900
    numbers = [0, 17, 4000]
    batch = molecules.to_batch(shards.__getitems__(numbers))
    assert batch.num_graphs == 3
    assert batch.number.tolist() == numbers
    for graph, molecule in zip(batch.to_data_list(), (expected[number] for number in numbers), strict=True):
        assert graph.x.tolist() == molecule.element.tolist()
        assert graph.edge_index.tolist() == molecule.edges.tolist()
        assert graph.edge_attr.tolist() == molecule.distance.tolist()
        assert graph.y.item() == pytest.approx(molecule.logp)
    nodes, edges = molecules.sizes(shards).T
    assert nodes.tolist() == [len(molecule.element) for molecule in expected]
    assert edges.tolist() == [len(molecule.distance) for molecule in expected]


@pytest.mark.parametrize("world", [1, 8])
def test_no_batch_exceeds_nodes_or_edges_and_ranks_have_as_many(world: int, home: Path, molecules: Any) -> None:
    shards = IndexedShards(home / "shards")
    sizes, budget = molecules.sizes(shards), np.array([1024, 10_000])
    ranks = [
        DistributedSizeAwareBatchSampler(sizes, tuple(budget), num_replicas=world, rank=rank) for rank in range(world)
    ]
    batches = [list(sampler) for sampler in ranks]
    assert {len(own) for own in batches} == {len(ranks[0])}
    assert sorted(index for own in batches for batch in own for index in batch) == list(range(len(shards)))
    totals = np.array([sizes[batch].sum(axis=0) for own in batches for batch in own])
    assert (totals <= budget).all()
    assert len(totals) < 1.02 * (sizes.sum(axis=0) / budget).max() + world


def run_until(home: Path, step: int | None, workers: int) -> list[str]:
    """Run the example, kill it behind a step of its own; return its lines."""
    options = ["--epochs", "2", "--every", "10", "--workers", str(workers), "--nodes", "2048", "--edges", "20000"]
    command = [sys.executable, str(EXAMPLE), str(home), *options]
    lines = []
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, bufsize=1) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if sum(" step " in line for line in lines) == step:
                process.kill()
                break
        status = process.wait()
    assert status == (0 if step is None else -9)
    return lines


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_kills_lose_and_repeat_nothing(home: Path, molecules: Any) -> None:
    molecule_count = len(IndexedShards(home / "shards"))
    for kill, (step, workers) in enumerate([(33, 2), (28, 0), (37, 1), (15, 3), (12, 0)]):
        lines = run_until(home, step, workers)
        assert lines[0].startswith("resumes in epoch") == (kill > 0)
    lines = run_until(home, None, 2)
    assert lines[-1] == f"times trained on: molecules {{2: {molecule_count}}}\n"
    trained = torch.load(home / "checkpoint.pt", weights_only=True)["trained"]
    assert trained.tolist() == [2] * molecule_count
