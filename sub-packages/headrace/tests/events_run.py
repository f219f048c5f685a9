"""A run to which things happen again and again, and an oracle that knows only what its ranks have written down."""

import json
import multiprocessing
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from events_worker import SIZES, Life, Rank, main, run_steps_of
from meeting import Meeting
from runs import processes

MOST_RANKS = 4
BY_SIZE: dict[str, list[Any]] = {
    "max_total_size": [120, 180, 300],
    "strategy": ["stratified", "packed", "sequential", "bucketed"],
    "max_items": [None, 9],
    "tail": ["split", "pad", "drop"],
}
BY_COUNT: dict[str, list[Any]] = {"batch_size": [2, 5, 9], "drop_last": [False, True], "shuffle": [True, False]}


@dataclass(frozen=True)
class Loop:
    """A training loop, and what may happen in it beside a kill, other ranks, options and appended samples.

    Args:
        main: Trains on one rank.
        events: Names of what happens in the running processes.
        with_workers: The same, where loaders have workers; None for the same ones.
    """

    main: Callable[[Rank], None]
    events: tuple[str, ...] = ("exclude", "skip")
    with_workers: tuple[str, ...] | None = None


class Run:
    """One run, from life to life.

    Args:
        loop: What trains.
        folder: For its logs and checkpoints.
        seed: Of what happens.
        choices: Of the options; the first ones are those that it begins with.
    """

    def __init__(self, loop: Loop, folder: Path, seed: int, choices: dict[str, list[Any]]) -> None:
        self.loop, self.folder, self.choices = loop, folder, choices
        self.rng = random.Random(f"{seed} {loop.main.__name__} {list(choices)}")
        self.n, self.options = 300, {name: values[0] for name, values in choices.items()}
        self.lives: list[Life] = []
        self.saved = self.n, self.options  # of the checkpoint
        self.events: Counter[str] = Counter()

    def until(self, events: int) -> None:
        """Let so many events happen, and then the run come to the end of an epoch."""
        while self.events.total() < events:
            self.live()
        self.live(last=True)

    def live(self, *, last: bool = False) -> None:
        """Live from the last checkpoint to a kill; the last life trains to the end of the next epoch."""
        life = self.planned(last)
        self.lives.append(life)
        self.start(life)
        self.count(life)

    def planned(self, last: bool) -> Life:
        rng, begin = self.rng, max(self.checkpoints(), default=0)
        for life in self.lives:
            if life.begin < begin:  # the last one of these has made the checkpoint
                self.saved = life.n, life.options
        if self.lives:
            if rng.random() < 0.5:
                self.n = min(self.n + rng.randint(1, 40), len(SIZES))
            changed = rng.sample(list(self.choices), rng.choice([0, 0, 1, 2]))
            self.options = self.options | {name: rng.choice(self.choices[name]) for name in changed}
        n, options = self.saved
        accept = [name for name, value in self.options.items() if value != options[name]] if begin else []
        world, workers, die_at = rng.randint(1, MOST_RANKS), rng.choice([0, 0, 1]), begin + rng.randint(3, 25)
        kinds = self.loop.events if not workers or self.loop.with_workers is None else self.loop.with_workers
        places = sorted(rng.randint(begin + 1, die_at) for _ in range(rng.randint(0, 4)))
        happens, most, ranks = list[tuple[int, str, Any]](), world, world
        for place in places if kinds and not last else []:
            what, value = self.event(rng.choice(kinds), ranks)
            if what == "reshard":
                if (place, what) in [one[:2] for one in happens]:
                    continue
                ranks, most = value, max(most, value)
            happens.append((place, what, value))
        return Life(
            self.folder,
            len(self.lives),
            world,
            most,
            self.n,
            self.options,
            (*accept, *(["data"] if begin and self.n != n else [])),
            workers,
            begin,
            rng.randint(1, 4),
            tuple(happens),
            None if last else die_at,
            rng.random() < 0.5,
            self.loop_epochs(begin) + 2 if last else 10**6,
        )

    def event(self, what: str, world: int) -> tuple[str, Any]:
        rng = self.rng
        if what == "exclude":
            return what, rng.sample(range(self.n), rng.randint(1, 8))
        if what == "skip":
            return what, rng.randint(1, 5)
        return what, rng.choice([other for other in range(1, MOST_RANKS + 1) if other != world])

    def checkpoints(self) -> list[int]:
        """The steps of all checkpoints."""
        return [int(path.name.removeprefix("checkpoint-")) for path in self.folder.glob("checkpoint-*")]

    def loop_epochs(self, begin: int) -> int:
        """The loop's own number of the epoch in which the checkpoint was saved."""
        logs = [line for life in self.lives for line in lines_of(life, 0)]
        found = [line["loop_epoch"] for line in logs if line.get("step") == begin - 1]
        return int(found[-1]) if found else 0

    def start(self, life: Life) -> None:
        """Start all ranks, wait until they have come to the kill or to the end, and kill those that are there."""
        errors = self.folder / f"errors-{life.number}"
        errors.mkdir()
        place = Meeting(life.processes)
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(life.processes)]
        told = [(self.loop.main, life, rank, pipe[1], place.environment) for rank, pipe in enumerate(pipes)]
        with processes(main, errors, told) as ranks:
            for _, end in pipes:
                end.close()
            there = [False] * life.processes
            left: dict[Any, int] = {pipe: rank for rank, (pipe, _) in enumerate(pipes)}
            failed = False
            while left and not failed:
                ready: Any = wait(list(left))
                for pipe in ready:
                    rank = left.pop(pipe)
                    try:
                        there[rank] = pipe.recv() == "there"
                    except EOFError:
                        ranks[rank].join()
                        failed |= ranks[rank].exitcode != 0 or life.die_at is not None
            for process in ranks:
                if life.die_at is not None or failed:
                    process.kill()
                process.join()
            codes = [process.exitcode for process in ranks]
        for pipe, _ in pipes:
            pipe.close()
        wanted = [0 if life.die_at is None else -signal.SIGKILL] * life.processes
        said = "\n".join(path.read_text()[-3000:] for path in sorted(errors.iterdir()))
        assert codes == wanted, f"{life}\n{codes}\n{said}"
        assert not failed, f"{life}\n{said}"

    def count(self, life: Life) -> None:
        """Count what has happened."""
        before = self.lives[-2] if len(self.lives) > 1 else None
        if before is not None:
            self.events["other ranks"] += before.world != life.world
            self.events["other options"] += len([name for name in life.accept if name != "data"])
            self.events["more data"] += "data" in life.accept
        self.events["kill"] += life.die_at is not None
        for line in lines_of(life, 0):
            if "event" in line:
                self.events[line["event"]] += 1


