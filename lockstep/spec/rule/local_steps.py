"""The rule of `train.local_steps`: what goes with steps that a lane takes on weights of its own."""

from __future__ import annotations

from lockstep.errors import SpecError

_MOST_SAMPLES = 1 << 24  # of a round: what counts as correct is exact in fp32 up to here


def check_local_steps(steps: int, batch: int, sync_norm: bool, kernels: str) -> None:
    """Refuse what several steps of a lane by itself do not go with."""
    if steps == 1:
        return
    if steps * batch > _MOST_SAMPLES:
        raise SpecError(
            f"train.local_steps={steps} of train.batch={batch} are more than {_MOST_SAMPLES} samples between "
            f"two exchanges: use at most {_MOST_SAMPLES // batch}"
        )
    if sync_norm:
        raise SpecError(
            f"train.sync_norm=true does not go with train.local_steps={steps}: its batch norms need all "
            "lanes in every step, and these lanes meet every few steps: leave one of them out"
        )
    if kernels in ("fused", "compiled"):
        raise SpecError(
            f"kernels.set={kernels} does not go with train.local_steps={steps}: its kernels compute all "
            "lanes at once by the same weights, and these have weights of their own: use kernels.set=auto"
        )


def explain_local_steps(steps: int, in_epoch: int) -> list[str]:
    """A warning if a round never has as many steps as it might."""
    if steps <= max(in_epoch, 1):
        return []
    return [f"train.local_steps={steps}: no round is longer than the {in_epoch} steps of an epoch"]
