//! Encapsulation: `encap l2` and `encap l3`.

use std::sync::atomic::{AtomicU16, Ordering};

use wirepath_flow::{Reformat, ReformatKind};
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::{ChecksumStatus, Flags};
use wirepath_packet::{Packet, Pool};
use wirepath_pmd::drivers::sw_offload;
use wirepath_wire::checksum::{self, Sum};
use wirepath_wire::tuple::{entropy, source_port};
use wirepath_wire::{HeaderOffsets, IpProtocol, L3Type, ethernet, ipv4, ipv6, udp};

use super::{CHECKSUMS, Headers, trim_end, update_tx_layers, vlan_tags};

/// An `encap` action: a header template with a few fields that are filled for each packet.
#[derive(Debug)]
pub(super) struct Encap {
    /// The template. Lengths, the IPv4 checksum and the other filled fields are zero.
    bytes: Box<[u8]>,
    l3: u8,
    l4: u8,
    ip: Ip,
    udp: Option<Udp>,
    /// True if the packet keeps its own Ethernet header as inner header.
    l2: bool,
    /// IP version of the payload according to the tunnel header.
    carries: Option<u8>,
}

#[derive(Debug)]
enum Ip {
    None,
    V4 {
        /// Sum of the header in the template.
        sum: Sum,
        /// Next identification, if the header allows fragmentation.
        next_id: Option<AtomicU16>,
    },
    V6,
}

#[derive(Debug)]
struct Udp {
    /// True if the source port is entropy of the packet.
    entropy: bool,
    /// Sum of pseudo header without length, UDP header and tunnel header in the template; `None` if no
    /// checksum is computed.
    sum: Option<Sum>,
}

impl Encap {
    /// Makes the template. Returns `None` if `reformat` is not an encapsulation.
    pub(super) fn new(reformat: &Reformat) -> Option<Self> {
        let layout = reformat.layout()?;
        let mut bytes: Box<[u8]> = reformat.bytes().into();
        let (l3, l4) = (usize::from(layout.l3), usize::from(layout.l4));
        let mut protocol = None;
        let ip = match layout.ip_version {
            4 => {
                let header = bytes.get_mut(l3..l4).filter(|header| header.len() >= ipv4::HEADER_LEN)?;
                header[2..4].fill(0);
                header[10..12].fill(0);
                protocol = Some(header[9]);
                let id = u16::from_be_bytes([header[4], header[5]]);
                let atomic = u16::from_be_bytes([header[6], header[7]]) & ipv4::DONT_FRAGMENT != 0;
                if !atomic {
                    header[4..6].fill(0);
                }
                Ip::V4 { sum: checksum::sum(header), next_id: (!atomic).then(|| AtomicU16::new(id)) }
            }
            6 => {
                let header = bytes.get_mut(l3..l4).filter(|header| header.len() >= ipv6::HEADER_LEN)?;
                header[4..6].fill(0);
                protocol = Some(header[6]);
                Ip::V6
            }
            _ => Ip::None,
        };
        let udp = match protocol {
            Some(protocol) if protocol == IpProtocol::UDP.0 => {
                let header = bytes.get_mut(l4..).filter(|header| header.len() >= udp::HEADER_LEN)?;
                let computed = header[6..8] != [0, 0];
                header[4..8].fill(0);
                let entropy = header[..2] == [0, 0];
                let own = checksum::sum(header);
                let addresses = match ip {
                    Ip::V6 => checksum::sum(bytes.get(l3 + 8..l3 + 40)?),
                    _ => checksum::sum(bytes.get(l3 + 12..l3 + 20)?),
                };
                let sum = addresses.word(u16::from(IpProtocol::UDP.0)).and(own);
                Some(Udp { entropy, sum: computed.then_some(sum) })
            }
            _ => None,
        };
        let l2 = reformat.kind() == ReformatKind::L2ToL2Tunnel;
        Some(Self { bytes, l3: layout.l3, l4: layout.l4, ip, udp, l2, carries: reformat.carried_version() })
    }

    pub(super) fn heap_bytes(&self) -> usize {
        size_of_val(self) + self.bytes.len()
    }