def lines_of(life: Life, rank: int) -> list[dict[str, Any]]:
    log = life.folder / f"{life.number}-{rank}.log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


class Step(NamedTuple):
    """What the ranks were given."""

    epoch: int
    batches: list[list[int]]


class Oracle:
    """What a run has trained on, by its logs alone: what came after the last checkpoint of a life does not count.

    Attributes:
        steps: All that count.
        lost, repeated: Samples, over all epochs.
        faults: Whatever is wrong, in words.
        state: Of the loader at the end.
    """

    def __init__(self, lives: Sequence[Life]) -> None:
        self.steps: list[Step] = []
        self.lost = self.repeated = 0
        self.faults: list[str] = []
        self.excluded: set[int] = set()
        self.state: dict[str, Any] = {}
        self._n, self._world, self._most = 0, 0, 0
        self._options: dict[str, Any] = {}
        self.epoch = -1
        self._begin_epoch()
        begins = [life.begin for life in lives]
        for life, end in zip(lives, [*begins[1:], None], strict=True):
            if end is None or end > life.begin:
                self._live(life, end)
        self._end_epoch()

    def _begin_epoch(self) -> None:
        self._came: Counter[int] = Counter()
        self._skipped: set[int] = set()
        self._dropped: set[int] = set()  # where a life ended with the epoch
        self._padded = False
        self._most = self._world
        self.epoch += 1

    def _live(self, life: Life, end: int | None) -> None:
        steps: dict[int, dict[int, Any]] = {}
        events: dict[int, dict[int, list[Any]]] = {}
        for rank in range(life.processes):
            for line in lines_of(life, rank):
                if "step" in line:
                    self.check(rank not in steps.setdefault(line["step"], {}), f"step {line['step']} came twice")
                    steps[line["step"]][rank] = line
                elif "event" in line:
                    events.setdefault(line["at"], {}).setdefault(rank, []).append(line)
                elif rank == 0:
                    self.state = line["state"]
        if self._n < life.n:
            self._padded = False
        self._dropped |= self._may_be_dropped(self._left())
        self._n, self._world, self._options = life.n, life.world, life.options
        self._most = max(self._most, self._world)
        stop = max(steps) + 1 if end is None else end
        self.check(life.begin == len(self.steps), f"life {life.number} begins at step {life.begin}")
        for number in range(life.begin, stop):
            if not self.check(number in steps, f"step {number} is missing in life {life.number}"):
                continue
            came = steps[number]
            if sorted(came) != list(range(self._world)):
                self.check(False, f"step {number} of life {life.number} is on ranks {sorted(came)} of {self._world}")
            self._step(number, [came[rank] for rank in sorted(came)])
            self._happened(number + 1, events.get(number + 1, {}))

    def check(self, good: bool, fault: str) -> bool:
        if not good:
            self.faults.append(fault)
        return good

    def _happened(self, at: int, by_rank: dict[int, list[Any]]) -> None:
        if not by_rank:
            return
        first = by_rank.get(0, [])
        for rank in {*by_rank, *range(self._world)}:
            own = by_rank.get(rank)
            self.check(rank < self._world and own == first, f"rank {rank} did {own} at {at}, rank 0 {first}")
        for line in first:
            if line["event"] == "exclude":
                self.excluded |= set(line["value"])
            elif line["event"] == "reshard":
                self._world = line["value"]
                self._most = max(self._most, self._world)
            else:
                skipped = set(line["skipped"])
                coming = {index for batch in line["coming"] for index in batch}
                self.check(skipped == coming, f"skip at {at} left out {skipped}, coming were {coming}")
                self.check(len(skipped) == len(line["skipped"]), f"skip at {at} left out {line['skipped']}")
                self.check(not skipped & (self._came.keys() | self.excluded | self._skipped), f"skip at {at}: {line}")
                self._skipped |= skipped

    def _step(self, number: int, lines: list[Any]) -> None:
        epochs = {line["epoch"] for line in lines}
        self.check(len(epochs) == 1, f"step {number} is in epochs {epochs}")
        epoch, batches = lines[0]["epoch"], [line["ids"] for line in lines]
        self.steps.append(Step(epoch, batches))
        if epoch != self.epoch:
            self._end_epoch()
            self._begin_epoch()
            self.check(epoch == self.epoch, f"step {number} is in epoch {epoch}, not in {self.epoch}")
            self.epoch = epoch
        self.check(not self._padded, f"step {number} comes behind a step that repeats samples to end epoch {epoch}")
        own = next((rank for rank in range(1, len(batches)) if batches[rank] in batches[:rank]), len(batches))
        if own < len(batches):
            self._padded = True
            self.check(
                batches[own:] == [batches[rank % own] for rank in range(own, len(batches))],
                f"step {number} repeats {batches[own:]}",
            )
        new = [index for batch in batches[:own] for index in batch]
        self.check(all(batches), f"step {number} has an empty batch")
        self.check(not self.excluded & set(new), f"step {number} has {self.excluded & set(new)}, which were left out")
        self.check(not self._skipped & set(new), f"step {number} has {self._skipped & set(new)}, which were skipped")
        self._came.update(new)

    def _left(self) -> set[int]:
        """Samples that the epoch has not delivered."""
        return set(range(self._n)) - self._came.keys() - self._skipped - self.excluded

    def _may_be_dropped(self, left: set[int]) -> set[int]:
        """All or none of these, as the options and the number of ranks that held last allow it."""
        by_size = self._options.get("tail") == "drop" and SIZES[sorted(left)].sum() <= 300 * (self._most - 1)
        by_count = self._options.get("drop_last") and len(left) < 9 * self._most
        return left if by_size or by_count else set()

    def _end_epoch(self) -> None:
        repeated = {index for index, count in self._came.items() if count > 1}
        left = self._left() - self._dropped
        lost = left - self._may_be_dropped(left)
        unknown = self._came.keys() - set(range(self._n))
        self.lost += len(lost)
        self.repeated += len(repeated)
        self.check(not repeated, f"epoch {self.epoch}: {sorted(repeated)} came again")
        self.check(not lost, f"epoch {self.epoch}: {sorted(lost)} did not come")
        self.check(not unknown, f"epoch {self.epoch}: {sorted(unknown)} are no samples")


