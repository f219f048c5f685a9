"""Batches by size in Hugging Face's ``Trainer``, and in trainers that are built on it."""

import json
import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from headrace.size_aware_batching._shared.checks import shown
from headrace.size_aware_batching._shared.columns import list_lengths
from headrace.size_aware_batching._shared.warnings import warn
from headrace.size_aware_batching.distributed import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.integrations.accelerate import PreparedBatchSampler
from headrace.size_aware_batching.integrations.trainer_evaluation import (
    EvaluationLoader,
    WeightedMean,
    gather_rows,
    in_order_of_dataset,
    metrics_in_order,
)
from headrace.size_aware_batching.integrations.trainer_events import TrainerEvents
from headrace.size_aware_batching.optimizer_steps import OptimizerStepBatchSampler
from headrace.size_aware_batching.planned_sampler import PlannedSampler
from headrace.size_aware_batching.sizes.read import read_sizes

_KEY = "headrace"  # in a trainer's state
_OF_TRAINER = ("sizes", "max_total_size", "accumulate", "num_replicas", "rank", "mesh")
# What holds in evaluation, too.
_OF_EVALUATION = (
    "strategy",
    "cost",
    "max_items",
    "batch_size_multiple",
    "length_multiple",
    "oversize",
    "max_length",
    "extra_per_sample",
    "window",
)
# Arguments of a trainer that choose the batches themselves: what they must be, and what to do instead.
_REQUIRED: tuple[tuple[str, Any, str], ...] = (
    ("train_sampling_strategy", "random", "batches by size replace it"),
    (
        "dataloader_drop_last",
        False,
        "every epoch has all samples; sampler_options={'tail': 'drop'} drops the last ones",
    ),
    ("auto_find_batch_size", False, "a batch holds max_tokens_per_batch tokens: give a smaller number"),
    ("batch_sampler", "batch_sampler", "batches by size take no account of labels and duplicates"),
)


