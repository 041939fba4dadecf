//! The example `limiter`.

use std::sync::Arc;

use wirepath::pipeline::registry::Registry;
use wirepath::prelude::*;

use crate::lab::{A, B, Lab, MS, read, tcp, udp};

#[path = "../../examples/limiter.rs"]
#[expect(dead_code, reason = "the tests drive the stage, not `main`")]
mod example;

use example::{Limiter, LimiterControl, Rate, Sources};

const SERVER: ([u8; 4], u16) = ([192, 0, 2, 1], 80);
const NOISY: [u8; 4] = [198, 51, 100, 1];
const QUIET: [u8; 4] = [198, 51, 100, 2];

fn lab(rate: u32) -> (Lab<Limiter>, LimiterControl) {
    let sources = Arc::new(Sources::new());
    let syn_rate = DropReason::register("syn_rate", "the source sends too many SYNs").unwrap();
    let syns = CounterId::register("syns", Unit::Packets, "TCP SYNs over IPv4").unwrap();
    let limiter = Limiter { rate, sources: Arc::clone(&sources), syn_rate, syns };
    (Lab::new(&Domain::new(), limiter), LimiterControl([sources].into()))
}

fn syn(src: [u8; 4]) -> Vec<u8> {
    tcp((src, 1000), SERVER, "S", 1, 0)
}

/// Rows of the table `sources`: source and SYNs, sorted.
fn rows(lab: &mut Lab<Limiter>, control: &mut LimiterControl) -> Vec<(String, u64)> {
    let rows = lab.runtime.with_plane(|plane| {
        let mut registry = Registry { control, plane };
        let table = registry.table("sources").unwrap();
        registry.rows(table)
    });
    let row = |row: &Vec<Value>| {
        assert_eq!(row[0], 0, "the worker");
        (row[1].as_str().unwrap().to_owned(), row[2].as_u64().unwrap())
    };
    let mut rows: Vec<_> = rows.iter().map(row).collect();
    rows.sort();
    rows
}

#[test]
fn syns_above_the_rate_of_a_source_are_dropped() {
    let (mut lab, mut control) = lab(3);
    let noisy = vec![syn(NOISY); 5];
    assert_eq!(lab.pass(A, &noisy), vec![(B, syn(NOISY)); 3]);
    assert_eq!(lab.drops("syn_rate"), 2);
    // Another source, and packets that are not SYNs, pass in both directions.
    let others = [
        syn(QUIET),
        tcp((NOISY, 1000), SERVER, "A", 2, 2),
        tcp((NOISY, 1000), SERVER, "SA", 1, 2),
        udp((NOISY, 1000), SERVER, 1),
    ];
    assert_eq!(lab.pass(A, &others), others.clone().map(|frame| (B, frame)));
    assert_eq!(lab.pass(B, &others[1..]), others[1..].iter().map(|it| (A, it.clone())).collect::<Vec<_>>());
    assert_eq!(rows(&mut lab, &mut control), [("198.51.100.1".into(), 5), ("198.51.100.2".into(), 1)]);
    // The next second.
    lab.runtime.advance(1000 * MS);
    assert_eq!(lab.pass(A, &noisy).len(), 3);
    assert_eq!(lab.drops("syn_rate"), 4);
    let syns = CounterId::register("syns", Unit::Packets, "TCP SYNs over IPv4").unwrap();
    assert_eq!(lab.counter(syns), 11);
}

#[test]
fn sources_age_and_a_command_forgets_them() {
    let (mut lab, mut control) = lab(1);
    lab.pass(A, &[syn(NOISY)]);
    lab.runtime.advance(30_000 * MS);
    lab.pass(A, &[syn(QUIET)]);
    lab.runtime.advance(30_000 * MS);
    assert_eq!(rows(&mut lab, &mut control).len(), 2, "60 seconds");
    lab.runtime.advance(1000 * MS);
    assert_eq!(rows(&mut lab, &mut control), [("198.51.100.2".into(), 1)], "61 seconds");

    assert_eq!(lab.pass(A, &[syn(NOISY), syn(NOISY)]).len(), 1);
    let arguments = json!({});
    let command = Command { name: "reset", arguments: arguments.as_object().unwrap(), origin: "test" };
    let done = lab.runtime.with_plane(|plane| Registry { control: &mut control, plane }.command(&command));
    assert_eq!(done, Ok(json!({ "reset": true })));
    lab.runtime.control(&mut control);
    assert_eq!(rows(&mut lab, &mut control), []);
    assert_eq!(lab.pass(A, &[syn(NOISY)]).len(), 1, "its SYNs of this second are forgotten");
}

#[test]
fn the_table_does_not_grow() {
    let (mut lab, mut control) = lab(1);
    lab.pass(A, &[syn(QUIET)]);
    lab.runtime.advance(1000 * MS);
    for n in 0..10_000_u32 {
        lab.pass(A, &[syn((0x0a00_0000 + n).to_be_bytes())]);
    }
    let rows = rows(&mut lab, &mut control);
    assert_eq!(rows.len(), 4096);
    assert!(!rows.iter().any(|(source, _)| source == "198.51.100.2"), "the oldest source is replaced first");
    assert_eq!(lab.drops(""), 0, "a new source starts from one");
}

#[test]
fn all_mistakes_of_the_table_are_reported() {
    assert_eq!(read::<Rate>("[limiter]\nrate = 10\n").map(|rate| rate.0), Ok(10));
    assert!(read::<Rate>("[limiter]\nrate = 0\n").map(|_| ()).unwrap_err().contains("limiter.rate: found 0"));
    assert!(read::<Rate>("").map(|_| ()).unwrap_err().contains("expected the table [limiter]"));
}
