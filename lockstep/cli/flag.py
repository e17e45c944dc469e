"""Flags that several verbs share."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.spec.launch import DEVICES


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    """Where runs lie."""
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="default: runs")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Where to compute."""
    parser.add_argument(
        "--device", choices=DEVICES, default="auto", help="default: auto, a GPU if there is one"
    )


def add_trained_run(parser: argparse.ArgumentParser) -> None:
    """A trained run and which of its checkpoints to use."""
    parser.add_argument("run", metavar="RUN", help="a run's name or directory")
    parser.add_argument(
        "--checkpoint", default="last", metavar="last|best|PATH", help="which weights; default: last"
    )
    add_runs_dir(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Output for programs."""
    parser.add_argument("--json", action="store_true", help="print JSON")
