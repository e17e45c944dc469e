"""Batch norm by lane in Triton: statistics, the forward pass, gradients, and the mean over pixels."""
