"""``headrace-shards``: pack, index, verify and look into shards on the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from typing import NoReturn

from headrace.webdatamodule.commands import cat, export_dali, index, info, ls, pack, sizes, verify
from headrace.webdatamodule.commands.output import DAMAGE, INPUT, STOPPED, drop, open_stderr, say
from headrace.webdatamodule.commands.wording import wording
from headrace.webdatamodule.shards.errors import (
    DamagedIndexError,
    DamagedShardError,
    DecodeError,
    GroupingError,
    ManifestError,
    RefusedMemberError,
    ShardError,
    StaleIndexError,
)

COMMANDS = (pack, index, verify, ls, cat, info, sizes, export_dali)
_DAMAGES = (DamagedIndexError, DamagedShardError, DecodeError, GroupingError, RefusedMemberError, StaleIndexError)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line that names the command only."""

    def error(self, message: str) -> NoReturn:
        """Write the message and exit with status 2."""
        say("error", message)
        self.exit(INPUT)


def parser() -> Parser:
    """Return the parser of the command line."""
    codes = "exit codes: 0 all is well, 1 faults or damage were found, 2 usage or input is wrong, 130 stopped by Ctrl-C"
    made = Parser(prog="headrace-shards", description="Tar shards of samples: pack, index, verify, read.", epilog=codes)
    commands = made.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        name = command.__name__.rpartition(".")[2].replace("_", "-")
        one = commands.add_parser(name, help=command.HELP, description=command.DESCRIPTION, epilog=codes)
        command.add_arguments(one)
        one.add_argument("--json", action="store_true", help="print one JSON document")
        one.set_defaults(run=command.run)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Words after the command's name; those of the process by default.

    Returns:
        0 when all is well, 1 when faults or damage were found, 2 when the input is wrong, 130 after Ctrl-C. Wrong
        usage ends with `SystemExit` of code 2. Errors are one line on stderr.
    """
    open_stderr()
    if sys.stdout is not None:
        # A terminal that cannot show a letter gets its escape sequence, not a traceback.
        getattr(sys.stdout, "reconfigure", lambda **_: None)(errors="backslashreplace")
    try:
        options = parser().parse_args(argv)
        code: int = options.run(options)
    except KeyboardInterrupt:
        drop(sys.stdout)
        return STOPPED
    except (BrokenExecutor, ImportError, OSError, ShardError, TypeError, ValueError) as error:
        say("error", wording(error))
        return exit_code(error)
    return code


def exit_code(error: Exception) -> int:
    """Tell damage from wrong input.

    Args:
        error: What was raised.

    Returns:
        1 for damaged shards, indexes and manifests, 2 for all else.

    >>> exit_code(DamagedShardError("cut")), exit_code(FileNotFoundError("a.tar"))
    (1, 2)
    """
    missing = isinstance(error.__cause__, FileNotFoundError)
    damaged = isinstance(error, _DAMAGES) or (isinstance(error, ManifestError) and not missing)
    return DAMAGE if damaged else INPUT


if __name__ == "__main__":
    sys.exit(main())
