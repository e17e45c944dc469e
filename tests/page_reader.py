"""Reads a page of `lockstep report` as its readers do: tables, numbers, figures."""

import json
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

from lockstep.report.page.page_source import read_sources
from lockstep.report.page.write_page import make_page

WHEN = datetime(2026, 1, 2, tzinfo=UTC)


def page_of(*words):
    return make_page(read_sources(list(map(str, words)), Path("runs")), "", WHEN)


class Reader(HTMLParser):
    """Elements by name, ids, and tables as lists of rows of texts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.values, self.tables, self.open = [], set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append((tag, found))
        self.open.append(tag)
        if tag == "data":
            self.values.add(found["value"])
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    def table(self, corner, column):
        """The row heads and cells of the tables with this corner, by a column's name."""
        return {
            row[0]: row[rows[0].index(column)]
            for rows in self.tables
            if rows[0][0] == corner and column in rows[0]
            for row in rows[1:]
        }


def figures(text):
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.S)
    return json.loads(found[1])
