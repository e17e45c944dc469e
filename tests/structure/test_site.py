"""The documents as a site: no broken link, nothing from elsewhere, and every page fits a phone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

import lockstep

ROOT = Path(__file__).parents[2]
DOCUMENTS = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
WIDE = "lockstep/comm/tree.py.html"  # a source file, which has a page because documents link to it
# What stands out of the window, but for what scrolls in a box of its own.
OUTSIDE = """[...document.querySelectorAll('header *, main *')].filter((e) =>
  !e.closest('pre, .box, .skip, [hidden]') && e.getBoundingClientRect().right > WIDTH + 1
).map((e) => e.outerHTML.slice(0, 200))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` does."""
    pytest.importorskip("markdown")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-W", "error", str(ROOT / "docs" / "site" / "build.py"), "-o", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages(site):
    """The documents; pages of source files are far more, and all alike."""
    return [
        "index.html",
        *sorted(str(path.relative_to(site)) for path in (site / "docs").glob("*.html")),
        WIDE,
    ]


def test_every_document_has_a_page_and_fetches_nothing(site):
    assert {path.removesuffix("md") + "html" for path in DOCUMENTS} < set(pages(site))
    for path in [*site.rglob("*.html"), site / "site.js", site / "site.css"]:
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>|@import.*|url\(.*", path.read_text())
        assert not [tag for tag in tags if "//" in tag], path


def test_what_is_no_site_is_never_overwritten(site, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    from build import write

    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="holds something else"):
        write(tmp_path, [])
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_public_names_and_verbs_are_in_the_reference(site):
    python = (site / "docs" / "python.html").read_text()
    for name in lockstep.__all__:
        assert f'id="{name.lower()}"' in python, name
    commands = (site / "docs" / "commands.html").read_text()
    assert 'id="lockstep-data-pack"' in commands and "--rdzv" in commands


def test_a_link_that_leads_nowhere_is_found(site, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    from check_links import find_broken

    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.html").write_text(
        '<h2 id="one">1</h2><a href="#one"></a><a href="../b.html#two"></a>'
    )
    (tmp_path / "b.html").write_text("<a href='in/a.html#one'></a><img src='c.png'><a href='https://d'></a>")
    assert find_broken(tmp_path) == [
        "b.html: c.png leads to no file",
        "in/a.html: ../b.html#two leads to no heading",
    ]
    assert not find_broken(site)


def test_every_document_is_two_clicks_from_the_readme():
    """On a code host, where there is no menu."""
    seen, last = {"README.md"}, {"README.md"}
    for _ in range(2):
        found = set()
        for page in last:
            for link in re.findall(r"\]\(([^)#:]+\.md)[)#]", (ROOT / page).read_text()):
                found.add((ROOT / page).parent.joinpath(link).resolve().relative_to(ROOT).as_posix())
        last = found - seen
        seen |= found
    assert not DOCUMENTS - seen


def visit(browser, path, width):
    browser.resize(width, dark=False)
    browser.call("Page.navigate", url=path.as_uri())
    browser.wait(f"document.readyState === 'complete' && location.href.startsWith('{path.as_uri()}')")


def test_no_page_overflows_a_phone(browser, site):
    browser.requests.clear()
    for page in pages(site):
        visit(browser, site / page, 390)
        for width in (390, 1280):
            browser.resize(width, dark=False)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width, (page, width)
            assert browser.evaluate(OUTSIDE.replace("WIDTH", str(width))) == [], (page, width)
        broken = "[...document.images].filter((i) => !i.complete || !i.naturalWidth).map((i) => i.src)"
        assert browser.evaluate(broken) == [], page
    assert not browser.errors
    assert not [url for url in browser.requests if not url.startswith((site.as_uri(), "data:"))]


def test_the_menu_and_the_search_work_from_files(browser, site):
    visit(browser, site / "docs" / "bits.html", 390)
    shown = "getComputedStyle(document.getElementById('menu')).display !== 'none'"
    assert not browser.evaluate(shown)
    browser.evaluate("document.getElementById('open-menu').click()")
    assert browser.evaluate(shown)
    field = "document.querySelector('input')"
    browser.evaluate(f"{field}.value = 'Lane TREE'; {field}.dispatchEvent(new Event('input'))")
    browser.wait("document.querySelectorAll('#found a').length > 0")
    first = browser.evaluate("document.querySelector('#found a').href")
    assert first == (site / "docs" / "bits.html").as_uri() + "#the-lane-tree"
    assert browser.evaluate("document.getElementById('found').getBoundingClientRect().right") <= 390
    browser.evaluate("document.querySelector('form').requestSubmit()")
    browser.wait("location.hash === '#the-lane-tree'")
