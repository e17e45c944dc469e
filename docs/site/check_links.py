"""Every link of a built site leads to a page that is there, and every anchor to a heading of it."""

from __future__ import annotations

import posixpath
import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote

_TAG = re.compile(r"<[a-z][^>]*>")
_LINK = re.compile(r"""\s(?:href|src)=["']([^"'>]*)""")
_ANCHOR = re.compile(r"""\sid=["']([^"'>]*)""")


def find_broken(site: Path) -> list[str]:
    """A line for each link that leads nowhere."""
    links: dict[str, list[str]] = {}
    anchors: dict[str, set[str]] = {}
    for path in sorted(site.rglob("*.html")):
        page, tags = path.relative_to(site).as_posix(), " ".join(_TAG.findall(path.read_text()))
        links[page] = [unquote(unescape(link)) for link in _LINK.findall(tags)]
        anchors[page] = {"", *_ANCHOR.findall(tags)}
    broken = []
    for page, found in links.items():
        for link in found:
            if ":" in link:
                continue
            target, _, anchor = link.partition("#")
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) if target else page
            if not (site / path).is_file():
                broken.append(f"{page}: {link} leads to no file")
            elif anchor not in anchors.get(path, {anchor}):
                broken.append(f"{page}: {link} leads to no heading")
    return broken
