"""A function of the user's own that changes training images, on the host, in the threads that decode.

Data pipeline: store → order → own change → changes → augment → loader. The function gets an image, uint8
[H, W, C], and a generator that is keyed by seed, epoch and sample, and gives an image of the same shape and
type. NumPy's Philox counts under a key, so its bits are the same on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.data.decoding.batch_decoder import cut_range, in_parallel
from lockstep.data.decoding.decode import Pixels
from lockstep.errors import DataError
from lockstep.kernels import random

OwnFunction = Callable[[Pixels, np.random.Generator], Pixels]
_TRIED = 16  # draws of the trial
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class OwnChange:
    """The function, and the seed of the run."""

    function: OwnFunction
    seed: int

    def apply(self, images: Tensor, numbers: Tensor, epoch: int) -> Tensor:
        """Change a batch of uint8 images [N, C, H, W]; the numbers are of `sample_ids`."""
        source: Pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
        result = torch.empty_like(images, memory_format=torch.contiguous_format)
        out: Pixels = result.numpy()
        base, keys = random.key("own-augment", self.seed, epoch) & _WORD, numbers.tolist()

        def fill(part: range) -> None:
            for place in part:
                out[place] = self._change(source[place], (base, keys[place])).transpose(2, 0, 1)

        for _ in in_parallel(fill, cut_range(len(keys))):
            pass
        return result

    def try_out(self, shape: tuple[int, int, int]) -> str:
        """Try the function on noise, C H W; gives a hash of its results, or says what is wrong with them."""
        pixels = torch.arange(shape[0] * shape[1] * shape[2]).expand(_TRIED, -1)
        images = random.integers(random.key("own-augment"), pixels, 256).byte().view(_TRIED, *shape)
        found, again = (self.apply(images.clone(), torch.arange(_TRIED), 0) for _ in range(2))
        if not torch.equal(found, again):
            raise self._wrong("gives another image for the same generator: draw from the generator alone")
        return hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16]

    def _change(self, image: Pixels, key: tuple[int, int]) -> Pixels:
        generator = np.random.Generator(np.random.Philox(key=np.array(key, np.uint64)))
        told = _tell(image)
        try:
            found = self.function(image, generator)
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise self._wrong(f"fails on an image, {told}: {first}") from error
        if not isinstance(found, np.ndarray) or _tell(found) != told:
            raise self._wrong(f"gives {_tell(found)} for an image, {told}: shape and type must stay")
        return found

    def _wrong(self, text: str) -> DataError:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return DataError(f"augment={name} {text}")


def _tell(image: object) -> str:
    if not isinstance(image, np.ndarray):
        return f"a {type(image).__name__}"
    return f"{image.dtype} {list(image.shape)}"
