"""The packages that states and data are of; each may be installed alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

WEBDATAMODULE, SIZE_AWARE = "headrace-webdatamodule", "headrace-size-aware-batching"
WEIGHTED = "headrace-weighted-sampler"


@contextmanager
def needed(package: str, what: str) -> Iterator[None]:
    """Import modules of a package in its body; where the package is missing, the error says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package.replace("-", ".", 1).replace("-", "_"):
            raise
        raise ImportError(f"{what} needs {package}, which is not installed: pip install {package}") from error
