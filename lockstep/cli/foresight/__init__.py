"""Verbs that say what a run will cost before it starts, and show what runs have cost."""
