//! Encapsulation: `encap l2` and `encap l3`.

use std::sync::atomic::{AtomicU16, Ordering};

use wirepath_flow::{Reformat, ReformatKind};
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::{ChecksumStatus, Flags};
use wirepath_packet::{Packet, Pool};
use wirepath_pmd::drivers::sw_offload;
use wirepath_wire::build::{EncapError, OuterHeaders};
use wirepath_wire::checksum::{self, Sum};
use wirepath_wire::tuple::{entropy, source_port};
use wirepath_wire::{HeaderOffsets, L3Type, ethernet, ipv4};

use super::{CHECKSUMS, Headers, trim_end, update_tx_layers, vlan_tags};

/// An `encap` action: a header template with a few fields that are filled for each packet.
#[derive(Debug)]
pub(super) struct Encap {
    headers: Box<OuterHeaders>,
    /// Next IPv4 identification, if the header allows fragmentation.
    next_id: Option<AtomicU16>,
    /// True if the packet keeps its own Ethernet header as inner header.
    l2: bool,
    /// IP version of the payload according to the tunnel header.
    carries: Option<u8>,
}

impl Encap {
    /// Makes the template. Returns `None` if `reformat` is not an encapsulation.
    pub(super) fn new(reformat: &Reformat) -> Option<Self> {
        let layout = reformat.layout()?;
        let (bytes, l3) = (reformat.bytes(), usize::from(layout.l3));
        let headers = OuterHeaders::from_bytes(bytes, l3, layout.l4.into(), layout.ip_version)?;
        let next_id = match bytes.get(l3..).and_then(|b| b.first_chunk::<{ ipv4::HEADER_LEN }>()) {
            Some(h) if headers.is_ipv4() => {
                let atomic = u16::from_be_bytes([h[6], h[7]]) & ipv4::DONT_FRAGMENT != 0;
                (!atomic).then(|| AtomicU16::new(u16::from_be_bytes([h[4], h[5]])))
            }
            _ => None,
        };
        let l2 = reformat.kind() == ReformatKind::L2ToL2Tunnel;
        Some(Self { headers: Box::new(headers), next_id, l2, carries: reformat.carried_version() })
    }

    pub(super) fn heap_bytes(&self) -> usize {
        size_of_val(self) + size_of_val(&*self.headers)
    }

    pub(super) fn run(
        &self,
        packet: &mut Packet,
        headers: &mut Headers,
        pool: Option<&Pool>,
    ) -> Result<(), DropReason> {
        let template = &*self.headers;
        let source = match (template.udp_offset(), template.source_port()) {
            (Some(_), None) => source_port(entropy(packet.data(), &headers.outer.unwrap_or_default())),
            (_, fixed) => fixed.unwrap_or(0),
        };
        let taken = if self.l2 { self.take_frame(packet, headers)? } else { self.take_packet(packet, headers, pool)? };
        let segmented = packet.flags().contains(Flags::TX_SEGMENT);
        let mut fields = template.fields(packet.len(), source);
        // For a TSO packet, the NIC computes the sum of each segment.
        fields.partial_sum = segmented;
        if template.needs_sum() && !segmented {
            fields.inner_sum = sum_of(packet);
        }
        fields.identification = self.next_id.as_ref().map(|next| next.fetch_add(1, Ordering::Relaxed));
        let room = packet.prepend_slice(template.len()).ok_or(DropReason::NoHeadroom)?;
        template.emit(room, &fields).map_err(|error| match error {
            EncapError::TooLong => DropReason::TooLong,
            _ => DropReason::Truncated,
        })?;
        packet.set_checksum_status(ChecksumStatus::NONE);
        let requests = match (template.is_ipv4(), template.needs_sum()) {
            (true, true) => Flags::TX_OUTER_L3_CHECKSUM.with(Flags::TX_OUTER_L4_CHECKSUM),
            (_, true) => Flags::TX_OUTER_L4_CHECKSUM,
            (true, _) => Flags::TX_OUTER_L3_CHECKSUM,
            _ => Flags::NONE,
        };
        let flags = packet.flags().without(Flags::LATER_FRAGMENT);
        packet.set_flags(if segmented { flags.with(requests) } else { flags });
        let by = template.len() as i32 - taken as i32;
        // An Ethernet header with tags may be longer than the labels that replace it. Then its start lies
        // before the frame and is not used.
        headers.inner = headers.outer.take().and_then(|layers| layers.moved(by).or_else(|| layers.retagged(by)));
        if segmented {
            self.note_segmented(packet, headers);
        } else {
            packet.set_header_lengths(Default::default());
        }
        Ok(())
    }

