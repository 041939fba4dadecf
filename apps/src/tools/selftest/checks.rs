//! Tests of frames and offloads. Each test exchanges frames and returns what it has seen, or the first difference.

use std::collections::BTreeMap;

use wirepath_packet::offload::{ChecksumStatus, Flags};
use wirepath_packet::{Packet, PtypeL3, PtypeL4};
use wirepath_pmd::port::{Offloads, VlanTags};
use wirepath_wire::checksum::State;
use wirepath_wire::checksum_offload::{self, ChecksumSpan};
use wirepath_wire::segment::Segmenter;
use wirepath_wire::{IpProtocol, L4Type, Parser, Tunnels, parse};

use super::bench::{Bench, Received};
use super::frames::{self, L4, Values};
use super::{Outcome, Verdict, hex};

/// Frames of a test that repeats one frame.
const REPEATS: usize = 256;
/// Flows of the RSS test.
const FLOWS: usize = 512;

/// Frames of every interesting length arrive unchanged and in order, alone and in bursts.
pub(super) fn frames(bench: &mut Bench) -> Outcome {
    let longest = usize::from(bench.mtu) + 14;
    let mut lengths: Vec<usize> = (60..=130).collect();
    for step in [256, 512, 1024, 1500, 1514, 2048, 4096, 8192, longest] {
        lengths.extend((step - 3..=step + 3).filter(|len| *len <= longest));
    }
    lengths.sort_unstable();
    lengths.dedup();
    let mut total = 0;
    for (from, direction) in bench.directions() {
        let to = bench.address_of_receiver(from);
        let each: Vec<_> = lengths.iter().map(|len| frames::opaque(to, *len, *len as u64)).collect();
        let same: Vec<_> = (0..REPEATS).map(|i| frames::opaque(to, 60 + i % 5, 1000 + i as u64)).collect();
        for sent in [each, same] {
            let received = bench.exchange_frames(from, &sent, sent.len())?;
            compare_in_order(&sent, &received).map_err(|error| format!("{direction}{error}"))?;
            total += sent.len();
        }
    }
    Ok(Verdict::Pass(format!("{total} frames of 60 to {longest} bytes, equal and in order")))
}

/// Compares received frames with the sent ones. They must be equal and in order.
fn compare_in_order(sent: &[Vec<u8>], received: &[Received]) -> Result<(), String> {
    for (i, (sent, got)) in sent.iter().zip(received).enumerate() {
        if *sent != got.bytes {
            return Err(format!("frame {i} of {} bytes: {}", sent.len(), difference(sent, &got.bytes)));
        }
    }
    match received.len() as i64 - sent.len() as i64 {
        0 => Ok(()),
        n if n > 0 => Err(format!("{n} frames more than the {} sent arrived", sent.len())),
        n => Err(format!("{} of {} frames were lost", -n, sent.len())),
    }
}

/// Describes the first difference of two frames.
pub(super) fn difference(expected: &[u8], got: &[u8]) -> String {
    let at = expected.iter().zip(got).position(|(a, b)| a != b).unwrap_or(expected.len().min(got.len()));
    format!(
        "differs from byte {at}; expected {} bytes {}, received {} bytes {}",
        expected.len(),
        hex(expected),
        got.len(),
        hex(got)
    )
}

/// Requests the transmit checksums of a plain packet: the fields hold what the device expects.
fn request_checksums(mut packet: Packet, v6: bool, l4: L4) -> Packet {
    let head = packet.data().to_vec();
    if let Ok(parsed) = Parser::default().parse_chain(&head, packet.len()) {
        let layers = *parsed.outer();
        let (start, protocol) = (layers.l4(), if l4 == L4::Tcp { IpProtocol::TCP } else { IpProtocol::UDP });
        let partial = checksum_offload::pseudo(&head, &layers, protocol, layers.end() - start);
        let field = start + if l4 == L4::Tcp { 16 } else { 6 };
        if let (Some(sum), Some(bytes)) = (partial, packet.data_mut().get_mut(field..field + 2)) {
            bytes.copy_from_slice(&sum.fold().to_be_bytes());
        }
        let mut lengths = packet.header_lengths();
        lengths.l2_len = layers.l3() as u8;
        lengths.l3_len = (layers.l4() - layers.l3()) as u8;
        lengths.l4_len = (layers.payload() - layers.l4()) as u8;
        let l3 = if v6 { PtypeL3::Ipv6 } else { PtypeL3::Ipv4 };
        let l4 = if l4 == L4::Tcp { PtypeL4::Tcp } else { PtypeL4::Udp };
        packet.set_header_lengths(lengths.with_types(l3, l4, PtypeL3::Other));
    }
    if !v6 && let Some(sum) = packet.data_mut().get_mut(24..26) {
        sum.fill(0xff);
    }
    packet.set_flags(Flags::TX_L3_CHECKSUM.with(Flags::TX_L4_CHECKSUM));
    packet
}

