//! A small parser of its own, written down from the RFCs one header after the other. Slow and obvious; shares nothing with the
//! parsers that it judges.

/// UDP destination ports of tunnels, and how strictly frames are read.
#[derive(Clone, Debug)]
pub struct TunnelPorts {
    /// RFC 7348 section 5: 4789.
    pub vxlan: u16,
    /// IANA: 4790.
    pub vxlan_gpe: u16,
    /// RFC 8926 section 3.3: 6081.
    pub geneve: u16,
    /// RFC 7510 section 3: 6635.
    pub mpls: u16,
    /// Whether a wrong IPv4 header checksum is disorder.
    pub checksums: bool,
}

impl Default for TunnelPorts {
    fn default() -> Self {
        Self { vxlan: 4789, vxlan_gpe: 4790, geneve: 6081, mpls: 6635, checksums: true }
    }
}

/// Layer 3 of a stack, with the offset of its header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Network {
    /// Nothing that is looked into, or a header in disorder.
    #[default]
    None,
    /// ARP.
    Arp(usize),
    /// IPv4.
    Ipv4(usize),
    /// IPv6.
    Ipv6(usize),
}

/// Tunnel header of a stack, with its offset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tunnel {
    /// None that is looked into.
    #[default]
    None,
    /// VXLAN.
    Vxlan(usize),
    /// VXLAN-GPE.
    VxlanGpe(usize),
    /// GENEVE.
    Geneve(usize),
    /// GRE.
    Gre(usize),
}

/// Fragmentation of an IP packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fragment {
    /// Whole.
    #[default]
    No,
    /// The one with offset 0.
    First,
    /// Another.
    Later,
}

/// Where a label stack stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Behind Ethernet.
    Link,
    /// Behind UDP.
    Udp,
    /// Behind GRE.
    Gre,
}

/// One header stack. Offsets are from the start of the frame.
#[derive(Clone, Debug, Default)]
pub struct Stack {
    /// Where the stack begins.
    pub start: usize,
    /// Ethernet header.
    pub link: Option<usize>,
    /// First byte of each VLAN tag, the TPID.
    pub tags: Vec<usize>,
    /// EtherType behind all tags.
    pub ether_type: Option<u16>,
    /// Label stacks: place and the offset of each entry.
    pub labels: Vec<(Place, Vec<usize>)>,
    /// Layer 3.
    pub network: Network,
    /// What IP carries, behind extension headers.
    pub protocol: u8,
    /// Numbers of the extension headers in their order.
    pub extensions: Vec<u8>,
    /// Whether a routing header names hops that are still to come: then the header's destination is not the final one.
    pub on_the_way: bool,
    /// Fragmentation.
    pub fragment: Fragment,
    /// Layer-4 header that is looked into: protocol number and offset.
    pub transport: Option<(u8, usize)>,
    /// Tunnel.
    pub tunnel: Tunnel,
    /// Where the IP packet ends by its own length, or the data of the stack if there is no IP.
    pub end: usize,
    /// Where what IP carries begins; not in later fragments.
    pub layer4: Option<usize>,
    /// Whether an option of mobile IPv6 names another source than the header (RFC 6275 section 6.3).
    pub away_from_home: bool,
    /// A header that cannot be. A frame whose own stack is broken is refused; a broken stack in a tunnel is not there.
    pub broken: Option<&'static str>,
}

/// The stacks of a frame: the outer one, and the one in its tunnel if there is one.
#[derive(Clone, Debug)]
pub struct Headers {
    /// One or two.
    pub stacks: Vec<Stack>,
    /// Where an Ethernet frame begins that a tunnel header (no label stack) says is there, whatever it looks like.
    pub frame: Option<usize>,
}

/// What comes behind a header that ends a stack.
enum Inside {
    Nothing,
    Ethernet(usize),
    Ip(u8, usize),
    /// Ethernet, but the tunnel header does not say so: it is not looked into.
    Unsaid(usize),
}

/// Numbers of the extension headers that are walked over: hop-by-hop, routing, fragment, AH, destination options.
pub const EXTENSIONS: [u8; 5] = [0, 43, 44, 51, 60];

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

