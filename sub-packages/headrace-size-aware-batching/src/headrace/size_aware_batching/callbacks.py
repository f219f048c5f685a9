"""Lightning callbacks: run the worst batches before training, and rescue steps that run out of memory."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any, Self

import numpy as np
import torch

from headrace.size_aware_batching._shared.display import described, inner, never_raises
from headrace.size_aware_batching.memory.data_parallel import connect, unsynchronized
from headrace.size_aware_batching.memory.device import free_memory, out_of_memory
from headrace.size_aware_batching.memory.oom_guard import OOMEvent, OOMGuard, OOMReport
from headrace.size_aware_batching.memory.sharded import is_fully_sharded
from headrace.size_aware_batching.memory.snapshot import unchanged
from headrace.size_aware_batching.memory.worst_batches import raise_if_out_of_memory, with_optimizer_state
from headrace.size_aware_batching.planning.pieces import as_indices

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loops.optimization.automatic import ClosureResult
    from lightning.pytorch.trainer import call
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
    from torchmetrics import Metric, MetricCollection  # Lightning brings it
except ImportError as error:
    raise ImportError(
        f"the callbacks need Lightning ({error}): pip install headrace-size-aware-batching[lightning]"
    ) from error


class WorstBatchesFirst(Callback):
    """Runs the most expensive batches of the epoch before training, so that an out-of-memory error comes at once.

    Weights, optimizer state, random state and metrics are restored afterwards. Every rank runs the same batches, and
    all ranks raise an error if one of them runs out of memory. If the optimizer has no state yet, the most expensive
    batch runs twice.

    Args:
        k: Number of batches.
        sampler: The sampler, with ``worst_batches``; by default the ``batch_sampler`` of the training loader.
        batches_of: Builds a batch, on the host, of the samples with these indices, int64, shape ``[n]``. With pieces
            (``oversize="split"``) it receives the list that the sampler yields. By default it uses the ``dataset`` and
            the ``collate_fn`` of the loader.

    Raises:
        ValueError: From ``fit``, if the loader has no such sampler, or the module uses manual optimization.
        torch.OutOfMemoryError: From ``fit``, if a batch does not fit; the error names its sizes.

    >>> WorstBatchesFirst(k=2).k
    2
    """

    def __init__(self, k: int = 4, *, sampler: Any = None, batches_of: Callable[[Any], Any] | None = None) -> None:
        self.k, self.sampler, self.batches_of = k, sampler, batches_of

    @never_raises
    def __repr__(self) -> str:
        named = f", sampler={inner(self.sampler)}" if self.sampler is not None else ""
        return f"{type(self).__name__}(k={self.k}{named})"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run the batches, and restore the state."""
        refuse_manual_optimization(pl_module, type(self).__name__)
        loader: Any = trainer.train_dataloader
        sampler: Any = getattr(loader, "batch_sampler", None) if self.sampler is None else self.sampler
        if not callable(getattr(sampler, "worst_batches", None)):
            raise ValueError(
                f"the loader's batch_sampler must have worst_batches, as DistributedSizeAwareBatchSampler has, got "
                f"{type(sampler).__name__}: give WorstBatchesFirst sampler= and batches_of="
            )
        batches_of = self.batches_of or partial(collated, loader)
        model = trainer.strategy.model
        connect(model)
        with unchanged(model, trainer.optimizers), unsynchronized(model), ExitStack() as stack:
            for metric in new_metrics(pl_module):  # called in reverse: a collection last
                stack.callback(metric.reset)
            for name in ("log", "log_dict"):  # these batches must not be logged
                pl_module.__dict__[name] = lambda *_, **__: None
                stack.callback(pl_module.__dict__.pop, name)
            for number, indices in with_optimizer_state(sampler.worst_batches(self.k), trainer.optimizers):
                failed = out_of_memory(partial(self._step, trainer, pl_module, batches_of, indices))
                raise_if_out_of_memory(sampler, indices, number, failed)
        pl_module.zero_grad(set_to_none=True)
        free_memory()

    @staticmethod
    def _step(trainer: Trainer, module: LightningModule, batches_of: Callable[[Any], Any], indices: list[Any]) -> None:
        batch = trainer.precision_plugin.convert_input(batches_of(as_indices(indices)))
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        loss = ClosureResult.from_training_step_output(training_step(trainer, module, batch, 0)).closure_loss
        module.zero_grad(set_to_none=True)
        if loss is not None:
            torch.autograd.backward(loss)
        for optimizer in trainer.optimizers:
            type(optimizer).step(optimizer)  # not the trainer's own, which counts


