"""What closed forms leave out: events of a step with stragglers, and long runs in which nodes fail."""
