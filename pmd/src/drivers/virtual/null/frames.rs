use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use wirepath_wire::build::{OuterChecksum, OuterHeaders, VxlanConfig};
use wirepath_wire::tcp::{self, flags};
use wirepath_wire::{EtherType, MacAddr, Vni, checksum, ethernet, ipv4, ipv6, udp, vxlan};

use wirepath_packet::{DATA_ROOM, HEADROOM, MetaTemplate, Packet, Pool};
use wirepath_settings::{Choice, ConfigError, ConfigTable, Integer, Key, Parsed, Required, Settings, WithDefault};

const MAC_ADDRESS: &str = "a MAC address such as \"02:00:00:00:00:01\"";
const IP_ADDRESS: &str = "an IP address";

/// Value of the key `source`.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Source {
    None,
    Untouched,
    Ip { ipv6: bool, content: Content },
}

impl Source {
    const fn ipv4(content: Content) -> Self {
        Self::Ip { ipv6: false, content }
    }

    const fn ipv6(content: Content) -> Self {
        Self::Ip { ipv6: true, content }
    }
}

pub(super) const SOURCE: Key<WithDefault<Choice<Source>>> = Key::choice(
    "source",
    &[
        ("none", Source::None, "receives nothing"),
        ("untouched", Source::Untouched, "receives buffers of which only the length is set"),
        ("udp4", Source::ipv4(Content::Udp), "receives UDP datagrams over IPv4"),
        ("udp6", Source::ipv6(Content::Udp), "receives UDP datagrams over IPv6"),
        ("tcp4", Source::ipv4(Content::TcpData), "receives TCP segments with data over IPv4"),
        ("tcp6", Source::ipv6(Content::TcpData), "receives TCP segments with data over IPv6"),
        ("tcp4_syn", Source::ipv4(Content::TcpSyn), "receives TCP SYNs over IPv4"),
        ("tcp6_syn", Source::ipv6(Content::TcpSyn), "receives TCP SYNs over IPv6"),
        ("tcp4_syn_ack", Source::ipv4(Content::TcpSynAck), "receives the SYN/ACKs that answer the SYNs of `tcp4_syn`"),
        ("tcp6_syn_ack", Source::ipv6(Content::TcpSynAck), "receives the SYN/ACKs that answer the SYNs of `tcp6_syn`"),
    ],
)
.default_word("none")
.needs(&[("tcp6", "size = 74"), ("tcp6_syn", "size = 74"), ("tcp6_syn_ack", "size = 74")])
.about("Frames that the port receives for ever, or until `count`.");
pub(super) const SIZE: Key<WithDefault<Integer<usize>>> =
    Key::integer("size", 60..=9216).unit("bytes").default(64).about(
        "Length of a frame without frame check sequence. With `vxlan` it is that of the inner frame. TCP over IPv6 \
         needs at least 74 bytes, and 4 more with `vlan`.",
    );
pub(super) const FLOWS: Key<WithDefault<Integer<u32>>> = Key::integer("flows", 1..=4_000_000)
    .default(1)
    .about("Flows: each has other addresses and ports. The frames of all flows take at most 1 GiB.");
pub(super) const VLAN: Key<Integer<u16>> =
    Key::integer("vlan", 1..=4094).absent("frames without a tag").about("VLAN ID of the frames.");
pub(super) const SOURCE_MAC: Key<Parsed<MacAddr>> = Key::parsed("source_mac", MAC_ADDRESS)
    .same_as("\"02:11:22:33:44:55\"")
    .about("Ethernet source address of the frames.");
pub(super) const DESTINATION_MAC: Key<Parsed<MacAddr>> = Key::parsed("destination_mac", MAC_ADDRESS)
    .absent("another address for each flow, from 02:66:77:00:00:00 on")
    .about("Ethernet destination address of the frames.");

const TUNNEL_VNI: Key<WithDefault<Integer<u32>>> =
    Key::integer("vni", 0..=0xff_ffff).default(1).about("VXLAN network identifier.");
