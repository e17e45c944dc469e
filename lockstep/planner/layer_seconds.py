"""Seconds of a layer for some images, whole or a part of it: measured, else from the rooflines of a worker.

Measured times between two numbers of images lie on a straight line. Without a measurement a layer takes the
time of its multiplications or of its bytes, whichever is longer, and of starting its operations.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.spec.cluster import Cluster
from lockstep.spec.profile import LayerProfile, LayerTime, Profile

_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
_LIKE = {"fp16": "bf16"}  # as fast on every device that has both
_STARTS = 3  # operations of a layer: forward, and two gradients
SMALL_PRODUCTS = 0.5  # the share of a large product's rate that layers reach, if nothing was measured


@dataclass(frozen=True)
class Pass:
    """Seconds forward and backward."""

    forward_s: float
    backward_s: float

    @property
    def both_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class LayerTable:
    """All layers of a profile for some images, by part; each part is computed once, for many plans."""

    profile: Profile
    cluster: Cluster
    images: int
    _known: dict[tuple[str, int], list[Pass]] = field(default_factory=dict)

    def passes(self, part: str = "", at_once: int = 1) -> list[Pass]:
        """A pass of a lane for every layer; `at_once` lanes share the start of an operation."""
        if (part, at_once) not in self._known:
            profile, cluster = self.profile, self.cluster
            self._known[part, at_once] = [
                layer_pass(profile, layer, cluster, self.images, part, at_once) for layer in profile.layers
            ]
        return self._known[part, at_once]

    def whole_s(self, images: int) -> float:
        """Seconds of all layers with another number of images."""
        return sum(
            layer_pass(self.profile, each, self.cluster, images).both_s for each in self.profile.layers
        )


def layer_pass(
    profile: Profile, layer: LayerProfile, cluster: Cluster, images: int, part: str = "", at_once: int = 1
) -> Pass:
    """One layer, or the `part` of it that a worker has, as in channel=2."""
    if is_measured(profile, cluster):
        rows = [row for row in layer.times if row.part == part] if part else []
        if rows:
            return _between(rows, images)
        whole = _between([row for row in layer.times if not row.part], images)
        share = 1.0 / int(part.partition("=")[2]) if part else 1.0
        return Pass(share * whole.forward_s, share * whole.backward_s)
    share = 1.0 / int(part.partition("=")[2]) if part else 1.0
    return _by_roofline(profile, layer, cluster, images, share, at_once)


def is_measured(profile: Profile, cluster: Cluster) -> bool:
    """Whether the profile's seconds are those of the cluster's workers."""
    return bool(profile.device) and profile.device == cluster.worker.device


def moved_bytes(layer: LayerProfile, precision: str, images: int) -> int:
    """What a forward pass must read and write at least; a backward pass twice that."""
    return _BYTES[precision] * (images * (layer.inputs + layer.outputs) + layer.parameters)


def rate_of(cluster: Cluster, precision: str) -> float:
    """Multiplications and additions a second in a precision."""
    return cluster.worker.gflop_s[known_rate(cluster, precision)] * 1e9


def known_rate(cluster: Cluster, precision: str) -> str:
    """The precision whose rate is taken for one: its own, else one that is as fast, else fp32."""
    kinds = precision, _LIKE.get(precision, "fp32"), "fp32"
    return next(kind for kind in kinds if kind in cluster.worker.gflop_s)


def _between(rows: list[LayerTime], images: int) -> Pass:
    """Seconds for a number of images, from those that were measured."""
    if not rows:
        return Pass(0.0, 0.0)
    rows = sorted(rows, key=lambda row: row.images)
    if images <= rows[0].images or len(rows) == 1:
        share = images / rows[0].images
        return Pass(rows[0].forward_s * share, rows[0].backward_s * share)
    above = next((place for place, row in enumerate(rows) if row.images >= images), len(rows) - 1)
    low, high = rows[above - 1], rows[above]
    share = (images - low.images) / (high.images - low.images)
    least = high if share > 1 else LayerTime(0, 0.0, 0.0)  # more images never take less
    return Pass(
        max(low.forward_s + share * (high.forward_s - low.forward_s), least.forward_s),
        max(low.backward_s + share * (high.backward_s - low.backward_s), least.backward_s),
    )


def _by_roofline(
    profile: Profile, layer: LayerProfile, cluster: Cluster, images: int, share: float, at_once: int
) -> Pass:
    speed = cluster.worker
    flop_s = images * 2 * layer.macs * share / (rate_of(cluster, profile.precision) * SMALL_PRODUCTS)
    moved = moved_bytes(layer, profile.precision, images) * share
    bytes_s, start_s = moved / (speed.memory_gb_s * 1e9), speed.launch_us * 1e-6 / at_once
    return Pass(max(flop_s, bytes_s) + start_s, 2 * max(flop_s, bytes_s) + (_STARTS - 1) * start_s)
