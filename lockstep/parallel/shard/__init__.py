"""Models whose trained parameters are dealt to the workers along `data`, as shares of blocks."""