const TUNNEL_SOURCE_MAC: Key<Required<Parsed<MacAddr>>> =
    Key::parsed("source_mac", MAC_ADDRESS).required().about("Outer Ethernet source address.");
const TUNNEL_DESTINATION_MAC: Key<Required<Parsed<MacAddr>>> =
    Key::parsed("destination_mac", MAC_ADDRESS).required().about("Outer Ethernet destination address.");
const TUNNEL_SOURCE: Key<Required<Parsed<IpAddr>>> =
    Key::parsed("source", IP_ADDRESS).required().about("Outer IP source address.");
const TUNNEL_DESTINATION: Key<Required<Parsed<IpAddr>>> = Key::parsed("destination", IP_ADDRESS)
    .required()
    .about("Outer IP destination address, of the same IP version as the source.");

pub(super) static VXLAN: ConfigTable = ConfigTable {
    name: "vxlan",
    about: "Encapsulates the generated frames in VXLAN (RFC 7348).",
    absent: "the frames are not encapsulated",
    keys: &[&TUNNEL_VNI, &TUNNEL_SOURCE_MAC, &TUNNEL_DESTINATION_MAC, &TUNNEL_SOURCE, &TUNNEL_DESTINATION],
    example: "[port.null.vxlan]\nvni = 42\nsource_mac = \"02:00:00:00:00:01\"\n\
              destination_mac = \"02:00:00:00:00:02\"\nsource = \"10.9.0.2\"\ndestination = \"10.9.0.1\"\n",
    ..ConfigTable::EMPTY
};

/// Bytes that are copied into a packet at once.
const CHUNK: usize = 64;

/// Maximum memory for the frames of one source.
const MAX_MEMORY: u64 = 1 << 30;

/// Frames of a source, one for each flow, sent in turn.
#[derive(Clone, Debug)]
pub enum Frames {
    /// Unmodified buffers of which only the length is set. This measures the cost of moving packets without
    /// generating them.
    Untouched {
        /// Bytes of a frame without frame check sequence, at most [`DATA_ROOM`].
        size: usize,
    },
    /// Copies of prepared frames.
    Templates(Arc<Templates>),
}

/// Prepared frames of equal length.
#[derive(Debug)]
pub struct Templates {
    about: String,
    len: usize,
    chunks: usize,
    bytes: Vec<[u8; CHUNK]>,
}

/// Content of generated IP packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Content {
    /// UDP datagrams.
    #[default]
    Udp,
    /// TCP segments with data of established connections: flags PSH and ACK.
    TcpData,
    /// TCP segments that open a connection: flag SYN, sequence number 1.
    TcpSyn,
    /// TCP segments that answer those of [`Self::TcpSyn`]: IP addresses and ports are exchanged, flags SYN and ACK.
    TcpSynAck,
}

impl Content {
    const fn transport(self) -> checksum::Transport {
        match self {
            Self::Udp => checksum::Transport::Udp,
            Self::TcpData | Self::TcpSyn | Self::TcpSynAck => checksum::Transport::Tcp,
        }
    }

    /// Length of the header in bytes.
    const fn header_len(self) -> usize {
        match self {
            Self::Udp => udp::HEADER_LEN,
            Self::TcpData | Self::TcpSyn | Self::TcpSynAck => tcp::HEADER_LEN,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Udp => "UDP",
            Self::TcpData => "TCP",
            Self::TcpSyn => "TCP SYN",
            Self::TcpSynAck => "TCP SYN/ACK",
        }
    }

    /// Writes the header and the checksum. `packet` has space for them.
    fn emit(self, packet: &mut [u8], (src_port, dst_port): (u16, u16), pseudo: checksum::Sum) {
        const ROOM: &str = "length was checked";
        let segment = |seq, ack, flags| tcp::Repr { src_port, dst_port, seq, ack, flags, window: 65_535, urgent: 0 };
        let emitted = match self {
            Self::Udp => {
                let payload_len = (packet.len() - udp::HEADER_LEN) as u16;
                udp::Repr { src_port, dst_port, payload_len }.emit(packet)
            }
            Self::TcpData => segment(2, 2, flags::PSH | flags::ACK).emit(packet),
            Self::TcpSyn => segment(1, 0, flags::SYN).emit(packet),
            Self::TcpSynAck => segment(1, 2, flags::SYN | flags::ACK).emit(packet),
        };
        emitted.expect(ROOM);
        self.transport().fill(packet, pseudo);
    }
}

