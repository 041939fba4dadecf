//! Generic receive offload: joins consecutive TCP packets, or UDP datagrams of one length, of a flow to a superframe
//! ([`crate::superframe`]).
//!
//! Packets are joined within one batch, so that none waits for another. Those of one flow keep their order.
//! Segmentation of a superframe makes the same packets again, byte for byte. The only exception is the
//! identification of IPv4 packets with "don't fragment", which has no meaning (RFC 6864 section 4.1). Hence all
//! headers must be equal: flags, window, options, ECN marks, and the headers of a tunnel. Checksums of TCP and UDP are
//! verified first, since they are not kept; an absent UDP checksum stays absent. Packets of several buffers are not
//! joined.
//!
//! The last datagram of a superframe may be shorter than the others (`udp_gro_receive_segment` in
//! net/ipv4/udp_offload.c). Datagrams that carry a tunnel are never joined as such, only the packets in them.

#![deny(unsafe_code)]

use wirepath_wire::checksum::{self, Sum};
use wirepath_wire::checksum_offload::{self, ChecksumSpan};
use wirepath_wire::segment::MAX_DATAGRAMS;
use wirepath_wire::tcp::flags::{ACK, PSH};
use wirepath_wire::{HeaderOffsets, IpProtocol, L3Type, L4Type, Parsed, Parser, ipv4};

use crate::offload::{ChecksumStatus, Flags};
use crate::{BATCH, Batch, HeaderLengths, Packet, superframe};

/// Flows that are followed in a batch.
const FLOWS: usize = 8;
/// Longest superframe in bytes. It leaves room for the headers of a tunnel in front.
const MAX_LEN: usize = 65_000;
/// Longest headers of a packet that may be joined.
const MAX_HEADER: usize = 192;
/// UDP ports of BFD (RFC 5881 section 4, RFC 5883 section 5), whose packets the gateway reads one by one.
const BFD_PORTS: [u16; 2] = [3784, 4784];
const _: () = assert!(BATCH <= MAX_DATAGRAMS);
/// Flags that a packet to join must not have.
const OTHER: Flags = Flags::TX_SEGMENT
    .with(Flags::VLAN)
    .with(Flags::TX_L3_CHECKSUM)
    .with(Flags::TX_L4_CHECKSUM)
    .with(Flags::TX_OUTER_L3_CHECKSUM)
    .with(Flags::TX_OUTER_L4_CHECKSUM);

/// Joins the packets of batches.
#[derive(Debug)]
pub struct Gro {
    parser: Parser,
    flows: [Flow; FLOWS],
    used: usize,
}

/// A superframe in the making.
#[derive(Debug)]
struct Flow {
    /// Place of the first packet in the batch.
    at: usize,
    /// Headers of the first packet, with zeros where others may differ.
    headers: [u8; MAX_HEADER],
    header_len: usize,
    parsed: Parsed,
    /// Identifications of the first outer and inner packet.
    idents: [u16; 2],
    /// TCP sequence number of the next packet; 0 in UDP.
    next_seq: u32,
    /// Payload of the first packet in bytes.
    mss: usize,
    len: usize,
    push: bool,
    closed: bool,
    /// The packets behind the first one, without headers.
    rest: Vec<Packet>,
}

/// Headers and properties of a packet that may be joined.
struct Candidate {
    parsed: Parsed,
    headers: [u8; MAX_HEADER],
    header_len: usize,
    idents: [u16; 2],
    /// TCP sequence number of this packet and of the next one; 0 in UDP.
    seq: u32,
    next_seq: u32,
    /// True if the TCP packet has the flag PSH.
    push: bool,
    payload: usize,
}

impl Default for Gro {
    fn default() -> Self {
        Self::new()
    }
}

impl Gro {
    /// Makes a joiner. Tunnels over UDP are recognised on their standard ports.
    pub fn new() -> Self {
        let flow = |_| Flow {
            at: 0,
            headers: [0; MAX_HEADER],
            header_len: 0,
            parsed: Parsed::default(),
            idents: [0; 2],
            next_seq: 0,
            mss: 0,
            len: 0,
            push: false,
            closed: true,
            rest: Vec::with_capacity(BATCH),
        };
        Self { parser: Parser::default(), flows: std::array::from_fn(flow), used: 0 }
    }

    /// Joins packets of the batch from `start` on. Returns the number of packets that are now part of others.
    pub fn join(&mut self, batch: &mut Batch, start: usize) -> usize {
        let before = batch.len();
        if before.saturating_sub(start) < 2 {
            return 0;
        }
        self.used = 0;
        let (mut seen, mut kept) = (0, 0);
        batch.filter_map(|packet| {
            seen += 1;
            let packet = if seen > start { self.take(packet, kept) } else { Some(packet) };
            kept += usize::from(packet.is_some());
            packet
        });
        for flow in &mut self.flows[..self.used] {
            if let Some(first) = batch.as_mut_slice().get_mut(flow.at)
                && !flow.rest.is_empty()
            {
                flow.finish(first);
            }
            flow.rest.clear();
        }
        before - batch.len()
    }

