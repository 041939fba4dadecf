//! Send descriptors of an emulated ConnectX: each kind of valid descriptor, and errors that stop a queue.

use wirepath_nic_defs::mlx5::SYNDROME_FLUSHED;
use wirepath_nic_emulator::mem_host::{Connectx, SEND_BUFFER};

/// An Ethernet frame with the local experimental EtherType.
const FRAME: [u8; 64] = {
    let mut frame = [0x5a; 64];
    frame[12] = 0x88;
    frame[13] = 0xb5;
    frame
};

/// Builds a descriptor without index and queue number.
fn descriptor(opcode: u32, segments: u32, rest: &[u32]) -> Vec<u8> {
    [&[opcode, segments, 8, 0], rest].concat().iter().flat_map(|word| word.to_be_bytes()).collect()
}

fn pointer(nic: &Connectx, skip: u32, bytes: u32) -> [u32; 4] {
    [bytes, nic.key, 0, SEND_BUFFER as u32 + skip]
}

/// Bytes of the headers of [`in_vxlan`].
const HEADERS: usize = 14 + 20 + 8 + 8 + 14 + 20 + 20;
/// UDP port of VXLAN behind which the device finds headers.
const VXLAN: u16 = 4789;
/// UDP port of a tunnel that the device does not know.
const OTHER: u16 = 8472;
/// Byte in the descriptor of the checksum flags. The four bytes in front are the offsets of outer L4, outer L3, inner
/// L4 and inner L3 in units of two bytes. The flags of the software parser follow.
const FLAGS: usize = 16 + 4;

/// Returns a descriptor for segmentation of TCP in VXLAN over IPv4, with the headers inline.
fn in_vxlan(nic: &Connectx, port: u16) -> Vec<u8> {
    let ip = |protocol: u8, length: usize| {
        let length = (length as u16).to_be_bytes();
        [&[0x45, 0][..], &length, &[0, 7, 0x40, 0, 64, protocol, 0, 0, 198, 18, 0, 1, 198, 18, 0, 2]].concat()
    };
    let link = [2, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 9, 8, 0];
    let mut headers = [&link[..], &ip(17, HEADERS + 64 - 14), &[0xc3, 0x50], &port.to_be_bytes(), &[0; 4]].concat();
    headers.extend([&[8, 0, 0, 0, 0, 0, 42, 0][..], &link, &ip(6, 40 + 64), &[0, 7, 0, 9, 0, 0, 0, 1]].concat());
    headers.extend([0, 0, 0, 2, 0x50, 0x18, 32, 0, 0, 0, 0, 0]);
    assert_eq!(headers.len(), HEADERS);
    let mut bytes = descriptor(0x0e, 10, &[&[0; 32][..], &pointer(nic, 0, 64)].concat());
    bytes[0x1e..0x1e + HEADERS].copy_from_slice(&headers);
    bytes[0x1c..0x1e].copy_from_slice(&(HEADERS as u16).to_be_bytes());
    bytes[FLAGS..FLAGS + 4].copy_from_slice(&[0x70, 0, 0, 64]);
    if port == OTHER {
        bytes[16..FLAGS + 2].copy_from_slice(&[17, 7, 42, 32, 0x70, 0x20]);
    }
    bytes
}

