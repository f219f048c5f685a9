"""The events of Hugging Face's ``Trainer``, for callbacks that need no class of transformers."""

from collections.abc import Callable


class TrainerEvents:
    """Base class of callbacks that leave all other events of a ``Trainer`` alone."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(f"{type(self).__name__} has no {name}")
