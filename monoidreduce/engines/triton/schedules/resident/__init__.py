"""Warp-specialised kernels with a resident operand: the kept tile stays in shared memory while two MMAs are chained.

The first MMA makes scores of the resident tile and a block of the folded axis, arithmetic makes weights of the scores,
and the second MMA adds weights times a block to the accumulators. Attention forward, MLPs and their gradients.
"""
