"""The page of `lockstep report`: what is in it, what is left out, and that it needs nothing else."""

import io
import json
import re
import shutil
import sys
from html import unescape
from pathlib import Path

import pytest
from foresight_files import write_foresight
from page_reader import Reader, figures, page_of
from PIL import Image
from small import small_run, train

from lockstep.cli.main import run as run_cli
from lockstep.errors import BadInput
from lockstep.report.page.mistake_page import ShownMistake, ShownPair, make_mistake_page
from lockstep.report.page.write_page import make_page
from lockstep.spec.record import read_records

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"'"
PAGE_CSS = Path(sys.modules[make_page.__module__].__file__).with_name("page.css")


def generation(number, step, workers, *changes):
    return {"generation": number, "step": step, "workers": workers, "changes": list(changes)} | {
        "since": 1.8e9 + step, "seconds": 0.25, "spares": 0,
    }  # fmt: skip


def stage(number, start):
    rows = [["forward", lane, start + lane, start + lane + 0.9] for lane in range(3)]
    rows += [["backward", lane, start + 4 + lane, start + 4.5 + lane] for lane in range(3)]
    return {"stage": number, "busy_s": 0.0421, "waited_s": 0.0077, "bubble": 0.15, "sent_mb": 0.5} | {
        "lanes_in_flight": 2, "peak_mb": 300.0, "timeline": rows,
    }  # fmt: skip


def layer(name, busy_s, rule="output channels"):
    return {"layer": name, "rule": rule, "work_mmac": 1.5, "share": 0.5, "busy_s": busy_s} | {
        "exchange_s": 0.0031, "channel_mb": 0.4, "spatial_mb": 0.0,
    }  # fmt: skip


LAYERS = {
    "share": 0.9, "timed": "work", "busy_s": 0.03, "exchange_s": 0.0062, "bands": 1, "slices": 1, "cells": [],
    "rows": [layer("blocks.block1.0", 0.0123), layer(f"{NASTY} blocks.block2.0", 0.0177)],
    "timeline": [[[0, "busy", 0, 900], [0, "channel", 300, 200]], [[1, "busy", 10, 700]]],
}  # fmt: skip
PREDICTED = {"compute_s": [0.011, 0.01], "exposed_s": [0.002, 0.0025], "cluster": "two cores", "bad": [1]}


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory):
    """A real run, and copies of it whose summaries have what other plans and workers give."""
    folder = tmp_path_factory.mktemp("runs")
    result, _ = train(small_run("data.num_train=96"), folder, launch={"name": "one"})
    img_s = result.summary["img_s"]
    copies = {
        "two": {
            "workers": 2,
            "img_s": 1.8 * img_s,
            "generations": [generation(1, 0, 2)],
            "predicted": PREDICTED,
        },
        "pipe": {"workers": 2, "plan": "pipeline=2", "stages": [stage(0, 100.0), stage(1, 100.5)]}
        | {"generations": [generation(1, 0, 2)]},
        "split": {"workers": 2, "plan": "channel=2", "layers": LAYERS, "weights_sha256": "ab" * 32}
        | {"generations": [generation(1, 0, 2)]},
        "lost": {"generations": [generation(1, 0, 2), generation(2, 3, 1, f"worker 1 {NASTY} died")]},
    }
    for name, changes in copies.items():
        shutil.copytree(folder / "one", folder / name)
        edit(folder / name, **changes)
    text = (folder / "lost" / "run.toml").read_text().replace("lr = 0.05", "lr = 0.07")
    (folder / "lost" / "run.toml").write_text(text)
    return folder


def edit(path, **changes):
    summary = json.loads((path / "summary.json").read_text()) | changes
    (path / "summary.json").write_text(json.dumps(summary))