    /// Joins the packet to a superframe, or returns it. `at` is its place in the batch in that case.
    fn take(&mut self, mut packet: Packet, at: usize) -> Option<Packet> {
        let Some(here) = Candidate::of(&packet, &self.parser) else {
            // Packets of its flow that follow must not pass it.
            self.close_flows_of(&packet);
            return Some(packet);
        };
        let same =
            |flow: &&mut Flow| !flow.closed && flow.headers[..flow.header_len] == here.headers[..here.header_len];
        if let Some(flow) = self.flows[..self.used].iter_mut().find(same)
            && flow.accepts(&here)
            && packet.trim_front(here.header_len)
        {
            flow.next_seq = here.next_seq;
            flow.len += here.payload;
            flow.push = here.push;
            flow.closed = flow.push || here.payload < flow.mss;
            flow.rest.push(packet);
            return None;
        }
        self.close_flows_of(&packet);
        self.open(&here, &packet, at);
        Some(packet)
    }

    /// Closes all superframes that may be of the flow of this packet: those with the same innermost ports, or all
    /// if the packet has none.
    fn close_flows_of(&mut self, packet: &Packet) {
        if self.flows[..self.used].iter().all(|flow| flow.closed) {
            return;
        }
        let parsed = self.parser.parse_chain(packet.data(), packet.len());
        let has_ports = |parsed: &Parsed| matches!(parsed.innermost().l4_type(), L4Type::Tcp | L4Type::Udp);
        let ports = parsed.ok().filter(has_ports).and_then(|parsed| ports_at(packet.data(), parsed.innermost().l4()));
        for flow in &mut self.flows[..self.used] {
            let own = ports_at(&flow.headers, flow.parsed.innermost().l4());
            flow.closed |= ports.is_none() || own == ports;
        }
    }

    /// Begins a superframe with the packet at place `at`.
    fn open(&mut self, here: &Candidate, packet: &Packet, at: usize) {
        if here.push {
            return;
        }
        let index = if self.used < FLOWS {
            self.used += 1;
            self.used - 1
        } else {
            // A superframe with packets is finished at the end of the batch.
            let Some(free) = self.flows.iter().position(|flow| flow.closed && flow.rest.is_empty()) else { return };
            free
        };
        let flow = &mut self.flows[index];
        flow.at = at;
        flow.headers = here.headers;
        flow.header_len = here.header_len;
        flow.parsed = here.parsed;
        flow.idents = here.idents;
        flow.next_seq = here.next_seq;
        (flow.mss, flow.len) = (here.payload, packet.len());
        (flow.push, flow.closed) = (false, false);
    }
}

/// Returns the ports of the TCP or UDP header at `l4`.
fn ports_at(headers: &[u8], l4: usize) -> Option<[u8; 4]> {
    headers.get(l4..)?.first_chunk().copied()
}

impl Candidate {
    fn of(packet: &Packet, parser: &Parser) -> Option<Self> {
        if packet.flags().intersects(OTHER) || packet.is_chain() {
            return None;
        }
        let data = packet.data();
        let parsed = parser.parse_chain(data, packet.len()).ok()?;
        let (outer, own) = (parsed.outer(), parsed.innermost());
        let header_len = own.payload();
        let payload = packet.len().checked_sub(header_len).filter(|len| *len > 0)?;
        // Padding behind the packet would become payload.
        if own.end() != packet.len() || !is_simple(own) {
            return None;
        }
        if parsed.inner().is_some() && (!repeats(data, &parsed) || outer.end() != packet.len()) {
            return None;
        }
        let mut headers = [0; MAX_HEADER];
        headers.get_mut(..header_len)?.copy_from_slice(data.get(..header_len)?);
        let l4 = own.l4();
        let (mut seq, mut next_seq, mut push, mut has_checksum) = (0, 0, false, true);
        match own.l4_type() {
            L4Type::Tcp => {
                let tcp = own.tcp(data)?;
                if tcp.flags() & !PSH != ACK {
                    return None;
                }
                push = tcp.flags() & PSH != 0;
                seq = tcp.seq();
                next_seq = seq.wrapping_add(payload as u32);
                headers[l4 + 4..l4 + 8].fill(0);
                headers[l4 + 13] &= !PSH;
                headers[l4 + 16..l4 + 18].fill(0);
            }
            L4Type::Udp => {
                let ports = own.udp(data).map(|udp| [udp.src_port(), udp.dst_port()])?;
                let is_bfd = ports.iter().any(|port| BFD_PORTS.contains(port));
                if own.udp_end(data) != Some(packet.len()) || is_bfd || superframe::may_carry_tunnel(data, own) {
                    return None;
                }
                has_checksum = blank_udp(&mut headers, l4);
            }
            _ => return None,
        }
        let idents = [outer, own].map(|layers| layers.ipv4(data).map_or(0, |ip| ip.ident()));
        blank_ip(&mut headers, own);
        if parsed.inner().is_some() {
            blank_ip(&mut headers, outer);
        }
        if parsed.inner().is_some() && outer.l4_type() == L4Type::Udp {
            let has_checksum = blank_udp(&mut headers, outer.l4());
            if has_checksum && !is_good(packet, outer, ChecksumStatus::OUTER_L4_GOOD) {
                return None;
            }
        }
        if has_checksum && !is_good(packet, own, ChecksumStatus::L4_GOOD) {
            return None;
        }
        Some(Self { parsed, headers, header_len, idents, seq, next_seq, push, payload })
    }
}

