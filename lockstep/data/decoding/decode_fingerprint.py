"""Which libraries decode images here, and a hash of pixels that they give: a part of a run's identity.

The hash is over two small JPEGs beside this file, one of them progressive: fitted and in boxes, grey and in
colour, at every scale. A worker whose libraries give other pixels has another identity, and is refused.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

import numpy as np
import PIL
from PIL import features

from lockstep.data.decoding.decode import cut_image, find_libraries, fit_image

_PROBES = ("probe.jpg", "probe_progressive.jpg")
_SHAPES = ((3, 52, 70), (3, 20, 24), (1, 11, 17), (3, 9, 5))
_BOX = 3, 5, 45, 61  # top, left, height, width


def explain_decoder() -> tuple[str, ...]:
    """A sentence for the user where images are read slower than they could be; else nothing."""
    if all(find_libraries()):
        return ()
    return (
        "JPEGs are decoded by Pillow, about half as fast as with the extra lockstep-train[images], which is "
        "another decoder: install it before you train, not between a run and its resume",
    )


@cache
def decode_fingerprint(decoder: str = "cpu") -> str:
    """Versions of the libraries, and the first digits of the hash."""
    digest = hashlib.sha256()
    gpu = _hash_on_gpu(digest) if decoder == "nvjpeg" else []
    for name in _PROBES:
        data = files(__package__).joinpath(name).read_bytes()
        for shape in _SHAPES:
            out = np.empty(shape, np.uint8)
            fit_image(data, out)
            digest.update(out.data)
            cut_image(data, _BOX, out)
            digest.update(out.data)
    simplejpeg, cv2 = find_libraries()
    found = [*gpu, f"pillow {PIL.__version__}", f"libjpeg {features.version('jpg')}"]
    found += [f"simplejpeg {simplejpeg.__version__}"] if simplejpeg else []
    found += [f"opencv {cv2.__version__}"] if cv2 else []
    return f"{', '.join(found)}, pixels {digest.hexdigest()[:16]}"


def _hash_on_gpu(digest: hashlib._Hash) -> list[str]:
    """Add what nvJPEG makes of the first probe to the hash; returns its name."""
    import torch

    from lockstep.data.decoding.nvjpeg import find_nvjpeg

    gpu = find_nvjpeg()
    coded = gpu.parse(files(__package__).joinpath(_PROBES[0]).read_bytes())
    if coded:
        for shape in _SHAPES:
            out = torch.empty((2, *shape), dtype=torch.uint8)
            gpu.decode([coded, coded], [None, _BOX], out, 1.0)
            digest.update(out.numpy().data)
    return [gpu.name]
