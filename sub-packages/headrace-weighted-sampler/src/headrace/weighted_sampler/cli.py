"""``headrace-mixtures``: before a run, what it will see of each source."""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from headrace.weighted_sampler._arguments import as_choice, listed, shown
from headrace.weighted_sampler._permutation import Indices
from headrace.weighted_sampler._shared.checks import checked_int
from headrace.weighted_sampler._shared.display import counted
from headrace.weighted_sampler._token_mixture import MAX_SIZE
from headrace.weighted_sampler._weight_semantics import PER, SEMANTICS
from headrace.weighted_sampler.plotting import plot_run
from headrace.weighted_sampler.report import RunCounts, SourceRun, run_report
from headrace.weighted_sampler.sampler import WeightedDistributedSampler
from headrace.weighted_sampler.weights import NamedConcatDataset

INPUT, STOPPED = 2, 130
MAX_RUN = 2**60  # samples or tokens
MAX_CONFIG = 2**24  # bytes
STOPPING = ("endless", "drop_exhausted")
LENGTHS = ("tokens", "samples", "epochs")  # of a run
BATCHES = ("batch_tokens", "batch_size")
BY_NAME = ("sources", "weights", "max_passes")
PASSED_ON = ("weights", "semantics", "temperature", "epoch_length", "schedule", "stopping", "max_passes", "seed")
REPORT = "report"  # what --json adds to the fields of a config
FIELDS = ("sources", *PASSED_ON, "per", *LENGTHS, *BATCHES, "num_replicas")
_DESCRIPTION = (
    "Report each source of a mixture before a run: its share of the samples and tokens, the passes over it, "
    "repeated samples, and when a capped source leaves. No sample is drawn: the counts are those of "
    "WeightedDistributedSampler with the same options."
)
_CONFIG = (
    "A config is a mapping with the long names of the options, `_` in place of `-`: sources {name: file or count}, "
    "weights {name: weight, or [weight, {name: weight}] for a group}, max_passes {name: passes}, schedule [[position, "
    "weights], ...] and the others. Files are relative to the current folder. --json prints these fields too, so its "
    "output can be a config. Exit codes: 0 success, 2 wrong usage or input, 130 stopped by Ctrl-C."
)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        _say(message)
        self.exit(INPUT)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = _Parser(prog="headrace-mixtures", description=_DESCRIPTION, epilog=_CONFIG)
    add = made.add_argument
    add("--version", action="version", version=f"%(prog)s {version('headrace-weighted-sampler')}")
    add("sources", nargs="*", metavar="NAME=SIZES", help="sizes in .npy or .txt (one number per line), or a count")
    add("--config", type=Path, metavar="FILE", help="options as .json, or .yaml with PyYAML; flags override it")
    add("--weights", nargs="+", metavar="NAME=WEIGHT", help="weights, interpreted by --semantics")
    length = made.add_mutually_exclusive_group()
    length.add_argument("--tokens", type=_whole_word, metavar="N", help="length of the run in tokens")
    length.add_argument("--samples", type=_whole_word, metavar="N", help="length of the run in samples of all ranks")
    length.add_argument("--epochs", type=_whole_word, metavar="N", help="length of the run in epochs")
    add("--per", choices=PER, help="unit of the shares (default: token if sizes are given, but sample for ratios)")
    add("--semantics", choices=SEMANTICS, help="meaning of a weight (default proportion)")
    add("--temperature", type=_number, metavar="T", help="temperature for --semantics temperature")
    add("--max-passes", nargs="+", metavar="NAME=N", help="number of passes after which a source leaves")
    add("--stopping", choices=STOPPING, help="what happens after a pass over a source (default endless)")
    add("--epoch-length", type=_whole_word, metavar="N", help="samples of an epoch (default: as in the sampler)")
    add("--seed", type=_whole_word, metavar="N", help="seed of the sampler (default 0)")
    batch = made.add_mutually_exclusive_group()
    batch.add_argument("--batch-tokens", type=_whole_word, metavar="N", help="tokens of a rank's batch, for steps")
    batch.add_argument("--batch-size", type=_whole_word, metavar="N", help="samples of a rank's batch, for steps")
    add("--num-replicas", type=_whole_word, metavar="N", help="data-parallel ranks, for steps (default 1)")
    add("--plot", type=Path, metavar="FILE", help="also draw the shares over the run (.png, .pdf, .svg; `plot` extra)")
    add("--json", action="store_true", help="print one JSON object")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Words after the command's name; those of the process by default.

    Returns:
        0 for success, 2 where the input is wrong, 130 after Ctrl-C. Wrong usage ends with ``SystemExit`` of code 2.
        Errors are one line on stderr.
    """
    options = parser().parse_args(argv)
    try:
        sys.stdout.write("".join(f"{line}\n" for line in _run(options)))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:  # nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter tries again at its end
        return 0
    except (ImportError, OSError, OverflowError, TypeError, ValueError) as error:
        _say(_text(error))
        return INPUT
    return 0


def _run(options: argparse.Namespace) -> list[str]:
    config = _checked(_joined(options))
    run = Run(config)
    if options.plot is not None:
        plot_run(run.counts.spec, None, run.samples).savefig(options.plot)
    if options.json:
        return [json.dumps(config | {REPORT: run.report()}, allow_nan=False)]
    return [*run.lines()]


# -- The config ----------------------------------------------------------------------------------------------------


def _joined(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of the config file, and in their place those of the command line."""
    config = {} if options.config is None else read_config(options.config)
    given = {name: value for name in FIELDS if (value := getattr(options, name, None)) not in (None, [])}
    for name in BY_NAME:
        if name in given:
            pairs = _pairs(name, given[name])
            old = config.get(name) or {}
            given[name] = {**(old if isinstance(old, Mapping) else {}), **pairs}
    for group in (LENGTHS, BATCHES):
        if any(name in given for name in group):
            config = {name: value for name, value in config.items() if name not in group}
    return config | given


