"""Train on rollouts of uneven answers in planned micro-batches: ``torchrun --nproc-per-node=2 examples/steps``.

Each step is planned anew, since its lengths are known only then. Its gradient is compared with that of all its answers
in one batch on one rank.
"""

import argparse
import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from rollout import LETTERS, Answer, padded, rollout
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from headrace.size_aware_batching import global_num_tokens, token_weighted_loss
from headrace.size_aware_batching.steps import StepPlan, plan_step


class Policy(torch.nn.Module):
    """Predicts each next token from those before it."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.letters = torch.nn.Embedding(LETTERS, width)
        self.memory = torch.nn.GRU(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, LETTERS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a number for each letter at each place, shape ``[answers, LETTERS, longest]``."""
        numbers: torch.Tensor = self.head(self.memory(self.letters(tokens))[0])
        return numbers.transpose(1, 2)


def losses_of(model: torch.nn.Module, answers: list[Answer]) -> torch.Tensor:
    """Return the loss of each answer, the sum over its tokens, shape ``[answers]``."""
    tokens, labels = padded(answers)
    return cross_entropy(model(tokens), labels, reduction="none").sum(1)


@torch.no_grad()
def losses_in_order(model: torch.nn.Module, answers: list[Answer], plan: StepPlan, rank: int) -> torch.Tensor:
    """Compute the loss of every answer, each on its rank, and put them back into the order of the answers."""
    own = [losses_of(model, [answers[index] for index in indices]) for indices in plan.micro_batches[rank]]
    of_ranks: list[Any] = [None] * plan.num_replicas
    dist.all_gather_object(of_ranks, torch.cat(own))
    return torch.cat(of_ranks)[torch.from_numpy(plan.restore)]


def advantages_of(answers: list[Answer], losses: torch.Tensor, answers_each: int) -> torch.Tensor:
    """Compare each answer with the others to its prompt: its reward, less a little for what was improbable."""
    targets = torch.tensor([int((answer.labels >= 0).sum()) for answer in answers])
    rewards = torch.tensor([answer.reward for answer in answers]) - 0.1 * losses / targets
    groups = rewards.reshape(-1, answers_each)
    return (groups - groups.mean(1, keepdim=True)).flatten()


def accumulate(model: Any, answers: list[Answer], advantages: torch.Tensor, micro_batches: Sequence[Any]) -> None:
    """Call backward for each micro-batch; gradients are exchanged with the last one."""
    total = global_num_tokens(torch.cat([answers[index].labels for index in batch]) for batch in micro_batches)
    for number, indices in enumerate(micro_batches):
        waits = number + 1 < len(micro_batches) and isinstance(model, DistributedDataParallel)
        with model.no_sync() if waits else nullcontext():
            losses = losses_of(model, [answers[index] for index in indices]) * advantages[indices]
            token_weighted_loss(losses, total).backward()  # type: ignore[no-untyped-call]


def difference(model: DistributedDataParallel, answers: list[Answer], advantages: torch.Tensor) -> float:
    """Compare the gradient with that of all answers in one batch, as a share of the largest entry."""
    whole: torch.nn.Module = copy.deepcopy(model.module)
    whole.zero_grad()
    targets = sum(int((answer.labels >= 0).sum()) for answer in answers)
    ((losses_of(whole, answers) * advantages).sum() / targets).backward()  # type: ignore[no-untyped-call]
    found, expected = (
        torch.cat([weight.grad.flatten() for weight in module.parameters() if weight.grad is not None])
        for module in (model.module, whole)
    )
    return float((found - expected).abs().max() / expected.abs().max())


def main(words: Sequence[str] | None = None) -> int:
    """Train and print a line for each step."""
    parser = argparse.ArgumentParser(prog="steps", description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    parser.add_argument("--budget", type=int, default=1024, help="most tokens of a micro-batch, padding included")
    options = parser.parse_args(words)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Policy().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(options.steps):
        answers = rollout(step, options.prompts, options.answers)
        # Ranks exchange gradients once, after their last micro-batch, so the whole step counts: meet="step".
        lengths = [len(answer.tokens) for answer in answers]
        plan = plan_step(lengths, options.budget, cost="padded", meet="step")
        losses = losses_in_order(model.module, answers, plan, rank)
        advantages = advantages_of(answers, losses, options.answers)
        optimizer.zero_grad()
        accumulate(model, answers, advantages, plan.micro_batches[rank])
        apart = difference(model, answers, advantages)
        optimizer.step()
        print(
            f"step {step} rank {rank}: {len(answers)} answers of {min(lengths)} to {max(lengths)} tokens, "
            f"{plan.num_micro_batches} micro-batches, the slowest rank {100 * (plan.imbalance - 1):.1f} % over the "
            f"mean, gradient {apart:.0e} from that of one batch",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