impl Headers {
    /// Reads a frame.
    pub fn of(frame: &[u8], ports: &TunnelPorts) -> Self {
        let mut stacks = Vec::new();
        let mut outer = Stack { end: frame.len(), ..Stack::default() };
        let inside = outer.ethernet(frame, 0, ports);
        let end = outer.end;
        let labelled = !outer.labels.iter().all(|(place, _)| *place == Place::Link) || outer.tunnel == Tunnel::None;
        let carried = match inside {
            Inside::Ethernet(at) | Inside::Unsaid(at) if !labelled => Some(at),
            _ => None,
        };
        stacks.push(outer);
        if let Some((link, version, at)) = match inside {
            Inside::Nothing | Inside::Unsaid(_) => None,
            Inside::Ethernet(at) => Some((true, 0, at)),
            Inside::Ip(version, at) => Some((false, version, at)),
        } {
            let mut inner = Stack { start: at, end, ..Stack::default() };
            // What the second stack carries is not looked at.
            if link {
                inner.ethernet(frame, at, ports);
            } else {
                inner.ip(frame, version, at, ports);
            }
            if inner.broken.is_none() {
                stacks.push(inner);
            }
        }
        Self { stacks, frame: carried }
    }
}

impl Stack {
    fn broken(&mut self, what: &'static str) -> Inside {
        self.broken = Some(what);
        Inside::Nothing
    }

    fn ethernet(&mut self, frame: &[u8], at: usize, ports: &TunnelPorts) -> Inside {
        if at + 14 > self.end {
            return self.broken("Ethernet header cut off");
        }
        self.link = Some(at);
        let mut type_at = at + 12;
        while [0x8100, 0x88a8].contains(&u16_at(frame, type_at)) {
            if self.tags.len() == 2 {
                return self.broken("a third VLAN tag");
            }
            if type_at + 6 > self.end {
                return self.broken("VLAN tag cut off");
            }
            self.tags.push(type_at);
            type_at += 4;
        }
        let ether_type = u16_at(frame, type_at);
        self.ether_type = Some(ether_type);
        let next = type_at + 2;
        match ether_type {
            0x0806 => self.arp(frame, next),
            0x0800 => self.ip(frame, 4, next, ports),
            0x86dd => self.ip(frame, 6, next, ports),
            0x8847 | 0x8848 => {
                let Some(behind) = self.label_stack(frame, Place::Link, next) else {
                    return Inside::Nothing;
                };
                match guess(frame, behind, self.end) {
                    Inside::Ip(version, at) => {
                        // The frame is forwarded by its label, whatever is behind it.
                        let mut with_ip = self.clone();
                        let inside = with_ip.ip(frame, version, at, ports);
                        if with_ip.broken.is_some() {
                            return Inside::Nothing;
                        }
                        *self = with_ip;
                        inside
                    }
                    other => other,
                }
            }
            _ => Inside::Nothing,
        }
    }

    /// RFC 826, for Ethernet and IPv4 only.
    fn arp(&mut self, frame: &[u8], at: usize) -> Inside {
        if at + 28 > self.end {
            return self.broken("ARP cut off");
        }
        if frame[at..at + 6] == [0, 1, 8, 0, 6, 4] {
            self.network = Network::Arp(at);
        }
        Inside::Nothing
    }

    /// RFC 3032 section 2.1: entries of four bytes up to the one with the bottom bit. Returns what is behind. A label stack without
    /// end, or one of more than sixteen entries, is none.
    fn label_stack(&mut self, frame: &[u8], place: Place, mut at: usize) -> Option<usize> {
        let mut entries = Vec::new();
        loop {
            if at + 4 > self.end || entries.len() == 16 {
                return None;
            }
            entries.push(at);
            at += 4;
            if frame[at - 2] & 1 == 1 {
                break;
            }
        }
        self.labels.push((place, entries));
        Some(at)
    }

