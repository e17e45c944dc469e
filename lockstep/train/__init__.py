"""Training: a batch becomes a step, steps become a run; reported as events."""
