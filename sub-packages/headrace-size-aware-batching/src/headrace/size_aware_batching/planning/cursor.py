"""The place of an iterable in its epochs, and the one rule of ``set_epoch`` and ``load_state_dict``.

The packages of headrace do not import one another, so each has this file; the copies are equal.
"""

import sys
import warnings
from types import FrameType
from typing import Any, cast

_THROUGH = "headrace.size_aware_batching."  # modules


class EpochCursor:
    """Where an iterable with epochs stands: in which epoch, where it begins next, how far the latest iteration is.

    The later ``set_epoch`` wins: a state of an older epoch than one that was chosen and not iterated yet is ignored,
    and nothing moves. Loaders may load a state as late as in ``iter()``, after a loop has chosen the epoch. Any other
    state is taken, and choosing its epoch keeps its position.

    A copy begins where the position of the original is, as if its state was loaded.

    Attributes:
        epoch: Of the latest iteration, or of the next one where it was chosen or resumed since.
        start: Where the next iteration begins.
        position: Where the latest iteration is, or else ``start``.
        iteration: What stands for the latest iteration, at its end too; None where ``start`` was set since.

    >>> cursor = EpochCursor()
    >>> cursor.resume(2, 7), cursor.choose(2), cursor.resume(0, 3), cursor.choose(2)
    (True, False, False, False)
    >>> cursor.epoch, cursor.start
    (2, 7)
    >>> iteration = cursor.begin()
    >>> cursor.start, cursor.position
    (0, 7)
    """

    def __init__(self) -> None:
        self.epoch = self.start = self.position = 0
        self._chosen = False  # by set_epoch, and not iterated since
        self._whole = 0  # times that a DataLoader got the epoch whole since it was chosen
        self.iteration: Any = None  # only this one moves the position

    def choose(self, epoch: int) -> bool:
        """Go to an epoch, as ``set_epoch`` does; return whether it is another one, which starts at its beginning."""
        changed = epoch != self.epoch
        if changed:
            self.go_to(epoch, 0)
        self._chosen, self._whole = True, 0
        return changed

    def overrules(self, epoch: int) -> bool:
        """Return whether a state of that epoch is to be ignored."""
        return self._chosen and epoch < self.epoch

    def resume(self, epoch: int, position: int) -> bool:
        """Go to a place of a state, as ``load_state_dict`` does, unless a later epoch was chosen; return whether."""
        if self.overrules(epoch):
            return False
        self.go_to(epoch, position)
        self._chosen = False
        return True

    def go_to(self, epoch: int, position: int) -> None:
        """Let the next iteration begin at a place; the latest one moves the position no more."""
        self.epoch, self.start, self.position, self.iteration = epoch, position, position, None
        self._whole = 0

    def begin(self, iteration: object = None) -> object:
        """Begin an iteration at ``start``, which becomes ``position``; return what stands for it, if not given."""
        self.position, self.start, self._chosen = self.start, 0, False
        self.iteration = object() if iteration is None else iteration
        return self.iteration

    def move(self, iteration: object, position: int) -> bool:
        """Note how far an iteration is, if it is the latest one; return whether it is."""
        if latest := iteration is self.iteration:
            self.position = position
        return latest

    def finish(self, iteration: object, start: int, sampler: object) -> None:
        """Note that an iteration came to its end; warn where a `DataLoader` of torch got the epoch whole once more.

        Only for a sampler whose epochs differ. Loaders and trainers that choose epochs are never warned.
        """
        if iteration is self.iteration and start == 0 and (level := level_behind_loader(sampler)):
            self._whole += 1
            if self._whole == 2:
                name = type(sampler).__name__
                warnings.warn(
                    f"epoch {self.epoch} of the {name} came a second time, in the same order: call its "
                    "set_epoch(epoch) before each epoch. Where every epoch is to be the same, as in evaluation, give "
                    f"shuffle=False, if it has that argument, or call set_epoch({self.epoch}) each time",
                    UserWarning,
                    stacklevel=level,
                )

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "start": self.position, "iteration": None}


def level_behind_loader(sampler: object) -> int:
    """Return the stack level, for a warning of the caller's, of the loop whose `DataLoader` reads a sampler; 0 without.

    Batches by size may lie between, as they let the order of an inner sampler through.
    """
    level, frame = 2, cast("FrameType | None", sys._getframe(2))  # the sampler's
    while frame is not None and (frame.f_locals.get("self") is sampler or _module(frame).startswith(_THROUGH)):
        level, frame = level + 1, frame.f_back
    found = False
    while frame is not None and _module(frame).startswith("torch.utils.data."):
        found = found or _module(frame) == "torch.utils.data.dataloader"
        level, frame = level + 1, frame.f_back
    return level if found else 0


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
