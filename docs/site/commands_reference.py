"""The page of all commands, as `--help` prints them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from lockstep.cli.main import make_parser


def write_commands() -> str:
    """Markdown with the help of every verb."""
    os.environ |= {"COLUMNS": "96", "NO_COLOR": "1"}
    parts = ["# Commands", "What `--help` prints after each verb."]
    for name, parser in _verbs(make_parser()):
        parts += [f"## {name}", f"```\n{parser.format_help().rstrip()}\n```"]
    return "\n\n".join(parts) + "\n"


def _verbs(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield parser.prog, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _verbs(inner)
