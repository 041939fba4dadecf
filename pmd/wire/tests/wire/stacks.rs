//! Random frames with every header stack, written byte by byte, with the offsets of all headers.
//!
//! The tests of several crates use this module. It depends on none of them.

#![allow(dead_code, unreachable_pub)]

use fastrand::Rng;

/// Returns a random element.
pub fn pick<T: Copy>(random: &mut Rng, from: &[T]) -> T {
    from[random.usize(..from.len())]
}

/// Returns random bytes.
fn bytes<const N: usize>(random: &mut Rng) -> [u8; N] {
    let mut bytes = [0; N];
    random.fill(&mut bytes);
    bytes
}

/// A header: its stack (0 is the outer, 1 the inner one), its name and its offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderMark {
    pub level: u8,
    pub name: &'static str,
    pub at: usize,
}

/// A frame and its headers. Their names are `eth`, `vlan`, `mpls` (each entry), `arp`, `ip`, `ipv6`, `tcp`,
/// `udp`, `icmp`, `icmpv6`, `esp`, `gre`, `vxlan`, `vxlan-gpe` and `geneve`. Headers after the tunnel header
/// of the second stack are not listed, nor are those after a fragment.
#[derive(Clone, Debug)]
pub struct TestFrame {
    pub bytes: Vec<u8>,
    pub marks: Vec<HeaderMark>,
    /// True if the frame contains a fragment.
    pub fragment: bool,
}

/// First header of a stack.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FirstHeader {
    Ethernet,
    Ipv4,
    Ipv6,
}

const FIRSTS: [FirstHeader; 3] = [FirstHeader::Ethernet, FirstHeader::Ipv4, FirstHeader::Ipv6];
const IPS: [FirstHeader; 2] = [FirstHeader::Ipv4, FirstHeader::Ipv6];

/// Names of the tunnels.
pub const TUNNELS: [&str; 8] = ["vxlan", "vxlan-gpe", "geneve", "gre", "gre-mpls", "udp-mpls", "ip", "mpls"];

/// Requested frame; `None` is chosen at random.
#[derive(Clone, Copy, Debug, Default)]
pub struct StackSpec {
    /// Tunnel of the frame.
    pub tunnel: Option<&'static str>,
    /// IP version of the outer stack.
    pub outer_ip: Option<FirstHeader>,
    /// First header of the inner stack.
    pub inner: Option<FirstHeader>,
    /// The frame contains no fragments.
    pub unfragmented: bool,
}

/// Returns every tunnel over both IP versions with every inner header, and `random` random stacks.
pub fn all_specs(random: usize) -> Vec<StackSpec> {
    let mut specs = vec![StackSpec::default(); random];
    for tunnel in TUNNELS {
        for version in IPS {
            for first in FIRSTS {
                specs.push(StackSpec {
                    tunnel: Some(tunnel),
                    outer_ip: Some(version),
                    inner: Some(first),
                    unfragmented: false,
                });
            }
        }
    }
    specs
}

fn be(value: usize) -> [u8; 2] {
    (value as u16).to_be_bytes()
}

fn checksum(bytes: &[u8]) -> [u8; 2] {
    let mut sum = 0u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}

impl TestFrame {
    fn empty() -> Self {
        TestFrame { bytes: Vec::new(), marks: Vec::new(), fragment: false }
    }

    fn data(random: &mut Rng) -> Self {
        let len = random.usize(..40);
        TestFrame { bytes: vec![b'x'; len], ..TestFrame::empty() }
    }

    /// Adds a header in front.
    fn front(mut self, level: u8, name: Option<&'static str>, header: &[u8]) -> Self {
        for mark in &mut self.marks {
            mark.at += header.len();
        }
        if let Some(name) = name {
            self.marks.insert(0, HeaderMark { level, name, at: 0 });
        }
        self.bytes.splice(0..0, header.iter().copied());
        self
    }

    /// Removes all marks: the headers are not listed.
    fn unmarked(mut self) -> Self {
        self.marks.clear();
        self
    }
}

