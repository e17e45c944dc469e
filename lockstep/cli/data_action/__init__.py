"""Actions of `lockstep data` that have much to say for themselves: pack and show."""
