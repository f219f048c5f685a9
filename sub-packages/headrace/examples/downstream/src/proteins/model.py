"""A model small enough to train anywhere: it guesses the next residue from the present one."""

import lightning
import torch


class NextResidue(lightning.LightningModule):
    """Predicts each residue from the one before it.

    Args:
        width: Size of the embedding.
        learning_rate: Of Adam.
    """

    def __init__(self, width: int = 64, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.learning_rate, self.seen = learning_rate, list[str]()
        self.layers = torch.nn.Sequential(torch.nn.Embedding(256, width), torch.nn.Linear(width, 256))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Cross entropy over all residues but the padding, which is 0."""
        scores = self.layers(tokens[:, :-1]).flatten(0, 1)
        return torch.nn.functional.cross_entropy(scores, tokens[:, 1:].flatten(), ignore_index=0)

    def training_step(self, batch: tuple[torch.Tensor, list[str]]) -> torch.Tensor:
        """One step."""
        tokens, keys = batch
        self.seen += keys
        return self.loss(tokens)

    def validation_step(self, batch: tuple[torch.Tensor, list[str]]) -> None:
        """Log the loss of held-out sequences."""
        self.log("val_loss", self.loss(batch[0]), batch_size=len(batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
