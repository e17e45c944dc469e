"""Frozen dataclasses that describe a run; this folder imports no torch, and from Lockstep only `errors`."""

from lockstep.spec.launch import Launch
from lockstep.spec.record import Record
from lockstep.spec.run import Checkpoint, Data, Kernels, Model, Optimizer, Run, Schedule, Train

__all__ = [
    "Checkpoint",
    "Data",
    "Kernels",
    "Launch",
    "Model",
    "Optimizer",
    "Record",
    "Run",
    "Schedule",
    "Train",
]
