"""Neighbours in clouds of points: ours beside scikit-learn, KeOps and faiss, over dimensions, points and queries.

``python -m benchmarks.points`` prints a table and writes it to ``benchmarks/results/``. Every contender runs on one
thread and its CPU time counts, so that a busy machine disturbs little; the load is recorded. What would take longer
than ``--limit`` seconds, by its time for fewer queries, is left out. Libraries that are not installed are left out."""

from __future__ import annotations

import argparse
import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from monoidreduce import ops

from .cpu import environment, write_results

try:
    import faiss
except ImportError:
    faiss = None  # type: ignore[assignment]
try:
    from sklearn.neighbors import BallTree, KDTree, NearestNeighbors
except ImportError:
    KDTree = None
try:
    from pykeops.torch import LazyTensor
except ImportError:
    LazyTensor = None

K = 10
QUERIES = (1, 100, 10_000, 100_000)
FEW, MANY = 100_000, 2_000_000
# dimensions and points, the most telling first, as --minutes ends the list
CLOUDS = (
    (3, MANY),
    (32, FEW),
    (8, FEW),
    (2, MANY),
    (128, FEW),
    (8, MANY),
    (3, FEW),
    (2, FEW),
    (32, MANY),
    (128, MANY // 4),
)
HNSW = 200_000  # points up to which its graph is built in less than a minute
TREES = 8  # dimensions up to which trees of other libraries are tried
Search = Callable[[Tensor], Tensor]  # queries [M, D] to places [M, K]


def draw_cloud(count: int, features: int, seed: int) -> Tensor:
    """Points: uniform in few dimensions; in many, around 1,000 centres, as embeddings are."""
    draw = torch.Generator().manual_seed(seed)
    if features <= TREES:
        return torch.rand(count, features, generator=draw)
    centres = torch.rand(1000, features, generator=torch.Generator().manual_seed(0))
    own = centres[torch.randint(0, 1000, (count,), generator=draw)]
    return own + 0.2 * torch.randn(count, features, generator=draw)


def contenders(y: Tensor) -> Iterator[tuple[str, Callable[[], Search]]]:
    """Names, and what makes a search of the points y: its time is the time to build."""
    array, features = y.numpy(), y.shape[1]
    yield "ours, prepared", lambda: _places(ops.knn.prepare(y))
    yield "ours, one call", lambda: lambda x: ops.knn(x, y, K).indices
    if KDTree is not None:
        for name, kind in (("sklearn KDTree", KDTree), ("sklearn BallTree", BallTree)):
            if features <= TREES:
                yield name, lambda kind=kind: _tree(kind(array))  # type: ignore[misc]
        yield "sklearn brute", lambda: _tree(NearestNeighbors(n_neighbors=K, algorithm="brute").fit(array))
    if LazyTensor is not None:
        yield "KeOps", lambda: lambda x: _keops(x, y)
    if faiss is not None:
        yield "faiss flat", lambda: _faiss(faiss.IndexFlatL2(features), y)
        if features > TREES:
            yield "faiss IVF", lambda: _faiss(_ivf(features, 1024 if len(y) > 40_000 else 64), y)
            if len(y) <= HNSW:
                yield "faiss HNSW", lambda: _faiss(faiss.IndexHNSWFlat(features, 32), y)


def _places(index: Any) -> Search:
    return lambda x: index(x, K).indices


def _tree(tree: Any) -> Search:
    if hasattr(tree, "kneighbors"):
        return lambda x: torch.from_numpy(tree.kneighbors(x.numpy(), return_distance=True)[1])
    return lambda x: torch.from_numpy(tree.query(x.numpy(), K)[1])


def _keops(x: Tensor, y: Tensor) -> Tensor:
    square = ((LazyTensor(x[:, None]) - LazyTensor(y[None])) ** 2).sum(-1)
    return square.Kmin_argKmin(K, dim=1)[1]


def _ivf(features: int, cells: int) -> Any:
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(features), features, cells)
    index.nprobe = 16
    return index


