//! Random frames of every header stack, written byte by byte, with a list of where each header lies.
//!
//! Used by the tests of several crates; it knows nothing of any of them.

#![allow(dead_code, unreachable_pub)]

/// Numbers from a seed (splitmix64).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    pub fn bytes<const N: usize>(&mut self) -> [u8; N] {
        std::array::from_fn(|_| self.next() as u8)
    }
}

/// A header: in which stack (0 the frame's own, 1 the one in its tunnel), what, and where it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    pub level: u8,
    pub name: &'static str,
    pub at: usize,
}

/// A frame and its headers: `eth`, `vlan`, `mpls` (each entry), `arp`, `ip`, `ipv6`, `tcp`, `udp`, `icmp`, `icmpv6`, `esp`, `gre`,
/// `vxlan`, `vxlan-gpe`, `geneve`. What lies behind the second stack's tunnel header is not listed, and nothing behind a fragment.
#[derive(Clone, Debug)]
pub struct Made {
    pub bytes: Vec<u8>,
    pub marks: Vec<Mark>,
    /// Whether a fragment is in it.
    pub fragment: bool,
}

/// What a stack begins with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum First {
    Ethernet,
    Ipv4,
    Ipv6,
}

const FIRSTS: [First; 3] = [First::Ethernet, First::Ipv4, First::Ipv6];
const IPS: [First; 2] = [First::Ipv4, First::Ipv6];

/// The kinds of tunnels.
pub const TUNNELS: [&str; 8] = ["vxlan", "vxlan-gpe", "geneve", "gre", "gre-mpls", "udp-mpls", "ip", "mpls"];

/// What to make; `None` is at random.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wish {
    /// The frame's tunnel.
    pub tunnel: Option<&'static str>,
    /// The version of the IP around it.
    pub around: Option<First>,
    /// What it carries.
    pub inside: Option<First>,
    /// No fragments.
    pub whole: bool,
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

impl Made {
    fn empty() -> Self {
        Made { bytes: Vec::new(), marks: Vec::new(), fragment: false }
    }

    fn data(random: &mut Random) -> Self {
        let len = random.below(40);
        Made { bytes: vec![b'x'; len], ..Made::empty() }
    }

    /// A header in front.
    fn front(mut self, level: u8, name: Option<&'static str>, header: &[u8]) -> Self {
        for mark in &mut self.marks {
            mark.at += header.len();
        }
        if let Some(name) = name {
            self.marks.insert(0, Mark { level, name, at: 0 });
        }
        self.bytes.splice(0..0, header.iter().copied());
        self
    }

    /// Headers that nobody looks for.
    fn unmarked(mut self) -> Self {
        self.marks.clear();
        self
    }
}

/// A random frame. Layer-4 checksums of UDP are absent, others are zero.
pub fn frame(random: &mut Random, wish: Wish) -> Made {
    let mut made = stack(random, 0, First::Ethernet, wish);
    // A frame's end says nothing; IP has lengths of its own. Padding only where there is IP.
    if made.marks.iter().any(|m| m.level == 0 && (m.name == "ip" || m.name == "ipv6")) && random.one_in(3) {
        let padding = random.below(12);
        made.bytes.extend(std::iter::repeat_n(0xa5, padding));
    }
    made
}

fn stack(random: &mut Random, level: u8, first: First, wish: Wish) -> Made {
    if level > 2 {
        return Made::data(random);
    }
    let wish = if level == 0 { wish } else { Wish { whole: wish.whole, ..Wish::default() } };
    let made = match first {
        First::Ethernet => ethernet(random, level, wish),
        version => ip(random, level, version, wish),
    };
    if level > 1 { made.unmarked() } else { made }
}

