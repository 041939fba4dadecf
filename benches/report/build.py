"""The release build of the project, and the clock by which its figures count cycles."""

import os
import re
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TARGET = os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target"))


def release(name):
    """Returns the path of a program."""
    return os.path.join(TARGET, "release", name)


def tsc_hz():
    """Measures the frequency of the time-stamp counter by the floor, which prints cycles and packets per second."""
    command = [release("wirepath-floor"), "io", "1", "32", "0.2"]
    text = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    cycles, rate = re.match(r"([\d.]+) cycles/packet, (\d+)", text).groups()
    return float(cycles) * float(rate)
