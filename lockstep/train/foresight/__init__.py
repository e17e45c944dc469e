"""Measures what a run will cost: whole steps of one worker, and its layers."""
