"""State that workers share instead of keeping it each: how it is cut, summed into shares, and gathered."""
