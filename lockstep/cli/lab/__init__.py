"""The verbs of the laboratory: `lockstep bench gemm`."""