/// Returns whether segmentation repeats the tunnel header in each packet: that of a tunnel over UDP, GRE without
/// checksum and sequence number, or none between two IP headers. A routing header may precede the inner IP header.
fn repeats(data: &[u8], parsed: &Parsed) -> bool {
    let outer = parsed.outer();
    let next_is = |at: usize, protocols: &[IpProtocol]| {
        data.get(outer.l3() + at).is_some_and(|next| protocols.contains(&IpProtocol(*next)))
    };
    let is_routed = outer.l3_type() == L3Type::Ipv6
        && !outer.is_fragment()
        && next_is(6, &[IpProtocol::ROUTING])
        && next_is(wirepath_wire::ipv6::HEADER_LEN, &[IpProtocol::IPV4, IpProtocol::IPV6]);
    if !is_routed && !is_simple(outer) {
        return false;
    }
    match outer.l4_type() {
        L4Type::Udp => true,
        L4Type::Gre => outer.gre(data).is_some_and(|gre| gre.checksum().is_none() && gre.sequence().is_none()),
        _ => matches!(outer.protocol(), IpProtocol::IPV4 | IpProtocol::IPV6),
    }
}

/// Returns whether the IP header has neither options nor extension headers, and the packet is no fragment.
fn is_simple(layers: &HeaderOffsets) -> bool {
    let len = match layers.l3_type() {
        L3Type::Ipv4 => ipv4::HEADER_LEN,
        L3Type::Ipv6 => wirepath_wire::ipv6::HEADER_LEN,
        _ => return false,
    };
    !layers.is_fragment() && layers.l4() - layers.l3() == len
}

/// Clears the fields of an IP header that differ between packets of a superframe.
fn blank_ip(headers: &mut [u8; MAX_HEADER], layers: &HeaderOffsets) {
    let l3 = layers.l3();
    if layers.l3_type() == L3Type::Ipv4 {
        headers[l3 + 2..l3 + 6].fill(0);
        headers[l3 + 10..l3 + 12].fill(0);
    } else {
        headers[l3 + 4..l3 + 6].fill(0);
    }
}

/// Clears length and checksum of the UDP header at `l4`. Returns whether it has a checksum. Equal headers shall mean
/// that both have one, or none.
fn blank_udp(headers: &mut [u8; MAX_HEADER], l4: usize) -> bool {
    headers[l4 + 4..l4 + 6].fill(0);
    let has_checksum = headers[l4 + 6..l4 + 8] != [0, 0];
    headers[l4 + 6..l4 + 8].fill(u8::from(has_checksum));
    has_checksum
}

/// Returns whether the checksum of a TCP or UDP header is right.
fn is_good(packet: &Packet, layers: &HeaderOffsets, good: ChecksumStatus) -> bool {
    if packet.checksum_status().contains(good) {
        return true;
    }
    let Some(span) = ChecksumSpan::of(packet.data(), layers) else { return false };
    if span.end != packet.len() {
        return false;
    }
    packet.data().get(span.start..).is_some_and(|bytes| span.pseudo.and(checksum::sum(bytes)).is_valid())
}

impl Flow {
    /// Returns whether a packet with equal headers is the next one of the superframe.
    fn accepts(&self, here: &Candidate) -> bool {
        let count = self.rest.len() as u16 + 1;
        let inner = self.parsed.inner().is_some();
        let in_order = |layers: &HeaderOffsets, level: usize| {
            let l3 = layers.l3();
            layers.l3_type() != L3Type::Ipv4
                || self.headers[l3 + 6] & 0x40 != 0
                || here.idents[level] == self.idents[level].wrapping_add(count)
        };
        here.seq == self.next_seq
            && here.payload <= self.mss
            && self.len + here.payload <= MAX_LEN
            && in_order(self.parsed.innermost(), 1)
            && (!inner || in_order(self.parsed.outer(), 0))
    }

