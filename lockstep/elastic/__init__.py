"""Elastic jobs: start workers, watch and replace them, and tell them about each other."""
