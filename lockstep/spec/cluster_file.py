"""Reads and writes a Cluster as TOML; refuses keys that it does not know, and numbers that cannot be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import SpecError, unknown
from lockstep.spec.cluster import (
    Cluster,
    CodecTime,
    ExchangeTimes,
    FeedRate,
    LinkRate,
    NetworkRate,
    NodeShape,
    WorkerSpeed,
)
from lockstep.spec.run_file import read_toml

_PARTS: Mapping[str, type] = {
    "worker": WorkerSpeed,
    "node": NodeShape,
    "node.link": LinkRate,
    "network": NetworkRate,
    "feed": FeedRate,
    "exchange": ExchangeTimes,
    "codec": CodecTime,
}
_LISTS = ("exchange", "codec")


def read_cluster(path: Path) -> Cluster:
    """A cluster from its file; errors name the file."""
    try:
        return cluster_from_table(read_toml(path))
    except SpecError as error:
        text = str(error)
        raise SpecError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def cluster_from_table(table: Mapping[str, Any]) -> Cluster:
    """A cluster from nested tables."""
    return _make(Cluster, table, "")  # type: ignore[no-any-return]


def _make(kind: type, table: Any, where: str) -> Any:
    if not isinstance(table, Mapping):
        raise SpecError(f"{where.rstrip('.')} must be a table: write [{where.rstrip('.')}]")
    known = {item.name: item for item in fields(kind)}
    for key in table:
        if key not in known:
            raise SpecError(unknown("key", f"{where}{key}", [f"{where}{name}" for name in known]))
    given: dict[str, Any] = {}
    for name, item in known.items():
        if name not in table:
            if item.default is item.default_factory:  # both missing: it has no default
                owner = where.rstrip(".") or "a cluster"
                raise SpecError(f"{where}{name} is missing: {owner} needs {', '.join(_needed(kind))}")
            continue
        given[name] = _read_value(f"{where}{name}", table[name])
    return kind(**given)


def _read_value(key: str, value: Any) -> Any:
    """What a key stands for: a part of a cluster, several of them, or a plain value; lists become tuples."""
    part = _PARTS.get(key)
    if part and key in _LISTS:
        if not isinstance(value, list):
            raise SpecError(f"{key} must be a list of tables: write [[{key}]]")
        return tuple(_make(part, row, f"{key}.") for row in value)
    if part:
        return _make(part, value, f"{key}.")
    return tuple(value) if isinstance(value, list) else value


def _needed(kind: type) -> list[str]:
    return [item.name for item in fields(kind) if item.default is item.default_factory]


def write_cluster(cluster: Cluster) -> str:
    """The text of a cluster's file."""
    top = [f"name = {json.dumps(cluster.name, ensure_ascii=False)}"]
    sections: list[str] = []
    for name, kind in _PARTS.items():
        value: Any = cluster
        for part in name.split("."):
            value = getattr(value, part) if value is not None else None
        for one in value if isinstance(value, tuple) else [value] if value is not None else []:
            sections += ["", f"[[{name}]]" if isinstance(value, tuple) else f"[{name}]"]
            for item in fields(kind):
                own = getattr(one, item.name)
                if own is None or is_dataclass(own):
                    continue
                sections.append(f"{item.name} = {_text(own)}")
    how = [f"{json.dumps(key)} = {json.dumps(text, ensure_ascii=False)}" for key, text in cluster.how.items()]
    return (
        "\n".join([*top, *sections, *(["", "[how]  # where each figure comes from", *how] if how else [])])
        + "\n"
    )


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_text(part)}" for key, part in value.items()) + " }"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, float):
        return f"{value:.6g}" if "." in f"{value:.6g}" or "e" in f"{value:.6g}" else f"{value:.6g}.0"
    return json.dumps(value, ensure_ascii=False)