    /// Makes the first packet the superframe.
    fn finish(&mut self, first: &mut Packet) {
        // From the last to the first, so that each is appended to a short packet.
        let mut behind: Option<Packet> = None;
        for mut packet in self.rest.drain(..).rev() {
            if let Some(behind) = behind.take() {
                // The sum of the lengths was limited.
                let _ = packet.append_segment(behind);
            }
            behind = Some(packet);
        }
        if let Some(behind) = behind {
            let _ = first.append_segment(behind);
        }
        let (parsed, len) = (self.parsed, first.len());
        let own = *parsed.innermost();
        let data = first.data_mut();
        set_ip_length(data, &own, len);
        let is_tcp = own.l4_type() == L4Type::Tcp;
        let (transport, field) =
            if is_tcp { (IpProtocol::TCP, own.l4() + 16) } else { (IpProtocol::UDP, own.l4() + 6) };
        let has_checksum = is_tcp || data[field..field + 2] != [0, 0];
        if self.push {
            data[own.l4() + 13] |= PSH;
        }
        if !is_tcp {
            set_udp_length(data, &own, len);
        }
        if has_checksum {
            let pseudo = checksum_offload::pseudo(data, &own, transport, len - own.l4()).unwrap_or(Sum::ZERO);
            data[field..field + 2].copy_from_slice(&pseudo.fold().to_be_bytes());
        }
        if parsed.inner().is_some() {
            let outer = parsed.outer();
            set_ip_length(data, outer, len);
            if outer.l4_type() == L4Type::Udp {
                set_udp_length(data, outer, len);
            }
        }
        first.set_header_lengths(HeaderLengths::from(&parsed));
        first.set_mss(self.mss as u16);
        let requests = Flags::TX_SEGMENT.with(Flags::TX_L3_CHECKSUM);
        let requests = if has_checksum { requests.with(Flags::TX_L4_CHECKSUM) } else { requests };
        first.set_flags(first.flags().with(requests));
        first.set_checksum_status(ChecksumStatus::NONE);
    }
}

/// Writes the length of a UDP datagram that ends with the frame.
fn set_udp_length(data: &mut [u8], layers: &HeaderOffsets, len: usize) {
    let l4 = layers.l4();
    data[l4 + 4..l4 + 6].copy_from_slice(&((len - l4) as u16).to_be_bytes());
}

