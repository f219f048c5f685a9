"""The place of an iterable in its epochs, and the one rule of ``set_epoch`` and ``load_state_dict``."""

import sys
from types import FrameType
from typing import Any

from .warnings import is_behind_loader, module_of, warn


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
        self._complete = 0  # times that a DataLoader got all of the epoch since it was chosen
        self.iteration: Any = None  # only this one moves the position
        self._left: tuple[object, int, str] | None = None  # an iteration, its epoch, and the call that left it behind
        self._continues = False  # whether the latest iteration began at a loaded position, in an epoch nobody chose

    def choose(self, epoch: int) -> bool:
        """Go to an epoch, as ``set_epoch`` does; return whether it is another one, which starts at its beginning.

        So does the same one where torchdata's ``SamplerWrapper`` begins anew: it has made an iterator before.
        """
        left = self.iteration, self.epoch, f"set_epoch({epoch})"
        changed = epoch != self.epoch or _begins_anew()
        if changed:
            self.go_to(epoch, 0)
            self._left = left
        self._chosen, self._complete = True, 0
        return changed

    def overrules(self, epoch: int) -> bool:
        """Return whether a state of that epoch is to be ignored."""
        return self._chosen and epoch < self.epoch

    def resume(self, epoch: int, position: int) -> bool:
        """Go to a place of a state, as ``load_state_dict`` does, unless a later epoch was chosen; return whether."""
        if self.overrules(epoch):
            return False
        left = self.iteration, self.epoch, "load_state_dict"
        self.go_to(epoch, position)
        self._chosen, self._left = False, left
        return True

    def go_to(self, epoch: int, position: int) -> None:
        """Let the next iteration begin at a place; the latest one moves the position no more."""
        self.epoch, self.start, self.position, self.iteration = epoch, position, position, None
        self._complete, self._left = 0, None

    def begin(self, iteration: object = None) -> object:
        """Begin an iteration at ``start``, which becomes ``position``; return what stands for it, if not given."""
        self._continues = self.start > 0 and not self._chosen
        self.position, self.start, self._chosen, self._left = self.start, 0, False, None
        self.iteration = object() if iteration is None else iteration
        return self.iteration

    def move(self, iteration: object, position: int, sampler: object = None) -> bool:
        """Note how far an iteration is, if it is the latest one; return whether it is.

        With the sampler, which is about to deliver: warn if it was sent to another place in the meantime.
        """
        if latest := iteration is self.iteration:
            self.position = position
        elif sampler is not None and self._left is not None and iteration is self._left[0]:
            self._warn_of_left(sampler, *self._left[1:])
        return latest

    def finish(
        self, iteration: object, start: int, sampler: object, *, differs: bool = True, nothing: bool = False
    ) -> None:
        """Note that an iteration came to its end; warn where it was not the one that was meant.

        Where a `DataLoader` got all of the epoch once more, if the epochs of the sampler differ; and where it got
        ``nothing``, as the loaded position was the end of its epoch. Loaders and trainers that choose epochs are never
        warned.
        """
        if iteration is not self.iteration or not is_behind_loader(sampler):
            return
        name = type(sampler).__name__
        if nothing and self._continues:
            warn(
                f"epoch {self.epoch} of the {name} was over where its state was saved, so this iteration is empty: "
                f"call its set_epoch({self.epoch + 1}) before the loader is iterated. {_IN_LIGHTNING}",
                sampler,
            )
        elif start == 0 and differs:
            self._complete += 1
            if self._complete == 2:
                warn(
                    f"epoch {self.epoch} of the {name} came a second time, in the same order: call its "
                    "set_epoch(epoch) before each epoch. Where every epoch is to be the same, as in evaluation, give "
                    f"shuffle=False, if it has that argument, or call set_epoch({self.epoch}) each time",
                    sampler,
                )

    def _warn_of_left(self, sampler: object, epoch: int, call: str) -> None:
        self._left = None  # one warning is enough
        warn(
            f"an iteration of epoch {epoch} of the {type(sampler).__name__} continues after {call}: its batches are "
            f"those of epoch {epoch}, and no state counts them. Call set_epoch and load_state_dict before the loader "
            f"is iterated. {_IN_LIGHTNING}",
            sampler,
        )

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "start": self.position, "iteration": None, "_left": None}


_IN_LIGHTNING = "Lightning iterates a DataLoader with workers first when it resumes: give it a data module of headrace"


def _begins_anew() -> bool:
    """Return whether torchdata's ``SamplerWrapper`` sets the epoch, and has made an iterator before."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and module_of(frame).startswith("headrace."):
        frame = frame.f_back
    if frame is None or module_of(frame) != "torchdata.nodes.adapters":
        return False
    return getattr(frame.f_locals.get("self"), "_it", None) is not None
