"""A batch sampler that was given to torch's `DataLoader` as `sampler=`, which reads every batch as one index."""

import sys

from torch.utils.data import BatchSampler


def refuse_as_sampler(batch_sampler: object) -> None:
    """Refuse a `BatchSampler` of torch that reads a batch sampler; call it in the ``__iter__`` of that one.

    Raises:
        TypeError: Some data fail with an error that names neither argument, others are batched in a wrong shape.
    """
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__") != BatchSampler.__module__:  # a frame that is asked keeps its variables alive
        return
    caller = frame.f_locals.get("self")
    if type(caller) is BatchSampler and caller.sampler is batch_sampler:
        name = type(batch_sampler).__name__
        raise TypeError(
            f"sampler must yield indices, got a {name}, which yields batches: give it as batch_sampler=, "
            "DataLoader(dataset, batch_sampler=batches), without sampler, batch_size, shuffle and drop_last"
        )
