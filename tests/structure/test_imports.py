"""Imports point one way; found by parsing the sources, lazy imports included."""

import ast
import importlib
from pathlib import Path

import pytest

import lockstep

ROOT = Path(lockstep.__file__).parent
BENCHMARKS = ROOT.parent / "benchmarks"
# What each package may import of ours, beside itself and errors. This is the whole architecture.
MAY_IMPORT = {
    "errors": set(),
    "spec": set(),
    "recipes": {"spec"},
    "native": {"spec"},
    "comm": {"spec", "native"},
    "kernels": {"spec", "comm", "native"},
    "data": {"spec", "kernels"},
    "models": {"spec", "kernels"},
    "measure": {"spec", "comm", "kernels"},
    "lower": {"spec", "comm", "kernels", "data", "models", "measure"},
    "parallel": {"spec", "comm", "kernels", "data", "models", "measure", "lower"},
    "runs": {"spec", "comm", "kernels", "data", "models", "measure", "lower"},
    "elastic": {"spec", "comm"},
    "lanes": {"spec", "comm", "kernels", "data", "models", "measure", "runs", "elastic"},
    "train": {"spec", "comm", "kernels", "data", "models", "measure", "lower", "parallel", "runs", "lanes"},
    "lightning": {"spec", "comm", "kernels", "models", "measure", "lanes"},
    "report": {"spec"},
    "planner": {"spec"},
    "lab": {"spec", "native", "kernels", "measure"},
}
MAY_IMPORT["train"] |= {"planner"}  # for the prediction in a run's summary
MAY_IMPORT["cli"] = set(MAY_IMPORT) - {"errors", "lightning"}  # alone has report, and elastic with train
TOP = {"__init__", "__main__"}  # above everything
SEVERAL = {"find_lowering"}  # what every kernel set has


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


@pytest.mark.parametrize(("folder", "base"), [(ROOT, ROOT.parent), (BENCHMARKS, BENCHMARKS)])
def test_no_cycles_between_files(folder, base):
    """Lazy imports and those for types count too; the package's own root may be imported by all."""
    modules = {
        ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): path
        for path in folder.rglob("*.py")
    }
    graph = {}
    for name, path in modules.items():
        targets = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                both = [f"{node.module}.{alias.name}" for alias in node.names]
                targets |= {whole if whole in modules else node.module for whole in both}
            elif isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names if alias.name in modules}
        graph[name] = targets - {name, "lockstep"} if name != "lockstep" else set()
    done = set()

    def visit(name, trail):
        assert name not in trail, " → ".join([*trail, name])
        if name not in done:
            for target in graph[name]:
                visit(target, [*trail, name])
            done.add(name)

    for name in graph:
        visit(name, [])


def test_no_room_is_crowded():
    """A folder past 16 files, or a file past 250 lines, is a design that has outgrown its place."""
    for folder in {path.parent for path in ROOT.rglob("*.py")}:
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= 16, f"{folder} has {len(files)} files"
    for path in ROOT.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 250, path


def test_names_say_one_thing():
    """No file name twice outside cli/, and no public function or class name twice."""
    paths = [path for path in ROOT.rglob("*.py") if package_of(path) != "cli"]
    files = [path.name for path in paths if path.name != "__init__.py"]
    assert not [name for name in files if files.count(name) > 1]
    found = {}
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert node.name not in found or node.name in SEVERAL, (
                    f"{node.name}: {found[node.name]}, {path}"
                )
                found[node.name] = path


def test_every_file_says_what_it_is():
    for path in ROOT.rglob("*.py"):
        first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        assert len(first) > 10 and first.endswith((".", ":")), f"{path}: {first!r}"


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


def test_benchmarks_import_what_exists():
    for path in BENCHMARKS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lockstep":
                module = importlib.import_module(node.module)
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing, f"{path}: {node.module} has no {missing}"
