"""The public checks run what `.ci/run` runs, on both kinds of CPU."""

from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]


def test_the_workflow_calls_ci_run_on_both_machines():
    (path,) = (ROOT / ".github" / "workflows").iterdir()
    (job,) = yaml.safe_load(path.read_text())["jobs"].values()
    runners = {row["machine"]: row["runner"] for row in job["strategy"]["matrix"]["include"]}
    assert runners == {"x86_64": "ubuntu-24.04", "aarch64": "ubuntu-24.04-arm"}
    assert job["runs-on"] == "${{ matrix.runner }}"
    assert [step["run"] for step in job["steps"] if "run" in step][-1] == ".ci/run"
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
