"""Checks of the comparison itself, without a measurement; recorded.json is from a real run on a busy machine."""

import copy
import html.parser
import json
import math
import os
import sys

from . import markdown, model, page, plan

RECORDED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "recorded.json")
# Elements of HTML without an end tag.
VOID = {"meta", "br", "link", "img"}


class Nesting(html.parser.HTMLParser):
    """Checks that every element ends where it must, and collects attributes and text."""

    def __init__(self):
        super().__init__()
        self.open, self.wrong, self.attributes, self.text, self.tags = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        self.text.append(data)


def samples(*values, **more):
    return [{"value": value, "cpu_share": 1.0, "others": 0.0, "steal": 0.0} | more for value in values]


def row(ours, theirs, better="lower", bars=None, limit=None, **more):
    """Returns a row of two series."""
    made = {"id": "r", "group": "encap", "title": "t", "unit": "u", "better": better, "x": None, "line": ""}
    made["series"] = [
        model.series("wirepath", "ours", "ours", samples(*ours, **more)),
        model.series("peer", "peer", "theirs", samples(*theirs), "missing: peer"),
    ]
    made["ratios"], made["limits"] = model.ratios(made, bars or {}), model.limits(made, limit)
    return made


def statistics():
    one = model.summary([3.0, 1.0, 2.0])
    assert (one["median"], one["low"], one["high"], one["spread"]) == (2.0, 1.0, 3.0, 1.0), one
    assert model.summary([1.0, 2.0])["median"] == 1.5
    [ratio] = row([10, 12, 11], [20, 20, 22], bars={"peer": 0.5})["ratios"]
    # The range has the ratios of each round: 10 / 20, 12 / 20 and 11 / 22.
    assert (ratio["median"], ratio["low"], ratio["high"], ratio["met"]) == (11 / 20, 0.5, 0.6, False), ratio
    assert row([9], [20], bars={"peer": 0.5})["ratios"][0]["met"]
    assert row([22], [20], "higher", {"peer": 1.1})["ratios"][0]["met"]
    assert not row([21], [20], "higher", {"peer": 1.1})["ratios"][0]["met"]
    assert not row([401], [], limit=400)["limits"][0]["met"] and row([400], [], limit=400)["limits"][0]["met"]
    assert row([1], [])["ratios"] == [] and row([1], [])["series"][1]["skipped"] == "missing: peer"


def disturbances():
    assert row([1, 2], [1])["series"][0]["disturbed"] == []
    for more, word in (({"cpu_share": 0.9}, "90 %"), ({"others": 1.2}, "1.2 processors"), ({"steal": 0.05}, "5 %")):
        [found] = row([1, 2], [1], **more)["series"][0]["disturbed"]
        assert word in found["cause"] and found["remedy"], found


def texts():
    known = {0.1234: "0.12", 12.345: "12.3", 123.4: "123", 12345: "12 345", 2.5e6: "2.50 M"}
    assert {value: model.number(value) for value in known} == known
    assert [model.percent(share) for share in (0, 1e-7, 0.0123)] == ["0 %", "< 0.001 %", "1.23 %"]


def axes():
    log = page.Axis(2, 2000, True, "")
    assert log.ticks == [1, 10, 100, 1000, 10000] and math.isclose(log.at(100), 0.5)
    linear = page.Axis(0, 95, False, "")
    assert linear.ticks == [0, 20, 40, 60, 80, 100] and linear.at(95) == 0.95
    assert page.Axis(0, 0, False, "").at(0) == 0 and page.Axis(5, 5, True, "").at(5) >= 0


def scaled(document, factor):
    """Returns a version of ours whose packets cost `factor` times as much, undisturbed."""
    version = copy.deepcopy(document)
    for one_row in version["rows"]:
        for one in one_row["series"]:
            if one["role"] == "ours" and not one["skipped"]:
                by = factor if one_row["better"] == "lower" else 1 / factor
                for key in ("median", "low", "high"):
                    one[key] *= by
                one["samples"] = [value * by for value in one["samples"]]
            one["disturbed"] = []
    return version


