"""A plan applied to a model: which layers a worker computes, and when."""