fn ethernet(random: &mut Random, level: u8, wish: Wish) -> Made {
    let version = wish.around.unwrap_or_else(|| random.pick(&IPS));
    let of = |version| if version == First::Ipv4 { 0x0800u16 } else { 0x86dd };
    let choice = match wish.tunnel {
        Some("mpls") => 2,
        Some(_) => 4 + random.below(2) * 5,
        None => random.below(14),
    };
    let (mut made, ethertype) = match choice {
        0 => {
            let mut arp = vec![0, 1, 8, 0, 6, 4, 0, 1 + random.below(2) as u8];
            arp.extend(random.bytes::<20>());
            (Made::empty().front(level, Some("arp"), &arp), 0x0806)
        }
        1 => (Made::data(random), random.pick(&[0x88b5, 0x88b6])),
        // Ethernet in a label stack: a stack of its own.
        2 => {
            let inside = stack(random, level + 1, First::Ethernet, wish);
            (labels(random, level, inside, 500), random.pick(&[0x8847, 0x8848]))
        }
        3 | 4 => {
            let packet = ip(random, level, version, wish);
            (labels(random, level, packet, 100), random.pick(&[0x8847, 0x8848]))
        }
        _ => (ip(random, level, version, wish), of(version)),
    };
    let mut ethertype: u16 = ethertype;
    for _ in 0..random.pick(&[0, 0, 0, 1, 1, 2]) {
        let [a, b] = random.bytes();
        let [c, d] = ethertype.to_be_bytes();
        made = made.front(level, Some("vlan"), &[a, b, c, d]);
        ethertype = random.pick(&[0x8100, 0x8100, 0x88a8]);
    }
    let mut header = vec![2, 0];
    header.extend(random.bytes::<4>());
    header.extend([2, 1]);
    header.extend(random.bytes::<4>());
    header.extend(ethertype.to_be_bytes());
    made.front(level, Some("eth"), &header)
}

/// A label stack in front. The bottom label is `bottom`, the others are 16 to 99.
fn labels(random: &mut Random, level: u8, mut made: Made, bottom: u32) -> Made {
    let count = 1 + random.below(4);
    for nth in 0..count {
        let label = if nth == 0 { bottom } else { 16 + random.below(84) as u32 };
        let word = label << 12 | (random.below(8) as u32) << 9 | u32::from(nth == 0) << 8 | random.below(256) as u32;
        made = made.front(level, Some("mpls"), &word.to_be_bytes());
    }
    made
}

