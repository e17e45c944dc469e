"""The command line: one file a verb, and the only part that prints."""
