"""The 5,000 molecules of the NCI set that comes with RDKit, as graphs in shards."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rdkit import Chem, RDConfig, RDLogger
from rdkit.Chem import Crippen
from safetensors.numpy import save
from torch_geometric.data import Batch, Data

from headrace.webdatamodule import IndexedShards, write_shards

REACH = 3  # bonds between two atoms that share an edge: bonds, angles and torsions


class Molecule(NamedTuple):
    """A molecule, hydrogens included.

    Args:
        element: Atomic numbers, uint8, shape ``[nodes]``.
        edges: Pairs of atoms at most `REACH` bonds apart, both ways, uint8, shape ``[2, edges]``.
        distance: Bonds between them, uint8, shape ``[edges]``.
        logp: Partition coefficient after Crippen, to be learned.
    """

    element: NDArray[np.uint8]
    edges: NDArray[np.uint8]
    distance: NDArray[np.uint8]
    logp: float


def molecules() -> Iterator[Molecule]:
    """Read the molecules; a few that RDKit does not accept are left out."""
    RDLogger.DisableLog("rdApp.*")  # it names each of those
    for line in (Path(RDConfig.RDDataDir) / "NCI" / "first_5K.smi").read_text().splitlines():
        parsed = Chem.MolFromSmiles(line.split()[0])
        if parsed is None:
            continue
        whole = Chem.AddHs(parsed)
        bonds = Chem.GetDistanceMatrix(whole)
        edges = np.argwhere((bonds > 0) & (bonds <= REACH)).T
        element = [atom.GetAtomicNum() for atom in whole.GetAtoms()]
        yield Molecule(
            np.array(element, np.uint8), edges.astype(np.uint8), bonds[*edges].astype(np.uint8), Crippen.MolLogP(whole)
        )


def write(folder: Path) -> None:
    """Write them as safetensors, with the numbers of nodes and edges as columns, unless that is done."""
    if (folder / "manifest.json").exists():
        return
    graphs = list(molecules())
    samples = [(f"nci{number:04d}", {"safetensors": stored(graph)}) for number, graph in enumerate(graphs)]
    columns = {"nodes": [len(graph.element) for graph in graphs], "edges": [len(graph.distance) for graph in graphs]}
    write_shards(samples, folder, n_shards=4, columns=columns, workers=1)


def stored(graph: Molecule) -> bytes:
    """Return a molecule as bytes that hold arrays and no code."""
    return save({name: np.require(value, requirements="C") for name, value in graph._asdict().items()})


def sizes(shards: IndexedShards) -> NDArray[np.int64]:
    """Return nodes and edges of each molecule, shape ``[molecules, 2]``, without decoding any."""
    return np.stack([shards.column("nodes"), shards.column("edges")], axis=1)


def to_batch(samples: list[dict[str, Any]]) -> Batch:
    """Return decoded samples as a batch of PyTorch Geometric."""
    return Batch.from_data_list([to_graph(sample["__key__"], sample["safetensors"]) for sample in samples])


def to_graph(key: str, arrays: dict[str, NDArray[Any]]) -> Data:
    """Return a decoded sample as a graph of PyTorch Geometric."""
    return Data(
        x=torch.from_numpy(arrays["element"]).long(),
        edge_index=torch.from_numpy(arrays["edges"]).long(),
        edge_attr=torch.from_numpy(arrays["distance"]).long(),
        y=torch.from_numpy(arrays["logp"]).float().reshape(1),
        number=int(key.removeprefix("nci")),
    )