/// Format of the generated frames, with different addresses and ports for each flow.
#[derive(Clone, Debug)]
pub struct FrameSpec {
    /// Bytes of a frame without frame check sequence: 60 to 9216.
    pub size: usize,
    /// Number of flows.
    pub flows: u32,
    /// IPv6 instead of IPv4.
    pub ipv6: bool,
    /// Content of the IP packets.
    pub content: Content,
    /// Source address. With `vary_source_mac` the low 24 bits count up with the flow.
    pub source_mac: MacAddr,
    /// True if each flow has a different source address.
    pub vary_source_mac: bool,
    /// Destination address. With `vary_destination_mac` the low 24 bits count up with the flow.
    pub destination_mac: MacAddr,
    /// True if each flow has a different destination address.
    pub vary_destination_mac: bool,
    /// True if each flow has a network of its own as destination: 11.0.0.0/24 or 2001:db8:2::/64 and those that follow.
    pub vary_network: bool,
    /// VLAN ID of the first flow.
    pub vlan: Option<u16>,
    /// Number of VLANs, which the flows have in turn from `vlan` on.
    pub vlans: u16,
    /// Outer headers of tunnels, which the flows have in turn; without them the frames are not encapsulated. All are of
    /// the same length. `size` is that of the inner frame. Tunnels that carry IP packets have it without its Ethernet
    /// header and its VLAN tag.
    pub tunnels: Vec<OuterHeaders>,
}

impl Default for FrameSpec {
    fn default() -> Self {
        Self {
            size: 64,
            flows: 1,
            ipv6: false,
            content: Content::Udp,
            source_mac: MacAddr([2, 0x11, 0x22, 0x33, 0x44, 0x55]),
            vary_source_mac: false,
            destination_mac: MacAddr([2, 0x66, 0x77, 0, 0, 0]),
            vary_destination_mac: true,
            vary_network: false,
            vlan: None,
            vlans: 1,
            tunnels: Vec::new(),
        }
    }
}

fn mac_of_flow(base: MacAddr, flow: u32) -> MacAddr {
    let low = (base.to_u64() as u32).wrapping_add(flow) & 0xff_ffff;
    MacAddr::from_u64(base.to_u64() & !0xff_ffff | u64::from(low))
}

impl FrameSpec {
    /// Generates the frames.
    pub fn build(&self) -> Result<Frames, String> {
        let ip = if self.ipv6 { ipv6::HEADER_LEN } else { ipv4::HEADER_LEN };
        let least = self.ethernet_len() + ip + self.content.header_len();
        if !(least..=9216).contains(&self.size) {
            return Err(format!("frames of {} bytes are not possible, only {least} to 9216", self.size));
        }
        let memory = u64::from(self.flows) * self.size as u64;
        if self.flows == 0 || memory > MAX_MEMORY {
            return Err(format!(
                "{} flows of {} bytes are not possible, only 1 flow or more and {} MiB in total",
                self.flows,
                self.size,
                MAX_MEMORY >> 20
            ));
        }
        let outer = self.tunnels.first().map_or(0, OuterHeaders::len);
        if self.tunnels.iter().any(|tunnel| tunnel.len() != outer) {
            return Err("the outer headers are of different lengths".to_owned());
        }
        let carries_packets = self.tunnels.first().is_some_and(OuterHeaders::carries_packets);
        let removed = if carries_packets { self.ethernet_len() } else { 0 };
        let len = self.size + outer - removed;
        let mut templates = Templates::new(self.about(), self.flows, len);
        let mut inner = vec![0; self.size];
        for flow in 0..self.flows {
            self.emit(flow, &mut inner);
            let inner = &inner[removed..];
            let frame = templates.frame_mut(flow);
            frame[outer..len].copy_from_slice(inner);
            if let Some(tunnel) = self.tunnels.get(flow as usize % self.tunnels.len().max(1)) {
                let mut fields = tunnel.fields(inner.len(), 0xc000 | (flow as u16 & 0x3fff));
                fields.carries_ipv6 = self.ipv6;
                if tunnel.needs_sum() {
                    fields.inner_sum = checksum::sum(inner);
                }
                tunnel.emit(&mut frame[..outer], &fields).map_err(|e| e.to_string())?;
            }
        }
        Ok(Frames::Templates(Arc::new(templates)))
    }

