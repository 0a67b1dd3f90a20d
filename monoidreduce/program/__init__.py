"""The traced pair program: expressions, the table of primitives, tracing, and the compiler (``lower.py``).

Two layers, with ``reductions`` between them. Below: expressions, primitives and symbols, in which kinds of reduction
are written; above: what asks kinds (the vocabulary of bodies, normal form, gradients, lowering). Knows nothing of
tiles, devices or engines. May import ``errors``, ``algebra`` and, above, ``reductions``.
"""
