"""Pictures and tables made from records and run directories."""