    /// Length of the Ethernet header and the VLAN tag in bytes.
    fn ethernet_len(&self) -> usize {
        14 + 4 * usize::from(self.vlan.is_some())
    }

    fn about(&self) -> String {
        let family = if self.ipv6 { "IPv6" } else { "IPv4" };
        let tunnel = if self.tunnels.is_empty() { "" } else { " in a tunnel" };
        let content = self.content.name();
        format!("{} flows of {family}/{content} frames of {} bytes{tunnel}", self.flows, self.size)
    }

    /// Writes the frame of a flow. `build` has checked that `frame` has space for the headers.
    fn emit(&self, flow: u32, frame: &mut [u8]) {
        const ROOM: &str = "length was checked";
        let l2 = self.ethernet_len();
        let ethertype = if self.ipv6 { EtherType::IPV6 } else { EtherType::IPV4 };
        let header = ethernet::Repr {
            dst: if self.vary_destination_mac { mac_of_flow(self.destination_mac, flow) } else { self.destination_mac },
            src: if self.vary_source_mac { mac_of_flow(self.source_mac, flow) } else { self.source_mac },
            ethertype: if self.vlan.is_some() { EtherType::VLAN } else { ethertype },
        };
        header.emit(frame).expect(ROOM);
        if let Some(first) = self.vlan {
            let tci = first + (flow % u32::from(self.vlans.max(1))) as u16;
            frame[14..16].copy_from_slice(&tci.to_be_bytes());
            frame[16..18].copy_from_slice(&ethertype.0.to_be_bytes());
        }
        let (client, server) = (1024 + (flow % 60_000) as u16, 2000 + (flow / 60_000) as u16);
        let is_reply = self.content == Content::TcpSynAck;
        let ports = if is_reply { (server, client) } else { (client, server) };
        let transport = self.content.transport();
        let packet = &mut frame[l2..];
        if self.ipv6 {
            let address = |net: u16, host: u16| Ipv6Addr::new(0x2001, 0xdb8, net, 0, 0, 0, 0, host);
            let (client, mut server) = (address(1, 1), address(2, 1));
            if self.vary_network {
                server = Ipv6Addr::from_bits(server.to_bits() + (u128::from(flow) << 64));
            }
            let (src, dst) = if is_reply { (server, client) } else { (client, server) };
            let payload_len = (packet.len() - ipv6::HEADER_LEN) as u16;
            ipv6::Repr {
                src,
                dst,
                next_header: transport.protocol(),
                payload_len,
                hop_limit: 64,
                traffic_class: 0,
                flow_label: 0,
            }
            .emit(packet)
            .expect(ROOM);
            let pseudo = checksum::pseudo6(src, dst, transport.protocol(), payload_len.into());
            self.content.emit(&mut packet[ipv6::HEADER_LEN..], ports, pseudo);
        } else {
            let (client, mut server) = (Ipv4Addr::new(192, 168, 1, 1), Ipv4Addr::new(192, 168, 2, 1));
            if self.vary_network {
                server = Ipv4Addr::from_bits((11 << 24 | 1) + (flow << 8));
            }
            let (src, dst) = if is_reply { (server, client) } else { (client, server) };
            let payload_len = (packet.len() - ipv4::HEADER_LEN) as u16;
            ipv4::Repr {
                src,
                dst,
                protocol: transport.protocol(),
                payload_len,
                ttl: 64,
                traffic_class: 0,
                ident: 0,
                fragment_word: 0,
            }
            .emit(packet)
            .expect(ROOM);
            let pseudo = checksum::pseudo4(src, dst, transport.protocol(), payload_len);
            self.content.emit(&mut packet[ipv4::HEADER_LEN..], ports, pseudo);
        }
    }
}