/// Returns wrong descriptors for segmentation in a tunnel, with a word of the log line of each.
fn bad_in_vxlan(nic: &Connectx) -> Vec<(Vec<u8>, &'static str)> {
    let changed = |port: u16, at: usize, value: u8| {
        let mut bytes = in_vxlan(nic, port);
        bytes[at] = value;
        bytes
    };
    let mut misplaced = in_vxlan(nic, VXLAN);
    misplaced[16..FLAGS + 2].copy_from_slice(&[17, 7, 42, 30, 0x70, 0x20]);
    let mut without_offsets = in_vxlan(nic, OTHER);
    without_offsets[16..FLAGS].fill(0);
    vec![
        (changed(VXLAN, FLAGS, 0x50), "inner L4 checksum"),
        (changed(VXLAN, FLAGS, 0x60), "inner L3 checksum"),
        (changed(VXLAN, FLAGS, 0x30), "outer L3 checksum"),
        (changed(VXLAN, FLAGS, 0xf0), "two L4 checksums"),
        (changed(VXLAN, FLAGS, 0xc0), "not TCP"),
        (changed(VXLAN, FLAGS + 3, 0), "segments of 0"),
        (changed(VXLAN, FLAGS + 2, 8), "the port takes"),
        // One more word of TCP options than the header has, and a header that ends in the VXLAN header.
        (changed(VXLAN, 0x1e + HEADERS - 8, 0x60), "the headers have 108 bytes"),
        (changed(VXLAN, 0x1d, 60), "does not find"),
        (changed(OTHER, 0x1d, 60), "no IP header"),
        (misplaced, "an inner L3 offset of 60"),
        (without_offsets, "does not find"),
        (changed(OTHER, 16, 0), "an outer L4 offset of 0"),
        (changed(OTHER, 17, 8), "an outer L3 offset of 16"),
        (changed(OTHER, 18, 41), "an inner L4 offset of 82"),
        (changed(OTHER, 19, 255), "an inner L3 offset of 510"),
        (changed(OTHER, 19, 7), "an inner L3 offset of 14"),
        (changed(OTHER, FLAGS + 1, 0), "outer UDP is true"),
        (changed(OTHER, FLAGS + 1, 0x30), "outer IPv6 is false"),
        (changed(OTHER, FLAGS + 1, 0x21), "inner IPv6 is false"),
        (changed(OTHER, FLAGS + 1, 0x22), "inner UDP is false"),
    ]
}

/// Returns valid descriptors with the number of packets that each sends.
fn good(nic: &Connectx) -> Vec<(Vec<u8>, usize)> {
    let whole = pointer(nic, 0, 64);
    let plain = [&[0; 4][..], &whole].concat();
    let tagged = [&[0, 0, 0, 0x8000_0123][..], &whole].concat();
    // The inline header of 18 bytes starts behind its length field.
    let mut inline = descriptor(0x0a, 4, &[&[0, 0, 0, 18 << 16][..], &[0; 4], &pointer(nic, 18, 46)].concat());
    inline[0x1e..0x30].copy_from_slice(&FRAME[..18]);
    let several = [&[0; 4][..], &whole, &whole, &whole].concat();
    vec![
        (descriptor(0x0a, 3, &plain), 1),
        (descriptor(0x0a, 3, &tagged), 1),
        (inline, 1),
        (descriptor(0x29, 5, &several), 3),
        (descriptor(0x00, 1, &[]), 0),
        (in_vxlan(nic, VXLAN), 1),
        (in_vxlan(nic, OTHER), 1),
    ]
}

/// Returns invalid descriptors with a word of the log line of each.
fn bad(nic: &Connectx) -> Vec<(Vec<u8>, &'static str)> {
    let whole = pointer(nic, 0, 64);
    let one = |pointer: [u32; 4]| [&[0; 4][..], &pointer].concat();
    let plain = vec![
        (descriptor(0x0a, 3, &one([64, nic.key ^ 0x100, 0, SEND_BUFFER as u32])), "key"),
        (descriptor(0x0a, 3, &one([64, nic.key, 1, SEND_BUFFER as u32])), "address"),
        (descriptor(0x0a, 3, &one([5, nic.key, 0, SEND_BUFFER as u32])), "bytes"),
        (descriptor(0x0a, 0, &one(whole)), "segments"),
        (descriptor(0x0a, 63, &one(whole)), "blocks long"),
        (descriptor(0x1d, 3, &one(whole)), "opcode"),
        (descriptor(0x0e, 3, &one(whole)), "segmentation"),
        (descriptor(0x0a, 3, &[&[0, 0, 0, 999 << 16][..], &whole].concat()), "inline"),
        (descriptor(0x29, 2, &[0; 4]), "without packets"),
    ];
    [plain, bad_in_vxlan(nic)].concat()
}

fn blocks(descriptor: &[u8]) -> u32 {
    (descriptor.len() as u32).div_ceil(64)
}

