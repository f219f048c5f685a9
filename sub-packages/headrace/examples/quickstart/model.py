"""A small causal Transformer over bytes, trained under Lightning."""

from collections.abc import Mapping
from typing import Any

import lightning
import torch
from torch import Tensor, nn

PAD = 256
VOCABULARY = 257


class ByteTransformer(lightning.LightningModule):
    """Predict the next byte.

    Args:
        max_length: Longest sequence, in bytes.
        width: Size of the hidden state.
        layers: Number of Transformer layers.
    """

    def __init__(self, max_length: int, width: int = 48, layers: int = 1) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.places = nn.Embedding(max_length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, nhead=2, dim_feedforward=2 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY - 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next byte: (batch, length) -> (batch, length, 256)."""
        length = tokens.shape[1]
        x = self.bytes(tokens) + self.places(torch.arange(length, device=tokens.device))
        # Padding stands at the end and attention looks back, so real positions never see it.
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def training_step(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the mean cross-entropy over the real positions of padded ``batch["tokens"]``, (batch, length)."""
        tokens: Tensor = batch["tokens"]
        logits, target = self(tokens[:, :-1]), tokens[:, 1:]
        total = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")
        loss: Tensor = total / (target != PAD).sum().clamp(min=1)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)
