//! A recording as JSON.

use serde_json::{Value, json};

use super::recording::{Part, Turn};
use super::{Histogram, Recording};
use crate::clock;

/// Returns the figures of a worker. Keys without a figure have the value `null`.
pub(super) fn json(worker: usize, recording: Option<&Recording>, with_turns: bool) -> Value {
    let Some(it) = recording else { return json!({ "worker": worker, "answered": false }) };
    let hz = clock::tick_hz();
    let per = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
    let stage = |part: Part| {
        json!({
            "name": part.name,
            "runs": part.runs,
            "cycles": part.cycles,
            "cycles_per_packet": per(part.cycles, it.packets),
            "share": per(part.cycles, it.busy_cycles),
        })
    };
    let slow = it.slow.iter().map(|(turn, name, cycles)| {
        let mut value = turn_json(turn);
        value["longest"] = (*name).into();
        value["longest_cycles"] = (*cycles).into();
        value
    });
    let overhead = it.lap_cycles + it.record_cycles;
    let mut value = json!({
        "worker": worker,
        "answered": true,
        "hz": hz,
        "busy_turns": it.busy_turns,
        "idle_turns": it.idle_turns,
        "suspicious_turns": it.slow_turns,
        "suspicious_limit_us": it.limits.slow as f64 * 1e6 / hz,
        "busy_cycles": it.busy_cycles,
        "idle_cycles": it.idle_cycles,
        "packets": it.packets,
        "batches": it.batches,
        "drops": it.drops,
        "punts": it.punts,
        "cycles_per_turn": per(it.busy_cycles, it.busy_turns),
        "cycles_per_idle_turn": per(it.idle_cycles, it.idle_turns),
        "cycles_per_packet": per(it.busy_cycles, it.packets),
        "packets_per_batch": per(it.packets, it.batches),
        "packets_per_turn": per(it.packets, it.busy_turns),
        "stages": it.parts().map(stage).collect::<Vec<_>>(),
        "measurement": {
            "cycles": overhead,
            "cycles_per_packet": per(overhead, it.packets),
            "share": per(overhead, it.busy_cycles + it.idle_cycles + it.record_cycles),
        },
        "histograms": {
            "cycles_per_turn": histogram_json(&it.turn_cycles),
            "packets_per_turn": histogram_json(&it.turn_packets),
            "cycles_per_packet": histogram_json(&it.packet_cycles),
            "packets_per_batch": histogram_json(&it.batch_packets),
            "punts_per_turn": histogram_json(&it.turn_punts),
        },
        "slow_turns": slow.collect::<Vec<_>>(),
    });
    if with_turns {
        value["turns"] = it.turns.iter().map(turn_json).collect::<Vec<_>>().into();
    }
    value
}

fn turn_json(turn: &Turn) -> Value {
    json!({
        "time": turn.time as f64 / 1e9,
        "cycles": turn.cycles,
        "packets": turn.packets,
        "batches": turn.batches,
        "drops": turn.drops,
        "punts": turn.punts,
        "left": turn.left,
        "idle_before": turn.idle_before,
    })
}

/// `buckets` is a list of pairs: the largest value of a bucket and the number of values in it.
fn histogram_json(histogram: &Histogram) -> Value {
    let percentile = |percent| histogram.percentile(percent);
    json!({
        "n": histogram.len(),
        "mean": histogram.mean(),
        "p50": percentile(50.0),
        "p90": percentile(90.0),
        "p99": percentile(99.0),
        "p99.9": percentile(99.9),
        "max": histogram.max(),
        "buckets": histogram.buckets().collect::<Vec<_>>(),
    })
}