    fn ip(&mut self, frame: &[u8], version: u8, at: usize, ports: &TunnelPorts) -> Inside {
        if version == 4 { self.ipv4(frame, at, ports) } else { self.ipv6(frame, at, ports) }
    }

    /// RFC 791 section 3.1.
    fn ipv4(&mut self, frame: &[u8], at: usize, ports: &TunnelPorts) -> Inside {
        if at + 20 > self.end {
            return self.broken("IPv4 header cut off");
        }
        if frame[at] >> 4 != 4 {
            return self.broken("not version 4");
        }
        let header = usize::from(frame[at] & 15) * 4;
        let total = usize::from(u16_at(frame, at + 2));
        if header < 20 || at + header > self.end {
            return self.broken("IPv4 header length");
        }
        if total < header || at + total > self.end {
            return self.broken("IPv4 total length");
        }
        if ports.checksums && crate::rewrite::sum(&[&frame[at..at + header]]) != 0xffff {
            return self.broken("IPv4 header checksum");
        }
        // What the options are is for the packet's destination.
        self.network = Network::Ipv4(at);
        self.end = at + total;
        self.protocol = frame[at + 9];
        let flags = u16_at(frame, at + 6);
        self.fragment = match (flags & 0x1fff, flags & 0x2000) {
            (0, 0) => Fragment::No,
            (0, _) => Fragment::First,
            _ => Fragment::Later,
        };
        let (piece, offset) = (total - header, usize::from(flags & 0x1fff) * 8);
        if let Some(what) = bad_piece(piece, offset, flags & 0x2000 != 0, offset + piece, self.protocol) {
            return self.broken(what);
        }
        self.layer4(frame, at + header, ports)
    }

    /// RFC 8200 sections 3 and 4.
    fn ipv6(&mut self, frame: &[u8], at: usize, ports: &TunnelPorts) -> Inside {
        if at + 40 > self.end {
            return self.broken("IPv6 header cut off");
        }
        if frame[at] >> 4 != 6 {
            return self.broken("not version 6");
        }
        let payload = usize::from(u16_at(frame, at + 4));
        if at + 40 + payload > self.end {
            return self.broken("IPv6 payload length");
        }
        self.network = Network::Ipv6(at);
        self.end = at + 40 + payload;
        let mut next = frame[at + 6];
        let mut here = at + 40;
        let mut piece = None;
        while EXTENSIONS.contains(&next) {
            if self.extensions.len() == 8 {
                return self.broken("too many extension headers");
            }
            if next == 44 && self.extensions.contains(&44) {
                return self.broken("a second fragment header");
            }
            if next == 0 && here != at + 40 {
                return self.broken("hop-by-hop options are not the first");
            }
            if here + 8 > self.end {
                return self.broken("extension header cut off");
            }
            let length = match next {
                44 => 8,
                // RFC 4302 section 2.2: in words of four bytes, less two.
                51 => (usize::from(frame[here + 1]) + 2) * 4,
                _ => (usize::from(frame[here + 1]) + 1) * 8,
            };
            // RFC 4302 section 2: AH has twelve bytes at least.
            if here + length > self.end || next == 51 && length < 12 {
                return self.broken("extension header cut off");
            }
            self.extensions.push(next);
            match next {
                0 | 60 => {
                    if let Some(what) = self.options(next, &frame[here + 2..here + length]) {
                        return self.broken(what);
                    }
                }
                43 => self.on_the_way |= frame[here + 3] > 0,
                44 => {
                    let word = u16_at(frame, here + 2);
                    piece = Some((here + 8, usize::from(word & 0xfff8), word & 1 == 1));
                    self.fragment = match (word >> 3, word & 1) {
                        // RFC 6946: an atomic fragment is the whole packet.
                        (0, 0) => self.fragment,
                        (0, _) => Fragment::First,
                        _ => Fragment::Later,
                    };
                }
                _ => {}
            }
            next = frame[here];
            here += length;
            if self.fragment == Fragment::Later {
                break;
            }
        }
        self.protocol = next;
        if let Some((start, offset, more)) = piece {
            let length = self.end - start;
            let whole = start - 8 - (at + 40) + offset + length;
            // What the first fragment has behind its header is the upper layer only if nothing else is.
            if let Some(what) = bad_piece(length, offset, more, whole, next) {
                return self.broken(what);
            }
        }
        self.layer4(frame, here, ports)
    }

