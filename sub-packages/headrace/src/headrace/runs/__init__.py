"""Any step of a run, past or coming, from a checkpoint alone: the command ``headrace-runs``."""

from importlib.metadata import version

__version__: str  # of the distribution; the sources also run from a folder on the path


def __getattr__(name: str) -> str:
    if name == "__version__":
        return version("headrace")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
