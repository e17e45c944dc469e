"""Two network namespaces of this machine, joined by a cable of their own: two nodes."""

import os
import shutil
import subprocess
from contextlib import contextmanager

from small import call

IP = shutil.which("ip")


def can_make_namespaces():
    if not IP or os.geteuid() != 0:
        return False
    name = f"lockstep-try-{os.getpid()}"
    made = call([IP, "netns", "add", name]).returncode == 0
    if made:
        call([IP, "netns", "delete", name])
    return made


@contextmanager
def two_nodes():
    """Two namespaces with the addresses 10.77.0.1 and 10.77.0.2; they vanish afterwards."""
    names = [f"lockstep-{os.getpid()}-{number}" for number in (1, 2)]
    ends = [f"ls{os.getpid() % 100000}{letter}" for letter in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names, ends
    finally:
        for name in names:
            call([IP, "netns", "delete", name])


def ip(*arguments):
    subprocess.run([IP, *arguments], check=True, capture_output=True)


def inside(namespace, command):
    return [IP, "netns", "exec", namespace, *command]


ENTER = """
import ctypes, runpy, sys
with open("/var/run/netns/" + sys.argv.pop(1)) as file:
    assert ctypes.CDLL(None).setns(file.fileno(), 0x40000000) == 0
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def forked_inside(namespace, command):
    """A command line with a module for `forked`: its process enters the namespace by itself."""
    place = command.index("-m")
    return [*command[:place], "-c", ENTER, namespace, *command[place + 1 :]]
