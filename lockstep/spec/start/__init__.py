"""What a run meets where it is started: signals that ask it to stop, and launchers of other nodes."""
