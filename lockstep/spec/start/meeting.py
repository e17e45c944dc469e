"""Where the launchers of several nodes meet, how many they are, and how they prove who they are."""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.errors import SpecError

_ENDPOINT = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}")


def read_endpoint(rdzv: str | None) -> tuple[str, int]:
    """Host and port of the launcher that coordinates the job."""
    host, _, port = (rdzv or ":0").rpartition(":")
    return host.strip("[]"), int(port)


def read_nodes(nodes: str) -> tuple[int, int]:
    """The smallest and the largest number of launchers in a job; (0, 0) if that is no such text."""
    low, _, high = nodes.partition(":")
    if not low.isdecimal() or not (high or low).isdecimal():
        return 0, 0
    return int(low), int(high or low)


def check_meeting(rdzv: str | None, nodes: str, tls: Path | None) -> None:
    """Refuse settings that do not describe a meeting of launchers."""
    if rdzv is not None and not (_ENDPOINT.fullmatch(rdzv) and 0 < read_endpoint(rdzv)[1] < 65536):
        raise SpecError(f"--rdzv {rdzv} must be HOST:PORT of the launcher that coordinates the job")
    low, high = read_nodes(nodes)
    if not 1 <= low <= high:
        raise SpecError(f"--nodes {nodes} must be a number from 1, or MIN:MAX")
    if high > 1 and not rdzv:
        raise SpecError(f"--nodes {nodes} needs --rdzv host:port, at which the launchers meet")
    if tls and not rdzv:
        raise SpecError(f"--tls {tls} needs --rdzv: without it no launcher listens, so nothing is to encrypt")
