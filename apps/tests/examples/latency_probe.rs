//! The example `latency_probe`.

use wirepath::pipeline::registry::Registry;
use wirepath::prelude::*;

use crate::lab::{A, B, Lab, MS, tcp};

#[path = "../../examples/latency_probe.rs"]
#[expect(dead_code, reason = "the tests drive the stage, not `main`")]
mod example;

use example::{Probe, ProbeControl};

const SERVER: ([u8; 4], u16) = ([192, 0, 2, 1], 80);

fn client(port: u16) -> ([u8; 4], u16) {
    ([198, 51, 100, 1], port)
}

fn syn(port: u16) -> Vec<u8> {
    tcp(client(port), SERVER, "S", 1, 0)
}

fn syn_ack(port: u16) -> Vec<u8> {
    tcp(SERVER, client(port), "SA", 7, 2)
}

fn lab() -> (Lab<Probe>, ProbeControl) {
    let (probe, control) = Probe::new(None).unwrap();
    (Lab::new(&Domain::new(), probe), control)
}

/// Lets the control thread fetch the times: it gives the job, and then it sees the result.
fn fetch(lab: &mut Lab<Probe>, control: &mut ProbeControl) {
    lab.runtime.control(control);
    lab.runtime.control(control);
}

/// Returns whether a time was found, to a thousandth.
fn is_near(found: u64, expected: u64) -> bool {
    found.abs_diff(expected) <= expected / 1000
}

#[test]
fn known_delays_have_their_percentiles() {
    let (mut lab, mut control) = lab();
    // 98 handshakes take 5 ms, one takes 20 ms, and one takes 300 ms.
    for (port, delay) in (0..98).map(|port| (port, 5)).chain([(98, 20), (99, 300)]) {
        assert_eq!(lab.pass(A, &[syn(port)]), [(B, syn(port))], "the packet is unchanged");
        lab.runtime.advance(delay * MS);
        assert_eq!(lab.pass(B, &[syn_ack(port)]), [(A, syn_ack(port))]);
        if port == 50 {
            fetch(&mut lab, &mut control);
            assert_eq!(control.all.len(), 51);
        }
    }
    fetch(&mut lab, &mut control);
    let all = &control.all;
    assert_eq!(all.len(), 100);
    for (percentile, expected) in [(50.0, 5), (98.0, 5), (99.0, 20), (99.9, 300), (100.0, 300)] {
        let found = all.value_at_percentile(percentile);
        assert!(is_near(found, expected * MS), "{percentile}: {found}");
    }
    let handshakes = CounterId::register("handshakes", Unit::None, "SYN/ACKs that answer a SYN").unwrap();
    assert_eq!((lab.counter(handshakes), lab.drops("")), (100, 0));

    let rows = lab.runtime.with_plane(|plane| {
        let mut registry = Registry { control: &mut control, plane };
        let table = registry.table("handshakes").unwrap();
        registry.rows(table)
    });
    let names: Vec<_> = rows.iter().map(|row| row[0].as_str().unwrap()).collect();
    assert_eq!(names, ["p50", "p99", "p99.9", "max"]);
    let p99 = rows[1][1].as_f64().unwrap();
    assert!((p99 - 0.020).abs() < 0.000_02, "{p99} s");
    let summary = control.summary().unwrap();
    assert_eq!(summary["handshake_p99_seconds"].as_f64(), Some(p99));
}

#[test]
fn only_the_answer_of_a_syn_counts() {
    let (mut lab, mut control) = lab();
    // No SYN was seen; the answer has another port; a SYN is no answer; data are neither.
    lab.pass(B, &[syn_ack(1)]);
    lab.pass(A, &[syn(2), tcp(client(2), SERVER, "A", 2, 8)]);
    lab.pass(B, &[syn_ack(3), tcp(SERVER, client(2), "A", 8, 2)]);
    lab.pass(A, &[tcp(SERVER, client(2), "S", 1, 0)]);
    // A SYN that is sent again begins anew, and the second answer does not count.
    lab.runtime.advance(1000 * MS);
    lab.pass(A, &[syn(2)]);
    lab.runtime.advance(7 * MS);
    lab.pass(B, &[syn_ack(2), syn_ack(2)]);
    fetch(&mut lab, &mut control);
    assert_eq!(control.all.len(), 1);
    assert!(is_near(control.all.max(), 7 * MS), "{}", control.all.max());
}

#[test]
fn the_last_times_come_with_the_end_of_the_worker() {
    let (mut lab, mut control) = lab();
    lab.pass(A, &[syn(1)]);
    lab.pass(B, &[syn_ack(1)]);
    let mut other = self::lab().0;
    std::mem::swap(&mut lab, &mut other);
    drop(other);
    lab.runtime.with_plane(|plane| control.stop(plane));
    assert_eq!(control.all.len(), 1);
}
