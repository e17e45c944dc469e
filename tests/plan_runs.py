"""Runs under a plan, as processes of their own, and what must be the same under every plan."""

from __future__ import annotations

import os
import sys
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


def run_script(folder: Path, script: str, *words: str) -> Path:
    """Run a script that trains, in a folder of its own, as `run`; gives the directory of the run."""
    folder.mkdir()
    (folder / "own.py").write_text(script)
    env = {**os.environ, "TESTS": str(Path(__file__).parent)}
    done = forked.call([sys.executable, "own.py", *words], env=env, cwd=folder, launches=True)
    assert done.returncode == 0, done.stderr
    return folder / "run"
