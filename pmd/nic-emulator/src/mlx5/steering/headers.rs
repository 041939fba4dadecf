//! Header offsets of a frame, as a ConnectX parses it: the outer headers, and the headers inside a known
//! tunnel.

const VLAN: u16 = 0x8100;
const QINQ: u16 = 0x88a8;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const MPLS: [u16; 2] = [0x8847, 0x8848];
const BRIDGING: u16 = 0x6558;

pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
pub(super) const GRE: u8 = 47;
pub(super) const ESP: u8 = 50;
pub(super) const ICMP: u8 = 1;
pub(super) const ICMPV6: u8 = 58;
const IPV4_IN_IP: u8 = 4;
const IPV6_IN_IP: u8 = 41;
const FRAGMENT: u8 = 44;

pub(super) const VXLAN_PORT: u16 = 4789;
const GPE_PORT: u16 = 4790;
const GENEVE_PORT: u16 = 6081;
const MPLS_PORT: u16 = 6635;
/// Maximum number of MPLS labels that are skipped.
const MOST_LABELS: usize = 8;

/// Headers of one level. All offsets are relative to the frame, and the headers are inside the frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Level {
    /// Offset of the Ethernet header.
    pub(super) l2: Option<usize>,
    /// Number of VLAN tags, at most two.
    pub(super) tags: u8,
    /// Offset of the EtherType behind the tags.
    pub(super) ethertype: Option<usize>,
    /// Offset of the first MPLS label stack entry.
    pub(super) mpls: Option<usize>,
    /// IP version 4 or 6; 0 for none.
    pub(super) version: u8,
    /// Offset of the IP header.
    pub(super) l3: usize,
    /// Protocol of the header behind the IP header and its extensions.
    pub(super) protocol: u8,
    /// True for any fragment, including the first one. The payload of a fragment is not parsed.
    pub(super) fragment: bool,
    /// Offset of the header behind the IP header and its extensions.
    pub(super) l4: usize,
    /// True if the transport header is complete.
    pub(super) transport: bool,
    /// End of the IP packet, or of the frame if there is none.
    pub(super) end: usize,
}

/// Tunnel header between the two levels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Tunnel {
    #[default]
    None,
    /// VXLAN; the value is the offset of the tunnel header, as in the other variants.
    Vxlan(usize),
    Gpe(usize),
    Geneve(usize),
    Gre(usize),
    /// Label stack directly behind UDP.
    MplsOverUdp(usize),
    /// Offset of the GRE header, and of the label stack behind it.
    MplsOverGre(usize, usize),
    IpInIp,
}

/// All headers of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Headers {
    pub(super) outer: Level,
    pub(super) tunnel: Tunnel,
    pub(super) inner: Option<Level>,
}

#[inline]
pub(super) fn half(frame: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(frame.get(at..at + 2)?.try_into().ok()?))
}

/// Parses only the outer headers.
#[inline]
pub(super) fn outer(frame: &[u8]) -> Level {
    ethernet(frame, 0, frame.len())
}

/// Parses all headers.
pub(super) fn parse(frame: &[u8]) -> Headers {
    let outer = outer(frame);
    let (tunnel, inner) = tunnel(frame, &outer).unwrap_or_default();
    Headers { outer, tunnel, inner }
}

#[inline]
fn ethernet(frame: &[u8], at: usize, end: usize) -> Level {
    let frame = &frame[..end];
    let mut level = Level { end, ..Level::default() };
    if at + 14 > end {
        return level;
    }
    level.l2 = Some(at);
    let mut kind_at = at + 12;
    while let Some(VLAN | QINQ) = half(frame, kind_at)
        && level.tags < 2
        && kind_at + 6 <= end
    {
        level.tags += 1;
        kind_at += 4;
    }
    let Some(kind) = half(frame, kind_at) else { return level };
    level.ethertype = Some(kind_at);
    network(frame, kind_at + 2, kind, &mut level);
    level
}

#[inline]
fn network(frame: &[u8], at: usize, kind: u16, level: &mut Level) {
    match kind {
        IPV4 => ipv4(frame, at, level),
        IPV6 => ipv6(frame, at, level),
        kind if MPLS.contains(&kind) && at + 4 <= frame.len() => {
            level.mpls = Some(at);
            if let Some(behind) = behind_labels(frame, at) {
                by_version(frame, behind, level);
            }
        }
        _ => {}
    }
}

/// Returns the offset behind an MPLS label stack.
fn behind_labels(frame: &[u8], mut at: usize) -> Option<usize> {
    for _ in 0..MOST_LABELS {
        let bottom = frame.get(at..at + 4)?[2] & 1 != 0;
        at += 4;
        if bottom {
            return Some(at);
        }
    }
    None
}

fn by_version(frame: &[u8], at: usize, level: &mut Level) {
    match frame.get(at).map(|byte| byte >> 4) {
        Some(4) => ipv4(frame, at, level),
        Some(6) => ipv6(frame, at, level),
        _ => {}
    }
}

