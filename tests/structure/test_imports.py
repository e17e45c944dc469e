"""Imports point one way; found by parsing the sources, lazy imports included."""

import ast
from pathlib import Path

import lockstep

ROOT = Path(lockstep.__file__).parent
# What each package may import of ours, beside itself and errors. This is the whole architecture.
MAY_IMPORT = {
    "errors": set(),
    "spec": set(),
    "recipes": {"spec"},
    "kernels": {"spec", "comm"},
    "comm": {"spec"},
    "data": {"spec", "kernels"},
    "models": {"spec", "kernels", "comm", "data"},
    "measure": {"spec", "kernels", "comm", "data"},
    "train": {"spec", "kernels", "comm", "data", "models", "measure"},
    "elastic": {"spec", "kernels", "comm", "data", "models", "measure", "train"},
    "report": {"spec"},
    "cli": {"spec", "recipes", "kernels", "comm", "data", "models", "measure", "train", "elastic", "report"},
}
TOP = {"__init__", "__main__"}  # above everything


def package_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path):
    """Names of our modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            names = [node.module or ""]
            if node.module == "lockstep":
                names = [f"lockstep.{alias.name}" for alias in node.names]
            yield from names
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def edges():
    for path in sorted(ROOT.rglob("*.py")):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "lockstep" and len(parts) > 1:
                yield path, package_of(path), parts[1]


def test_every_package_is_in_the_table():
    found = {package_of(path) for path in ROOT.rglob("*.py")} - TOP
    assert found == set(MAY_IMPORT)


def test_imports_point_one_way():
    for path, source, target in edges():
        if source in TOP or target in {source, "errors", "__version__"}:
            continue
        assert target in MAY_IMPORT[source], f"{path}: {source} must not import {target}"


def test_no_cycles_between_files():
    modules = {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in ROOT.rglob("*.py")
    }
    graph = {}
    for name, path in modules.items():
        top_level = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
        graph[name] = {node.module for node in top_level if node.module in modules} - {name}
    done = set()

    def visit(name, trail):
        assert name not in trail, " → ".join([*trail, name])
        if name not in done:
            for target in graph[name]:
                visit(target, [*trail, name])
            done.add(name)

    for name in graph:
        visit(name, [])


def test_only_the_command_line_prints():
    for path in ROOT.rglob("*.py"):
        if package_of(path) == "cli":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            assert called != "print", f"{path}:{node.lineno} prints"


def test_nothing_is_pickled():
    for path in ROOT.rglob("*.py"):
        text = path.read_text().replace("safetensors.torch.", "")
        for word in ("import pickle", "torch.load(", "torch.save(", "allow_pickle", "all_gather_object"):
            assert word not in text, f"{path}: {word}"