    /// RFC 8200 section 4.2: Pad1, and options that say how long they are. RFC 2675 section 2: jumbograms say so hop by hop.
    fn options(&mut self, header: u8, mut options: &[u8]) -> Option<&'static str> {
        while let [kind, rest @ ..] = options {
            if *kind == 0 {
                options = rest;
                continue;
            }
            let Some(length) = rest.first().map(|length| usize::from(*length)).filter(|l| *l < rest.len()) else {
                return Some("option of an extension header");
            };
            match kind {
                0xc2 if header == 0 => return Some("jumbogram"),
                0xc9 if header == 60 && length == 16 => self.away_from_home = true,
                _ => {}
            }
            options = &rest[1 + length..];
        }
        None
    }

    fn layer4(&mut self, frame: &[u8], at: usize, ports: &TunnelPorts) -> Inside {
        if self.fragment == Fragment::Later {
            return Inside::Nothing;
        }
        self.layer4 = Some(at);
        let left = self.end - at;
        let v4 = matches!(self.network, Network::Ipv4(_));
        match self.protocol {
            4 | 41 if self.fragment != Fragment::No => return Inside::Nothing,
            4 => return Inside::Ip(4, at),
            41 => return Inside::Ip(6, at),
            // RFC 9293 section 3.1.
            6 => {
                if left < 20 {
                    return self.broken("TCP header cut off");
                }
                let header = usize::from(frame[at + 12] >> 4) * 4;
                if header < 20 || header > left {
                    return self.broken("TCP data offset");
                }
            }
            17 => return self.udp(frame, at, ports),
            47 => return self.gre(frame, at),
            // RFC 792: all messages have eight bytes at least; RFC 4303 section 2: SPI and sequence number.
            1 if v4 && left < 8 => return self.broken("ICMP cut off"),
            50 if left < 8 => return self.broken("ESP cut off"),
            58 if !v4 && left < 4 => return self.broken("ICMPv6 cut off"),
            1 if v4 => {}
            58 if !v4 => {}
            50 => {}
            _ => return Inside::Nothing,
        }
        self.transport = Some((self.protocol, at));
        Inside::Nothing
    }

    /// RFC 768, and what the destination port says that it carries.
    fn udp(&mut self, frame: &[u8], at: usize, ports: &TunnelPorts) -> Inside {
        if at + 8 > self.end {
            return self.broken("UDP header cut off");
        }
        let length = usize::from(u16_at(frame, at + 4));
        // The first fragment holds the beginning of a longer datagram.
        if length < 8 || at + length > self.end && self.fragment == Fragment::No {
            return self.broken("UDP length");
        }
        self.transport = Some((17, at));
        // Tunnels are looked for in whole packets only.
        if self.fragment != Fragment::No {
            return Inside::Nothing;
        }
        let port = u16_at(frame, at + 2);
        let (behind, end) = (at + 8, at + length);
        if port == ports.mpls {
            let mut within = self.clone();
            within.end = end;
            let Some(at) = within.label_stack(frame, Place::Udp, behind) else { return Inside::Nothing };
            *self = within;
            return guess(frame, at, end);
        }
        // A tunnel header in disorder is none.
        if behind + 8 > end {
            return Inside::Nothing;
        }
        let flags = frame[behind];
        let inside = match port {
            // RFC 7348 section 5: the I flag MUST be set; the rest is ignored.
            port if port == ports.vxlan && flags & 0x08 != 0 => {
                self.tunnel = Tunnel::Vxlan(behind);
                Inside::Ethernet(behind + 8)
            }
            // draft-ietf-nvo3-vxlan-gpe section 3.1: version 0; without P it is VXLAN.
            port if port == ports.vxlan_gpe && flags & 0x30 == 0 => {
                self.tunnel = Tunnel::VxlanGpe(behind);
                match (flags & 0x04, frame[behind + 3]) {
                    (0, _) => Inside::Unsaid(behind + 8),
                    (_, 1) => Inside::Ip(4, behind + 8),
                    (_, 2) => Inside::Ip(6, behind + 8),
                    (_, 3) => Inside::Ethernet(behind + 8),
                    _ => Inside::Nothing,
                }
            }
            // RFC 8926 sections 3.4 and 3.5.
            port if port == ports.geneve && flags >> 6 == 0 => {
                let inside = behind + 8 + usize::from(flags & 0x3f) * 4;
                let mut option = behind + 8;
                while option < inside {
                    if inside > end {
                        return Inside::Nothing;
                    }
                    option += 4 + usize::from(frame[option + 3] & 0x1f) * 4;
                }
                if option != inside {
                    return Inside::Nothing;
                }
                self.tunnel = Tunnel::Geneve(behind);
                by_type(u16_at(frame, behind + 2), inside)
            }
            _ => return Inside::Nothing,
        };
        self.end = end;
        inside
    }

    /// RFC 2784 section 2 and RFC 2890 section 2.
    fn gre(&mut self, frame: &[u8], at: usize) -> Inside {
        // A tunnel's header that is cut off is none.
        if at + 4 > self.end {
            return Inside::Nothing;
        }
        let flags = u16_at(frame, at);
        // Checksum (and the offset of RFC 1701), key, sequence number.
        let header = 4 + [0xc000, 0x2000, 0x1000].iter().filter(|&&bit| flags & bit != 0).count() * 4;
        if at + header > self.end {
            return Inside::Nothing;
        }
        self.transport = Some((47, at));
        self.tunnel = Tunnel::Gre(at);
        // Of another version, or with the bits that RFC 2784 section 2.3 knows nothing of, the header is there, and that is all.
        if self.fragment != Fragment::No || flags & 0x4c07 != 0 {
            return Inside::Nothing;
        }
        let behind = at + header;
        match u16_at(frame, at + 2) {
            0x8847 | 0x8848 => match self.label_stack(frame, Place::Gre, behind) {
                Some(at) => guess(frame, at, self.end),
                None => Inside::Nothing,
            },
            protocol => by_type(protocol, behind),
        }
    }

    /// The label stack that fields are about: the first.
    pub fn entries(&self) -> &[usize] {
        self.labels.first().map_or(&[], |(_, entries)| entries)
    }

    /// Whether there is a label stack at this place.
    pub fn labelled(&self, place: Place) -> bool {
        self.labels.iter().any(|(p, _)| *p == place)
    }

    /// Offset of the IP header.
    pub fn ip_at(&self) -> Option<usize> {
        match self.network {
            Network::Ipv4(at) | Network::Ipv6(at) => Some(at),
            _ => None,
        }
    }
}

