"""Several streams that a function of the user's makes into one."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import webdataset as wds

from headrace.webdatamodule.passes import CurrentPass, Pass

Mix = Callable[[dict[str, Any]], Iterable[Any]]
# A number for each pass over a source: epochs, the laps in them, and how often the source began again in those.
_EPOCH, _LAP = 2**32, 2**24


class SourcePass(CurrentPass):
    """The pass of one source of several, which may begin again while others go on.

    Args:
        current: The pass of the whole.
    """

    def __init__(self, current: CurrentPass) -> None:
        self.current = current
        self.number = 0

    def get(self) -> Pass:
        """The pass of the whole, with the source's own order."""
        return self.current.get()._replace(epoch=self.number // _EPOCH, lap=self.number % _EPOCH, items=0)


class SourceStream:
    """The samples of one source; each iteration is another pass over its shards, in another order.

    Args:
        dataset: The source's pipeline.
        own: The pass that the pipeline looks at.
    """

    def __init__(self, dataset: wds.DataPipeline, own: SourcePass) -> None:
        self.dataset = dataset
        self.own = own
        self.told = False

    def begin(self, number: int) -> None:
        """Say which pass is the first, before the streams are mixed."""
        self.own.number, self.told = number - 1, False

    def set_epoch(self, epoch: int) -> None:
        """Choose the pass, as mixtures do that count passes themselves.

        Args:
            epoch: Its number: that which the mixture was told, and one more for each time the source began again.
        """
        self.own.number, self.told = epoch, True

    def __iter__(self) -> Iterator[Any]:
        """One pass."""
        if not self.told:
            self.own.number += 1
        self.told = False
        return iter(self.dataset)


class Mixed:
    """First stage of a pipeline: what the user's function makes of the sources.

    Args:
        sources: The streams by name.
        mix: Gets them, in each worker and for each pass, and returns an iterable. One that has a `set_epoch`,
            such as a mixture by weight, is told a number that is different for each pass.
        current: The pass.
    """

    def __init__(self, sources: Mapping[str, SourceStream], mix: Mix, current: CurrentPass) -> None:
        self.sources = dict(sources)
        self.mix = mix
        self.current = current

    def __call__(self) -> Iterator[Any]:
        """The mixed samples.

        Raises:
            TypeError: The function did not return an iterable.
        """
        now = self.current.get()
        number = now.epoch * _EPOCH + now.lap * _LAP
        for source in self.sources.values():
            source.begin(number)
        mixed = self.mix(dict(self.sources))
        if not isinstance(mixed, Iterable):
            raise TypeError(f"mix must return an iterable of samples, got {mixed!r}")
        if hasattr(mixed, "set_epoch"):
            mixed.set_epoch(number)
        return iter(mixed)
