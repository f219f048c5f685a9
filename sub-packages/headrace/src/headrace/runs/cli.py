"""``headrace-runs``: any step of a run from a checkpoint alone."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from headrace.runs import __version__
from headrace.runs.checkpoints import CheckpointError, chosen, read_checkpoint
from headrace.runs.data import check_data, export, open_data, parts_of, read_sizes, rows_of_step
from headrace.runs.rebuilt import Run, epoch_of

DAMAGE, INPUT, STOPPED = 1, 2, 130
_INPUT_ERRORS = (ImportError, OSError, TypeError, ValueError)
_CODES = (
    "exit codes: 0 success, 1 a checkpoint or a shard is damaged, or reading it would run code, 2 usage or input is "
    "wrong, 130 stopped by Ctrl-C"
)
_SHOW = (
    "Print the samples of any step of a run, past or future, rank by rank, from a checkpoint alone; without --step, a "
    "summary of the run. CHECKPOINT is a file of torch.save, also of Lightning, or a folder of "
    "accelerate or the Hugging Face Trainer. Steps are numbered over all epochs; a step "
    "is one batch on each rank. No code of the checkpoint is run."
)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        expanded = message.startswith("unrecognized arguments") and message.endswith(".tar")  # by the shell
        _say("error", message + " (quote a pattern of tars)" * expanded)
        self.exit(INPUT)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = _Parser(prog="headrace-runs", description="Look up the steps of a run in its checkpoint.", epilog=_CODES)
    made.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = made.add_subparsers(metavar="COMMAND", required=True)
    show = commands.add_parser("show", help="print the samples of any step", description=_SHOW, epilog=_CODES)
    show.set_defaults(run=_show)
    add = show.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="a file or a folder")
    add("--step", type=_number, metavar="N", help="number of the step (default: a summary of the run)")
    add("--rank", type=_number, metavar="N", help="rank to print (default: all)")
    add("--state", metavar="PATH", help="state to use if the checkpoint has several")
    add(
        "--data",
        action="append",
        metavar="[NAME=]FOLDER",
        help="indexed shards, for keys, shards and offsets: a folder, or a quoted pattern of tars. Several folders "
        "of one source: repeat --data FOLDER, in order. Several sources: give each a NAME",
    )
    add("--sizes", metavar="FILE|NAME", help="sizes of the samples: a file, or a column or member of the data")
    add("--column", metavar="NAME", help="column of sizes in Parquet files")
    add("--num-replicas", type=_number, metavar="N", help="number of ranks for a future step (default: unchanged)")
    add("--export", type=Path, metavar="FOLDER", help="write the samples' members there, one file each")
    add("--json", action="store_true", help="print one JSON document")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Words after the command's name; those of the process by default.

    Returns:
        0 for success, 1 where a checkpoint or a shard is damaged or unsafe, 2 where the input is wrong, 130 after
        Ctrl-C. Wrong usage ends with ``SystemExit`` of code 2. Errors are one line on stderr.
    """
    options = parser().parse_args(argv)
    try:
        sys.stdout.write("".join(f"{line}\n" for line in options.run(options)))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:  # nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter tries again at its end
        return 0
    except Exception as error:
        if not (damage := _is_damage(error)) and not isinstance(error, _INPUT_ERRORS):
            raise
        _say("error", _text(error))
        return DAMAGE if damage else INPUT
    return 0


def _show(options: argparse.Namespace) -> Iterable[str]:
    for name, needs in (("export", "data"), ("column", "sizes")):
        if getattr(options, name) is not None and getattr(options, needs) is None:
            raise ValueError(f"--{name} goes with --{needs}: give both")
    for name in ("rank", "sizes", "num_replicas", "export"):
        if options.step is None and getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} goes with --step: give both")
    checkpoint = read_checkpoint(options.checkpoint)
    for reason in checkpoint.passed_over:
        _say("warning", f"passed over: {reason}")
    run = Run(chosen(checkpoint, options.state, str(options.checkpoint)))
    head = {"checkpoint": str(options.checkpoint), "state": run.found.path}
    data = None if options.data is None else open_data(options.data)
    identified = data is not None and check_data(data, run.n_samples, run.found.loader)
    if data is not None and not identified:
        _say("warning", "the state of a sampler does not identify the data: only the number of samples was compared")
    if options.step is None:
        document = head | _summary(run)
        if data is not None:
            document["data"] = {"n": len(data), "identified": identified}
            document["exclude_keys"] = [data.key(index) for index in document["exclude"]]
        return [_json(document)] if options.json else _summary_lines(document)
    document = head | _step(run, options, data)
    return [_json(document)] if options.json else _step_lines(document, options.data is not None)


def _summary(run: Run) -> dict[str, Any]:
    state, settings = run.state, run.settings
    return {
        "batch_sampler": run.kind,
        "seed": state["seed"],
        "epoch": state["epoch"],
        "position": state["position"],
        "step": run.record.step,
        "world": run.world,
        "n": run.n_samples,
        "options": settings["options"],
        "exclude": sorted(settings["exclude"]),
        "starts": run.record.starts,
        "run": run.record.changes,
    }