const KINDS: [(bool, L4); 4] = [(false, L4::Tcp), (false, L4::Udp), (true, L4::Tcp), (true, L4::Udp)];

/// The port computes requested checksums of sent packets.
pub(super) fn tx_checksums(bench: &mut Bench) -> Outcome {
    let largest = usize::from(bench.mtu) - 60;
    let mut total = 0;
    for (v6, l4) in KINDS {
        let to = bench.address_of_receiver(0);
        let frame = |payload| frames::plain(to, v6, l4, Values { n: 3, payload });
        let sent: Vec<_> = [18, 19, 100, 1001, 1400, largest].map(frame).to_vec();
        let packets = sent.iter().map(|frame| Ok(request_checksums(bench.packet(frame)?, v6, l4)));
        let packets = packets.collect::<Result<_, String>>()?;
        let received = bench.exchange(0, packets, sent.len())?;
        compare_in_order(&sent, &received)?;
        total += sent.len();
    }
    let offloads = bench.capabilities().offloads;
    let by = if offloads.contains(Offloads::TX_L4_CHECKSUM) { "the device" } else { "the driver" };
    Ok(Verdict::Pass(format!("{total} packets of TCP and UDP over IPv4 and IPv6, computed by {by}")))
}

/// The port reports correct checksums as good, if it checks them, and never reports a wrong one as good.
pub(super) fn rx_checksums(bench: &mut Bench) -> Outcome {
    let offloads = bench.capabilities().offloads;
    let (checks_l3, checks_l4) =
        (offloads.contains(Offloads::RX_L3_CHECKSUM), offloads.contains(Offloads::RX_L4_CHECKSUM));
    let to = bench.address_of_receiver(0);
    for (v6, l4) in KINDS {
        let good = frames::plain(to, v6, l4, Values { n: 4, payload: 200 });
        let (mut bad_l4, mut bad_l3) = (good.clone(), good.clone());
        if let Some(last) = bad_l4.last_mut() {
            *last ^= 0x10;
        }
        // A changed identification makes the header checksum wrong.
        bad_l3[18] ^= 0x10;
        let mut sent = vec![("correct", good), ("wrong transport checksum", bad_l4)];
        if !v6 {
            sent.push(("wrong IPv4 header checksum", bad_l3));
        }
        for (what, frame) in sent {
            let sent = vec![frame; 32];
            let received = bench.exchange_frames(0, &sent, sent.len())?;
            compare_in_order(&sent, &received)?;
            for got in &received {
                let (is_l3_wrong, is_l4_wrong) = (what.contains("IPv4"), what.contains("transport"));
                let status = got.status;
                let wrong = match () {
                    () if is_l4_wrong => status.contains(ChecksumStatus::L4_GOOD),
                    () if is_l3_wrong => status.contains(ChecksumStatus::L3_GOOD),
                    () => {
                        status.intersects(ChecksumStatus::L3_BAD.with(ChecksumStatus::L4_BAD))
                            || (checks_l4 && !status.contains(ChecksumStatus::L4_GOOD))
                            || (checks_l3 && !v6 && !status.contains(ChecksumStatus::L3_GOOD))
                    }
                };
                if wrong {
                    return Err(format!("{what}: the port reports {status:?} for {}", hex(&got.bytes)));
                }
            }
        }
    }
    match (checks_l3, checks_l4) {
        (false, false) => Ok(Verdict::Pass("the port checks none, and reports none as good".to_owned())),
        _ => Ok(Verdict::Pass("correct ones are good, wrong ones are not".to_owned())),
    }
}

