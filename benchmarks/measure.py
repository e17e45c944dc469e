"""What every benchmark script needs: the facts of the machine for a record, and a median with its spread."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.spec import Record

RESULTS = Path(__file__).parent / "results"


def make_record(name: str, values: Sequence[float], unit: str, **details: Any) -> Record:
    """A record of the median of `values`, taken on this machine with this command."""
    return Record(
        name=name,
        value=statistics.median(values),
        unit=unit,
        n=len(values),
        spread=(min(values), max(values)),
        hardware=hardware(),
        command=command(),
        commit=commit(),
        versions=versions(),
        details=details,
    )


def hardware() -> str:
    """The GPU where there is one, and the CPU's model."""
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
    return f"{gpu}{model}, {torch.backends.cpu.get_cpu_capability()}"


def command() -> str:
    """This command, without where it writes and without the paths of this machine."""
    words = sys.argv[1:]
    if "--output" in words:
        at = words.index("--output")
        del words[at : at + 2]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(_shorten, words)])


def commit() -> str:
    """The commit measured; a copy without history is told it by LOCKSTEP_COMMIT."""
    if told := os.environ.get("LOCKSTEP_COMMIT"):
        return told
    answer = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=RESULTS.parent,
    )
    return answer.stdout.strip() or "unknown"


def versions() -> Mapping[str, str]:
    """What computed it."""
    return {"python": platform.python_version(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}


def make_parser(description: str | None, output: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark script: its docstring, and where its records go."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS / output if output else None)
    return parser


def _shorten(argument: str) -> str:
    key, equals, value = argument.partition("=")
    path = Path(value if equals else key)
    if not path.is_absolute():
        return argument
    return f"{key}{equals}{path.name}" if equals else path.name
