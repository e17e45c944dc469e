"""Asks kernels whether they keep their bits when a layer is cut."""