def _summary_lines(document: Mapping[str, Any]) -> Iterator[str]:
    world, starts, excluded = document["world"], document["starts"], document["exclude"]
    yield f"{_escaped(document['checkpoint'])}, state {_escaped(document['state'])}: {document['batch_sampler']}"
    ranks = "no step yet" if world is None else _counted(world, "rank")
    yield f"{_counted(document['n'], 'sample')}, seed {document['seed']}, {ranks}"
    if "data" in document:
        rest = ", which begin with those of the run" if document["data"]["identified"] else ""
        yield f"data: {_counted(document['data']['n'], 'sample')}{rest}"
    yield f"epoch {document['epoch']}, position {document['position']:,} samples, next step {document['step']:,}"
    if starts:
        began = ", ".join(f"{epoch} at step {step:,}" for epoch, step in starts[-5:])
        yield f"epochs began: {'..., ' if len(starts) > 5 else ''}{began}"
    if excluded:
        rest = f" and {len(excluded) - 20} more (--json lists all)" if len(excluded) > 20 else ""
        keys = document.get("exclude_keys")
        named = [f"{index} ({_escaped(keys[place])})" if keys else str(index) for place, index in enumerate(excluded)]
        yield f"left out: {' '.join(named[:20])}{rest}"
    lines = list(_change_lines(document["run"]))
    # A run begins with its settings, which are no change.
    yield f"start: {lines[0]}" if lines else "start: not yet"
    yield "changes:" if lines[1:] else "changes: none"
    yield from (f"  {line}" for line in lines[1:])


def _change_lines(changes: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for change in changes:
        what = [f"{name}={value}" for name, value in change.get("options", {}).items()]
        what += [f"{name} {change[name]:,}" for name in ("n", "world", "skip") if name in change]
        if "mixture" in change:
            what.append(f"a mixture of {_counted(len(change['mixture'].get('ranges', ())), 'source')}")
        if "accumulate" in change:
            what.append(f"accumulate={change['accumulate']}")
        if change.get("exclude"):
            what.append(f"leaves out {_counted(len(change['exclude']), 'sample')}")
        what += [
            f"weights {_escaped(str(weights))} from draw {draw:,} on" for draw, weights in change.get("reweight", ())
        ]
        place = f"epoch {change['epoch']}, position {change['position']:,} samples"
        yield f"step {change['step']:,}, {place}: {', '.join(what)}"


def _step(run: Run, options: argparse.Namespace, data: Any) -> dict[str, Any]:
    step, past = options.step, options.step < run.record.step
    if not past and run.world is None and options.num_replicas is None:
        raise ValueError("the run had no step when the state was saved: give --num-replicas, the number of its ranks")
    sizes = None
    if run.needs_sizes and options.sizes is not None:
        parts = [] if data is None else parts_of(data, options.data)
        sizes = read_sizes(options.sizes, parts, options.column)
    try:
        sampler = run.sampler(sizes, options.num_replicas)
        ranks = sampler.step(step)
        epoch = epoch_of(sampler, run.record, step)
    except (ArithmeticError, AttributeError, KeyError, RuntimeError, StopIteration) as error:
        raise CheckpointError(f"the state {run.found.path} contradicts itself: it was changed ({error!r})") from error
    except IndexError:
        raise ValueError(f"--step must be one that the run has, got {step}: its record begins after it") from None
    if options.rank is not None and options.rank >= len(ranks):
        raise ValueError(f"--rank must be 0 to {len(ranks) - 1}, the ranks of step {step}, got {options.rank}")
    rows = rows_of_step(step, ranks, data, sizes)
    rows = [row for row in rows if options.rank in (None, row["rank"])]
    document = {
        "step": step,
        "epoch": epoch,
        "past": past,
        "world": len(ranks),
        "samples": rows,
    }
    if options.export is not None:
        document["exported"] = {"folder": str(options.export), "files": export(rows, data, options.export)}
    return document


def _step_lines(document: Mapping[str, Any], placed: bool) -> Iterator[str]:
    rows, when = document["samples"], "past" if document["past"] else "coming"
    ranks, samples = _counted(document["world"], "rank"), _counted(len(rows), "sample")
    yield f"step {document['step']}, {when}: epoch {document['epoch']}, {ranks}, {samples}"
    if placed or any("start" in row for row in rows):
        heads = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "step"]
        cells = [heads, *([_escaped(str(row.get(head, ""))) for head in heads] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            yield "  ".join(map(str.ljust, row, widths)).rstrip()
    else:
        for rank in dict.fromkeys(row["rank"] for row in rows):
            yield f"rank {rank}: {' '.join(str(row['index']) for row in rows if row['rank'] == rank)}"
    if "exported" in document:
        exported = document["exported"]
        yield f"wrote {_counted(exported['files'], 'file')} and samples.json into {_escaped(exported['folder'])}"


def _number(word: str) -> int:
    if not (word.isascii() and word.isdecimal()):
        raise argparse.ArgumentTypeError(f"got {word!r}, expected a whole number of 0 or more")
    return int(word)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, allow_nan=False)


def _is_damage(error: Exception) -> bool:
    """Whether a checkpoint or shards cannot be read as they are."""
    shards = sys.modules.get("headrace.webdatamodule.shards.errors")
    return isinstance(error, CheckpointError) or (shards is not None and isinstance(error, shards.ShardError))


def _say(kind: str, message: str) -> None:
    sys.stderr.write(f"headrace-runs: {kind}: {_escaped(' '.join(message.split()))}\n")


def _text(error: Exception) -> str:
    """The message of an error; the file comes first."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _escaped(text: str) -> str:
    """A text without what a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


if __name__ == "__main__":
    sys.exit(main())
