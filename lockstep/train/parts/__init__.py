"""What hangs on the samples of a lane: found before the first step for every batch that a run has."""
