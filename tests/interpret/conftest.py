"""Kernels run here in Triton's interpreter, on the CPU. The variable must be set before anything imports Triton."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest

pytest.importorskip("triton")
