"""`lockstep completion`: a script by which a shell completes the command line, and what that script asks."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

# each asks the program that is typed, so that what it offers is never older than the program
_SCRIPTS = {
    "bash": """\
_lockstep() {
    local IFS=$'\\n'
    COMPREPLY=($("$1" completion bash "${COMP_WORDS[@]:0:COMP_CWORD+1}" 2>/dev/null))
    if [[ ${COMPREPLY[0]-} == *= ]]; then compopt -o nospace; fi
}
complete -o default -F _lockstep lockstep
""",
    "zsh": """\
#compdef lockstep
_lockstep() {
    local -a found
    found=(${(f)"$("$words[1]" completion zsh "${(@)words[1,CURRENT]}" 2>/dev/null)"})
    if [[ $found[1] == *= ]]; then compadd -S '' -- $found
    elif (( $#found )); then compadd -- $found
    else _files; fi
}
compdef _lockstep lockstep
""",
    "fish": """\
function __lockstep_complete
    set -l typed (commandline -opc)
    set -l now (commandline -ct)
    $typed[1] completion fish $typed "$now" 2>/dev/null
end
complete -c lockstep -a '(__lockstep_complete)'
""",
}
_EPILOG = """\
bash   lockstep completion bash > ~/.local/share/bash-completion/completions/lockstep
zsh    lockstep completion zsh > FOLDER/_lockstep, where $fpath has FOLDER, before compinit
fish   lockstep completion fish > ~/.config/fish/completions/lockstep.fish
"""


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    parser = verbs.add_parser(
        "completion",
        help="a script for bash, zsh or fish that completes verbs, flags, recipes, keys and runs",
        description="Print a script by which a shell completes what is typed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=_SCRIPTS, metavar="bash|zsh|fish", help="the shell")
    help_text = "a command line that is being typed: print what its last word may become"
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="…", help=help_text)
    parser.set_defaults(handler=run_completion)


def run_completion(options: argparse.Namespace) -> int:
    """Print the script, or what may come next, a line each."""
    if not options.words:
        print(_SCRIPTS[options.shell], end="")
        return 0
    from lockstep.cli.main import make_parser
    from lockstep.cli.shell.candidates import find_candidates

    words = options.words[1:] or [""]
    whole = _join(words) if options.shell == "bash" else words
    known = whole[-1].removesuffix(words[-1].strip("=:"))  # bash completes only what stands after = or :
    for text in find_candidates(make_parser(), whole):
        print(text.removeprefix(known))
    return 0


def _join(pieces: list[str]) -> list[str]:
    """The words of a line that bash has cut at = and :."""
    words: list[str] = []
    for piece in pieces:
        if words and piece and (piece[0] in "=:" or words[-1][-1:] in ("=", ":")):
            words[-1] += piece
        else:
            words.append(piece)
    return words
