"""A source file or a folder that a document links to, as a page of the site."""

from __future__ import annotations

import posixpath
from html import escape
from pathlib import Path

from markdown_page import Page, Passage
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from site_map import ROOT, address, relative


def make_source_page(path: str) -> Page:
    """The page of a file, in colours, or of a folder, with its files."""
    place = ROOT / path
    page = Page(path, f"<h1>{escape(place.name)}</h1><p class='where'>{_trail(path)}</p>")
    page.passages.append(Passage("", 1, place.name))
    if not place.is_dir():
        page.body += _in_colours(place)
        return page
    inside = [item for item in sorted(place.iterdir()) if item.name != "__pycache__"]
    page.targets = {f"{path}/{item.name}" for item in inside if item.is_file()}
    rows = (f"<li>{_name(item, f'{path}/{item.name}', page)}</li>" for item in inside)
    page.body += f"<ul>{''.join(rows)}</ul>"
    return page


def _trail(path: str) -> str:
    return escape(posixpath.dirname(path)) + "/" if "/" in path else "in the repository's root"


def _name(item: Path, path: str, page: Page) -> str:
    if item.is_dir():
        return escape(f"{item.name}/")
    link = relative(address(path), address(page.path))
    return f"<a href='{escape(link)}'>{escape(item.name)}</a>"


def _in_colours(place: Path) -> str:
    text = place.read_text()
    try:
        lexer = get_lexer_for_filename(place.name)
    except ClassNotFound:
        lexer = TextLexer()
    return str(highlight(text, lexer, HtmlFormatter(cssclass="code")))