def check_run(run: Run, events: int, record: Callable[[str, object], None]) -> None:
    """Let so many events happen; ask the logs, and then the last state, on one rank in this process, for every step."""
    run.until(events)
    oracle = Oracle(run.lives)
    life = run.lives[-1]
    loader = (life.loader if "batch_sampler" in oracle.state else life.batches)(num_replicas=1, rank=0)
    loader.load_state_dict(oracle.state)
    steps = run_steps_of(loader)
    oracle.check(steps == len(oracle.steps), f"the state has {steps} steps, the logs {len(oracle.steps)}")
    oracle.check(set(loader.excluded_indices.tolist()) == oracle.excluded, f"{loader.excluded_indices} are left out")
    for number, step in enumerate(oracle.steps):
        found = loader.step(number)
        oracle.check(found == step.batches, f"step {number} was {step.batches}, the state says {found}")
    figures = {"events": run.events.total(), "lost": oracle.lost, "repeated": oracle.repeated}
    for name, value in {**figures, **run.events}.items():
        record(name, value)
    print(figures, dict(run.events), f"{len(run.lives)} lives, {len(oracle.steps)} steps, {oracle.epoch + 1} epochs")
    assert not oracle.faults, "\n".join([*oracle.faults[:20], *map(str, run.lives)])
