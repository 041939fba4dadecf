//! Header rewriting: `set` and `dec-ttl`, as one masked write per header.

use wirepath_flow::{Field, network};
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::{Packet, Pool};
use wirepath_wire::checksum::{Sum, Transport};
use wirepath_wire::{EtherType, HeaderOffsets, IpProtocol, L3Type, L4Type, checksum_offload};

use super::{Headers, pull_up_writable};

/// Adjacent `set` and `dec-ttl` actions.
#[derive(Debug, Default)]
pub(super) struct Rewrite {
    mac: MaskedWords<3>,
    tci: MaskedWords<1>,
    network: Network,
    hops: TtlChange,
    /// Source and destination port.
    ports: MaskedWords<1>,
    transport: L4Type,
    parts: SetParts,
}

/// Flags of the members of [`Rewrite`] that are set.
#[derive(Clone, Copy, Debug, Default)]
struct SetParts {
    mac: bool,
    tci: bool,
    ports: bool,
}

/// Masked values, as 32-bit words in host byte order. No value has a bit outside its mask.
#[derive(Clone, Copy, Debug)]
struct MaskedWords<const WORDS: usize> {
    mask: [u32; WORDS],
    value: [u32; WORDS],
}

impl<const WORDS: usize> Default for MaskedWords<WORDS> {
    fn default() -> Self {
        Self { mask: [0; WORDS], value: [0; WORDS] }
    }
}

impl<const WORDS: usize> MaskedWords<WORDS> {
    /// Adds a field of `bits` bits at bit offset `at`, where bit 0 is the most significant one. It overwrites
    /// earlier values.
    fn put(&mut self, at: u16, bits: u8, value: u128) {
        for bit in 0..u16::from(bits) {
            let set = value >> (u16::from(bits) - 1 - bit) & 1;
            let (word, shift) = (usize::from((at + bit) / 32), 31 - (at + bit) % 32);
            if let (Some(mask), Some(word)) = (self.mask.get_mut(word), self.value.get_mut(word)) {
                *mask |= 1 << shift;
                *word = *word & !(1 << shift) | (set as u32) << shift;
            }
        }
    }

    #[inline(always)]
    fn word(&self, index: usize, old: u32) -> u32 {
        old & !self.mask[index] | self.value[index]
    }

    /// Writes over `bytes`, four for each word.
    #[inline(always)]
    fn write(&self, bytes: &mut [u8]) {
        let (words, _) = bytes.as_chunks_mut::<4>();
        for (index, word) in words.iter_mut().enumerate().take(WORDS) {
            *word = self.word(index, u32::from_be_bytes(*word)).to_be_bytes();
        }
    }
}

#[derive(Debug, Default)]
enum Network {
    #[default]
    None,
    V4(MaskedWords<5>),
    V6(MaskedWords<10>),
}

/// Change of TTL or hop limit by a sequence of `set` and `dec-ttl`.
#[derive(Clone, Copy, Debug, Default)]
struct TtlChange {
    /// Lowest value for which every `dec-ttl` succeeds. 256: some `dec-ttl` after a `set` always fails.
    least: u16,
    set: Option<u8>,
    minus: u8,
}

impl TtlChange {
    fn dec(&mut self) {
        match &mut self.set {
            Some(value) if *value > 1 => *value -= 1,
            Some(_) => self.least = 256,
            None => {
                self.minus = self.minus.saturating_add(1);
                self.least = self.least.max(u16::from(self.minus) + 1);
            }
        }
    }

    #[inline(always)]
    fn next(self, hops: u8) -> Result<u8, DropReason> {
        if u16::from(hops) < self.least {
            return Err(DropReason::HopLimit);
        }
        Ok(self.set.unwrap_or(hops.wrapping_sub(self.minus)))
    }
}

/// Change of a checksum, and the changed bits. A checksum over unchanged words is left as it is, because zero
/// has two representations.
#[derive(Clone, Copy)]
struct Delta {
    sum: Sum,
    bits: u32,
}

impl Delta {
    const NONE: Self = Self { sum: Sum::ZERO, bits: 0 };

    #[inline(always)]
    fn word(&mut self, old: u32, new: u32) {
        self.sum = self.sum.word32(!old).word32(new);
        self.bits |= old ^ new;
    }

    /// Returns the updated checksum (RFC 1624 equation 3).
    #[inline(always)]
    fn update(self, checksum: u16) -> u16 {
        if self.bits == 0 { checksum } else { Sum::ZERO.word(!checksum).and(self.sum).checksum() }
    }
}

/// Change of the data that the layer 4 checksum covers.
#[derive(Clone, Copy)]
struct ChecksumChange {
    /// Change of the pseudo header.
    pseudo: Delta,
    /// Change of the layer 4 header.
    l4: Delta,
}