@pytest.fixture(scope="module")
def page(runs_dir, tmp_path_factory):
    """Of all runs and of the repository's records, one of them with a hostile name."""
    records = json.loads((RESULTS / "workers-cpu.json").read_text())
    path = tmp_path_factory.mktemp("records") / "hostile.json"
    path.write_text(json.dumps([row | {"name": NASTY} for row in records * 2]))
    return page_of(runs_dir, RESULTS, path)


def test_tables_hold_the_numbers_of_the_records(page):
    values = Reader(page).values
    for path in RESULTS.glob("*.json"):
        for record in read_records(path):
            assert {repr(record.value), *map(repr, record.spread)} <= values, (path, record.name)
            assert record.commit in page


def test_tables_hold_what_the_runs_reported(page, runs_dir):
    found = Reader(page)
    summary = json.loads((runs_dir / "one" / "summary.json").read_text())
    one = found.table("run", "one")
    assert one["model"] == "lenet5" and one["workers"] == "1" and one["batch"] == "32"
    assert one["accuracy"] == f"{100 * summary['accuracy']:.2f} %" and repr(summary["loss"]) in found.values
    assert one["weights_sha256"] == f"{summary['weights_sha256'][:12]} A"  # as of all copies but one
    assert found.table("run", "split")["weights_sha256"] == "abababababab"
    last = found.table("step", "lost, one, pipe, split, two: test")[str(summary["steps"])]
    assert last == f"{100 * summary['accuracy']:.4g} %"  # the second table of the two, of the same numbers
    assert found.table("plan", "speedup")["whole model each"] == "1.8 ×"
    assert found.table("plan", "efficiency")["whole model each"] == "90 %"
    assert found.table("part", "error") == {"compute": "10 %", "exposed": "-20 %"}
    assert found.table("worker", "waiting")["worker 0, stage 0"] == "7.7 ms"
    assert found.table("layer", "computing")["blocks.block1.0"] == "12.3 ms"
    assert found.table("key", "lost")["plan"] == "none" and found.table("key", "pipe")["plan"] == "pipeline=2"


def test_texts_of_files_stay_texts(page):
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert "alert(1)" not in re.sub(r"&lt;/?script&gt;alert\(1\)", "", outside) and "<img" not in outside
    assert NASTY in unescape(outside) and page.count("<script") == page.count("</script>")
    for figure in figures(page):
        names = str(figure["layout"].get("yaxis", {}).get("ticktext", "")) + str(
            [(trace["name"], trace.get("customdata")) for trace in figure["data"]]
        )
        assert "<" not in names


def test_nothing_is_fetched(page):
    tags = Reader(page).tags
    links = [value for _, attrs in tags for key, value in attrs.items() if key in ("src", "href", "srcset")]
    ids = {attrs["id"] for _, attrs in tags if "id" in attrs}
    assert links and all(link.startswith("#") and link[1:] in ids for link in links)
    assert not {"link", "img", "iframe", "object", "embed"} & {tag for tag, _ in tags}
    assert "url(" not in PAGE_CSS.read_text() and "default-src 'none'" in page


def test_every_plot_has_data_and_its_table(page):
    drawn = figures(page)
    assert len(drawn) > 20
    for figure in drawn:
        for trace in figure["data"]:
            assert trace["x"] and len(trace["x"]) == len(trace["y"])
            assert any(isinstance(value, int | float) for value in (*trace["x"], *trace["y"]))
    parts = re.findall(r"<figure>.*?</figure>", page, re.S)
    assert len(parts) == len(drawn)
    for part in parts:
        assert re.search(r'role="img" aria-label="[^"]+"', part)
        if "<details>" in part:
            assert part.count("<tr>") > 1 and part.index('class="plot"') < part.index("<details>")
        else:  # of records, whose table follows
            assert re.match(r"(<figure>.*?</figure>)*<div class=.box.", page[page.index(part) :], re.S)


