//! Frames that the kernel delivers with a `struct virtio_net_hdr` (linux/virtio_net.h).
//!
//! Such a frame may have an incomplete checksum, may be a superframe (GSO), and may have its VLAN tag beside
//! the frame. The port completes it here, or passes a superframe on whole. A superframe that leaves by an
//! interface of the kernel gets such a header again.
//!
//! Superframes of a UDP tunnel have further fields since Linux 6.17 ([`TUNNEL_HEADER`]); only a TAP device
//! takes them.

use wirepath_wire::segment::MAX_DATAGRAMS;
use wirepath_wire::tcp::flags::CWR;
use wirepath_wire::vlan::{TAG_LEN, Tag};
use wirepath_wire::{HeaderOffsets, L3Type, L4Type, Parsed, checksum};

use wirepath_packet::PortId;
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::superframe::{self, Cutter};
use wirepath_packet::{Batch, HeaderLengths, Packet, Pool};

/// Bytes of the header. Its byte order is that of the machine: `vio_le()` of a packet socket, the default of
/// a TAP device.
pub(crate) const HEADER: usize = 10;

/// Bytes of `struct virtio_net_hdr_v1_hash_tunnel`, which describes the headers of a tunnel too.
pub(crate) const TUNNEL_HEADER: usize = 24;

/// Bytes of an Ethernet header: addresses and EtherType.
const ETHERNET: usize = 14;

const NEEDS_CSUM: u8 = 1;
/// The outer UDP checksum is to be computed too.
const UDP_TUNNEL_CSUM: u8 = 8;
/// The packet is in a UDP tunnel over IPv4, over IPv6.
const GSO_TUNNEL_IPV4: u8 = 0x20;
const GSO_TUNNEL_IPV6: u8 = 0x40;
/// Offset of the checksum in `struct tcphdr`, and in `struct udphdr`.
const TCP_CHECKSUM: u16 = 16;
const UDP_CHECKSUM: u16 = 6;
/// Longest superframe that is passed on whole, in bytes: with the outer headers of a tunnel it is still an IP packet.
const MAX_WHOLE: usize = 65_400;
const GSO_NONE: u8 = 0;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
/// Marks TCP with ECN. Segmentation does not depend on it, since RFC 3168 section 6.1.2 is always followed.
const GSO_ECN: u8 = 0x80;

/// Offset of `checksum` in `struct sctphdr`. It is a CRC, which the virtio header cannot distinguish from a
/// checksum.
const SCTP_CHECKSUM: u16 = 8;

/// The virtio header of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct VirtioNetHdr {
    flags: u8,
    gso_type: u8,
    gso_size: u16,
    csum_start: u16,
    csum_offset: u16,
}

impl VirtioNetHdr {
    #[inline(always)]
    pub(crate) fn read(bytes: &[u8; HEADER]) -> Self {
        let &[flags, gso_type, _, _, s0, s1, c0, c1, o0, o1] = bytes;
        Self {
            flags,
            gso_type,
            gso_size: u16::from_ne_bytes([s0, s1]),
            csum_start: u16::from_ne_bytes([c0, c1]),
            csum_offset: u16::from_ne_bytes([o0, o1]),
        }
    }

    /// Returns whether [`Self::of_superframe`] can describe a superframe with these innermost headers. `udp`: the
    /// kernel takes UDP superframes (Linux 6.2). It computes a checksum for each datagram (`__udp_gso_segment` in
    /// net/ipv4/udp_offload.c), so it takes none without.
    pub(crate) fn can_describe(packet: &Packet, layers: &HeaderOffsets, udp: bool) -> bool {
        match layers.l4_type() {
            L4Type::Tcp => true,
            L4Type::Udp => udp && superframe::udp_header(packet.data(), layers).is_some_and(|it| it[6..] != [0; 2]),
            _ => false,
        }
    }

