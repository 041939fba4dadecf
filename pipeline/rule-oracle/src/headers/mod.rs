//! An independent parser, written from the RFCs header by header. It is slow and obvious, and shares nothing
//! with the parsers that it checks.

mod ip;
mod layer4;

/// UDP destination ports of tunnels, and the strictness of the parser.
#[derive(Clone, Debug)]
pub struct TunnelPorts {
    /// VXLAN port (RFC 7348 section 5: 4789).
    pub vxlan: u16,
    /// VXLAN-GPE port (IANA: 4790).
    pub vxlan_gpe: u16,
    /// GENEVE port (RFC 8926 section 3.3: 6081).
    pub geneve: u16,
    /// MPLS-in-UDP port (RFC 7510 section 3: 6635).
    pub mpls: u16,
    /// True if a packet with a wrong IPv4 header checksum is malformed.
    pub checksums: bool,
}

impl Default for TunnelPorts {
    fn default() -> Self {
        Self { vxlan: 4789, vxlan_gpe: 4790, geneve: 6081, mpls: 6635, checksums: true }
    }
}

/// Layer 3 header of a stack, with its offset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Network {
    /// Another protocol, or a malformed header.
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
    /// No known tunnel.
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
    /// Not fragmented.
    #[default]
    No,
    /// The first fragment, with offset 0.
    First,
    /// A later fragment.
    Later,
}

/// Position of a label stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LabelPosition {
    /// After Ethernet.
    Link,
    /// After UDP.
    Udp,
    /// After GRE.
    Gre,
}

/// One header stack. Offsets are from the start of the frame.
#[derive(Clone, Debug, Default)]
pub struct Stack {
    /// Start of the stack.
    pub start: usize,
    /// Ethernet header.
    pub link: Option<usize>,
    /// First byte of each VLAN tag, the TPID.
    pub tags: Vec<usize>,
    /// EtherType behind all tags.
    pub ether_type: Option<u16>,
    /// Label stacks: position, and the offset of each entry.
    pub labels: Vec<(LabelPosition, Vec<usize>)>,
    /// Layer 3 header.
    pub network: Network,
    /// Protocol of the IP payload, behind extension headers.
    pub protocol: u8,
    /// Numbers of the extension headers, in order.
    pub extensions: Vec<u8>,
    /// True if a routing header has segments left. Then the destination in the IPv6 header is not the final
    /// one.
    pub has_segments_left: bool,
    /// Fragmentation.
    pub fragment: Fragment,
    /// Parsed layer 4 header: protocol number and offset.
    pub transport: Option<(u8, usize)>,
    /// Tunnel header.
    pub tunnel: Tunnel,
    /// End of the IP packet by its own length, or of the stack's data without IP.
    pub end: usize,
    /// Start of the IP payload; `None` in later fragments.
    pub layer4: Option<usize>,
    /// True if a Mobile IPv6 option gives another source than the header (RFC 6275 section 6.3).
    pub has_home_address: bool,
    /// Description of a malformed header. A frame with a malformed outer stack is refused. A malformed inner
    /// stack counts as absent.
    pub malformed: Option<&'static str>,
}

/// The header stacks of a frame: the outer one, and the inner one if there is a tunnel.
#[derive(Clone, Debug)]
pub struct Headers {
    /// One or two stacks.
    pub stacks: Vec<Stack>,
    /// Offset of an Ethernet frame that a tunnel header (not a label stack) announces, whether valid or not.
    pub frame: Option<usize>,
}

/// Payload behind the last header of a stack.
enum InnerStart {
    Nothing,
    Ethernet(usize),
    Ip(u8, usize),
    /// Ethernet that the tunnel header does not announce. It is not parsed.
    Unspecified(usize),
}

/// Numbers of the extension headers that the parser follows: hop-by-hop, routing, fragment, AH, destination
/// options.
pub const EXTENSIONS: [u8; 5] = [0, 43, 44, 51, 60];

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