def test_what_no_run_has_is_left_out(runs_dir):
    def anchors(*words):
        return re.findall(r'<section id="([\w-]+)"', page_of(*words))

    assert anchors(runs_dir / "one") == ["runs", "curves"]
    assert anchors(RESULTS / "workers-cpu.json") == ["records"]
    assert anchors(runs_dir / "pipe") == ["runs", "curves", "communication", "layers", "timelines"]
    assert anchors(runs_dir) == [
        "runs", "curves", "scaling", "predicted", "communication", "layers", "timelines", "differences",
    ]  # fmt: skip


def test_damaged_runs_are_named_and_left_out(runs_dir, tmp_path, capsys):
    for name in ("good", "unfinished", "torn", "short", "wrong"):
        shutil.copytree(runs_dir / "one", tmp_path / name)
    (tmp_path / "unfinished" / "summary.json").unlink()
    metrics = tmp_path / "torn" / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-40])
    (tmp_path / "short" / "summary.json").write_text('{"loss": ')
    edit(tmp_path / "wrong", stages=[{"stage": 0}])
    (tmp_path / "other.json").write_text("[1]")
    output = tmp_path / "page.html"
    words = ["report", str(tmp_path), "--output", str(output), "--title", NASTY]
    assert run_cli(words) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and all(line.startswith(f"left out: {tmp_path}") for line in lines)
    text = output.read_text()
    assert "1 run" in text and "busy_s is missing" in text and f"<h1>{NASTY}" not in text
    assert run_cli(words) == 2 and "there is such a file" in capsys.readouterr().err
    bad = [str(tmp_path / "torn"), str(tmp_path / "short")]
    assert run_cli(["report", *bad, "-o", str(tmp_path / "none.html")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "nothing to show" in error and not (tmp_path / "none.html").exists()
    assert run_cli(["report", "no-such-run", "-o", str(tmp_path / "none.html")]) == 2
    assert "no run 'no-such-run'" in capsys.readouterr().err


@pytest.mark.parametrize("nonsense", [None, "x", [], {}, [[1]], 0, -1, 1e300, True, float("nan")], ids=str)
def test_nonsense_in_a_summary_is_refused_or_shown(runs_dir, tmp_path, nonsense):
    """No value of summary.json ends in a traceback."""
    for name in ("pipe", "split", "lost", "two"):
        shutil.copytree(runs_dir / name, tmp_path / name)
        whole = json.loads((tmp_path / name / "summary.json").read_text())
        for key in whole:
            edit(tmp_path / name, **{**whole, key: nonsense})
            try:
                assert page_of(tmp_path / name)
            except BadInput as error:
                assert key in str(error) or "damaged" in str(error)


def test_without_plotly_one_line_says_what_to_install(runs_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert run_cli(["report", str(runs_dir / "one"), "-o", str(tmp_path / "page.html")]) == 2
    assert "pip install 'lockstep-train[report]'" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_colours_stand_out_in_both_schemes():
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in PAGE_CSS.read_text().split("@media")[:2]
    )

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    assert light.keys() == dark.keys()
    for colors in (light, dark):
        for name, least in {"ink": 7, "faint": 4.5, "link": 4.5, **{f"c{i}": 3 for i in range(8)}}.items():
            for ground in ("paper", "soft"):
                low, high = sorted(map(luminance, (colors[name], colors[ground])))
                assert (high + 0.05) / (low + 0.05) >= least, (name, ground)


@pytest.fixture(scope="module")
def shown(browser, runs_dir, tmp_path_factory):
    """A page in the browser's window, of 1280 pixels and light."""
    path = tmp_path_factory.mktemp("shown") / "page.html"
    records = [RESULTS / name for name in ("workers-cpu.json", "decode-cpu.json", "halo-conv-cpu.json")]
    path.write_text(page_of(runs_dir, write_foresight(path.parent), *records))
    browser.open(path, 1280)
    return path


# Texts of a plot that lie on each other.
OVERLAPS = """[...document.querySelectorAll('.plot')].flatMap((plot) => {
  const names = '.xtick text, .ytick text, .legendtext, .xtitle, .ytitle, .annotation-text';
  const boxes = [...plot.querySelectorAll(names)].map((t) => [t.textContent, t.getBoundingClientRect()]);
  const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
  return boxes.flatMap(([one, a], i) => boxes.slice(i + 1).filter(([, b]) => over(a, b))
    .map(([two]) => `${plot.id} ${plot.getAttribute('aria-label')}: ${one} | ${two}`));
})"""
FILL = "getComputedStyle(document.querySelector('.plot text')).fill"
INK = {False: "rgb(28, 36, 48)", True: "rgb(230, 234, 240)"}


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, True), (390, False)])
def test_a_browser_draws_it(browser, shown, width, dark):
    browser.resize(width, dark)
    browser.wait(f"{FILL} === '{INK[dark]}' && document.documentElement.dataset.drawn !== undefined")
    assert not browser.errors
    assert [url for url in browser.requests if not url.startswith(("data:", "blob:"))] == [shown.as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    marks = "d.querySelectorAll('.point path, path.point, .js-line').length"
    plots = browser.evaluate(f"[...document.querySelectorAll('.plot')].map(d => {marks})")
    assert len(plots) == len(figures(shown.read_text())) and all(plots)
    assert browser.evaluate(OVERLAPS) == []
    falling = browser.evaluate(
        "[...document.querySelectorAll('.plot')].filter(d => d.layout.yaxis.type === 'log')"
        ".filter(d => !(d._fullLayout.yaxis.range[0] < d._fullLayout.yaxis.range[1])).length"
    )
    assert falling == 0  # no axis of values is taken for a list of names
    rights = "[...document.querySelectorAll('.plot svg')].map(s => s.getBoundingClientRect().right)"
    assert max(browser.evaluate(rights)) <= width
    titles = browser.evaluate(
        "[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title).join()"
    )
    assert "Share" not in titles and ("Zoom" in titles) == (width > 640)
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 24, 31)" if dark else "rgb(255, 255, 255)")