/// VLAN tags arrive, also those that the device inserts or strips.
pub(super) fn vlan(bench: &mut Bench) -> Outcome {
    if bench.capabilities().vlan_tags == VlanTags::Lost {
        return Ok(Verdict::Skip("the kernel or the device strips tags, which do not reach this port".to_owned()));
    }
    let to = bench.address_of_receiver(0);
    let mut sent = Vec::new();
    for tag in [[0x81, 0x00, 0x00, 0x01], [0x81, 0x00, 0xef, 0xfe], [0x88, 0xa8, 0x20, 0x07]] {
        let mut frame = frames::plain(to, false, L4::Udp, Values { n: 5, payload: 100 });
        frame.splice(12..12, tag);
        sent.push(frame.clone());
        frame.splice(12..12, [0x88, 0xa8, 0x01, 0x23]);
        sent.push(frame);
    }
    let mut received = bench.exchange_frames(0, &sent, sent.len())?;
    let mut priority = "";
    if received.len() == sent.len() && restore_priority(&sent, &mut received) {
        priority = "; the device does not report the priority of stripped tags";
    }
    compare_in_order(&sent, &received).map_err(|error| format!("tags in the frame: {error}"))?;
    let untagged = frames::plain(to, false, L4::Udp, Values { n: 6, payload: 100 });
    let packets = [1u16, 0xb123, 0x0ffe].map(|tci| {
        bench.packet(&untagged).map(|mut packet| {
            packet.set_vlan(tci);
            packet
        })
    });
    let sent: Vec<_> = [1u16, 0xb123, 0x0ffe]
        .map(|tci| {
            let mut frame = untagged.clone();
            frame.splice(12..12, [0x81, 0x00, (tci >> 8) as u8, tci as u8]);
            frame
        })
        .to_vec();
    let mut received = bench.exchange(0, packets.into_iter().collect::<Result<_, _>>()?, sent.len())?;
    restore_priority(&sent, &mut received);
    compare_in_order(&sent, &received).map_err(|error| format!("inserted tags: {error}"))?;
    let offloads = bench.capabilities().offloads;
    let by = |offload, yes, no| if offloads.contains(offload) { yes } else { no };
    Ok(Verdict::Pass(format!(
        "one and two tags; {}, {}{priority}",
        by(Offloads::TX_VLAN_INSERT, "inserted by the device", "inserted by the driver"),
        by(Offloads::RX_VLAN_STRIP, "stripped by the device", "not stripped")
    )))
}

/// Gives stripped tags the priority and DEI bits of the sent ones, if the device has reported none (MANA reports 12
/// bits: linux drivers/net/ethernet/microsoft/mana, `rx_vlan_id`). Returns true if a frame has changed.
fn restore_priority(sent: &[Vec<u8>], received: &mut [Received]) -> bool {
    let mut changed = false;
    for (sent, got) in sent.iter().zip(received) {
        if let (Some(sent), Some(byte)) = (sent.get(14), got.bytes.get_mut(14))
            && got.stripped_tag
            && *byte & 0xf0 == 0
            && sent & 0xf0 != 0
        {
            *byte |= sent & 0xf0;
            changed = true;
        }
    }
    changed
}

/// Large TCP packets leave as segments that equal those of a sender with a small MTU.
pub(super) fn tso(bench: &mut Bench) -> Outcome {
    if !bench.capabilities().offloads.contains(Offloads::TX_SEGMENT) {
        return Ok(Verdict::Skip("the port does not segment".to_owned()));
    }
    let mss = 1400u16;
    let mut total = 0;
    for (v6, payload) in [(false, 3000), (true, 3000), (false, 20_000), (true, 20_000), (false, 60_000), (true, 60_000)]
    {
        let to = bench.address_of_receiver(0);
        let whole = frames::plain(to, v6, L4::Tcp, Values { n: 7, payload });
        let mut packet = request_checksums(bench.packet(&whole)?, v6, L4::Tcp);
        packet.set_flags(packet.flags().with(Flags::TX_SEGMENT));
        packet.set_mss(mss);
        let expected = segments(&whole, mss)?;
        let received = bench.exchange(0, vec![packet], expected.len())?;
        if received.len() != expected.len() {
            return Err(format!("{payload} bytes: {} of {} segments arrived", received.len(), expected.len()));
        }
        for (i, (expected, got)) in expected.iter().zip(&received).enumerate() {
            verify_checksums(&got.bytes).map_err(|error| format!("segment {i}: {error}"))?;
            // The device chooses the identification.
            let (a, b) = (without_identification(expected), without_identification(&got.bytes));
            if a != b {
                return Err(format!("segment {i} of {payload} bytes: {}", difference(&a, &b)));
            }
        }
        total += expected.len();
    }
    Ok(Verdict::Pass(format!("{total} segments of packets of up to 60000 bytes")))
}

