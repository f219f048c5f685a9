"""Checks of single arguments. Importing this loads nothing heavy: shards and loaders use it."""

from typing import SupportsFloat


def check_seconds(name: str, value: object, *, above: bool = False) -> None:
    """Refuse what is no number of seconds, 0 or more, or `above` 0."""
    seconds = float(value) if isinstance(value, SupportsFloat) else -1.0
    if not (seconds > 0 if above else seconds >= 0):
        raise ValueError(f"{name} must be seconds {'>' if above else '>='} 0, got {value!r}")
