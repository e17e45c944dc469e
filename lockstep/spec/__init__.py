"""Frozen dataclasses that describe a run; this folder imports no torch, and from Lockstep only `errors`."""

from lockstep.spec.launch import Launch
from lockstep.spec.record import Record
from lockstep.spec.rule.evaluated import Evaluate
from lockstep.spec.rule.update_rule import Optimizer, Schedule
from lockstep.spec.run import Checkpoint, Data, Kernels, Model, Run, Train

__all__ = [
    "Checkpoint",
    "Data",
    "Evaluate",
    "Kernels",
    "Launch",
    "Model",
    "Optimizer",
    "Record",
    "Run",
    "Schedule",
    "Train",
]