fn ip(random: &mut Random, level: u8, version: First, wish: Wish) -> Made {
    let v4 = version == First::Ipv4;
    let (mut made, protocol) = transport(random, level, v4, wish);
    let fragment = !wish.whole && wish.tunnel.is_none() && random.one_in(10);
    let (mut units, mut more) = (0, false);
    if fragment {
        let later = 2 + random.below(1000);
        (units, more) = random.pick(&[(0, true), (later, true), (later, false)]);
        made.fragment = true;
        if more {
            let len = made.bytes.len().next_multiple_of(8);
            made.bytes.resize(len, 0);
        }
        // Layer 4 is in the first piece; nothing is looked for behind it.
        made.marks.retain(|mark| units == 0 && mark.at == 0 && mark.level == level);
    }
    if v4 {
        let options = random.pick(&[0, 0, 0, 1, 3, 10]);
        let mut header = vec![0x45 + options as u8, random.next() as u8];
        header.extend(be(20 + options * 4 + made.bytes.len()));
        header.extend(random.bytes::<2>());
        header.extend(be(usize::from(more) << 13 | units | if fragment { 0 } else { random.below(2) << 14 }));
        header.extend([1 + random.below(255) as u8, protocol, 0, 0]);
        header.extend([10, random.next() as u8, random.next() as u8, 1, 10, random.next() as u8, 3, 2]);
        header.extend(std::iter::repeat_n(1, options * 4));
        let sum = checksum(&header);
        header[10..12].copy_from_slice(&sum);
        return made.front(level, Some("ip"), &header);
    }
    let mut next = protocol;
    if fragment {
        let word = (units << 3) as u16 | u16::from(more);
        let [a, b] = word.to_be_bytes();
        let [c, d] = random.bytes();
        made = made.front(level, None, &[next, 0, a, b, 0, 0, c, d]);
        next = 44;
    }
    for _ in 0..random.pick(&[0, 0, 0, 1, 2]) {
        let header: &[u8] = match random.below(3) {
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
    if random.one_in(5) {
        made = made.front(level, None, &[next, 0, 1, 4, 0, 0, 0, 0]);
        next = 0;
    }
    let mut header = (6 << 28 | (random.next() as u32 & 0x0fff_ffff)).to_be_bytes().to_vec();
    header.extend(be(made.bytes.len()));
    header.extend([next, 1 + random.below(255) as u8, 0xfd, 0]);
    header.extend(random.bytes::<14>());
    header.extend([0xfd, 0]);
    header.extend(random.bytes::<14>());
    made.front(level, Some("ipv6"), &header)
}

fn transport(random: &mut Random, level: u8, v4: bool, wish: Wish) -> (Made, u8) {
    let kind = match wish.tunnel {
        Some("mpls") => "udp",
        Some(kind) => kind,
        None => {
            let plain = ["tcp", "udp", "icmp", "esp", "other"];
            if random.one_in(2) { random.pick(&plain) } else { random.pick(&TUNNELS[..7]) }
        }
    };
    let ports = |random: &mut Random| [0x9c, random.next() as u8, 0x9d, random.next() as u8];
    match kind {
        "tcp" => {
            let words = random.pick(&[0, 0, 3, 10]);
            let mut header = ports(random).to_vec();
            header.extend(random.bytes::<8>());
            header.extend([(5 + words as u8) << 4 | random.below(2) as u8, random.next() as u8]);
            header.extend(random.bytes::<2>());
            header.extend([0; 4]);
            header.extend(std::iter::repeat_n(1, words * 4));
            (Made::data(random).front(level, Some("tcp"), &header), 6)
        }
        "udp" => {
            let ports = ports(random);
            (datagram(Made::data(random), level, ports), 17)
        }
        "icmp" => {
            let mut header = vec![if v4 { 8 } else { 128 }, 0, 0, 0];
            header.extend(random.bytes::<4>());
            let (name, protocol) = if v4 { ("icmp", 1) } else { ("icmpv6", 58) };
            (Made::data(random).front(level, Some(name), &header), protocol)
        }
        "esp" => {
            let mut header = vec![0, 0, 1];
            header.extend(random.bytes::<5>());
            (Made { bytes: vec![b'x'; 24], ..Made::empty() }.front(level, Some("esp"), &header), 50)
        }
        "other" => (Made::data(random), 253),
        "ip" => {
            let inside = wish.inside.filter(|i| *i != First::Ethernet).unwrap_or_else(|| random.pick(&IPS));
            (stack(random, level + 1, inside, wish), if inside == First::Ipv4 { 4 } else { 41 })
        }
        tunnel => tunnelled(random, level, tunnel, wish),
    }
}

fn datagram(made: Made, level: u8, ports: [u8; 4]) -> Made {
    let mut header = ports.to_vec();
    header.extend(be(8 + made.bytes.len()));
    header.extend([0, 0]);
    made.front(level, Some("udp"), &header)
}

fn tunnelled(random: &mut Random, level: u8, tunnel: &str, wish: Wish) -> (Made, u8) {
    let inside = wish.inside.unwrap_or_else(|| random.pick(&FIRSTS));
    let inside = if tunnel == "vxlan" { First::Ethernet } else { inside };
    let made = stack(random, level + 1, inside, wish);
    let ethertype: [u8; 2] = match inside {
        First::Ethernet => [0x65, 0x58],
        First::Ipv4 => [8, 0],
        First::Ipv6 => [0x86, 0xdd],
    };
    let bottom = if inside == First::Ethernet { 500 } else { 100 };
    let vni: [u8; 3] = random.bytes();
    let entropy: [u8; 2] = [0xc0, random.next() as u8];
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
                First::Ethernet => 3,
                First::Ipv4 => 1,
                First::Ipv6 => 2,
            };
            let header = [0x0c, 0, 0, next, vni[0], vni[1], vni[2], 0];
            (datagram(made.front(level, Some("vxlan-gpe"), &header), level, to(4790)), 17)
        }
        "geneve" => {
            let mut options = Vec::new();
            for _ in 0..random.pick(&[0, 0, 1, 3]) {
                let words = random.below(4);
                options.extend([0xff, 0xf0, random.next() as u8 & 0x7f, words as u8]);
                options.extend(std::iter::repeat_n(7, words * 4));
            }
            let mut header = vec![(options.len() / 4) as u8, random.pick(&[0, 0, 0x40])];
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
            let flags = random.pick(&[0u8, 0, 0x20, 0x20, 0x80, 0x10, 0xb0]);
            let mut header = vec![flags, 0];
            header.extend(ethertype);
            if flags & 0x80 != 0 {
                header.extend([0; 4]);
            }
            if flags & 0x20 != 0 {
                header.extend(random.bytes::<4>());
            }
            if flags & 0x10 != 0 {
                header.extend(random.bytes::<4>());
            }
            if flags & 0x80 != 0 {
                let sum = checksum(&[&header[..], &made.bytes].concat());
                header[4..6].copy_from_slice(&sum);
            }
            (made.front(level, Some("gre"), &header), 47)
        }
    }
}
