"""The fork server: a process that imports torch once and forks every worker of a node.

A worker then starts in hundredths of a second, at the beginning and when a lost one is replaced. The child
runs the script or module of the launcher's command from its first line, as a new Python would.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import warnings
from types import TracebackType
from typing import Any

from lockstep.elastic.process_control import end_with_parent, name_process
from lockstep.errors import LockstepError
from lockstep.spec.start.stop_signal import STOPPING

_REQUEST_BYTES = 1 << 20


def serve() -> None:
    """Serve the launcher; arguments: socket descriptor, the launcher's pid, module to import, sys.path."""
    line = socket.socket(fileno=int(sys.argv[1]))
    end_with_parent(int(sys.argv[2]))
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)  # the launcher ends this process
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    importlib.import_module(sys.argv[3])  # imported once, for all workers
    with selectors.DefaultSelector() as selector:
        selector.register(line, selectors.EVENT_READ)
        selector.register(reading, selectors.EVENT_READ)
        while True:
            request = None
            for key, _ in selector.select():
                if key.fileobj is line:
                    data, fds, _, _ = socket.recv_fds(line, _REQUEST_BYTES, 3)
                    if not data:
                        line.close()
                        return  # the launcher has ended
                    request = json.loads(data)
                else:
                    os.read(reading, 4096)
            _report_ended(line)
            if request and _fork(line, request, fds):
                break
    signal.set_wakeup_fd(-1)
    for fd in (reading, writing):
        os.close(fd)
    _live(request)


def _report_ended(line: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        line.send(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _fork(line: socket.socket, request: dict[str, Any], fds: list[int]) -> bool:
    """Fork a worker; True in the child, which now has the output and environment of the request."""
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # held until the child has its own handlers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about forking beside threads: numpy's are idle
        pid = os.fork()
    control, stdout, stderr = fds
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for fd in fds:
            os.close(fd)
        line.send(json.dumps({"worker": request["worker"], "pid": pid}).encode())
        return False
    line.close()
    end_with_parent(parent)
    name_process(f"lockstep {request['worker']}")
    os.setsid()  # only the launcher gets the terminal's signals, and forwards each once
    for number in (*STOPPING, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # a warning may be held until the training begins
    except KeyboardInterrupt:  # one that came before this process began
        os._exit(130)
    null = os.open(os.devnull, os.O_RDWR)
    speaks = bool(request["speaks"])
    for source, target in ((null, 0), (stdout if speaks else null, 1), (stderr, 2)):
        os.dup2(source, target)
    os.close(stderr)
    os.close(null)
    world = {**request["world"], "control_fd": control, "stdout_fd": stdout}
    os.environ[request["variable"]] = json.dumps(world)
    return True


def _live(request: dict[str, Any]) -> None:
    """Run the worker's program, as `python script.py …` or `python -m module …` would."""
    sys.argv, sys.orig_argv = request["argv"], request["orig_argv"]
    sys.excepthook = _tell_error  # a script may put its own before it
    try:
        if request["module"]:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(request["argv"][0], run_name="__main__")
    except SystemExit:
        raise
    except KeyboardInterrupt:
        sys.exit(130)  # the launcher says so
    except BaseException as error:
        error.__traceback__ = _own_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(getattr(error, "exit_code", 1))


def _tell_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """One line for an error of ours, as from our own commands; else a traceback."""
    if isinstance(error, LockstepError):
        sys.stderr.write(f"lockstep: {error}\n")
    else:
        sys.__excepthook__(kind, error, trace)


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that started the program."""
    inner = trace
    while inner and ("runpy" in inner.tb_frame.f_code.co_filename or inner.tb_frame.f_code is _live.__code__):
        inner = inner.tb_next
    return inner or trace
