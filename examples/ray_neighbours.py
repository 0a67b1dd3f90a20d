"""Jobs over files on Ray: all-pairs neighbours, semantic de-duplication and a kernel density of the same points.

Embeddings lie in several .npy files, as a data pipeline leaves them. Each job is one call; its results are files again.
A cluster is started on this machine unless RAY_ADDRESS names one.
"""

import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from examples.shared import command
from monoidreduce import Col, Row, ops
from monoidreduce.integrations import ray as mr_ray


class Earlier(NamedTuple):
    """The most similar of the items that come before this one, and how similar it is."""

    similarity: Tensor
    item: Tensor


@mr.op
def nearest_before(x: Row["d"], y: Col["d"]):
    s = F.normalize(x, dim=-1) @ F.normalize(y, dim=-1)
    s = torch.where(mr.col_index < mr.row_index, s, -torch.inf)  # only pairs below the diagonal are computed
    return Earlier(mr.max(s), mr.argmax(s))


class Result(NamedTuple):
    """Neighbours of each point; which points stay, and which were copies; the log-density at each point."""

    neighbours: Tensor
    kept: Tensor
    copies: Tensor
    log_density: Tensor


def make_points(folder: Path, points: int, features: int, files: int) -> Tensor:
    """Clustered points, every tenth of them a near copy of an earlier one, in several files; which are copies."""
    gen = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(20, features, generator=gen)
    x = centres[torch.randint(20, (points,), generator=gen)] + torch.randn(points, features, generator=gen)
    copies = torch.arange(points) % 10 == 9
    x[copies] = x[copies.nonzero()[:, 0] - 9] + 1e-3 * torch.randn(int(copies.sum()), features, generator=gen)
    for k, part in enumerate(x.chunk(files)):
        numpy.save(folder / f"x{k:03d}.npy", part.numpy())
    return copies


def main(
    points: int = 20_000, features: int = 32, files: int = 8, k: int = 10, threshold: float = 0.999, workers: int = 2
) -> Result:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copies = make_points(folder, points, features, files)
        x = str(folder / "x*.npy")

        near = mr_ray.run(ops.knn, rows=x, cols=x, k=k, exclude_self=True, out=folder / "near", workers=workers)
        found = near.load()
        print(
            f"{points} × {points} pairs in {near.seconds:.1f} s: nearest at {found.values[:, 0].median():.3f} (median)"
        )

        # Keep-first: an item goes if one that comes before it is more similar than the threshold
        before = mr_ray.run(nearest_before, rows=x, cols=x, out=folder / "before", workers=workers).load()
        kept = before.similarity <= threshold
        print(f"{int((~kept).sum())} of {points} are copies of an earlier one; {int(copies.sum())} were made")

        log_p = mr_ray.run(ops.kernel_logsumexp, rows=x, cols=x, out=folder / "density", workers=workers, bandwidth=1.0)
        return Result(found.indices, kept, copies, log_p.load())


if __name__ == "__main__":
    command(main)
