use wirepath_packet::{BATCH, Batch};

use crate::bench::{Bench, frame, identify};
use crate::common::bytes;

/// Transmit takes packets from the front and leaves the rest in order. Taken packets are sent, as the
/// counters say.
pub(crate) fn leaves_what_it_cannot_take(bench: &mut Bench) {
    bench.start(&[]);
    let depth = bench.started().port.config().depth;
    // A wire with backpressure must be full by then; others are flooded beyond their rings.
    let max_packets = if bench.traits.has_backpressure { 1 << 17 } else { 4 * depth };
    let (mut next, mut taken, mut partial) = (0u32, 0u64, false);
    let mut batch = Batch::new();
    while next < max_packets
        && !(partial && bench.traits.has_backpressure)
        && bench.pool.available() as usize > 2 * BATCH
    {
        while !batch.is_full() {
            batch.push(bench.packet(&frame(0, next, 64 + next as usize % 200))).expect("room");
            next += 1;
        }
        let before = batch.len();
        let n = bench.started().tx[0].transmit(&mut batch);
        assert_eq!(batch.len(), before - n);
        taken += n as u64;
        partial |= n < before;
        let left: Vec<_> = batch.iter().map(|packet| identify(&bytes(packet)).expect("ours").1).collect();
        let want: Vec<_> = (next - left.len() as u32..next).collect();
        assert_eq!(left, want, "what is left are the last ones, in order");
    }
    assert!(partial || !bench.traits.has_backpressure, "{taken} packets taken without an end: {}", bench.diagnostics());
    let left = batch.len();
    // Once the wire is empty, the rest can be sent.
    let mut rest: Vec<_> = std::iter::from_fn(|| batch.pop()).collect();
    bench.take_arrived();
    bench.send_packets(&mut rest);
    taken += left as u64;
    let counters = bench.started().port.tx_statistics().remove(0);
    assert_eq!(counters.packets + counters.dropped(), taken, "{counters:?}");
    let sent = counters.packets as usize;
    let arrived = if bench.traits.has_backpressure { bench.take_sent(sent) } else { settle(bench) };
    let numbers: Vec<u32> = arrived.iter().filter_map(|frame| identify(frame)).map(|(_, number)| number).collect();
    if bench.traits.has_backpressure {
        assert_eq!(numbers, (0..next).collect::<Vec<_>>(), "everything arrives, in order");
    } else {
        // A flood may overrun the other end, which then loses frames, but never reorders them.
        assert!(numbers.is_sorted_by(|a, b| a < b), "order");
        assert!(!bench.traits.shows_sent || !numbers.is_empty());
    }
}

/// Takes frames until no more arrive.
fn settle(bench: &mut Bench) -> Vec<Vec<u8>> {
    if bench.traits.shows_sent_after_stop {
        bench.stop();
    }
    loop {
        let before = bench.arrived.len();
        std::thread::sleep(std::time::Duration::from_millis(100));
        bench.take_arrived();
        if bench.arrived.len() == before {
            return std::mem::take(&mut bench.arrived);
        }
    }
}
