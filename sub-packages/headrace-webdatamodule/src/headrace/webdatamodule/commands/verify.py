"""``headrace-shards verify``: read everything again, and print each damage."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from headrace.webdatamodule.commands.opening import a_path
from headrace.webdatamodule.commands.output import DAMAGE, emit_json, emit_lines
from headrace.webdatamodule.commands.wording import worded
from headrace.webdatamodule.commands.working import add_workers, pool
from headrace.webdatamodule.shards.index.verify import verify_shards

HELP = "read everything again and name each damage"
DESCRIPTION = (
    "Read all bytes of shards, indexes, columns and manifest, and print each fault. Exits with 1 if there is one."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.add_argument("directory", type=a_path, metavar="DIR", help="where the shards lie")
    add_workers(parser)


def run(options: argparse.Namespace) -> int:
    """Verify, and print the faults."""
    with pool(options.workers) as executor:
        faults = verify_shards(options.directory, executor=executor)
    if options.json:
        emit_json({"directory": str(options.directory), "faults": [asdict(fault) for fault in faults]})
    else:
        emit_lines(
            [*(worded(str(fault)) for fault in faults), f"{len(faults):,} faults" if len(faults) != 1 else "1 fault"]
        )
    return DAMAGE if faults else 0
