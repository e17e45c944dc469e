"""The server that forks processes for tests: started once, with what they import.

Its imports are found by our sys.path, which Python before 3.13 does not give it, and it says nothing of one
that fails: then every process would import the same again.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import threading
from multiprocessing import forkserver

_STARTING = threading.Lock()
SERVER = multiprocessing.get_context("forkserver")
# ours, and what a run imports when it first draws, makes an optimizer, or runs kernels
IMPORTED = ["every_verb", "lockstep.elastic.launcher", "lockstep.cli.listeners", "lockstep.data.shapes"]
IMPORTED += ["matplotlib.backends.backend_agg", "matplotlib.figure"]
if "TRITON_INTERPRET" in os.environ:  # there is no GPU, whose driver it might ask for before the fork
    IMPORTED += [
        "torch._dynamo",
        "interpreter",
        "lockstep.lower.fused.chain_program",
        "lockstep.lower.fused.residual_program",
        "lockstep.lower.compiled.compiled_program",
        "lockstep.parallel.products.dealt_products",
    ]
SERVER.set_forkserver_preload(IMPORTED)


@functools.cache
def _start_once() -> None:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ.update({} if before is None else {"PYTHONPATH": before})


def start_server() -> None:
    """Start it, if it does not run yet; by any thread."""
    with _STARTING:
        _start_once()
