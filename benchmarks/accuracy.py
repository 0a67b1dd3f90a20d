"""Accuracy of attention in 16 bits, beside PyTorch's own kernels, on data where rounding shows.

    python3 -m benchmarks.accuracy --out DIR

Random data hides what rounding does to a softmax: errors of many weights average out. Rows in which few weights
dominate show it. Each kind of data below is given to this library, to cuDNN and to torch's flash kernel; the errors of
the output, the logsumexp and the three gradients are measured against float64. Prints a table of the greatest error
and of the root mean square, and writes ``accuracy.json``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from monoidreduce import ops

from .cpu import commit, environment

LENGTH, HEADS = 2048, 8
NAMES = "output", "dq", "dk", "dv"
HEADING = (
    f"Errors of attention against float64, {HEADS} heads of {LENGTH} rows and columns. Four numbers: of the output, "
    "dq, dk and dv."
)


def _direction(q: Tensor) -> Tensor:
    u = torch.randn(q.shape[-1], device=q.device)
    return u / u.norm()


def _random(q: Tensor, k: Tensor) -> None:
    """Logits of unit variance."""


def _times_eight(q: Tensor, k: Tensor) -> None:
    """Logits of standard deviation eight: one to three weights dominate a row."""
    q *= 8


def _rising(q: Tensor, k: Tensor) -> None:
    """Logits rise along the columns: the running maximum changes in every tile."""
    u = _direction(q)
    q += 4 * u
    k += 30 * u * torch.linspace(-1, 1, k.shape[-2], device=k.device)[:, None]


def _sink(q: Tensor, k: Tensor) -> None:
    """The first column takes most of every row's weight, as the first token of a language model does."""
    u = _direction(q)
    q += 6 * u
    k[..., 0, :] += 40 * u


def _late_spike(q: Tensor, k: Tensor) -> None:
    """One late column takes nearly all of the weight of the rows that see it."""
    u = _direction(q)
    q += 6 * u
    k[..., -100, :] += 40 * u


def _self_peaked(q: Tensor, k: Tensor) -> None:
    """Each row prefers its own column."""
    k.copy_(2 * q)


def _hot_rows(q: Tensor, k: Tensor) -> None:
    """A few rows have logits of standard deviation sixteen."""
    q[..., ::64, :] *= 16


DATA: dict[str, Callable[[Tensor, Tensor], None]] = {
    "random": _random,
    "times 8": _times_eight,
    "rising": _rising,
    "sink": _sink,
    "late spike": _late_spike,
    "self-peaked": _self_peaked,
    "hot rows": _hot_rows,
}


def inputs(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cuda") -> list[Tensor]:
    """q, k, v and the cotangent of the output."""
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(shape, device=device) for _ in range(4))
    DATA[kind](q, k)
    return [x.to(dtype) for x in (q, k, v, g)]


def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention and its logsumexp with the whole matrix."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def sdpa(backend: Any) -> Callable[..., Tensor]:
    from torch.nn.attention import sdpa_kernel

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


def gradients(call: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    out = call(*given)
    return [out.detach(), *torch.autograd.grad(out, given, g.to(out.dtype))]


def errors(found: list[Tensor], exact: list[Tensor]) -> dict[str, tuple[float, float]]:
    """Greatest and root mean square error of each result."""
    gaps = [(f.double() - e).abs() for f, e in zip(found, exact, strict=True)]
    return {n: (gap.max().item(), gap.square().mean().sqrt().item()) for n, gap in zip(NAMES, gaps, strict=True)}


def measure(kind: str, d: int, causal: bool, dtype: torch.dtype) -> dict[str, Any]:
    from torch.nn.attention import SDPBackend

    q, k, v, g = inputs(kind, (1, HEADS, LENGTH, d), dtype)
    exact = gradients(lambda q, k, v: dense(q, k, v, causal)[0], *(x.double() for x in (q, k, v, g)))
    lse = dense(q.double(), k.double(), v.double(), causal)[1]
    calls = {
        "ours": lambda *a: ops.attention(*a, causal=causal),
        "cuDNN": lambda *a: sdpa(SDPBackend.CUDNN_ATTENTION)(*a, causal),
        "flash": lambda *a: sdpa(SDPBackend.FLASH_ATTENTION)(*a, causal),
    }
    row: dict[str, Any] = {"data": kind, "features": d, "causal": causal, "dtype": str(dtype).removeprefix("torch.")}
    for name, call in calls.items():
        row[name] = errors(gradients(call, q, k, v, g), exact)
    found = ops.attention(q, k, v, causal=causal, return_lse=True)[1]
    plain = (q.float() @ k.float().mT * d**-0.5).masked_fill(
        torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cuda").triu(1) & causal, -torch.inf
    )
    row["lse"] = [(x.double() - lse).abs().max().item() for x in (found, plain.logsumexp(-1))]
    return row


def ratios(row: dict[str, Any], which: int) -> list[float]:
    """Our errors over cuDNN's: the greatest (0) or the root mean square (1)."""
    return [row["ours"][n][which] / max(row["cuDNN"][n][which], 1e-30) for n in NAMES]


def table(rows: list[dict[str, Any]]) -> str:
    names = ["data", "D", "", "dtype", "greatest, ours / cuDNN", "greatest, ours", "root mean square, ours / cuDNN"]
    lines = [f"| {' | '.join([*names, 'logsumexp: ours, torch float32'])} |", "|---|---|---|---|---|---|---|---|"]
    for r in rows:
        cells = [r["data"], str(r["features"]), "causal" if r["causal"] else "full", r["dtype"]]
        cells.append(" ".join(f"{x:.2f}" for x in ratios(r, 0)))
        cells.append(" ".join(f"{r['ours'][n][0]:.1e}" for n in NAMES))
        cells.append(" ".join(f"{x:.2f}" for x in ratios(r, 1)))
        cells.append(" ".join(f"{x:.1e}" for x in r["lse"]))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--commit", type=commit, help="the commit that is measured, where there is no repository")
    parser.add_argument("--data", nargs="*", default=list(DATA))
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    for d in (64, 128, 32, 96):
        for causal in (False, True):
            for dtype in (torch.bfloat16, torch.float16):
                if d in (32, 96) and dtype is torch.float16:
                    continue
                rows += [measure(kind, d, causal, dtype) for kind in given.data]
    head = environment() | ({"commit": given.commit} if given.commit else {})
    head |= {"command": f"python -m benchmarks.accuracy --out DIR --commit {head['commit']}"}
    given.out.mkdir(parents=True, exist_ok=True)
    write(given.out, head | {"gpu": torch.cuda.get_device_name()}, rows)
    print(table(rows))


def write(out: Path, head: dict[str, str], rows: list[dict[str, Any]]) -> None:
    """The record: every number as JSON, and the table."""
    digits = re.sub("[^0-9]", "", head["date"])
    path = out / f"accuracy-{digits[:8]}-{digits[8:12]}.json"
    path.write_text(json.dumps(head | {"rows": rows}) + "\n")
    said = "\n".join(f"- {name}: {value}" for name, value in head.items())
    path.with_suffix(".md").write_text(f"{said}\n\n{HEADING}\n\n{table(rows)}\n")


if __name__ == "__main__":
    main()