fn segments(whole: &[u8], mss: u16) -> Result<Vec<Vec<u8>>, String> {
    let parsed = parse(whole).map_err(|error| error.to_string())?;
    let mut segmenter = Segmenter::new(whole, &parsed, parsed.outer().l4(), mss).map_err(|error| error.to_string())?;
    let mut all = Vec::new();
    let mut head = vec![0; segmenter.header_len()];
    while let Some(segment) = segmenter.next_into(&mut head, whole) {
        let segment = segment.map_err(|error| error.to_string())?;
        all.push([&head[..segment.header_len], &whole[segment.payload]].concat());
    }
    Ok(all)
}

/// Clears IPv4 identification and header checksum of the outer header.
pub(super) fn without_identification(frame: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    if let Ok(parsed) = parse(&frame) {
        let at = parsed.outer().l3();
        if frame.get(at).is_some_and(|byte| byte >> 4 == 4) && frame.len() > at + 12 {
            frame[at + 4..at + 6].fill(0);
            frame[at + 10..at + 12].fill(0);
        }
    }
    frame
}

/// Checks all checksums of a frame.
pub(super) fn verify_checksums(frame: &[u8]) -> Result<(), String> {
    let parser = Parser { tunnels: Tunnels::default(), verify_ipv4: true };
    let parsed = parser.parse_chain(frame, frame.len()).map_err(|error| format!("{error}: {}", hex(frame)))?;
    for layers in [Some(parsed.outer()), parsed.inner()].into_iter().flatten() {
        if matches!(layers.l4_type(), L4Type::Tcp | L4Type::Udp)
            && let Some(span) = ChecksumSpan::of(frame, layers)
            && !matches!(span.state(frame), State::Good | State::Absent)
        {
            return Err(format!("wrong transport checksum: {}", hex(frame)));
        }
    }
    Ok(())
}

/// Flows spread over all receive queues, and each flow keeps its queue and its hash.
pub(super) fn rss(bench: &mut Bench) -> Outcome {
    let queues = bench.port().rx.len();
    if queues < 2 {
        return Ok(Verdict::Skip("the port has one receive queue".to_owned()));
    }
    let to = bench.address_of_receiver(0);
    let mut flows = Vec::new();
    for i in 0..FLOWS {
        let (v6, l4) = KINDS[i % KINDS.len()];
        let mut frame = frames::plain(to, v6, l4, Values { n: 8, payload: 32 });
        // The source port distinguishes the flows. The checksum stays correct, since the payload changes in return.
        let ports = if v6 { 54 } else { 34 };
        let old = u16::from_be_bytes([frame[ports], frame[ports + 1]]);
        let new = 0x4000 + i as u16;
        frame[ports..ports + 2].copy_from_slice(&new.to_be_bytes());
        let end = frame.len();
        let word = u16::from_be_bytes([frame[end - 2], frame[end - 1]]);
        let sum = i64::from(word) + i64::from(old) - i64::from(new);
        let word = sum.rem_euclid(0xffff) as u16;
        frame[end - 2..].copy_from_slice(&word.to_be_bytes());
        flows.push(frame);
    }
    let twice: Vec<_> = flows.iter().chain(&flows).cloned().collect();
    let received = bench.exchange_frames(0, &twice, twice.len())?;
    if received.len() != twice.len() {
        return Err(format!("{} of {} frames arrived", received.len(), twice.len()));
    }
    let (mut known, mut loads) = (BTreeMap::new(), vec![0usize; queues]);
    for got in &received {
        loads[got.queue] += 1;
        let first = known.entry(&got.bytes).or_insert((got.queue, got.hash));
        if *first != (got.queue, got.hash) {
            return Err(format!(
                "one flow came to queues {} and {}, hashes {:?} and {:?}: {}",
                first.0,
                got.queue,
                first.1,
                got.hash,
                hex(&got.bytes)
            ));
        }
    }
    if known.len() != FLOWS {
        return Err(format!("{} of {FLOWS} flows arrived unchanged", known.len()));
    }
    let mean = received.len() / queues;
    if loads.iter().any(|load| *load < mean / 3 || *load > 3 * mean) {
        return Err(format!("{FLOWS} flows spread unevenly over the queues: {loads:?} frames"));
    }
    let hash = if received[0].hash.is_some() { "with hashes" } else { "without hashes" };
    Ok(Verdict::Pass(format!("{FLOWS} flows over {queues} queues: {loads:?} frames, {hash}")))
}
