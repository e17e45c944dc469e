"""The systems that Lockstep runs on."""

from __future__ import annotations

import sys

from lockstep.errors import SpecError


def check_system() -> None:
    """Refuse systems other than Linux, where workers can be neither started nor supervised."""
    if sys.platform != "linux":  # flock, prctl, memfd_create, /proc
        raise SpecError(
            f"Lockstep runs on Linux only, and this is {sys.platform}: "
            "use a Linux machine, a container or WSL 2"
        )
