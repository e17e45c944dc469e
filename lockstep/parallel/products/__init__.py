"""Products of fused and compiled kernels dealt to the workers of a lane, who all have the results."""
