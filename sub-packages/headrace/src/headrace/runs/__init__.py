"""Any step of a run, past or coming, from a checkpoint alone: the command ``headrace-runs``."""

from importlib.metadata import version

__version__ = version("headrace")
