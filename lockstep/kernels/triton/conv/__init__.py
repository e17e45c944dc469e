"""Convolutions in Triton: fused layers, strided data gradients, kernels that load by TMA, and their tiles."""
