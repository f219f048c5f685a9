"""Stands for a rollout: answers of uneven length to a few prompts, and what they are worth."""

from typing import NamedTuple

import torch

LETTERS, LONGEST = 32, 512
IGNORED = -100  # a label that is no target


class Answer(NamedTuple):
    """A prompt and its answer.

    Args:
        tokens: Both, int64, shape ``[length]``.
        labels: The token that follows each, int64, shape ``[length]``; -100 where that is not one of the answer's.
        reward: What it is worth.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    reward: float


def rollout(step: int, prompts: int, answers_each: int) -> list[Answer]:
    """Return the answers of a step, the same on every rank, those to one prompt in a row.

    Most are short, and some go on to the limit.
    """
    random = torch.Generator().manual_seed(step)
    found = []
    for _ in range(prompts):
        prompt = int(torch.randint(4, 40, (), generator=random))
        for _ in range(answers_each):
            length = int(torch.empty(()).log_normal_(4.0, 1.0, generator=random).clamp(2, LONGEST - prompt))
            text = torch.randint(LETTERS, (prompt + length + 1,), generator=random)
            labels = text[1:].clone()
            labels[: prompt - 1] = IGNORED
            found.append(Answer(text[:-1], labels, float(torch.rand((), generator=random))))
    return found


def padded(answers: list[Answer]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of a micro-batch, shape ``[answers, longest]``."""
    tokens = torch.nn.utils.rnn.pad_sequence([answer.tokens for answer in answers], batch_first=True)
    labels = [answer.labels for answer in answers]
    return tokens, torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED)
