use std::time::Instant;

use crate::bench::{Bench, TIMEOUT, frames, identify};

/// The port is stopped under traffic and started again, several times. Packets flow again, in order and at
/// most once, and no buffer is lost.
pub(crate) fn stops_and_starts_under_traffic(bench: &mut Bench) {
    let all = frames(0..2000);
    let (mut offered, mut last) = (0, None);
    for round in 0..4u32 {
        if round == 0 {
            bench.start(&all);
        } else {
            bench.start_again();
        }
        let (start, before, mut got) = (Instant::now(), offered, 0);
        while got < 100 {
            assert!(
                start.elapsed() < TIMEOUT,
                "round {round}: {got} received after the start: \
                 {}",
                bench.diagnostics()
            );
            // A far end that another thread serves may be slow.
            let room = offered - before < bench.traits.capacity.saturating_add(got);
            if offered < all.len() && room && bench.wire.offer(&all[offered]) {
                offered += 1;
            }
            for received in bench.poll() {
                let Some((_, number)) = identify(&received) else {
                    got += usize::from(!bench.traits.delivers);
                    continue;
                };
                assert!(last.is_none_or(|last| number > last), "round {round}: {number} after {last:?}");
                (last, got) = (Some(number), got + 1);
            }
        }
        // These wait in the device or on the wire when the port stops, as do packets to be sent.
        for _ in 0..50 {
            if offered < all.len() && bench.wire.offer(&all[offered]) {
                offered += 1;
            }
        }
        let base = 10_000 * (round + 1);
        bench.send(&frames(base..base + 50));
        bench.stop();
        assert_eq!(bench.pool.outstanding(), 0, "round {round}: buffers that did not come back");
    }
    if bench.traits.shows_sent {
        let numbers: Vec<u32> = bench.take_sent(1).iter().filter_map(|f| identify(f)).map(|(_, n)| n).collect();
        assert!(numbers.is_sorted_by(|a, b| a < b), "sent in order: {numbers:?}");
        assert!(!numbers.is_empty());
    }
}
