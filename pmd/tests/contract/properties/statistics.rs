use crate::bench::{Bench, frames};

/// Queue counters are exactly what was moved: packets and bytes, nothing dropped.
pub(crate) fn equal_what_was_moved(bench: &mut Bench) {
    let frames = frames(0..500);
    bench.start(&frames);
    // Not only test frames count: a kernel interface may hear others.
    let (mut packets, mut bytes) = (0, 0);
    let (mut offered, mut ours) = (0, 0);
    let start = std::time::Instant::now();
    while ours < frames.len() && start.elapsed() < crate::bench::PATIENCE {
        while offered < frames.len() && offered - ours < bench.nature.capacity && bench.rig.offer(&frames[offered]) {
            offered += 1;
        }
        for frame in bench.poll() {
            packets += 1;
            bytes += frame.len() as u64;
            ours += usize::from(!bench.nature.feeds || crate::bench::identify(&frame).is_some());
        }
    }
    let received = bench.started().port.rx_statistics().remove(0);
    assert_eq!((received.packets, received.bytes), (packets, bytes), "{received:?}");
    assert!(received.bursts > 0 && received.bursts <= received.packets, "{received:?}");
    assert_eq!(received.dropped(), 0, "{received:?}");

    bench.send(&frames);
    let sent = bench.started().port.tx_statistics().remove(0);
    let total: usize = frames.iter().map(Vec::len).sum();
    assert_eq!((sent.packets, sent.bytes), (frames.len() as u64, total as u64), "{sent:?}");
    assert_eq!(sent.dropped(), 0, "{sent:?}");
    let arrived = bench.take_sent(frames.len());
    assert!(!bench.nature.shows || arrived.len() == frames.len());
}
