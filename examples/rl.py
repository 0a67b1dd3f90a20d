"""Preference tuning and reinforcement learning from hidden states: GRPO, PPO, DPO and distillation, a few lines each.

    python -m examples.rl                         # each loss trains a small recurrent policy for some steps

Every loss takes hidden states [B, T, D] and the head's weight [V, D]; the logits [B, T, V] are never built, forward or
backward. The definitions are TRL's: tests compare them with its trainers' own losses, values and gradients.
"""

from __future__ import annotations

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoidreduce import ops

# The losses -----------------------------------------------------------------------------------------------------------


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


def clip_ratio(ratio: Tensor, advantages: Tensor, epsilon: float) -> Tensor:
    """PPO's objective for each token, as a loss; ``ratio`` of the probabilities now and before."""
    return -torch.min(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages)


def grpo_loss(hidden, weight, tokens, mask, advantages, old=None, reference=None, beta=0.04, epsilon=0.2, **head):
    """Group-relative policy optimisation: ``advantages`` [B] of completions, a penalty to stay near the reference.

    ``old`` and ``reference`` [B, T] are log-probabilities from before the step and of the reference model.
    """
    log_probs = ops.linear_logprobs(hidden, weight, tokens, mask=mask, **head)
    ratio = (log_probs - (log_probs.detach() if old is None else old)).exp()
    loss = clip_ratio(ratio, advantages.unsqueeze(-1), epsilon)
    if reference is not None:
        gap = reference - log_probs
        loss = loss + beta * ratio * (gap.exp() - gap - 1)
    return ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def ppo_loss(hidden, weight, tokens, mask, advantages, old, values, returns, epsilon=0.2, entropy_coef=0.01, **head):
    """PPO with a value head and an entropy bonus: ``advantages``, ``values`` and ``returns`` [B, T]."""
    found = ops.linear_logprobs(hidden, weight, tokens, mask=mask, return_entropy=True, **head)
    policy = masked_mean(clip_ratio((found.log_prob - old).exp(), advantages, epsilon), mask)
    value = 0.5 * masked_mean((values - returns).square(), mask)
    return policy + 0.5 * value - entropy_coef * masked_mean(found.entropy, mask)


def dpo_loss(hidden, weight, tokens, mask, reference, beta=0.1, **head):
    """Direct preference optimisation: a batch of the chosen, then the rejected; ``reference`` [B] of sequences."""
    log_probs = ops.linear_logprobs(hidden, weight, tokens, mask=mask, **head).sum(-1)
    chosen, rejected = (log_probs - reference).chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


def distillation_loss(hidden, weight, teacher_hidden, teacher_weight, mask, beta=0.5, temperature=1.0):
    """On-policy distillation: forward KL with ``beta`` 0, reverse KL with 1, the Jensen-Shannon divergence between.

    The student's tokens were drawn by the student; both distributions are whole, and neither is ever built.
    """
    return ops.linear_jsd(
        hidden[mask], weight, teacher_hidden[mask], teacher_weight, beta=beta, temperature=temperature
    )


def top_k_distillation_loss(hidden, weight, ids, teacher_log_probs, mask, reverse=False, **head):
    """Distillation from a teacher that sends the log-probabilities [B, T, K] of its K best tokens ``ids`` alone.

    What is left of either distribution is one more class, the tail.
    """
    student = add_tail(ops.linear_logprobs(hidden, weight, ids=ids, mask=mask, **head).ids_log_probs)
    teacher = add_tail(teacher_log_probs)
    of, to = (student, teacher) if reverse else (teacher, student)
    return masked_mean((of.exp() * (of - to)).sum(-1), mask)


def add_tail(log_probs: Tensor) -> Tensor:
    """log(1 - Σ p) as one more class."""
    mass = log_probs.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([log_probs, torch.log(-torch.expm1(mass))], -1)


# A small policy that learns by each -----------------------------------------------------------------------------------

VOCABULARY, WIDTH, LENGTH, START = 64, 24, 8, 0


class Policy(nn.Module):
    """A recurrent network over tokens, and a head [V, D] that is never multiplied out."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.body = nn.Embedding(VOCABULARY, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / math.sqrt(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        """The hidden states that predict each token."""
        return self.body(self.embed(F.pad(tokens, (1, 0), value=START)[:, :-1]))[0]

    @torch.no_grad()
    def draw(self, count: int, seed: int) -> Tensor:
        """Sequences drawn from the policy, token by token."""
        tokens = torch.zeros(count, 0, dtype=torch.long)
        for step in range(LENGTH):
            hidden = self(F.pad(tokens, (0, 1)))[:, -1]
            tokens = torch.cat([tokens, ops.linear_sample(hidden, self.head, 1000 * seed + step).index[:, None]], 1)
        return tokens


def reward(tokens: Tensor) -> Tensor:
    """The share of even tokens."""
    return (tokens % 2 == 0).float().mean(-1)


def train_grpo(steps: int) -> list[float]:
    policy, rewards = Policy(0), []
    reference, optimiser = copy.deepcopy(policy), torch.optim.Adam(policy.parameters(), lr=1e-2)
    for step in range(steps):
        tokens = policy.draw(64, step)
        mask, given = torch.ones_like(tokens, dtype=torch.bool), reward(tokens)
        with torch.no_grad():
            known = ops.linear_logprobs(reference(tokens), reference.head, tokens)
        advantages = (given - given.mean()) / (given.std() + 1e-4)
        loss = grpo_loss(policy(tokens), policy.head, tokens, mask, advantages, reference=known)
        _step(optimiser, loss)
        rewards.append(given.mean().item())
    return rewards


def train_dpo(steps: int) -> list[float]:
    policy, losses = Policy(0), []
    reference, optimiser = copy.deepcopy(policy), torch.optim.Adam(policy.parameters(), lr=3e-3)
    for step in range(steps):
        tokens = policy.draw(64, step)
        pairs = tokens[reward(tokens).argsort(descending=True)]
        tokens = torch.cat([pairs[:16], pairs[-16:]])  # the best against the worst
        with torch.no_grad():
            known = ops.linear_logprobs(reference(tokens), reference.head, tokens).sum(-1)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        loss = dpo_loss(policy(tokens), policy.head, tokens, mask, known)
        _step(optimiser, loss)
        losses.append(loss.item())
    return losses


def train_distillation(steps: int, k: int = 0) -> list[float]:
    student, teacher, losses = Policy(0), Policy(1), []
    optimiser = torch.optim.Adam(student.parameters(), lr=1e-2)
    for step in range(steps):
        tokens = student.draw(64, step)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        with torch.no_grad():
            known = teacher(tokens)
        if k:
            best = ops.linear_topk(known, teacher.head, k, log_probs=True)
            loss = top_k_distillation_loss(student(tokens), student.head, best.indices, best.values, mask)
        else:
            loss = distillation_loss(student(tokens), student.head, known, teacher.head, mask)
        _step(optimiser, loss)
        losses.append(loss.item())
    return losses


def _step(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def main(steps: int = 40) -> dict[str, list[float]]:
    """Train by each; return what was watched: rewards of GRPO, losses of the others."""
    found = {
        "GRPO, reward": train_grpo(steps),
        "DPO, loss": train_dpo(steps),
        "distillation, JSD": train_distillation(steps),
        "distillation from the 8 best, KL": train_distillation(steps, k=8),
    }
    for name, values in found.items():
        print(f"{name}: {values[0]:.3f} -> {values[-1]:.3f}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    main(parser.parse_args().steps)
