"""Layers computed in pieces: some channels, some rows, from the rows and the halo that a worker has."""
