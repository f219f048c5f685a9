"""The place of an iterable in its epochs, and the one rule of ``set_epoch`` and ``load_state_dict``.

The packages of headrace do not import one another, so each has this file; the copies are equal.
"""

from typing import Any


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
        self.iteration: Any = None  # only this one moves the position

    def choose(self, epoch: int) -> bool:
        """Go to an epoch, as ``set_epoch`` does; return whether it is another one, which starts at its beginning."""
        changed = epoch != self.epoch
        if changed:
            self.go_to(epoch, 0)
        self._chosen = True
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

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "start": self.position, "iteration": None}
