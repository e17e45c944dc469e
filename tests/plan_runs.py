"""Runs under a plan, as processes of their own, and what must be the same under every plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forked
from small import summary, train_command

HASHES = ("weights_sha256", "optimizer_sha256", "ema_sha256", "loss", "accuracy", "identity")


def hashes(directory: Path) -> dict[str, Any]:
    """The hashes of a run's directory."""
    found = summary(directory)
    return {key: found.get(key) for key in HASHES}


def run(tmp_path: Path, *arguments: str, overrides: tuple[str, ...], draws: bool = False) -> Any:
    """Train as a user does; it must succeed."""
    done = forked.call(train_command(tmp_path, *arguments, overrides=overrides), launches=True, draws=draws)
    assert done.returncode == 0, done.stderr
    return done
