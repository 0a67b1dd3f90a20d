"""How kernels are scheduled: tiles of Triton kernels, and two families of hand-scheduled Gluon kernels for Hopper.

``spec_from_tensors.py`` describes what a kernel is given, ``kernel_plan.py`` chooses tiles. Both families are filled
from parts of ``gluon_parts.py``. ``docs/internals/schedules.md`` is the guide.

- **A resident operand**: the kept tile stays in shared memory while two MMAs are chained. The first makes scores of it
  and a block of the folded axis, arithmetic makes weights of the scores, and the second adds weights times a block to
  the accumulators: attention forward, MLPs and their gradients (``attention.py``, ``sum_of_products.py``,
  ``single_warpgroup.py``, ``joint_gradients.py``).
- **A K loop**: one producer fills a ring buffer, two consumers alternate (``pingpong.py``).
"""
