"""Imports what the command line does for its verbs, once for all processes that are forked."""

from lockstep.cli.main import make_parser

make_parser()
