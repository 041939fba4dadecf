use wirepath_packet::Packet;

use crate::bench::{Bench, assert_same, frame};

/// Packets of several segments, private or shared, are sent completely.
pub(crate) fn go_out_whole(bench: &mut Bench) {
    bench.start(&[]);
    let longest = bench.longest();
    // Sizes of the segments; the last one holds the rest. 24 segments exceed the list of any kernel or NIC.
    let cuts: &[&[usize]] =
        &[&[14], &[14, 20, 8], &[1, 1, 1], &[60, 1000], &[2048, 2048, 2048], &[1500; 5], &[40; 24], &[333, 14, 777, 1]];
    let (mut wanted, mut packets) = (Vec::new(), Vec::<Packet>::new());
    for (number, cut) in cuts.iter().enumerate() {
        let size = (cut.iter().sum::<usize>() + 47 + 10 * number).clamp(60, longest);
        let whole = frame(0, number as u32, size);
        packets.push(segmented(bench, &whole, cut));
        wanted.push(whole);
    }
    // The same payload behind the headers of several packets, as in flooding.
    let whole = frame(1, 100, 1514.min(longest));
    let payload = bench.packet(&whole[42..]).into_shared();
    for _ in 0..3 {
        let head = bench.packet(&whole[..42]);
        packets.push(head.append_shared(&payload).expect("a head without a chain"));
        wanted.push(whole.clone());
    }
    drop(payload);
    packets.reverse();
    bench.send_packets(&mut packets);
    let diagnostics = bench.diagnostics();
    let arrived = bench.take_sent(wanted.len());
    if bench.traits.shows_sent {
        assert_same(&arrived, &wanted, "chains", &diagnostics);
    }
}

/// Returns a packet with segments of the sizes in `cut`, and one with the rest.
fn segmented(bench: &Bench, whole: &[u8], cut: &[usize]) -> Packet {
    let mut rest = whole;
    let mut packet: Option<Packet> = None;
    for size in cut.iter().copied().chain([usize::MAX]) {
        let (now, later) = rest.split_at(size.min(rest.len()));
        rest = later;
        if now.is_empty() {
            continue;
        }
        let segment = bench.packet(now);
        match &mut packet {
            None => packet = Some(segment),
            Some(packet) => packet.append_segment(segment).expect("private segments"),
        }
    }
    packet.expect("at least one byte")
}