impl Templates {
    /// Creates `count` frames of `len` zero bytes.
    fn new(about: String, count: u32, len: usize) -> Self {
        let chunks = len.div_ceil(CHUNK);
        Self { about, len, chunks, bytes: vec![[0; CHUNK]; chunks * count as usize] }
    }

    /// Returns the frame of a flow, with padding at the end.
    fn frame_mut(&mut self, flow: u32) -> &mut [u8] {
        let start = flow as usize * self.chunks;
        self.bytes[start..start + self.chunks].as_flattened_mut()
    }

    /// Returns the frames in the order of their flows.
    pub fn frames(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes.chunks_exact(self.chunks).map(|chunks| &chunks.as_flattened()[..self.len])
    }

    fn count(&self) -> usize {
        self.bytes.len() / self.chunks
    }
}

impl fmt::Display for Frames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Untouched { size } => write!(f, "unmodified buffers of {size} bytes"),
            Self::Templates(templates) => f.write_str(&templates.about),
        }
    }
}

impl Frames {
    pub(super) fn from_settings(settings: &Settings<'_>) -> Result<Option<Self>, ConfigError> {
        let source = settings.read(&SOURCE)?;
        let mut spec = FrameSpec {
            size: settings.read(&SIZE)?,
            flows: settings.read(&FLOWS)?,
            vlan: settings.read(&VLAN)?,
            ..FrameSpec::default()
        };
        if let Source::Ip { ipv6, content } = source {
            (spec.ipv6, spec.content) = (ipv6, content);
        }
        if let Some(address) = settings.read(&SOURCE_MAC)? {
            spec.source_mac = address;
        }
        if let Some(address) = settings.read(&DESTINATION_MAC)? {
            (spec.destination_mac, spec.vary_destination_mac) = (address, false);
        }
        if let Some(tunnel) = settings.subtable(&VXLAN)? {
            spec.tunnels.push(tunnel.complete(|tunnel| {
                let config = VxlanConfig {
                    src_mac: tunnel.read(&TUNNEL_SOURCE_MAC)?,
                    dst_mac: tunnel.read(&TUNNEL_DESTINATION_MAC)?,
                    tags: &[],
                    src: tunnel.read(&TUNNEL_SOURCE)?,
                    dst: tunnel.read(&TUNNEL_DESTINATION)?,
                    dst_port: vxlan::PORT,
                    vni: Vni::new(tunnel.read(&TUNNEL_VNI)?).expect("the key has a range"),
                    ttl: 64,
                    traffic_class: 0,
                    flow_label: 0,
                    checksum: OuterChecksum::Standard,
                };
                OuterHeaders::vxlan(&config).map_err(|why| tunnel.error_in(&TUNNEL_DESTINATION, why.to_string()))
            })?);
        }
        match source {
            Source::None => Ok(None),
            Source::Untouched if spec.size > DATA_ROOM => {
                Err(settings.error_in(&SIZE, format!("untouched buffers have at most {DATA_ROOM} bytes")))
            }
            Source::Untouched => Ok(Some(Self::Untouched { size: spec.size })),
            Source::Ip { .. } => spec.build().map(Some).map_err(|why| settings.error_in(&SOURCE, why)),
        }
    }

    /// Returns the metadata that all frames share.
    pub(super) fn template(&self, pool: &Pool) -> MetaTemplate {
        match self {
            Self::Untouched { size } => pool.meta_template().len(*size),
            Self::Templates(t) if t.chunks * CHUNK <= DATA_ROOM => pool.meta_template().len(t.chunks * CHUNK),
            Self::Templates(_) => pool.meta_template(),
        }
    }