#[test]
fn every_descriptor_kind_and_queue_error() {
    let mut nic = Connectx::new("");
    nic.receive_everything();
    nic.fill(&FRAME);
    for (descriptor, packets) in good(&nic) {
        nic.post(&descriptor, blocks(&descriptor), true);
        let arrived = nic.arrivals();
        assert_eq!(arrived.len(), packets, "{descriptor:02x?}: {:?}", nic.harness.emulator.log().last());
        assert!(arrived.iter().all(|arrival| arrival.frame.ends_with(&FRAME[12..])));
    }
    assert_eq!(nic.harness.emulator.log().last(), None);
    for (descriptor, word) in bad(&nic) {
        nic.post(&descriptor, blocks(&descriptor), true);
        let said = nic.harness.emulator.log().last().unwrap_or_default();
        assert!(said.contains(word), "{word}: {said}");
        assert_eq!(nic.arrivals(), []);
        nic.restart();
        let (plain, _) = good(&nic).remove(0);
        nic.post(&plain, 1, true);
        assert_eq!(nic.arrivals().len(), 1, "after {word}");
    }
}

#[test]
fn segmentation_in_tunnels_needs_the_capabilities() {
    for (keys, port, word) in [
        ("tunnels = false", OTHER, None),
        ("sw_parser = false", VXLAN, None),
        ("tunnels = false", VXLAN, Some("does not find")),
        ("sw_parser = false", OTHER, Some("does not take")),
    ] {
        let mut nic = Connectx::new(keys);
        nic.receive_everything();
        nic.fill(&FRAME);
        let bytes = in_vxlan(&nic, port);
        nic.post(&bytes, blocks(&bytes), true);
        assert_eq!(nic.arrivals().len(), usize::from(word.is_none()), "{keys}, {port}");
        let said = nic.harness.emulator.log().last().unwrap_or_default();
        assert!(said.contains(word.unwrap_or_default()), "{keys}, {port}: {said}");
    }
}

/// The error is reported although no frame of the burst was accepted.
#[test]
fn a_generator_reports_a_failed_receive_queue() {
    let nic = Connectx::new("[[device.port]]\nlink = 'generator'\n");
    nic.harness.emulator.inject_toml("kind = 'completion-error'\nqueue = 'rx'\ncode = 4").unwrap();
    nic.receive_everything();
    assert!(!nic.harness.emulator.serve(), "nothing is taken");
    // All other posted entries complete as flushed.
    let error_syndromes = nic.error_syndromes(0);
    assert_eq!((error_syndromes.len(), error_syndromes[0]), (64, 4));
    assert!(error_syndromes[1..].iter().all(|syndrome| *syndrome == SYNDROME_FLUSHED), "{error_syndromes:?}");
}

/// Writes seeds for the fuzz target: `WIREPATH_SEEDS=FOLDER cargo test -p wirepath-nic-emulator --test
/// descriptors`.
#[test]
fn seeds_for_the_fuzz_target() {
    let nic = Connectx::new("");
    let record = |kind: u8, bytes: &[u8]| [&[kind][..], &(bytes.len() as u16).to_le_bytes(), bytes].concat();
    let post = |descriptor: &[u8]| record(0, &[&[blocks(descriptor) as u8][..], descriptor].concat());
    let start = record(4, &FRAME);
    let all_good = good(&nic).iter().fold(start.clone(), |seed, (bytes, _)| [seed, post(bytes)].concat());
    let all_bad = bad(&nic).iter().fold(start, |seed, (bytes, _)| [seed, post(bytes), record(3, &[])].concat());
    // A receive descriptor with a wrong key, followed by a packet for it.
    let spoilt = [record(2, &[0, 0, 0, 0, 8, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 1]), all_good.clone()].concat();
    assert!(all_good.len() > 300 && all_bad.len() > 300);
    if let Some(folder) = std::env::var_os("WIREPATH_SEEDS") {
        for (name, seed) in [("good", all_good), ("bad", all_bad), ("spoilt_receive", spoilt)] {
            std::fs::write(std::path::Path::new(&folder).join(name), seed).unwrap();
        }
    }
}
