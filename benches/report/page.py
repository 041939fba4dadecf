"""A comparison as one HTML page: no script, no external resource, charts as inline SVG.

Text in charts keeps its size at any width: positions are percentages, and only lines and areas are stretched.
"""

import html
import math

from . import markdown, model
from .model import number

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --dim: #57606a; --line: #d0d7de; --soft: #f3f5f7;
  --c0: #0b62c4; --c1: #b34700; --c2: #1a7f37; --c3: #8250df; --c4: #9a6700; --c5: #bf3989;
  --bad: #b3261e; --good: #1a7f37 }
@media (prefers-color-scheme: dark) { :root { --back: #0f1419; --text: #e6edf3; --dim: #9aa5b1; --line: #333c47;
  --soft: #171d24; --c0: #6cb0ff; --c1: #ff9d5c; --c2: #56d364; --c3: #c297ff; --c4: #e3b341; --c5: #ff80c8;
  --bad: #ff7b72; --good: #56d364 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--back); color: var(--text); font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif }
main { max-width: 1100px; margin: 0 auto; padding: 16px }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0 }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .25rem; border-top: 1px solid var(--line); padding-top: 1rem }
p { margin: .4rem 0; max-width: 46rem }
.dim, figcaption, .unit { color: var(--dim); font-size: .875rem }
.note { border-left: 4px solid var(--bad); background: var(--soft); padding: .5rem .75rem; margin: .6rem 0 }
nav { margin: 1rem 0; line-height: 1.8; font-size: .9rem } nav a { margin-right: .7rem }
a { color: var(--c0) }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr));
  gap: 12px; margin: .8rem 0 }
figure { margin: 0; background: var(--soft); border-radius: 6px; padding: 10px 12px; min-width: 0 }
figcaption { margin-bottom: 4px } figcaption b { color: var(--text) }
svg { display: block; width: 100%; overflow: visible }
svg.mark { width: 1px; height: 1px }
line.range { stroke: var(--text); stroke-width: 1.5 }
svg text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: var(--text) }
svg text.dim { fill: var(--dim); font-size: 12px }
.wide { max-width: 760px; margin: .8rem 0 }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 6px 0 0; padding: 0;
  font-size: .85rem }
ul.legend svg { display: inline-block; width: 34px; vertical-align: middle; margin-right: 4px }
.scroll { overflow-x: auto; margin: .6rem 0; border: 1px solid var(--line); border-radius: 6px }
table { border-collapse: collapse; font-size: .85rem; width: 100% }
th, td { text-align: left; padding: 5px 9px; border-bottom: 1px solid var(--line); vertical-align: top;
  white-space: nowrap }
