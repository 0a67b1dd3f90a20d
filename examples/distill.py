"""Distillation: a small student learns from a teacher's whole distribution, and from labels drawn from it.

Both students see the same inputs, in the same order, from the same weights. One is told a class for each input
(``ops.linear_cross_entropy``), the other what the teacher thinks of every class (``ops.linear_kl``). In plain torch the
second needs the logits of teacher and student; ours needs neither.
"""

import copy
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from examples.shared import NAIVE, OURS, OUT, command, peak_mb, save
from monoidreduce import ops

EVERY = 4  # steps between two looks at the distance


class Result(NamedTuple):
    """How far each student is from the teacher (KL on inputs not trained on) every few steps; memory of both forms."""

    from_labels: list[float]
    from_teacher: list[float]
    naive_mb: float
    ours_mb: float


class Classifier(nn.Module):
    """A body, and a head [classes, width] that is never multiplied out."""

    def __init__(self, inputs: int, width: int, classes: int, sharpness: float):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width))
        self.head = nn.Parameter(torch.randn(classes, width) * sharpness)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), self.head


def naive_kl(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
    student, teacher = (x @ weight.T).log_softmax(-1), (teacher_x @ teacher_weight.T).log_softmax(-1)
    return F.kl_div(student, teacher, log_target=True, reduction="batchmean")


def train(student: Classifier, teacher: Classifier, batches: list[Tensor], test: Tensor, soft: bool) -> list[float]:
    """Adam over the batches; the student's distance from the teacher, on other inputs, every few steps."""
    optimiser, distances = torch.optim.Adam(student.parameters(), lr=3e-3), []
    for step, x in enumerate(batches):
        with torch.no_grad():
            known = teacher(x)
            if step % EVERY == 0:
                distances.append(ops.linear_kl(*student(test), *teacher(test)).item())
        if soft:
            loss = ops.linear_kl(*student(x), *known)
        else:
            loss = ops.linear_cross_entropy(*student(x), ops.linear_sample(*known, step).index)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return distances


def main(
    classes: int = 4096, batch: int = 384, steps: int = 61, inputs: int = 16, width: int = 32, out: Path = OUT
) -> Result:
    torch.manual_seed(0)
    teacher = Classifier(inputs, 4 * width, classes, sharpness=0.5).requires_grad_(False)
    student = Classifier(inputs, width, classes, sharpness=0.02)
    batches, test = list(torch.randn(steps, batch, inputs)), torch.randn(batch, inputs)
    known = teacher(test)
    memory = [
        peak_mb(lambda kl=kl: kl(*student(test), *known), student.parameters()) for kl in (naive_kl, ops.linear_kl)
    ]
    curves = [train(copy.deepcopy(student), teacher, batches, test, soft) for soft in (False, True)]
    result = Result(*curves, *memory)
    print(f"distance from the teacher {curves[0][0]:.3f} -> {curves[0][-1]:.3f} by labels, {curves[1][-1]:.3f} by KL")
    print(f"peak memory of the loss and its gradient: plain torch {memory[0]:.0f} MB, ours {memory[1]:.0f} MB")
    draw(result, out)
    return result


def draw(r: Result, out: Path) -> None:
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    steps = range(0, EVERY * len(r.from_labels), EVERY)
    left.plot(steps, r.from_labels, color=NAIVE, label="told one class")
    left.plot(steps, r.from_teacher, color=OURS, label="told the whole distribution")
    left.set(xlabel="step", ylabel="KL(teacher ‖ student)", title="On inputs not trained on")
    left.legend()
    right.bar(["plain torch", "MonoidReduce"], [r.naive_mb, r.ours_mb], color=[NAIVE, OURS])
    right.set(ylabel="MB", title="Peak memory of a step")
    save(figure, out, "distill")


if __name__ == "__main__":
    command(main)