    pub(super) fn generator(&self, queue: u16) -> Generator {
        match self {
            Self::Untouched { size } => Generator::Untouched { size: *size },
            Self::Templates(templates) => {
                // Queues start at different flows, as with RSS.
                let next = usize::from(queue) * 7919 % templates.count();
                Generator::Templates { templates: Arc::clone(templates), next }
            }
        }
    }
}

/// Generates the frames of one queue.
pub(super) enum Generator {
    Untouched { size: usize },
    Templates { templates: Arc<Templates>, next: usize },
}

impl Generator {
    /// Returns the bytes of a frame.
    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Untouched { size } => *size,
            Self::Templates { templates, .. } => templates.len,
        }
    }

    /// Fills packets that were created with [`Frames::template`]. Returns `false` if a frame lacks segments
    /// because no buffer was free.
    #[inline(always)]
    pub(super) fn fill(&mut self, packets: &mut [Packet], pool: &Pool) -> bool {
        match self {
            Self::Untouched { .. } => true,
            Self::Templates { templates, next } => {
                let t = &**templates;
                let at = *next * t.chunks;
                let (at, whole) = match t.chunks {
                    1 => (copy::<1>(packets, t, at), true),
                    2 => (copy::<2>(packets, t, at), true),
                    _ => copy_long(packets, t, at, pool),
                };
                *next = at / t.chunks;
                whole
            }
        }
    }
}

/// Copies frames of `N` chunks, from chunk `at` on, into packets with enough space. Returns the next chunk.
#[inline(always)]
fn copy<const N: usize>(packets: &mut [Packet], t: &Templates, mut at: usize) -> usize {
    for packet in packets {
        let frame = t.bytes[at..].first_chunk::<N>();
        let room = packet.data_mut().as_chunks_mut::<CHUNK>().0.first_chunk_mut::<N>();
        if let (Some(frame), Some(room)) = (frame, room) {
            *room = *frame;
        }
        if t.len < N * CHUNK {
            let _ = packet.set_data(HEADROOM, t.len);
        }
        at += N;
        if at == t.bytes.len() {
            at = 0;
        }
    }
    at
}

