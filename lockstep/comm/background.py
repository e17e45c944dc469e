"""Background threads whose work can be abandoned, where a result may never come.

A thread begins on GPU 0, whichever its process has chosen, so each is given the GPU that its work is for.
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
    """Does one thing after another beside this thread, until it is closed or nobody has it any more."""

    def __init__(self, name: str, device: torch.device | None) -> None:
        """`device` is what the work is for; None if it touches none."""
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._end = weakref.finalize(self, self._queue.put, None)
        self._end.atexit = False
        threading.Thread(
            target=_work, args=[self._queue, device], name=f"lockstep-{name}", daemon=True
        ).start()

    def submit(self, make: Callable[[], T]) -> Future[T]:
        """What `make` will give; an error is raised where the result is asked for."""
        found: Future[T] = Future()
        self._queue.put((make, found))
        return found

    def close(self) -> None:
        """End once all is done."""
        self._end()


def run_in_thread(make: Callable[[], T], device: torch.device | None) -> Future[T]:
    """What `make` will give; its thread is left alone if nobody waits for that any longer."""
    background: BackgroundThread[T] = BackgroundThread("once", device)
    return background.submit(make)


def _work(items: queue.SimpleQueue[_Item | None], device: torch.device | None) -> None:
    while (item := items.get()) is not None:
        make, found = item
        try:
            if device and device.type == "cuda":
                torch.cuda.set_device(device)
            found.set_result(make())
        except BaseException as error:  # it is raised where the result is asked for
            found.set_exception(error)
        del item, make, found  # nothing is held while this waits for more
