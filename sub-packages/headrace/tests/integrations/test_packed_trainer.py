"""The gradient of the whole batch in Trainer of Hugging Face, from packed and padded batches of different sizes.

As a script: one rank of a gloo group.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, PackedCollate, PaddedCollate

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

PADDED = PaddedCollate({"labels": -100, "input_ids": 1}, return_mask=True)

# transformers and accelerate on this processor, about themselves.
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

LENGTHS = [30, 4, 6, 12, 3, 18, 5, 9, 7, 2]
BATCHES = 4


def samples(*, masked: bool) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    rows = []
    for length in LENGTHS:
        tokens = draw.integers(4, 50, length)
        labels = np.where(draw.random(length) < 0.3, tokens, -100) if masked else tokens
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def model(name: str) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    sizes |= {"vocab_size": 50, "intermediate_size": 32, "max_position_embeddings": 64, "pad_token_id": 1}
    if name == "Bert":
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).double()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).double()


def masked_lm_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: int | None = None) -> torch.Tensor:
    logits: torch.Tensor = outputs["logits"].flatten(0, 1)
    return cross_entropy(logits, labels.flatten(), reduction="sum") / (num_items_in_batch or 1)


def update(net: Any, data: list[dict[str, Any]], collate: Any, folder: Path, **options: Any) -> torch.Tensor:
    """Weights that one step of plain gradient descent adds, over all batches of the data."""
    sampler = DistributedSizeAwareBatchSampler(LENGTHS, 30, shuffle=False, strategy="sequential")
    loader: DataLoader[Any] = DataLoader(data, batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]  # a list is a dataset

    accumulated = BATCHES // int(os.environ.get("WORLD_SIZE", "1"))
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=1, gradient_accumulation_steps=accumulated, learning_rate=1.0, max_grad_norm=0.0,
        optim="sgd", lr_scheduler_type="constant", report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    before = torch.cat([weight.detach().flatten().clone() for weight in net.parameters()])
    trainer = transformers.Trainer(net, arguments, **options)
    trainer.get_train_dataloader = lambda: loader  # not prepared by accelerate, which would share it out again
    trainer.train()
    assert len(sampler) == accumulated
    return torch.cat([weight.detach().flatten() for weight in net.parameters()]) - before


def whole_gradient(net: Any, data: list[dict[str, Any]]) -> torch.Tensor:
    """That of the mean over all targets, one sample after the other."""
    shift = int(isinstance(net, transformers.LlamaForCausalLM))
    targets = sum(int((sample["labels"][shift:] != -100).sum()) for sample in data)
    for sample in data:
        logits = net(input_ids=torch.from_numpy(sample["input_ids"])[None]).logits[0]
        labels = torch.from_numpy(sample["labels"])
        losses = cross_entropy(logits[: len(logits) - shift], labels[shift:], reduction="sum")
        (losses / targets).backward()  # type: ignore[no-untyped-call]
    return torch.cat([weight.grad.flatten() for weight in net.parameters()])


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_llama_divides_by_the_targets_of_all_accumulated_batches(layout: str, tmp_path: Path) -> None:
    data = samples(masked=False)
    collate = PackedCollate(layout="huggingface") if layout == "packed" else PADDED
    assert distance(-update(model("Llama"), data, collate, tmp_path), whole_gradient(model("Llama"), data)) < 1e-6


def test_bert_needs_a_loss_that_does(tmp_path: Path) -> None:
    data, expected = samples(masked=True), whole_gradient(model("Bert"), samples(masked=True))
    by_itself = -update(model("Bert"), data, PADDED, tmp_path)
    assert 3 < float(by_itself.norm() / expected.norm()) < 5  # four means, added up
    exact = -update(model("Bert"), data, PADDED, tmp_path, compute_loss_func=masked_lm_loss)
    assert distance(exact, expected) < 1e-6


@pytest.mark.slow
def test_two_ranks_do_what_one_does(tmp_path: Path) -> None:
    from meeting import Meeting  # not there for the ranks

    meeting, outs = Meeting(2), [tmp_path / f"rank{rank}.json" for rank in range(2)]
    processes = []
    for rank, out in enumerate(outs):
        environment = os.environ | meeting.environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(subprocess.Popen([sys.executable, __file__, str(out)], env=environment))
    try:
        assert [process.wait() for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    llama, bert = (whole_gradient(model(n), samples(masked=n == "Bert")) for n in ("Llama", "Bert"))
    for out in outs:
        found = {
            name: -torch.tensor(values, dtype=torch.float64) for name, values in json.loads(out.read_text()).items()
        }
        assert distance(found["Llama"], llama) < 1e-6
        assert distance(found["Bert with a loss"], bert) < 1e-6
        assert 3 < float(found["Bert"].norm() / bert.norm()) < 5  # the means of two batches on two ranks, added up


def one_rank(out: Path) -> None:
    masked, folder = samples(masked=True), out.parent / out.stem
    packed = PackedCollate(layout="huggingface")
    found = {
        "Llama": update(model("Llama"), samples(masked=False), packed, folder),
        "Bert": update(model("Bert"), masked, PADDED, folder),
        "Bert with a loss": update(model("Bert"), masked, PADDED, folder, compute_loss_func=masked_lm_loss),
    }
    out.write_text(json.dumps({name: values.tolist() for name, values in found.items()}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    one_rank(Path(sys.argv[1]))
