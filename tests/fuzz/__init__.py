"""A differential fuzzer: random programs of the pair language against plain torch on whole [..., M, N] tensors.

``tree`` holds syntax trees and their two renderings, ``generate`` draws them, ``programs`` makes a tree, its arguments
and its settings one program, ``compare`` runs it and reports what differs, ``shrink`` makes a failing one small.
``python -m tests.fuzz --programs 10000 --seed 0`` is the long run;
CI runs the share of ``tests/unit/engines/test_fuzz.py``.
"""
