"""One rank of ``test_distributed.py``: loads two epochs, and says how it ended."""

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from headrace.webdatamodule import DistributedBatchSampler, IndexedShards, RankMismatchError, ResumableLoader
from headrace.webdatamodule.loading.distributed import compare_plans


def keys(samples: list[Any]) -> list[str]:
    return [sample["__key__"] for sample in samples]


def compared(out: Path, plan: dict[str, Any]) -> int:
    told: dict[str, Any] = {"came": []}
    try:
        compare_plans(plan, "train")
        code = 0
    except RankMismatchError as error:
        told["said"], code = str(error), 3
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()
    return code


def main(out: Path, folder: str, options: dict[str, Any]) -> int:
    dist.init_process_group("gloo")
    if plan := options.get("plan"):
        return compared(out, plan)
    world = (dist.get_world_size(), dist.get_rank())
    shards = IndexedShards(folder)
    seed = options.get("seed", 0)
    batches = DistributedBatchSampler(len(shards), options.get("size", 3), seed=seed)  # ranks of the process group
    loader = ResumableLoader(shards, batches, collate_fn=keys, seed=seed, num_workers=options.get("workers", 0))
    loader.set_epoch(options.get("epoch", 0))
    if state := options.get("state"):
        loader.load_state_dict(state)
    told: dict[str, Any] = {"came": []}
    try:
        for epoch in range(loader.epoch, loader.epoch + 2):
            loader.set_epoch(epoch)
            told["came"] += list(loader)
        code = 0
    except RankMismatchError as error:
        told["said"], code = str(error), 3
    loader.close()
    (out / f"{world[1]}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))
