"""Checkpoints that are written while training goes on."""
