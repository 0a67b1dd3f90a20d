"""Past one machine: a fold whose rows and columns are files or Ray datasets, on the workers of a Ray cluster.

    found = run(ops.knn, rows="x/*.npy", cols="y/*.npy", k=10, out="neighbours/", workers=4)

``grid.py`` cuts the pairs into units and says in which order their states merge; ``schedule.py`` says who does what
next; ``worker.py`` is what an actor runs, on the fold of one row block (``block.py``); ``states.py`` keeps states and
results as files; ``tables.py`` reads rows and columns; ``folds.py`` makes streams of ops and layers; ``driver.py``
puts it together. The package ``ray`` is imported when ``run`` is called.
"""

from .driver import Progress, Result, run
from .forecast import estimate

__all__ = ["Progress", "Result", "estimate", "run"]
