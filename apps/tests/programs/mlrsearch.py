#!/usr/bin/env python3
"""Runs the searches of mlrsearch.json with the Python package MLRsearch on simulated devices.

usage: mlrsearch.py <mlrsearch.json

It prints the same scenarios with the results of the package. The devices lose what `Device::loss` of ndr.rs says.
"""

import json, sys

from MLRsearch import AbstractMeasurer, Config, MeasurementResult, MultipleLossRatioSearch, SearchGoal


def random(seed, n):
    """The number `n` of a sequence (SplitMix64), from 0 to below 1."""
    mask = (1 << 64) - 1
    z = (seed + (n + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


class Device(AbstractMeasurer):
    def __init__(self, scenario):
        self.scenario, self.trials, self.seconds = scenario, 0, 0.0

    def measure(self, intended_duration, intended_load):
        it = self.scenario
        first, second = (random(it["seed"], 2 * self.trials + i) for i in (0, 1))
        self.trials += 1
        self.seconds += intended_duration
        capacity = it["capacity"] * (1.0 + it["jitter"] * (2.0 * first - 1.0))
        share = max(it["background"], 1.0 - capacity / intended_load)
        if second < it["burst_probability"]:
            share = max(share, it["burst_loss"])
        sent = int(intended_load * intended_duration)
        return MeasurementResult(intended_duration, intended_load, offered_count=sent, loss_count=int(sent * share))


def search(scenario):
    goals = [
        SearchGoal(
            loss_ratio=goal["loss_ratio"],
            exceed_ratio=scenario["exceed_ratio"],
            relative_width=scenario["width"],
            initial_trial_duration=scenario["initial_seconds"],
            final_trial_duration=scenario["final_seconds"],
            duration_sum=scenario["duration_sum"],
            fail_fast=False,
        )
        for goal in scenario["goals"]
    ]
    config = Config()
    config.min_load, config.max_load = scenario["min_load"], scenario["max_load"]
    config.goals, config.warmup_duration, config.search_duration_max = goals, None, 1e6
    device = Device(scenario)
    results = MultipleLossRatioSearch(config).search(device, debug=lambda text: None)
    number = lambda load: None if load is None else float(load)
    for goal, into in zip(goals, scenario["goals"]):
        found = results[goal]
        into["lower"] = number(found.relevant_lower_bound)
        into["upper"] = number(found.relevant_upper_bound)
        into["throughput"] = number(found.conditional_throughput)
    scenario["trials"], scenario["trial_seconds"] = device.trials, device.seconds
    return scenario


print(json.dumps([search(scenario) for scenario in json.load(sys.stdin)], indent=1))
