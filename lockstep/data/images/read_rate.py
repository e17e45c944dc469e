"""How fast images are read here: their bytes from a cold and a warm cache, and as training reads them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lockstep.data.augment import Augment
from lockstep.data.decoding.batch_decoder import ImageSource, cut_range, in_parallel
from lockstep.data.decoding.decode import Encoded
from lockstep.data.feeding import choose_feeding
from lockstep.data.images.encoded_split import EncodedSplit
from lockstep.data.store import Split
from lockstep.spec.launch import Launch

_AT_ONCE = 256  # samples, as of a step


@dataclass(frozen=True)
class ReadRate:
    """A way of reading by some threads: images a second, and megabytes of files where they are read."""

    what: str
    threads: int
    images_s: float
    mb_s: float | None


def measure_rates(split: Split, augment: Augment, threads: Sequence[int], most: int) -> Iterator[ReadRate]:
    """Read up to `most` images in an epoch's order, by each number of threads."""
    ids = augment.order(0, torch.arange(min(most, len(split))), len(split)) % len(split)
    for number in threads:
        choose_feeding(Launch(decode_threads=number))
        if isinstance(split, EncodedSplit):
            split.source.forget(ids)
            for what in ("files, cold cache", "files, warm cache"):
                seconds, num_bytes = _time(partial(_read_bytes, split.source), ids)
                yield ReadRate(what, number, len(ids) / seconds, num_bytes / seconds / 1e6)
        seconds, _ = _time(partial(_read_pixels, split, augment), ids)
        yield ReadRate("as training reads", number, len(ids) / seconds, None)


def measure_held(split: EncodedSplit, augment: Augment, mb_s: float | None, most: int) -> float:
    """Images a second as training reads them from a cold cache, by all cores, and by no more than `mb_s`."""
    ids = augment.order(0, torch.arange(min(most, len(split))), len(split)) % len(split)
    choose_feeding(Launch())
    split.source.forget(ids)
    held = split.read_by(_HeldSource(split.source, mb_s)) if mb_s else split
    return len(ids) / _time(partial(_read_pixels, held, augment), ids)[0]


class _HeldSource:
    """A source whose bytes come at no more than a rate, all threads together."""

    def __init__(self, source: ImageSource, mb_s: float) -> None:
        self._source, self._bytes_s = source, 1e6 * mb_s
        self._lock, self._free = threading.Lock(), time.perf_counter()
        self.where, self.sizes, self.forget = source.where, source.sizes, source.forget
        self.content = source.content

    def __len__(self) -> int:
        return len(self._source)

    def read(self, index: int) -> Encoded:
        data = self._source.read(index)
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + len(data) / self._bytes_s
            until = self._free
        time.sleep(max(until - time.perf_counter(), 0.0))
        return data


def _read_bytes(source: ImageSource, ids: Tensor) -> int:
    numbers = ids.tolist()

    def count(part: range) -> int:
        return sum(len(bytes(source.read(numbers[place]))) for place in part)

    return sum(in_parallel(count, cut_range(len(numbers))))


def _read_pixels(split: Split, augment: Augment, ids: Tensor) -> int:
    if augment.box_area is None and isinstance(split, EncodedSplit):
        split.decode(ids)  # not what it keeps
    else:
        augment.read(split, ids, 0)
    return 0


def _time(read: Callable[[Tensor], int], ids: Tensor) -> tuple[float, int]:
    """Seconds, and what the calls for each part of the ids give together."""
    start, total = time.perf_counter(), 0
    for part in ids.split(_AT_ONCE):  # type: ignore[no-untyped-call]
        total += read(part)
    return time.perf_counter() - start, total
