"""Tells a trainer what it cannot know of the epoch that is about to begin.

Lightning 2.6 asks a loader for its length once, before the first epoch, and cuts or misjudges the later ones by it:
where batches are filled by size, their number is another one when the order is another one. A checkpoint that was
saved as an epoch ended or began counts the batches of the old epoch as some of the new one when it is resumed. And one
that was saved after `max_steps` ended the run counts the epoch as done, whatever was left of it.
"""

from __future__ import annotations

import math
from typing import Any


def limited(length: float, limit: float) -> float:
    """The batches that `limit_train_batches` leaves.

    Args:
        length: Batches of the epoch; infinite if it never ends.
        limit: A number of batches if it is an int, else a share of them.

    >>> limited(10, 1.0), limited(10, 4), limited(10, 0.25), limited(math.inf, 7)
    (10, 4, 2, 7)
    """
    if isinstance(limit, int):
        return min(length, limit)
    return length if math.isinf(length) else int(length * limit)


def settle(trainer: Any) -> None:
    """Let a training loop that is being resumed forget the step that had begun when its checkpoint was saved.

    It forgets it in the epoch's counters only. With those over all epochs ahead, it would not know from the next
    checkpoint where it stood.

    Args:
        trainer: A `lightning.Trainer` that fits.
    """
    inner = trainer.fit_loop.epoch_loop
    if inner.restarting:
        total = inner.batch_progress.total
        done = total.completed + bool(getattr(inner, "restarted_on_train_batch_end", False))
        total.ready = total.started = total.processed = done


def expect(trainer: Any, length: int) -> None:
    """Let the training loop expect `length` batches, as if it had asked now.

    Args:
        trainer: A `lightning.Trainer` that fits with one loader; others are left alone.
        length: Batches of the epoch on this rank.
    """
    loop = trainer.fit_loop
    loaders = getattr(loop, "_combined_loader", None)
    if loaders is None or len(loaders.flattened) != 1 or loop.max_batches == 0:
        return
    count = int(limited(length, trainer.limit_train_batches))
    loop.max_batches = count
    loaders.limits = [count]
    if loaders._iterator is not None:
        loaders._iterator.limits = [count]
    if loop._data_fetcher is not None:
        loop._data_fetcher.length = count
    interval = trainer.val_check_interval
    if isinstance(interval, float) and trainer.val_check_batch not in (None, float("inf")):
        trainer.val_check_batch = max(1, int(count * interval))


def begin_afresh(trainer: Any) -> None:
    """Let a training loop that is being resumed know that it stands at the beginning of an epoch.

    Args:
        trainer: A `lightning.Trainer` that fits.
    """
    loop = trainer.fit_loop
    inner = loop.epoch_loop
    if not inner.restarting:
        return
    if getattr(loop, "restarted_on_epoch_end", False):
        loop.epoch_progress.increment_completed()
    if getattr(loop, "restarted_mid_epoch", False):  # its beginning is counted once more
        for count in (loop.epoch_progress.total, loop.epoch_progress.current):
            count.ready -= 1
            count.started -= 1
    if getattr(inner, "restarted_on_train_batch_end", False) and not inner._should_accumulate():
        inner._batches_that_stepped += 1  # as the loop would have done itself
    if not getattr(loop, "restarted_on_epoch_start", False) and hasattr(loop, "reset_restart_stage"):
        loop.reset_restart_stage()  # so that the hooks of the epoch's start are called
    inner.restarting = False


def about_to_restore(trainer: Any) -> bool:
    """Whether a training loop is still to get its counters from a checkpoint.

    Args:
        trainer: A `lightning.Trainer` that fits.
    """
    return bool(_saved_epochs(trainer)) and trainer.fit_loop.epoch_progress.current.ready == 0


def saved_epochs(trainer: Any) -> tuple[int, int]:
    """How many epochs a training loop will have begun, and ended, once it is restored."""
    current = _saved_epochs(trainer)["current"]
    return int(current["ready"]), int(current["processed"])


def take_back_saved(trainer: Any) -> None:
    """Say in the checkpoint that is being loaded that its last epoch is not done.

    Args:
        trainer: A `lightning.Trainer` that is about to restore its loops from it.
    """
    for part in _saved_epochs(trainer).values():
        part["processed"] -= 1
        part["completed"] -= 1


def _saved_epochs(trainer: Any) -> Any:
    loaded = getattr(trainer._checkpoint_connector, "_loaded_checkpoint", None) or {}
    return loaded.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {})


def take_back(trainer: Any) -> None:
    """Let a training loop that is being resumed know that the epoch before the one it is about to begin is not done.

    Args:
        trainer: A `lightning.Trainer` that fits.
    """
    loop = trainer.fit_loop
    inner, now, total = loop.epoch_loop, loop.epoch_progress.current, loop.epoch_progress.total
    done, begun = now.processed - 1, now.processed
    for name, count in (("ready", begun), ("started", begun), ("processed", done), ("completed", done)):
        setattr(total, name, getattr(total, name) + count - getattr(now, name))
        setattr(now, name, count)
    loop._restarting = inner.restarting = True
    loop._restart_stage, inner._restart_stage = "restarted_mid_epoch", "restarted_on_last"