def read_config(path: Path) -> dict[str, Any]:
    """Read the fields of a mixture from a .json or .yaml file; a report that is in it is left out."""
    kind = path.suffix.lower()
    if kind not in (".json", ".yaml", ".yml"):
        raise ValueError(f"{path}: --config must be a .json or .yaml file")
    if path.stat().st_size > MAX_CONFIG:
        raise ValueError(f"{path}: it has more than {MAX_CONFIG:,} bytes, so it is no config")
    text = path.read_text(encoding="utf-8")
    if kind == ".json":
        try:
            found = json.loads(text)
        except (RecursionError, ValueError) as error:
            raise ValueError(f"{path}: it is not JSON: {error}") from error
    else:
        try:
            yaml = importlib.import_module("yaml")
        except ImportError as error:
            raise ImportError(
                f"{path}: YAML needs PyYAML, which is not installed: pip install pyyaml, or write the config as .json"
            ) from error
        try:
            found = yaml.safe_load(text)
        except (RecursionError, yaml.YAMLError) as error:
            raise ValueError(f"{path}: it is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: a config must be a mapping of fields, got {shown(found)}")
    if unknown := [name for name in found if name not in (*FIELDS, REPORT)]:
        raise ValueError(f"{path}: a config has no {listed(unknown)}; its fields are {', '.join(FIELDS)}")
    return {name: value for name, value in found.items() if name != REPORT and value is not None}


