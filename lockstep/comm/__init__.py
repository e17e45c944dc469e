"""How lanes are summed: the lane tree now, and later the only caller of collectives."""
