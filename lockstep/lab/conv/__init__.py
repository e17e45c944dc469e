"""Convolution by every algorithm: direct, im2col, implicit GEMM, FFT and Winograd, with both gradients."""
