"""The lane tree and the workers: how lanes are summed, and all that passes between workers."""
