"""What the command line asks of a batch system."""
