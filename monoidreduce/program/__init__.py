"""The traced pair program: expressions, the table of primitives, tracing, gradients, normal form, passes.

Knows nothing of tiles, devices or engines. May import ``errors`` and ``algebra``.
"""
