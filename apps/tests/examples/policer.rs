//! The example `policer`.

use std::sync::Arc;

use wirepath::prelude::*;

use crate::lab::{A, B, Lab, MS, read, udp};

#[path = "../../examples/policer.rs"]
#[expect(dead_code, reason = "the tests drive the stage, not `main`")]
mod example;

use example::{Limits, Policer, cross};

fn frames(numbers: std::ops::Range<u32>) -> Vec<Vec<u8>> {
    numbers.map(|number| udp(([192, 0, 2, 1], 1), ([192, 0, 2, 2], 2), number)).collect()
}

#[test]
fn bursts_pass_and_then_the_rate() {
    let domain = Domain::new();
    let limits = Arc::new(Shared::new(&domain, Limits { rate: 1000, burst: 5 }));
    let mut lab = Lab::new(&domain, (Policer::new(2, Arc::clone(&limits)).unwrap(), cross));
    let passed = |frames: Vec<Vec<u8>>, port| frames.into_iter().map(|frame| (port, frame)).collect::<Vec<_>>();

    assert_eq!(lab.pass(A, &frames(0..8)), passed(frames(0..5), B), "the first ones of the batch, in order");
    assert_eq!(lab.pass(B, &frames(0..3)), passed(frames(0..3), A), "each port has a bucket of its own");
    assert_eq!(lab.pass(A, &frames(0..1)), []);
    lab.runtime.advance(2 * MS);
    assert_eq!(lab.pass(A, &frames(0..8)), passed(frames(0..2), B), "two milliseconds have two tokens");
    assert_eq!(lab.drops("policed"), 3 + 1 + 6);
    let bytes = CounterId::register("policed_bytes", Unit::Bytes, "Bytes of the packets above the rate").unwrap();
    assert_eq!(lab.counter(bytes), 10 * frames(0..1)[0].len() as u64);

    // A reload.
    limits.replace(Limits { rate: 3000, burst: 20 });
    lab.runtime.advance(4 * MS);
    assert_eq!(lab.pass(A, &frames(0..30)), passed(frames(0..12), B));
    lab.runtime.advance(1000 * MS);
    assert_eq!(lab.pass(A, &frames(0..30)), passed(frames(0..20), B), "the bucket has an end");
}

#[test]
fn all_mistakes_of_the_table_are_reported() {
    assert_eq!(read("[policer]\nrate = 10\nburst = 2\n"), Ok(Limits { rate: 10, burst: 2 }));
    let error = read::<Limits>("[policer]\nrate = 0\nbrst = 2\n").unwrap_err();
    assert!(error.contains("policer.rate: found 0"), "{error}");
    assert!(error.contains("did you mean \"burst\"?"), "{error}");
    assert!(read::<Limits>("").unwrap_err().contains("expected the table [policer]"));
}
