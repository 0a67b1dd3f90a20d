"""The zoo: every layer the library is tried on beyond the ready-made ones, by name.

A layer is a body in the pair language, the plain PyTorch that people would write for it, and a way to draw inputs; see
``base.py``. Import ``ZOO`` (all of them, in order) or ``BY_NAME``.
"""

from tests.support.layers import attention, general, kernels, losses, pairs
from tests.support.layers.base import ZOO, Draw, Layer

ROOMS = (attention, losses, kernels, general, pairs)
BY_NAME = {layer.name: layer for layer in ZOO}
DIFFERENTIABLE = [layer for layer in ZOO if layer.differentiable]

__all__ = ["BY_NAME", "DIFFERENTIABLE", "ROOMS", "ZOO", "Draw", "Layer"]
