"""Kernels of our own for a GPU, in Triton: each takes all lanes of a worker in one launch.

A sample's forward and data gradient do not depend on the batch it is in, because every row of a tile is
summed over K alone, in one order; what reduces over samples is written lane by lane.
"""
