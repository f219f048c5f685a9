"""Packed batches through models of Hugging Face: which of them keep the samples apart."""

from typing import Any

import numpy as np
import pytest
import torch

from headrace.size_aware_batching import PackedCollate, PaddedCollate

transformers = pytest.importorskip("transformers")

LENGTHS = [5, 1, 9, 4]
SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
# Position of the first token: the models of ESM count from behind the padding token's.
MODELS = {"Llama": 0, "Qwen2": 0, "GPT2": 0, "Bert": 0, "Esm": 2, "ModernBert": 0}
CAUSAL = {"Llama": "ForCausalLM", "Qwen2": "ForCausalLM", "GPT2": "LMHeadModel"}


def tokenized(lengths: list[int] = LENGTHS) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    rows = [draw.integers(4, 99, length) for length in lengths]
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in rows]


def model(name: str, attention: str) -> Any:
    torch.manual_seed(0)
    options = SMALL | ({} if name in ("Bert", "Esm") else {"bos_token_id": 2, "eos_token_id": 3})
    if name == "ModernBert":
        options |= {"cls_token_id": 2, "sep_token_id": 3}
    if name == "Qwen2":
        options |= {"num_key_value_heads": 1}
    if name == "Esm":
        options |= {"mask_token_id": 4, "token_dropout": False}
    head = CAUSAL.get(name, "ForMaskedLM")
    config = getattr(transformers, f"{name}Config")(**options)
    config._attn_implementation = attention
    return getattr(transformers, name + head)(config).double().eval()


def alone(net: Any, samples: list[dict[str, Any]]) -> torch.Tensor:
    """Logits of samples that are no batch, one behind the other."""
    return torch.cat([net(input_ids=torch.tensor([sample["input_ids"]])).logits[0] for sample in samples])


def packed(name: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    batch: dict[str, Any] = PackedCollate(layout="huggingface", position_start=MODELS[name])(samples)
    del batch["labels"]
    if name == "ModernBert":
        batch = {key: batch[key] for key in ("input_ids", "position_ids")}
    return batch


def blocks(offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The attention mask of a packed batch, to be added to the scores, shape ``[1, 1, total, total]``."""
    owner = torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())
    apart = torch.finfo(dtype).min * (owner[:, None] != owner).to(dtype)
    return apart[None, None]


@pytest.mark.parametrize(
    ("name", "attention", "options", "exact"),
    [
        ("Llama", "sdpa", {"use_cache": False}, True),
        ("Llama", "eager", {"use_cache": False}, True),
        ("Llama", "sdpa", {"use_cache": True}, False),
        ("Llama", "sdpa", {}, False),  # the default is to use it
        ("Qwen2", "sdpa", {"use_cache": False}, True),
        ("Qwen2", "eager", {"use_cache": False}, True),
        ("GPT2", "sdpa", {"use_cache": False}, True),
        ("GPT2", "eager", {"use_cache": False}, True),
        ("Bert", "sdpa", {}, False),
        ("Bert", "eager", {}, False),
        ("Esm", "sdpa", {}, False),
        ("Esm", "eager", {}, False),
        ("ModernBert", "sdpa", {}, False),
        ("ModernBert", "eager", {}, False),
    ],
)
@torch.no_grad()
def test_which_models_keep_packed_samples_apart(name: str, attention: str, options: Any, exact: bool) -> None:
    net, samples = model(name, attention), tokenized()
    logits = net(**packed(name, samples), **options).logits[0]
    difference = float((logits - alone(net, samples)).abs().max())
    assert difference < 1e-7 if exact else difference > 1e-4  # eager attention computes the softmax in float32


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
@torch.no_grad()
def test_a_mask_of_blocks_keeps_them_apart(name: str, attention: str) -> None:
    net, samples = model(name, attention), tokenized()
    offsets = PackedCollate()(samples)["cu_seqlens"]
    logits = net(**packed(name, samples), attention_mask=blocks(offsets, torch.float64)).logits[0]
    torch.testing.assert_close(logits, alone(net, samples), rtol=0, atol=1e-7)


@torch.no_grad()
def test_esm_takes_no_mask_of_blocks() -> None:
    net, samples = model("Esm", "sdpa"), tokenized()
    offsets = PackedCollate()(samples)["cu_seqlens"]
    with pytest.raises(RuntimeError):
        net(**packed("Esm", samples), attention_mask=blocks(offsets, torch.float64))


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_padded_batches_are_exact_in_all_of_them(name: str) -> None:
    net, samples = model(name, "sdpa"), tokenized()
    inputs = [{"input_ids": sample["input_ids"]} for sample in samples]
    batch = PaddedCollate({"input_ids": SMALL["pad_token_id"]}, return_mask=True)(inputs)
    logits = net(**batch).logits[batch["attention_mask"]]
    torch.testing.assert_close(logits, alone(net, samples), rtol=0, atol=1e-7)


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("arrays", [list, np.array, torch.tensor])
def test_batches_equal_those_of_the_collator_of_transformers(start: int, arrays: Any) -> None:
    samples = [{name: arrays(values) for name, values in sample.items()} for sample in tokenized()]
    theirs = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, position_ids_start=start)(samples)
    ours = PackedCollate(layout="huggingface", position_start=start)(samples)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert type(ours[name]) is type(value), name
        if isinstance(value, torch.Tensor):
            assert ours[name].dtype == value.dtype, name
            assert torch.equal(ours[name], value), name
        else:
            assert ours[name] == value, name


def gradient(net: Any, batch: dict[str, Any], targets: int) -> torch.Tensor:
    net.zero_grad()
    net(**batch, use_cache=False, num_items_in_batch=targets).loss.backward()
    return torch.cat([weight.grad.flatten() for weight in net.parameters()])


@pytest.mark.parametrize("options", [{}, {"length_multiple": 4, "total_length": 64}])
def test_llama_learns_from_a_packed_batch_what_it_learns_from_a_padded_one(options: dict[str, Any]) -> None:
    net, samples = model("Llama", "sdpa"), tokenized()
    targets = sum(len(sample["labels"]) - 1 for sample in samples)
    padded = gradient(net, PaddedCollate({"labels": -100}, return_mask=True)(samples), targets)
    assert padded.norm() > 0.1
    collate = PackedCollate(layout="huggingface", **options)
    torch.testing.assert_close(gradient(net, collate(samples), targets), padded, rtol=0, atol=1e-9)
    across = gradient(net, PackedCollate(layout="huggingface", separator={}, **options)(samples), targets)
    assert (across - padded).norm() > 0.01 * padded.norm()  # targets across borders
    ones = {"attention_mask": torch.ones_like(collate(samples)["input_ids"])}
    across = gradient(net, collate(samples) | ones, targets)
    assert (across - padded).norm() > 0.001 * padded.norm()  # attention across borders
