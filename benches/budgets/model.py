"""Budgets: figures of a path by the difference of two runs, their comparison with stored ones, and the verdict.

Figures: {"instructions": of the path, "functions": {name: [with callees, alone]}}, all for each packet.
Document: format, compiler, paths by name.
"""

FORMAT = 1
# Excess that is allowed: a share of the budget, and instructions per packet. The same build differs by less than half.
TOLERANCE, SLACK = 0.02, 0.5
# Excess of a function that is allowed as a share of the whole path. Tables have random hash seeds.
SLACK_OF_PATH = 0.005
# Another version of the compiler makes other code.
OTHER_COMPILER = 0.10
# A path or function below its budget by more than this share should get a lower one.
MUCH_LESS = 0.06
# Functions with fewer instructions per packet, with what they call or themselves, have no budget.
LEAST, LEAST_OWN = 1.0, 0.05
# Function without a budget: it follows collisions in a table, whose hash seed is random.
RANDOM = "ConcurrentTable::find_slow"
# Functions that a failure names.
NAMED = 4


def figures(few, many, is_counted=None):
    """Returns the figures of the additional packets of a run; `few` and `many` are pairs of profile and packets.

    `is_counted` chooses functions that count as the path; without it, the path is all that the profile has."""
    (before, fewer), (after, more) = few, many
    packets = more - fewer
    if packets <= 0:
        raise ValueError(f"{more} packets are not more than {fewer}")
    each = lambda take: (take(after) - take(before)) / packets
    counted = after.names() if is_counted is None else set(filter(is_counted, after.names()))
    if not counted:
        raise ValueError("the profile has none of the functions of the path")
    functions = {}
    for name in sorted(after.reached(counted)):
        inclusive, own = each(lambda profile: profile.inclusive(name)), each(lambda profile: profile.own[name])
        # Functions that do nothing for a packet themselves start the thread.
        if inclusive >= LEAST and own >= LEAST_OWN and not name.endswith(RANDOM):
            functions[name] = [round(inclusive, 2), round(own, 2)]
    if is_counted is None:
        total = each(lambda profile: profile.total())
    else:
        total = each(lambda profile: sum(profile.inclusive(name) for name in counted))
    return {"instructions": round(total, 2), "functions": functions}


def limit(budget, tolerance, slack=SLACK):
    return budget * (1 + tolerance) + slack


def is_much_less(value, budget):
    return value < budget * (1 - MUCH_LESS) - SLACK


def grown(path, budget):
    """Returns the functions that need more instructions themselves, those with the largest excess first."""
    own = lambda figures, name: figures["functions"].get(name, [0, 0])[1]
    names = set(path["functions"]) | set(budget["functions"])
    excess = {name: own(path, name) - own(budget, name) for name in names}
    found = sorted((name for name in names if excess[name] >= 0.1), key=lambda name: -excess[name])
    return [(name, own(path, name), own(budget, name)) for name in found]


def judge(name, path, budget, tolerance):
    """Returns the failures and the notes of a path."""
    failures, notes = [], []
    found, allowed = path["instructions"], budget["instructions"]
    over, slack = [], max(SLACK, SLACK_OF_PATH * allowed)
    for function, (allowed_of, _) in budget["functions"].items():
        if function not in path["functions"]:
            notes.append(f"{name}: {function} is no function of its own any more (budget {allowed_of:.1f})")
            continue
        inclusive = path["functions"][function][0]
        if inclusive > limit(allowed_of, tolerance, slack):
            over.append((inclusive - allowed_of, function, inclusive, allowed_of))
    if found > limit(allowed, tolerance) or over:
        if found > limit(allowed, tolerance):
            words = f"{name}: {found:.1f} instructions per packet, budget {allowed:.1f}"
        else:
            words = f"{name}: {found:.1f} instructions per packet are within the budget, but not those of a function"
        more = grown(path, budget)
        named = {function for function, *_ in more[:NAMED]}
        for function, now, before in more[:NAMED]:
            words += f"\n    {function}: {now:.1f} itself instead of {before:.1f}"
        # A caller of a function that has grown says nothing new.
        if not named:
            for _, function, inclusive, allowed_of in sorted(over, reverse=True)[:NAMED]:
                words += f"\n    {function}: {inclusive:.1f} with what it calls instead of {allowed_of:.1f}"
        failures.append(words)
    elif is_much_less(found, allowed):
        notes.append(f"{name}: only {found:.1f} instead of {allowed:.1f} instructions per packet: lower the budget")
    else:
        for function, (allowed_of, _) in budget["functions"].items():
            inclusive = path["functions"].get(function, [allowed_of])[0]
            if is_much_less(inclusive, allowed_of):
                words = f"only {inclusive:.1f} instead of {allowed_of:.1f} instructions per packet: lower the budget"
                notes.append(f"{name}: {function}: {words}")
    return failures, notes


def compare(measured, document, compiler, tolerances=None):
    """Returns the failures and the notes of all measured paths; `tolerances` has those that differ, by path."""
    failures, notes, tolerance = [], [], TOLERANCE
    if document.get("format") != FORMAT:
        return [f"the budgets have the format {document.get('format')}, not {FORMAT}: write them anew"], []
    if document["compiler"] != compiler:
        tolerance = OTHER_COMPILER
        notes.append(
            f"the budgets are those of {document['compiler']}, and this is {compiler}: {tolerance:.0%} are allowed"
        )
    for name, path in measured.items():
        if name not in document["paths"]:
            failures.append(f"{name}: there is no budget")
            continue
        more_failures, more_notes = judge(
            name, path, document["paths"][name], max(tolerance, (tolerances or {}).get(name, 0))
        )
        failures += more_failures
        notes += more_notes
    return failures, notes


def updated(measured, document, compiler):
    """Returns the document with the figures of the measured paths."""
    paths = {} if document is None or document.get("format") != FORMAT else dict(document["paths"])
    return {"format": FORMAT, "compiler": compiler, "paths": paths | measured}


def text(document):
    """Returns a document as JSON with one function on a line, so that a change of one is a change of one line."""
    import json

    quoted = json.dumps
    parts = []
    for name, path in document["paths"].items():
        functions = ",\n".join(
            f"        {quoted(function)}: {quoted(costs)}" for function, costs in path["functions"].items()
        )
        head = f'    {quoted(name)}: {{\n      "instructions": {path["instructions"]},\n      "functions": {{\n'
        parts.append(f"{head}{functions}\n      }}\n    }}")
    head = f'{{\n  "format": {document["format"]},\n  "compiler": {quoted(document["compiler"])},\n  "paths": {{\n'
    return head + ",\n".join(parts) + "\n  }\n}\n"
