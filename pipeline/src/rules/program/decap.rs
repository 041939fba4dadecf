//! Out of a tunnel: `decap l2` and `decap l3`.

use wirepath_pmd::drops::DropReason;
use wirepath_pmd::flow::{Fact, FieldSet, Key, Reformat, tunnel};
use wirepath_pmd::packet::offload::{Flags, Verdicts};
use wirepath_pmd::packet::{Packet, Pool};
use wirepath_wire::{L3, L4, Layers, Parsed, Parser, ethernet};

use super::{Headers, OUTER_CHECKSUMS, cut, note_layers, reach};
use crate::tunnel::ecn;

/// Bytes that are made contiguous: where the parser did not come to the inner headers, and of what comes out.
const HEADERS: usize = 256;

/// A `decap` action.
#[derive(Debug)]
pub(super) struct Decap {
    /// The new Ethernet header and the IP version that it announces; `None` for `decap l2`.
    header: Option<(Box<[u8]>, u8)>,
    /// Value of [`Fact::Tunnel`] of the packets.
    tunnel: u8,
}

impl Decap {
    pub(super) fn new(reformat: &Reformat, set: &FieldSet) -> Self {
        let version = reformat.carried_version();
        Self {
            header: version.map(|version| (reformat.bytes().into(), version)),
            tunnel: set.get(Key::fact(0, Fact::Tunnel)).map_or(tunnel::NONE, |bits| bits.value as u8),
        }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        size_of_val(self) + self.header.as_ref().map_or(0, |(bytes, _)| bytes.len())
    }

    pub(super) fn run(
        &self,
        packet: &mut Packet,
        headers: &mut Headers,
        parsed: &Parsed,
        pool: Option<&Pool>,
    ) -> Result<(), DropReason> {
        let outer = headers.outer.ok_or(DropReason::RuleMismatch)?;
        if outer.is_fragment() {
            return Err(DropReason::OuterFragment);
        }
        let verdicts = packet.verdicts();
        if verdicts.contains(Verdicts::OUTER_L3_BAD) {
            return Err(DropReason::BadChecksum);
        }
        if verdicts.contains(Verdicts::OUTER_L4_BAD) {
            return Err(DropReason::BadL4Checksum);
        }
        if headers.inner.is_none() && packet.is_chain() {
            reach(packet, packet.len().min(HEADERS), pool)?;
        }
        let class = traffic_class(packet.data(), &outer);
        match &self.header {
            None => self.to_frame(packet, headers, &outer, pool)?,
            Some((header, version)) => to_packet(packet, headers, parsed, header, *version, pool)?,
        }
        if packet.is_chain() {
            // As much as can be had; who needs more says so.
            packet.pull_up(packet.len().min(HEADERS));
        }
        let least = self.header.as_ref().map_or(ethernet::HEADER_LEN, |(header, _)| header.len());
        if packet.data().len() < least {
            return Err(DropReason::Truncated);
        }
        // What the device said of the inner headers, it said only if it looked into the tunnel.
        let looked = Verdicts::OUTER_L3_GOOD.with(Verdicts::OUTER_L4_GOOD);
        packet.set_verdicts(if verdicts.intersects(looked) { verdicts.without(looked) } else { Verdicts::NONE });
        packet.set_flags(packet.flags().without(OUTER_CHECKSUMS).without(Flags::LATER_FRAGMENT));
        packet.clear_vlan();
        note_layers(packet, headers);
        if merge_ecn(class, packet.data_mut(), headers.outer.as_ref()) { Ok(()) } else { Err(DropReason::BadEcn) }
    }

    /// Leaves the inner Ethernet frame, which need not carry anything that is looked into.
    fn to_frame(
        &self,
        packet: &mut Packet,
        headers: &mut Headers,
        outer: &Layers,
        pool: Option<&Pool>,
    ) -> Result<(), DropReason> {
        let frame = packet.data();
        // A datagram may end before its packet.
        let end = outer.udp_end(frame).unwrap_or(outer.end());
        let start = match headers.inner {
            Some(inner) if inner.l3() < inner.l2() + ethernet::HEADER_LEN => return Err(DropReason::RuleMismatch),
            Some(inner) => inner.l2(),
            None => self.inside(frame, outer).ok_or(DropReason::BadTunnelHeader)?,
        };
        if end < start + ethernet::HEADER_LEN {
            return Err(DropReason::TooShort);
        }
        cut(packet, end, pool)?;
        if !packet.trim_front(start) {
            return Err(DropReason::Truncated);
        }
        headers.outer = headers.inner.take().and_then(|inner| inner.moved(-i32::try_from(start).ok()?));
        Ok(())
    }

