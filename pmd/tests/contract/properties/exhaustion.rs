use std::time::{Duration, Instant};

use wirepath_packet::drops::DropReason;

use crate::bench::{Bench, TIMEOUT, frames, identify};

/// An empty pool breaks nothing, losses are counted, and packets flow again once buffers are free.
pub(crate) fn drops_counts_and_recovers(bench: &mut Bench) {
    let early = frames(0..200);
    let late = frames(1000..1100);
    bench.start(&[early.clone(), late.clone()].concat());
    let taken: Vec<_> = std::iter::from_fn(|| bench.pool.take()).collect();
    assert!(!taken.is_empty() && bench.pool.available() == 0);
    let mut received = Vec::new();
    let mut offered = 0;
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(200) || offered < early.len() && start.elapsed() < TIMEOUT {
        if offered < early.len() && bench.wire.offer(&early[offered]) {
            offered += 1;
        }
        received.append(&mut bench.poll());
    }
    drop(taken);
    received.extend(bench.feed(&late));
    if !bench.traits.delivers {
        assert!(!received.is_empty(), "{}", bench.diagnostics());
        return;
    }
    // A port without losses has delivered only early frames so far.
    let last = late.last().expect("some");
    let start = Instant::now();
    while !received.contains(last) && start.elapsed() < TIMEOUT {
        received.append(&mut bench.poll());
    }
    let numbers: Vec<u32> = received.iter().filter_map(|f| identify(f)).map(|(_, number)| number).collect();
    assert!(numbers.is_sorted_by(|a, b| a < b), "order: {numbers:?}");
    assert!(received.contains(last), "flows again: {}", bench.diagnostics());
    let diagnostics = bench.diagnostics();
    let it = bench.started();
    let queue = it.port.rx_statistics().remove(0);
    let lost = (offered + late.len()) as u64 - numbers.len() as u64;
    if it.port.uncounted_drops().is_empty() {
        let counted = queue.dropped() + it.port.device_drops().iter().map(|(_, n)| n).sum::<u64>();
        assert_eq!(counted, lost, "{diagnostics}");
    } else {
        // MANA offers no counter of packets without a buffer.
        assert_eq!(it.port.uncounted_drops(), [DropReason::RxFull]);
        assert_eq!(it.port.capabilities().driver, "mana");
    }
}
