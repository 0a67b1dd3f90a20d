"""The traced pair program: expressions, the table of primitives, tracing, and the compiler (``compile.py``).

Knows nothing of tiles, devices or engines. May import ``errors`` and ``algebra``.
"""
