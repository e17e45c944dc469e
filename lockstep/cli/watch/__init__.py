"""What follows a run by its events: the terminal and trackers."""
