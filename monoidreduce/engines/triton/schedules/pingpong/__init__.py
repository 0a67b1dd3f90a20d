"""Warp-specialised kernels with a K loop: one producer fills a ring buffer, two consumers alternate (ping-pong).

While one consumer warp group multiplies its tile, the other runs the epilogue of its own. GEMMs of many features with a
fold or with weights as their epilogue, and contractions of a panel's weights with vectors.
"""
