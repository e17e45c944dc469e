"""Predictions, scaling and any records on the page of `lockstep report`."""

import json
import re
from html import unescape

import pytest
from foresight_files import write_foresight
from page_reader import Reader, figures, page_of

from lockstep.cli.main import run as run_cli
from lockstep.errors import BadInput


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_foresight(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def page(folder):
    return page_of(folder)


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def drawn(text):
    """Figures by their titles."""
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    return dict(zip(map(unescape, titles), figures(text), strict=True))


def traces(figure):
    return {trace["name"]: trace for trace in figure["data"]}


def test_tables_hold_what_was_predicted(page, folder):
    values, text = Reader(page).values, unescape(page)
    for name in ("nvlink", "ethernet", "few"):
        found = read(folder, name)
        for row in found["plans"]:
            numbers = (row["total_s"], *row["range_s"], row["compute_s"], row["hidden_s"], row["img_s"])
            assert set(map(repr, numbers)) <= values
            assert repr(row["exposed_s"] + row["inside_s"] + row["gather_s"]) in values
        assert len(found["why"]) > 2 and all(f"<li>{line}</li>" in text for line in found["why"])
        assert f"{found['best']['plan']}, {found['best']['workers']} worker" in text
    assert "8 workers a node (H100" in text and "GB/s and" in text and "gradients travel in fp32" in text


def test_a_step_is_drawn_by_workers(page, folder):
    found, rows = drawn(page), read(folder, "ethernet")["plans"]
    figure = found["A step by workers: resnet18, batch 512, bf16 on cpu-1g"]
    lines, axes = traces(figure), figure["layout"]
    assert axes["xaxis"]["type"] == axes["yaxis"]["type"] == "log"
    assert lines["computing"]["x"] == [row["workers"] for row in rows] == [1, 2, 4, 8, 16, 32]
    assert lines["computing"]["y"] == [1e3 * row["compute_s"] for row in rows]
    other = traces(found["A step by workers: resnet18, batch 512, bf16 on 8xH100 (nvlink)"])[
        "exchange, hidden"
    ]
    hidden = [1e3 * row["hidden_s"] or None for row in read(folder, "nvlink")["plans"]]
    assert other["y"] == hidden and any(hidden)
    assert lines["exchange, exposed"]["y"][0] is None  # one worker exchanges nothing
    few = found["A step by workers: resnet18, batch 512, bf16 on 4xK80"]["layout"]
    assert "type" not in few["xaxis"]


def test_where_the_exchange_overtakes_computing(page, folder):
    lines = traces(drawn(page)["Exposed exchange over computing, by workers"])
    rows = read(folder, "ethernet")["plans"][1:]
    name = "resnet18, batch 512, bf16 on cpu-1g"
    sums = [(row["exposed_s"] + row["inside_s"] + row["gather_s"]) / row["compute_s"] for row in rows]
    assert lines[name]["y"] == pytest.approx(sums) and "as long as computing" in lines
    turns = next((row["workers"] for row, ratio in zip(rows, sums, strict=True) if ratio > 1), None)
    told = Reader(page).table("workers", name)["exchange longer from"]
    assert told == (f"{turns} workers" if turns else "none up to 32")


def test_plans_of_one_number_of_workers_are_bars(page, folder):
    rows = read(folder, "eight")["plans"]
    title = next(title for title in drawn(page) if title.startswith("A step by 8 workers, by plan"))
    parts = traces(drawn(page)[title])
    assert (
        parts["computing"]["customdata"] == [f"{row['plan']} {row['change']}".rstrip() for row in rows][:24]
    )
    assert any(row["change"] for row in rows[:24])
    assert parts["computing"]["type"] == "bar" and parts["exchange, hidden"]["type"] == "scatter"


def test_a_file_of_plans_alone_makes_a_page(folder, tmp_path, capsys):
    output = tmp_path / "page.html"
    words = ["report", str(folder / "nvlink.json"), str(folder / "nvlink.json"), "-o", str(output)]
    assert run_cli(words) == 0 and "1 prediction, " in capsys.readouterr().out
    assert re.findall(r'<section id="([\w-]+)"', output.read_text()) == ["planned"]


def test_an_older_file_without_words_about_the_run_is_shown(folder, tmp_path):
    found = read(folder, "nvlink")
    short = {key: found[key] for key in ("cluster", "plans", "why")}
    (tmp_path / "old.json").write_text(json.dumps(short))
    assert "A step by workers: old on 8xH100" in drawn(page_of(tmp_path / "old.json"))


@pytest.mark.parametrize("nonsense", [None, "x", [], {}, [[1]], 0, -1, True, float("nan")], ids=str)
def test_nonsense_in_plans_is_refused_or_shown(folder, tmp_path, nonsense):
    found, path = read(folder, "few"), tmp_path / "bad.json"
    row = found["plans"][0]
    tables = [{**found, key: nonsense} for key in found]
    tables += [{**found, "plans": [{**row, key: nonsense}]} for key in row]
    for table in tables:
        path.write_text(json.dumps(table))
        try:
            assert page_of(path)
        except BadInput as error:
            assert str(path) in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("text", ["{}", "[1]", "[]", "3", "no JSON", '{"step": 1, "rates": []}'])
def test_a_file_that_is_nothing_is_named_in_a_line(folder, tmp_path, text, capsys):
    (tmp_path / "nothing.json").write_text(text)
    good, bad = str(folder / "nvlink.json"), str(tmp_path / "nothing.json")
    output = tmp_path / "page.html"
    assert run_cli(["report", good, bad, "-o", str(output)]) == 2 and not output.exists()
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and bad in error
    assert run_cli(["report", good, str(tmp_path), "-o", str(output)]) == 0  # in a folder it is left out
    assert capsys.readouterr().err.startswith(f"left out: {bad}: ") and bad in output.read_text()


@pytest.mark.parametrize(("kind", "speedup"), [("strong", 2.0), ("weak", 4.0)])
def test_scaling_is_shown_with_its_prediction(page, kind, speedup):
    lines = traces(drawn(page)[f"Speedup by workers: lenet5, {kind} scaling"])
    last = lines["measured"]["y"][-1]
    assert last == pytest.approx(speedup) and lines["measured"]["x"][-1] == lines["ideal"]["y"][-1]
    assert lines["predicted"]["y"][-1] == pytest.approx(last / 1.1)
    share = traces(drawn(page)[f"Efficiency by workers: lenet5, {kind} scaling"])["measured"]
    assert share["y"][-1] == pytest.approx(100 * speedup / share["x"][-1])
    assert share["error_y"]["array"][0] == pytest.approx(100 / 0.9 - 100)
    assert Reader(page).table("workers", "error")["2"] == "10 %"
    assert ("The weights are the same bits." in page) and "DIFFER" not in page


def record(name, value, unit):
    facts = {"n": 3, "spread": [0.9 * value, 1.1 * value], "hardware": "a machine", "versions": {}}
    return {"name": name, "value": value, "unit": unit, "command": "any", "commit": "none", **facts}


def test_any_list_of_records_is_a_table_and_a_plot(tmp_path):
    files = {
        "mine": [record("one", 3, "apples"), record("two", 4, "apples"), record("pears", 7, "pears")],
        "yours": [record("far", 1e-3, "s"), record("farther", 20.0, "s"), record("pears", 8, "pears")],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    page = page_of(tmp_path)
    found, values = drawn(page), Reader(page).values
    assert list(found) == ["mine: apples", "yours: s", "Single records in pears"]
    assert {repr(row["value"]) for rows in files.values() for row in rows} <= values
    assert found["mine: apples"]["data"][0]["type"] == "bar"
    assert found["yours: s"]["layout"]["xaxis"]["type"] == "log"
    assert found["Single records in pears"]["layout"]["yaxis"]["ticktext"] == ["mine: pears", "yours: pears"]