th { background: var(--soft) } tr:last-child td { border-bottom: 0 }
td.wrap { white-space: normal; min-width: 9rem } td.state { white-space: normal; min-width: 26rem }
code { font-size: .8rem; font-family: ui-monospace, "DejaVu Sans Mono", monospace }
.missed, .worse { color: var(--bad); font-weight: 600 } .met, .better { color: var(--good) }
"""

SHAPES = ["circle", "square", "triangle", "diamond"]
DASHES = ["", "7 4", "2 4", "10 3 2 3", "4 2", "12 4"]
e = html.escape


def colour(index):
    return f"var(--c{index % 6})"


def mark(index, x, y):
    """Returns a marker at a position in per cent or pixels, told apart by shape as well as by colour."""
    shape, fill = SHAPES[index % 4], colour(index)
    inner = {
        "circle": '<circle r="4"/>',
        "square": '<rect x="-3.5" y="-3.5" width="7" height="7"/>',
        "triangle": '<path d="M0-5L5 4H-5Z"/>',
        "diamond": '<path d="M0-5L5 0L0 5L-5 0Z"/>',
    }[shape]
    return f'<svg class="mark" x="{x}" y="{y}" width="1" height="1" fill="{fill}">{inner}</svg>'


def bars(row):
    """Returns a bar for the median of each series, with a line from the lowest to the highest sample."""
    shown = [one for one in row["series"] if not one["skipped"]]
    if not shown:
        return ""
    top = max(one["high"] for one in shown) * 1.02 or 1
    parts, y = [], 0
    for one in shown:
        share, low, high = (100 * one[key] / top for key in ("median", "low", "high"))
        fill = "var(--c0)" if one["role"] == "ours" else "var(--dim)"
        warning = " !" if one["disturbed"] else ""
        parts.append(
            f'<text x="0" y="{y + 14}">{e(one["name"])}</text>'
            f'<text x="100%" y="{y + 14}" text-anchor="end">{number(one["median"])}{warning}</text>'
            f'<rect x="0" y="{y + 20}" width="{share:.2f}%" height="12" rx="2" fill="{fill}" opacity=".85"/>'
            f'<line x1="{low:.2f}%" x2="{high:.2f}%" y1="{y + 26}" y2="{y + 26}" class="range"/>'
            + "".join(
                f'<line x1="{at:.2f}%" x2="{at:.2f}%" y1="{y + 21}" y2="{y + 31}" class="range"/>'
                for at in (low, high)
            )
        )
        y += 42
    label = "; ".join(f"{one['name']} {number(one['median'])}" for one in shown)
    return (
        f"<figure><figcaption><b>{e(row['title'])}</b><br>{e(row['unit'])}, {row['better']} is better</figcaption>"
        f'<svg height="{y}" style="height:{y}px" role="img" aria-label="{e(label)}">{"".join(parts)}</svg></figure>'
    )


class Axis:
    """A linear or logarithmic axis with its labels."""

    def __init__(self, low, high, log, label, text=number, ticks=None):
        self.log, self.label, self.text = log, label, text
        if log:
            low, high = max(low, 1e-12), max(high, low * 1.01, 1e-12)
        elif high <= low:
            high = low + 1
        self.low, self.high = low, high
        self.ticks = ticks if ticks is not None else self.own_ticks()
        if ticks is None and log:
            self.low, self.high = min(self.low, self.ticks[0]), max(self.high, self.ticks[-1])

    def own_ticks(self):
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            step = max(1, math.ceil((last - first) / 6))
            return [10.0**power for power in range(first, last + 1, step)]
        step = 10 ** math.floor(math.log10((self.high - self.low) / 4))
        step *= next(factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (step * factor) <= 5)
        # The highest line is above all values.
        count = math.ceil((self.high - self.low) / step - 1e-9)
        self.high = self.low + count * step
        return [self.low + step * n for n in range(count + 1)]

    def at(self, value):
        """Returns the place of a value between 0 and 1."""
        if self.log:
            return (math.log10(max(value, self.low)) - math.log10(self.low)) / (
                math.log10(self.high) - math.log10(self.low) or 1
            )
        return (value - self.low) / (self.high - self.low)


LEFT, RIGHT, TOP, BOTTOM, HEIGHT = 13.0, 97.0, 10, 210, 252


def lines(title, about, x, y, curves):
    """Returns a chart of curves: (name, [(x, y, low, high)]). Curves differ by colour, dashes and markers."""
    place_x = lambda value: LEFT + (RIGHT - LEFT) * x.at(value)
    place_y = lambda value: BOTTOM - (BOTTOM - TOP) * y.at(value)
    parts = []
    for tick in y.ticks:
        at = place_y(tick)
        parts.append(
            f'<line x1="{LEFT}%" x2="{RIGHT}%" y1="{at:.1f}" y2="{at:.1f}" stroke="var(--line)"/>'
            f'<text class="dim" x="{LEFT - 1.5}%" y="{at + 4:.1f}" text-anchor="end">{e(y.text(tick))}</text>'
        )
    for tick in x.ticks:
        at = place_x(tick)
        parts.append(
            f'<line x1="{at:.2f}%" x2="{at:.2f}%" y1="{BOTTOM}" y2="{BOTTOM + 5}" stroke="var(--dim)"/>'
            f'<text class="dim" x="{at:.2f}%" y="{BOTTOM + 19}" text-anchor="middle">{e(x.text(tick))}</text>'
        )
    parts.append(
        f'<text class="dim" x="{(LEFT + RIGHT) / 2}%" y="{HEIGHT - 4}" text-anchor="middle">{e(x.label)}</text>'
    )
    legend = []
    for index, (name, points) in enumerate(curves):
        stroke = f'stroke="{colour(index)}" stroke-width="2" stroke-dasharray="{DASHES[index % 6]}"'
        for (x1, y1, *_), (x2, y2, *_) in zip(points, points[1:]):
            parts.append(
                f'<line x1="{place_x(x1):.2f}%" y1="{place_y(y1):.1f}" x2="{place_x(x2):.2f}%" '
                f'y2="{place_y(y2):.1f}" {stroke}/>'
            )
        for at_x, at_y, low, high in points:
            at = f"{place_x(at_x):.2f}%"
            parts.append(
                f'<line x1="{at}" x2="{at}" y1="{place_y(low):.1f}" y2="{place_y(high):.1f}" '
                f'stroke="{colour(index)}" opacity=".6"/>{mark(index, at, f"{place_y(at_y):.1f}")}'
            )
        legend.append(
            f'<li><svg height="14" style="height:14px"><line x1="0" x2="34" y1="7" y2="7" {stroke}/>'
            f"{mark(index, 17, 7)}</svg>{e(name)}</li>"
        )
    return (
        f'<figure class="wide"><figcaption><b>{e(title)}</b><br>{e(about)}</figcaption>'
        f'<span class="unit">{e(y.label)}</span><svg height="{HEIGHT}" style="height:{HEIGHT}px" role="img" '
        f'aria-label="{e(title)}">{"".join(parts)}</svg><ul class="legend">{"".join(legend)}</ul></figure>'
    )


def short(value):
    if value >= 1e6:
        return f"{value / 1e6:g} M"
    return f"{value / 1e3:g} k" if value >= 1e3 else f"{value:g}"


def cost_chart(rows, title):
    """Returns the chart of cost against flows of rows that have a number of flows."""
    curves, peers = {}, {}
    for row in rows:
        if row.get("x") is None:
            continue
        for one in row["series"]:
            if not one["skipped"]:
                point = (row["x"], one["median"], one["low"], one["high"])
                (curves if one["role"] == "ours" else peers).setdefault(f"{one['name']}{row['line']}", []).append(
                    point
                )
    shown = [(name, sorted(points)) for name, points in [*curves.items(), *peers.items()]]
    xs = sorted({point[0] for _, points in shown for point in points})
    if len(xs) < 2:
        return ""
    high = max(point[3] for _, points in shown for point in points)
    return lines(
        f"{title}: cost against flows",
        "Cycles per packet, lower is better. Vertical lines are ranges.",
        Axis(xs[0], xs[-1], True, "flows", short, xs),
        Axis(0, high, False, "cycles per packet"),
        shown,
    )


def loss_chart(load):
    curves, lost = [], []
    for one in load["series"]:
        points = [
            (p["load"], 100 * p["loss"]["median"], 100 * p["loss"]["low"], 100 * p["loss"]["high"])
            for p in one.get("points") or []
            if not p["limited"]
        ]
        curves.append((one["name"], points))
        lost += [point[3] for point in points]
    xs = sorted({point[0] for _, points in curves for point in points})
    if not xs:
        return "<p>No load was offered in full, so there is no chart.</p>"
    y = Axis(0, max(max(lost), 0.1), False, "lost packets, %", lambda value: f"{value:g}"[:6])
    return lines(
        "Loss against load",
        "Less is better. Loads that the generator did not reach are left out.",
        Axis(xs[0], max(xs[-1], xs[0] * 2), True, "offered packets per second", short, xs),
        y,
        [curve for curve in curves if curve[1]],
    )


TAILS = {"p50": 50, "p90": 90, "p99": 99, "p99.9": 99.9, "p99.99": 99.99}


def delay_chart(load):
    """Returns delays by percentile at the highest load that every program carried with less than 0.1 % of loss."""
    measured = [one for one in load["series"] if one.get("points")]
    loads = [p["load"] for p in measured[0]["points"]] if measured else []
    fit = lambda p: not p["limited"] and p["loss"]["median"] < 1e-3
    common = [at for at in loads if all(any(p["load"] == at and fit(p) for p in one["points"]) for one in measured)]
    if not common:
        return "<p>No load passed every program with less than 0.1 % of loss, so there is no chart of delays.</p>"
    curves, values = [], []
    for one in measured:
        point = next(p for p in one["points"] if p["load"] == common[-1])
        points = [
            (1 / (1 - TAILS[key] / 100), d["median"], d["low"], d["high"])
            for key, d in point["delay_us"].items()
            if key in TAILS
        ]
        curves.append((one["name"], points))
        values += [v for point in points for v in point[2:]]
    ticks = [1 / (1 - tail / 100) for tail in TAILS.values()]
    names = dict(zip(ticks, (f"{tail:g}" for tail in TAILS.values())))
    return lines(
        f"Delay at {short(common[-1])} packets/s",
        "Lower is better. Both axes are logarithmic.",
        Axis(ticks[0], ticks[-1], True, "percentile", names.get, ticks),
        Axis(min(values), max(values), True, "delay, µs", short),
        curves,
    )


def table(head, rows):
    """Returns a table that scrolls inside itself. Cells with code or sentences are kept apart from figures."""
    body = []
    for row in rows:
        cells = []
        for name, cell in zip(head, row):
            text = e(str(cell))
            if text.startswith("`"):
                text = f"<code>{text.strip('`')}</code>"
            kind = {"State": "state", "Work": "wrap"}.get(name, "")
            for word in ("missed", "met", "worse", "better"):
                if name in ("Bar", "Verdict") and str(cell).endswith(word):
                    kind = word
            cells.append(f'<td class="{kind}">{text}</td>' if kind else f"<td>{text}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{"".join(f"<th>{e(name)}</th>" for name in head)}</tr>'
        f"</thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def section(document, group, title, about):
    rows = markdown.rows_of(document, group)
    if not rows:
        return ""
    unit = ", ".join(dict.fromkeys(f"{row['unit']}, {row['better']} is better" for row in rows))
    parts = [
        f'<h2 id="{group}">{e(title)}</h2><p>{e(about)}</p><p class="dim">{e(unit)}. Bars are medians, lines the '
        "ranges. “!” marks a disturbed figure.</p>"
    ]
    parts.append(cost_chart(rows, title))
    parts.append(f'<div class="charts">{"".join(bars(row) for row in rows)}</div>')
    parts.append(
        table(
            markdown.HEAD,
            [
                [row["title"], one["name"], *markdown.series_cells(row, one), f"`{one['command']}`"]
                for row in rows
                for one in row["series"]
            ],
        )
    )
    return "".join(parts)


def load_section(load):
    return (
        f'<h2 id="{load["id"]}">{e(load["title"])}</h2><p>{e(load["about"])} Less loss and delay is better.</p>'
        + loss_chart(load)
        + delay_chart(load)
        + table(markdown.LOAD_HEAD, markdown.load_rows(load))
    )


def render(document):
    links, parts = [], []
    for group, (title, about) in model.GROUPS.items():
        if part := section(document, group, title, about):
            links.append((group, title))
            parts.append(part)
        if group == "systems":
            for load in document["loads"]:
                links.append((load["id"], load["title"]))
                parts.append(load_section(load))
    if against := document.get("against"):
        links.append(("against", "Against an earlier version"))
        parts.append(
            f'<h2 id="against">Against {e(against["revision"])}</h2><p>Measured {e(against["started"])}. A verdict '
            "needs ranges that do not overlap, and medians that differ by more than 3 %.</p>"
        )
        if not against["same_machine"]:
            parts.append('<p class="note">The machines differ, so only a ratio of ratios would count.</p>')
        parts.append(table(markdown.DIFFERENCE_HEAD, markdown.difference_rows(against)))
    links.append(("machine", "Machine and versions"))
    machine = "".join(f"<li>{e(line[2:])}</li>" for line in markdown.machine_lines(document))
    notes = "".join(f'<p class="note">{e(note)}</p>' for note in markdown.notes(document))
    menu = " ".join(f'<a href="#{anchor}">{e(title)}</a>' for anchor, title in links)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Wirepath beside its peers</title>'
        f"<style>{STYLE}</style></head><body><main><h1>Wirepath beside its peers</h1>"
        f'<p class="dim">Measured {e(document["started"])} by <code>scripts/compare</code>. Programs ran in turn. Only '
        "ratios count: a figure of one machine at one time proves nothing. Each line ends with the command that "
        f"measures it again.</p>{notes}<nav>{menu}</nav>{''.join(parts)}"
        f'<h2 id="machine">Machine and versions</h2><ul>{machine}</ul></main></body></html>\n'
    )
