"""The command line: one file per verb; no other part of Lockstep prints."""
