"""Says whether compressed gradients would make a step shorter, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from lockstep.errors import SpecError
from lockstep.planner.compress.codec_time import find_codec
from lockstep.planner.search import OFFERED, RankedPlan, judge
from lockstep.spec.cluster import Cluster
from lockstep.spec.plan import Plan
from lockstep.spec.profile import Profile
from lockstep.spec.rule.compression import read_compression
from lockstep.spec.run import Run

_GAIN = 1.02  # a change that brings less is not named


def advise_compression(best: RankedPlan, profile: Profile, cluster: Cluster) -> list[str]:
    """Lines about the fastest way to compress by as many workers, beside the best plan and beside none."""
    own, found = best.run.train.compress, dict[str, RankedPlan]()
    if best.workers == 1 or best.workers > best.run.train.lanes:
        return []
    for scheme in ("none", *OFFERED):
        with suppress(SpecError):  # the run may have what does not go with it
            run = with_compression(best.run, scheme)
            found[scheme] = judge(run, profile, cluster, Plan(data=best.workers))
    plain, offered = found.pop("none"), [scheme for scheme in found if scheme != own]
    lines = [] if own == "none" else [_beside_none(best, plain)]
    if offered:
        least = min(offered, key=lambda scheme: found[scheme].cost.total_s)
        lines += _beside_best(best, plain, found[least])
        if not _is_known(cluster, least, own):
            lines = [f"{line}; what codecs take is assumed, not measured" for line in lines]
    return lines


def _beside_none(best: RankedPlan, plain: RankedPlan) -> str:
    """About a run that compresses."""
    line = f"without compression a step would take {_ms(plain)} ms instead of {_ms(best)}"
    if plain.cost.total_s > best.cost.total_s:
        return line
    return f"train.compress={best.run.train.compress} costs more than it saves: {line}"


def _beside_best(best: RankedPlan, plain: RankedPlan, other: RankedPlan) -> list[str]:
    """About another way to compress than that of the run."""
    way, gain = f"train.compress={other.run.train.compress}", best.cost.total_s / other.cost.total_s
    if gain >= _GAIN:
        sent = _mb(other) + (f" instead of {_mb(best)}" if best.cost.sent_bytes else "")
        line = (
            f"{way} would take {_ms(other)} ms a step instead of {_ms(best)} ({gain:.2f} ×) and send {sent}"
        )
        return [f"{line}: another run, whose accuracy must be looked at"]
    if best.run.train.compress != "none":
        return []
    if plain.cost.total_s < _GAIN * other.cost.total_s:
        line = f"compression costs more than it saves: by data alone {way} would take {_ms(other)} ms a step"
        return [f"{line}, and none {_ms(plain)}"]
    return [f"with {way}, by data alone, a step would take {_ms(other)} ms: this plan needs no compression"]


def with_compression(run: Run, scheme: str) -> Run:
    """The run with gradients compressed, or not."""
    train = run.train
    if scheme == "none":
        return replace(run, train=replace(train, compress=scheme, compress_after=0))
    return replace(run, train=replace(train, compress=scheme, wire="fp32"))


def doubt_compression(run: Run, cluster: Cluster) -> Iterator[str]:
    """What makes predictions of a run that compresses other than one might expect."""
    scheme, after = run.train.compress, run.train.compress_after
    if not _is_known(cluster, scheme):
        yield (
            f"{cluster.name} has no [[codec]] for train.compress={scheme}: its time is assumed from the "
            "rate of memory; `lockstep probe` measures it"
        )
    if after:
        yield f"train.compress_after={after}: predicted are the epochs after these"


def _is_known(cluster: Cluster, *schemes: str) -> bool:
    """Whether what codecs take was measured."""
    found = [how for how in map(read_compression, schemes) if how]
    return all(find_codec(cluster, how)[1] for how in found)


def _ms(one: RankedPlan) -> str:
    return f"{1e3 * one.cost.total_s:.4g}"


def _mb(one: RankedPlan) -> str:
    return f"{1e-6 * one.cost.sent_bytes:.3g} MB"
