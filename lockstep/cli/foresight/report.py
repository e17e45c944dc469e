"""`lockstep report`: the flags of the verb; `report/page/` reads the runs and makes the page."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.flag import add_runs_dir, check_new_file

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_TEXT = """\
Write one page of HTML that compares runs, and shows predictions and benchmark records:

  lockstep report runs -o page.html                  all finished runs of a folder
  lockstep report one two --title 'one or two?'      two runs, by name
  lockstep report runs benchmarks/results            runs and records
  lockstep plan imagenet --cluster 8xA100 --json > a100.json
  lockstep scale fashion --workers 1,2,4 --json > scale.json
  lockstep report runs a100.json scale.json          and what was predicted, and how it scales

Runs side by side, training curves, scaling by workers, layers, stages, communication against compute,
measured, and predicted for the links of a cluster, timelines, what differs in configuration; records with
their spread. A part that no run and no file has is left out.
Plots can be hovered and zoomed; each has a table of its numbers, which needs no JavaScript.

The page is one file of about 5 MB, most of it plotly's script. It needs no network and no server.
Damaged runs and runs that are not finished are named and left out; if nothing is left, or a file that is
named is neither of records nor of plans, the exit code is 2.
Needs the extra `report`.
"""


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its flags."""
    parser = verbs.add_parser(
        "report",
        help="write a page that compares runs, and shows predictions and records",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run",
        nargs="+",
        metavar="RUN|DIR|FILE",
        help="a run's name or directory, a folder with runs or files in it, or a file of records or plans",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE.html",
        help="a new file; default: report.html",
    )
    parser.add_argument("--title", default="", help="the page's heading; default: what is compared")
    add_runs_dir(parser)
    parser.set_defaults(handler=report)


def report(options: argparse.Namespace) -> int:
    """Write the page; an existing file is never overwritten."""
    from lockstep.report.page.page_source import read_sources
    from lockstep.report.page.write_page import make_page

    check_new_file(options.output, "--output", ".html")
    source = read_sources(options.run, options.runs_dir)
    for line in source.left_out:
        print(f"left out: {line}", file=sys.stderr)
    page = make_page(source, options.title, datetime.now(UTC))
    with options.output.open("x", encoding="utf-8") as file:
        file.write(page)
    print(f"{options.output}: {source.count()}, {len(page.encode()) / 1e6:.1f} MB")
    return 0
