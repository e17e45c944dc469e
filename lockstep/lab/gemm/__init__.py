"""Products of matrices: a ladder from one thread an element to what the vendor ships."""
