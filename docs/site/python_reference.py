"""The page of what programs import: signatures, fields and docstrings, read without importing anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from site_map import ROOT

MODULES = ("lockstep", "lockstep.lanes", "lockstep.lightning", "lockstep.errors")
GIVEN = {  # what functions of `lockstep` give
    "Result": "lockstep.train.result",
    "Evaluation": "lockstep.train.evaluation.host_evaluate",
    "Predictor": "lockstep.runs.predictor",
}
Definition = ast.FunctionDef | ast.ClassDef


def write_python() -> str:
    """Markdown with every public name of the modules that programs import."""
    parts = ["# Python", "What a program imports. Keys of a Run have [rules](configuration.md)."]
    for module in MODULES:
        tree = _parse(module)
        parts += [f"## {module}", _first(ast.get_docstring(tree) or "")]
        for name in _public(tree):
            parts += _describe(module, name)
        if module == "lockstep":
            parts += [part for name, where in GIVEN.items() for part in _describe(where, name)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _parse(module: str) -> ast.Module:
    return ast.parse(_file(module).read_text())


def _file(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _first(text: str) -> str:
    return text.partition("\n")[0]


def _public(tree: ast.Module) -> list[str]:
    """The names in `__all__`, or all classes that are not private."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]


def _describe(module: str, name: str) -> Iterator[str]:
    where, node = _find(module, name)
    yield f"### {name}"
    if isinstance(node, ast.Module):
        yield f"The module `{where}`: {_first(ast.get_docstring(node) or '')}"
        return
    lines = _file(where).read_text().splitlines()
    yield "```python\n" + _signature(node, lines) + "\n```"
    yield ast.get_docstring(node) or ""
    if isinstance(node, ast.ClassDef) and not _fields(node):  # what a value computes is for Lockstep itself
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name[0] != "_" and ast.get_docstring(part):
                yield f"#### {name}.{part.name}"
                yield "```python\n" + _signature(part, lines) + "\n```"
                yield ast.get_docstring(part) or ""


def _find(module: str, name: str) -> tuple[str, Definition | ast.Module]:
    """Where a name is defined, followed through imports."""
    for node in _parse(module).body:
        if isinstance(node, Definition) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    inner = f"{node.module}.{alias.name}"
                    if _file(inner).is_file():
                        return inner, _parse(inner)
                    return _find(str(node.module), alias.name)
    raise SystemExit(f"{module}.{name} is public and defined nowhere")


def _signature(node: Definition, lines: list[str]) -> str:
    """A function's or method's first lines as they are written, or a class with its fields."""
    if isinstance(node, ast.FunctionDef):
        first = min([node.lineno, *(part.lineno for part in node.decorator_list)])
        head = lines[first - 1 : node.body[0].lineno - 1]
        return _unindent([line.partition("  # noqa")[0] for line in head])
    if fields := _fields(node):
        rows = [lines[at] for part in fields for at in range(part.lineno - 1, part.end_lineno or part.lineno)]
        return "\n".join([lines[node.lineno - 1], *rows])
    start = next((p for p in node.body if isinstance(p, ast.FunctionDef) and p.name == "__init__"), None)
    inner = ["    " + row for row in _signature(start, lines).splitlines()] if start else []
    return "\n".join([lines[node.lineno - 1], *inner])


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [part for part in node.body if isinstance(part, ast.AnnAssign)]


def _unindent(rows: list[str]) -> str:
    indent = len(rows[0]) - len(rows[0].lstrip())
    return "\n".join(row[indent:] for row in rows)