/// Returns a random frame. UDP checksums are absent, other layer-4 checksums are zero.
pub fn frame(random: &mut Rng, spec: StackSpec) -> TestFrame {
    let mut made = stack(random, 0, FirstHeader::Ethernet, spec);
    // Only frames with IP are padded, because IP has its own length.
    if made.marks.iter().any(|m| m.level == 0 && (m.name == "ip" || m.name == "ipv6")) && random.usize(..3) == 0 {
        let padding = random.usize(..12);
        made.bytes.extend(std::iter::repeat_n(0xa5, padding));
    }
    made
}

fn stack(random: &mut Rng, level: u8, first: FirstHeader, spec: StackSpec) -> TestFrame {
    if level > 2 {
        return TestFrame::data(random);
    }
    let spec = if level == 0 { spec } else { StackSpec { unfragmented: spec.unfragmented, ..StackSpec::default() } };
    let made = match first {
        FirstHeader::Ethernet => ethernet(random, level, spec),
        version => ip(random, level, version, spec),
    };
    if level > 1 { made.unmarked() } else { made }
}

fn ethernet(random: &mut Rng, level: u8, spec: StackSpec) -> TestFrame {
    let version = spec.outer_ip.unwrap_or_else(|| pick(random, &IPS));
    let of = |version| if version == FirstHeader::Ipv4 { 0x0800u16 } else { 0x86dd };
    let choice = match spec.tunnel {
        Some("mpls") => 2,
        Some(_) => 4 + random.usize(..2) * 5,
        None => random.usize(..14),
    };
    let (mut made, ethertype) = match choice {
        0 => {
            let mut arp = vec![0, 1, 8, 0, 6, 4, 0, 1 + random.u8(..2)];
            arp.extend(bytes::<20>(random));
            (TestFrame::empty().front(level, Some("arp"), &arp), 0x0806)
        }
        1 => (TestFrame::data(random), pick(random, &[0x88b5, 0x88b6])),
        // Ethernet in a label stack is a stack of its own.
        2 => {
            let inside = stack(random, level + 1, FirstHeader::Ethernet, spec);
            (labels(random, level, inside, 500), pick(random, &[0x8847, 0x8848]))
        }
        3 | 4 => {
            let packet = ip(random, level, version, spec);
            (labels(random, level, packet, 100), pick(random, &[0x8847, 0x8848]))
        }
        _ => (ip(random, level, version, spec), of(version)),
    };
    let mut ethertype: u16 = ethertype;
    for _ in 0..pick(random, &[0, 0, 0, 1, 1, 2]) {
        let [a, b] = bytes(random);
        let [c, d] = ethertype.to_be_bytes();
        made = made.front(level, Some("vlan"), &[a, b, c, d]);
        ethertype = pick(random, &[0x8100, 0x8100, 0x88a8]);
    }
    let mut header = vec![2, 0];
    header.extend(bytes::<4>(random));
    header.extend([2, 1]);
    header.extend(bytes::<4>(random));
    header.extend(ethertype.to_be_bytes());
    made.front(level, Some("eth"), &header)
}

/// Adds a label stack in front. The bottom label is `bottom`, the others are 16 to 99.
fn labels(random: &mut Rng, level: u8, mut made: TestFrame, bottom: u32) -> TestFrame {
    let count = 1 + random.usize(..4);
    for nth in 0..count {
        let label = if nth == 0 { bottom } else { 16 + random.u32(..84) };
        let word = label << 12 | (random.u32(..8)) << 9 | u32::from(nth == 0) << 8 | random.u32(..256);
        made = made.front(level, Some("mpls"), &word.to_be_bytes());
    }
    made
}

