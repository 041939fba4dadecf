"""A comparison as Markdown."""

from . import model
from .model import number, percent


def cell(text):
    return str(text).replace("|", "\\|").replace("\n", " ")


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(cell(one) for one in row) + " |" for row in rows] + [""]


def ratio_text(row, one):
    texts = []
    for ratio in model.ratio_of(row, one["name"]):
        texts.append(f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})")
    return ", ".join(texts) or "–"


def bar_text(row, one):
    bars = [ratio for ratio in model.ratio_of(row, one["name"]) if "bar" in ratio]
    bars += [limit for limit in row["limits"] if limit["of"] == one["name"]]
    # A disturbed figure neither meets nor misses a bar for sure.
    words = [("met" if bar["met"] else "missed") + (", disturbed" if bar["disturbed"] else "") for bar in bars]
    return "; ".join(f"{bar['bar']:g}, {word}" for bar, word in zip(bars, words)) or "–"


def state_text(one):
    return "; ".join(entry["cause"] for entry in one.get("disturbed") or []) or "quiet"


def series_cells(row, one):
    if one["skipped"]:
        return ["–", "–", "–", "–", f"skipped: {one['skipped']}"]
    return [
        number(one["median"]),
        f"{number(one['low'])} to {number(one['high'])}",
        ratio_text(row, one),
        bar_text(row, one),
        state_text(one),
    ]


HEAD = ["Work", "Program", "Median", "Range", "wirepath / peer", "Bar", "State", "Command"]


def rows_of(document, group):
    return [row for row in document["rows"] if row["group"] == group]


def machine_lines(document):
    machine = document["machine"]
    lines = [f"- {key.replace('_', ' ')}: {value}" for key, value in machine.items() if key != "tsc_hz_rounded"]
    lines += [f"- {name}: {version}" for name, version in document["programs"].items()]
    options = document["options"]
    lines.append(
        f"- {options['rounds']} rounds in turn of {options['seconds']:g} s each, core {options['core']}, after a "
        "warm-up of 0.3 s (wirepath-bench) or at least 2 s (whole programs)"
    )
    return lines


def notes(document):
    """Sentences about the whole run: disturbances, and a run that did not end."""
    lines = []
    if not document["complete"]:
        lines.append("The run was interrupted. Rows that are missing were not measured.")
    for cause, remedy, count in model.disturbed(document):
        lines.append(f"Disturbed, {count} series, for example: {cause}. Remedy: {remedy}.")
    return lines


def difference_rows(against):
    for row in against["rows"]:
        figures = [number(row["old"]), number(row["new"]), f"{row['ratio']:.2f}"] if "ratio" in row else ["–"] * 3
        yield [row["title"], row["name"], row["unit"], *figures, row["verdict"], f"`{row['command']}`"]


DIFFERENCE_HEAD = ["Work", "Program", "Unit", "Before", "Now", "Now / before", "Verdict", "Command"]


def load_rows(load):
    for one in load["series"]:
        if one["skipped"]:
            yield [one["name"], *["–"] * 6, f"skipped: {one['skipped']}", f"`{one['command']}`"]
        for point in one.get("points") or []:
            delay = [
                number(point["delay_us"][key]["median"]) if key in point["delay_us"] else "–"
                for key in ("p50", "p99", "p99.9", "p99.99")
            ]
            loss = point["loss"]
            spread = f"{percent(loss['median'])} ({percent(loss['low'])} to {percent(loss['high'])})"
            state = "the generator was the limit" if point["limited"] else state_text(one)
            yield [one["name"], f"{point['load']:,}".replace(",", " "), spread, *delay, state, f"`{one['command']}`"]


LOAD_HEAD = [
    "Program",
    "Load, packets/s",
    "Lost",
    "p50, µs",
    "p99, µs",
    "p99.9, µs",
    "p99.99, µs",
    "State",
    "Command",
]


def render(document):
    lines = ["# Wirepath beside its peers", "", f"Measured {document['started']} by `scripts/compare`.", ""]
    for note in notes(document):
        lines += [f"**{note}**", ""]
    for group, (title, about) in model.GROUPS.items():
        rows = rows_of(document, group)
        if rows:
            unit = ", ".join(dict.fromkeys(f"{row['unit']}, {row['better']} is better" for row in rows))
            lines += [f"## {title}", "", f"{about} Unit: {unit}.", ""]
            lines += table(
                HEAD,
                [
                    [row["title"], one["name"], *series_cells(row, one), f"`{one['command']}`"]
                    for row in rows
                    for one in row["series"]
                ],
            )
        if group == "systems":
            for load in document["loads"]:
                lines += [f"## {load['title']}", "", f"{load['about']} Less loss and delay is better.", ""]
                lines += table(LOAD_HEAD, load_rows(load))
    if against := document.get("against"):
        lines += [f"## Against {against['revision']}, measured {against['started']}", ""]
        if not against["same_machine"]:
            lines += ["The machines differ, so only a ratio of ratios would count.", ""]
        lines += table(DIFFERENCE_HEAD, difference_rows(against))
    lines += ["## Machine and versions", "", *machine_lines(document), ""]
    return "\n".join(lines)