/// Copies frames of any length, like [`copy`]. Also returns whether all frames got their buffers.
#[inline(never)]
fn copy_long(packets: &mut [Packet], t: &Templates, mut at: usize, pool: &Pool) -> (usize, bool) {
    let mut whole = true;
    for packet in packets {
        let frame = &t.bytes[at..at + t.chunks];
        if t.chunks * CHUNK <= DATA_ROOM {
            for (to, from) in packet.data_mut().as_chunks_mut::<CHUNK>().0.iter_mut().zip(frame) {
                *to = *from;
            }
            let _ = packet.set_data(HEADROOM, t.len);
        } else {
            whole &= packet.extend_from_slice(&frame.as_flattened()[..t.len], pool);
        }
        at += t.chunks;
        if at == t.bytes.len() {
            at = 0;
        }
    }
    (at, whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(frames: &Frames, pool: &Pool, n: usize) -> Vec<Vec<u8>> {
        let mut generator = frames.generator(0);
        let mut batch = wirepath_packet::Batch::new();
        pool.take_batch_from_template(n, &mut batch, &frames.template(pool));
        generator.fill(batch.as_mut_slice(), pool);
        batch.iter().map(|p| p.segments().flatten().copied().collect()).collect()
    }

    #[test]
    fn frames_parse_and_have_good_checksums() {
        let pool = Pool::new("p", 64).unwrap();
        let tunnel = |v6: bool| {
            let (src, dst) = if v6 { ("fd00::1", "fd00::2") } else { ("10.9.0.1", "10.9.0.2") };
            let headers = OuterHeaders::vxlan(&VxlanConfig {
                src_mac: MacAddr([2, 0, 0, 0, 0, 1]),
                dst_mac: MacAddr([2, 0, 0, 0, 0, 2]),
                tags: &[],
                src: src.parse().unwrap(),
                dst: dst.parse().unwrap(),
                dst_port: vxlan::PORT,
                vni: Vni::new(10).unwrap(),
                ttl: 64,
                traffic_class: 0,
                flow_label: 0,
                checksum: OuterChecksum::Standard,
            });
            vec![headers.unwrap()]
        };
        for size in [66, 128, 1500, 9216] {
            for ipv6 in [false, true] {
                for tunnels in [vec![], tunnel(false), tunnel(true)] {
                    let inside = !tunnels.is_empty();
                    let spec = FrameSpec { size, flows: 3, ipv6, tunnels, ..FrameSpec::default() };
                    let frames = fill(&spec.build().unwrap(), &pool, 4);
                    assert_eq!(frames[0], frames[3], "flows come in turn");
                    assert_ne!(frames[0], frames[1]);
                    for frame in &frames {
                        let parsed = wirepath_wire::parse(frame).unwrap();
                        assert_eq!(parsed.inner().is_some(), inside);
                    }
                }
            }
        }
        assert_eq!(pool.available(), 64);
    }

    #[test]
    fn segments_of_a_handshake_belong_together() {
        let pool = Pool::new("p", 64).unwrap();
        let tuple = |frame: &[u8]| {
            let parsed = wirepath_wire::parse(frame).unwrap();
            let layers = parsed.outer();
            let segment = &frame[layers.l4()..];
            let (flow, tcp) = (wirepath_wire::FiveTuple::of(frame, layers).unwrap(), wirepath_wire::IpProtocol::TCP);
            let pseudo = match (flow.src(), flow.dst()) {
                (IpAddr::V4(src), IpAddr::V4(dst)) => checksum::pseudo4(src, dst, tcp, segment.len() as u16),
                (IpAddr::V6(src), IpAddr::V6(dst)) => checksum::pseudo6(src, dst, tcp, segment.len() as u32),
                other => panic!("{other:?}"),
            };
            assert!(checksum::Transport::Tcp.verify(segment, pseudo));
            (flow, layers.tcp(frame).unwrap().flags())
        };
        for ipv6 in [false, true] {
            let frames = |content| {
                let spec = FrameSpec { size: 80, flows: 3, ipv6, content, ..FrameSpec::default() };
                fill(&spec.build().unwrap(), &pool, 3)
            };
            let data = frames(Content::TcpData);
            for ((syn, syn_ack), data) in frames(Content::TcpSyn).iter().zip(frames(Content::TcpSynAck)).zip(data) {
                let ((syn, of_syn), (reply, of_reply)) = (tuple(syn), tuple(&syn_ack));
                assert_eq!((syn.src(), syn.src_port()), (reply.dst(), reply.dst_port()));
                assert_eq!((syn.dst(), syn.dst_port()), (reply.src(), reply.src_port()));
                assert_eq!((of_syn, of_reply), (flags::SYN, flags::SYN | flags::ACK));
                assert_eq!(tuple(&data), (syn, flags::PSH | flags::ACK));
            }
        }
    }

    #[test]
    fn impossible_sizes_are_refused() {
        let spec = FrameSpec { size: 61, ipv6: true, ..FrameSpec::default() };
        assert_eq!(spec.build().unwrap_err(), "frames of 61 bytes are not possible, only 62 to 9216");
        let spec = FrameSpec { size: 73, ipv6: true, content: Content::TcpSyn, ..FrameSpec::default() };
        assert_eq!(spec.build().unwrap_err(), "frames of 73 bytes are not possible, only 74 to 9216");
        assert!(FrameSpec { size: 9217, ..FrameSpec::default() }.build().is_err());
        assert!(FrameSpec { flows: 0, ..FrameSpec::default() }.build().is_err());
        let error = FrameSpec { flows: 4_000_000, size: 9216, ..FrameSpec::default() }.build().unwrap_err();
        assert_eq!(error, "4000000 flows of 9216 bytes are not possible, only 1 flow or more and 1024 MiB in total");
    }
}
