"""One rank of ``test_ranks.py``: rank and world size come from torch.distributed alone."""

import json
import os
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from headrace.weighted_sampler import WeightedDistributedSampler


def main(folder: Path, rank: int, world: int) -> None:
    """Deliver some epochs, one resumed and two by a mesh, and write down what came."""
    sampler = WeightedDistributedSampler(range(90), {(0, 60): 1, (60, 90): 0.5}, seed=5)
    sampler.set_skip_batches(3, 4)  # before the process group is there, as in a script under a launcher
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    runs = {"resumed": list(sampler)}
    runs["whole"] = list(sampler)
    sampler.set_epoch(1)
    runs["next"] = list(sampler)
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
    for name, ranks in (("data_parallel", mesh["dp"]), ("tensor_parallel", mesh["tp"])):
        own = WeightedDistributedSampler(range(90), {(0, 60): 1, (60, 90): 0.5}, mesh=ranks, seed=5)
        own.set_epoch(1)
        runs[name] = list(own)
    (folder / f"{rank}.json").write_text(json.dumps({**runs, "world": [sampler.num_replicas, sampler.rank]}))
    dist.barrier()
    os._exit(0)  # gloo's threads race with the end of the interpreter, which may abort
