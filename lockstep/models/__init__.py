"""Convolutional networks as plain modules of ordered blocks that know nothing of parallelism."""

from lockstep.models.block import blocks
from lockstep.models.registry import build, build_model, model_names
from lockstep.models.weights import load_weights

__all__ = ["blocks", "build", "build_model", "load_weights", "model_names"]
