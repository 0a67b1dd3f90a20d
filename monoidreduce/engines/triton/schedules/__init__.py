"""How kernels are scheduled: plain Triton tiles, and warp-specialised templates in Gluon for Hopper."""
