"""README's code runs as it stands, and the examples too."""

import re
import sys
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
SHELL = re.findall(r"^```console\n(.*?)^```", TEXT, re.M | re.S)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_blocks(code, tmp_path):
    done = forked.call([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, draws=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run_and_are_short(path, tmp_path):
    assert len(path.read_text().splitlines()) < 80
    done = forked.call([sys.executable, "-W", "error", str(path)], cwd=tmp_path, draws=True)
    assert done.returncode == 0, done.stderr


def test_commands_of_the_readme_parse():
    from lockstep.cli.main import make_parser

    lines = [line for block in SHELL for line in block.splitlines() if line.startswith("lockstep ")]
    assert lines
    for line in lines:
        words = line.partition("#")[0].split()[1:]
        if words != ["--help"]:
            make_parser().parse_args(words)


def test_make_targets_named_in_the_readme_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"\bmake (\w+)", TEXT)) <= targets


def test_links_lead_to_files():
    for link in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (ROOT / link).exists(), link
