"""The documents as a site that needs no server and nothing from elsewhere. Run: python docs/site/build.py"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path
from string import Template

from check_links import find_broken
from commands_reference import write_commands
from markdown_page import Page, render
from python_reference import write_python
from site_map import AS_THEY_ARE, COMMANDS, MENU, PYTHON, ROOT, address, find_pages, relative
from source_page import make_source_page

HERE = Path(__file__).parent
COLOURS = ROOT / "lockstep" / "report" / "page" / "page.css"  # the first rules of it, up to the first of all
WRITTEN = {PYTHON: write_python, COMMANDS: write_commands}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "site")
    output = parser.parse_args().output
    documents = [render(path, read(path)) for path in find_pages()]
    files = write(output, documents)
    if broken := find_broken(output):
        sys.exit("\n".join(broken))
    print(f"{output / 'index.html'}: {len(documents)} pages, {files} files of the repository")


def read(path: str) -> str:
    """The Markdown of a page."""
    return WRITTEN[path]() if path in WRITTEN else (ROOT / path).read_text()


def write(output: Path, documents: list[Page]) -> int:
    """Write the site into a folder that holds nothing else; gives the number of files that it links to."""
    is_site = all((output / name).is_file() for name in ("index.html", "site.css", "search.js"))
    if output.is_dir() and any(output.iterdir()) and not is_site:
        sys.exit(f"{output} holds something else than a site: name a folder that is empty")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    colours = COLOURS.read_text().partition("\n* {")[0]
    (output / "site.css").write_text(colours + (HERE / "site.css").read_text())
    shutil.copy(HERE / "site.js", output)
    (output / "search.js").write_text("window.passages = " + search_rows(documents) + ";\n")
    titles = {page.path: page.title for page in documents}
    for page in documents:
        put(output, page, titles)
    linked = {path for page in documents for path in page.targets} - titles.keys()
    for path in sorted(linked):
        linked |= put_file(output, path, titles)
    return len(linked)


def put_file(output: Path, path: str, titles: dict[str, str]) -> set[str]:
    """A file or folder that is linked to, and what it links to itself; what is not there is found later."""
    if path.startswith("..") or not (ROOT / path).exists():
        return set()
    if Path(path).suffix in AS_THEY_ARE:
        (output / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, output / path)
        return set()
    page = make_source_page(path)
    put(output, page, titles)
    for target in page.targets:
        put_file(output, target, titles)
    return page.targets


def put(output: Path, page: Page, titles: dict[str, str]) -> None:
    """Write one page in the frame that all have."""
    at = address(page.path)
    known = {"root": relative(".", at), "body": page.body, "title": escape(page.title)}
    parts = {"menu": menu(page, titles), "contents": contents(page), "beside": beside(page, titles)}
    place = output / at
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(Template((HERE / "frame.html").read_text()).substitute(known | parts))


def menu(page: Page, titles: dict[str, str]) -> str:
    """All pages by section; the section of this one is open."""
    parts = []
    for section, paths in MENU.items():
        items = "".join(f"<li>{link(path, page, titles)}</li>" for path in paths)
        is_open = " open" if page.path in paths else ""
        parts.append(f"<details{is_open}><summary>{section}</summary><ul>{items}</ul></details>")
    return "\n".join(parts)


def contents(page: Page) -> str:
    """The headings of a page, if there are several."""
    items = [
        f"<li class='level{part.level}'><a href='#{part.anchor}'>{escape(part.heading)}</a></li>"
        for part in page.passages
        if part.level > 1 and part.heading
    ]
    return f"<p>On this page</p><ul>{''.join(items)}</ul>" if len(items) > 1 else ""


def beside(page: Page, titles: dict[str, str]) -> str:
    """The pages before and after this one, in the order of the menu."""
    paths = list(titles)
    if page.path not in titles:
        return ""
    here = paths.index(page.path)
    before = link(paths[here - 1], page, titles, "← ") if here else "<span></span>"
    return before + (link(paths[here + 1], page, titles, "", " →") if here + 1 < len(paths) else "")


def link(path: str, page: Page, titles: dict[str, str], before: str = "", after: str = "") -> str:
    """A link to another page by its title."""
    current = " aria-current='page'" if path == page.path else ""
    href = relative(address(path), address(page.path))
    return f"<a href='{href}'{current}>{before}{escape(titles[path])}{after}</a>"


def search_rows(documents: Iterable[Page]) -> str:
    """What the search looks through, as JSON: rows of address, page, heading, text."""
    rows = []
    for page in documents:
        for part in filter(lambda part: part.heading, page.passages):
            at = f"{address(page.path)}#{part.anchor}"
            rows.append([at, page.title, part.heading, " ".join(part.text.split())])
    return json.dumps(rows, ensure_ascii=False)


if __name__ == "__main__":
    main()