impl Headers {
    /// Parses a frame.
    pub fn of(frame: &[u8], ports: &TunnelPorts) -> Self {
        let mut stacks = Vec::new();
        let mut outer = Stack { end: frame.len(), ..Stack::default() };
        let inside = outer.ethernet(frame, 0, ports);
        let end = outer.end;
        let labelled =
            !outer.labels.iter().all(|(position, _)| *position == LabelPosition::Link) || outer.tunnel == Tunnel::None;
        let carried = match inside {
            InnerStart::Ethernet(at) | InnerStart::Unspecified(at) if !labelled => Some(at),
            _ => None,
        };
        stacks.push(outer);
        if let Some((link, version, at)) = match inside {
            InnerStart::Nothing | InnerStart::Unspecified(_) => None,
            InnerStart::Ethernet(at) => Some((true, 0, at)),
            InnerStart::Ip(version, at) => Some((false, version, at)),
        } {
            let mut inner = Stack { start: at, end, ..Stack::default() };
            // The payload of the second stack is not parsed.
            if link {
                inner.ethernet(frame, at, ports);
            } else {
                inner.ip(frame, version, at, ports);
            }
            if inner.malformed.is_none() {
                stacks.push(inner);
            }
        }
        Self { stacks, frame: carried }
    }
}

impl Stack {
    fn malformed(&mut self, what: &'static str) -> InnerStart {
        self.malformed = Some(what);
        InnerStart::Nothing
    }

    fn ethernet(&mut self, frame: &[u8], at: usize, ports: &TunnelPorts) -> InnerStart {
        if at + 14 > self.end {
            return self.malformed("Ethernet header cut off");
        }
        self.link = Some(at);
        let mut type_at = at + 12;
        while [0x8100, 0x88a8].contains(&u16_at(frame, type_at)) {
            if self.tags.len() == 2 {
                return self.malformed("a third VLAN tag");
            }
            if type_at + 6 > self.end {
                return self.malformed("VLAN tag cut off");
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
                let Some(behind) = self.label_stack(frame, LabelPosition::Link, next) else {
                    return InnerStart::Nothing;
                };
                match guess_label_payload(frame, behind, self.end) {
                    InnerStart::Ip(version, at) => {
                        // A labelled frame is forwarded by its label, so a malformed payload does not matter.
                        let mut with_ip = self.clone();
                        let inside = with_ip.ip(frame, version, at, ports);
                        if with_ip.malformed.is_some() {
                            return InnerStart::Nothing;
                        }
                        *self = with_ip;
                        inside
                    }
                    other => other,
                }
            }
            _ => InnerStart::Nothing,
        }
    }

    /// Parses ARP (RFC 826) for Ethernet and IPv4 only.
    fn arp(&mut self, frame: &[u8], at: usize) -> InnerStart {
        if at + 28 > self.end {
            return self.malformed("ARP cut off");
        }
        if frame[at..at + 6] == [0, 1, 8, 0, 6, 4] {
            self.network = Network::Arp(at);
        }
        InnerStart::Nothing
    }

    /// Parses a label stack (RFC 3032 section 2.1): entries of four bytes, up to the bottom of the stack.
    /// Returns the offset behind it. A label stack without a bottom, or with more than sixteen entries, does
    /// not count.
    fn label_stack(&mut self, frame: &[u8], position: LabelPosition, mut at: usize) -> Option<usize> {
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
        self.labels.push((position, entries));
        Some(at)
    }

    /// Returns the entries of the first label stack, which pattern fields refer to.
    pub fn entries(&self) -> &[usize] {
        self.labels.first().map_or(&[], |(_, entries)| entries)
    }

    /// Returns true if there is a label stack at this position.
    pub fn labelled(&self, position: LabelPosition) -> bool {
        self.labels.iter().any(|(p, _)| *p == position)
    }

    /// Returns the offset of the IP header.
    pub fn ip_at(&self) -> Option<usize> {
        match self.network {
            Network::Ipv4(at) | Network::Ipv6(at) => Some(at),
            _ => None,
        }
    }
}

/// Returns the payload of a label stack. Labels do not identify it, so it is guessed by the first nibble (RFC
/// 4928 section 3).
fn guess_label_payload(frame: &[u8], at: usize, end: usize) -> InnerStart {
    match frame.get(at).filter(|_| at < end).map(|byte| byte >> 4) {
        Some(4) => InnerStart::Ip(4, at),
        Some(6) => InnerStart::Ip(6, at),
        Some(_) => InnerStart::Ethernet(at),
        None => InnerStart::Nothing,
    }
}