def against(document):
    before = scaled(document, 1)
    for factor, verdict in ((1000, "worse"), (1 / 1000, "better"), (1.001, "same")):
        part = model.compare(before, scaled(document, factor))
        verdicts = {entry["verdict"] for entry in part["rows"]} - {"missing"}
        assert verdicts == {verdict}, (factor, verdicts)
        assert part["same_machine"]
    slow = scaled(document, 1000)
    for one_row in slow["rows"]:
        for one in one_row["series"]:
            one["disturbed"] = [{"cause": "c", "remedy": "r"}]
    assert {entry["verdict"] for entry in model.compare(before, slow)["rows"]} <= {"disturbed", "missing"}
    fewer = dict(before, rows=before["rows"][1:])
    assert "missing" in {entry["verdict"] for entry in model.compare(before, fewer)["rows"]}
    other = dict(before, machine=dict(before["machine"], processor="another"))
    assert not model.compare(other, before)["same_machine"]


def forms(document):
    document = dict(document, against=model.compare(scaled(document, 1 / 1000), scaled(document, 1)))
    assert json.loads(json.dumps(document)) == document
    text, web = markdown.render(document), page.render(document)
    nesting = Nesting()
    nesting.feed(web)
    assert not nesting.wrong and not nesting.open, (nesting.wrong, nesting.open)
    assert "script" not in nesting.tags and "img" not in nesting.tags and "link" not in nesting.tags
    # Every reference stays in the page.
    references = [value for _, name, value in nesting.attributes if name in ("src", "href", "xlink:href")]
    assert references and all(reference.startswith("#") for reference in references), references
    anchors = {value for _, name, value in nesting.attributes if name == "id"}
    assert {reference[1:] for reference in references} <= anchors
    assert "url(" not in web
    for tag, name, value in nesting.attributes:
        if name in ("x", "y", "x1", "x2", "y1", "y2", "width", "height") and tag != "meta":
            assert math.isfinite(float(value.rstrip("%"))), (tag, name, value)
    shown = "".join(nesting.text)
    for one_row in document["rows"]:
        for one in one_row["series"]:
            known = one["skipped"] or model.number(one["median"])
            for form in (text, shown):
                assert one["name"] in form and one["command"] in form and str(known) in form, (
                    one_row["id"],
                    one["name"],
                )
    for load in document["loads"]:
        for one in load["series"]:
            for point in one.get("points") or []:
                assert model.percent(point["loss"]["median"]) in text and point["load"] > 0
    columns = [line.replace("\\|", "").count("|") for line in text.split("\n") if line.startswith("|")]
    assert set(columns) == {len(markdown.HEAD) + 1, len(markdown.LOAD_HEAD) + 1, len(markdown.DIFFERENCE_HEAD) + 1}
    # Text of others is no markup.
    hostile = copy.deepcopy(document)
    hostile["rows"][0]["series"][0]["name"] = "<b onclick=x>|"
    assert "<b onclick" not in page.render(hostile) and "&lt;b onclick" in page.render(hostile)
    assert "<b onclick=x>\\|" in markdown.render(hostile)
    unfinished = dict(document, complete=False)
    assert "interrupted" in page.render(unfinished) and "interrupted" in markdown.render(unfinished)


def programs():
    """Runs stand-ins of programs through the code that measures."""
    good = plan.Program([sys.executable, "-c", "print(42)"], lambda text: {"figure": float(text)}, 1)
    assert [sample["value"] for sample in good.run()["figure"]] == [42.0]
    for code, word in (
        ("import sys; sys.exit('no huge pages')", "no huge pages"),
        ("print('?')", "no figure"),
        ("print(0)", "no figure"),
    ):
        bad = plan.Program([sys.executable, "-c", code], lambda text: {"figure": float(text)}, 1)
        try:
            bad.run()
        except plan.Failed as error:
            assert word in str(error), error
        else:
            raise AssertionError(code)
    absent = plan.Program(["/does/not/exist"], None, 1)
    try:
        absent.run()
    except plan.Failed as error:
        assert "missing" in str(error), error
    else:
        raise AssertionError("a missing program gave a figure")


def run():
    document = model.load(RECORDED)
    checks = [statistics, disturbances, texts, axes, programs, lambda: against(document), lambda: forms(document)]
    for check in checks:
        check()
    print(f"scripts/compare: {len(checks)} checks passed")
    return 0