/// Writes the length of an IP packet that ends with the frame, and the IPv4 checksum.
fn set_ip_length(data: &mut [u8], layers: &HeaderOffsets, len: usize) {
    let l3 = layers.l3();
    if layers.l3_type() == L3Type::Ipv4 {
        data[l3 + 2..l3 + 4].copy_from_slice(&((len - l3) as u16).to_be_bytes());
        data[l3 + 10..l3 + 12].fill(0);
        let sum = checksum::sum(&data[l3..l3 + ipv4::HEADER_LEN]).checksum();
        data[l3 + 10..l3 + 12].copy_from_slice(&sum.to_be_bytes());
    } else {
        data[l3 + 4..l3 + 6].copy_from_slice(&((len - l3 - wirepath_wire::ipv6::HEADER_LEN) as u16).to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use wirepath_wire::build::{OuterChecksum, OuterHeaders, VxlanConfig};
    use wirepath_wire::tcp::flags::{CWR, ECE, FIN, RST, SYN, URG};
    use wirepath_wire::{EtherType, MacAddr, Vni, ethernet, ipv6, parse, tcp, udp};

    use super::*;
    use crate::Pool;
    use crate::superframe::Cutter;

    /// A TCP packet or a UDP datagram, as a sender with a small MTU sends it.
    #[derive(Clone, Debug)]
    struct Spec {
        v6: bool,
        /// In a UDP datagram, whether it has a checksum.
        udp: Option<bool>,
        /// IP version of the tunnel, and whether it has UDP checksums.
        tunnel: Option<(bool, bool)>,
        port: u16,
        seq: u32,
        flags: u8,
        window: u16,
        class: u8,
        ident: u16,
        df: bool,
        payload: Vec<u8>,
    }

    impl Default for Spec {
        fn default() -> Self {
            Self {
                v6: false,
                udp: None,
                tunnel: None,
                port: 5000,
                seq: 1,
                flags: ACK,
                window: 512,
                class: 0,
                ident: 9,
                df: false,
                payload: vec![7; 100],
            }
        }
    }

    fn bytes_of(spec: &Spec) -> Vec<u8> {
        let at = 14 + if spec.v6 { 40 } else { 20 };
        let (l4_len, protocol) = if spec.udp.is_some() { (8, IpProtocol::UDP) } else { (32, IpProtocol::TCP) };
        let mut frame = vec![1u8; at + l4_len];
        let ethertype = if spec.v6 { EtherType::IPV6 } else { EtherType::IPV4 };
        let (dst, src) = (MacAddr::new(2, 0, 0, 0, 0, 2), MacAddr::new(2, 0, 0, 0, 0, 1));
        ethernet::Repr { dst, src, ethertype }.emit(&mut frame).unwrap();
        let payload_len = (l4_len + spec.payload.len()) as u16;
        if spec.v6 {
            let (src, dst) = ("fd00::1".parse().unwrap(), "fd00::2".parse().unwrap());
            let traffic_class = spec.class;
            ipv6::Repr { src, dst, next_header: protocol, payload_len, hop_limit: 64, traffic_class, flow_label: 5 }
                .emit(&mut frame[14..])
                .unwrap();
        } else {
            ipv4::Repr {
                src: [10, 1, 0, 1].into(),
                dst: [10, 1, 0, 2].into(),
                protocol,
                payload_len,
                ttl: 64,
                traffic_class: spec.class,
                ident: spec.ident,
                fragment_word: if spec.df { ipv4::DONT_FRAGMENT } else { 0 },
            }
            .emit(&mut frame[14..])
            .unwrap();
        }
        if spec.udp.is_some() {
            // A window chooses another destination.
            let (src_port, dst_port, payload_len) = (spec.port, spec.window, spec.payload.len() as u16);
            udp::Repr { src_port, dst_port, payload_len }.emit(&mut frame[at..]).unwrap();
        } else {
            let (flags, window) = (spec.flags, spec.window);
            tcp::Repr { src_port: spec.port, dst_port: 80, seq: spec.seq, ack: 7, flags, window, urgent: 0 }
                .emit(&mut frame[at..])
                .unwrap();
            frame[at + 12] = 8 << 4;
        }
        frame.extend(&spec.payload);
        if spec.udp != Some(false) {
            let span = ChecksumSpan::of(&frame, parse(&frame).unwrap().outer()).unwrap();
            span.transport.set_field(&mut frame[at..], 0);
            let value = span.transport.encode(span.pseudo.and(checksum::sum(&frame[at..])));
            span.transport.set_field(&mut frame[at..], value);
        }
        let Some((v6, has_checksum)) = spec.tunnel else { return frame };
        let (src, dst) = if v6 { ("fd00:9::1", "fd00:9::2") } else { ("10.9.0.1", "10.9.0.2") };
        let encap = OuterHeaders::vxlan(&VxlanConfig {
            src_mac: MacAddr::new(2, 0, 0, 0, 9, 1),
            dst_mac: MacAddr::new(2, 0, 0, 0, 9, 2),
            tags: &[],
            src: src.parse().unwrap(),
            dst: dst.parse().unwrap(),
            dst_port: 4789,
            vni: Vni::new(77).unwrap(),
            ttl: 64,
            traffic_class: 0,
            flow_label: 0,
            checksum: if has_checksum { OuterChecksum::Always } else { OuterChecksum::Zero },
        })
        .unwrap();
        let mut outer = vec![0; encap.len()];
        let mut patch = encap.fields(frame.len(), 50000);
        patch.inner_sum = checksum::sum(&frame);
        encap.emit(&mut outer, &patch).unwrap();
        outer.extend(frame);
        outer
    }

    fn packet(pool: &Pool, bytes: &[u8]) -> Packet {
        let mut packet = pool.take().unwrap();
        assert!(packet.extend_from_slice(bytes, pool));
        packet
    }

    /// Joins these frames, and cuts all superframes again. Returns the lengths of the packets in between, and the
    /// frames.
    fn round_trip(pool: &Pool, frames: &[Vec<u8>]) -> (Vec<usize>, Vec<Vec<u8>>) {
        let mut batch: Batch = frames.iter().map(|frame| packet(pool, frame)).collect();
        let joined = Gro::new().join(&mut batch, 0);
        assert_eq!(batch.len() + joined, frames.len());
        let (mut lengths, mut cut) = (Vec::new(), Vec::new());
        let all = batch.len();
        batch.drain_front(all, |packet| {
            lengths.push(packet.len());
            if !packet.flags().contains(Flags::TX_SEGMENT) {
                return cut.push(packet.data().to_vec());
            }
            // A superframe is a valid packet, but for its checksum.
            parse(&packet.segments().flatten().copied().collect::<Vec<u8>>()).unwrap();
            let mut cutter = Cutter::new(packet, None).unwrap();
            while let Some(frame) = cutter.next_frame(pool) {
                cut.push(frame.unwrap().segments().flatten().copied().collect());
            }
        });
        (lengths, cut)
    }

    /// Packets of a flow, one after the other.
    fn stream(first: &Spec, n: u16) -> Vec<Spec> {
        let len = first.payload.len() as u32;
        let next = |i: u16| Spec {
            seq: first.seq.wrapping_add(u32::from(i) * len),
            ident: first.ident.wrapping_add(i),
            payload: (0..len).map(|at| (at as u16 ^ i) as u8).collect(),
            ..first.clone()
        };
        (0..n).map(next).collect()
    }

    #[test]
    fn packets_of_a_stream_become_one() {
        let pool = Pool::new("gro", 512).unwrap();
        for v6 in [false, true] {
            // Tunnel packets over IPv4 have the identification 0 and "don't fragment".
            for tunnel in [None, Some((false, false)), Some((true, true)), Some((true, false))] {
                let payload = vec![3; 1391];
                let mut specs = stream(&Spec { v6, tunnel, payload, seq: u32::MAX - 2000, ..Spec::default() }, 40);
                specs[39].payload.truncate(10);
                specs[39].flags |= PSH;
                let frames: Vec<_> = specs.iter().map(bytes_of).collect();
                let (lengths, cut) = round_trip(&pool, &frames);
                assert_eq!(lengths.len(), 1, "v6 {v6}, tunnel {tunnel:?}: {lengths:?}");
                for (i, (frame, want)) in cut.iter().zip(&frames).enumerate() {
                    let mut frame = frame.clone();
                    if matches!(tunnel, Some((false, _))) {
                        // The outer identification counts, where it has no meaning.
                        frame[18..20].fill(0);
                        frame[24..26].copy_from_slice(&want[24..26]);
                    }
                    assert_eq!(frame, *want, "v6 {v6}, tunnel {tunnel:?}, packet {i}");
                }
                assert_eq!(cut.len(), frames.len());
            }
        }
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn datagrams_of_a_burst_become_one() {
        let pool = Pool::new("gro", 512).unwrap();
        for v6 in [false, true] {
            for (has_checksum, tunnel) in [
                (true, None),
                (false, None),
                (true, Some((false, false))),
                (false, Some((true, false))),
                (true, Some((true, true))),
            ] {
                let payload = vec![3; 1391];
                let mut specs = stream(&Spec { v6, udp: Some(has_checksum), tunnel, payload, ..Spec::default() }, 40);
                specs[39].payload.truncate(10);
                let frames: Vec<_> = specs.iter().map(bytes_of).collect();
                let (lengths, cut) = round_trip(&pool, &frames);
                assert_eq!(lengths.len(), 1, "v6 {v6}, checksum {has_checksum}, tunnel {tunnel:?}: {lengths:?}");
                for (i, (frame, want)) in cut.iter().zip(&frames).enumerate() {
                    let mut frame = frame.clone();
                    if matches!(tunnel, Some((false, _))) {
                        frame[18..20].fill(0);
                        frame[24..26].copy_from_slice(&want[24..26]);
                    }
                    assert_eq!(frame, *want, "v6 {v6}, checksum {has_checksum}, tunnel {tunnel:?}, datagram {i}");
                }
                assert_eq!(cut.len(), frames.len());
            }
        }
        assert_eq!(pool.outstanding(), 0);
    }

    /// Returns how many packets remain of three, of which some are changed.
    fn left_of_three(change: impl FnOnce(&mut Vec<Spec>)) -> usize {
        left_of_three_like(&Spec::default(), change)
    }

    /// Does the same for datagrams.
    fn left_of_three_datagrams(change: impl FnOnce(&mut Vec<Spec>)) -> usize {
        left_of_three_like(&Spec { udp: Some(true), ..Spec::default() }, change)
    }

    fn left_of_three_like(first: &Spec, change: impl FnOnce(&mut Vec<Spec>)) -> usize {
        let pool = Pool::new("gro", 64).unwrap();
        let mut specs = stream(first, 3);
        change(&mut specs);
        let frames: Vec<_> = specs.iter().map(bytes_of).collect();
        let (lengths, cut) = round_trip(&pool, &frames);
        assert_eq!(cut, frames);
        lengths.len()
    }

    #[test]
    fn flags_marks_and_gaps_end_a_superframe() {
        assert_eq!(left_of_three(|_| {}), 1);
        for flag in [FIN, SYN, RST, URG, ECE, CWR] {
            assert_eq!(left_of_three(|specs| specs[1].flags |= flag), 3, "flag {flag:#x}");
            assert_eq!(left_of_three(|specs| specs[2].flags |= flag), 2, "flag {flag:#x} at the end");
        }
        assert_eq!(left_of_three(|specs| specs[1].flags |= PSH), 2);
        assert_eq!(left_of_three(|specs| specs[1].flags = 0), 3, "no acknowledgment");
        assert_eq!(left_of_three(|specs| specs[1].class = 3), 3, "congestion experienced");
        assert_eq!(left_of_three(|specs| specs[1].class = 0x20), 3, "another DSCP");
        assert_eq!(left_of_three(|specs| specs[1].window = 3), 3);
        assert_eq!(left_of_three(|specs| specs[1].seq += 1), 3, "a gap");
        assert_eq!(left_of_three(|specs| specs[2].seq -= 1), 2, "an overlap");
        assert_eq!(left_of_three(|specs| specs[1].ident += 5), 3);
        assert_eq!(left_of_three(|specs| specs[2].payload.push(1)), 2, "longer than the first one");
        assert_eq!(left_of_three(|specs| specs[2].payload.clear()), 2, "an acknowledgment alone");
        let shorter = |specs: &mut Vec<Spec>| {
            specs[1].payload.truncate(60);
            specs[2].seq -= 40;
        };
        assert_eq!(left_of_three(shorter), 2, "a short packet is the last one");
    }

    #[test]
    fn other_headers_and_lengths_end_a_superframe_of_datagrams() {
        assert_eq!(left_of_three_datagrams(|_| {}), 1);
        assert_eq!(left_of_three_datagrams(|specs| specs[1].class = 3), 3, "congestion experienced");
        assert_eq!(left_of_three_datagrams(|specs| specs[1].class = 0x20), 3, "another DSCP");
        assert_eq!(left_of_three_datagrams(|specs| specs[1].df = true), 3);
        assert_eq!(left_of_three_datagrams(|specs| specs[1].udp = Some(false)), 3, "no checksum");
        assert_eq!(left_of_three_datagrams(|specs| specs[1].port += 1), 3, "another source port");
        assert_eq!(left_of_three_datagrams(|specs| specs[1].window += 1), 3, "another destination port");
        assert_eq!(left_of_three_datagrams(|specs| specs[1].ident += 5), 3);
        assert_eq!(left_of_three_datagrams(|specs| specs[1].payload.truncate(60)), 2, "a short one is the last");
        assert_eq!(left_of_three_datagrams(|specs| specs[2].payload.push(1)), 2, "longer than the first one");
        assert_eq!(left_of_three_datagrams(|specs| specs[1].payload.clear()), 3, "an empty datagram");
        assert_eq!(left_of_three_datagrams(|specs| specs.iter_mut().for_each(|spec| spec.payload.truncate(3))), 3);
        for port in [4789, 4790, 6081, 6635, 3784, 4784] {
            let to_port = |specs: &mut Vec<Spec>| specs.iter_mut().for_each(|spec| spec.window = port);
            assert_eq!(left_of_three_datagrams(to_port), 3, "port {port}");
        }
        // Headers of VXLAN, VXLAN-GPE and GENEVE on other ports.
        for header in [[8, 0, 0, 0], [0x0c, 0, 0, 3], [0, 0, 0x65, 0x58], [2, 0, 8, 0], [0, 0x40, 0x86, 0xdd]] {
            let carry =
                |specs: &mut Vec<Spec>| specs.iter_mut().for_each(|spec| spec.payload[..4].copy_from_slice(&header));
            assert_eq!(left_of_three_datagrams(carry), 3, "{header:02x?}");
        }
        // Three flows in turn, and TCP with the same ports.
        let pool = Pool::new("gro", 64).unwrap();
        let flows = [(5000, Some(true)), (5001, Some(true)), (5002, Some(false)), (5000, None)];
        let flows = flows.map(|(port, udp)| stream(&Spec { port, udp, ..Spec::default() }, 10));
        let frames: Vec<_> = (0..40).map(|i| bytes_of(&flows[i % 4][i / 4])).collect();
        let (lengths, mut cut) = round_trip(&pool, &frames);
        assert_eq!((lengths.len(), cut.len()), (4, 40));
        cut.sort();
        let mut frames = frames;
        frames.sort();
        assert!(cut == frames);
    }

    #[test]
    fn packets_with_a_wrong_checksum_stay_alone() {
        let pool = Pool::new("gro", 64).unwrap();
        for udp in [None, Some(true)] {
            for tunnel in [None, Some((true, true))] {
                let specs = stream(&Spec { udp, tunnel, ..Spec::default() }, 3);
                let mut frames: Vec<_> = specs.iter().map(bytes_of).collect();
                *frames[1].last_mut().unwrap() ^= 1;
                let (lengths, cut) = round_trip(&pool, &frames);
                assert_eq!((lengths.len(), cut), (3, frames));
            }
        }
    }

    #[test]
    fn padding_and_fragments_stay_alone() {
        let pool = Pool::new("gro", 64).unwrap();
        let whole: Vec<_> = stream(&Spec { udp: Some(false), ..Spec::default() }, 3).iter().map(bytes_of).collect();
        let mut padded = whole.clone();
        padded[1].push(0);
        let mut fragments = whole.clone();
        for frame in &mut fragments {
            frame[20] = 0x20;
            ipv4::ViewMut::new(&mut frame[14..]).unwrap().fill_checksum();
        }
        // The datagram ends before the IP packet.
        let mut short = whole;
        short[1][39] -= 1;
        for frames in [padded, fragments, short] {
            let (lengths, cut) = round_trip(&pool, &frames);
            assert_eq!((lengths.len(), cut), (3, frames));
        }
    }

    /// Puts a frame into GRE with these flags, or without flags the packet of the frame directly into IP.
    fn without_udp(inner: &[u8], flags: Option<u8>, ident: u16) -> Vec<u8> {
        let (protocol, header, carried) = match flags {
            Some(flags) => {
                let options = 4 * flags.count_ones() as usize;
                (IpProtocol::GRE, [&[flags, 0, 0x65, 0x58][..], &vec![ident as u8; options]].concat(), inner)
            }
            None if inner[14] >> 4 == 4 => (IpProtocol::IPV4, vec![], &inner[14..]),
            None => (IpProtocol::IPV6, vec![], &inner[14..]),
        };
        let mut frame = inner[..34].to_vec();
        frame[12..14].copy_from_slice(&EtherType::IPV4.0.to_be_bytes());
        let (src, dst) = ([10, 9, 0, 1].into(), [10, 9, 0, 2].into());
        let payload_len = (header.len() + carried.len()) as u16;
        ipv4::Repr { src, dst, protocol, payload_len, ttl: 64, traffic_class: 0, ident, fragment_word: 0 }
            .emit(&mut frame[14..])
            .unwrap();
        [&frame[..], &header, carried].concat()
    }

    #[test]
    fn packets_in_tunnels_without_udp_become_one() {
        let pool = Pool::new("gro", 64).unwrap();
        for v6 in [false, true] {
            // Headers with a checksum, and those with a sequence number, are of one packet each.
            for (flags, left) in [(None, 1), (Some(0), 1), (Some(0x80), 3), (Some(0x10), 3)] {
                let specs = stream(&Spec { v6, ..Spec::default() }, 3);
                let wrap = |(ident, spec)| without_udp(&bytes_of(spec), flags, ident);
                let frames: Vec<_> = (65_535..=65_535).chain(0..2).zip(&specs).map(wrap).collect();
                let (lengths, cut) = round_trip(&pool, &frames);
                assert_eq!((lengths.len(), cut), (left, frames), "v6 {v6}, flags {flags:?}");
            }
        }
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn random_streams_keep_their_bytes_and_their_order() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let pool = Pool::new("gro", 1024).unwrap();
        let mut joined = 0;
        for _ in 0..400 {
            let mut flows: Vec<Spec> = (0..random.u16(1..12))
                .map(|port| Spec {
                    v6: random.bool(),
                    udp: [None, Some(true), Some(false)][random.usize(..3)],
                    tunnel: [None, None, Some((true, random.bool()))][random.usize(..3)],
                    port,
                    seq: random.u32(..),
                    ident: random.u16(..),
                    payload: vec![0; random.usize(1..600)],
                    ..Spec::default()
                })
                .collect();
            let mut frames = Vec::new();
            for _ in 0..random.usize(2..=BATCH) {
                let at = random.usize(..flows.len());
                let flow = &mut flows[at];
                let mut spec = flow.clone();
                spec.payload.iter_mut().for_each(|byte| *byte = random.u8(..));
                match random.u8(..40) {
                    0 => spec.flags |= PSH,
                    1 => spec.flags |= 1 << random.u8(..8),
                    2 => spec.class = random.u8(..),
                    3 => spec.seq = random.u32(..),
                    4 => spec.ident = random.u16(..),
                    5 => spec.payload.truncate(random.usize(..100)),
                    6 if spec.udp.is_none() => spec.window = random.u16(..),
                    _ => {}
                }
                flow.seq = spec.seq.wrapping_add(spec.payload.len() as u32);
                flow.ident = spec.ident.wrapping_add(1);
                let mut frame = bytes_of(&spec);
                if random.u8(..40) == 0 {
                    let place = random.usize(..frame.len());
                    frame[place] ^= 1 << random.u8(..8);
                    // Its headers may now be those of a flow of its own, which no sequence numbers keep in order.
                    let at = if flows[at].udp.is_some() { flows.len() + frames.len() } else { at };
                    frames.push((at, frame));
                    continue;
                }
                frames.push((at, frame));
            }
            let bytes: Vec<_> = frames.iter().map(|(_, frame)| frame.clone()).collect();
            let (lengths, cut) = round_trip(&pool, &bytes);
            joined += bytes.len() - lengths.len();
            // Each flow has its frames in order. Equal frames are of one flow, so that a search finds the right one.
            let mut next = vec![0; flows.len() + frames.len()];
            for frame in &cut {
                let of_flow = |at: usize| frames.iter().filter(move |(flow, _)| *flow == at).map(|(_, frame)| frame);
                let found = (0..next.len()).find(|at| of_flow(*at).nth(next[*at]) == Some(frame));
                next[found.expect("a frame that was not received, or too early")] += 1;
            }
            assert_eq!(cut.len(), frames.len());
        }
        assert!(joined > 1000, "{joined} packets joined");
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn hostile_bytes_do_no_harm() {
        let mut random = fastrand::Rng::with_seed(7);
        let pool = Pool::new("gro", 1024).unwrap();
        for _ in 0..2000 {
            let udp = [None, Some(true), Some(false)][random.usize(..3)];
            let frames: Vec<Vec<u8>> = stream(&Spec { v6: random.bool(), udp, ..Spec::default() }, 4)
                .iter()
                .map(|spec| {
                    let tunnel = [None, Some((random.bool(), random.bool()))][random.usize(..2)];
                    let mut frame = bytes_of(&Spec { tunnel, ..spec.clone() });
                    for _ in 0..random.usize(..4) {
                        let place = random.usize(..frame.len());
                        frame[place] = random.u8(..);
                    }
                    frame.truncate(random.usize(..=2 * frame.len()).min(frame.len()));
                    frame
                })
                .collect();
            let mut batch: Batch = frames.iter().map(|frame| packet(&pool, frame)).collect();
            for packet in batch.iter_mut() {
                if random.bool() {
                    packet.set_checksum_status(ChecksumStatus::L4_GOOD.with(ChecksumStatus::OUTER_L4_GOOD));
                }
            }
            Gro::new().join(&mut batch, random.usize(..3));
            for packet in batch.iter_mut() {
                if random.bool() {
                    packet.set_flags(Flags::TX_SEGMENT);
                    packet.set_mss(random.u16(..));
                }
                crate::superframe::longest_frame(packet);
            }
            let all = batch.len();
            batch.drain_front(all, |packet| {
                let l4 = random.bool().then(|| random.usize(..200));
                if let Ok(mut cutter) = Cutter::new(packet, l4) {
                    while cutter.next_frame(&pool).is_some() {}
                }
            });
        }
        assert_eq!(pool.outstanding(), 0);
    }
}
