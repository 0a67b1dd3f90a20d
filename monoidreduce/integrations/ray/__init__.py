"""Past one machine: a fold whose rows and columns are files or Ray datasets, on the workers of a Ray cluster.

    found = run(ops.knn, rows="x/*.npy", cols="y/*.npy", k=10, out="neighbours/", workers=4)

``schedule.py`` cuts the pairs into units, says in which order their states merge and who does what next, and keeps
states and results as files; ``worker.py`` is what an actor runs; ``tables.py`` reads rows and columns; ``folds.py``
makes streams of ops and layers and folds one row block; ``driver.py`` puts it together. The package ``ray`` is
imported when ``run`` is called.
"""

from .driver import Progress, Result, run
from .folds import estimate

__all__ = ["Progress", "Result", "estimate", "run"]
