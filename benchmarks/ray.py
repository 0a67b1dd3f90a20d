"""Folds over files on 1, 2 and 4 Ray workers, beside the cost model: ``python -m benchmarks.ray``.

Each job reads its rows and columns from ``.npy`` files and writes its results as files. Its workers have one core each.
The seconds are of the whole call on a cluster that runs already: starting the workers, folding, merging, writing. Below
stand the cost model's figures for a job that no one machine could do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy
import torch

from monoidreduce import ops
from monoidreduce.integrations import ray as mr_ray
from monoidreduce.integrations.ray.driver import start_here
from monoidreduce.plan import communication

from .cpu import RESULTS, environment

WORKERS = (1, 2, 4)
CASES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "10 nearest neighbours": (ops.knn, 64, {"k": 10}),
    "Gaussian kernel sum": (ops.kernel_sum, 8, {}),
}
LARGE = (  # workers, machines, the workers' device: as the table says it
    (6400, 100, "cpu", "64 cores each, a worker a core"),
    (800, 100, "cuda", "8 H200 each, a worker a GPU"),
)


def measure(folder: Path, points: int) -> list[dict[str, Any]]:
    """The cases on each number of workers; all results of a case must have the same bits."""
    found = []
    for name, (fold, features, options) in CASES.items():
        file = folder / f"{features}.npy"
        numpy.save(file, torch.randn(points, features, generator=torch.Generator().manual_seed(0)).numpy())
        first: Any = None
        for workers in WORKERS:
            started: list[float] = []
            began = time.perf_counter()

            def look(progress: mr_ray.Progress, began: float = began, started: list[float] = started) -> None:
                started.append(time.perf_counter() - began)

            out = folder / f"{features}-{workers}"
            given = {"rows": str(file), "cols": str(file), "workers": workers, "quiet": True, **options}
            result = mr_ray.run(fold, out=out, on_progress=look, **given)
            seconds = time.perf_counter() - began
            loaded = [t for t in (result.load() if isinstance(result.load(), tuple) else (result.load(),))]
            first = first or loaded
            same = all(torch.equal(a, b) for a, b in zip(first, loaded, strict=True))
            forecast = mr_ray.estimate(
                fold,
                rows=(points, features),
                cols=(points, features),
                workers=workers,
                **options,
            )
            found.append(
                {
                    "case": name,
                    "points": points,
                    "features": features,
                    "workers": workers,
                    "seconds": round(seconds, 2),
                    "starting": round(started[0], 2),
                    "core_seconds": round(result.cpu_seconds, 2),
                    "forecast": round(forecast.compute_seconds + forecast.units * communication.OVERHEAD, 2),
                    "same_bits": same,
                }
            )
            print(found[-1], flush=True)
    return found


def forecast(points: int) -> list[dict[str, Any]]:
    """The cost model's figures for ``points`` × ``points`` pairs on 100 machines."""
    found = []
    for name, (fold, features, options) in CASES.items():
        for workers, machines, device, text in LARGE:
            cost = mr_ray.estimate(
                fold, rows=(points, features), cols=(points, features), workers=workers, machines=machines,
                device=device, **options
            )  # fmt: skip
            found.append({"case": name, "features": features, "cluster": f"{machines} machines, {text}",
                          **{n: getattr(cost, n) for n in ("workers", "units", "unit_seconds", "seconds", "read_bytes",
                                                           "state_bytes", "peak")}})  # fmt: skip
    return found


def markdown(results: dict[str, Any]) -> str:
    """The results as two tables."""
    lines = [f"- {key}: {value}" for key, value in results["environment"].items()]
    lines += [
        f"- load of the machine before and after (runnable processes): {results['load'][0]:.1f}, "
        f"{results['load'][1]:.1f}",
        "",
        f"Workers of one core each on {os.cpu_count()} cores: four workers share two. Starting: until the first worker "
        "is there (its process imports torch). Core-seconds: CPU time of all workers' units together; unlike the "
        "seconds it hardly depends on what else the machine does, and where it stays the same, more cores make the "
        "job as much faster. Forecast: the same by the cost model.",
        "",
        "| job | workers | seconds | of these starting | core-seconds | forecast, core-seconds | same bits |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results["measured"]:
        lines.append(
            f"| {r['case']}, {r['points']} × {r['points']}, D {r['features']} | {r['workers']} | {r['seconds']} | "
            f"{r['starting']} | {r['core_seconds']} | {r['forecast']} | {'yes' if r['same_bits'] else 'NO'} |"
        )
    lines += [
        "",
        f"The cost model for {results['large']:.0e} × {results['large']:.0e} pairs, computed and not measured. A core "
        "is one of this machine at the rates measured here, a disk reads 1 GB/s, and no time is lost to stragglers:",
        "",
        "| job | cluster | time | units | a unit | a machine reads | states moved by a machine | a worker holds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results["forecast"]:
        lines.append(
            f"| {r['case']}, D {r['features']} | {r['cluster']} | {r['seconds'] / 3600:.1f} h | {r['units']:,} | "
            f"{r['unit_seconds']:.1f} s | {r['read_bytes'] / 1e12:.2f} TB | {r['state_bytes'] / 1e12:.2f} TB | "
            f"{r['peak'] / 1e6:.0f} MB |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    import ray

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=40_000)
    parser.add_argument("--large", type=int, default=10**9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mr-ray-") as folder:
        start_here(max(WORKERS), f"{folder}/r")
        told = environment()
        told["versions"] += f", ray {ray.__version__}"
        told["command"] = " ".join(["python -m benchmarks.ray", *sys.argv[1:]])
        measured = measure(Path(folder), given.points)
        ray.shutdown()
    results = {
        "environment": told,
        "load": [before, os.getloadavg()[0]],
        "measured": measured,
        "large": given.large,
        "forecast": forecast(given.large),
    }
    stamp = time.strftime("%Y%m%d-%H%M", time.gmtime())
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"ray-{stamp}.json").write_text(json.dumps(results, indent=1) + "\n")
    (given.out / f"ray-{stamp}.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