/// What no fragment can be: `whole` is the length that the payload of the packet has at least.
fn bad_piece(piece: usize, offset: usize, more: bool, whole: usize, protocol: u8) -> Option<&'static str> {
    if (offset > 0 || more) && whole > 65535 {
        return Some("a fragment beyond the longest packet");
    }
    if more && !piece.is_multiple_of(8) {
        return Some("a fragment in the middle that is not a multiple of 8 bytes long");
    }
    // RFC 3128.
    (offset == 8 && protocol == 6).then_some("a fragment that overlaps the TCP header")
}

fn by_type(ether_type: u16, at: usize) -> Inside {
    match ether_type {
        0x6558 => Inside::Ethernet(at),
        0x0800 => Inside::Ip(4, at),
        0x86dd => Inside::Ip(6, at),
        _ => Inside::Nothing,
    }
}

/// What labels carry is told by nobody; the first nibble is all there is (RFC 4928 section 3).
fn guess(frame: &[u8], at: usize, end: usize) -> Inside {
    match frame.get(at).filter(|_| at < end).map(|byte| byte >> 4) {
        Some(4) => Inside::Ip(4, at),
        Some(6) => Inside::Ip(6, at),
        Some(_) => Inside::Ethernet(at),
        None => Inside::Nothing,
    }
}
