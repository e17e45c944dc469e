"""Threads that wait for what may never end, so that who needs the result can leave them behind."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Hand(Generic[T]):
    """Does one thing after another beside this thread; ends with the process."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], T], Future[T]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"lockstep-{name}", daemon=True).start()

    def submit(self, make: Callable[[], T]) -> Future[T]:
        """What `make` will give; an error is raised where the result is asked for."""
        found: Future[T] = Future()
        self._queue.put((make, found))
        return found

    def close(self) -> None:
        """End once all is done."""
        self._queue.put(None)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            make, found = item
            try:
                found.set_result(make())
            except Exception as error:  # it is raised where the result is asked for
                found.set_exception(error)
            del item, make, found  # nothing is held while this waits for more


def in_thread(make: Callable[[], T]) -> Future[T]:
    """What `make` will give; its thread is left alone if nobody waits for that any longer."""
    hand: Hand[Any] = Hand("once")
    found = hand.submit(make)
    hand.close()
    return found