class SizeAwareTrainerMixin:
    """Batches by size in a Hugging Face ``Trainer``, in training and evaluation: write it before the trainer's class.

    ``class MyTrainer(SizeAwareTrainerMixin, Trainer)`` takes the arguments of ``Trainer``, and ``max_tokens_per_batch``
    in place of ``per_device_train_batch_size`` and ``per_device_eval_batch_size``, which have no effect. It works the
    same with trl's ``SFTTrainer`` and sentence-transformers' ``SentenceTransformerTrainer``.

    **Training.** No batch exceeds the budget. Every epoch has each sample once, and the same number of full optimizer
    steps of ``gradient_accumulation_steps`` batches on every process. ``num_train_epochs``, ``max_steps``, schedules
    and progress bars count these steps. Epochs may have different lengths.

    **Resuming.** Checkpoints hold the position in the data, so ``train(resume_from_checkpoint=...)`` continues there at
    once, on any number of processes and with any ``gradient_accumulation_steps``. While the product of both stays the
    same, so do all optimizer steps. Otherwise the rest of the epoch is distributed to the new steps, and ``max_steps``
    becomes the steps done and the steps left. Another seed, budget, dataset or other options are refused.

    **Evaluation.** The loss is the mean over all targets, whatever the batches, on any number of processes.
    ``compute_metrics`` and ``predict`` get each sample once, in the order of the dataset, if the model returns a row
    for each.

    Args:
        *arguments: Those of the trainer, as are other keywords.
        max_tokens_per_batch: Budget of a batch on one process, with padding, in the unit of the sizes; for sizes of
            shape ``[n, k]`` a sequence of k.
        sampler_options: More arguments of `DistributedSizeAwareBatchSampler`, such as ``{"max_items": 64}``. With
            ``"tokens_per_step"`` those of `OptimizerStepBatchSampler`: every optimizer step holds so many tokens, and
            less than a step of each epoch is left out. By default ``cost`` is ``"padded"``, or ``"sum"`` for a data
            collator with ``padding_free``; ``length_multiple`` is the ``pad_to_multiple_of`` of the data collator, and
            ``seed`` that of the trainer's arguments. Evaluation takes those that decide how batches are filled.
        accept: Differences from a checkpoint to accept, such as ``{"data"}`` for appended samples; see
            ``DistributedSizeAwareBatchSampler.load_state_dict``.

    Raises:
        TypeError: If an argument has the wrong type, or the sizes of a dataset are not known.
        ValueError: If an argument has a value that is not allowed, or a trainer's argument contradicts batches by size;
            when training begins also if the checkpoint is one of other batches.

    Example:
        >>> # class MyTrainer(SizeAwareTrainerMixin, Trainer): ...
        >>> # trainer = MyTrainer(model, arguments, train_dataset=data, max_tokens_per_batch=16_384)
        >>> # trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    """

    args: Any
    accelerator: Any
    compute_metrics: Any
    data_collator: Any
    eval_dataset: Any
    gather_function: Any
    processing_class: Any
    train_dataset: Any

    def __init__(
        self,
        *arguments: Any,
        max_tokens_per_batch: float | Sequence[float],
        sampler_options: Mapping[str, Any] | None = None,
        accept: Collection[str] = (),
        **options: Any,
    ) -> None:
        trainer: Any = super()
        trainer.__init__(*arguments, **options)
        self._budget, self._sampler_options, self._accept = max_tokens_per_batch, dict(sampler_options or {}), accept
        self._sizes: deque[tuple[Any, Any]] = deque(maxlen=16)  # of the latest datasets
        self._checkpoint: str | Path | None = None
        self._eval_loss = WeightedMean(False)
        self._training = _Training()
        this: Any = self
        this.add_callback(self._training)
        self._refuse_arguments()
        self._train_sampler = None if self.train_dataset is None else self._new_train_sampler()

    @property
    def train_batches(self) -> PlannedSampler:
        """The batch sampler of training, of all processes together: its ``report()`` shows the coming epochs.

        Step n of its run is optimizer step n. Call ``exclude`` before ``train``, ``skip`` and ``reweight`` in
        ``on_train_begin`` or ``on_epoch_begin`` of a callback.
        """
        if self._train_sampler is None:
            raise ValueError("train_dataset must be a dataset, got None: give the trainer one")
        return self._train_sampler

    def sizes_of(self, dataset: Any) -> Any:
        """Return the sizes of a dataset's samples; override it where the trainer cannot know them.

        By default a Hugging Face dataset has them in its column ``length`` (``TrainingArguments.length_column_name``),
        else they are the lengths of its ``input_ids``, and another dataset has ``sizes`` or ``num_tokens(index)``.

        Args:
            dataset: The dataset for training, or one for evaluation.

        Returns:
            Numbers of shape ``[n]`` or ``[n, k]``, in any form that `DistributedSizeAwareBatchSampler` accepts.
        """
        columns = getattr(dataset, "column_names", None)
        if columns is None or not hasattr(dataset, "data"):
            return dataset
        length, names = self.args.length_column_name, getattr(self.processing_class, "model_input_names", ["input_ids"])
        if length in columns:
            return dataset[length]
        if names[0] in columns:
            return list_lengths(dataset, names[0])
        raise TypeError(
            f"train_dataset and eval_dataset must have a column {length!r} or {names[0]!r}, got {', '.join(columns)}: "
            "add one, or override sizes_of(dataset) to return the size of each sample"
        )

    def loss_weight(self, inputs: Mapping[str, Any]) -> torch.Tensor | int:
        """Return the number of targets of which the loss of a batch is the mean, in evaluation.

        By default the number of labels that are not -100, without the first of each row for a model that shifts them;
        without ``labels`` the number of rows. Override it for other losses.
        """
        this: Any = self
        labels = inputs.get("shift_labels")
        if labels is None:
            labels = inputs.get("labels")
            if isinstance(labels, torch.Tensor) and getattr(this, "_loss_shifts_labels", False):
                labels = labels[..., 1:]
        if isinstance(labels, torch.Tensor):
            return (labels != -100).sum()
        return next((len(value) for value in inputs.values() if isinstance(value, torch.Tensor) and value.ndim), 1)

    # What a Trainer calls.

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, *arguments: Any, **options: Any) -> Any:
        """Train as ``Trainer.train`` does, from the position of a checkpoint on."""
        if resume_from_checkpoint is True:
            last = import_module("transformers.trainer_utils").get_last_checkpoint(self.args.output_dir)
            resume_from_checkpoint = last or True
        # Without a checkpoint, Trainer says so.
        self._checkpoint = resume_from_checkpoint if isinstance(resume_from_checkpoint, str | Path) else None
        self.args.ignore_data_skip = True  # the loader begins where the checkpoint was saved
        trainer: Any = super()
        return trainer.train(resume_from_checkpoint, *arguments, **options)

    def get_train_dataloader(self) -> Any:
        """Return the loader of this process, at the position of the checkpoint that training resumes from."""
        trainer: Any = super()
        loader = trainer.get_train_dataloader()
        self._refuse_arguments()
        if self._training.has_begun or self._sampled_for != (self._replicas(), self._steps):
            self._train_sampler = self._new_train_sampler()
        sampler, done = self.train_batches, 0
        if self._checkpoint is not None:
            saved = json.loads(Path(self._checkpoint, "trainer_state.json").read_text())
            done = saved["global_step"]
            self._load(sampler, saved.get("stateful_callbacks", {}))
        batches = PreparedBatchSampler(sampler)
        self._training.prepare(
            batches,
            self._by_size(loader, batches, loader.persistent_workers),
            sampler,
            self.args,
            self._replicas(),
            done,
        )
        return self._training

    def set_initial_training_values(self, args: Any, dataloader: Any, *_: Any) -> tuple[Any, ...]:
        """Return epochs and steps as ``Trainer`` does, counted from the position on."""
        if dataloader is not self._training:
            raise ValueError(
                f"the trainer's loader must be that of SizeAwareTrainerMixin, got {type(dataloader).__name__}: leave "
                "get_train_dataloader as it is, and write the mixin before the trainer's class"
            )
        values: tuple[Any, ...] = self._training.initial_values(args)
        return values

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader of this process for a dataset of the evaluation, or the name of one."""
        trainer: Any = super()
        loader = trainer.get_eval_dataloader(eval_dataset)
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        return loader if dataset is None else self._evaluation_loader(loader, dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the loader of this process for ``predict``."""
        trainer: Any = super()
        return self._evaluation_loader(trainer.get_test_dataloader(test_dataset), test_dataset)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate as ``Trainer`` does; the loss is a mean over targets, and rows are in the order of the dataset."""
        trainer: Any = super()
        arguments = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if not isinstance(dataloader, EvaluationLoader):
            return trainer.evaluation_loop(*arguments)
        args, order = self.args, dataloader.order
        compute_metrics, averages = self.compute_metrics, args.average_tokens_across_devices
        if compute_metrics is not None and not args.batch_eval_metrics:
            self.compute_metrics = metrics_in_order(compute_metrics, order)
        args.average_tokens_across_devices = False  # so that a loss is the mean over this process's targets
        if not args.eval_use_gather_object:
            self.gather_function = partial(gather_rows, self.accelerator)
        self._eval_loss = WeightedMean(args.logging_nan_inf_filter)
        try:
            output = trainer.evaluation_loop(*arguments)
        finally:
            self.compute_metrics, args.average_tokens_across_devices = compute_metrics, averages
        if (name := f"{metric_key_prefix}_loss") in output.metrics:
            output.metrics[name] = self._eval_loss.compute(self.accelerator.reduce)
        rows = {field: in_order_of_dataset(getattr(output, field), order) for field in ("predictions", "label_ids")}
        return output._replace(**rows)

    def prediction_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """Evaluate a batch as ``Trainer`` does, and count its targets."""
        weight = self.loss_weight(inputs)
        trainer: Any = super()
        loss, logits, labels = trainer.prediction_step(model, inputs, *arguments, **options)
        if loss is not None:
            self._eval_loss.add(loss, weight)
        return loss, logits, labels

    # How.

    def _refuse_arguments(self) -> None:
        """Refuse arguments that contradict batches by size."""
        for name in _OF_TRAINER:
            if name in self._sampler_options:
                raise ValueError(f"sampler_options must not have {name!r}, which the trainer decides: leave it out")
        if self._sampler_options.get("oversize") == "split":
            raise ValueError(
                'sampler_options must not have oversize="split", whose pieces a data collator does not know: cut long '
                'samples before training, or use "skip"'
            )
        if "tokens_per_step" in self._sampler_options and self._sampler_options.get("tail", "drop") != "drop":
            raise ValueError(
                'tail must be "drop" with tokens_per_step, got "split": a Trainer accumulates the same number of '
                "batches in every optimizer step, and the last one of an epoch may have fewer"
            )
        for name, allowed, cure in _REQUIRED:
            value = getattr(self.args, name, allowed)
            if value != allowed:
                raise ValueError(f"{name} must be {shown(allowed)}, got {shown(value)}: {cure}")
        for name in ("split_batches", "dispatch_batches"):
            if getattr(self.args.accelerator_config, name):
                raise ValueError(
                    f"{name} of accelerator_config must be False, got True: accelerate would cut batches by size into "
                    "equal parts, and lose samples"
                )
        this: Any = self
        if this.get_sp_size() > 1:
            raise ValueError(
                f"sp_size must be 1, got {this.get_sp_size()}: sequence parallelism cuts batches of one length"
            )

    def _replicas(self) -> int:
        """Return the number of processes that read different batches."""
        this: Any = self
        return int(self.args.world_size // (this.get_tp_size() * this.get_cp_size()))

    def _size_array(self, dataset: Any, name: str) -> Any:
        for read, sizes in self._sizes:
            if read is dataset:
                return sizes
        if isinstance(dataset, IterableDataset | Mapping) or not hasattr(dataset, "__len__"):
            raise TypeError(f"{name} must be one dataset with a length, got {type(dataset).__name__}")
        given = self.sizes_of(dataset)
        try:
            sizes = read_sizes(given)
        except TypeError as error:
            if given is not dataset:
                raise
            raise TypeError(f"{error}; or override sizes_of(dataset) of the trainer") from error
        if len(sizes) != len(dataset):
            raise ValueError(f"sizes_of must return a size for each of {len(dataset)} samples, got {len(sizes)} sizes")
        self._sizes.append((dataset, sizes))
        return sizes

    def _options(self) -> dict[str, Any]:
        """Return the options of all samplers, with what follows from the data collator and the trainer's arguments."""
        options, collator = dict(self._sampler_options), self.data_collator
        if not {"cost", "strategy"} & set(options):
            options["cost"] = "sum" if getattr(collator, "padding_free", False) else "padded"
        if options.get("cost") != "sum" and (multiple := getattr(collator, "pad_to_multiple_of", None)):
            options.setdefault("length_multiple", multiple)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return {"seed": seed, **options}

    def _new_train_sampler(self) -> PlannedSampler:
        sizes, options = self._size_array(self.train_dataset, "train_dataset"), self._options()
        replicas, accumulate = self._sampled_for = self._replicas(), self._steps
        if "tokens_per_step" in options:
            options["tail"] = "drop"  # else the last step of an epoch may have fewer batches
            return OptimizerStepBatchSampler(
                sizes, self._budget, accumulate=accumulate, num_replicas=replicas, rank="all", **options
            )
        # A step of the sampler is an optimizer step: so each has all its batches, the last of an epoch too.
        return DistributedSizeAwareBatchSampler(
            sizes, self._budget, num_replicas=replicas * accumulate, rank="all", **options
        )

    @property
    def _steps(self) -> int:
        return int(self.args.gradient_accumulation_steps)

    def _evaluation_loader(self, loader: Any, dataset: Any) -> EvaluationLoader:
        options = {name: value for name, value in self._options().items() if name in _OF_EVALUATION}
        for name in {"by", "group_by"} & self._sampler_options.keys():
            warn(
                f"sampler_options has {name} for the samples of train_dataset, and the evaluation goes without: "
                "evaluate in a loop of your own where they need it"
            )
        batches = DistributedSizeAwareBatchSampler(
            self._size_array(dataset, "eval_dataset"),
            self._budget,
            shuffle=False,
            num_replicas=self._replicas(),
            rank="all",
            **options,
        )
        return EvaluationLoader(self._by_size(loader, batches), batches)

    def _by_size(self, loader: Any, batches: Any, persistent_workers: bool = False) -> Any:
        """Return a loader of other batches of a trainer's loader, distributed over the processes."""
        has_workers = loader.num_workers > 0
        by_size = DataLoader(
            loader.dataset,
            batch_sampler=batches,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context if has_workers else None,
            prefetch_factor=loader.prefetch_factor if has_workers else None,
            persistent_workers=persistent_workers and has_workers,
            generator=torch.Generator(),  # so that the seeds of workers draw nothing from the model's random numbers
        )
        prepared = self.accelerator.prepare(by_size)
        processes = getattr(prepared.batch_sampler, "num_processes", 1)
        if processes != self._replicas():
            raise ValueError(
                f"accelerate must distribute batches over {self._replicas()} processes, got {processes}: the process "
                "mesh has dimensions that SizeAwareTrainerMixin does not know"
            )
        return prepared

    def _load(self, sampler: PlannedSampler, stored: Mapping[str, Any]) -> None:
        """Go to the position of a checkpoint; samples that were excluded before training stay so."""
        if _KEY not in stored:
            raise ValueError(
                "the checkpoint must be one of a SizeAwareTrainerMixin, got one without a position in the data: resume "
                "it as it was saved, or start a new run from its weights"
            )
        excluded = sampler.excluded_indices
        sampler.load_state_dict(stored[_KEY], self._accept)
        if not sampler.remaining:
            sampler.set_epoch(sampler.epoch + 1)
        sampler.exclude(excluded.tolist())


