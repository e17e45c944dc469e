"""The runs of a folder, read by their files."""
