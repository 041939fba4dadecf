//! Fragments with any offsets, lengths, flags and times. The bounds hold, every fragment is accounted for, and a joined
//! packet is valid.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_packet::Pool;
use wirepath_packet::drops::DropReason;
use wirepath_packet::reassembly::{MAX_BYTES, MAX_PACKETS, Reassembled, Reassembler};
use wirepath_wire::{Parser, Tunnels, checksum};

/// Returns a frame with a fragment. `id` also selects the source.
fn fragment(v6: bool, id: u8, units: u16, more: bool, class: u8, len: usize, byte: u8) -> Vec<u8> {
    let mut out = vec![2; 12];
    if v6 {
        out.extend([0x86, 0xdd, 0x60, class << 4, 0, 0]);
        out.extend((len as u16 + 8).to_be_bytes());
        out.extend([44, 64]);
        out.extend([0xfd; 15]);
        out.push(id >> 4);
        out.extend([0xfd; 16]);
        out.extend([253, 0]);
        out.extend((units << 3 | u16::from(more)).to_be_bytes());
        out.extend([0, 0, 0, id & 15]);
    } else {
        out.extend([8, 0, 0x45, class]);
        out.extend((20 + len as u16).to_be_bytes());
        out.extend([0, id & 15]);
        out.extend((units | u16::from(more) << 13).to_be_bytes());
        out.extend([64, 253, 0, 0, 10, 9, 0, id >> 4, 10, 9, 0, 1]);
        let sum = checksum::sum(&out[14..34]).checksum();
        out[24..26].copy_from_slice(&sum.to_be_bytes());
    }
    out.resize(out.len() + len, byte);
    out
}

fuzz_target!(|input: &[u8]| {
    let pool = Pool::new("fuzz", 128).expect("a pool");
    let parser = Parser { tunnels: Tunnels::NONE, ..Parser::default() };
    let (mut reassembler, mut now) = (Reassembler::new(), 0u64);
    let (mut held, mut joined, mut lost) = (0usize, 0usize, 0usize);
    for step in input.chunks_exact(6) {
        let [flags, id, at, length, low, byte] = *step else { continue };
        now += u64::from(flags >> 5) * 300_000_000;
        let units = u16::from(at) * 8 + u16::from(low & 7);
        let (more, class) = (flags & 1 != 0, flags >> 3 & 3);
        let len = usize::from(length) * 8 + usize::from(if more { 0 } else { low >> 5 });
        let frame = fragment(flags & 2 != 0, id, units & 0x1fff, more, class, len, byte);
        let mut packet = pool.take().expect("a buffer");
        assert!(packet.extend_from_slice(&frame, &pool));
        let Ok(layers) = parser.parse_stack(packet.data(), 0, packet.len()) else { continue };
        if !layers.is_fragment() {
            continue;
        }
        match reassembler.insert(&packet, &layers, now, &pool) {
            Reassembled::Held => held += 1,
            Reassembled::Whole(whole) => {
                joined += 1;
                let whole: Vec<u8> = whole.segments().flatten().copied().collect();
                let layers = parser.parse_stack(&whole, 0, whole.len()).expect("a valid packet");
                assert!(!layers.is_fragment() && layers.end() == whole.len() && layers.ip_addresses(&whole).is_some());
            }
            Reassembled::Refused(reason) => assert_ne!(reason, DropReason::NoBuffer),
        }
        lost += reassembler.take_lost().iter().map(|(_, count)| count).sum::<usize>();
        assert!(reassembler.bytes() <= MAX_BYTES + 65_536 && reassembler.len() <= MAX_PACKETS);
        assert!(lost <= held);
        assert_eq!(reassembler.is_empty(), reassembler.len() == 0);
    }
    reassembler.expire(u64::MAX);
    lost += reassembler.take_lost().iter().map(|(_, count)| count).sum::<usize>();
    assert!(reassembler.is_empty() && reassembler.bytes() == 0 && lost <= held);
    // Without joined packets, every held fragment is lost in the end.
    assert!(joined > 0 || lost == held, "{held} held, {lost} lost");
    drop(reassembler);
    assert_eq!(pool.outstanding(), 0);
});
