"""Nodes with links of a given rate: network namespaces of this machine, each on a cable to one bridge.

Needs root and iproute2. Both directions of a cable are shaped by tc's token bucket.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NETWORK = "10.78.0"


@contextmanager
def shaped_nodes(count: int, rate: str) -> Iterator[list[str]]:
    """Namespaces with the addresses 10.78.0.1, .2, …, whose links have this rate; they vanish afterwards."""
    tag = f"ls{os.getpid() % 100000}"
    names, bridge = [f"{tag}-{number}" for number in range(count)], f"{tag}br"
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for number, name in enumerate(names):
            near, far = f"{tag}a{number}", f"{tag}b{number}"
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
            _run("ip", "link", "set", near, "master", bridge, "up")
            _run("ip", "link", "set", far, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"{address(number)}/24", "dev", far)
            _run("ip", "-n", name, "link", "set", far, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            _run("tc", "qdisc", "add", "dev", near, *shape)
            _run("tc", "-n", name, "qdisc", "add", "dev", far, *shape)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True, check=False)


def address(number: int) -> str:
    """Of a node."""
    return f"{NETWORK}.{number + 1}"


def inside(namespace: str, command: list[str]) -> list[str]:
    """A command that runs in a namespace."""
    return ["ip", "netns", "exec", namespace, *command]


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
