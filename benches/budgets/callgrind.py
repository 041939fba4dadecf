"""Reads the output of callgrind: instructions of each function, alone and with the functions that it calls.

Format: valgrind's manual, "Callgrind Format Specification". One file has one thread (--separate-threads=yes).
"""

import collections
import re

# Rust's mangling appends a hash, which every change of the crate changes.
HASH = re.compile(r"::h[0-9a-f]{16}$|\[[0-9a-f]{8,16}\]")
# A recursive function has a name of its own for each depth.
DEPTH = re.compile(r"'\d+$")
COST = re.compile(r"^[+*-]?\d*(?: [+*-]?\d*)* (\d+)$")


def readable(name):
    """Returns the name of a function without what differs between two builds of the same source."""
    return HASH.sub("", DEPTH.sub("", name))


class Profile:
    """Instructions by function name: `own` without callees, `calls` by the name of the callee with its callees."""

    def __init__(self):
        self.own = collections.Counter()
        self.calls = collections.defaultdict(collections.Counter)
        self.thread = 0

    def total(self):
        return sum(self.own.values())

    def inclusive(self, name):
        """Returns the instructions of a function and of all that it calls.

        Calls of a function of the same name are left out: that function counts its own."""
        return self.own[name] + sum(cost for callee, cost in self.calls[name].items() if callee != name)

    def names(self):
        return set(self.own) | set(self.calls)

    def reached(self, names):
        """Returns functions with all that they call, directly or not."""
        found, left = set(), list(names)
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left += self.calls.get(name, ())
        return found


class Malformed(Exception):
    """Text that is not callgrind's."""


def parse(text):
    """Returns the profile of one file."""
    profile, names = Profile(), {}
    function = callee = None
    is_call = False

    def name_of(value):
        # "(7) name" defines the name of a number, "(7)" refers to it.
        found = re.match(r"\((\d+)\)(?: (.*))?$", value)
        if not found:
            return readable(value)
        number, name = found.groups()
        if name is not None:
            names[number] = readable(name)
        if number not in names:
            raise Malformed(f"function ({number}) has no name")
        return names[number]

    is_events = False
    for number, line in enumerate(text.split("\n"), 1):
        if not line or line[0] == "#":
            continue
        if line.startswith("fn="):
            function = name_of(line[3:])
        elif line.startswith("cfn="):
            callee = name_of(line[4:])
        elif line.startswith("calls="):
            is_call = True
        elif line[0].isdigit() or line[0] in "+-*":
            found = COST.match(line)
            if not found or function is None:
                raise Malformed(f"line {number}: {line[:60]}")
            if is_call:
                profile.calls[function][callee] += int(found[1])
            else:
                profile.own[function] += int(found[1])
            is_call = False
        elif line.startswith("thread:"):
            profile.thread = int(line.split(":")[1])
        elif line.startswith("events:"):
            if line.split()[1:] != ["Ir"]:
                raise Malformed(f"line {number}: expected the event Ir alone")
            is_events = True
    if not is_events:
        raise Malformed("no events: this is no output of callgrind")
    return profile
