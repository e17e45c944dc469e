"""What a Run's names and numbers mean: rules of optimizers, rates, orders, augmentations and patterns."""
