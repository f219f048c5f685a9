"""Training steps that survive running out of memory: the batch is split and its gradients are accumulated."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from headrace.size_aware_batching._shared.display import counted, never_raises
from headrace.size_aware_batching._validation import one_of
from headrace.size_aware_batching.memory.data_parallel import the_data_parallel, unsynchronized
from headrace.size_aware_batching.memory.device import alloc_retries, free_memory, is_out_of_memory, out_of_memory
from headrace.size_aware_batching.memory.parts import refused_collectives, running_part
from headrace.size_aware_batching.memory.peaks import describe
from headrace.size_aware_batching.memory.sharded import clip_gradients, is_fully_sharded, refuse_unsharded_parameters
from headrace.size_aware_batching.memory.snapshot import OptimizerCopy, TrainingState, gradient_copies
from headrace.size_aware_batching.memory.split import batch_elements, batch_length, batch_shapes, split_batch
from headrace.size_aware_batching.memory.step_budget import StepBudget
from headrace.size_aware_batching.planning.gather import gather_json

Run: TypeAlias = Callable[[Any, float], torch.Tensor | None]  # a part and its weight -> the weighted loss


@dataclass
class _Batch:
    """One of the batches whose gradients a step accumulates."""

    batch: Any
    parts: list[Any]
    run: Run
    share: float
    before: TrainingState  # the random state
    loss: torch.Tensor | None = None


class _Answer(NamedTuple):
    """What all ranks say together before they reduce their gradients."""

    total: float  # the counts of all ranks
    room: bool  # for all gradients in one tensor
    gradients: list[bool]  # for each parameter, whether a rank has one


_LOST, _BROKEN = 1, 2  # what has failed on a rank: its memory, or its code

_LOGGER = logging.getLogger("headrace.size_aware_batching")


@dataclass(frozen=True)
class OOMEvent:
    """A training step that ran out of memory, or a part of one.

    Args:
        step: Number of the step since the guard was constructed, from 0.
        phase: ``"forward"``, ``"backward"``, ``"forward or backward"`` (Lightning's first attempt) or ``"optimizer"``.
        samples: Samples in the part that did not fit.
        sizes: Sizes of that part as text: from ``sizes_of``, else the shapes of its tensors.
        budget: The guard's budget from then on.
        error: The device's error message.
    """

    step: int
    phase: str
    samples: int
    sizes: str
    budget: float
    error: str


@dataclass(frozen=True)
class OOMReport:
    """What running out of memory has cost on this rank: the figures of an `OOMGuard`.

    Args:
        steps: Number of steps so far.
        split_steps: Steps that ran in parts.
        extra_parts: Forward and backward passes of the split steps beyond one per step.
        failed_tries: Attempts that ran out of memory and were repeated: the number of events.
        budget: Batches of higher cost are split at once; infinite if there is no budget.
        alloc_retries: Number of times the allocator had to release its whole cache, which waits for the device. Counted
            on the current CUDA device since the guard was constructed.
    """

    steps: int
    split_steps: int
    extra_parts: int
    failed_tries: int
    budget: float
    alloc_retries: int = 0

    def __str__(self) -> str:
        return "\n".join(f"{name:17}{text}" for name, text in self._cells().items())

    def _cells(self) -> dict[str, str]:
        return {
            "steps": f"{self.steps:,}",
            "split": f"{self.split_steps:,}, {self.split_steps / max(1, self.steps):.1%}",
            "extra parts": f"{self.extra_parts:,}",
            "failed tries": f"{self.failed_tries:,}",
            "budget": "none" if math.isinf(self.budget) else f"{self.budget:,.10g}",
            "retries": f"{self.alloc_retries:,}",
        }


class OOMGuard:
    """Completes a training step that runs out of memory: splits the batch and sums the gradients of its parts.

    The result equals that of the full batch up to rounding: parameters after a rescued step equal those of the unsplit
    step within 1e-12 in float64. This holds for losses that are sums or means over the samples (or tokens), but not for
    a loss that compares the samples of a batch. A model with BatchNorm in training mode is refused, because its output
    depends on the full batch. Dropout draws different random numbers for the parts. Buffers that the forward pass
    updates (such as your own running statistics) are updated once for every part and every attempt, on each rank
    separately.

    Under ``DistributedDataParallel`` each rank splits its own batch if necessary. The ranks check that all succeeded,
    reduce their gradients with one explicit all-reduce, and check again after the optimizer step. So no rank hangs, and
    all ranks stay bit-equal. Communication does not overlap with the backward pass. The loss of a part must not
    communicate: `global_num_tokens` (even on a single rank) and collectives of ``torch.distributed`` raise an error
    there.

    Under FSDP2 (``fully_shard``) the forward and backward passes contain collectives, so a step that ran out of memory
    cannot be repeated. Batches are split before the step, by ``budget``, on all ranks into the same number of parts;
    the result equals that of the unsplit step as above. A rank that runs out of memory all the same raises an error
    that names the rank, the phase, the sizes and the cure. The other ranks wait for it until its process ends and the
    launcher ends theirs, as ``torchrun`` does.

    After one event, later batches are still tried whole. After a second event within ``window`` steps, the ``budget``
    shrinks on all ranks, so that batches of that cost are split at once, until the first event is ``window`` steps ago.
    Every event is logged as a warning under ``headrace.size_aware_batching`` with the sizes of the batch, and recorded
    in ``events``. ``report()`` counts the split steps and their cost.

    An optimizer step that runs out of memory is retried. The first step allocates the optimizer state; if it has
    already changed weights, it is undone from a copy on the host. Later steps are undone only with
    ``copy_weights=True``. Without it, only optimizers of ``torch.optim`` are retried, because others may change weights
    undetected. A ``GradScaler`` is not supported: use bfloat16, or in Lightning ``OOMRescue``, which supports
    ``"16-mixed"``.

    Args:
        model: The model. On several ranks it is a ``DistributedDataParallel`` or an FSDP2 model, or contains one:
            compiled, in Fabric's wrapper, or in a module of your own.
        optimizer: The optimizer of the model.
        reduction: The meaning of ``loss_of(part)``: ``"mean"``, the mean over ``count(part)``, which under
            ``DistributedDataParallel`` is averaged over the ranks as usual; ``"sum"``, which is divided by the
            ``count`` of the full batch over all ranks; or ``"scaled"``, the result of `token_weighted_loss`, so that
            the losses of the parts add up (count the targets before the step, with a collective of all ranks).
        count: Returns the denominator of the mean, such as the tokens of a batch. By default the number of samples.
        split: Splits a batch into smaller batches, in order; returns fewer than two for a single sample. By default
            tensors, and dicts and tuples of tensors, are split along dimension 0, and batches of `PackedCollate` at
            their ``cu_seqlens``.
        length: Returns the number of samples in a batch; required with ``split``.
        indices: Returns the dataset index of each sample in a batch, for the error message if a sample does not fit.
        sizes_of: Returns the sizes of a batch's samples, ``[n]`` or ``[n, k]``, for the log.
        cost: Returns the cost of a batch; by default the number of elements of its tensors.
        budget: Batches of higher cost are split at once.
        shrink: The budget shrinks to this share of the lowest cost that ran out of memory in the two steps.
        window: Number of steps for which the guard remembers an event.
        clip_norm: Maximum norm of the gradients.
        copy_weights: Whether to copy weights and optimizer state to the host before every update, not only the first.

    Raises:
        TypeError: If the model's parameters are sharded by anything but FSDP2 (FSDP1, DeepSpeed), or the optimizer's
            state is sharded (``ZeroRedundancyOptimizer``), because their ranks work in lockstep.
        ValueError: If an argument has a value that is not allowed, BatchNorm is in training mode, or the ranks of a
            process group could not be kept equal: no ``DistributedDataParallel`` or several, one with
            ``static_graph=True`` or a communication hook, trained parameters outside it; or an FSDP2 model that not all
            ranks train.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with OOMGuard(model, optimizer) as guard:
        ...     for batch in [torch.ones(8, 4), torch.ones(6, 4)]:
        ...         loss = guard.step(batch, lambda part: model(part).square().mean())
        >>> guard.events
        []
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        reduction: Literal["mean", "sum", "scaled"] = "mean",
        count: Callable[[Any], float] | None = None,
        split: Callable[[Any], Sequence[Any]] | None = None,
        length: Callable[[Any], int] | None = None,
        indices: Callable[[Any], Sequence[int]] | None = None,
        sizes_of: Callable[[Any], Any] | None = None,
        cost: Callable[[Any], float] | None = None,
        budget: float = math.inf,
        shrink: float = 0.95,
        window: int = 100,
        clip_norm: float | None = None,
        copy_weights: bool = False,
    ) -> None:
        one_of("reduction", reduction, ("mean", "sum", "scaled"))
        self._budget = StepBudget(budget, shrink, window)
        sharded = is_fully_sharded(model)
        if (any(hasattr(p, "to_local") for p in model.parameters()) and not sharded) or _is_sharded(model):
            raise TypeError(
                "model must be unsharded, a DistributedDataParallel or sharded by fully_shard (FSDP2), got one whose "
                "weights are sharded otherwise"
            )
        if "ZeroRedundancyOptimizer" in _names(optimizer):
            raise TypeError(
                "optimizer must update this rank only, got ZeroRedundancyOptimizer: its ranks update in lockstep"
            )
        self.model, self.optimizer, self.reduction = model, optimizer, reduction
        self.split, self.length, self.cost = split or split_batch, length or batch_length, cost or batch_elements
        self.count, self.indices, self.sizes_of = count or self.length, indices, sizes_of
        self.clip_norm, self.copy_weights = clip_norm, copy_weights
        self.events: list[OOMEvent] = []
        self.steps = 0
        self._split_steps, self._extra_parts = 0, 0
        self._retries_before = alloc_retries()
        self._failing = math.inf  # the lowest cost that ran out of memory in this step on this rank
        self.phase = "forward"
        self._updated = False
        self._norms = [module for module in model.modules() if isinstance(module, _NormBase)]
        self._sharded = sharded
        if sharded:
            refuse_unsharded_parameters(model)
        parallel = None if sharded else the_data_parallel(model)
        self._group = None if parallel is None else parallel.process_group
        self._entered: ExitStack | None = None
        self._batches: list[_Batch] = []  # of the step so far
        self._lost: str | None = None  # the error of a sample that does not fit
        self._told: Exception | None = None  # an error that is raised on all ranks
        self.refuse_batch_norm()
        if self._group is not None:  # allocated now, because there may be no memory later
            device = next(model.parameters()).device
            answers = 4 * dist.get_world_size(self._group) + sum(1 for _ in model.parameters())
            self._answers = torch.zeros(answers, dtype=torch.float64, device=device)

    @never_raises
    def __repr__(self) -> str:
        budget = "no budget yet" if math.isinf(self.budget) else f"budget {self.budget:,.10g}"
        return (
            f"{type(self).__name__}({type(self.model).__name__}, {type(self.optimizer).__name__}, {self.reduction}, "
            f"{budget}, {counted(self.steps, 'step')}, {counted(len(self.events), 'event')})"
        )

    @property
    def budget(self) -> float:
        """Batches of higher cost are split at once. Setting it discards the remembered events."""
        return self._budget.at(self.steps, self._failing)

    @budget.setter
    def budget(self, budget: float) -> None:
        self._budget = StepBudget(budget, self._budget.shrink, self._budget.window)

    def report(self) -> OOMReport:
        """Return the number of split steps on this rank and their cost; ``str()`` gives a short text."""
        retries = alloc_retries() - self._retries_before
        return OOMReport(self.steps, self._split_steps, self._extra_parts, len(self.events), self.budget, retries)

    def state_dict(self) -> dict[str, Any]:
        """Return what the guard has learned about its budget, for a checkpoint."""
        return self._budget.state_dict(self.steps)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what a guard has learned about its budget; load the same state on all ranks."""
        self._budget.load_state_dict(state_dict, self.steps)

    def __enter__(self) -> "OOMGuard":
        self._entered = ExitStack()
        self._entered.enter_context(unsynchronized(self.model))
        if self._group is not None:
            self._entered.enter_context(refused_collectives())
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.close()

    def step(self, batch: Any, loss_of: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Take one training step: gradients of the batch, split if it does not fit, and the update.

        Args:
            batch: The batch of this rank.
            loss_of: Returns the loss of a batch, or of a part of one: see ``reduction``.

        Returns:
            The loss of the full batch, a mean (or scaled by ``loss_of``), without a graph.

        Raises:
            torch.OutOfMemoryError: If a single sample does not fit, on all ranks and with its index; under FSDP2 if
                this rank runs out of memory.
            RuntimeError: If it is called outside the ``with`` block, or another rank has failed.
            ValueError: If BatchNorm is in training mode.
        """
        return self.accumulated_step([batch], loss_of)

    def accumulated_step(self, batches: Iterable[Any], loss_of: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Take one training step over several batches, whose gradients are accumulated.

        The result equals that of the usual loop, which divides the mean of each batch by the number of batches. With
        ``reduction="sum"`` the sum over all batches is divided by their total ``count``; with ``"scaled"`` the losses
        are added. If a batch does not fit, the batches before it run once more.

        Args:
            batches: The batches of this rank, such as ``itertools.islice(loader, 4)``. They are kept until the step is
                complete. The ranks may have different numbers of them.
            loss_of: Returns the loss of a batch, or of a part of one: see ``reduction``.

        Returns:
            The loss of the step, a mean (or scaled by ``loss_of``), without a graph.

        Raises:
            torch.OutOfMemoryError: If a single sample does not fit, with its index, on all ranks.
            RuntimeError: If it is called outside the ``with`` block, or accelerate accumulates as well.
            ValueError: If there is no batch, or BatchNorm is in training mode.
        """
        if self._entered is None:
            raise RuntimeError("step() must be called inside the block: with OOMGuard(...) as guard: ...")
        state = getattr(self.optimizer, "gradient_state", None)  # of accelerate, whose optimizer would skip the update
        if state is not None and not state.sync_gradients:
            raise RuntimeError(
                "a step must not be called in accelerator.accumulate(): give all batches of a step to accumulated_step"
            )
        batches = _some(batches)
        if self._sharded:
            return self._step_together(batches, loss_of)
        share = 1 / len(batches) if self.reduction == "mean" else 1.0
        self._batches = []  # of a step that failed

        def run(part: Any, weight: float) -> torch.Tensor:
            self.phase = "forward"
            loss = loss_of(part) * weight
            self.phase = "backward"
            torch.autograd.backward(loss)
            return loss.detach()

        for batch in batches:
            self.add(batch, run, share=share)
        losses = [each.loss for each in self._batches if each.loss is not None]
        self.finish()
        with self.on_all_ranks():
            if self.clip_norm is not None:
                self._clip(self.clip_norm)
        self.update(self.optimizer.step)
        total = torch.stack(losses).sum()
        return total / (sum(map(self.count, batches)) or 1) if self.reduction == "sum" else total

    def _step_together(self, batches: list[Any], loss_of: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Take a step of FSDP2, in which all ranks run the same number of parts: each has collectives."""
        self.refuse_batch_norm()
        self.model.zero_grad(set_to_none=True)
        self.phase = "split"
        with self._naming_the_rank():
            count = float(sum(map(self.count, batches))) if self.reduction == "sum" else 0.0
            parts = [self._within_budget(batch, self.budget) for batch in batches]
            ranks = gather_json([count, [len(each) for each in parts]])
            if len(lengths := {len(numbers) for _, numbers in ranks}) > 1:
                raise ValueError(f"all ranks must give a step the same number of batches, got {sorted(lengths)}")
            numbers = np.max([numbers for _, numbers in ranks], axis=0).tolist()
            weighted = [pair for pairs in map(self._in_parts, parts, numbers) for pair in pairs]
        factor = 1.0  # FSDP2 averages over the ranks
        if self.reduction == "mean":
            factor = 1 / len(batches)
        elif self.reduction == "sum":
            factor = len(ranks) / (sum(each for each, _ in ranks) or 1.0)
        losses = []
        for part, weight in weighted:
            self.phase = "forward"
            with self._naming_the_rank(part), running_part():
                loss = loss_of(part) * (weight * factor)
                self.phase = "backward"
                torch.autograd.backward(loss)
            losses.append(loss.detach())
            del loss  # its graph would be there in the forward of the next part
        with self._naming_the_rank():
            if self.clip_norm is not None:
                self.phase = "clipping"
                clip_gradients(self.model, self.clip_norm)
            self.phase = "optimizer"
            self.optimizer.step()
        self.steps += 1
        extra = sum(numbers) - len(numbers)
        self._split_steps += extra > 0
        self._extra_parts += extra
        total = torch.stack(losses).sum()
        return total / (factor * (count or 1)) if self.reduction == "sum" else total

    def _in_parts(self, parts: list[Any], number: int) -> list[tuple[Any, float]]:
        """Return this many parts of a batch with their weights: smaller ones, and if there are none, one again."""
        parts = list(parts)
        while len(parts) < number:
            for place in sorted(range(len(parts)), key=lambda place: -self.cost(parts[place])):
                smaller = self.split(parts[place])
                if 1 < len(smaller) <= number - len(parts) + 1:
                    parts[place : place + 1] = smaller
                    break
            else:
                break
        weights = [1.0] * len(parts)
        if self.reduction == "mean" and len(parts) > 1:
            counts = [float(self.count(part)) for part in parts]
            weights = [count / (sum(counts) or 1) for count in counts]
        weighted = list(zip(parts, weights, strict=True))
        # The other ranks wait for each pass, but a mean over nothing is NaN as a rule.
        counted_parts = [(part, weight) for part, weight in weighted if weight] or weighted
        cheapest = min((part for part, _ in counted_parts), key=self.cost)
        return counted_parts + [(cheapest, 0.0)] * (number - len(counted_parts))

    @contextmanager
    def _naming_the_rank(self, part: Any = None) -> Iterator[None]:
        """Raise an out-of-memory error of FSDP2 with the rank, the part (None outside the passes) and the cure."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            text = f"rank {dist.get_rank()} ran out of memory in the {self.phase} of step {self.steps}"
            cure = "with a smaller budget of the sampler"
            if self.phase in ("clipping", "optimizer"):
                cure = "on more ranks, or with foreach=False of the optimizer, which takes less memory"
            elif part is not None:
                try:
                    samples, cost = self.length(part), self.cost(part)
                    text += f", with {counted(samples, 'sample')} ({self._sizes(part)}; cost {cost:.10g})"
                    if samples > 1:
                        cure += (
                            f", or with OOMGuard(budget={self._budget.shrink * cost:.6g}), which splits such batches"
                        )
                except Exception as failed:  # the error that is raised is the one of the memory
                    text += f", with a part whose length or cost failed ({type(failed).__name__}: {failed})"
            raise torch.OutOfMemoryError(
                f"{text}: {error}. The other ranks wait for this one, so the step cannot be repeated: end all "
                f"processes, and resume from the last checkpoint {cure}"
            ) from error

    @contextmanager
    def on_all_ranks(self) -> Iterator[None]:
        """Let an error of this rank be raised on the others too, which wait for it in their next check.

        There must be no collective in the block, but for those that the guard checks its ranks with.
        """
        try:
            yield
        except Exception as error:
            if self._group is not None and error is not self._told:
                with suppress(RuntimeError):
                    self._agree(f"{type(error).__name__}: {error}", 0.0, room=True, failed=_BROKEN)
                self._told = error
            raise

    def add(
        self, batch: Any, run: Run, whole: Callable[[], Any] | None = None, share: float = 1.0
    ) -> torch.Tensor | None:
        """Compute the gradients of a batch, in parts if necessary, and add them to those of the step's earlier ones.

        If it runs out of memory, the earlier batches of the step run once more: what has failed may have left a share
        of its gradients.

        Args:
            batch: A batch of this rank.
            run: Forward and backward of a part, its loss times a weight.
            whole: In place of ``run`` at the first try, if nothing is split; its result is not used.
            share: Weight of the batch in the step.

        Returns:
            The sum of the results of ``run``, None if ``whole`` ran or a sample does not fit.

        Raises:
            ValueError: If BatchNorm is in training mode.
        """
        with self.on_all_ranks():
            if not self._batches:
                self.refuse_batch_norm()
                self.model.zero_grad(set_to_none=True)
                self._failing, self._lost = math.inf, None
            added = _Batch(batch, self._within_budget(batch, self.budget), run, share, TrainingState(None))
            self._batches.append(added)
            if self._lost is None:
                self._complete(added, whole)
            return added.loss

    def finish(self) -> None:
        """Reduce the gradients of the added batches over the ranks.

        Raises:
            torch.OutOfMemoryError: If a single sample does not fit, on all ranks.
        """
        batches, self._batches = self._batches, []
        with self.on_all_ranks():
            count = float(sum(self.count(each.batch) for each in batches)) if self.reduction == "sum" else 0.0
        self._reduce(count, self._lost)
        self.steps += 1
        extra = sum(len(each.parts) - 1 for each in batches)
        self._split_steps += extra > 0
        self._extra_parts += extra

    def _complete(self, last: _Batch, whole: Callable[[], Any] | None) -> None:
        """Run the last batch; where memory runs out, run all batches of the step again, in smaller parts."""
        failing, place, failed = last, *self._try(last, whole)
        while failed is not None:
            for parameter in self.model.parameters():
                parameter.grad = None
            free_memory()
            self._lost = self._make_smaller(failing, place, failed)
            if self._lost is not None:
                return
            for each in self._batches:
                each.before.restore()  # the random state
                failing, place, failed = each, *self._try(each)
                if failed is not None:
                    break

    def _make_smaller(self, failing: _Batch, place: int, failed: str) -> str | None:
        """Split the part of a batch that ran out of memory, and those that cost as much; the error if it cannot be."""
        part = failing.parts[place]
        smaller, limit = self.split(part), self.cost(part)
        if len(smaller) > 1:
            self._failing = min(self._failing, limit)
        self._record(part, self.phase, failed)
        if len(smaller) < 2:
            return self._name_of(failing.batch, sum(self.length(each) for each in failing.parts[:place]), failed)
        failing.parts = [
            half
            for each in failing.parts
            for half in (self.split(each) if self.cost(each) >= limit else [each]) or [each]
        ]
        return None

    def _clip(self, clip_norm: float) -> None:
        """Clip the gradients; once more with the memory of what is not used."""

        def clip() -> None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)

        failed = out_of_memory(clip)
        if failed is not None:
            free_memory()
            failed = out_of_memory(clip)
        if failed is not None:
            self._agree(f"the norm of the gradients does not fit: {failed}", 0.0, room=True)

    def update(self, step: Callable[[], object]) -> None:
        """Run the update of the optimizer; once more after it ran out of memory.

        Raises:
            torch.OutOfMemoryError: If it fails again, or weights have changed without a copy; on all ranks.
        """
        copy = OptimizerCopy(self.optimizer) if self.copy_weights or not self._updated else None
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [] if copy is None else gradient_copies(parameters)
        tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
        keys = {parameter: set(entry) for parameter, entry in self.optimizer.state.items()}
        tensors += [v for entry in self.optimizer.state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
        versions = [tensor._version for tensor in tensors]
        lost = None
        failed = out_of_memory(step)
        if failed is not None:
            free_memory()
            self._record(None, "optimizer", failed)
            if copy is not None:
                copy.restore()
                for gradient, before in gradients:
                    before.restore(gradient)
            elif any(tensor._version != version for tensor, version in zip(tensors, versions, strict=True)):
                lost = f"the optimizer stopped half-way, set copy_weights=True: {failed}"
            elif not _raises_versions(self.optimizer):
                lost = f"the optimizer may have stopped half-way, set copy_weights=True: {failed}"
            else:
                for parameter, entry in list(self.optimizer.state.items()):
                    for key in set(entry) - keys.get(parameter, set()):
                        del entry[key]
                    if not entry:
                        del self.optimizer.state[parameter]
            if lost is None:
                failed = out_of_memory(step)
                lost = None if failed is None else f"the optimizer does not fit: {failed}"
        self._updated = True
        self._agree(lost, 0.0, room=True)

    def refuse_batch_norm(self) -> None:
        """Refuse a model with BatchNorm in training mode: its output depends on the whole batch."""
        if any(map(_takes_statistics, self._norms)):
            raise ValueError(
                "model must have no BatchNorm in training mode or without running statistics, and no InstanceNorm that "
                "tracks them, because the statistics of a part differ from those of the full batch: use LayerNorm or "
                "GroupNorm, or put these modules into eval()"
            )

    def _within_budget(self, batch: Any, budget: float) -> list[Any]:
        """Split a batch until its parts cost no more than the budget."""
        if self.cost(batch) <= budget or len(parts := self.split(batch)) < 2:
            return [batch]
        return [smaller for part in parts for smaller in self._within_budget(part, budget)]

    def _try(self, batch: _Batch, whole: Callable[[], Any] | None = None) -> tuple[int, str | None]:
        """Run all parts of a batch; return the place of one that ran out of memory, and its error."""
        total: torch.Tensor | None = None
        parts, run = batch.parts, batch.run
        weights = [1.0] * len(parts)
        if self.reduction == "mean" and len(parts) > 1:  # else nothing is counted, which may wait for the device
            counts = [float(self.count(part)) for part in parts]
            weights = [count / (sum(counts) or 1) for count in counts]
        for place, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            if weight == 0 and any(weights):
                continue  # its mean is over nothing, NaN as a rule
            found: list[torch.Tensor | None] = [None]

            def work(part: Any = part, weight: float = weight, found: list[torch.Tensor | None] = found) -> None:
                if whole is not None and len(parts) == 1:
                    self.phase = "forward or backward"
                    whole()
                else:
                    found[0] = run(part, weight * batch.share)

            with running_part():
                failed = out_of_memory(work)
            if failed is not None:
                return place, failed
            total = found[0] if total is None or found[0] is None else total + found[0]
        batch.loss = total
        return -1, None

    def _reduce(self, count: float, lost: str | None) -> None:
        """Check that all ranks have their gradients, and reduce them."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if self._group is None:
            self._agree(lost, count, room=True)
            total = count if self.reduction == "sum" else 1.0
        else:
            flat: list[torch.Tensor] = []
            no_room = None if lost else out_of_memory(lambda: flat.extend(_flat_gradients(parameters)))
            answer = self._agree(lost, count, room=no_room is None)
            total = answer.total if self.reduction == "sum" else float(dist.get_world_size(self._group))
            used = [p for p, has in zip(self.model.parameters(), answer.gradients, strict=True) if has]
            if answer.room:
                _reduce_flat(flat, parameters, used, self._group)
            else:
                flat.clear()
                self._reduce_each(used)
        if total not in (0.0, 1.0):  # without a target there is no gradient
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(total)

    def _reduce_each(self, used: Sequence[torch.nn.Parameter]) -> None:
        """Sum gradients over the ranks one by one, if there is no memory for all of them in one tensor."""

        def fill() -> None:
            for parameter in used:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

        failed = out_of_memory(fill)
        self._agree(failed and f"a gradient that another rank has does not fit: {failed}", 0.0, room=True)
        for parameter in used:
            dist.all_reduce(parameter.grad, group=self._group)

    def _agree(self, lost: str | None, count: float, room: bool, failed: int = _LOST) -> _Answer:
        """Return what all ranks say together; raise on all ranks if one has failed."""
        gradients = [parameter.grad is not None for parameter in self.model.parameters()]
        if self._group is None:
            self._learn(self._failing)
            if lost is not None:
                raise torch.OutOfMemoryError(lost)
            return _Answer(count, room, gradients)
        place, world = 4 * dist.get_rank(self._group), dist.get_world_size(self._group)
        message = np.zeros(len(self._answers))
        message[place : place + 4] = lost is not None and failed, count, self._failing, room
        message[4 * world :] = gradients
        self._answers.copy_(torch.from_numpy(message))
        dist.all_reduce(self._answers, group=self._group)  # in place: an all_gather allocates
        message = self._answers.cpu().numpy()  # the one time that a step waits for the device
        answers = message[: 4 * world].reshape(world, 4)
        self._learn(float(answers[:, 2].min()))
        if answers[:, 0].any():
            texts: list[str | None] = [None] * world
            dist.all_gather_object(texts, lost, group=self._group)
            rank = int(np.flatnonzero(answers[:, 0])[0])
            kind = torch.OutOfMemoryError if answers[rank, 0] == _LOST else RuntimeError
            self._told = kind(f"rank {rank}: {texts[rank]}")
            raise self._told
        return _Answer(float(answers[:, 1].sum()), bool(answers[:, 3].all()), (message[4 * world :] > 0).tolist())

    def _learn(self, failing: float) -> None:
        """Take note of the lowest cost that ran out of memory in this step on any rank."""
        if failing < math.inf:
            self._budget.add(self.steps, failing)
        self._failing = math.inf

    def _record(self, part: Any, phase: str, failed: str) -> None:
        samples, sizes = 0, "the update"
        if part is not None:
            samples, sizes = self.length(part), self._sizes(part)
        event = OOMEvent(self.steps, phase, samples, sizes, self.budget, failed)
        self.events.append(event)
        budget = f"the budget is now {event.budget:g}"
        if math.isinf(event.budget):
            budget = f"still no budget: a second such step within {self._budget.window} steps sets one"
        _LOGGER.warning(
            "step %d ran out of memory in the %s with %s samples (%s); %s: %s",
            *(event.step, event.phase, event.samples, event.sizes, budget, event.error),
        )

    def _sizes(self, part: Any) -> str:
        """Return the sizes of a part as text, or what failed in ``sizes_of``: no text stops a step that can go on."""
        if self.sizes_of is None:
            return batch_shapes(part)
        try:
            return describe(self.sizes_of(part))
        except Exception as error:
            return f"sizes_of failed: {type(error).__name__}: {error}"

    def _name_of(self, batch: Any, position: int, failed: str) -> str:
        index = "" if self.indices is None else f", index {int(self.indices(batch)[position])} of the dataset,"
        return f"sample {position} of the batch{index} does not fit into memory by itself: {failed}"


def _flat_gradients(parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return all gradients in one tensor per dtype."""
    flat: list[torch.Tensor] = []
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters if p.dtype == dtype]
        flat.append(torch.cat([piece.reshape(-1) for piece in pieces]))
    return flat


def _reduce_flat(
    flat: list[torch.Tensor],
    parameters: Sequence[torch.nn.Parameter],
    used: Sequence[torch.nn.Parameter],
    group: Any,
) -> None:
    """Sum gradients over the ranks; one that no rank has used stays None."""
    for tensor in flat:
        dist.all_reduce(tensor, group=group)
    dtypes = list(dict.fromkeys(p.dtype for p in parameters))
    places = dict.fromkeys(dtypes, 0)
    known = set(used)
    for parameter in parameters:
        start = places[parameter.dtype]
        places[parameter.dtype] = start + parameter.numel()
        found = flat[dtypes.index(parameter.dtype)][start : start + parameter.numel()].view_as(parameter)
        if parameter.grad is not None:
            parameter.grad.copy_(found)
        elif parameter in known:
            parameter.grad = found  # a copy may not fit, and the other ranks would wait for this one


def _some(batches: Iterable[Any]) -> list[Any]:
    """Return the batches of a step; refuse none."""
    found = list(batches)
    if not found:
        raise ValueError("batches must hold at least one batch, got none")
    return found


def _names(thing: object) -> set[str]:
    return {base.__name__ for base in type(thing).__mro__}


def _is_sharded(model: torch.nn.Module) -> bool:
    return any({"FullyShardedDataParallel", "DeepSpeedEngine"} & _names(module) for module in model.modules())


def _takes_statistics(norm: _NormBase) -> bool:
    """Whether a part of a batch gives other outputs, or leaves other running statistics, than the full batch."""
    if isinstance(norm, _BatchNorm):
        return norm.training or norm.running_mean is None
    return norm.training and norm.track_running_stats


def _raises_versions(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each write of the optimizer raises a tensor's version; ``.data`` and third-party kernels do not."""
    bases = type(getattr(optimizer, "optimizer", optimizer)).__mro__  # accelerate wraps optimizers
    return any(base.__module__.startswith("torch.optim.") and base is not torch.optim.Optimizer for base in bases)
