"""Every record can be believed: it is whole, its commit exists, and a document names it."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.spec.record import read_records

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
FILES = sorted((BENCHMARKS / "results").glob("*.json"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_record_is_whole(path):
    records = read_records(path)
    assert records
    for record in records:
        texts = record.name, record.unit, record.hardware, record.commit, *record.versions.values()
        assert all(isinstance(text, str) and text for text in texts), record
        assert record.command.startswith("python benchmarks/"), record.command
        assert (BENCHMARKS / record.command.split()[1].removeprefix("benchmarks/")).is_file(), record.command
        assert {"python", "torch"} <= set(record.versions), record.versions
        low, high = record.spread
        if record.n:  # 0: a reason in the details says why there is no value
            assert math.isfinite(record.value) and low <= record.value <= high, record
        else:
            assert record.details["reason"], record


def test_commits_of_records_exist():
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("there is no whole history here")
    named = {record.commit for path in FILES for record in read_records(path)}
    assert not [commit for commit in named if git("merge-base", "--is-ancestor", commit, "HEAD").returncode]


def test_every_record_is_named_and_every_name_is_a_record():
    names = {name for path in DOCUMENTS for name in re.findall(r"results/([\w.-]+\.json)", path.read_text())}
    assert names == {path.name for path in FILES}


def test_it_is_known_what_each_record_depends_on(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import stale

    for path in FILES:
        for dependency in stale.dependencies(path.name):
            assert (ROOT / dependency).exists(), dependency
    assert all(row.how and row.records for row in stale.read_confirmed())


def test_the_script_of_the_gpu_names_files_that_exist():
    text = (BENCHMARKS / "gpu.sh").read_text()
    for words in re.findall(r"(?:tests|benchmarks)/[\w/.{},]+\.py", text):
        expanded = subprocess.run(["bash", "-c", f"echo {words}"], capture_output=True, text=True, check=True)
        for name in expanded.stdout.split():
            assert (ROOT / name).is_file(), name