    /// Describes a superframe for the kernel, which segments it. Returns `None` if it cannot
    /// ([`Self::can_describe`]).
    pub(crate) fn of_superframe(packet: &Packet, parsed: &Parsed) -> Option<[u8; HEADER]> {
        let layers = parsed.innermost();
        if !Self::can_describe(packet, layers, true) {
            return None;
        }
        if layers.l4_type() == L4Type::Udp {
            return gso_header(GSO_UDP_L4, layers.payload(), packet.mss(), layers.l4(), UDP_CHECKSUM);
        }
        let ecn = if superframe::tcp_flags(packet, layers)? & CWR != 0 { GSO_ECN } else { 0 };
        let kind = match layers.l3_type() {
            L3Type::Ipv4 => GSO_TCPV4,
            L3Type::Ipv6 => GSO_TCPV6,
            _ => return None,
        };
        gso_header(kind | ecn, layers.payload(), packet.mss(), layers.l4(), TCP_CHECKSUM)
    }

    /// Describes a superframe in a UDP tunnel for a TAP device of Linux 6.17. Returns `None` if the tunnel is of
    /// another kind.
    pub(crate) fn of_tunnel_superframe(packet: &Packet, parsed: &Parsed) -> Option<[u8; TUNNEL_HEADER]> {
        let (outer, inner) = (parsed.outer(), parsed.inner()?);
        let udp = superframe::udp_header(packet.data(), outer)?;
        let mut header = [0; TUNNEL_HEADER];
        header[..HEADER].copy_from_slice(&Self::of_superframe(packet, parsed)?);
        if udp[6..] != [0; 2] {
            header[0] |= UDP_TUNNEL_CSUM;
        }
        header[1] |= if outer.l3_type() == L3Type::Ipv4 { GSO_TUNNEL_IPV4 } else { GSO_TUNNEL_IPV6 };
        header[20..22].copy_from_slice(&u16::try_from(outer.l4()).ok()?.to_le_bytes());
        header[22..24].copy_from_slice(&u16::try_from(inner.l3()).ok()?.to_le_bytes());
        Some(header)
    }

    /// Describes a UDP datagram that the kernel cuts into datagrams with `size` bytes of payload each.
    pub(crate) fn of_datagrams(l4: usize, size: usize) -> Option<[u8; HEADER]> {
        gso_header(GSO_UDP_L4, l4 + 8, u16::try_from(size).ok()?, l4, UDP_CHECKSUM)
    }

    /// Returns whether the header is that of a UDP superframe.
    pub(crate) fn is_udp_superframe(self) -> bool {
        self.gso_type == GSO_UDP_L4
    }

    /// Returns whether the header has the form of a UDP superframe, as the kernel demands it (`virtio_net_hdr_to_skb`
    /// in linux/virtio_net.h), and names a UDP header. `l4` is its offset, if a checksum is to be computed.
    fn is_udp(self, parsed: &Parsed, l4: Option<usize>) -> bool {
        let Some(l4) = l4 else { return self.gso_type == GSO_UDP_L4 && parsed.innermost().l4_type() == L4Type::Udp };
        let is_named = |layers: &HeaderOffsets| layers.l4() == l4 && layers.l4_type() == L4Type::Udp;
        let is_there = is_named(parsed.outer()) || parsed.inner().is_some_and(is_named);
        self.gso_type == GSO_UDP_L4 && self.csum_offset == UDP_CHECKSUM && is_there
    }

    /// Removes the marks of a tunnel, and the state of the outer checksum: the parser finds the tunnel.
    fn without_tunnel(self) -> Self {
        let gso_type = self.gso_type & !(GSO_TUNNEL_IPV4 | GSO_TUNNEL_IPV6);
        Self { flags: self.flags & NEEDS_CSUM, gso_type, ..self }
    }

    /// Returns whether the frame needs neither a checksum nor segmentation.
    #[inline(always)]
    fn is_complete(self) -> bool {
        self.flags & NEEDS_CSUM == 0 && self.gso_type == GSO_NONE
    }
}

