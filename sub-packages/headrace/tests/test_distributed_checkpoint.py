"""Checkpoints of `torch.distributed.checkpoint`, with batches by size."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doors import sampler_with
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from headrace.webdatamodule import ResumableLoader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
SIZES = np.random.default_rng(0).integers(10, 200, 600)


def loader(world: int, rank: int, **options: Any) -> ResumableLoader:
    batches = sampler_with(SIZES, 1600, num_replicas=world, rank=rank, **options)
    return ResumableLoader(list(range(600)), batches, collate_fn=list, check_ranks=False)


@pytest.mark.parametrize("options", [{}, {"tokens_per_step": 14000}], ids=["batches", "optimizer steps"])
@pytest.mark.parametrize("world", [2, 6])
def test_the_rest_of_an_epoch_goes_to_other_ranks(tmp_path: Path, world: int, options: dict[str, Any]) -> None:
    """Also from the middle of an optimizer step."""
    before = []
    for rank in range(4):
        one = loader(4, rank, **options)
        for batch in one:
            before += batch
            if one.steps == 3:
                break
        if not options:  # a step of several batches allows no change in the middle of an epoch
            one.exclude([before[0]])
        if rank == 0:
            state_dict_saver.save({"loader": one}, checkpoint_id=tmp_path, no_dist=True)
    rest = []
    for rank in range(world):
        one = loader(world, rank, **options)
        state_dict_loader.load({"loader": one}, checkpoint_id=tmp_path, no_dist=True)
        assert one.excluded_indices.tolist() == ([] if options else before[:1])
        rest += [sample for batch in one for sample in batch]
    assert sorted(before + rest) == list(range(600))
