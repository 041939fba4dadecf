"""Checks of parser and verdicts, without a measurement.

recorded/few.callgrind and recorded/many.callgrind are the worker's files of `wirepath-bench forward --mode macswap`,
and recorded/packets.json has the numbers of their packets.
"""

import copy
import json
import os
import re
import shutil
import subprocess
import time

from . import callgrind, model

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "recorded")
COMPILER = "rustc 1.0"


def recorded(name):
    with open(os.path.join(FOLDER, f"{name}.callgrind")) as file:
        return file.read()


def packets():
    with open(os.path.join(FOLDER, "packets.json")) as file:
        return json.load(file)


def of(few, many):
    counts = packets()
    return model.figures((callgrind.parse(few), counts["few"]), (callgrind.parse(many), counts["many"]))


def document(path):
    return model.updated({"path": copy.deepcopy(path)}, None, COMPILER)


def verdict(path, stored, compiler=COMPILER):
    return model.compare({"path": path}, stored, compiler)


def totals():
    """Callgrind writes the sum of all costs itself."""
    for name in ("few", "many"):
        text = recorded(name)
        assert callgrind.parse(text).total() == int(re.search(r"^totals: (\d+)", text, re.M)[1])


def annotated():
    """The program of valgrind finds the same instructions for the functions with the most."""
    program = shutil.which("callgrind_annotate")
    if not program:
        print("skipped: the comparison with callgrind_annotate, which is not installed")
        return
    profile = callgrind.parse(recorded("many"))
    # It has a row for each file of which code is inlined. Rows of own costs add up; the first one with callees has all.
    for flag, ours, joined in (("no", lambda name: profile.own[name], sum), ("yes", profile.inclusive, max)):
        command = [program, f"--inclusive={flag}", "--threshold=100", os.path.join(FOLDER, "many.callgrind")]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = {}
        for cost, name in re.findall(r"^ *([\d,]+) \([ \d.]+%\) +\S*?:(.*?)(?: \[[^\]]*\])?$", text, re.M):
            found.setdefault(callgrind.readable(name), []).append(int(cost.replace(",", "")))
        found = {name: joined(costs) for name, costs in found.items()}
        most = sorted(found, key=lambda name: -found[name])[:12]
        assert len(most) == 12, text[:2000]
        for name in most:
            assert ours(name) == found[name], (flag, name, ours(name), found[name])


def kept(path):
    assert path["instructions"] > 10 and len(path["functions"]) >= 3, path
    inclusive = max(costs[0] for costs in path["functions"].values())
    assert inclusive <= path["instructions"] + 0.1, "no function has more than the path"
    assert verdict(path, document(path)) == ([], [])
    assert json.loads(model.text(document(path))) == document(path)


def lowered(path):
    """A lower budget of the path, or of one function, is a failure that names it."""
    stored = document(path)
    stored["paths"]["path"]["instructions"] = path["instructions"] * 0.9 - 1
    [failure], _ = verdict(path, stored)
    assert failure.startswith(f"path: {path['instructions']:.1f} instructions per packet, budget "), failure
    for name, (inclusive, own) in path["functions"].items():
        stored = document(path)
        stored["paths"]["path"]["functions"][name] = [inclusive * 0.9 - 1, own * 0.9 - 1]
        [failure], _ = verdict(path, stored)
        assert f"\n    {name}: " in failure, failure
    stored["paths"] = {}
    assert verdict(path, stored) == (["path: there is no budget"], [])


def raised(path):
    """A budget far above the figures should be lower, and is no failure."""
    stored = document(path)
    stored["paths"]["path"]["instructions"] = path["instructions"] * 1.2 + 1
    failures, [note] = verdict(path, stored)
    assert not failures and note.endswith("lower the budget"), note
    stored = document(path)
    name, costs = max(path["functions"].items(), key=lambda item: item[1][0])
    stored["paths"]["path"]["functions"][name] = [costs[0] * 1.2 + 1, costs[1]]
    failures, [note] = verdict(path, stored)
    assert not failures and f" {name}: only " in note, note
    stored["paths"]["path"]["functions"] |= {"gone": [5, 5]}
    assert any("gone is no function" in note for note in verdict(path, stored)[1])


def slowed(path):
    """A function that needs more instructions itself is the one that is named, although its callers need more too."""
    name = max(path["functions"], key=lambda name: path["functions"][name][1])
    own = path["functions"][name][1]
    counts = packets()

    def more(text, number):
        profile = callgrind.parse(text)
        profile.own[name] += round(number * own / 2)
        for calls in profile.calls.values():
            if name in calls:
                calls[name] += round(number * own / 2)
        return profile, number

    slower = model.figures(more(recorded("few"), counts["few"]), more(recorded("many"), counts["many"]))
    [failure], _ = verdict(slower, document(path))
    [first, *_] = re.findall(r"\n    (.*): [\d.]+ itself instead of [\d.]+", failure)
    assert first == name, failure
    assert model.compare({"path": slower}, document(path), COMPILER, {"path": 0.9}) == ([], [])
    failures, notes = verdict(slower, document(path), "rustc 2.0")
    assert "10% are allowed" in notes[0] and len(failures) == (own / 2 > 0.1 * path["instructions"] + model.SLACK)


def malformed():
    good = recorded("few")
    others = ("", "hello\n", "events: Ir\n0 5\n", "events: Ir\nfn=(3)\n")
    for text in (*others, good.replace("events: Ir", "events: Ir Dr")):
        try:
            callgrind.parse(text)
        except callgrind.Malformed:
            continue
        raise AssertionError(text[:80])
    profile = callgrind.parse("events: Ir\nfn=(1) a::h0123456789abcdef\n0 3\ncfn=(2) b'2\ncalls=1 0\n* 40\n+3 4\n")
    assert (profile.own["a"], profile.inclusive("a"), profile.inclusive("b")) == (7, 47, 0)
    assert profile.reached(["a"]) == {"a", "b"} and profile.reached(["b"]) == {"b"}
    only = model.figures((callgrind.Profile(), 0), (profile, 10), "b".__eq__)
    assert only == {"instructions": 0.0, "functions": {}}, only
    # A function that calls itself counts once.
    profile = callgrind.parse("events: Ir\nfn=(1) a\n0 3\ncfn=(1)\ncalls=1 0\n0 2\n")
    assert profile.inclusive("a") == 3
    try:
        model.figures((profile, 5), (profile, 5))
    except ValueError:
        return
    raise AssertionError("no additional packets")


def stored(paths, budgets):
    """Every path has a budget, and every budget a path, in the form that --update writes."""
    assert set(budgets["paths"]) == set(paths), set(budgets["paths"]) ^ set(paths)
    assert model.compare(budgets["paths"], budgets, budgets["compiler"]) == ([], [])


def run(paths, budgets):
    started = time.monotonic()
    stored(paths, budgets)
    path = of(recorded("few"), recorded("many"))
    totals()
    annotated()
    for check in (kept, lowered, raised, slowed):
        check(path)
    malformed()
    print(f"scripts/instructions: the self-test passed ({time.monotonic() - started:.1f} s)")
    return 0