fn ip(random: &mut Rng, level: u8, version: FirstHeader, spec: StackSpec) -> TestFrame {
    let v4 = version == FirstHeader::Ipv4;
    let (mut made, protocol) = transport(random, level, v4, spec);
    let fragment = !spec.unfragmented && spec.tunnel.is_none() && random.usize(..10) == 0;
    let (mut units, mut more) = (0, false);
    if fragment {
        let later = 2 + random.usize(..1000);
        (units, more) = pick(random, &[(0, true), (later, true), (later, false)]);
        made.fragment = true;
        if more {
            let len = made.bytes.len().next_multiple_of(8);
            made.bytes.resize(len, 0);
        }
        // Only the first fragment has a layer-4 header, and nothing is parsed after it.
        made.marks.retain(|mark| units == 0 && mark.at == 0 && mark.level == level);
    }
    if v4 {
        let options = pick(random, &[0, 0, 0, 1, 3, 10]);
        let mut header = vec![0x45 + options as u8, random.u8(..)];
        header.extend(be(20 + options * 4 + made.bytes.len()));
        header.extend(bytes::<2>(random));
        header.extend(be(usize::from(more) << 13 | units | if fragment { 0 } else { random.usize(..2) << 14 }));
        header.extend([1 + random.u8(..255), protocol, 0, 0]);
        header.extend([10, random.u8(..), random.u8(..), 1, 10, random.u8(..), 3, 2]);
        header.extend(std::iter::repeat_n(1, options * 4));
        let sum = checksum(&header);
        header[10..12].copy_from_slice(&sum);
        return made.front(level, Some("ip"), &header);
    }
    let mut next = protocol;
    if fragment {
        let word = (units << 3) as u16 | u16::from(more);
        let [a, b] = word.to_be_bytes();
        let [c, d] = bytes(random);
        made = made.front(level, None, &[next, 0, a, b, 0, 0, c, d]);
        next = 44;
    }
    for _ in 0..pick(random, &[0, 0, 0, 1, 2]) {
        let header: &[u8] = match random.usize(..3) {
            0 => &[60, 0, 1, 4, 0, 0, 0, 0],
            1 => &[43, 0, 0, 0, 0, 0, 0, 0],
            _ => &[51, 1, 0, 0, 0, 0, 0, 9, 0, 0, 0, 1],
        };
        // AH is a multiple of 8 bytes long in IPv6 (RFC 4302 section 2.2).
        let padded = if header[0] == 51 { [header, &[0; 4]].concat() } else { header.to_vec() };
        let mut padded = padded;
        let kind = padded[0];
        if kind == 51 {
            padded[1] = 2;
        }
        padded[0] = next;
        made = made.front(level, None, &padded);
        next = kind;
    }
    if random.usize(..5) == 0 {
        made = made.front(level, None, &[next, 0, 1, 4, 0, 0, 0, 0]);
        next = 0;
    }
    let mut header = (6 << 28 | (random.u32(..) & 0x0fff_ffff)).to_be_bytes().to_vec();
    header.extend(be(made.bytes.len()));
    header.extend([next, 1 + random.u8(..255), 0xfd, 0]);
    header.extend(bytes::<14>(random));
    header.extend([0xfd, 0]);
    header.extend(bytes::<14>(random));
    made.front(level, Some("ipv6"), &header)
}

fn transport(random: &mut Rng, level: u8, v4: bool, spec: StackSpec) -> (TestFrame, u8) {
    let kind = match spec.tunnel {
        Some("mpls") => "udp",
        Some(kind) => kind,
        None => {
            let plain = ["tcp", "udp", "icmp", "esp", "other"];
            if random.bool() { pick(random, &plain) } else { pick(random, &TUNNELS[..7]) }
        }
    };
    let ports = |random: &mut Rng| [0x9c, random.u8(..), 0x9d, random.u8(..)];
    match kind {
        "tcp" => {
            let words = pick(random, &[0, 0, 3, 10]);
            let mut header = ports(random).to_vec();
            header.extend(bytes::<8>(random));
            header.extend([(5 + words as u8) << 4 | random.u8(..2), random.u8(..)]);
            header.extend(bytes::<2>(random));
            header.extend([0; 4]);
            header.extend(std::iter::repeat_n(1, words * 4));
            (TestFrame::data(random).front(level, Some("tcp"), &header), 6)
        }
        "udp" => {
            let ports = ports(random);
            (datagram(TestFrame::data(random), level, ports), 17)
        }
        "icmp" => {
            let mut header = vec![if v4 { 8 } else { 128 }, 0, 0, 0];
            header.extend(bytes::<4>(random));
            let (name, protocol) = if v4 { ("icmp", 1) } else { ("icmpv6", 58) };
            (TestFrame::data(random).front(level, Some(name), &header), protocol)
        }
        "esp" => {
            let mut header = vec![0, 0, 1];
            header.extend(bytes::<5>(random));
            (TestFrame { bytes: vec![b'x'; 24], ..TestFrame::empty() }.front(level, Some("esp"), &header), 50)
        }
        "other" => (TestFrame::data(random), 253),
        "ip" => {
            let inside = spec.inner.filter(|i| *i != FirstHeader::Ethernet).unwrap_or_else(|| pick(random, &IPS));
            (stack(random, level + 1, inside, spec), if inside == FirstHeader::Ipv4 { 4 } else { 41 })
        }
        tunnel => tunnelled(random, level, tunnel, spec),
    }
}

