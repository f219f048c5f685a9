"""An epoch cursor in shared memory, so that workers that live for several epochs learn of a new one."""

from typing import Any

import torch
from torch.utils.data import get_worker_info

from headrace.weighted_sampler._shared.cursor import EpochCursor

_EPOCH, _CALLS, _SPENT, _LOADER = range(4)


class SharedEpochCursor(EpochCursor):
    """An ``EpochCursor`` whose epoch, and whether ``set_epoch`` chose it, all processes share.

    The rule is the cursor's. Two things differ in loader workers. The workers of one loader begin one after the other:
    for each of them a chosen epoch is still to come, whatever the others have begun. And a worker's own ``set_epoch``,
    for a dataset that is a source of another one, stays in that worker until the main process chooses again.
    """

    def __init__(self) -> None:
        # Epoch; calls of set_epoch; calls that an iteration or a state has spent; the loader whose workers began.
        self._shared: torch.Tensor = torch.zeros(4, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._own: tuple[int, torch.Tensor] | None = None  # of a worker: calls of the main process, its own values
        self._begun = 0  # calls that this process has spent
        super().__init__()

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration, or of the next one."""
        return int(self._values[_EPOCH])

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._values[_EPOCH] = epoch

    @property
    def _chosen(self) -> bool:
        _, calls, spent, loader = self._values.tolist()
        waits = self._values is self._shared and calls > self._begun  # whatever other workers have begun
        return bool(calls > spent or (waits and loader and loader == _loader()))

    @_chosen.setter
    def _chosen(self, chosen: bool) -> None:
        values = self._values
        if chosen:
            values[_CALLS] += 1
        else:
            values[_SPENT] = values[_CALLS]
            if values is self._shared:
                self._begun = int(values[_CALLS])

    @property
    def _values(self) -> torch.Tensor:
        if self._own is not None and self._own[0] == int(self._shared[_CALLS]):
            return self._own[1]
        return self._shared

    def choose(self, epoch: int) -> bool:
        """Go to an epoch; a worker does so alone."""
        if get_worker_info() is not None and self._values is self._shared:
            self._own = int(self._shared[_CALLS]), self._shared.clone()
        return super().choose(epoch)

    def resume(self, epoch: int, position: int) -> bool:
        """Go to a place of a state, unless a later epoch was chosen; return whether."""
        if resumed := super().resume(epoch, position):
            self._values[_LOADER] = 0
        return resumed

    def begin(self, iteration: object = None) -> object:
        """Begin an iteration; for the other workers of this loader a chosen epoch is still to come."""
        self._values[_LOADER] = _loader()  # first, so that there is no moment in which it seems spent for them
        return super().begin(iteration)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]  # copies of a tensor are not


def _loader() -> int:
    """A number that the workers of one loader's iteration have in common; 0 in the main process."""
    worker = get_worker_info()
    return 0 if worker is None else worker.seed - worker.id
