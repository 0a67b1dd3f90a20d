"""A job on a Ray cluster that it starts itself: ``python -m tests.support.ray_job FILE OUT [SHARE]``.

With a share of the pairs, the process kills itself once so many are done.
"""

import os
import signal
import sys

from monoidreduce import ops
from monoidreduce.integrations import ray as mr_ray


def main(file: str, out: str, share: str = "2") -> None:
    before = []

    def look(progress: mr_ray.Progress) -> None:
        before.append(progress.pairs_before / progress.pairs)
        if progress.pairs_done > float(share) * progress.pairs:
            print("killing", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    mr_ray.run(ops.knn, rows=file, cols=file, out=out, k=5, exclude_self=True, workers=2, row_block=500, col_chunk=500,
               quiet=True, on_progress=look)  # fmt: skip
    print(before[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
