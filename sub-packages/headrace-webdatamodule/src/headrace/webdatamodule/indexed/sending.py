"""Whether a batch can be sent from a worker to the training loop."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class _Trial(ForkingPickler):
    """As workers send batches, but for tensors, which would be put into shared memory for it."""

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor):
            return NotImplemented
        if thing.requires_grad and not thing.is_leaf:  # the only ones that torch does not send
            raise TypeError("a tensor that was computed with gradients: detach() it")
        return int, ()


def check_sendable(batch: Any) -> None:
    """Refuse a batch that cannot be pickled.

    A queue between processes pickles in a thread of its own, prints what goes wrong there, and drops the batch: the
    loop would wait until its timeout.

    Args:
        batch: What a `collate_fn` gave.

    Raises:
        TypeError: It cannot be pickled.

    >>> check_sendable([torch.zeros(2)])
    >>> check_sendable([lambda: 0])
    Traceback (most recent call last):
    TypeError: a batch cannot be sent ... as pickle takes it, or num_workers=0
    """
    try:
        _Trial(_Nowhere()).dump(batch)
    except Exception as error:  # what cannot be pickled says so in many ways
        reason = f"{type(error).__name__}: {error}"
        cure = "return tensors, arrays and what else there is as pickle takes it, or num_workers=0"
        raise TypeError(f"a batch cannot be sent from a worker ({reason}): {cure}") from error