    pub(super) fn run(
        &self,
        packet: &mut Packet,
        headers: &mut Headers,
        pool: Option<&Pool>,
    ) -> Result<(), DropReason> {
        let source = match &self.udp {
            Some(Udp { entropy: true, .. }) => {
                Some(source_port(entropy(packet.data(), &headers.outer.unwrap_or_default())))
            }
            _ => None,
        };
        let taken = if self.l2 { self.take_frame(packet, headers)? } else { self.take_packet(packet, headers, pool)? };
        let segmented = packet.flags().contains(Flags::TX_SEGMENT);
        let inside = packet.len();
        let filled = PacketValues {
            source,
            // For a TSO packet, the NIC computes the sum of each segment.
            inner: match &self.udp {
                Some(Udp { sum: Some(_), .. }) if !segmented => sum_of(packet),
                _ => Sum::ZERO,
            },
            segmented,
        };
        let room = packet.prepend_slice(self.bytes.len()).ok_or(DropReason::NoHeadroom)?;
        room.copy_from_slice(&self.bytes);
        self.fill(room, inside, &filled)?;
        packet.set_checksum_status(ChecksumStatus::NONE);
        let requests = match (&self.ip, &self.udp) {
            (Ip::V4 { .. }, Some(Udp { sum: Some(_), .. })) => {
                Flags::TX_OUTER_L3_CHECKSUM.with(Flags::TX_OUTER_L4_CHECKSUM)
            }
            (_, Some(Udp { sum: Some(_), .. })) => Flags::TX_OUTER_L4_CHECKSUM,
            (Ip::V4 { .. }, _) => Flags::TX_OUTER_L3_CHECKSUM,
            _ => Flags::NONE,
        };
        let flags = packet.flags().without(Flags::LATER_FRAGMENT);
        packet.set_flags(if segmented { flags.with(requests) } else { flags });
        let by = self.bytes.len() as i32 - taken as i32;
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

    /// Fills the headers in front of a payload of `inside` bytes.
    fn fill(&self, out: &mut [u8], inside: usize, filled: &PacketValues) -> Result<(), DropReason> {
        let short = DropReason::Truncated;
        let (l3, l4) = (usize::from(self.l3), usize::from(self.l4));
        let total = u16::try_from(out.len() - l3 + inside);
        let udp_len = u16::try_from(out.len() - l4 + inside);
        match &self.ip {
            Ip::None => return Ok(()),
            Ip::V4 { sum, next_id } => {
                let total = total.map_err(|_| DropReason::TooLong)?;
                let header = out.get_mut(l3..).and_then(|b| b.first_chunk_mut::<20>()).ok_or(short)?;
                header[2..4].copy_from_slice(&total.to_be_bytes());
                let mut sum = sum.word(total);
                if let Some(next) = next_id {
                    let id = next.fetch_add(1, Ordering::Relaxed);
                    header[4..6].copy_from_slice(&id.to_be_bytes());
                    sum = sum.word(id);
                }
                header[10..12].copy_from_slice(&sum.checksum().to_be_bytes());
            }
            Ip::V6 => {
                let payload = udp_len.map_err(|_| DropReason::TooLong)?;
                let length = out.get_mut(l3 + 4..l3 + 6).ok_or(short)?;
                length.copy_from_slice(&payload.to_be_bytes());
            }
        }
        let Some(udp) = &self.udp else { return Ok(()) };
        let length = udp_len.map_err(|_| DropReason::TooLong)?;
        let header = out.get_mut(l4..).and_then(|b| b.first_chunk_mut::<8>()).ok_or(short)?;
        let source = filled.source.unwrap_or(0);
        if filled.source.is_some() {
            header[..2].copy_from_slice(&source.to_be_bytes());
        }
        header[4..6].copy_from_slice(&length.to_be_bytes());
        if let Some(sum) = udp.sum {
            // The length counts twice: in the pseudo header and in the UDP header.
            let value = match filled.segmented {
                false => sum.word(length).word(length).word(source).and(filled.inner).udp_checksum(),
                true => self.pseudo(out, length).ok_or(short)?,
            };
            out.get_mut(l4 + 6..l4 + 8).ok_or(short)?.copy_from_slice(&value.to_be_bytes());
        }
        Ok(())
    }

    /// Returns the checksum field that a NIC expects when it computes the outer UDP checksum.
    #[cold]
    fn pseudo(&self, out: &[u8], length: u16) -> Option<u16> {
        let l3 = usize::from(self.l3);
        let addresses = match self.ip {
            Ip::V6 => out.get(l3 + 8..l3 + 40)?,
            _ => out.get(l3 + 12..l3 + 20)?,
        };
        Some(checksum::sum(addresses).word(u16::from(IpProtocol::UDP.0)).word(length).fold())
    }

    #[cold]
    fn note_segmented(&self, packet: &mut Packet, headers: &Headers) {
        use wirepath_packet::PtypeL3 as Kind;
        update_tx_layers(packet, headers);
        let mut layers = packet.header_lengths();
        let outer = match self.ip {
            Ip::None => Kind::Other,
            Ip::V4 { .. } => Kind::Ipv4,
            Ip::V6 => Kind::Ipv6,
        };
        // The rule language allows at most 192 bytes.
        layers.outer_len = self.bytes.len() as u8;
        layers.outer_l2_len = self.l3;
        if !self.l2 {
            layers.l2_len = 0;
        }
        packet.set_header_lengths(layers.with_types(layers.l3(), layers.l4(), outer));
    }
}

/// Values that differ between packets.
struct PacketValues {
    source: Option<u16>,
    inner: Sum,
    segmented: bool,
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