class OOMRescue(Callback):
    """Completes training steps that run out of memory, as `OOMGuard` does, under Lightning's ``Trainer``.

    ``training_step`` must return the mean over the samples of the batch (or over its ``count``), or, with
    ``reduction="scaled"``, the result of `token_weighted_loss`. It may run once for each part of a batch, on one rank
    alone: count targets in ``on_train_batch_start``, which runs once for the whole batch. `global_num_tokens`,
    collectives, and logging a step with ``sync_dist=True`` raise in it. Metrics that it logs count every part, and
    every attempt that ran out of memory. Under DDP one all-reduce after the backward pass reduces the gradients, before
    clipping.

    Args:
        options: Keyword arguments of `OOMGuard`: ``reduction``, ``count``, ``split``, ``length``, ``indices``,
            ``sizes_of``, ``cost``, ``budget``, ``shrink``, ``window``, ``copy_weights``. The trainer clips gradients
            itself.

    Raises:
        RuntimeError: From ``fit``, if ``training_step`` communicates or counts the targets of its part.
        TypeError: If an option is not one of these; from ``fit``, if the model is sharded (FSDP, FSDP2).
        ValueError: From ``fit``, if BatchNorm is in training mode, there are several optimizers, or the module uses
            manual optimization.

    >>> OOMRescue(shrink=0.9).events
    []
    """

    def __init__(self, **options: Any) -> None:
        if refused := {"model", "optimizer", "clip_norm"} & set(options):
            raise TypeError(f"options must not contain {sorted(refused)}: OOMRescue gets them from the trainer")
        if options.get("reduction") == "sum":
            raise ValueError('reduction must be "mean" or "scaled", got "sum": Lightning does not rescale the loss')
        self.options = options
        self.guard: OOMGuard | None = None
        self._learned: dict[str, Any] = {}
        self._batch: tuple[Any, int] = None, 0
        self._stack = ExitStack()

    @never_raises
    def __repr__(self) -> str:
        options = [f"{name}={described(value)}" for name, value in self.options.items()]
        state = "not training" if self.guard is None else f"{len(self.events)} events"
        return f"{type(self).__name__}({', '.join([*options, state])})"

    @property
    def events(self) -> list[OOMEvent]:
        """Steps that ran out of memory so far."""
        return [] if self.guard is None else self.guard.events

    def report(self) -> OOMReport:
        """Return how many steps were split on this rank and what that cost, as `OOMGuard` does.

        Raises:
            RuntimeError: If no training has begun.
        """
        if self.guard is None:
            raise RuntimeError("report() needs a training that has begun: call it after trainer.fit, or in its hooks")
        return self.guard.report()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the optimizer's steps."""
        refuse_manual_optimization(pl_module, type(self).__name__)
        if len(trainer.optimizers) != 1:
            raise ValueError(f"OOMRescue needs one optimizer, got {len(trainer.optimizers)}")
        model, optimizer, strategy = trainer.strategy.model, trainer.optimizers[0], trainer.strategy
        if model is None:
            raise ValueError("OOMRescue needs a strategy that has a model, got none")
        if is_fully_sharded(model):
            raise TypeError(
                "OOMRescue must train a model that is not sharded, got one of FSDP2, of which no step can be repeated: "
                "train it in a loop of your own, where OOMGuard splits batches before the step"
            )
        self.guard = OOMGuard(model, optimizer, **self.options)
        if self._learned:
            self.guard.load_state_dict(self._learned)
        self._stack = ExitStack()
        self._stack.enter_context(self.guard)
        loop, strategy_step = trainer.fit_loop.epoch_loop.automatic_optimization, strategy.optimizer_step
        make_closure, update, guard = loop._make_closure, optimizer.step, self.guard

        def closure_in_parts(*arguments: Any, **options: Any) -> Any:
            made = make_closure(*arguments, **options)
            made.__dict__["closure"] = partial(self._gradients, trainer, pl_module, made.closure)
            return made

        def optimizer_step(optimizer: Any, closure: Any, model: Any = None, **arguments: Any) -> Any:
            def closure_of_last() -> Any:
                loss = closure()
                guard.finish()
                return loss

            return strategy_step(optimizer, closure_of_last, model, **arguments)

        self._replace(loop, "_make_closure", closure_in_parts)  # accumulated batches have nothing else
        self._replace(strategy, "optimizer_step", optimizer_step)

        def step(_: Any, closure: Callable[[], Any] | None = None, *arguments: Any, **options: Any) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad(), guard.on_all_ranks():  # Lightning clips in the closure
                    loss = closure()
            guard.update(lambda: update(*arguments, **options))
            return loss

        step.__dict__.update(getattr(update, "__func__", update).__dict__)  # schedulers leave a mark on it
        self._replace(optimizer, "step", MethodType(step, optimizer))

    def on_train_batch_start(  # Lightning names the arguments
        self,
        trainer: Trainer,  # noqa: ARG002 -- Lightning's hook
        pl_module: LightningModule,  # noqa: ARG002 -- Lightning's hook
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Store the batch."""
        self._batch = batch, batch_idx

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 -- Lightning's hook
        """Restore the optimizer's steps."""
        self._stack.close()
        self._batch = None, 0

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002 -- Lightning's hook
        """Restore the optimizer's steps."""
        self.on_train_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned about the budget, for the checkpoint."""
        return self._learned if self.guard is None else self.guard.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what the run of a checkpoint has learned about the budget."""
        self._learned = state_dict

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        before = owner.__dict__.get(name)
        owner.__dict__[name] = value
        if before is None:
            self._stack.callback(owner.__dict__.pop, name)
        else:
            self._stack.callback(owner.__dict__.__setitem__, name, before)

    def _gradients(self, trainer: Trainer, module: LightningModule, closure: Callable[[], ClosureResult]) -> Any:
        """Compute the gradients of the current batch, in place of Lightning's closure."""
        if self.guard is None:
            raise RuntimeError("OOMRescue must be a callback of the trainer that runs the module")
        guard, (batch, batch_idx), accumulated = self.guard, self._batch, trainer.accumulate_grad_batches
        results: list[ClosureResult] = []

        def run(part: Any, weight: float) -> torch.Tensor | None:
            guard.phase = "forward"
            output = training_step(trainer, module, part, batch_idx)
            loss = ClosureResult.from_training_step_output(output, accumulated).closure_loss
            if loss is None:
                return None
            found = (loss * weight).detach()
            guard.phase = "backward"
            call._call_strategy_hook(trainer, "backward", loss * weight, trainer.optimizers[0])
            return found

        def whole() -> None:
            results.append(closure())

        with torch.enable_grad():
            loss = guard.add(batch, run, whole)
        return ClosureResult(loss) if loss is not None or not results else results[0]


class TokensPerStep(Callback):
    """Sets Lightning's gradient accumulation to the number of batches in each step of an `OptimizerStepBatchSampler`.

    The callback sets ``trainer.accumulate_grad_batches`` before each batch. The number is also correct when the loader
    prefetches, in a resumed epoch, and on another number of ranks. The trainer divides the loss of each batch by it.
    ``max_steps``, ``global_step`` and schedulers with ``interval="step"`` count optimizer steps. For the length of a
    schedule use the sampler's ``num_optimizer_steps``, not ``trainer.estimated_stepping_batches``.

    Args:
        sampler: The batch sampler, with ``accumulation``; by default that of the training loader.

    Raises:
        ValueError: In ``fit``, if the loader has no such sampler, the module uses manual optimization, the strategy
            accumulates by itself (DeepSpeed), or the trainer's ``accumulate_grad_batches`` is set.

    >>> # lightning.Trainer(callbacks=[TokensPerStep()])
    """

    accumulates_tokens = True  # what a data module looks for

    def __init__(self, sampler: Any = None) -> None:
        self.sampler = sampler
        self._begun: tuple[int, Any, Any] | None = None  # number of the first batch, micro-batches, where steps end

    @never_raises
    def __repr__(self) -> str:
        of = "the loader's sampler" if self.sampler is None else inner(self.sampler)
        return f"{type(self).__name__}({of})"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the loader, the module and the strategy."""
        refuse_manual_optimization(pl_module, type(self).__name__)
        if trainer.strategy.handles_gradient_accumulation:
            raise ValueError(
                f"TokensPerStep needs a strategy that leaves accumulation to the trainer, got "
                f"{type(trainer.strategy).__name__}: give the sampler accumulate=, and the strategy the same number"
            )
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"accumulate_grad_batches must be 1 for TokensPerStep, got {trainer.accumulate_grad_batches}: leave it "
                "out, the callback sets it"
            )
        self.on_train_epoch_start(trainer)

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        """Read the accumulation of each step of the epoch."""
        batches = trainer.fit_loop.epoch_loop.batch_idx + 1
        trainer.accumulate_grad_batches = BatchesOfStep(self._accumulation(trainer).max(initial=1), batches)
        self._begun = None

    def on_train_batch_start(  # Lightning names the arguments
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002 -- Lightning's hook
        batch: Any,  # noqa: ARG002 -- Lightning's hook
        batch_idx: int,
    ) -> None:
        """Set the number of batches in the step of this batch."""
        if self._begun is None:
            counts = self._accumulation(trainer)
            self._begun = batch_idx, counts, np.cumsum(counts)
        first, counts, ends = self._begun
        step = int(np.searchsorted(ends, batch_idx - first, side="right"))
        if step == len(counts):
            raise RuntimeError(f"the loader must give the {ends[-1:]} batches of its sampler, got more of them")
        trainer.accumulate_grad_batches = BatchesOfStep(counts[step], first + int(ends[step] - counts[step]))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 -- Lightning's hook
        """Restore the trainer's setting."""
        trainer.accumulate_grad_batches = 1

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002 -- Lightning's hook
        """Restore the trainer's setting."""
        self.on_train_end(trainer, pl_module)

    def _accumulation(self, trainer: Trainer) -> Any:
        loader: Any = trainer.train_dataloader
        for owner in (self.sampler, loader, getattr(loader, "batch_sampler", None)):
            if owner is not None and (found := getattr(owner, "accumulation", None)) is not None:
                return found
        raise ValueError(
            f"the loader's batch_sampler must have tokens_per_step for TokensPerStep, got a {type(loader).__name__} "
            "without: give the loader an OptimizerStepBatchSampler, or leave the callback out; where "
            "the loader hides its sampler, give it as TokensPerStep(sampler=...)"
        )


class BatchesOfStep(int):
    """Batches of a step of the optimizer; numbers of batches are taken modulo it from the step's first one on.

    A trainer asks only for ``number % accumulate_grad_batches``, which takes all steps for equally long.

    >>> batches = BatchesOfStep(3, first=10)
    >>> 10 % batches, 12 % batches, 13 % batches, 9 / batches
    (0, 2, 0, 3.0)
    """

    first: int

    def __new__(cls, count: int, first: int = 0) -> Self:
        """Make one of a count and the number of the step's first batch."""
        made = super().__new__(cls, count)
        made.first = first
        return made

    def __rmod__(self, number: int) -> int:
        return (number - self.first) % int(self)


def training_step(trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> Any:
    """Run the module's training_step as the trainer does."""
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    arguments = (batch, batch_idx) if takes_index else (batch,)
    return call._call_strategy_hook(trainer, "training_step", *arguments)


def new_metrics(module: LightningModule) -> list[Metric | MetricCollection]:
    """Return the metrics of a module without updates, collections before their members."""
    found = [metric for metric in module.modules() if isinstance(metric, Metric | MetricCollection)]
    return [metric for metric in found if not any(m.update_count for m in metric.modules() if isinstance(m, Metric))]


def collated(loader: Any, indices: Any) -> Any:
    """Build the batch of these samples as the loader does."""
    dataset, places = loader.dataset, indices.tolist() if isinstance(indices, np.ndarray) else list(indices)
    many = getattr(dataset, "__getitems__", None)
    return loader.collate_fn(many(places) if callable(many) else [dataset[place] for place in places])


def refuse_manual_optimization(module: LightningModule, name: str) -> None:
    """Refuse a module whose training_step calls backward and the optimizer."""
    if not module.automatic_optimization:
        raise ValueError(
            f"{name} needs automatic optimization, got a module with manual optimization: use OOMGuard in the module"
        )
