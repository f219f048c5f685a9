"""Where samples of a stream enter: sizes are read, and those too large dealt with."""

from collections.abc import Callable
from typing import Any

from headrace.size_aware_batching._options import Oversize
from headrace.size_aware_batching.messages import Logger, shortlist
from headrace.size_aware_batching.sampler import Tally
from headrace.size_aware_batching.sizes import checked_size
from headrace.size_aware_batching.streaming.budget import StreamBudget
from headrace.size_aware_batching.vectors import Number

_NAMED = 100  # oversize samples that get a warning each; more of them would bury everything else


class Gate:
    """Reads sizes, deals with samples that exceed the budget by themselves, and reports.

    Args:
        budget: What a batch may hold.
        size: Gives the size of a sample.
        oversize: What to do with a sample that is too large.
        largest: Sizes from this on are refused where the budget would allow them.
        info: Gets the summary.
        warn: Gets what is skipped.
    """

    def __init__(
        self,
        budget: StreamBudget,
        size: Callable[[Any], Any],
        oversize: Oversize,
        largest: int,
        info: Logger,
        warn: Logger,
    ) -> None:
        self.tally = Tally(budget.limit, "positions")
        self._budget = budget
        self._size = size
        self._oversize = oversize
        self._largest = largest
        self._info = info
        self._warn = warn
        self._alone: list[int] = []  # the first that went into batches of their own
        self._n_alone = 0

    def size_of(self, position: int, sample: Any) -> Number:
        """Return the size of a sample, checked."""
        size = checked_size(self._size(sample), "the sample at position", position)
        if size >= self._largest and not self._budget.exceeded_by(size):
            raise ValueError(
                f"sizeof: the sample at position {position} has size {size}, with which the sum over buffer_size "
                f"samples may pass 2**62; allowed are sizes below {self._largest}: use a larger unit"
            )
        return size

    def lets_pass(self, position: int, size: Number) -> bool:
        """Return whether a sample that is too large goes into its own batch; raise or warn if not."""
        what = f"the sample at position {position} has size {size}, which exceeds max_total_size={self.tally.budget}"
        if self._oversize == "raise":
            raise ValueError(
                f"{what} by itself: raise the budget, cut the sample, or choose oversize='skip' or 'own_batch'"
            )
        if self._oversize == "own_batch":
            self._n_alone += 1
            if len(self._alone) < _NAMED:
                self._alone.append(position)
            return True
        self.tally.skip(position)
        if self.tally.skipped <= _NAMED:
            self._warn(f"{what}: it is skipped")
        elif str(self.tally.skipped).strip("0") == "1":  # 1,000, 10,000 ...: a stream may have no end
            self._warn(f"{self.tally.skipped} are skipped so far as larger than max_total_size={self.tally.budget}")
        return False

    def close(self) -> None:
        """Say what there was."""
        summary = self.tally.summary()
        if self.tally.skipped > _NAMED:
            self._warn(summary)
        if self._n_alone:
            summary += f"; {self._n_alone} over it in batches of their own: {shortlist(self._alone, self._n_alone)}"
        self._info(summary)
