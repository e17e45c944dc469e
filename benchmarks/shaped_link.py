"""Nodes with links of a given rate: network namespaces of this machine, each on a cable to one bridge.

Needs root and iproute2. Both directions of a cable are shaped by tc's token bucket, whose rate can be changed
while processes run in the namespaces.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

NETWORK, INTERFACE = "10.78.0", "cable"  # of every node
_BUCKET = ("burst", "256kb", "latency", "50ms")  # plain transfers reach 95 to 98 % of 0.1 to 10 Gb/s


@dataclass(frozen=True)
class ShapedNodes:
    """Namespaces with the addresses 10.78.0.1, .2, …, and the ends of their cables at the bridge."""

    names: Sequence[str]
    ends: Sequence[str]

    def reshape(self, rate: str, verb: str = "change") -> None:
        """Give all links another rate, as tc writes it: 100mbit, 1gbit."""
        for name, end in zip(self.names, self.ends, strict=True):
            shape = ["root", "tbf", "rate", rate, *_BUCKET]
            _run("tc", "qdisc", verb, "dev", end, *shape)
            _run("tc", "-n", name, "qdisc", verb, "dev", INTERFACE, *shape)


@contextmanager
def shaped_nodes(count: int, rate: str) -> Iterator[ShapedNodes]:
    """Nodes whose links have this rate; they vanish afterwards."""
    tag = f"ls{os.getpid() % 100000}"
    bridge = f"{tag}br"
    nodes = ShapedNodes(*([f"{tag}{kind}{number}" for number in range(count)] for kind in "-a"))
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for number, (name, end) in enumerate(zip(nodes.names, nodes.ends, strict=True)):
            far = f"{tag}b{number}"
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", end, "type", "veth", "peer", "name", far)
            _run("ip", "link", "set", end, "master", bridge, "up")
            _run("ip", "link", "set", far, "netns", name, "name", INTERFACE)
            _run("ip", "-n", name, "addr", "add", f"{address(number)}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        nodes.reshape(rate, "add")
        yield nodes
    finally:
        for name in nodes.names:
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
