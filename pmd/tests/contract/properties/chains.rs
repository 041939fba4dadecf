use wirepath_pmd::packet::Packet;

use crate::bench::{Bench, assert_same, frame};

/// Packets of several segments, private or shared, go out whole.
pub(crate) fn go_out_whole(bench: &mut Bench) {
    bench.start(&[]);
    let longest = bench.longest();
    // Sizes of the segments; what is left of the frame is in the last one. 24 segments are more than any kernel's or NIC's list.
    let cuts: &[&[usize]] =
        &[&[14], &[14, 20, 8], &[1, 1, 1], &[60, 1000], &[2048, 2048, 2048], &[1500; 5], &[40; 24], &[333, 14, 777, 1]];
    let (mut wanted, mut packets) = (Vec::new(), Vec::<Packet>::new());
    for (number, cut) in cuts.iter().enumerate() {
        let size = (cut.iter().sum::<usize>() + 47 + 10 * number).clamp(60, longest);
        let whole = frame(0, number as u32, size);
        packets.push(segmented(bench, &whole, cut));
        wanted.push(whole);
    }
    // The same payload behind headers of several packets, as flooding does it.
    let whole = frame(1, 100, 1514.min(longest));
    let payload = bench.packet(&whole[42..]).freeze();
    for _ in 0..3 {
        let head = bench.packet(&whole[..42]);
        packets.push(head.attach(&payload).expect("a head without a chain"));
        wanted.push(whole.clone());
    }
    drop(payload);
    packets.reverse();
    bench.send_packets(&mut packets);
    let story = bench.story();
    let arrived = bench.take_sent(wanted.len());
    if bench.nature.shows {
        assert_same(&arrived, &wanted, "chains", &story);
    }
}

/// A packet whose segments have the sizes of `cut`, and the rest.
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
