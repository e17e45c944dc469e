"""Background threads whose work can be abandoned, where a result may never come.

In a new thread GPU 0 is the current one, whatever the process has chosen, and products are computed by as
many threads as there are cores until torch was asked for its number. So each thread gets both here.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
_Item = tuple[Callable[[], Any], Future[Any]]


class BackgroundThread(Generic[T]):
    """Runs submitted functions one after another, until it is closed or garbage-collected."""

    def __init__(self, name: str, device: torch.device | None) -> None:
        """`device` is the one that the work uses; None if it uses none."""
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._end = weakref.finalize(self, self._queue.put, None)
        self._end.atexit = False
        threading.Thread(
            target=_work, args=[self._queue, device], name=f"lockstep-{name}", daemon=True
        ).start()

    def submit(self, make: Callable[[], T]) -> Future[T]:
        """Queue `make`; the future holds its result, or raises its error."""
        found: Future[T] = Future()
        self._queue.put((make, found))
        return found

    def close(self) -> None:
        """End the thread once all submitted work is done."""
        self._end()


def run_in_thread(make: Callable[[], T], device: torch.device | None) -> Future[T]:
    """Run `make` in a thread of its own, which a caller may abandon by dropping the future."""
    background: BackgroundThread[T] = BackgroundThread("once", device)
    return background.submit(make)


def _work(items: queue.SimpleQueue[_Item | None], device: torch.device | None) -> None:
    torch.get_num_threads()  # from here on it is that of the process: more would give products other bits
    while (item := items.get()) is not None:
        make, found = item
        try:
            if device and device.type == "cuda":
                torch.cuda.set_device(device)
            found.set_result(make())
        except BaseException as error:  # raised again by the future
            found.set_exception(error)
        del item, make, found  # a waiting thread must keep nothing alive
