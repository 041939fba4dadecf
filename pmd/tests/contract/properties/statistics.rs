use crate::bench::{Bench, frames};

/// The queue counters equal the moved packets and bytes, without drops. A queue that tells how many packets wait tells
/// neither too many nor too few.
pub(crate) fn equal_what_was_moved(bench: &mut Bench) {
    let frames = frames(0..500);
    bench.start(&frames);
    // Other frames count too: a kernel interface may receive some.
    let (mut packets, mut bytes) = (0, 0);
    let (mut offered, mut ours) = (0, 0);
    let start = std::time::Instant::now();
    // Received packets, and those that waited then.
    let mut waiting: Vec<(u64, u32)> = Vec::new();
    while ours < frames.len() && start.elapsed() < crate::bench::TIMEOUT {
        while offered < frames.len() && offered - ours < bench.traits.capacity && bench.wire.offer(&frames[offered]) {
            offered += 1;
        }
        waiting.extend(bench.started().rx[0].waiting().map(|waiting| (packets, waiting)));
        for frame in bench.poll() {
            packets += 1;
            bytes += frame.len() as u64;
            ours += usize::from(!bench.traits.delivers || crate::bench::identify(&frame).is_some());
        }
    }
    for (before, waiting) in &waiting {
        assert!(packets - before >= u64::from(*waiting), "{waiting} waited, but {} came", packets - before);
    }
    if !waiting.is_empty() {
        assert!(waiting.iter().any(|(_, waiting)| *waiting > 0), "no packet ever waited");
        // A kernel interface may receive other frames.
        while bench.started().rx[0].waiting() != Some(0) && start.elapsed() < crate::bench::TIMEOUT {
            for frame in bench.poll() {
                packets += 1;
                bytes += frame.len() as u64;
            }
        }
        let rx = &mut bench.started().rx[0];
        rx.sample();
        assert_eq!(rx.counters().waiting.get(), Some(0), "all were received");
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
    assert!(!bench.traits.shows_sent || arrived.len() == frames.len());
}
