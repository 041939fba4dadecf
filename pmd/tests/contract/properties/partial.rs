use wirepath_pmd::packet::{BATCH, Batch};

use crate::bench::{Bench, bytes, frame, identify};

/// Transmit takes from the front and leaves the rest, in order; what it took goes out, and is what the counters say.
pub(crate) fn leaves_what_it_cannot_take(bench: &mut Bench) {
    bench.start(&[]);
    let depth = bench.started().port.config().depth;
    // A wire that fills must be full by then; another is flooded beyond its ring.
    let most = if bench.nature.fills { 1 << 17 } else { 4 * depth };
    let (mut next, mut taken, mut partial) = (0u32, 0u64, false);
    let mut batch = Batch::new();
    while next < most && !(partial && bench.nature.fills) && bench.pool.available() as usize > 2 * BATCH {
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
    assert!(partial || !bench.nature.fills, "{taken} packets taken without an end: {}", bench.story());
    let left = batch.len();
    // The wire empties, and the rest goes too.
    let mut rest: Vec<_> = std::iter::from_fn(|| batch.pop()).collect();
    bench.take_arrived();
    bench.send_packets(&mut rest);
    taken += left as u64;
    let counters = bench.started().port.tx_statistics().remove(0);
    assert_eq!(counters.packets + counters.dropped(), taken, "{counters:?}");
    let sent = counters.packets as usize;
    let arrived = if bench.nature.fills { bench.take_sent(sent) } else { settle(bench) };
    let numbers: Vec<u32> = arrived.iter().filter_map(|frame| identify(frame)).map(|(_, number)| number).collect();
    if bench.nature.fills {
        assert_eq!(numbers, (0..next).collect::<Vec<_>>(), "everything arrives, in order");
    } else {
        // A flood may outrun the other end, which then loses frames; but it never turns them round.
        assert!(numbers.is_sorted_by(|a, b| a < b), "order");
        assert!(!bench.nature.shows || !numbers.is_empty());
    }
}

/// Takes what arrives until nothing more does.
fn settle(bench: &mut Bench) -> Vec<Vec<u8>> {
    if bench.nature.shows_after_stop {
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
