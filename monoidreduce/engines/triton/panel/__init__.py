"""The panel schedule on a GPU: vendor GEMMs fill panels, generated kernels do the rest.

``kernel_step.py`` runs a loop over panels. It takes memory from ``arena.py``, which also plans what fits, and adds up
in ``accumulators.py``, which also keeps weights in the memory of gradients. Weights are written by ``row_kernel.py``,
which fuses stages, or by a GEMM with an epilogue (``epilogue.py``); ``row_factor.py`` holds
what is known late of a row, ``accumulators.py`` has GEMMs of weights and vectors.
"""
