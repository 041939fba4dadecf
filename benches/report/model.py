"""The document of a comparison: statistics of samples, ratios, bars, disturbances, and two versions side by side.

Document: machine, programs (name to version), options, started, seconds, complete, rows, loads, and against.
Row: id, group, title, unit, better (lower or higher), series, ratios, limits; x for charts of cost against flows.
Series: name, role (ours, peer, floor, reference), command, samples, median, low, high, spread, cpu_share, others,
steal, disturbed (list of cause and remedy), skipped (why, or none).
Load: id, title, series with points; a point has load, sent_pps, limited, loss and delay_us, each with its spread.
"""

import json
import statistics

FORMAT = 1
# A program that had its core for less shows too many cycles; wirepath-bench uses the same threshold.
CPU_SHARE = 0.97
# Processors' worth of other programs, and share of the time that the hypervisor gave to other guests.
OTHERS, STEAL = 0.15, 0.01
# Two versions differ if their ranges are apart and their medians by more than this.
CHANGE = 0.03


def summary(samples):
    """Returns median, lowest, highest and relative spread of samples."""
    median = statistics.median(samples)
    low, high = min(samples), max(samples)
    return {
        "samples": samples,
        "median": median,
        "low": low,
        "high": high,
        "spread": (high - low) / median if median else 0.0,
    }


def disturbances(cpu_share, others, steal):
    """Returns causes and remedies; a figure that is unknown is None."""
    found = []
    if cpu_share is not None and cpu_share < CPU_SHARE:
        found.append(
            {
                "cause": f"the program had its core for {100 * cpu_share:.0f} % of the time",
                "remedy": "keep other programs away from that core: --core, isolcpus",
            }
        )
    if others is not None and others > OTHERS:
        found.append(
            {
                "cause": f"other programs used {others:.1f} processors",
                "remedy": "end builds and other measurements on this machine",
            }
        )
    if steal is not None and steal > STEAL:
        found.append(
            {
                "cause": f"the hypervisor took {100 * steal:.0f} % of the time",
                "remedy": "use a machine with processors of its own, or a quieter hour",
            }
        )
    return found


def series(name, role, command, samples, skipped=None):
    """Returns a series of samples, which are dicts of value, cpu_share, others and steal."""
    known = {
        "name": name,
        "role": role,
        "command": command,
        "skipped": None if samples else skipped or "not measured",
    }
    if not samples:
        return known
    known |= summary([sample["value"] for sample in samples])
    for key, worst in (("cpu_share", min), ("others", max), ("steal", max)):
        values = [sample[key] for sample in samples if sample.get(key) is not None]
        known[key] = worst(values) if values else None
    known["disturbed"] = disturbances(known["cpu_share"], known["others"], known["steal"])
    # A program may know causes of its own; the first one is enough.
    known["disturbed"] += [cause for sample in samples for cause in sample.get("causes", [])][:1]
    return known


def is_met(value, limit, better):
    return value <= limit if better == "lower" else value >= limit


def ratios(row, bars):
    """Returns ours / other for every measured pair of a row; `bars` has limits by the name of the other series."""
    found = []
    for mine in row["series"]:
        if mine["role"] != "ours" or mine["skipped"]:
            continue
        for other in row["series"]:
            if other["role"] == "ours" or other["skipped"] or not other["median"]:
                continue
            # The programs ran in turn, so samples of one round belong together.
            pairs = [a / b for a, b in zip(mine["samples"], other["samples"]) if b]
            ratio = {
                "of": mine["name"],
                "to": other["name"],
                "median": mine["median"] / other["median"],
                "low": min(pairs),
                "high": max(pairs),
            }
            ratio["disturbed"] = bool(mine["disturbed"] or other["disturbed"])
            if other["name"] in bars:
                ratio["bar"] = bars[other["name"]]
                ratio["met"] = is_met(ratio["median"], ratio["bar"], row["better"])
            found.append(ratio)
    return found


def limits(row, limit):
    """Returns the absolute bar of our series."""
    return [
        {
            "of": mine["name"],
            "bar": limit,
            "met": is_met(mine["median"], limit, row["better"]),
            "disturbed": bool(mine["disturbed"]),
        }
        for mine in row["series"]
        if limit is not None and mine["role"] == "ours" and not mine["skipped"]
    ]


def ratio_of(row, series_name):
    """Returns the ratios that belong to the line of a series in a table."""
    mine = [s["name"] for s in row["series"] if s["role"] == "ours"]
    own = [ratio for ratio in row["ratios"] if ratio["to"] == series_name]
    # With several series of ours, each line of ours has its own ratio; else the line of the peer has it.
    return [r for r in row["ratios"] if r["of"] == series_name] if len(mine) > 1 else own


def point(results):
    """Returns the point of one load from the results of all rounds."""
    first = results[0]
    found = {
        "load": first["load"],
        "sent_pps": statistics.median(result["sent_pps"] for result in results),
        "loss": summary([result["loss_ratio"] or 0.0 for result in results]),
        "stall_us": max(result["longest_stall_ns"] for result in results) / 1e3,
        "delay_us": {},
    }
    found["limited"] = found["sent_pps"] < 0.97 * first["load"]
    for key in first["delay_ns"]:
        values = [result["delay_ns"][key] / 1e3 for result in results if key in result["delay_ns"]]
        found["delay_us"][key] = summary(values)
    return found