fn datagram(made: TestFrame, level: u8, ports: [u8; 4]) -> TestFrame {
    let mut header = ports.to_vec();
    header.extend(be(8 + made.bytes.len()));
    header.extend([0, 0]);
    made.front(level, Some("udp"), &header)
}

fn tunnelled(random: &mut Rng, level: u8, tunnel: &str, spec: StackSpec) -> (TestFrame, u8) {
    let inside = spec.inner.unwrap_or_else(|| pick(random, &FIRSTS));
    let inside = if tunnel == "vxlan" { FirstHeader::Ethernet } else { inside };
    let made = stack(random, level + 1, inside, spec);
    let ethertype: [u8; 2] = match inside {
        FirstHeader::Ethernet => [0x65, 0x58],
        FirstHeader::Ipv4 => [8, 0],
        FirstHeader::Ipv6 => [0x86, 0xdd],
    };
    let bottom = if inside == FirstHeader::Ethernet { 500 } else { 100 };
    let vni: [u8; 3] = bytes(random);
    let entropy: [u8; 2] = [0xc0, random.u8(..)];
    let to = |port: u16| {
        let [a, b] = port.to_be_bytes();
        [entropy[0], entropy[1], a, b]
    };
    match tunnel {
        "vxlan" => {
            let header = [8, 0, 0, 0, vni[0], vni[1], vni[2], 0];
            (datagram(made.front(level, Some("vxlan"), &header), level, to(4789)), 17)
        }
        "vxlan-gpe" => {
            let next = match inside {
                FirstHeader::Ethernet => 3,
                FirstHeader::Ipv4 => 1,
                FirstHeader::Ipv6 => 2,
            };
            let header = [0x0c, 0, 0, next, vni[0], vni[1], vni[2], 0];
            (datagram(made.front(level, Some("vxlan-gpe"), &header), level, to(4790)), 17)
        }
        "geneve" => {
            let mut options = Vec::new();
            for _ in 0..pick(random, &[0, 0, 1, 3]) {
                let words = random.usize(..4);
                options.extend([0xff, 0xf0, random.u8(..) & 0x7f, words as u8]);
                options.extend(std::iter::repeat_n(7, words * 4));
            }
            let mut header = vec![(options.len() / 4) as u8, pick(random, &[0, 0, 0x40])];
            header.extend(ethertype);
            header.extend(vni);
            header.push(0);
            header.extend(options);
            (datagram(made.front(level, Some("geneve"), &header), level, to(6081)), 17)
        }
        "udp-mpls" => (datagram(labels(random, level, made, bottom), level, to(6635)), 17),
        _ => {
            let labelled = tunnel == "gre-mpls";
            let made = if labelled { labels(random, level, made, bottom) } else { made };
            let ethertype = if labelled { [0x88, 0x47] } else { ethertype };
            let flags = pick(random, &[0u8, 0, 0x20, 0x20, 0x80, 0x10, 0xb0]);
            let mut header = vec![flags, 0];
            header.extend(ethertype);
            if flags & 0x80 != 0 {
                header.extend([0; 4]);
            }
            if flags & 0x20 != 0 {
                header.extend(bytes::<4>(random));
            }
            if flags & 0x10 != 0 {
                header.extend(bytes::<4>(random));
            }
            if flags & 0x80 != 0 {
                let sum = checksum(&[&header[..], &made.bytes].concat());
                header[4..6].copy_from_slice(&sum);
            }
            (made.front(level, Some("gre"), &header), 47)
        }
    }
}
