"""Plans of epochs that are planned block by block, as all sizes do not fit into a process."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.checks import shown
from headrace.size_aware_batching._shared.epoch_plan import NO_LIMIT, EpochPlan, Place, Steps
from headrace.size_aware_batching._shared.random import fold_in
from headrace.size_aware_batching._shared.ranks import Ranks
from headrace.size_aware_batching._shared.run import History, NoSampler
from headrace.size_aware_batching._validation import shortlist
from headrace.size_aware_batching.planning.batch_list import BatchList, index_at
from headrace.size_aware_batching.planning.block_counts import BlockCounts
from headrace.size_aware_batching.planning.blocks import (
    Blocks,
    before_each,
    counting_lists,
    narrow,
    read_block,
    shuffled,
    sizes_checksum,
)
from headrace.size_aware_batching.planning.distribution import distribute_steps, n_steps
from headrace.size_aware_batching.planning.fingerprint import WHOLE, fingerprint
from headrace.size_aware_batching.planning.last_step import Balance, Batches, balance_evenly
from headrace.size_aware_batching.planning.list_plan import as_steps, refuse_empty, with_warning_of_correlation
from headrace.size_aware_batching.planning.options import SamplerOptions
from headrace.size_aware_batching.planning.plan_cache import PlanCache
from headrace.size_aware_batching.planning.prepared import PreparedSizes, all_are_skipped, prepare, skipped_warning
from headrace.size_aware_batching.planning.states import STATE_VERSION, checked_state, refuse_other_settings
from headrace.size_aware_batching.planning.strategies import BatchLists
from headrace.size_aware_batching.sizes.read import column_extras, column_limits, effective_sizes, read_sizes

SHARDS, ORDER = 7, 8  # what keys are for: the order of all shards, and that of an epoch's blocks
CURE = "cut them in the collate function and count them so with max_length=, or choose oversize='skip' or 'own_batch'"


@dataclass
class PlannedBlock:
    """A block that is planned.

    Args:
        number: Of the block.
        lists: Make its list of an epoch.
        sizes: Of its samples.
        oversize: Which of them are too large, by their places in it.
    """

    number: int
    lists: BatchLists
    sizes: NDArray[Any]
    oversize: NDArray[np.int64]
    _latest: tuple[int, int, BatchList] | None = None

    def list(self, key: int, balanced_ranks: int) -> BatchList:
        """Return its batches in an epoch."""
        if self._latest is None or self._latest[:2] != (key, balanced_ranks):
            self._latest = key, balanced_ranks, self.lists.of_epoch(key, balanced_ranks)
        return self._latest[2]

    def count(self, key: int) -> int:
        """Return the number of its batches in an epoch, however many ranks steps are balanced for."""
        latest = self._latest
        return (latest[2] if latest is not None and latest[0] == key else self.lists.of_epoch(key, 1)).count()


class BlockPlanner:
    """Plans blocks of samples, one at a time; it keeps counts and checksums of the blocks that it has read.

    Args:
        name: Class of the sampler, for messages.
        sizes_of: Returns the sizes of a shard.
        lengths: Number of samples of each shard.
        block: Samples of a block, about.
        options: The arguments that decide which batches there are.
        seed: Key of all randomness.
        cache: Directory where counts are noted.
    """

    version = STATE_VERSION
    user_sampler = NoSampler()

    def __init__(
        self,
        name: str,
        sizes_of: Callable[[int], Any],
        lengths: NDArray[np.int64],
        block: int,
        options: SamplerOptions,
        seed: int,
        cache: PlanCache | None,
    ) -> None:
        self.name, self.sizes_of, self.block, self.options, self.seed = name, sizes_of, block, options, seed
        self.n_samples, self._cache = int(lengths.sum()), cache
        self._ranks: Ranks | None = None  # that share the counting
        key = int(fold_in(seed, SHARDS)[0]) if options.shuffle else None
        self.blocks = Blocks(lengths, -(-self.n_samples // block), key)
        self.planned: PlannedBlock | None = None  # the latest one, of any epoch
        self.skipped: dict[int, NDArray[np.int64]] = {}  # of each block that was planned
        self._counts: dict[tuple[int | None, int], int] = {}  # batches of each block, by epoch if epochs differ in it
        self._checksums: dict[int, str] = {}  # of the sizes of each block that was read or noted
        self._loaded: dict[int, str] = {}  # of the block of the latest state
        self._parts = {
            "lengths": lengths,
            "block": block,
            "max_total_size": options.max_total_size,
            **options.fingerprint_parts,
            "cost": options.batch_cost.name,
            "seed": seed,
            "tail": options.tail,
            "max_length": options.max_length,
            "extra_per_sample": options.extra_per_sample,
        }
        self.fingerprint = fingerprint(self._parts)
        self._even_counts = options.sorts or not options.shuffle  # as many batches in every epoch
        own = options.recorded(options.max_length)
        own = {name: own[name] for name in own if name not in ("shapes", "curriculum", "tokens_per_step")}
        self.settings: dict[str, Any] = {"n": self.n_samples, "options": own | {"block": block}}

    # What a run asks.

    @property
    def epochs_differ(self) -> bool:
        """Whether epochs differ and need ``set_epoch``."""
        return self.options.shuffle

    def at(self, _settings: Mapping[str, Any]) -> BlockPlanner:
        """Return this planner: its settings cannot change."""
        return self

    def plan(self, epoch: int, history: History) -> BlockPlan:
        """Return the plan of an epoch."""
        return BlockPlan(self, epoch, self.options.balanced_for(history.first_world))

    def rest(self, _epoch: int, _before: Any, _position: int) -> EpochPlan:
        """Refuse changes in the middle of an epoch."""
        raise self._no_change()

    def refuse_change_within_epoch(self) -> None:
        """Refuse changes in the middle of an epoch."""
        raise self._no_change()

    def _no_change(self) -> ValueError:
        return ValueError(f"{self.name} cannot change in the middle of an epoch: begin a new run")

    def check_state(self, state: Any) -> Mapping[str, Any]:
        """Refuse what is no state, or one of another version or seed; return it with plain ints."""
        return checked_state(state, self.name, self.version, self.seed, ("sizes",))

    def settings_changed(
        self, state: Mapping[str, Any], _recorded: Mapping[str, Any], _accept: Collection[str]
    ) -> bool:
        """Refuse a state of other settings."""
        refuse_other_settings(self._parts, self.fingerprint, state["fingerprint"])
        return False

    def fingerprint_at(self, _epoch: int) -> str:
        """Return the fingerprint, the same in all epochs."""
        return self.fingerprint

    def state_of(self, epoch: int, place: Place) -> dict[str, Any]:
        """Return a checksum of the sizes of the block that a place is in; empty at the beginning of a block."""
        sequence, starts = self.sequence(epoch)
        number = index_at(starts, place.position)
        inside = place.position - int(starts[number])
        return {"sizes": self.checksum(int(sequence[number])) if inside else ""}

    # Blocks.

    def sequence(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the blocks of an epoch in their order, and the positions where they begin and the last one ends."""
        key = int(fold_in(self.seed, epoch, ORDER)[0]) if self.options.shuffle else None
        sequence = shuffled(key, len(self.blocks))
        return sequence, before_each(np.diff(self.blocks.starts)[sequence])

    def key(self, epoch: int, number: int) -> int:
        """Return the key of a block in an epoch."""
        return int(fold_in(self.seed, epoch if self.options.shuffle else 0, number, ORDER)[0])

    def checksum(self, number: int) -> str:
        """Return the checksum of the sizes of a block, as far as it is known."""
        return self._checksums.get(number, self._loaded.get(number, ""))

    def loaded(self, number: int, checksum: str) -> None:
        """Note the checksum that a state has of a block."""
        if checksum and self._checksums.get(number, checksum) != checksum:
            raise self._other_sizes(number)
        self._loaded = {number: checksum} if checksum else {}

    def _expect(self, number: int, checksum: str) -> None:
        """Refuse other sizes of a block than this process has read before, or the latest state has."""
        if self.checksum(number) not in ("", checksum):
            raise self._other_sizes(number)
        self._checksums[number] = checksum

    def _other_sizes(self, number: int) -> ValueError:
        shards = self.blocks.shards(number)
        notes = "" if self._cache is None else ", or delete the notes in plan_cache where they are of other sizes"
        return ValueError(
            f"sizes of block {number} (shards {shortlist(shards[:5].tolist(), len(shards))}) must be the same each "
            "time they are read, and those of the run that is resumed, got others: restore them, or start a new run"
            f"{notes}"
        )

    def prepared(self, number: int) -> tuple[NDArray[Any], PreparedSizes]:
        """Read the sizes of a block."""
        sizes, checksum = read_block(self.blocks, number, self.sizes_of)
        self._expect(number, checksum)
        columns = 1 if sizes.ndim == 1 else sizes.shape[1]
        extras = column_extras(self.options.extra_per_sample, columns)
        counted = effective_sizes(sizes, extras, column_limits(self.options.max_length, columns))
        options = replace(self.options, oversize="skip") if self.options.oversize == "raise" else self.options
        prepared = prepare(counted, self.options.max_total_size, options)
        over = self.blocks.samples(int(self.blocks.starts[number]) + prepared.oversize)
        if self.options.oversize == "raise" and len(over):
            sample, size = int(over[0]), counted[prepared.oversize[0]].tolist()
            raise ValueError(
                f"sizes must not exceed max_total_size={shown(self.options.max_total_size)}, got {len(over)} of "
                f"{len(counted):,} samples of a block that do so by themselves (sample {sample} has size "
                f"{shown(size)}{self.options.size_note}{', ...' if len(over) > 1 else ''}): {CURE}"
            )
        if self.options.oversize == "skip":
            self.skipped[number] = np.sort(over)
        return counted, prepared

    def planned_block(self, number: int) -> PlannedBlock:
        """Return the plan of a block; the one before makes way for it."""
        if self.planned is None or self.planned.number != number:
            self.planned = None
            sizes, prepared = self.prepared(number)
            self.planned = PlannedBlock(number, BatchLists(prepared, self.options), sizes, prepared.oversize)
        return self.planned

    def count(self, epoch: int, number: int) -> int:
        """Return how many batches a block has."""
        key = None if self._even_counts else epoch, number
        if key not in self._counts:
            noted = self._noted_count(number)
            self._counts[key] = self._found_count(epoch, number) if noted is None else noted
        return self._counts[key]

    def counted(self, epoch: int) -> bool:
        """Return whether the batches of all blocks were counted."""
        return all((None if self._even_counts else epoch, number) in self._counts for number in range(len(self.blocks)))

    @cached_property
    def _noted(self) -> BlockCounts | None:
        """The counts that all processes note; the name of the file holds a checksum of a shard's sizes."""
        filled = np.flatnonzero(self.blocks.lengths)
        if self._cache is None or not self._even_counts or callable(self.options.cost) or not len(filled):
            return None
        checksum = sizes_checksum(narrow(read_sizes(self.sizes_of(int(filled[0])))))
        return BlockCounts(self._cache.directory, f"{self.fingerprint[:WHOLE]}-{checksum:08x}")

    def _noted_count(self, number: int) -> int | None:
        """Return how many batches others have noted for a block."""
        found = None if self._noted is None else self._noted.get(number)
        if found is None:
            return None
        self._expect(number, found[1])
        return found[0]

    def _found_count(self, epoch: int, number: int) -> int:
        """Count the batches of a block, and note them for others."""
        if self.planned is not None and self.planned.number == number:
            found = self.planned.count(self.key(epoch, number))
        else:
            lists = counting_lists(self.prepared(number)[1], self.options)
            found = lists.of_epoch(self.key(epoch, number), 1).count()
        if self._noted is not None:
            self._noted.add(number, found, self._checksums[number])
        return found

    def count_all(self, epoch: int, numbers: list[int]) -> int:
        """Return how many batches some blocks have together; each rank begins with other ones, to share the work."""
        first = 0
        if self._noted is not None and self._ranks is not None:
            replicas, rank = self._ranks.current()
            first = rank * len(numbers) // replicas
        return sum(self.count(epoch, number) for number in numbers[first:] + numbers[:first])

    def count_with(self, ranks: Ranks) -> None:
        """Share the counting of blocks with other ranks."""
        self._ranks = ranks

    def sizes_at(self, places: NDArray[np.int64]) -> NDArray[Any]:
        """Return the sizes of samples by their places; blocks other than the planned one are read for it."""
        number = np.searchsorted(self.blocks.starts, places, side="right") - 1
        parts = []
        for block in np.unique(number).tolist():
            planned = self.planned
            sizes = planned.sizes if planned is not None and planned.number == block else self.prepared(block)[0]
            parts.append(sizes[places[number == block] - self.blocks.starts[block]])
        found = np.empty((len(places), *parts[0].shape[1:]), np.result_type(*parts))
        for block, part in zip(np.unique(number).tolist(), parts, strict=True):
            found[number == block] = part
        return found

    def balance(self) -> Balance | None:
        """Return how the samples of a last step are dealt to the ranks; None where their order is kept."""
        if self.options.strategy == "sequential":
            return None
        options = self.options if self.options.oversize == "own_batch" else replace(self.options, oversize="skip")

        def balance(places: NDArray[Any], n_batches: int) -> Batches | None:
            sized = prepare(self.sizes_at(places), self.options.max_total_size, options)
            found = balance_evenly(sized, np.arange(len(places)), n_batches)
            return None if found is None else (places[found[0]], found[1])

        return balance

    def __getstate__(self) -> dict[str, Any]:
        # A plan is large and is made again when it is needed.
        own = {"planned": None, "_checksums": dict(self._checksums), "_counts": dict(self._counts)}
        return {name: value for name, value in self.__dict__.items() if name != "_noted"} | own


