"""Two losses over pairs of table rows, a few lines each: Cox regression and a pairwise ranking.

Cox's partial likelihood compares each patient who had the event with all who were still under observation then; the
ranking loss compares each item with all that are worth less. Both are usually written with a patients × patients
mask. The tables are made up, with known coefficients that the losses have to find again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

import monoidreduce as mr
from examples.shared import NAIVE, OURS, OUT, command, peak_mb, save
from monoidreduce import Col, Row


@mr.op
def cox(risk: Row, time: Row, event: Row, their_risk: Col, their_time: Col):
    still_there = torch.where(their_time >= time, their_risk, -torch.inf)
    return torch.where(event, mr.logsumexp(still_there) - risk, 0.0)  # -log softmax of one's own risk among theirs


@mr.op
def ranking(score: Row, worth: Row, their_score: Col, their_worth: Col):
    return mr.sum(torch.where(worth > their_worth, F.softplus(their_score - score), 0.0))  # -log sigmoid(difference)


@mr.op
def concordance(score: Row, worth: Row, known: Row, their_score: Col, their_worth: Col):
    comparable = known & (worth > their_worth)
    return mr.count(comparable & (score > their_score)), mr.count(comparable)


def naive_cox(risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
    still_there = torch.where(time >= time[:, None], risk, -torch.inf)
    return torch.where(event, still_there.logsumexp(-1) - risk, 0.0).mean()


def naive_ranking(score: Tensor, worth: Tensor) -> Tensor:
    return torch.where(worth[:, None] > worth, F.softplus(score - score[:, None]), 0.0).mean()


class Result(NamedTuple):
    """Of one loss: its values, the coefficients (true, found), the share of pairs in the right order, memory, and how
    far the first gradient is from plain torch's."""

    losses: list[float]
    true: Tensor
    found: Tensor
    in_order: float
    naive_mb: float
    ours_mb: float
    gradient_error: float


def fit(table: Tensor, true: Tensor, ours: Callable, naive: Callable, order: Callable, steps: int) -> Result:
    """Minimise ``ours`` over the coefficients of a linear model by L-BFGS; ``naive`` is the same in plain torch."""
    w = torch.zeros_like(true).requires_grad_()
    memory = [peak_mb(lambda loss=loss: loss(table @ w), [w]) for loss in (naive, ours)]
    expected, given = (torch.autograd.grad(loss(table @ w), w)[0] for loss in (naive, ours))
    optimiser, losses = torch.optim.LBFGS([w], max_iter=steps, line_search_fn="strong_wolfe"), []

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = ours(table @ w)
        loss.backward()
        losses.append(loss.item())
        return loss

    optimiser.step(closure)
    losses.append(ours(table @ w).item())
    right, pairs = order((table @ w).detach())
    share = (right.sum() / pairs.sum()).item()
    return Result(losses, true, w.detach(), share, *memory, (given - expected).abs().max().item())


def main(rows: int = 3000, columns: int = 8, steps: int = 15, out: Path = OUT) -> dict[str, Result]:
    torch.manual_seed(0)
    table, true = torch.randn(rows, columns), torch.randn(columns)
    death, leaving = (torch.empty(rows).exponential_() for _ in range(2))  # at rate 1
    death = death / torch.exp(table @ true)
    time, event = torch.minimum(death, leaving), death <= leaving  # who leaves first is not seen to die
    noise = torch.empty(rows).exponential_().log()
    worth = torch.round(2 * (table @ true - noise))  # the same order with noise, and with ties
    everyone = torch.ones(rows, dtype=torch.bool)
    results = {
        "Cox regression": fit(
            table,
            true,
            lambda r: cox(r, time, event, r, time).mean(),
            lambda r: naive_cox(r, time, event),
            lambda r: concordance(r, -time, event, r, -time),
            steps,
        ),
        "pairwise ranking": fit(
            table,
            true,
            lambda s: ranking(s, worth, s, worth).mean() / rows,
            lambda s: naive_ranking(s, worth),
            lambda s: concordance(s, worth, everyone, s, worth),
            steps,
        ),
    }
    for name, r in results.items():
        print(f"{name}: loss {r.losses[0]:.3f} -> {r.losses[-1]:.3f}, {r.in_order:.1%} of pairs in the right order;")
        print(f"  memory: plain torch {r.naive_mb:.0f} MB, ours {r.ours_mb:.0f} MB")
    draw(results, out)
    return results


def draw(results: dict[str, Result], out: Path) -> None:
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for ax, (name, r) in zip(figure.subplots(1, 2), results.items(), strict=True):
        ax.axline((0, 0), slope=1, color=NAIVE)
        ax.scatter(r.true, r.found, color=OURS)
        ax.set(xlabel="true coefficient", ylabel="found", title=f"{name}: {r.in_order:.0%} of pairs in order")
    save(figure, out, "tabular")


if __name__ == "__main__":
    command(main)
