"""Bytes to batches, one way: store → order → augment → loader."""

from lockstep.data.catalog import open_data as open_data
from lockstep.data.catalog import open_store as open_store
from lockstep.data.store import Split as Split
from lockstep.data.store import Store as Store
