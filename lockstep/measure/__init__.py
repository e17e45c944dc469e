"""What this machine is and how it computes: the numerics fingerprint, and the fastest tiles."""
