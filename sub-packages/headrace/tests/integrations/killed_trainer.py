"""Runs a script with a Trainer: `killed_trainer.py SCRIPT`, killed in batch DIE_AT, counted from 1 in this process."""

import os
import runpy
import signal
import sys
from typing import Any

import torch.distributed as dist
from transformers import Trainer

die_at, batches, training_step = int(os.environ.get("DIE_AT", "0")), 0, Trainer.training_step


def counting(self: Any, *arguments: Any, **words: Any) -> Any:
    global batches
    batches += 1
    if batches == die_at and (not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return training_step(self, *arguments, **words)


Trainer.training_step = counting
runpy.run_path(sys.argv[1], run_name="__main__")