#[inline]
fn ipv4(frame: &[u8], at: usize, level: &mut Level) {
    let Some(header) = frame.get(at..at + 20) else { return };
    let length = usize::from(header[0] & 15) * 4;
    let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
    if header[0] >> 4 != 4 || length < 20 || total < length || at + total > frame.len() {
        return;
    }
    let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0;
    (level.version, level.l3, level.protocol, level.fragment) = (4, at, header[9], fragment);
    (level.l4, level.end) = (at + length, at + total);
    transport(level);
}

#[inline]
fn ipv6(frame: &[u8], at: usize, level: &mut Level) {
    let Some(header) = frame.get(at..at + 40) else { return };
    let end = at + 40 + usize::from(u16::from_be_bytes([header[4], header[5]]));
    if header[0] >> 4 != 6 || end > frame.len() {
        return;
    }
    (level.version, level.l3, level.l4, level.end) = (6, at, at + 40, end);
    let mut next = header[6];
    // Hop-by-hop, routing, destination options and fragment headers contain the next header. The fragment
    // header has a fixed length.
    while [0, 43, 60, FRAGMENT].contains(&next) {
        let Some(extension) = frame.get(level.l4..level.l4 + 8) else { break };
        let length = if next == FRAGMENT { 8 } else { 8 + 8 * usize::from(extension[1]) };
        if level.l4 + length > end {
            break;
        }
        level.fragment |= next == FRAGMENT;
        next = extension[0];
        level.l4 += length;
        if level.fragment {
            break;
        }
    }
    level.protocol = next;
    transport(level);
}

#[inline]
fn transport(level: &mut Level) {
    let least = match level.protocol {
        TCP => 20,
        UDP => 8,
        ICMP | ICMPV6 | ESP => 8,
        GRE => 4,
        _ => return,
    };
    level.transport = !level.fragment && level.l4 + least <= level.end;
}

fn tunnel(frame: &[u8], outer: &Level) -> Option<(Tunnel, Option<Level>)> {
    let end = outer.end;
    let at = |start: usize| ethernet(frame, start, end);
    let packet = |start: usize, kind: u16| {
        let mut level = Level { end, ..Level::default() };
        network(&frame[..end], start, kind, &mut level);
        (level.version != 0).then_some(level)
    };
    let bare = |start: usize| {
        let mut level = Level { end, ..Level::default() };
        by_version(&frame[..end], start, &mut level);
        (level.version != 0).then_some(level)
    };
    let bridged = |start: usize| Some(at(start)).filter(|level| level.l2.is_some());
    match outer.protocol {
        _ if outer.version == 0 || outer.fragment => None,
        IPV4_IN_IP | IPV6_IN_IP => Some((Tunnel::IpInIp, Some(bare(outer.l4)?))),
        UDP if outer.transport => {
            let header = outer.l4 + 8;
            match half(frame, outer.l4 + 2)? {
                MPLS_PORT => {
                    frame.get(header..header + 4)?;
                    Some((Tunnel::MplsOverUdp(header), behind_labels(&frame[..end], header).and_then(bare)))
                }
                port if header + 8 <= end => match port {
                    VXLAN_PORT => Some((Tunnel::Vxlan(header), bridged(header + 8))),
                    GPE_PORT => {
                        let inner = match frame[header + 3] {
                            1 => packet(header + 8, IPV4),
                            2 => packet(header + 8, IPV6),
                            3 => bridged(header + 8),
                            _ => None,
                        };
                        Some((Tunnel::Gpe(header), inner))
                    }
                    GENEVE_PORT => {
                        let payload = header + 8 + 4 * usize::from(frame[header] & 0x3f);
                        let inner = match half(frame, header + 2)? {
                            _ if payload > end => None,
                            BRIDGING => bridged(payload),
                            kind => packet(payload, kind),
                        };
                        Some((Tunnel::Geneve(header), inner))
                    }
                    _ => None,
                },
                _ => None,
            }
        }
        GRE if outer.transport => {
            let header = outer.l4;
            let flags = half(frame, header)?;
            if flags & 7 != 0 {
                return None;
            }
            let words = [0x8000, 0x2000, 0x1000].iter().filter(|bit| flags & **bit != 0).count();
            let payload = header + 4 + 4 * words;
            if payload > end {
                return None;
            }
            Some(match half(frame, header + 2)? {
                BRIDGING => (Tunnel::Gre(header), bridged(payload)),
                kind if MPLS.contains(&kind) && payload + 4 <= end => {
                    (Tunnel::MplsOverGre(header, payload), behind_labels(&frame[..end], payload).and_then(bare))
                }
                kind => (Tunnel::Gre(header), packet(payload, kind)),
            })
        }
        _ => None,
    }
}

impl Level {
    /// Returns EtherType and tag control information of a VLAN tag; number 0 is the outermost.
    #[inline]
    pub(super) fn tag(&self, frame: &[u8], number: u8) -> Option<(u16, u16)> {
        let at = self.l2? + 12 + 4 * usize::from(number);
        (number < self.tags).then(|| Some((half(frame, at)?, half(frame, at + 2)?))).flatten()
    }

    /// Returns true if the EtherType is that of a customer tag (C-VLAN).
    pub(super) fn is_customer(kind: u16) -> bool {
        kind == VLAN
    }
}
