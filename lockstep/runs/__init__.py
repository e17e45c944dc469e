"""A run: its state, its directory on disk, and what can be done with it once it is trained."""
