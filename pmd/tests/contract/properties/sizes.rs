use wirepath_packet::Batch;
use wirepath_testlab::print_uncaptured;

use crate::bench::{Bench, frame};

/// Frame sizes around every boundary: minimum, buffer, page, jumbo.
const SIZES: &[usize] = &[
    60, 61, 63, 64, 65, 127, 128, 256, 511, 512, 1023, 1024, 1513, 1514, 1515, 1518, 2047, 2048, 2049, 2304, 2305,
    3000, 3514, 3515, 4095, 4096, 4097, 6000, 8192, 8193, 8942, 8943, 9000, 9014, 9215, 9216,
];

/// Frames of all sizes from 60 to 9216 bytes pass unchanged in both directions, mixed.
pub(crate) fn every_size_both_ways(bench: &mut Bench) {
    let all: Vec<_> = SIZES.iter().enumerate().map(|(number, size)| frame(0, number as u32, *size)).collect();
    bench.start(&all);
    let longest = bench.longest();
    assert!(longest >= 1514, "a port carries at least ordinary Ethernet frames");
    let fitting: Vec<_> = all.iter().filter(|frame| frame.len() <= longest).cloned().collect();
    if fitting.len() < all.len() {
        let notes = bench.started().port.capabilities().notes;
        assert!(!notes.is_empty(), "a port that ends at {longest} bytes says why");
        print_uncaptured(&format!("frames end at {longest} bytes: {}", notes.join("; ")));
    }
    for _ in 0..3 {
        if bench.port.is_none() {
            break;
        }
        bench.assert_exchanges(&fitting);
        if bench.traits.shows_sent_after_stop || !bench.traits.delivers {
            break;
        }
    }
}

/// A frame that can never be sent is taken, dropped and counted. The frames behind it are sent.
pub(crate) fn too_long_is_dropped_and_counted(bench: &mut Bench) {
    bench.start_with(&[], |config| config.mtu = config.mtu.min(1500));
    let mut batch: Batch =
        [frame(0, 0, 64), frame(0, 1, 40_000), frame(0, 2, 64)].iter().map(|f| bench.packet(f)).collect();
    let mut turns = 0;
    while !batch.is_empty() {
        bench.started().tx[0].transmit(&mut batch);
        turns += 1;
        assert!(turns < 10_000_000, "the frame is never taken: {}", bench.diagnostics());
    }
    let counters = bench.started().port.tx_statistics().remove(0);
    assert_eq!((counters.packets, counters.dropped()), (2, 1), "{counters:?}");
    let arrived = bench.take_sent(2);
    assert_eq!(arrived, [frame(0, 0, 64), frame(0, 2, 64)]);
}
