"""A document becomes HTML: its links as they are on the site, wide tables in a box, headings with anchors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.extensions.codehilite import CodeHiliteExtension
from markdown.extensions.toc import TocExtension
from markdown.treeprocessors import Treeprocessor
from site_map import address, relative, resolve, title_of

HEADINGS = ("h1", "h2", "h3")


@dataclass
class Passage:
    """What stands under one heading, for the search and the list of a page's headings."""

    anchor: str
    level: int
    heading: str = ""
    text: str = ""


@dataclass
class Page:
    """A page of the site; `targets` are the files of the repository that it links to."""

    path: str
    body: str = ""
    passages: list[Passage] = field(default_factory=list)
    targets: set[str] = field(default_factory=set)

    @property
    def title(self) -> str:
        """Its first heading."""
        return next((part.heading for part in self.passages if part.heading), self.path)


def render(path: str, text: str) -> Page:
    """The page of a document."""
    page = Page(path)
    toc = TocExtension(slugify=make_slug, permalink="#", permalink_title="Link to this heading")
    code = CodeHiliteExtension(guess_lang=False, css_class="code")
    parts = ["tables", "fenced_code", "sane_lists", toc, code, _OnTheSite(page)]
    shell = re.sub(r"^```console$", "```bash", text, flags=re.M)
    page.body = Markdown(extensions=parts).convert(shell)
    page.passages = Outline(page.body).passages
    return page


def make_slug(heading: str, separator: str) -> str:
    """The anchor of a heading, as code hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


class _OnTheSite(Extension):
    def __init__(self, page: Page) -> None:
        self._page = page

    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(_Rewrite(md, self._page), "site", 1)  # after all others


class _Rewrite(Treeprocessor):
    def __init__(self, md: Markdown, page: Page) -> None:
        super().__init__(md)
        self._page = page

    def run(self, root: Element) -> None:
        for element in list(root.iter()):
            for name in ("href", "src"):
                if (link := element.get(name)) is not None:
                    element.set(name, self._rewrite(link))
                    if element.text == link and (title := self._title(link)):
                        element.text = title
            for place, child in enumerate(list(element)):
                if child.tag == "table":
                    element[place] = box = Element("div", {"class": "box", "tabindex": "0"})
                    box.append(child)

    def _rewrite(self, link: str) -> str:
        found = resolve(link, self._page.path)
        if not found or link.startswith("#"):
            return link
        path, anchor = found
        self._page.targets.add(path)
        return relative(address(path), address(self._page.path)) + (anchor and f"#{anchor}")

    def _title(self, link: str) -> str:
        """What a link says that would only read as a document's file name."""
        found = resolve(link, self._page.path)
        return title_of(found[0]) if found else ""


class Outline(HTMLParser):
    """The passages of a page of HTML."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.passages = [Passage("", 1)]
        self._add: Callable[[str], None] = self._add_text
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        if tag in HEADINGS and (anchor := known.get("id")):
            self.passages.append(Passage(anchor, int(tag[1])))
            self._add = self._add_heading
        elif known.get("class") == "headerlink":
            self._add = self._drop
        elif tag in ("p", "li", "td", "th", "pre", "br"):
            self._add_text(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag in HEADINGS:
            self._add = self._add_text

    def handle_data(self, data: str) -> None:
        self._add(data)

    def _add_heading(self, data: str) -> None:
        self.passages[-1].heading += data

    def _add_text(self, data: str) -> None:
        self.passages[-1].text += data

    def _drop(self, data: str) -> None:
        """The mark beside a heading is no text of it."""
