"""What this machine is and how it computes."""
