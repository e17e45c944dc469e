"""Operations, one a file, that know lanes and never a model: references here, then `stock/` and `triton/`."""
