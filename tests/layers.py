"""The zoo: every layer the library is tried on beyond the ready-made ones, by name.

A layer is a body in the pair language, the plain PyTorch that people would write for it, and a way to draw inputs; see
``layers_base.py``. Import ``ZOO`` (all of them, in order) or ``BY_NAME``.
"""

from tests import layers_attention, layers_general, layers_kernels, layers_losses, layers_pairs
from tests.layers_base import ZOO, Draw, Layer

ROOMS = (layers_attention, layers_losses, layers_kernels, layers_general, layers_pairs)
BY_NAME = {layer.name: layer for layer in ZOO}
DIFFERENTIABLE = [layer for layer in ZOO if layer.differentiable]

__all__ = ["BY_NAME", "DIFFERENTIABLE", "ROOMS", "ZOO", "Draw", "Layer"]
