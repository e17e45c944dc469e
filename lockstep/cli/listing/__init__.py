"""The parts of `lockstep runs`."""
