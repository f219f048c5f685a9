"""The commands of ``headrace-shards``, one a module: `HELP`, `DESCRIPTION`, `add_arguments` and `run`."""