impl Rewrite {
    /// Adds a `set` action.
    pub(super) fn set(&mut self, field: Field, value: u128) {
        let spec = field.spec();
        let (at, bits) = (spec.offset.unwrap_or(0), spec.bits);
        match field {
            Field::EthDst | Field::EthSrc => {
                self.mac.put(at, bits, value);
                self.parts.mac = true;
            }
            Field::VlanVid | Field::VlanPcp | Field::VlanDei => {
                self.tci.put(16 + at, bits, value);
                self.parts.tci = true;
            }
            Field::Ipv4Ttl => {
                self.v4();
                self.hops.set = Some(value as u8);
            }
            Field::Ipv6Hops => {
                self.v6();
                self.hops.set = Some(value as u8);
            }
            Field::Ipv4Src | Field::Ipv4Dst | Field::Ipv4Dscp => self.v4().put(at, bits, value),
            Field::Ipv6Src | Field::Ipv6Dst | Field::Ipv6Dscp => self.v6().put(at, bits, value),
            Field::TcpSrc | Field::TcpDst => self.port(L4Type::Tcp, at, value),
            Field::UdpSrc | Field::UdpDst => self.port(L4Type::Udp, at, value),
            // The rule language cannot set other fields.
            _ => {}
        }
    }

    /// Returns the UDP destination port that is set.
    pub(super) fn udp_dst(&self) -> Option<u16> {
        let [mask] = self.ports.mask;
        (self.transport == L4Type::Udp && mask as u16 == u16::MAX).then_some(self.ports.value[0] as u16)
    }

    /// Adds a `dec-ttl` action.
    pub(super) fn dec_ttl(&mut self, version: u8) {
        match version {
            network::IPV6 => drop(self.v6()),
            _ => drop(self.v4()),
        }
        self.hops.dec();
    }

    fn v4(&mut self) -> &mut MaskedWords<5> {
        if !matches!(self.network, Network::V4(_)) {
            self.network = Network::V4(MaskedWords::default());
        }
        match &mut self.network {
            Network::V4(masked) => masked,
            _ => unreachable!("just made"),
        }
    }

    fn v6(&mut self) -> &mut MaskedWords<10> {
        if !matches!(self.network, Network::V6(_)) {
            self.network = Network::V6(MaskedWords::default());
        }
        match &mut self.network {
            Network::V6(masked) => masked,
            _ => unreachable!("just made"),
        }
    }

    fn port(&mut self, transport: L4Type, at: u16, value: u128) {
        self.ports.put(at, 16, value);
        self.transport = transport;
        self.parts.ports = true;
    }

    pub(super) fn run(&self, packet: &mut Packet, headers: &Headers, pool: Option<&Pool>) -> Result<(), DropReason> {
        if let Some(layers) = headers.outer.as_ref().filter(|layers| has_unparsed_checksum(layers)) {
            // The parser has checked only the headers that it knows.
            pull_up_writable(packet, (layers.l4() + 8).min(layers.end()), pool)?;
        }
        if self.parts.mac {
            let addresses = packet.data_mut().get_mut(..12).ok_or(DropReason::TooShort)?;
            self.mac.write(addresses);
        }
        if self.parts.tci {
            self.set_tag(packet)?;
        }
        let mut change = ChecksumChange { pseudo: Delta::NONE, l4: Delta::NONE };
        let is_offloaded = self.is_offloaded(packet, headers);
        let frame = packet.data_mut();
        match &self.network {
            Network::None => {}
            Network::V4(masked) => self.ipv4(frame, headers.ip(L3Type::Ipv4)?, masked, &mut change)?,
            Network::V6(masked) => self.ipv6(frame, headers.ip(L3Type::Ipv6)?, masked, &mut change)?,
        }
        let Some(layers) = headers.outer.as_ref().filter(|layers| layers.is_ip()) else {
            return if self.parts.ports { Err(DropReason::RuleMismatch) } else { Ok(()) };
        };
        if self.parts.ports {
            if layers.l4_type() != self.transport {
                return Err(DropReason::RuleMismatch);
            }
            let ports =
                frame.get_mut(layers.l4()..).and_then(|b| b.first_chunk_mut::<4>()).ok_or(DropReason::Truncated)?;
            let old = u32::from_be_bytes(*ports);
            let new = self.ports.word(0, old);
            *ports = new.to_be_bytes();
            change.l4.word(old, new);
        }
        update_l4_checksum(frame, layers, change, is_offloaded);
        Ok(())
    }

    fn set_tag(&self, packet: &mut Packet) -> Result<(), DropReason> {
        if let Some(tci) = packet.vlan() {
            packet.set_vlan(self.tci.word(0, tci.into()) as u16);
            return Ok(());
        }
        let tag = packet.data_mut().get_mut(12..16).ok_or(DropReason::RuleMismatch)?;
        if !EtherType(u16::from_be_bytes([tag[0], tag[1]])).is_vlan() {
            return Err(DropReason::RuleMismatch);
        }
        self.tci.write(tag);
        Ok(())
    }

    /// Returns true if the layer 4 checksum field holds only the pseudo header sum, and the NIC computes the
    /// rest.
    #[inline(always)]
    fn is_offloaded(&self, packet: &Packet, headers: &Headers) -> bool {
        // The NIC's layer 4 offload applies to the innermost headers. There is a separate flag for the outer
        // ones.
        let request = match headers.inner {
            Some(_) => Flags::TX_OUTER_L4_CHECKSUM,
            None => Flags::TX_L4_CHECKSUM,
        };
        packet.flags().contains(request) && self.is_partial(packet, headers)
    }

