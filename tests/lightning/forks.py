"""Runs scripts by several workers, forked once Lightning is imported, in the environment of torchrun.

python forks.py '[[WORKERS, SCRIPT, ARGUMENT, …], …]'
"""

import json
import os
import runpy
import signal
import socket
import sys
import traceback

import lightning.pytorch  # noqa: F401
import torchmetrics  # noqa: F401

import lockstep.lightning  # noqa: F401


def fork(workers, port, rank, words):
    pid = os.fork()
    if pid:
        return pid
    if workers > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
        names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "forks"}
        os.environ.update({name: str(value) for name, value in names.items()})
    sys.argv, code = words, 1
    try:
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main():
    for workers, *words in json.loads(sys.argv[1]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        left = {fork(workers, port, rank, [str(word) for word in words]) for rank in range(workers)}
        while left:
            pid, status = os.wait()
            left.discard(pid)
            if status:
                for other in left:
                    os.kill(other, signal.SIGKILL)
                raise SystemExit(f"{words}: a worker of {workers} ended with {status}")


if __name__ == "__main__":
    main()
