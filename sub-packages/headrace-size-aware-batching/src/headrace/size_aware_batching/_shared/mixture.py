"""A user's sampler as a mixture of sources whose weights a run may change, if it is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mixed:
    """Settings of a mixture: as it records itself, None of other samplers; and changes of its weights."""

    mixture: Any = None
    reweights: tuple[Any, ...] = ()


NOT_MIXED = Mixed()


class PossibleMixture:
    """The settings of the mixture that a user's ``sampler`` is; any other sampler has none and refuses them."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    @property
    def is_mixture(self) -> bool:
        """Whether the sampler has weights that a run may change."""
        own = self.sampler
        reads = hasattr(own, "take") and callable(getattr(own, "set_epoch", None))
        return reads and hasattr(own, "reweights") and callable(getattr(own, "reweighted", None))

    @property
    def mixed(self) -> Mixed:
        """Settings of the mixture, as it has them."""
        if not self.is_mixture:
            return NOT_MIXED
        return Mixed(getattr(self.sampler, "mixture", None), tuple(self.sampler.reweights))

    def asked_shares(self) -> Any:
        """Return what a mixture's shares refer to, and the requested share of each source; None without one."""
        asked = getattr(self.sampler, "asked_shares", None)
        return asked() if callable(asked) else None

    def require_mixture(self) -> None:
        """Refuse a sampler without weights that a run may change."""
        if not self.is_mixture:
            raise TypeError(
                f"sampler must mix sources by weight for that, got {type(self.sampler).__name__}: give a "
                "WeightedDistributedSampler"
            )

    def reweighted(self, weights: Any, draw: int) -> list[Any]:
        """Return the changes of the mixture's weights, with another one from a draw on."""
        self.require_mixture()
        return list(self.sampler.reweighted(weights, draw))

    def has_other_sources(self, recorded: Mapping[str, Any]) -> bool:
        """Whether recorded settings are of a mixture of other sources."""
        before, mixture = recorded.get("mixture"), self.mixed.mixture
        return mixture is not None and before is not None and self.sampler.continuing(before) is None

    def continuing(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of the mixture as it continues one of recorded settings."""
        before, mixture = recorded.get("mixture"), self.mixed.mixture
        if mixture is None or before is None:
            return {"mixture": mixture, "reweight": recorded["reweight"]}
        if (continued := self.sampler.continuing(before)) is None:  # of other sources
            return {"mixture": mixture, "reweight": []}
        return {"mixture": continued, "reweight": recorded["reweight"]}

    def grown(self, recorded: Mapping[str, Any], epoch: int) -> dict[str, Any]:
        """Return the settings of the mixture as it continues one whose data have grown at the beginning of an epoch."""
        if self.mixed.mixture is None:
            return {"reweight": []}
        return {"mixture": self.sampler.grown(recorded["mixture"], epoch, recorded["reweight"]), "reweight": []}

    def set_mixture(self, settings: Mapping[str, Any]) -> None:
        """Let the mixture be as settings have it: from where its data grew, and with these changes of its weights."""
        changes, mixture = list(settings.get("reweight", ())), settings.get("mixture")
        if mixture is not None and mixture != self.mixed.mixture:
            self.sampler.mixture = mixture
        if changes == list(self.mixed.reweights):
            return
        if not self.is_mixture:
            raise ValueError(
                f"state is of a run whose mixture got other weights, and sampler is a {type(self.sampler).__name__}: "
                "give the WeightedDistributedSampler of that run"
            )
        self.sampler.reweights = changes
