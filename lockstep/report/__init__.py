"""Pictures drawn from run directories."""