/// Returns the header of a superframe.
fn gso_header(kind: u8, header_len: usize, size: u16, start: usize, offset: u16) -> Option<[u8; HEADER]> {
    let ([h0, h1], [s0, s1]) = (u16::try_from(header_len).ok()?.to_ne_bytes(), size.to_ne_bytes());
    let ([c0, c1], [o0, o1]) = (u16::try_from(start).ok()?.to_ne_bytes(), offset.to_ne_bytes());
    Some([NEEDS_CSUM, kind, h0, h1, s0, s1, c0, c1, o0, o1])
}

/// Converts frames from the kernel to packets, for one receive queue.
pub(crate) struct VnetOffload {
    pool: Pool,
    port: PortId,
    /// Superframes that [`superframe`] represents stay whole.
    keep_superframes: bool,
    /// A superframe that is being cut.
    cutting: Option<Cutter>,
}

impl VnetOffload {
    pub(crate) fn new(pool: Pool, port: PortId, keep_superframes: bool) -> Self {
        Self { pool, port, keep_superframes, cutting: None }
    }

    /// The pool of received packets.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Appends a frame that the kernel wrote into `packet`, or drops and counts it. With `keep_superframes`,
    /// superframes of TCP and UDP stay whole, also in tunnels, if [`superframe`] represents them. Others are cut. The
    /// batch has room for a packet, and [`Self::is_cutting`] is false.
    #[inline]
    pub(crate) fn receive_packet(
        &mut self,
        mut packet: Packet,
        header: VirtioNetHdr,
        tag: Option<Tag>,
        batch: &mut Batch,
        counters: &QueueCounters,
    ) {
        packet.set_in_port(self.port);
        let result = if packet.data().len() < ETHERNET {
            Err(DropReason::TooShort)
        } else if header.is_complete() {
            tag.map_or(Ok(()), |tag| insert_tag(&mut packet, tag))
        } else {
            match self.finish(packet, header.without_tunnel(), tag, batch, counters) {
                Ok(Some(finished)) => {
                    packet = finished;
                    Ok(())
                }
                Ok(None) => return,
                Err(reason) => return counters.drops.add(reason, 1),
            }
        };
        match result {
            Ok(()) => _ = batch.push(packet),
            Err(reason) => counters.drops.add(reason, 1),
        }
    }

    /// Completes a packet, or marks it as a superframe. Returns `None` if its frames were appended to the batch.
    #[inline(never)]
    fn finish(
        &mut self,
        mut packet: Packet,
        header: VirtioNetHdr,
        tag: Option<Tag>,
        batch: &mut Batch,
        counters: &QueueCounters,
    ) -> Result<Option<Packet>, DropReason> {
        let (mut start, offset) = (usize::from(header.csum_start), usize::from(header.csum_offset));
        if header.gso_type == GSO_NONE {
            let mut at = 0;
            let sum = superframe::parts_from(&packet, start).fold(checksum::Sum::ZERO, |sum, part| {
                let sum = sum.and_at(at, checksum::sum(part));
                at += part.len();
                sum
            });
            let field = start.checked_add(offset).and_then(|at| packet.data_mut().get_mut(at..at + 2));
            let field = field.filter(|_| header.csum_offset != SCTP_CHECKSUM).ok_or(DropReason::KernelOffload)?;
            field.copy_from_slice(&sum.udp_checksum().to_be_bytes());
            counters.completed_checksums.add(1);
        }
        if let Some(tag) = tag {
            insert_tag(&mut packet, tag)?;
            start += TAG_LEN;
        }
        if header.gso_type == GSO_NONE {
            return Ok(Some(packet));
        }
        let l4 = (header.flags & NEEDS_CSUM != 0).then_some(start);
        let parsed = superframe::parse(&packet, l4).ok_or(DropReason::KernelOffload)?;
        packet.set_mss(header.gso_size);
        let layers = parsed.innermost();
        let is_represented = match header.gso_type & !GSO_ECN {
            GSO_TCPV4 | GSO_TCPV6 if layers.l4_type() == L4Type::Tcp && header.gso_size > 0 => true,
            GSO_UDP_L4 if header.is_udp(&parsed, l4) => {
                let size = usize::from(header.gso_size);
                let payload = packet.len().saturating_sub(layers.payload());
                // Padding would become payload.
                layers.udp_end(packet.data()) == Some(packet.len())
                    && (1..=MAX_DATAGRAMS * size).contains(&payload)
                    && !superframe::may_carry_tunnel(packet.data(), layers)
            }
            _ => return Err(DropReason::KernelOffload),
        };
        let is_fragment = layers.is_fragment() || parsed.outer().is_fragment();
        let is_partial = l4 == Some(layers.l4()) && layers.payload() <= packet.data().len();
        let fits = packet.len() <= MAX_WHOLE;
        let is_long = layers.payload() + usize::from(header.gso_size) < packet.len();
        if self.keep_superframes && is_represented && !is_fragment && is_partial && fits && is_long {
            packet.set_header_lengths(HeaderLengths::from(&parsed));
            packet.set_flags(GSO_FLAGS);
            return Ok(Some(packet));
        }
        let l4 = l4.unwrap_or_else(|| layers.l4());
        self.cutting = Some(Cutter::new(packet, Some(l4)).map_err(|(_, reason)| reason)?);
        counters.segmented.add(1);
        self.resume(batch, counters);
        Ok(None)
    }

