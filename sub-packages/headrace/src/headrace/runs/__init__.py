"""Any step of a run, past or coming, from a checkpoint alone: the command ``headrace-runs``."""