class _Training(TrainerEvents):
    """The loader of a trainer, and the callback that keeps its counts and its checkpoints those of the data."""

    dataset: Any = None
    has_begun = False

    def prepare(self, batches: Any, loader: Any, sampler: PlannedSampler, args: Any, replicas: int, done: int) -> None:
        """Begin a training of so many steps done, where the sampler stands."""
        self.dataset, self.has_begun = loader.dataset, True
        self._batches, self._loader, self._sampler, self._done = batches, loader, sampler, done
        self._args, self._group = args, replicas * args.gradient_accumulation_steps
        self._state: Any = None  # the trainer's
        self._left = self._length = self._most = self._changes = 0
        self._planned: list[int] = []

    def __len__(self) -> int:
        """Return the number of batches of the epoch on each process."""
        return len(self._loader)

    def initial_values(self, args: Any) -> tuple[Any, ...]:
        """Return what ``Trainer.set_initial_training_values`` does."""
        lengths, self._planned = self._steps_of_epochs()
        left = sum(self._planned)
        max_steps = args.max_steps if args.max_steps > 0 else self._done + left
        self._most = max(lengths, default=1)
        # A trainer begins with this epoch, by its own count, and ends before the other.
        first = self._done // self._most
        epochs = first + (len(self._planned) if self._done < max_steps and left else 0)
        samples = len(self.dataset)
        a_step = max(1, round(samples / self._most))
        return epochs, self._most, samples, a_step * max_steps, a_step, self._most * self._steps, max_steps

    @property
    def _steps(self) -> int:
        return int(self._args.gradient_accumulation_steps)

    def _steps_of_epochs(self) -> tuple[list[int], list[int]]:
        """Return the optimizer steps of this epoch and of those that come, and how many of them are left."""
        args, sampler, lengths, left = self._args, copy(self._sampler), list[int](), list[int]()
        by_steps, epochs = args.max_steps > 0, args.num_train_epochs
        epoch = sampler.epoch
        while sum(left) < args.max_steps - self._done if by_steps else epoch < epochs:
            if left:
                sampler.set_epoch(epoch)
            lengths.append(len(sampler) // self._group)
            left.append(sampler.remaining // self._group)
            if not by_steps and epoch + 1 > epochs:  # a part of an epoch
                wanted = math.ceil(lengths[-1] * (epochs - epoch))
                left[-1] = max(0, left[-1] - (lengths[-1] - wanted))
            epoch += 1
        self._sampler.set_epoch(self._sampler.epoch)  # of a mixture, too, which the copy has moved
        return lengths, left

    def __iter__(self) -> Iterator[Any]:
        """Deliver the epoch, from the position that was loaded, else from its beginning."""
        self._length, self._left = len(self._sampler) // self._group, self._sampler.remaining // self._group
        if self._left > self._most:
            raise ValueError(
                f"an epoch must not become longer than {self._most} steps in a run, got {self._left}: resume from the "
                "last checkpoint, so that the trainer counts its steps anew"
            )
        if self._args.max_steps <= 0 and self._planned[:1] != [self._left]:  # the run was changed
            self._done = self._state.global_step
            self._planned = self._steps_of_epochs()[1]
            self._state.max_steps = self._done + sum(self._planned)
        self._changes = self._count_changes()
        self._loader.set_epoch(self._sampler.epoch)
        return iter(self._batches.delivered(self._loader))

    def _count_changes(self) -> int:
        names = ("exclude", "skip", "reweight")
        return sum(name in change for change in self._sampler.state_dict()["run"] for name in names)

    def on_epoch_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Take the state of the trainer, whose number of epochs is that of the run."""
        self._state = state
        if self._args.max_steps <= 0:
            state.num_train_epochs = math.ceil(self._args.num_train_epochs)

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """Store the position. End the trainer's epoch with that of the data, and training with the last one."""
        if self._count_changes() != self._changes:
            raise ValueError(
                "exclude, skip and reweight must be called between two epochs of a Trainer, whose loader reads ahead: "
                "call them in on_train_begin or on_epoch_begin of a callback. A TrainerLoader follows changes at any "
                "step"
            )
        self._left -= 1
        state.epoch = self._sampler.epoch + 1 - self._left / self._length
        state.stateful_callbacks[_KEY] = self._batches.state_dict()
        control.should_epoch_stop |= not self._left
        if state.global_step >= state.max_steps:
            control.should_training_stop = True

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Go on to the next epoch."""
        if not self._left:
            self._planned = self._planned[1:]
            self._batches.set_epoch(self._sampler.epoch + 1)
