"""Convolutions in Triton: fused layers, gradients with strides, copies by TMA, and the tiles they use."""
