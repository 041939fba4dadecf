//! A small parser of its own, written down from the RFCs one header after the other. Slow and obvious; shares nothing with the
//! parsers that it judges.

mod ip;
mod layer4;

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

/// What labels carry is told by nobody; the first nibble is all there is (RFC 4928 section 3).
fn guess(frame: &[u8], at: usize, end: usize) -> Inside {
    match frame.get(at).filter(|_| at < end).map(|byte| byte >> 4) {
        Some(4) => Inside::Ip(4, at),
        Some(6) => Inside::Ip(6, at),
        Some(_) => Inside::Ethernet(at),
        None => Inside::Nothing,
    }
}
