"""The lane tree, which fixes the order of sums over lanes, and everything that passes between workers."""
