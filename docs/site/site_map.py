"""Which pages there are, and where they lie: as in the repository, so that a link means the same in both."""

from __future__ import annotations

import posixpath
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON, COMMANDS = "docs/python.md", "docs/commands.md"  # made from docstrings and from --help
# The menu: a section for each kind of reader, its landing page first.
SECTIONS = {
    "Start": ["README.md"],
    "My photographs": ["photographs", "images", "heads", "augment", "packs", "sweeps", "report"],
    "My own loop": ["my-loop", "loops", "lightning"],
    "My cluster": [
        *("my-cluster", "workers", "jobs", "faults", "plans", "large-batches", "compression", "local-steps"),
        *("planning", "clusters", "simulation"),
    ],
    "How it works": [
        *("how-it-works", "bits", "kernels", "lab", "lab-gemm", "lab-conv", "lab-threads", "lab-baselines"),
    ],
    "Reference": ["configuration", "commands", "python", "CONTRIBUTING.md", "CHANGELOG.md"],
}
MENU = {
    section: [name if name.endswith(".md") else f"docs/{name}.md" for name in names]
    for section, names in SECTIONS.items()
}
AS_THEY_ARE = {".png", ".json"}  # files that a browser shows by itself


def find_pages() -> list[str]:
    """The pages in the order of the menu; an error if it leaves a document out."""
    pages = [path for paths in MENU.values() for path in paths]
    for path in sorted((ROOT / "docs").glob("*.md")):
        if f"docs/{path.name}" not in pages:
            raise SystemExit(
                f"docs/{path.name} is in no section: add it to SECTIONS in docs/site/site_map.py"
            )
    return pages


def title_of(path: str) -> str:
    """The title of a document, if it is one."""
    is_document = path.endswith(".md") and (ROOT / path).is_file()
    return (ROOT / path).read_text().partition("\n")[0].removeprefix("# ") if is_document else ""


def address(path: str) -> str:
    """Where a file or folder of the repository lies on the site."""
    if path == "README.md":
        return "index.html"
    if path.endswith(".md"):
        return path.removesuffix("md") + "html"
    if (ROOT / path).is_dir():
        return f"{path}/index.html"
    return path if Path(path).suffix in AS_THEY_ARE else f"{path}.html"


def resolve(link: str, page: str) -> tuple[str, str] | None:
    """The file that a link in a page means, and the anchor in it; None for one that leads elsewhere."""
    target, _, anchor = link.partition("#")
    if ":" in target or target.startswith("/"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) if target else page, anchor


def relative(target: str, page: str) -> str:
    """The link from one address to another."""
    return posixpath.relpath(target, posixpath.dirname(page) or ".")
