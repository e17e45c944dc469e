"""Training: a batch becomes a step, steps become a run; told as events."""