    /// Returns whether a superframe is cut whose frames did not all fit into the last batch.
    pub(crate) fn is_cutting(&self) -> bool {
        self.cutting.is_some()
    }

    /// Appends further frames of the superframe that is being cut.
    pub(crate) fn resume(&mut self, batch: &mut Batch, counters: &QueueCounters) {
        while let Some(cutter) = &mut self.cutting
            && !batch.is_full()
        {
            match cutter.next_frame(&self.pool) {
                Some(Ok(frame)) => _ = batch.push(frame),
                Some(Err(reason)) => counters.drops.add(reason, 1),
                None => self.cutting = None,
            }
        }
        if self.cutting.as_ref().is_some_and(|cutter| cutter.remaining() == 0) {
            self.cutting = None;
        }
    }
}

/// Offload flags of a superframe.
const GSO_FLAGS: Flags = Flags::TX_SEGMENT.with(Flags::TX_L3_CHECKSUM).with(Flags::TX_L4_CHECKSUM);

/// Inserts a tag behind the Ethernet addresses.
#[inline]
fn insert_tag(packet: &mut Packet, tag: Tag) -> Result<(), DropReason> {
    const ADDRESSES: usize = 12;
    if packet.data().len() < ADDRESSES || packet.prepend_slice(TAG_LEN).is_none() {
        return Err(DropReason::NoHeadroom);
    }
    let data = packet.data_mut();
    data.copy_within(TAG_LEN..TAG_LEN + ADDRESSES, 0);
    data[ADDRESSES..ADDRESSES + TAG_LEN].copy_from_slice(&tag.bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use wirepath_wire::checksum::Transport;
    use wirepath_wire::{EtherType, IpProtocol, checksum_offload, ethernet, ipv4, parse, udp};

    use super::*;

    /// Offset of the UDP header.
    const UDP: usize = 34;

    /// Returns a datagram over IPv4. Its checksum is complete, or the sum of the pseudo header.
    fn datagram(ident: u16, payload: &[u8], is_partial: bool) -> Vec<u8> {
        let mut frame = vec![0; UDP + 8];
        let link = ethernet::Repr { dst: [2; 6].into(), src: [4; 6].into(), ethertype: EtherType::IPV4 };
        link.emit(&mut frame).unwrap();
        let (src, dst, protocol) = ([192, 0, 2, 1].into(), [192, 0, 2, 2].into(), IpProtocol::UDP);
        let payload_len = 8 + payload.len() as u16;
        ipv4::Repr { src, dst, protocol, payload_len, ttl: 9, traffic_class: 1, ident, fragment_word: 0 }
            .emit(&mut frame[14..])
            .unwrap();
        udp::Repr { src_port: 1000, dst_port: 2000, payload_len: payload.len() as u16 }
            .emit(&mut frame[UDP..])
            .unwrap();
        frame.extend(payload);
        let len = frame.len() - UDP;
        let pseudo = checksum_offload::pseudo(&frame, parse(&frame).unwrap().outer(), IpProtocol::UDP, len).unwrap();
        let value = match is_partial {
            true => pseudo.fold(),
            false => Transport::Udp.encode(pseudo.and(checksum::sum(&frame[UDP..]))),
        };
        Transport::Udp.set_field(&mut frame[UDP..], value);
        frame
    }

    fn payload(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i / 7) as u8).collect()
    }

    /// Header of a superframe of UDP.
    fn udp_header(size: u16) -> VirtioNetHdr {
        let (csum_start, csum_offset) = (UDP as u16, UDP_CHECKSUM);
        VirtioNetHdr { flags: NEEDS_CSUM, gso_type: GSO_UDP_L4, gso_size: size, csum_start, csum_offset }
    }

    /// Result of a frame from the kernel.
    #[derive(Debug, Default, PartialEq, Eq)]
    struct Outcome {
        /// The frames that come of it, with those that a device would make of superframes.
        frames: Vec<Vec<u8>>,
        dropped: u64,
        whole: usize,
    }

    /// Receives a frame as ports do that keep superframes, or that cut them.
    fn receive(pool: &Pool, frame: &[u8], header: VirtioNetHdr, keep: bool) -> Outcome {
        let mut offload = VnetOffload::new(pool.clone(), PortId::new(0), keep);
        let (mut batch, counters, mut outcome) = (Batch::new(), QueueCounters::default(), Outcome::default());
        let mut packet = Some(pool.take().unwrap());
        assert!(packet.as_mut().unwrap().extend_from_slice(frame, pool));
        loop {
            match packet.take() {
                Some(packet) => offload.receive_packet(packet, header, None, &mut batch, &counters),
                None => offload.resume(&mut batch, &counters),
            }
            let is_done = !offload.is_cutting();
            let all = batch.len();
            batch.drain_front(all, |packet| {
                let bytes = |packet: &Packet| packet.segments().flatten().copied().collect();
                if !packet.flags().contains(Flags::TX_SEGMENT) {
                    return outcome.frames.push(bytes(&packet));
                }
                outcome.whole += 1;
                let mut cutter = Cutter::new(packet, None).unwrap();
                while let Some(frame) = cutter.next_frame(pool) {
                    outcome.frames.push(bytes(&frame.unwrap()));
                }
            });
            if is_done {
                outcome.dropped = counters.drops.total();
                assert_eq!(outcome.dropped, counters.drops.get(DropReason::KernelOffload));
                return outcome;
            }
        }
    }

    #[test]
    fn udp_superframes_become_the_same_datagrams() {
        let pool = Pool::new("vnet", 512).unwrap();
        // Payload and segment size; true if the superframe stays whole.
        for (len, size, is_whole) in [
            (3500, 1000, true),
            (65_000, 1400, true),
            (1001, 1000, true),
            (128 * 100, 100, true),
            (1000, 1000, false),
            (500, 1000, false),
            (500, u16::MAX, false),
        ] {
            let payload = payload(len);
            let header = udp_header(size);
            let cut = payload.chunks(size.into());
            let frames: Vec<_> = (7..).zip(cut).map(|(ident, part)| datagram(ident, part, false)).collect();
            for keep in [true, false] {
                let whole = usize::from(keep && is_whole);
                let expected = Outcome { frames: frames.clone(), dropped: 0, whole };
                let got = receive(&pool, &datagram(7, &payload, true), header, keep);
                assert!(got == expected, "{len} bytes, size {size}, keep {keep}: {} frames", got.frames.len());
            }
        }
        // The payload begins like VXLAN, VXLAN-GPE and GENEVE, so that the superframe is cut at once.
        for start in [[8, 0, 0, 0], [12, 0, 0, 3], [0, 0, 0x65, 0x58]] {
            let mut payload = payload(3000);
            payload[..4].copy_from_slice(&start);
            let got = receive(&pool, &datagram(7, &payload, true), udp_header(1000), true);
            let frames = (7..).zip(payload.chunks(1000)).map(|(ident, part)| datagram(ident, part, false)).collect();
            assert!(got == Outcome { frames, dropped: 0, whole: 0 }, "{start:?}");
        }
        // An absent checksum stays absent.
        let mut absent = datagram(7, &payload(3000), true);
        absent[UDP + 6..UDP + 8].fill(0);
        for frame in receive(&pool, &absent, udp_header(1000), true).frames {
            assert_eq!(frame[UDP + 6..UDP + 8], [0, 0]);
        }
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn wrong_superframes_of_udp_are_dropped() {
        let pool = Pool::new("vnet", 512).unwrap();
        let frame = datagram(7, &payload(128 * 20), true);
        let good = udp_header(20);
        assert_eq!(receive(&pool, &frame, good, true).frames.len(), 128);
        let changed = |change: fn(&mut Vec<u8>)| {
            let mut frame = frame.clone();
            change(&mut frame);
            frame
        };
        for (name, frame, header) in [
            ("no segment size", frame.clone(), udp_header(0)),
            ("129 datagrams", frame.clone(), udp_header(19)),
            ("mark of TCP", frame.clone(), VirtioNetHdr { gso_type: GSO_UDP_L4 | GSO_ECN, ..good }),
            ("UDP fragments", frame.clone(), VirtioNetHdr { gso_type: 3, ..good }),
            ("as TCP", frame.clone(), VirtioNetHdr { gso_type: GSO_TCPV4, ..good }),
            ("checksum of TCP", frame.clone(), VirtioNetHdr { csum_offset: TCP_CHECKSUM, ..good }),
            ("before the header", frame.clone(), VirtioNetHdr { csum_start: 33, ..good }),
            ("behind the header", frame.clone(), VirtioNetHdr { csum_start: 35, ..good }),
            ("behind the frame", frame.clone(), VirtioNetHdr { csum_start: u16::MAX, ..good }),
            ("another protocol", changed(|frame| frame[23] = 132), good),
            ("a fragment", changed(|frame| frame[20] = 0x20), good),
            ("longer than the packet", changed(|frame| frame[UDP + 4] = 0xff), good),
            ("shorter than its header", changed(|frame| frame[UDP + 4..UDP + 6].copy_from_slice(&[0, 7])), good),
            ("no UDP header", frame[..40].to_vec(), good),
        ] {
            for keep in [true, false] {
                let got = receive(&pool, &frame, header, keep);
                let expected = Outcome { dropped: 1, ..Outcome::default() };
                assert!(got == expected, "{name}, keep {keep}: {} frames", got.frames.len());
            }
        }
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn random_headers_give_the_same_frames_whole_or_cut() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let pool = Pool::new("vnet", 1024).unwrap();
        let mut whole = 0;
        for _ in 0..3000 {
            let mut frame = datagram(random.u16(..), &payload(random.usize(..4000)), true);
            for _ in 0..random.usize(..3) {
                let at = random.usize(..60.min(frame.len()));
                frame[at] = random.u8(..);
            }
            let mut header = udp_header(random.u16(..2000));
            match random.u8(..8) {
                0 => header.csum_start = random.u16(..80),
                1 => header.csum_offset = random.u16(..20),
                2 => header.flags = random.u8(..),
                3 => header.gso_size = random.u16(..),
                _ => {}
            }
            let (kept, cut) = (receive(&pool, &frame, header, true), receive(&pool, &frame, header, false));
            assert_eq!(
                (&kept.frames, kept.dropped),
                (&cut.frames, cut.dropped),
                "{header:?} {:02x?}",
                &frame[..60.min(frame.len())]
            );
            assert!(cut.whole == 0 && !kept.frames.is_empty() | (kept.dropped == 1));
            whole += kept.whole;
        }
        assert!(whole > 500, "{whole} superframes stay whole");
        assert_eq!(pool.outstanding(), 0);
    }
}
