"""The machine's part of the numerics fingerprint: versions, and a hash of a few plain PyTorch operations.

Of a machine: a small fixed probe is computed and its bytes are hashed; names and versions stand beside the
hash so that a difference can be explained. Of a run: the bytes of one lane of it are hashed too.
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels import random


def fingerprint(device: torch.device) -> dict[str, str]:
    """Of a machine: the probe's hash on `device`, with the versions and the hardware that may explain it."""
    facts = {
        "probe": probe_hash(device)[:16],
        "torch": torch.__version__,
        "device": device_name(device),
    }
    if device.type == "cuda":
        facts["cuda"] = str(torch.version.cuda)
        facts["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    else:
        facts["cpu"] = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return facts


def device_name(device: torch.device) -> str:
    """The GPU's name, or `cpu`: equal hosts may differ in the CPU's name but not in its results."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def probe_hash(device: torch.device) -> str:
    """SHA-256 over the bytes of a GEMM, convolutions forward and backward, exp and reductions."""
    sha = _hash(_probe(device))
    sha.update(repr([math.cos(0.1 * i) ** 0.7 for i in range(64)]).encode())
    return sha.hexdigest()


def lane_hash(tensors: Iterable[Tensor]) -> str:
    """Of what a lane of a run gave on fixed values: 16 digits of the SHA-256 over all bytes."""
    return _hash(tensors).hexdigest()[:16]


def _hash(tensors: Iterable[Tensor]) -> hashlib._Hash:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha


def _probe(device: torch.device) -> list[Tensor]:
    images = _values("images", 8, 3, 17, 17).to(device)
    results = [_values("a", 67, 129).to(device) @ _values("b", 129, 53).to(device)]
    for channels, kernel, stride in ((8, 3, 1), (16, 5, 2), (32, 3, 1)):
        weight = _values(f"weight{channels}", channels, 3, kernel, kernel).to(device).requires_grad_()
        bias = _values(f"bias{channels}", channels).to(device)
        inputs = images.clone().requires_grad_()
        output = F.max_pool2d(F.conv2d(inputs, weight, bias, stride=stride, padding=1).relu(), 2)
        loss = output.flatten(1).logsumexp(1).mean()
        results += [output, *torch.autograd.grad(loss, (inputs, weight))]
    results += [images.exp(), images.sum(), images.mean((0, 2, 3)), images.var((0, 2, 3)), images.tanh()]
    return results


def _values(name: str, *shape: int) -> Tensor:
    """Fixed values in [−1, 1), exact on every device."""
    counter = torch.arange(math.prod(shape))
    return random.symmetric(random.key("probe", name), counter).view(shape)