    #[cold]
    fn is_partial(&self, packet: &Packet, headers: &Headers) -> bool {
        if packet.flags().contains(Flags::TX_SEGMENT) {
            return true;
        }
        let frame = packet.data();
        headers.outer.as_ref().and_then(|layers| checksum_offload::ChecksumSpan::of(frame, layers)).is_some_and(
            |cover| {
                let field = frame.get(cover.start..).and_then(|segment| cover.transport.field(segment));
                field.is_some_and(|field| wirepath_wire::checksum::is_pseudo_header_sum(field, cover.pseudo))
            },
        )
    }

    #[inline(always)]
    fn ipv4(
        &self,
        frame: &mut [u8],
        layers: &HeaderOffsets,
        masked: &MaskedWords<5>,
        change: &mut ChecksumChange,
    ) -> Result<(), DropReason> {
        let header =
            frame.get_mut(layers.l3()..).and_then(|b| b.first_chunk_mut::<20>()).ok_or(DropReason::Truncated)?;
        let ttl = self.hops.next(header[8])?;
        let (words, _) = header.as_chunks_mut::<4>();
        let mut all = Delta::NONE;
        for (index, bytes) in words.iter_mut().enumerate() {
            let old = u32::from_be_bytes(*bytes);
            let mut new = masked.word(index, old);
            if index == 2 {
                new = new & 0x00ff_ffff | u32::from(ttl) << 24;
            }
            *bytes = new.to_be_bytes();
            all.word(old, new);
            if index >= 3 {
                change.pseudo.word(old, new);
            }
        }
        let sum = all.update(u16::from_be_bytes([header[10], header[11]]));
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        Ok(())
    }

    #[inline(always)]
    fn ipv6(
        &self,
        frame: &mut [u8],
        layers: &HeaderOffsets,
        masked: &MaskedWords<10>,
        change: &mut ChecksumChange,
    ) -> Result<(), DropReason> {
        let hidden = layers.hidden_addresses(frame);
        let header =
            frame.get_mut(layers.l3()..).and_then(|b| b.first_chunk_mut::<40>()).ok_or(DropReason::Truncated)?;
        header[7] = self.hops.next(header[7])?;
        let (words, _) = header.as_chunks_mut::<4>();
        for (index, bytes) in words.iter_mut().enumerate() {
            let old = u32::from_be_bytes(*bytes);
            let new = masked.word(index, old);
            *bytes = new.to_be_bytes();
            let summed = match index {
                0 | 1 => false,
                2..6 => !hidden.src,
                _ => !hidden.dst,
            };
            if summed {
                change.pseudo.word(old, new);
            }
        }
        Ok(())
    }
}

/// Returns true if the layer 4 protocol is not parsed but has a checksum over the addresses.
#[inline(always)]
fn has_unparsed_checksum(layers: &HeaderOffsets) -> bool {
    layers.l4_type() == L4Type::Other && matches!(layers.protocol(), IpProtocol::UDP_LITE | IpProtocol::DCCP)
}

/// Updates the layer 4 checksum.
#[inline(always)]
fn update_l4_checksum(frame: &mut [u8], layers: &HeaderOffsets, change: ChecksumChange, is_offloaded: bool) {
    let (offset, l4) = match layers.l4_type() {
        L4Type::Tcp => (Transport::Tcp.checksum_offset(), change.l4),
        L4Type::Udp => (Transport::Udp.checksum_offset(), change.l4),
        L4Type::Icmpv6 => (Transport::Icmpv6.checksum_offset(), Delta::NONE),
        // UDP-Lite (RFC 3828 section 3.1) and DCCP (RFC 4340 section 9.1) have their checksum at the offset
        // of UDP, over the same addresses.
        L4Type::Other if has_unparsed_checksum(layers) => (6, Delta::NONE),
        _ => return,
    };
    let at = layers.l4() + offset;
    let Some(field) = frame.get_mut(at..).and_then(|b| b.first_chunk_mut::<2>()).filter(|_| at + 2 <= layers.end())
    else {
        return;
    };
    let old = u16::from_be_bytes(*field);
    let udp = layers.l4_type() == L4Type::Udp;
    if udp && old == 0 {
        return;
    }
    let pseudo = change.pseudo;
    let new = if is_offloaded {
        // The field holds the pseudo header sum itself, and the NIC adds the rest.
        if pseudo.bits == 0 { old } else { Sum::ZERO.word(old).and(pseudo.sum).fold() }
    } else {
        let both = Delta { sum: pseudo.sum.and(l4.sum), bits: pseudo.bits | l4.bits };
        match both.update(old) {
            0 if both.bits != 0 && (udp || layers.protocol() == IpProtocol::UDP_LITE) => 0xffff,
            new => new,
        }
    };
    *field = new.to_be_bytes();
}
