"""As people install it: the sdist, the wheel built from it, and that wheel in an empty environment."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
import torch
from patience import PATIENCE_S

import lockstep

ROOT = Path(__file__).parents[2]
BUILD = """
import os, sys, tarfile
from pathlib import Path
from setuptools import build_meta

folder = Path(sys.argv[1])  # setuptools has its own arguments later
source = folder / build_meta.build_sdist(str(folder))
with tarfile.open(source) as archive:
    archive.extractall(folder, filter="data")
os.chdir(str(source).removesuffix(".tar.gz"))
build_meta.build_wheel(str(folder))
"""


def call(*words, cwd):
    """Run a program that knows nothing of this source tree."""
    without = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env=without,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the sdist, and the wheel that a copy of its content gives."""
    folder = tmp_path_factory.mktemp("built")
    copytree(ROOT / "lockstep", folder / "copy" / "lockstep", ignore=ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (folder / "copy" / name).write_bytes((ROOT / name).read_bytes())
    call(sys.executable, "-c", BUILD, folder, cwd=folder / "copy")
    return folder


def sources():
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / "lockstep").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_every_file_of_the_package(built):
    """One that is read and not named in pyproject.toml's package-data is missing here."""
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == sources()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        assert sources() <= {name.partition("/")[2] for name in archive.getnames()}


def test_its_metadata_says_what_the_sources_say(built):
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"lockstep_train-{lockstep.__version__}-py3-none-any.whl"
    archive = zipfile.ZipFile(wheel)
    text = archive.read(next(n for n in archive.namelist() if n.endswith("/METADATA"))).decode()
    extras = set(re.findall(r"^Provides-Extra: (\S+)", text, re.M))
    named = re.search(r"-e '\.\[([\w,]+)\]'", (ROOT / "README.md").read_text())[1]
    assert set(named.split(",")) == extras - {"dev", "docs"}


def test_it_trains_the_default_in_an_empty_environment(built, tmp_path):
    """Packages that it needs are those of this environment; Lockstep is the wheel's, installed by pip."""
    (wheel,) = built.glob("*.whl")
    venv = tmp_path / "venv"
    call(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    (packages,) = venv.glob("lib/python3*/site-packages")
    beside = {str(Path(torch.__path__[0]).parent), *(p for p in sys.path if p.endswith("site-packages"))}
    (packages / "beside.pth").write_text("\n".join(beside))
    python = venv / "bin" / "python"
    flags = ["--no-index", "--disable-pip-version-check", "--ignore-installed", "--no-deps"]
    call(python, "-m", "pip", "install", *flags, wheel, cwd=tmp_path)
    where, version = call(
        python, "-c", "import lockstep as l; print(l.__file__, l.__version__)", cwd=tmp_path
    ).split()
    assert (Path(where), version) == (packages / "lockstep" / "__init__.py", lockstep.__version__)
    words = ["train", "--device", "cpu", "--name", "first"]
    for few in ("train.epochs=1", "schedule.warmup_epochs=0", "data.num_train=512", "data.num_test=64"):
        words += ["-o", few]
    told = call(venv / "bin" / "lockstep", *words, cwd=tmp_path)
    assert "accuracy" in told, told
    assert (tmp_path / "runs" / "first" / "summary.json").is_file()