def _faiss(index: Any, y: Tensor) -> Search:
    index.train(y[:: max(1, len(y) // 40_000)].contiguous().numpy())
    index.add(y.numpy())
    return lambda x: torch.from_numpy(index.search(x.numpy(), K)[1])


def cpu_ms(call: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """CPU milliseconds of a call, the least of some rounds, and what it returned."""
    best, found = float("inf"), None
    for _ in range(rounds):
        gc.collect()
        start = time.process_time()
        found = call()
        best = min(best, (time.process_time() - start) * 1e3)
        if best > 500:
            break
    return best, found


def measure(features: int, count: int, limit: float) -> dict[str, Any]:
    """Every contender on one cloud: milliseconds to build, milliseconds and recall for each number of queries."""
    y = draw_cloud(count, features, 1)
    _warm_up(features)
    rows: dict[str, dict[str, Any]] = {}
    exact: dict[int, Tensor] = {}
    for name, make in contenders(y):
        print(f"  {name}", file=sys.stderr, flush=True)
        built, search = cpu_ms(make, 1)
        row: dict[str, Any] = {"build": built, "queries": {}, "recall": {}}
        rows[name] = row
        last, asked = 0.0, 0
        for m in QUERIES:
            if asked > 1 and last * m / asked > 1e3 * limit:  # one query says little of many
                break
            x = draw_cloud(m, features, 2)
            search(x[:1])
            last, found = cpu_ms(functools.partial(search, x), 5 if last < 20 else 1)
            asked = m
            row["queries"][m] = last
            exact.setdefault(m, found)
            row["recall"][m] = _recall(found, exact[m])
        del search
    return {"features": features, "points": count, "load": os.getloadavg()[0], "contenders": rows}


def _warm_up(features: int) -> None:
    """What is compiled is compiled before it is measured."""
    y = draw_cloud(20_000, features, 3)
    for _, make in contenders(y):
        search = make()
        search(y[:3000])
        search(y[:5])


def _recall(found: Tensor, exact: Tensor) -> float:
    """The share of the exact neighbours that were found, of the first thousand queries."""
    found, exact = found[:1000], exact[:1000]
    return float((found.unsqueeze(-1) == exact.unsqueeze(-2)).any(-1).float().mean())


def markdown(results: dict[str, Any]) -> str:
    """A table for each dimension: contenders beside each other, times to build and to search."""
    lines = [f"- {k}: {v}" for k, v in results["environment"].items()]
    lines += [
        "",
        f"The {K} nearest points, float32. CPU milliseconds on one thread, the least of up to five; build is once. "
        "Exact unless a recall stands beside it. – : not run, as it would have taken too long.",
    ]
    for cloud in results["clouds"]:
        lines += ["", f"**{cloud['features']} dimensions, {cloud['points']:,} points** (load {cloud['load']:.1f})", ""]
        lines += [
            "| | build | " + " | ".join(f"{m:,} queries" for m in QUERIES) + " |",
            "|---" * (len(QUERIES) + 2) + "|",
        ]
        for name, row in cloud["contenders"].items():
            cells = [name, _number(row["build"])]
            for m in QUERIES:
                at = next((key for key in (m, str(m)) if key in row["queries"]), None)
                if at is None:
                    cells.append("–")
                    continue
                recall = row["recall"][at]
                cells.append(_number(row["queries"][at]) + (f" (recall {recall:.2f})" if recall < 0.995 else ""))
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _number(ms: float) -> str:
    return f"{ms:.2f}" if ms < 10 else f"{ms:,.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=20.0, help="seconds that one search may take")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no cloud after so many")
    parser.add_argument("--dims", type=int, nargs="*", default=[], help="only these dimensions")
    parser.add_argument("--quick", action="store_true", help="20,000 points, to try the benchmark itself; no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if faiss is not None:
        faiss.omp_set_num_threads(1)
    clouds, begin = [], time.monotonic()
    for features, count in CLOUDS if not options.quick else [(d, 20_000) for d in (2, 32)]:
        if (options.dims and features not in options.dims) or time.monotonic() - begin > 60 * options.minutes:
            continue
        print(f"{features} dimensions, {count} points", file=sys.stderr, flush=True)
        clouds.append(measure(features, count, options.limit))
    said = environment() | {"command": " ".join(["python -m benchmarks.points", *sys.argv[1:]])}
    results = {"environment": said, "clouds": sorted(clouds, key=lambda c: (c["features"], c["points"]))}
    text = markdown(results)
    print(text)
    if not options.quick:
        write_results("points", results, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
