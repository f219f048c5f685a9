"""What one split's pipeline is made of."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.webdatamodule.shards.decoding.allowed import AllowedClass
from headrace.webdatamodule.streaming.mixing import Mix


@dataclass(frozen=True)
class Recipe:
    """All that one split's pipeline is made of, checked.

    Attributes:
        name: Name of the split, for messages.
        place: Directory of the shards, or a `pipe:` URL; or several by name, which `mix` mixes.
        prefix: Begin of the shards' names.
        keys: Member keys to extract.
        n_samples: Samples an epoch over all ranks.
        global_batch_size: Samples a batch over all ranks.
        begin_again: Whether to begin the shards again when they run dry before the epoch's end.
        stages_wds: Composables on the samples, in the workers.
        stages_wld: Composables on the samples as they leave the workers.
        kwargs_wds: For WebDataset.
        kwargs_wld: For WebLoader.
        invoke_wds: Method calls on the WebDataset, last.
        invoke_wld: Method calls on the WebLoader, last.
        allowed_classes: What pickles may use beyond the default.
        mix: Makes one stream of several.
        exact: Whether ranks get equal shares of samples, for which the shards need indexes; None: if they have.
    """

    name: str
    place: str | Mapping[str, str]
    prefix: str
    keys: tuple[str, ...]
    n_samples: int
    global_batch_size: int
    begin_again: bool
    stages_wds: Sequence[Any] = ()
    stages_wld: Sequence[Any] = ()
    kwargs_wds: Mapping[str, Any] = field(default_factory=dict)
    kwargs_wld: Mapping[str, Any] = field(default_factory=dict)
    invoke_wds: Sequence[tuple[str, Mapping[str, Any]]] = ()
    invoke_wld: Sequence[tuple[str, Mapping[str, Any]]] = ()
    allowed_classes: Collection[AllowedClass] = ()
    mix: Mix | None = None
    exact: bool | None = None

    @property
    def places(self) -> dict[str, str]:
        """The places by name; a single one has an empty name."""
        return {"": self.place} if isinstance(self.place, str) else dict(self.place)

    @property
    def seed(self) -> Any:
        """Of the shards' order, and of stages that shuffle without one."""
        seed = self.kwargs_wds.get("seed")
        return 0 if seed is None else seed

    @property
    def workers(self) -> int:
        """Readers of a rank."""
        return max(1, int(self.kwargs_wld.get("num_workers", 0)))

    @property
    def n_batches(self) -> int:
        """Batches an epoch on each rank: n_samples / global_batch_size, rounded up."""
        return -(-self.n_samples // self.global_batch_size)
