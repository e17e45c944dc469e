"""The data pipeline, from files to training batches: store → order → augment → loader.

Modules are imported on first use, so that `lockstep --help`, which lists the data sets, starts fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.data.catalog import open_data as open_data
    from lockstep.data.catalog import open_store as open_store
    from lockstep.data.store import Split as Split
    from lockstep.data.store import Store as Store

_FILES = {"open_data": "catalog", "open_store": "catalog", "Split": "store", "Store": "store"}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(name)
    return getattr(import_module(f"lockstep.data.{_FILES[name]}"), name)
