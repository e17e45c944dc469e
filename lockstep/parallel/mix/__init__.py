"""Fully connected layers by channel over the workers along data, beside layers that each has for itself."""
