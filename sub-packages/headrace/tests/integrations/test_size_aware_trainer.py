"""`SizeAwareTrainerMixin` before trainers of transformers, trl and sentence-transformers, in one process and two."""

import json
import re
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counting import SIZES, Change
from datasets import Dataset
from launching import HERE, launch, launcher
from trainers import BUDGET, QUIET, MyTrainer, Texts, causal_loss, llama, tokenizer, tokens, trainer_of
from transformers import DataCollatorForLanguageModeling, TrainerCallback, TrainingArguments

from headrace.size_aware_batching import PackedCollate, PaddedCollate
from headrace.size_aware_batching.integrations import SizeAwareTrainerMixin
from headrace.weighted_sampler import WeightedDistributedSampler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing.*:FutureWarning"),  # trl 1.16 sets it
]


def steps_of(trainer: Any, epoch: int = 0) -> int:
    batches = copy(trainer.train_batches)
    batches.set_epoch(epoch)
    return int(len(batches) // batches.num_replicas)


@pytest.mark.parametrize("accumulated", [1, 3])
def test_an_epoch_has_each_sample_once_in_full_steps(accumulated: int, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=accumulated, dataloader_num_workers=1, save_steps=1000)
    steps = steps_of(trainer)
    trainer.train()
    state, model = trainer.state, trainer.model
    assert model.seen.tolist() == [2] * len(SIZES)
    assert max(SIZES) < model.most <= BUDGET
    assert state.global_step == state.max_steps == 2 * steps
    assert (state.epoch, state.num_train_epochs) == (2, 2)
    for number, samples in enumerate([trainer.train_batches.step(number) for number in (0, steps, 2 * steps - 1)]):
        assert len(samples) == accumulated, number  # a step of the run is an optimizer step


@pytest.mark.parametrize(("accumulated", "epochs"), [(1, 2), (2, 1.5)])
def test_a_resumed_run_trains_the_weights_of_an_unbroken_one(accumulated: int, epochs: float, tmp_path: Path) -> None:
    """Dropout included: what the loader draws is not of the model's random numbers."""
    options: dict[str, Any] = {"gradient_accumulation_steps": accumulated, "num_train_epochs": epochs}
    unbroken = trainer_of(tmp_path / "unbroken", **options)
    unbroken.train()
    first = trainer_of(tmp_path / "broken", **options)
    first.add_callback(Change(None, 0, id, end=12))
    first.train()
    resumed = trainer_of(tmp_path / "broken", **options)
    resumed.train(resume_from_checkpoint=True)  # from step 10
    assert resumed.model.seen.tolist() == unbroken.model.seen.tolist()
    assert torch.equal(resumed.model.weight, unbroken.model.weight)
    assert resumed.state.max_steps == resumed.state.global_step == unbroken.state.global_step
    assert resumed.state.epoch == epochs
    if epochs == 1.5:
        return
    again = trainer_of(tmp_path / "broken", **options)
    again.train(resume_from_checkpoint=True)  # which has ended
    assert again.model.seen.tolist() == unbroken.model.seen.tolist()


def test_max_steps_end_training_inside_an_epoch_and_may_be_more_than_the_epochs(tmp_path: Path) -> None:
    steps = steps_of(trainer_of(tmp_path))
    trainer = trainer_of(tmp_path, max_steps=steps + 2, num_train_epochs=1, eval_strategy="epoch")
    trainer.train()
    assert trainer.state.global_step == steps + 2
    assert trainer.state.epoch == pytest.approx(1 + 2 / steps)
    assert set(trainer.model.seen.tolist()) == {1, 2}
    assert next(logs["epoch"] for logs in trainer.state.log_history if "eval_runtime" in logs) == 1


def test_epochs_of_different_lengths_are_whole(tmp_path: Path) -> None:
    def of_mixture() -> Any:
        mixed = WeightedDistributedSampler(
            range(203), {(0, 100): 2, (100, 203): 1}, epoch_length=400, num_replicas=1, rank=0
        )
        return trainer_of(tmp_path, options={"sampler": mixed, "window": 64}, num_train_epochs=4, save_steps=50)

    trainer = of_mixture()
    assert len({steps_of(trainer, epoch) for epoch in range(4)}) > 1
    trainer.train()
    assert trainer.model.seen.sum() == 4 * 400
    assert trainer.state.global_step == trainer.state.max_steps
    resumed = of_mixture()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-50"))
    assert resumed.model.seen.tolist() == trainer.model.seen.tolist()


class AtEpochs(TrainerCallback):  # type: ignore[misc]  # of a library that may not be there
    """Changes the run where an epoch begins after so many steps."""

    def __init__(self, change: Callable[[], object], at: int) -> None:
        self.change, self.at = change, at

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.at:
            self.change()


def test_samples_are_left_out_between_two_epochs_and_not_inside_one(tmp_path: Path) -> None:
    out = list(range(0, 203, 4))
    trainer = trainer_of(tmp_path)
    trainer.train_batches.exclude(out[:3])
    steps = steps_of(trainer)
    trainer.add_callback(AtEpochs(lambda: trainer.train_batches.exclude(out), at=steps))
    trainer.train()
    seen = trainer.model.seen
    assert seen[out].tolist() == [0] * 3 + [1] * (len(out) - 3)
    assert int(seen.sum()) == 2 * (203 - len(out)) + len(out) - 3
    assert trainer.state.global_step == trainer.state.max_steps < 2 * steps
    refused = trainer_of(tmp_path / "refused")
    refused.add_callback(Change(refused.train_batches, 4, lambda batches: batches.exclude(out)))
    with pytest.raises(ValueError, match="exclude, skip and reweight must be called between two epochs of a Trainer"):
        refused.train()
    resumed = trainer_of(tmp_path / "refused", save_steps=1000)
    resumed.train_batches.exclude(out)
    resumed.train()
    assert not resumed.model.seen[out].any()


def test_appended_samples_are_accepted_by_name_and_other_batches_refused(tmp_path: Path) -> None:
    first = trainer_of(tmp_path, n=150)
    first.add_callback(Change(None, 0, id, end=5))
    first.train()
    with pytest.raises(ValueError, match="accept"):
        trainer_of(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="seed"):
        trainer_of(tmp_path, n=150, seed=1).train(resume_from_checkpoint=True)
    grown = trainer_of(tmp_path, accept={"data"})
    grown.train(resume_from_checkpoint=True)
    assert grown.model.seen.tolist() == [2] * len(SIZES)
    assert grown.state.global_step == grown.state.max_steps
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text('{"stateful_callbacks": {}, "global_step": 5}')
    with pytest.raises(ValueError, match="the checkpoint must be one of a SizeAwareTrainerMixin, got one without"):
        trainer_of(tmp_path, n=150).train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({"train_sampling_strategy": "group_by_length"}, {}, "train_sampling_strategy must be 'random', got 'group_by"),
        ({"dataloader_drop_last": True}, {}, "dataloader_drop_last must be False, got True: every epoch has all"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size must be False, got True"),
        ({"accelerator_config": {"split_batches": True}}, {}, "split_batches of accelerator_config must be False"),
        ({"accelerator_config": {"dispatch_batches": True}}, {}, "dispatch_batches of accelerator_config must be Fal"),
        ({}, {"rank": 0}, "sampler_options must not have 'rank', which the trainer decides"),
        ({}, {"oversize": "split"}, 'sampler_options must not have oversize="split"'),
        ({}, {"tokens_per_step": 2000, "tail": "split"}, 'tail must be "drop" with tokens_per_step, got "split"'),
    ],
)
def test_what_contradicts_batches_by_size_is_refused(
    arguments: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        trainer_of(tmp_path, options=options, **arguments)


def test_another_loader_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(Texts())
    with pytest.raises(ValueError, match="the trainer's loader must be that of SizeAwareTrainerMixin, got DataLoader"):
        trainer.train()


def test_sizes_come_from_a_column_or_from_the_lengths_of_the_tokens(tmp_path: Path) -> None:
    def sizes(data: Any) -> Any:
        arguments = TrainingArguments(str(tmp_path), max_steps=1, **QUIET)
        made = MyTrainer(llama(), arguments, train_dataset=data, max_tokens_per_batch=BUDGET)
        return made.train_batches.sizes.tolist()

    data = tokens()
    lengths = [len(row) for row in data["input_ids"]]
    assert sizes(data) == lengths
    assert sizes(data.shuffle(seed=1).select(range(20))) == [
        len(row) for row in data.shuffle(seed=1).select(range(20))["input_ids"]
    ]
    assert sizes(data.add_column("length", np.full(60, 7))) == [7] * 60
    with pytest.raises(TypeError, match=r"must have a column 'length' or 'input_ids', got text: add one, or override"):
        sizes(Dataset.from_dict({"text": ["a"]}))
    with pytest.raises(TypeError, match=r"override sizes_of\(dataset\) of the trainer"):
        sizes([{"input_ids": [1, 2]}])
    with pytest.raises(TypeError, match=r"train_dataset must be one dataset with a length, got IterableDataset"):
        sizes(data.to_iterable_dataset())


def test_the_collator_decides_what_padding_costs(tmp_path: Path) -> None:
    def batches(collator: Any, **options: Any) -> Any:
        arguments = TrainingArguments(str(tmp_path), **QUIET)
        made = MyTrainer(
            llama(), arguments, train_dataset=tokens(), data_collator=collator, max_tokens_per_batch=BUDGET, **options
        )
        return made.train_batches.options

    padding = DataCollatorForLanguageModeling(tokenizer(), mlm=False, pad_to_multiple_of=16)
    assert (batches(padding).cost, batches(padding).length_multiple) == ("padded", 16)
    packed = batches(PackedCollate(layout="huggingface"), sampler_options={"cost": "sum"})
    assert (packed.cost, packed.strategy) == ("sum", "stratified")


def accuracy(found: list[Any]) -> Callable[[Any], dict[str, float]]:
    def compute(evaluated: Any) -> dict[str, float]:
        found.append(evaluated.label_ids)
        predictions, labels = evaluated
        targets = labels[:, 1:]
        return {"accuracy": float((predictions[:, :-1] == targets)[targets != -100].mean())}

    return compute


@pytest.mark.parametrize("counts_items", [True, False])
def test_evaluation_is_exact_and_in_the_order_of_the_data(counts_items: bool, tmp_path: Path) -> None:
    data, labels = tokens(), list[Any]()
    data = data.add_column("labels", data["input_ids"][:])
    trainer: Any = MyTrainer(
        llama(),
        TrainingArguments(str(tmp_path), **QUIET),
        eval_dataset={"one": data, "other": data.select(range(7))},
        data_collator=PaddedCollate({"labels": -100}, return_mask=True),
        compute_metrics=accuracy(labels),
        preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
        max_tokens_per_batch=BUDGET,
    )
    trainer.model_accepts_loss_kwargs = counts_items
    figures = trainer.evaluate()
    rows = data["input_ids"][:]
    assert figures["eval_one_loss"] == pytest.approx(causal_loss(trainer.model, rows), rel=1e-5)
    assert figures["eval_other_loss"] == pytest.approx(causal_loss(trainer.model, rows[:7]), rel=1e-5)
    assert [row[row != -100].tolist() for row in labels[0]] == rows
    predicted = trainer.predict(data)
    assert [row[row != -100].tolist() for row in predicted.label_ids] == rows
    assert predicted.metrics["test_loss"] == figures["eval_one_loss"]
    with pytest.raises(ValueError, match="train_dataset must be a dataset, got None"):
        _ = trainer.train_batches


def test_a_language_model_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")

    class MySFTTrainer(SizeAwareTrainerMixin, trl.SFTTrainer):  # type: ignore[misc, name-defined]
        """trl's trainer by size."""

    texts = [" ".join(f"w{3 + (number * n) % 90}" for n in range(size)) for number, size in enumerate(SIZES[:60])]
    data = Dataset.from_dict({"text": texts})

    def sft(stop: int = 0, padding_free: bool = False) -> Any:
        arguments = trl.SFTConfig(
            str(tmp_path), num_train_epochs=2, save_steps=3, gradient_accumulation_steps=2, max_length=None,
            padding_free=padding_free, bf16=False, **QUIET,
        )  # fmt: skip
        made: Any = MySFTTrainer(
            llama(), arguments, train_dataset=data, eval_dataset=data.select(range(20)), processing_class=tokenizer(),
            max_tokens_per_batch=BUDGET, callbacks=[Change(None, 0, id, end=stop or None)],
        )  # fmt: skip
        made.seen = []
        forward = made.training_step

        def training_step(model: Any, inputs: Any, *more: Any) -> Any:
            assert inputs["input_ids"].numel() <= BUDGET
            made.seen.append(int((inputs["labels"] != -100).sum() if padding_free else inputs["attention_mask"].sum()))
            return forward(model, inputs, *more)

        made.training_step = training_step
        return made

    unbroken = sft()
    unbroken.train()
    lengths = unbroken.train_batches.sizes
    assert sum(unbroken.seen) == 2 * lengths.sum()
    figures = unbroken.evaluate()
    rows = unbroken.eval_dataset["input_ids"][:]
    assert figures["eval_loss"] == pytest.approx(causal_loss(unbroken.model, rows), rel=1e-4)
    for checkpoint in tmp_path.glob("checkpoint-*"):
        if int(checkpoint.name.split("-")[1]) > 3:
            (checkpoint / "trainer_state.json").unlink()
    resumed = sft()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for weights, others in zip(resumed.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.allclose(weights, others, atol=1e-6)
    flat = sft(padding_free=True)
    assert flat.train_batches.options.cost == "sum"
    flat.train()
    assert sum(flat.seen) == 2 * (lengths - 1).sum()


def test_an_embedding_model_of_sentence_transformers(tmp_path: Path) -> None:
    st = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import losses, modules
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=97, **sizes)).save_pretrained(tmp_path / "bert")
    tokenizer().save_pretrained(tmp_path / "bert")
    transformer = modules.Transformer(str(tmp_path / "bert"))
    model = st.SentenceTransformer(modules=[transformer, modules.Pooling(16)], device="cpu")
    words = [" ".join(["w5"] * size) for size in SIZES[:60]]
    data = Dataset.from_dict({"anchor": words, "positive": words[::-1]})
    longest = np.maximum(SIZES[:60], SIZES[:60][::-1])

    class MyEmbeddingTrainer(SizeAwareTrainerMixin, st.SentenceTransformerTrainer):  # type: ignore[misc, name-defined]
        """sentence-transformers' trainer by size."""

        def sizes_of(self, dataset: Any) -> Any:
            columns = [self.processing_class(dataset[name][:])["input_ids"] for name in ("anchor", "positive")]
            return [max(map(len, row)) for row in zip(*columns, strict=True)]

    def embedding(**options: Any) -> Any:
        arguments = st.SentenceTransformerTrainingArguments(
            str(tmp_path / "run"), num_train_epochs=2, save_steps=4, eval_strategy="epoch", **QUIET, **options
        )
        return MyEmbeddingTrainer(
            model, arguments, train_dataset=data, eval_dataset=data, max_tokens_per_batch=BUDGET,
            loss=losses.MultipleNegativesRankingLoss(model),
        )  # fmt: skip

    trainer, rows = embedding(), list[int]()
    inner = trainer.loss.forward

    def forward(features: Any, labels: Any) -> Any:
        for part in features:
            assert part["input_ids"].numel() <= BUDGET
        rows.append(len(features[0]["input_ids"]))
        return inner(features, labels)

    trainer.loss.forward = forward
    trainer.train()
    assert trainer.train_batches.sizes.tolist() == longest.tolist()
    assert sum(rows) == 4 * 60  # two epochs, and two evaluations
    assert trainer.state.global_step == trainer.state.max_steps
    assert all(np.isfinite(logs["eval_loss"]) for logs in trainer.state.log_history if "eval_loss" in logs)
    with pytest.raises(ValueError, match=r"batch_sampler must be 'batch_sampler', got .*labels and duplicates"):
        embedding(batch_sampler="no_duplicates")


@pytest.mark.timeout(900)
def test_two_processes_evaluate_as_one(tmp_path: Path) -> None:
    found = []
    for world in (1, 2):
        command = [*launcher("torchrun", world), str(HERE / "trainer_two_ranks.py")]
        done = launch(command, tmp_path, {})
        assert done.code == 0, done.output
        found.append(json.loads(re.findall(r"^{.*}$", done.output, re.MULTILINE)[-1]))
    one, two = found
    assert two["labels"] == one["labels"] == tokens()["input_ids"][:]
    assert two["predictions"] == one["predictions"]
    for name in ("eval_loss", "eval_accuracy", "test_loss"):
        assert two[name] == pytest.approx(one[name], rel=1e-5), name
    np.testing.assert_allclose(two["weights"], one["weights"], atol=1e-5)
