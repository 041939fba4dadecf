use wirepath_packet::Batch;
use wirepath_packet::gro::Gro;
use wirepath_pmd::port::Offloads;

use crate::bench::{Bench, assert_same, frame};

/// Datagrams of one superframe.
const DATAGRAMS: u32 = 20;

/// Joined datagrams leave as they were before, without checksum or with it.
pub(crate) fn become_the_datagrams_that_they_were(bench: &mut Bench) {
    bench.start(&[]);
    bench.started().port.segment_superframes();
    // The kernel takes superframes whole, and the wire would show them so. It takes none without checksum.
    let is_whole = bench.started().port.capabilities().offloads.contains(Offloads::RX_SUPERFRAMES);
    let flows = if is_whole { 0..1 } else { 0..2 };
    let (mut wanted, mut packets) = (Vec::new(), Vec::new());
    for flow in flows {
        // The last one is shorter.
        let frames: Vec<_> =
            (0..DATAGRAMS).map(|i| frame(flow, i, if i + 1 == DATAGRAMS { 200 } else { 1000 })).collect();
        let mut batch: Batch = frames.iter().map(|frame| bench.packet(frame)).collect();
        Gro::new().join(&mut batch, 0);
        assert_eq!(batch.len(), 1, "all datagrams are joined");
        batch.drain_front(1, |packet| packets.push(packet));
        wanted.extend(frames);
    }
    packets.reverse();
    bench.send_packets(&mut packets);
    let diagnostics = bench.diagnostics();
    let arrived = bench.take_sent(wanted.len());
    if bench.traits.shows_sent {
        assert_same(&arrived, &wanted, "superframes", &diagnostics);
    }
}