def differences(old, new):
    """Compares our series of two documents. The verdict is one of better, worse, same, disturbed, missing."""
    # Rows that this run was not asked for are no difference.
    rows = [row for row in old["rows"] if row["group"] in new["options"]["rows"]]
    before = {(row["id"], s["name"]): (row, s) for row in rows for s in row["series"] if s["role"] == "ours"}
    found = []
    for row in new["rows"]:
        for mine in row["series"]:
            if mine["role"] != "ours":
                continue
            entry = {
                "id": row["id"],
                "title": row["title"],
                "name": mine["name"],
                "unit": row["unit"],
                "better": row["better"],
                "command": mine["command"],
            }
            found.append(entry)
            _, earlier = before.pop((row["id"], mine["name"]), (None, None))
            if not earlier or earlier["skipped"] or mine["skipped"]:
                entry["verdict"] = "missing"
                continue
            entry |= {"old": earlier["median"], "new": mine["median"], "ratio": mine["median"] / earlier["median"]}
            apart = mine["low"] > earlier["high"] or mine["high"] < earlier["low"]
            if not apart or abs(entry["ratio"] - 1) <= CHANGE:
                entry["verdict"] = "same"
            elif mine["disturbed"] or earlier["disturbed"]:
                entry["verdict"] = "disturbed"
            else:
                entry["verdict"] = "better" if (entry["ratio"] < 1) == (row["better"] == "lower") else "worse"
    for row, earlier in before.values():
        found.append(
            {
                "id": row["id"],
                "title": row["title"],
                "name": earlier["name"],
                "unit": row["unit"],
                "better": row["better"],
                "command": earlier["command"],
                "verdict": "missing",
            }
        )
    return found


def compare(old, new):
    """Returns the part of a document that compares it with an earlier one."""
    same = all(
        old["machine"].get(key) == new["machine"].get(key) for key in ("processor", "processors", "tsc_hz_rounded")
    )
    return {
        "revision": old["programs"].get("wirepath", "unknown"),
        "started": old["started"],
        "same_machine": same,
        "rows": differences(old, new),
    }


def disturbed(document):
    """Returns the causes and remedies of all disturbed series, each once, with the number of series."""
    count = {}
    for row in document["rows"] + document["loads"]:
        for one in row["series"]:
            for entry in one.get("disturbed") or []:
                # Figures differ from series to series, so the remedy names the cause.
                known = count.setdefault(entry["remedy"], [entry["cause"], 0])
                known[1] += 1
    return [(cause, remedy, n) for remedy, (cause, n) in count.items()]


def load(path):
    with open(path, encoding="utf8") as file:
        document = json.load(file)
    if document.get("format") != FORMAT:
        raise ValueError(f"{path}: not a document of scripts/compare, or of another version")
    return document


def number(value):
    """Returns a figure with three to four significant digits."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.2f} M"
    if size >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def percent(share):
    return "0 %" if share == 0 else f"{100 * share:.3g} %" if share >= 1e-5 else "< 0.001 %"


GROUPS = {
    "systems": (
        "Whole systems",
        "Whole programs on one core. They read the same capture file of 64-byte inner frames, and "
        "send to a sink. testpmd only moves the frames, so it is a lower bound and does less work.",
    ),
    "forward": (
        "Forward between two ports",
        "64-byte frames between two ports without a device, both ways on one core. The floor is a bare loop.",
    ),
    "encap": (
        "VXLAN encapsulation",
        "64-byte frames, the gateway's stage with source, sink and statistics. "
        "Flows have a host each. The floor does the same work for fixed headers, without statistics.",
    ),
    "decap": ("VXLAN decapsulation", "Tunnel packets to local hosts, with the checks of the outer headers."),
    "gateway": (
        "VXLAN both ways, learned addresses",
        "Each packet also refreshes the address of its source. The floor looks up both addresses too.",
    ),
    "kinds": ("Kinds of tunnels", "10 000 flows. Tunnels of IP packets compare with VXLAN behind a router."),
    "scale": ("Many hosts, segments and remotes", "Both ways with learned addresses, beside one of each."),
    "table": ("Exact keys in a hash table", "1 000 000 keys of 16 bytes, random hits. rte_hash has DPDK's own test."),
    "routes": ("Routing tables", "Lookups in bulk of random addresses that have a route."),
    "rules": ("Rules", "10 000 rules of 20 masks, 100 000 flows."),
    "nic": (
        "Drivers on emulated NICs",
        "Drivers alone on the same emulated NIC, which polls its queues in a thread of its "
        "own. These are no rates of hardware.",
    ),
    "vpp": ("VPP's rdma plugin on an emulated ConnectX", "Receive only. VPP drops the packets in ethernet-input."),
    "grout": (
        "DPDK's graph router grout",
        "Both read the same capture file in a loop, and send to a sink. The figures are without the cycles that each "
        "program takes to move the frames from port to port unchanged.",
    ),
}
