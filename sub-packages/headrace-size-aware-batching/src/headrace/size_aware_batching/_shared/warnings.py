"""Warnings that point at the line of a user's code, past the libraries between."""

import sys
import warnings
from types import FrameType

_LIBRARIES = ("headrace.", "torch.utils.data.", "torchdata.", "accelerate.", "transformers.", "lightning.")
_LOADERS = ("torch.utils.data.", "torchdata.stateful_dataloader.")
_SHARED = ("headrace.webdatamodule._shared.", "headrace.weighted_sampler._shared.")
_BETWEEN = ("headrace.size_aware_batching.", *_SHARED)  # a sampler and its loader


def warn(message: str, sampler: object = None) -> None:
    """Issue a ``UserWarning`` at the line that uses a library, or a method of ``sampler``, which may be a subclass."""
    level, frame = 1, sys._getframe()  # its own frame is level 1; generators make the distance vary
    while frame.f_back is not None and (
        module_of(frame).startswith(_LIBRARIES) or (sampler is not None and frame.f_locals.get("self") is sampler)
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def is_behind_loader(sampler: object) -> bool:
    """Return whether a `DataLoader` reads a sampler, which calls this.

    Batches by size may lie between, as they let the order of an inner sampler through.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (module_of(frame).startswith(_BETWEEN) or frame.f_locals.get("self") is sampler):
        frame = frame.f_back
    while frame is not None and module_of(frame).startswith(_LOADERS):
        if module_of(frame).endswith("dataloader"):
            return True
        frame = frame.f_back
    return False


def module_of(frame: FrameType) -> str:
    """Return the name of a frame's module."""
    return str(frame.f_globals.get("__name__"))