def test_on_paper_all_is_open_and_light(browser, shown):
    browser.resize(1280, dark=True)
    browser.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.evaluate("document.querySelectorAll('details:not([open])').length") == 0
    assert browser.evaluate(FILL) == INK[False]
    widths = "[...document.querySelectorAll('.plot .main-svg')].map(s => s.getBoundingClientRect().width)"
    assert max(browser.evaluate(widths)) <= 680
    browser.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert browser.evaluate("document.querySelectorAll('details[open]').length") == 0


@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_of_wrong_predictions_fits_the_window(browser, tmp_path, width):
    """The last test here, as it opens another page; names of files and classes are somebody's."""
    file = io.BytesIO()
    Image.new("RGB", (96, 64), "teal").save(file, "jpeg")
    mistake = ShownMistake(file.getvalue(), f"{NASTY}{'long' * 30}.jpg", NASTY, "x" * 60, 0.987, 0.001)
    pairs = [ShownPair(NASTY, "x" * 60, 12, 40, [mistake] * 6)]
    classes = [{"class": NASTY, "samples": 40, "accuracy": 0.7, "mistaken_for": "x" * 60}]
    path = tmp_path / "wrong.html"
    path.write_text(make_mistake_page("flowers: wrong", "12 of 40", pairs, [mistake] * 20, classes))
    before = len(browser.requests)
    browser.open(path, width, has_plots=False)
    assert not browser.errors
    assert {url for url in browser.requests[before:] if not url.startswith("data:")} == {path.as_uri()}
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    boxes = "[...document.querySelectorAll('.gallery li')].map(d => d.getBoundingClientRect().width)"
    assert min(browser.evaluate(boxes)) > 100 and max(browser.evaluate(boxes)) < 260
    shown = "[...document.images].every(i => i.complete && i.naturalWidth === 96 && i.alt)"
    assert browser.evaluate(shown) and browser.evaluate("document.images.length") == 26
