"""`lockstep`: finds the verb, runs it, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from lockstep import __version__
from lockstep.errors import LockstepError
from lockstep.spec.system import check_system

VERBS = (
    "train",
    "launch",
    "eval",
    "predict",
    "export",
    "verify",
    "layers",
    "data",
    "doctor",
    "bench",
    "sweep",
)
FORESIGHT = ("probe", "profile", "plan", "scale", "simulate", "report")  # verbs of the folder of that name
LISTING = ("runs",)
SHELL = ("completion",)
_DESCRIPTION = """\
Train convolutional networks to the same bits: by any number of workers, killed and resumed.

  lockstep train                          LeNet-5 on procedural shapes, about a minute, no download
  lockstep train fashion -o data.dir=DIR  a recipe on data of yours
  lockstep train cifar10 -o train.epochs=5 -o optimizer.lr=0.1
  lockstep train fashion --workers 4      four processes, the same bits; also torchrun and mpirun
  lockstep train fashion --resume auto    go on where it stopped, to the same bits
  lockstep launch --workers 4 script.py   a loop of your own, with lockstep.lanes in it
  lockstep sweep fashion -o optimizer.lr=0.05,0.1,0.2   a run for each value, and which is best
  lockstep verify fashion fashion-2       are two runs the same, bit for bit?
  lockstep runs list                      the runs of a folder; `compare` and `prune` them
  lockstep layers --plan channel=2        how a plan deals layers to workers
  lockstep probe                          how fast this machine is, for predictions
  lockstep profile fashion                what every layer costs here
  lockstep plan fashion --cluster 8xH100  how fast a run will be on a cluster, and what holds it back
  lockstep scale fashion --workers 1,2    how much faster several workers are here
  lockstep simulate --cluster 8xH100 --nodes 1000 --step-ms 250   goodput when nodes fail
  lockstep report runs -o page.html       runs side by side as one page: curves, scaling, timelines
  lockstep eval fashion                   lockstep predict fashion photo.png
"""


def make_parser(typed: str = "") -> argparse.ArgumentParser:
    """The command line, whole or of the verb that was `typed`; each verb's file adds its own flags."""
    parser = argparse.ArgumentParser(
        "lockstep", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"lockstep {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    folders = ("", VERBS), ("foresight.", FORESIGHT), ("listing.", LISTING), ("shell.", SHELL)
    known = {verb: folder for folder, names in folders for verb in names}
    for verb in [typed] if typed in known else known:  # the files of the others need not be read
        importlib.import_module(f"lockstep.cli.{known[verb]}{verb}").add_parser(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without × shows ? instead
    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit code."""
    try:
        check_system()
        parser = make_parser(*arguments[:1])
        if not arguments:
            parser.print_help(sys.stderr)
            return 2
        options = parser.parse_args(arguments)
        return int(options.handler(options))
    except LockstepError as error:
        if error.everywhere and error.rank:
            return 0  # worker 0 reports it; if we failed too, a launcher might end worker 0 first
        print(f"lockstep: {f'worker {error.rank}: ' if error.rank else ''}{error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has closed it
        sys.stderr.close()
        return 1
    except OSError as error:  # such as a full disk or a missing permission
        print(f"lockstep: {error.filename or 'writing'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lockstep: interrupted", file=sys.stderr)
        return 130