    /// Prepares the frame as tunnel payload: completes its offloads and inserts a stripped tag. Returns the
    /// number of removed bytes, which is 0.
    fn take_frame(&self, packet: &mut Packet, headers: &mut Headers) -> Result<usize, DropReason> {
        if packet.data().len() < ethernet::HEADER_LEN {
            return Err(DropReason::TooShort);
        }
        complete_offloads(packet, headers)?;
        vlan_tags::write_stripped_tag(packet, headers)?;
        Ok(0)
    }

    /// Removes everything in front of the IP packet. Returns the number of removed bytes.
    fn take_packet(&self, packet: &mut Packet, headers: &Headers, pool: Option<&Pool>) -> Result<usize, DropReason> {
        let layers = headers.outer.filter(HeaderOffsets::is_ip).ok_or(DropReason::RuleMismatch)?;
        let version = if layers.l3_type() == L3Type::Ipv4 { 4 } else { 6 };
        if self.carries.is_some_and(|carries| carries != version) {
            return Err(DropReason::RuleMismatch);
        }
        packet.clear_vlan();
        complete_offloads(packet, headers)?;
        trim_end(packet, layers.end(), pool)?;
        if !packet.trim_front(layers.l3()) {
            return Err(DropReason::Truncated);
        }
        Ok(layers.l3())
    }

    #[cold]
    fn note_segmented(&self, packet: &mut Packet, headers: &Headers) {
        use wirepath_packet::PtypeL3 as Kind;
        update_tx_layers(packet, headers);
        let mut layers = packet.header_lengths();
        let outer = match (self.headers.is_ipv4(), self.headers.is_ipv6()) {
            (true, _) => Kind::Ipv4,
            (_, true) => Kind::Ipv6,
            _ => Kind::Other,
        };
        // The rule language allows at most 192 bytes.
        layers.outer_len = self.headers.len() as u8;
        layers.outer_l2_len = self.headers.l3() as u8;
        if !self.l2 {
            layers.l2_len = 0;
        }
        packet.set_header_lengths(layers.with_types(layers.l3(), layers.l4(), outer));
    }
}

/// Completes pending checksum offloads in software, so that the frame inside the tunnel is final.
fn complete_offloads(packet: &mut Packet, headers: &Headers) -> Result<(), DropReason> {
    let flags = packet.flags();
    if flags.contains(Flags::TX_SEGMENT) {
        // The metadata can describe only one tunnel.
        return if headers.inner.is_some() { Err(DropReason::KernelOffload) } else { Ok(()) };
    }
    if !flags.intersects(CHECKSUMS) {
        return Ok(());
    }
    let stripped = (packet.vlan(), flags.contains(Flags::VLAN_SERVICE));
    packet.clear_vlan();
    sw_offload::apply(packet)?;
    if let (Some(tci), service) = stripped {
        packet.set_vlan(tci);
        if service {
            packet.set_flags(packet.flags().with(Flags::VLAN_SERVICE));
        }
    }
    Ok(())
}

/// Returns the checksum over all bytes of the packet.
fn sum_of(packet: &Packet) -> Sum {
    let (mut sum, mut at) = (Sum::ZERO, 0);
    for segment in packet.segments() {
        sum = sum.and_at(at, checksum::sum(segment));
        at += segment.len();
    }
    sum
}