    /// Start of what is in the tunnel, where the parser did not get that far.
    #[cold]
    fn inside(&self, frame: &[u8], outer: &Layers) -> Option<usize> {
        let (l4, udp) = (outer.l4(), outer.l4_kind() == L4::Udp);
        match self.tunnel {
            tunnel::VXLAN | tunnel::VXLAN_GPE if udp => Some(l4 + 16),
            tunnel::GENEVE if udp => Some(l4 + 16 + usize::from(frame.get(l4 + 8)? & 0x3f) * 4),
            tunnel::GRE => {
                let flags = u16::from_be_bytes(*frame.get(l4..)?.first_chunk()?);
                // Other versions, and flags for which a receiver discards the packet (RFC 2784 section 2.3), say nothing of what follows.
                let optional = [0x8000, 0x2000, 0x1000].into_iter().filter(|bit| flags & bit != 0).count();
                (flags & 0x4c07 == 0).then_some(l4 + 4 + optional * 4)
            }
            // Label stacks do not tell what they carry; IP in IP carries no frame.
            _ => None,
        }
    }
}

/// Leaves the inner IP packet behind a new Ethernet header.
fn to_packet(
    packet: &mut Packet,
    headers: &mut Headers,
    parsed: &Parsed,
    header: &[u8],
    version: u8,
    pool: Option<&Pool>,
) -> Result<(), DropReason> {
    let Some(inner) = headers.inner.take() else {
        return Err(parsed.tunnel_error().map_or(DropReason::RuleMismatch, DropReason::from));
    };
    if inner.l3_kind() != if version == 4 { L3::Ipv4 } else { L3::Ipv6 } {
        return Err(DropReason::RuleMismatch);
    }
    cut(packet, inner.end(), pool)?;
    // What comes off is longer than what comes on: at least an Ethernet and an IP header.
    let start = inner.l3().checked_sub(header.len()).ok_or(DropReason::RuleMismatch)?;
    if !packet.trim_front(start) {
        return Err(DropReason::Truncated);
    }
    packet.data_mut().get_mut(..header.len()).ok_or(DropReason::Truncated)?.copy_from_slice(header);
    headers.outer = if inner.has_link() {
        // Behind labels, a whole frame: its Ethernet header and tags are gone, and what is known of them is of no use.
        let parser = Parser { verify_ipv4: false, ..Parser::default() };
        parser.layers(packet.data(), 0, packet.len()).ok()
    } else {
        i32::try_from(start).ok().and_then(|start| inner.moved(-start))
    };
    Ok(())
}

/// Merges the outer congestion mark into the IP header that came out (RFC 6040 section 4.2). `false`: the packet must be dropped.
#[inline]
fn merge_ecn(class: u8, frame: &mut [u8], layers: Option<&Layers>) -> bool {
    // Not-ECT and ECT(0) outside change nothing; ECT(1) and CE are the odd ones.
    if class & 1 == 0 { true } else { merge_mark(class, frame, layers) }
}

#[cold]
fn merge_mark(class: u8, frame: &mut [u8], layers: Option<&Layers>) -> bool {
    match layers.filter(|layers| layers.is_ip()) {
        Some(layers) => match frame.get_mut(layers.l3()..) {
            Some(packet) => ecn::apply_to_packet(class, packet),
            None => true,
        },
        // Not parsed: perhaps its headers were in another buffer, or its addresses are all that is in order.
        None => ecn::apply(class, frame),
    }
}

/// DSCP and ECN of a stack's IP header; 0 without one.
fn traffic_class(frame: &[u8], layers: &Layers) -> u8 {
    match (layers.ipv4_header(frame), layers.ipv6_header(frame)) {
        (Some(h), _) => h[1],
        (_, Some(h)) => h[0] << 4 | h[1] >> 4,
        _ => 0,
    }
}
