"""Operations on lanes, without any model: plain torch here, stock kernels in `stock/`, ours in `triton/`."""
