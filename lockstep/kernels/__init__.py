"""Operations that know no model: in torch and on CUDA here, stock kernels in `stock/`, ours in `triton/`."""
