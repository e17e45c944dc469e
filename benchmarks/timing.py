"""Time one way to train in a process of its own.

gpu_step.py → `time_apart` → time_job.py as a program → seconds a step.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from case import Job

PROGRAM = Path(__file__).with_name("time_job.py")


def time_apart(job: Job, limit_s: float) -> dict[str, Any]:
    """Time a job in a process of its own: seconds a step, or the reason why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, str(PROGRAM), json.dumps(asdict(job)), str(output)]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return {"reason": f"not done after {limit_s:g} s"}
            finally:
                if process.poll() is None:  # with its loader and compiler processes
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if output.is_file():
            result: dict[str, Any] = json.loads(output.read_text())
            return result
        lines = log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return {"reason": f"ended with code {code}: {last}"[:300]}