def _checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with whole numbers as such, and the defaults that are of the command."""
    checked = dict(config)
    sources = checked.get("sources")
    if not isinstance(sources, Mapping) or not sources or not all(isinstance(name, str) for name in sources):
        raise ValueError(f"sources must be NAME=SIZES or NAME=COUNT, one or more, got {shown(sources)}")
    for group in (LENGTHS, BATCHES):
        if len(given := [name for name in group if name in checked]) > 1:
            raise ValueError(f"{' and '.join(given)} were both given: give one of them")
    if not any(name in checked for name in LENGTHS):
        raise ValueError("the length of the run must be given: --tokens, --samples or --epochs")
    for name in (*LENGTHS, *BATCHES, "num_replicas"):
        if name in checked:
            checked[name] = checked_int(name, _whole(checked[name]), 1, MAX_RUN)
    for name in ("epoch_length", "seed"):
        if name in checked:
            checked[name] = _whole(checked[name])
    if not isinstance(checked.get("max_passes", {}), Mapping):
        raise TypeError(f"max_passes must be a mapping {{name: passes}}, got {shown(checked['max_passes'])}")
    if isinstance(schedule := checked.get("schedule", ()), str) or not isinstance(schedule, Sequence):
        raise TypeError(f"schedule must be a list of pairs [position, weights], got {shown(schedule)}")
    if schedule:
        checked["schedule"] = [
            [_whole(stage[0]), *stage[1:]] if isinstance(stage, list) and stage else stage for stage in schedule
        ]
    checked["sources"] = {name: _source(name, value) for name, value in sources.items()}
    by_sizes = all(isinstance(source, str) for source in checked["sources"].values())
    checked.setdefault("per", "token" if by_sizes and checked.get("semantics") != "ratio" else "sample")
    as_choice("per", checked["per"], PER)
    if not by_sizes:
        counted = [name for name, source in checked["sources"].items() if not isinstance(source, str)]
        for name in ("tokens", "batch_tokens", "per"):
            if checked.get(name) not in (None, "sample"):
                wanted = "--per token" if name == "per" else f"--{name.replace('_', '-')}"
                raise ValueError(f"{wanted} needs sizes of all sources, and of {listed(counted)} there is only a count")
    return {"seed": 0, "stopping": "endless", "num_replicas": 1, **checked}


def _source(name: str, value: object) -> str | int:
    if isinstance(value, str) and value and _as_whole(value) is None:
        return value
    return checked_int(f"sources[{name!r}]", _whole(value), 0, MAX_RUN)


def read_sizes(path: Path) -> Indices:
    """Read the tokens of each sample from a .npy or .txt file, shape ``[n]``, int64."""
    kind = path.suffix.lower()
    if path.is_dir():
        shards = f"of shards, `headrace-shards sizes {path} MEMBER > {path.name or 'sizes'}.txt` writes one"
        raise ValueError(f"{path}: sizes must be in a .npy or .txt file, got a directory: {shards}")
    if kind not in (".npy", ".txt"):
        raise ValueError(f"{path}: sizes must be in a .npy or .txt file; a number in place of it is a count")
    try:
        given = _from_npy(path) if kind == ".npy" else _from_text(path)
    except (EOFError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if given.ndim != 1 or given.dtype.kind not in "iuf" or not len(given):
        raise ValueError(
            f"{path}: sizes must be numbers in one dimension, one a sample, got {given.dtype} of shape {given.shape}"
        )
    wrong = ~((given >= 0) & (given <= MAX_SIZE))
    if given.dtype.kind == "f":
        wrong |= given != np.rint(given)
    if wrong.any():
        place = int(np.flatnonzero(wrong)[0])
        raise ValueError(f"{path}: sizes must be whole numbers from 0 to 2**32, got {given[place]} for sample {place}")
    return given.astype(np.int64)


def _from_npy(path: Path) -> NDArray[Any]:
    with path.open("rb") as file:
        if file.read(6) != b"\x93NUMPY":
            raise ValueError("it does not begin as a .npy file does; write it with numpy.save")
        file.seek(0)
        array: NDArray[Any] = np.load(file, allow_pickle=False)  # a pickle could run code
    return array


def _from_text(path: Path) -> NDArray[Any]:
    try:
        lines = path.read_text(encoding="utf-8").rstrip().split("\n")
    except UnicodeDecodeError:
        raise ValueError("it is not text in UTF-8") from None
    numbers = []
    for place, line in enumerate(lines if lines != [""] else [], 1):
        try:
            numbers.append(int(line))
        except ValueError:
            raise ValueError(f"line {place}: expected one whole number, got {line.strip()[:40]!r}") from None
        if not 0 <= numbers[-1] <= MAX_SIZE:
            raise ValueError(f"line {place}: sizes must be whole numbers from 0 to 2**32, got {line.strip()[:40]}")
    return np.array(numbers, np.int64)


# -- The run -------------------------------------------------------------------------------------------------------


class Run:
    """What a run of a checked config will see."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        sources = config["sources"]
        arrays = {name: read_sizes(Path(source)) for name, source in sources.items() if isinstance(source, str)}
        self.lengths = {name: len(arrays[name]) if name in arrays else source for name, source in sources.items()}
        sizes = np.concatenate([*arrays.values()]) if len(arrays) == len(sources) else None
        options = {name: config[name] for name in PASSED_ON if name in config}
        sampler = WeightedDistributedSampler(
            NamedConcatDataset({name: range(length) for name, length in self.lengths.items()}),
            num_replicas=1,
            rank=0,
            per=config["per"],
            sizes=sizes if config["per"] == "token" else None,
            **options,
        )
        self.epoch_length = sampler.epoch_length
        self.counts = RunCounts(sampler._spec, sampler._order, sizes)
        if "tokens" in config:
            self.samples = self.counts.position_of(config["tokens"])
        else:
            samples = config.get("samples") or config["epochs"] * self.epoch_length
            self.samples = checked_int("the run", samples, 1, MAX_RUN)
        self.sources = run_report(self.counts, self.samples)
        self.tokens = None if sizes is None else sum(line.drawn_tokens or 0 for line in self.sources)

    @property
    def steps(self) -> int | None:
        """Steps of the run; None without the size of a batch."""
        if (tokens := self.config.get("batch_tokens")) is not None and self.tokens is not None:
            return -(-self.tokens // int(tokens * self._ranks))
        if "batch_size" not in self.config:
            return None
        epochs, rest = divmod(self.samples, self.epoch_length)
        return epochs * self._steps_of(self.epoch_length) + self._steps_of(rest)

    def step_at(self, position: int) -> int | None:
        """The step, counted from 0, in which a position lies; None without the size of a batch."""
        if (tokens := self.config.get("batch_tokens")) is not None:
            return self.counts.tokens_before(position) // int(tokens * self._ranks)
        if "batch_size" not in self.config:
            return None
        epochs, rest = divmod(position, self.epoch_length)
        return epochs * self._steps_of(self.epoch_length) + int(rest // (self.config["batch_size"] * self._ranks))

    def report(self) -> dict[str, Any]:
        """The figures of the run as plain values."""
        drawn = sum(line.drawn for line in self.sources)
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "epoch_length": self.epoch_length,
            "epochs": self.samples / self.epoch_length,
            "steps": self.steps,
            "repeated_share": sum(line.repeats for line in self.sources) / drawn,
            "sources": [self._plain(line) for line in self.sources],
        }

    def lines(self) -> Iterator[str]:
        """The figures of the run as a table."""
        report, by_tokens = self.report(), self.tokens is not None
        tokens = f", {self.tokens:,} tokens" if by_tokens else ""
        epochs = f"{report['epochs']:.2f} epochs of {counted(self.epoch_length, 'sample')}"
        yield f"{counted(self.samples, 'sample')}{tokens}: {epochs}"
        if report["steps"] is not None:
            ranks, steps = counted(self._ranks, "rank"), counted(report["steps"], "step")
            if "batch_size" in self.config:
                yield f"{steps} of {counted(self.config['batch_size'], 'sample')} on {ranks}"
            else:
                full = f"{self.config['batch_tokens']:,} tokens on {ranks}"
                yield f"{steps} if every batch has {full}; more if batches are not full"
        rows = [self._cells(line) for line in report["sources"]]
        total = {
            "name": "total",
            "samples": sum(line.size for line in self.sources),
            "tokens": sum(line.tokens or 0 for line in self.sources),
            "asked_share": 1.0,
            "token_share": 1.0,
            "sample_share": 1.0,
            "repeated_share": report["repeated_share"],
        }
        rows.append(self._cells(total))
        table = [[*rows[0]], *([*row.values()] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            yield "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()

    @property
    def _ranks(self) -> int:
        return int(self.config["num_replicas"])

    def _steps_of(self, samples: int) -> int:
        """Steps over the samples of an epoch: each rank has as many, and a last batch that may be smaller."""
        own = -(-samples // self._ranks)
        return -(-own // int(self.config["batch_size"]))

    def _plain(self, line: SourceRun) -> dict[str, Any]:
        return {
            "name": line.name,
            "samples": line.size,
            "tokens": line.tokens,
            "weight": float(line.weight),
            "asked_share": line.asked,
            "token_share": None if line.drawn_tokens is None else line.drawn_tokens / (self.tokens or 1),
            "sample_share": line.drawn / self.samples,
            "drawn_samples": line.drawn,
            "drawn_tokens": line.drawn_tokens,
            "passes": line.passes,
            "repeated_share": line.repeats / line.drawn if line.drawn else 0.0,
            "leaves_at_position": line.leaves_at,
            "leaves_at_step": None if line.leaves_at is None else self.step_at(line.leaves_at),
        }

    def _cells(self, line: Mapping[str, Any]) -> dict[str, str]:
        """A line of the table by heading."""

        def cell(name: str, layout: str) -> str:
            value = line.get(name)
            return "" if value is None else format(value, layout)

        cells = {"source": _escaped(line["name"]), "samples": cell("samples", ",")}
        if self.tokens is not None:
            cells["tokens"] = cell("tokens", ",")
        weight = "first weight" if self.config.get("schedule") else "weight"
        cells |= {weight: cell("weight", "g"), f"asked ({self.config['per']}s)": cell("asked_share", ".2%")}
        if self.tokens is not None:
            cells["of tokens"] = cell("token_share", ".2%")
        cells |= {"of samples": cell("sample_share", ".2%"), "passes": cell("passes", ".2f")}
        cells["repeated"] = cell("repeated_share", ".1%")
        if self.config.get("max_passes"):
            cells["leaves at"] = cell("leaves_at_position", ",")
            if self.steps is not None:
                cells["at step"] = cell("leaves_at_step", ",")
        return cells


# -- Words ---------------------------------------------------------------------------------------------------------


def _pairs(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Read ``name=value`` words; values are numbers, or files of sources.

    >>> _pairs("sources", ["web=web.npy", "books=1_000"]), _pairs("weights", ["web=0.5"])
    ({'web': 'web.npy', 'books': '1_000'}, {'web': 0.5})
    """
    flag = "" if name == "sources" else f"--{name.replace('_', '-')} "
    pairs: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.rpartition("=") if name != "sources" else word.partition("=")
        if not (key and equals and value):
            raise ValueError(f"{flag}must be NAME=VALUE, got {word!r}".lstrip())
        if key in pairs:
            raise ValueError(f"{flag or 'sources '}names {key!r} twice")
        try:
            pairs[key] = _READERS[name](value)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{flag}{word!r}: {error}") from error
    return pairs


def _number(word: str) -> int | float:
    """Read a finite number, an integer where it is one."""
    if (whole := _as_whole(word)) is not None:
        return whole
    try:
        value = float(word)
    except ValueError:
        value = float("nan")
    if not np.isfinite(value):
        raise argparse.ArgumentTypeError(f"got {word!r}, expected a number")
    return value


def _whole_word(word: str) -> int:
    """Read a whole number of 0 or more.

    >>> _whole_word("100_000"), _whole_word("1e9")
    (100000, 1000000000)
    """
    if (whole := _as_whole(word)) is None or whole < 0:
        raise argparse.ArgumentTypeError(f"got {word!r}, expected a whole number of 0 or more")
    return whole


def _whole(value: object) -> object:
    """A value of a config, as an int where it is a whole number: YAML reads ``1e9`` as text, JSON as a float."""
    if isinstance(value, (str, float)) and (whole := _as_whole(str(value))) is not None:
        return whole
    return value


def _as_whole(word: str) -> int | None:
    try:
        number = Decimal(word)  # it allows underscores, as Python does
    except InvalidOperation:
        return None
    if not number.is_finite() or number.adjusted() > 30 or number != number.to_integral_value():
        return None
    return int(number)


_READERS: dict[str, Callable[[str], object]] = {"sources": str, "weights": _number, "max_passes": _whole_word}


def _say(message: str) -> None:
    sys.stderr.write(f"headrace-mixtures: error: {_escaped(' '.join(message.split()))}\n")


def _text(error: Exception) -> str:
    """The message of an error; the file comes first."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _escaped(text: str) -> str:
    """A text without what a terminal would obey."""
    return "".join(chain.from_iterable(one if one.isprintable() else _code(one) for one in text))


def _code(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


if __name__ == "__main__":
    sys.exit(main())
