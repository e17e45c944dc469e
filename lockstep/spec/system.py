"""The systems that Lockstep runs on, and where it keeps there what it has found or made."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lockstep.errors import SpecError


def check_system() -> None:
    """Refuse systems other than Linux, where workers can be neither started nor supervised."""
    if sys.platform != "linux":  # flock, prctl, memfd_create, /proc
        raise SpecError(
            f"Lockstep runs on Linux only, and this is {sys.platform}: "
            "use a Linux machine, a container or WSL 2"
        )


def extra_command(extra: str) -> str:
    """The command that installs an extra and keeps PyTorch, whose version is part of a run's identity."""
    try:
        torch = f" torch=={version('torch').partition('+')[0]}"
    except PackageNotFoundError:  # built by hand
        torch = ""
    return f"pip install 'lockstep-train[{extra}]'{torch}"


def cache_folder() -> Path:
    """Where files are kept that can be made again: $LOCKSTEP_CACHE, else ~/.cache/lockstep."""
    if own := os.environ.get("LOCKSTEP_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