class BlockPlan:
    """The plan of an epoch, block by block. Positions count samples that are skipped, too.

    Args:
        planner: Plans the blocks.
        epoch: The epoch.
        balanced_ranks: Number of ranks for which steps are balanced.
    """

    start, has_draws = 0, False

    def __init__(self, planner: BlockPlanner, epoch: int, balanced_ranks: int) -> None:
        self.planner, self.epoch, self.balanced_ranks, self.end = planner, epoch, balanced_ranks, planner.n_samples
        self.sequence, self.starts = planner.sequence(epoch)

    def _list(self, turn: int) -> BatchList:
        number = int(self.sequence[turn])
        return self.planner.planned_block(number).list(self.planner.key(self.epoch, number), self.balanced_ranks)

    def _turn_of(self, position: int) -> tuple[int, int]:
        turn = index_at(self.starts, position)
        return turn, position - int(self.starts[turn])

    def steps(self, place: Place, world: int, all_ranks: bool) -> Iterator[Steps]:
        """Yield the steps from a place on."""
        planner, positions, warnings_once = self.planner, _Positions(place.position), list[str]()
        balance, listed = None if all_ranks else planner.balance(), False
        dealt = distribute_steps(
            self._batches(place.position, positions, warnings_once), world, planner.options.tail, balance
        )
        if not planner.options.chooses_order:
            dealt, correlated = with_warning_of_correlation(
                dealt, planner.sizes_at, self.balanced_ranks, world, "in a new run"
            )
            warnings_once += [correlated] * bool(correlated)
        for steps in as_steps(self, dealt, 0, world, planner.options.tail, position_after=positions.after):
            listed = True
            yield steps._replace(warning_once="\n".join(warnings_once))
            warnings_once.clear()
        if self.end and not positions.listed and not place.position:
            raise all_are_skipped(self.end, planner.options.max_total_size)
        if warnings_once:  # of blocks at the end that have no batch
            nothing = np.zeros(0, np.int64)
            yield Steps(nothing, np.zeros(1, np.int64), nothing, warning_once="\n".join(warnings_once))
        if planner.options.tail == "drop" and not listed and not place.position and positions.listed:
            refuse_empty(world, "fewer batches")

    def _batches(self, position: int, positions: _Positions, warnings_once: list[str]) -> Iterator[Batches]:
        """Yield the batches from a position on, by the places of their samples; note where blocks end."""
        planner, (first, inside) = self.planner, self._turn_of(position)
        for turn in range(first, len(self.sequence)):
            number = int(self.sequence[turn])
            batches = self._list(turn)
            if turn == first and inside > batches.n_samples:
                raise ValueError(f"state['position'] must be one of state_dict(), got {position}: it was changed")
            if len(skipped := planner.skipped.get(number, np.zeros(0, np.int64))):
                warnings_once.append(skipped_warning(skipped, planner.options.max_total_size))
            positions.add(batches.n_samples - inside, int(self.starts[turn + 1]))
            begin = int(planner.blocks.starts[number])
            for samples, offsets in batches.batches(inside):
                yield samples + np.int64(begin), offsets
            inside = 0
            del batches  # its memory is free before the next one is planned

    def n_steps(self, place: Place, world: int, most: int = NO_LIMIT) -> int:
        """Return the number of steps from a place on, or ``most``; only as many blocks as needed are counted."""
        turn, inside = self._turn_of(place.position)
        n_batches = 0
        if inside:
            n_batches, turn = self._list(turn).count(inside), turn + 1
        numbers = self.sequence[turn:].tolist()
        if most == NO_LIMIT:
            n_batches += self.planner.count_all(self.epoch, numbers)
        else:
            for number in numbers:
                if n_batches > most * world:
                    break
                n_batches += self.planner.count(self.epoch, number)
        return min(most, n_steps(n_batches, world, self.planner.options.tail))

    def seek(self, place: Place, world: int, steps: int) -> tuple[int, Place]:
        """Return a step no later than the one so many steps after a place, and its place.

        It is inside a block whose rest can be split into whole steps, whatever follows.
        """
        first, inside = self._turn_of(place.position)
        before = [0]  # batches from the position to the beginning of each further block
        for turn in range(first, len(self.sequence)):
            if before[-1] > (steps + 1) * world:
                break
            here = self._list(turn).count(inside) if turn == first and inside else None
            before.append(
                before[-1] + (self.planner.count(self.epoch, int(self.sequence[turn])) if here is None else here)
            )
        passed, back = steps, 1
        while passed > 0:
            if (found := self._sure_position(first, inside, before, passed, world)) is not None:
                return passed, Place(found)
            passed, back = passed - back, 2 * back
        return 0, place

    def _sure_position(self, first: int, inside: int, before: list[int], steps: int, world: int) -> int | None:
        """Return where a step begins that is so many steps after a position; None where that is not sure."""
        block = min(bisect_right(before, steps * world), len(before) - 1) - 1
        batches, batch = self._list(first + block), steps * world - before[block]
        begun, count = 0, batches.count()
        if block == 0 and inside:
            begun = count - before[1]
            if batches.position_of(begun) != inside:  # inside a batch: the list may go on with other ones
                return None
        position = batches.position_of(begun + batch)
        spare = (batches.n_samples - position) - (count - begun - batch)
        return (
            int(self.starts[first + block]) + position
            if self.planner.options.tail != "split" or spare >= world - 1
            else None
        )

    def place(self, position: int, _began: Place, _world: int) -> Place:
        """Return the place of a position."""
        return Place(position)

    def loaded_place(self, state: Mapping[str, Any]) -> Place:
        """Return the place of a state, and expect the sizes that it was saved with."""
        turn, inside = self._turn_of(state["position"])
        if turn < len(self.sequence):
            self.planner.loaded(int(self.sequence[turn]), str(state["sizes"]) if inside else "")
        return Place(state["position"])

    def refuse_empty(self, world: int) -> None:
        """Refuse so many ranks that nothing is left for them, if all is counted; else that is found at the end."""
        planner = self.planner
        if planner.options.tail != "drop" or not planner.counted(self.epoch):
            return
        if 0 < planner.count_all(self.epoch, list(range(len(planner.blocks)))) < world:
            refuse_empty(world, "fewer batches")

    def keys(self, samples: NDArray[Any]) -> list[Any]:
        """Return the samples of the dataset at some places."""
        keys: list[int] = self.planner.blocks.samples(samples).tolist()
        return keys

    def delivered(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples of the dataset between two positions."""
        positions, parts, listed = _Positions(start), [np.zeros(0, np.int64)], 0
        for samples, _ in self._batches(start, positions, []):
            while len(samples) and positions.after(listed + len(samples)) > stop:
                samples = samples[: stop - positions.after(listed + len(samples))]
            parts.append(self.planner.blocks.samples(samples))
            listed += len(samples)
            if positions.after(listed) >= stop:
                break
        return np.concatenate(parts)

    def first_unread(self, _position: int) -> int:
        """Refuse: there is no user's order."""
        raise TypeError("a plan must have a user's order for that")

    def position_of_draw(self, _draw: int) -> int:
        """Refuse: there is no user's order."""
        raise TypeError("a plan must have a user's order for that")


class _Positions:
    """From how many samples an iteration has listed to the position that this is: skipped samples have one, too."""

    def __init__(self, position: int) -> None:
        self.listed = 0  # samples of all blocks that were planned
        self._begins, self._positions = [0], [position]

    def add(self, n_samples: int, end: int) -> None:
        """Note that so many more samples are listed, after which a position follows."""
        self.listed += n_samples
        self._begins.append(self.listed)
        self._positions.append(end)

    def after(self, listed: int) -> int:
        """Return the position after so many of the samples."""
        place = bisect_right(self._begins, listed) - 1
        return self._positions[place] + listed - self._begins[place]
