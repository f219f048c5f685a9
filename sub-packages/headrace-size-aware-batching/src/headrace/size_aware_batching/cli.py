"""``headrace-batches``: plans the batches of given sizes and reports on them."""

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from numpy.typing import NDArray

from headrace.size_aware_batching.distributed import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.plan import BatchPlan
from headrace.size_aware_batching.planning.costs import COSTS
from headrace.size_aware_batching.planning.options import OVERSIZE, STRATEGIES, Strategy
from headrace.size_aware_batching.report import PlanReport, table
from headrace.size_aware_batching.sizes.files import sizes_of_files

SIZES = ".npy (1-D or 2-D), .txt (one number per line), FASTA [.gz], or .parquet or a folder of them, with --column"
PASSED_ON = (
    "cost",
    "max_items",
    "max_length",
    "extra_per_sample",
    "batch_size_multiple",
    "length_multiple",
    "shapes",
    "balanced_ranks",
    "num_replicas",
    "oversize",
    "seed",
)
# Arguments of the sampler as its errors name them: long names anywhere, the others before "=" and " must".
ARGUMENT = re.compile(r"\b(\w+_\w+)\b|\b(strategy|cost|shapes|oversize|seed|epoch)(?=[=:]| must)")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Write the message and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {one_line(message)}\n")


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(
        prog="headrace-batches",
        description="Plan the batches of an epoch from the sizes of the samples and print figures about them.",
    )
    add = made.add_argument
    add("--version", action="version", version=f"%(prog)s {version('headrace-size-aware-batching')}")
    add("sizes", nargs="+", type=Path, metavar="SIZES", help=SIZES)
    add("--column", metavar="NAME", help="column of sizes in Parquet files")
    add("--budget", type=budgets, required=True, metavar="N", help="budget of a batch; N,N,.. for several columns")
    add("--strategy", nargs="+", choices=STRATEGIES, metavar="NAME", help=f"one or more of {', '.join(STRATEGIES)}")
    add(
        "--cost",
        choices=tuple(COSTS),
        help="cost of a batch: sum of sizes, or count x largest (default: padded for bucketed, else sum)",
    )
    add("--num-replicas", type=int, default=8, metavar="N", help="world size for steps and balance (default 8)")
    add("--max-items", type=int, metavar="N", help="maximum number of samples in a batch")
    add("--max-length", type=real, metavar="N", help="cap sizes at this (one column)")
    add(
        "--extra-per-sample",
        type=budgets,
        metavar="N",
        help="what samples have beside their sizes, such as 2 special tokens; N,N,.. for several columns",
    )
    add("--batch-size-multiple", type=int, default=1, metavar="N", help="batches hold a multiple of this many samples")
    add("--length-multiple", type=int, default=1, metavar="N", help="padded lengths are a multiple of this")
    add("--shapes", type=int, metavar="N", help="maximum number of (count, length) shapes of padded batches")
    add("--balanced-ranks", type=int, metavar="N", help="world size to balance steps for (default --num-replicas)")
    add(
        "--oversize",
        choices=OVERSIZE,
        default="raise",
        help="policy for samples that exceed the budget by themselves (default raise)",
    )
    add("--seed", type=int, default=0, metavar="N", help="key of the random order (default 0)")
    add("--epoch", type=int, default=0, metavar="N", help="epoch to plan (default 0)")
    add("--draw", type=Path, metavar="FILE", help="also draw the plans to a .png, .pdf or .svg file (needs matplotlib)")
    add("--json", action="store_true", help="print one JSON object")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Words after the command's name; those of the process by default.

    Returns:
        0. An error ends with ``SystemExit`` of code 2 and one line on stderr.
    """
    made = parser()
    options = made.parse_args(argv)
    try:
        sys.stdout.write(run(options) + "\n")
    except (ImportError, OSError, TypeError, ValueError) as error:
        made.error(str(error))
    return 0


def run(options: argparse.Namespace) -> str:
    """Plan, draw where that is asked for, and return what to print."""
    sizes = sizes_of_files(options.sizes, options.column)
    plans, reports = {}, {}
    for strategy in options.strategy or [None]:
        name, plan, report = planned(sizes, strategy, options)
        plans[name], reports[name] = plan, report
    if options.draw is not None:
        from headrace.size_aware_batching.plotting import draw  # needs matplotlib

        draw(plans, options.draw, options.num_replicas)
    if not options.json:
        return table(reports)
    asked = {name: getattr(options, name) for name in ("budget", "num_replicas", "seed", "epoch")}
    # JSON has no NaN: unknown figures are null.
    plain = {
        name: {key: None if value != value else value for key, value in asdict(report).items()}
        for name, report in reports.items()
    }
    return json.dumps({"samples": len(sizes), **asked, "plans": plain}, allow_nan=False)


def planned(
    sizes: NDArray[Any], strategy: Strategy | None, options: argparse.Namespace
) -> tuple[str, BatchPlan, PlanReport]:
    """Plan an epoch by one strategy, and return its name, too; errors name flags in place of arguments."""
    budget = options.budget if sizes.ndim == 2 or len(options.budget) > 1 else options.budget[0]
    passed_on = {name: getattr(options, name) for name in PASSED_ON}
    try:
        sampler = DistributedSizeAwareBatchSampler(sizes, budget, strategy=strategy, rank=0, **passed_on)
        return sampler.options.strategy, sampler.plan(options.epoch), sampler.report(options.epoch)
    except (TypeError, ValueError) as error:
        raise ValueError(ARGUMENT.sub(flag, str(error))) from error


def flag(name: re.Match[str]) -> str:
    """Return the flag for an argument of the sampler.

    >>> ARGUMENT.sub(flag, "max_total_size=5: choose oversize='skip' or 'own_batch'")
    "--budget=5: choose --oversize='skip' or 'own_batch'"
    """
    word = "budget" if name[0] == "max_total_size" else name[0]
    known = word in ("budget", "strategy", "epoch", *PASSED_ON)
    return f"--{word.replace('_', '-')}" if known else name[0]


def real(word: str) -> int | float:
    """Read a finite number, an integer where it is one."""
    try:
        value = float(word)
        if math.isfinite(value):
            return int(word) if word.isdecimal() else value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"got {word!r}, expected a number")


def budgets(words: str) -> tuple[int | float, ...]:
    """Read one budget, or several with commas between.

    >>> budgets("4096"), budgets("100,2.5")
    ((4096,), (100, 2.5))
    """
    return tuple(real(word.strip()) for word in words.split(","))


def one_line(message: str) -> str:
    """Join the lines of a message."""
    return " ".join(message.split())


if __name__ == "__main__":
    sys.exit(main())
