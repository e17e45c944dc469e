"""Bytes to batches, one way: store → order → augment → loader."""

from lockstep.data.source import open_store as open_store
from lockstep.data.store import Split as Split
from lockstep.data.store import Store as Store
