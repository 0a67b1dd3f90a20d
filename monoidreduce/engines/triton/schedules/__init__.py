"""How kernels are scheduled: tiles of Triton kernels, and two families of hand-scheduled Gluon kernels for Hopper.

``kernel_plan.py`` chooses tiles and says where Gluon kernels run, ``spec_from_tensors.py`` describes what a kernel is
given, ``spec_from_tensors.py`` makes it. ``resident/`` and ``pingpong.py`` hold the hand-scheduled kernels,
``gluon_parts.py`` what both share. ``docs/internals/schedules.md`` is the guide.
"""
