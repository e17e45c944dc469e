"""Rules on samples: their order, how they are augmented and normalized."""
