"""Data sets of the user's in Python: their splits, and the processes that read them."""
