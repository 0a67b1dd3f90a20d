"""How kernels are scheduled: tiles of Triton kernels, and two families of hand-scheduled Gluon kernels for Hopper.

``kernel_plan.py`` chooses tiles and says where Gluon kernels run, ``spec_from_tensors.py`` and ``float32_split.py``
prepare what a kernel is given. ``resident/`` and ``pingpong/`` hold the hand-scheduled kernels, ``gluon_parts.py`` what
both share. ``docs/internals/schedules.md`` is the guide.
"""
