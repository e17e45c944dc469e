"""Clusters by name, which ship with Lockstep as files, or of a file of one's own."""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import SpecError, unknown
from lockstep.planner.remembered import recall_latest
from lockstep.spec.cluster import Cluster
from lockstep.spec.cluster_file import read_cluster

_FOLDER = Path(__file__).with_name("presets")
HERE = "here"  # the machine that was probed last
_ORDER = ("4xK80", "8xP100", "4xV100", "8xA100", "8xH100", "8xH200", "cpu-1g", "cpu-10g", "cpu-100g")


def find_cluster(text: str) -> Cluster:
    """A cluster by a preset's name, `here` as it was probed last, or by the path of its file."""
    if text in _ORDER:
        return read_cluster(_FOLDER / f"{text}.toml")
    if text == HERE:
        return _find_here()
    path = Path(text)
    if path.is_file():
        return read_cluster(path)
    if path.suffix == ".toml" or path.name != text:
        raise SpecError(f"{text}: no such file: `lockstep probe --output {text}` writes one")
    raise SpecError(f"{unknown('cluster', text, _ORDER)}, or give the path of a file by `lockstep probe`")


def _find_here() -> Cluster:
    found = recall_latest()
    if not found:
        raise SpecError("--cluster here: this machine was not probed yet: run `lockstep probe`")
    return found


def list_presets() -> dict[str, Cluster]:
    """Every preset by its name."""
    return {name: find_cluster(name) for name in _ORDER}


def preset_text(name: str) -> str:
    """A preset's file, with what it says of its sources."""
    if name not in _ORDER:
        raise SpecError(unknown("preset", name, _ORDER))
    return (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")
