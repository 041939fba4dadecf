//! Actions on bytes. Each step parses the headers again and writes single fields.

use wirepath_flow::{Field, ItemKind, Reformat, ReformatKind};
use wirepath_wire::Tag;

use crate::fields::header;
use crate::headers::{Fragment, Headers, Network, Stack, TunnelPorts, u16_at};
use crate::reference::{DropCause, Fault};

/// A frame, with the parts that may differ between engines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The frame without FCS.
    pub bytes: Vec<u8>,
    /// Outer headers that an encapsulation added.
    pub outer_headers: Option<OuterHeaders>,
    /// Offsets of updated checksums whose value may be 0 or 0xffff, which are equivalent.
    pub zeros: Vec<usize>,
    /// Offset and original value of the UDP destination port at the time of the match. A `set` does not
    /// change which tunnel it is.
    matched_port: Option<(usize, u16)>,
    /// True after decapsulation: the second of the two parsed stacks is now the first.
    pub decapsulated: bool,
}

/// Outer headers of an encapsulation. Offsets are from the start of the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OuterHeaders {
    /// Length of the headers in bytes.
    pub length: usize,
    /// IP version of the encapsulated packet; `None` for a frame.
    pub version: Option<u8>,
    /// Version and offset of the IP header.
    pub ip: Option<(u8, usize)>,
    /// Offset of the UDP header.
    pub udp: Option<usize>,
    /// True if the rule leaves the source port to the engine (written as 0), which uses entropy.
    pub any_port: bool,
    /// True if the engine chooses the identification (IPv4 without DF).
    pub any_id: bool,
}

/// Returns the ones' complement sum of RFC 1071. It is 0xffff over a header with a right checksum.
pub fn sum(parts: &[&[u8]]) -> u16 {
    let mut sum: u64 = 0;
    for part in parts {
        for word in part.chunks(2) {
            sum += u64::from(word[0]) << 8 | u64::from(word.get(1).copied().unwrap_or(0));
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Returns the pseudo header of UDP, TCP and ICMPv6 (RFC 9293 section 3.1, RFC 8200 section 8.1).
pub fn pseudo(frame: &[u8], version: u8, ip: usize, protocol: u8, length: usize) -> Vec<u8> {
    let mut pseudo = match version {
        4 => frame[ip + 12..ip + 20].to_vec(),
        _ => frame[ip + 8..ip + 40].to_vec(),
    };
    pseudo.extend((length as u32).to_be_bytes());
    pseudo.extend([0, 0, 0, protocol]);
    pseudo
}

/// Updates a checksum by RFC 1624 equation 3: HC' = ~(~HC + ~m + m'). Both slices are the same 16-bit words
/// before and after. If their sums are equal, the checksum is unchanged: 0 and 0xffff are equivalent, and
/// neither becomes the other.
fn adjust(frame: &mut [u8], checksum: usize, before: &[u8], after: &[u8]) -> u16 {
    let not = |bytes: &[u8]| bytes.iter().map(|byte| !byte).collect::<Vec<u8>>();
    if sum(&[&not(before), after]).is_multiple_of(0xffff) {
        return u16_at(frame, checksum);
    }
    let old = not(&frame[checksum..checksum + 2]);
    let new = !sum(&[&old, &not(before), after]);
    frame[checksum..checksum + 2].copy_from_slice(&new.to_be_bytes());
    new
}

/// Returns the offset of the layer 4 checksum that covers the addresses, and true if 0 means that there is
/// none.
fn layer4_checksum(frame: &[u8], stack: &Stack, fault: Fault) -> Option<(usize, bool)> {
    // DCCP (RFC 4340 section 5.1) and UDP-Lite (RFC 3828 section 3.1) have their checksum at the offset of
    // UDP. It is mandatory.
    if let (33 | 136, Some(at)) = (stack.protocol, stack.layer4) {
        return (at + 8 <= stack.end).then_some((at + 6, stack.protocol == 136));
    }
    match stack.transport? {
        (6, at) => Some((at + 16, false)),
        (17, at) if u16_at(frame, at + 6) == 0 && fault != Fault::NoChecksumMadeOne => None,
        (17, at) => Some((at + 6, true)),
        (58, at) => Some((at + 2, false)),
        _ => None,
    }
}

impl Frame {
    /// Makes a frame as it arrived.
    pub fn new(bytes: &[u8]) -> Self {
        Self { bytes: bytes.to_vec(), outer_headers: None, zeros: Vec::new(), matched_port: None, decapsulated: false }
    }

    /// Replaces a range of bytes, and moves the recorded offsets.
    fn splice(&mut self, at: std::ops::Range<usize>, with: &[u8]) {
        self.zeros.retain(|&zero| zero < at.start || zero >= at.end);
        for zero in self.zeros.iter_mut().filter(|zero| **zero >= at.end) {
            *zero = *zero + with.len() - at.len();
        }
        self.matched_port = self.matched_port.filter(|(offset, _)| *offset < at.start || *offset >= at.end);
        if let Some((offset, _)) = self.matched_port.as_mut().filter(|(offset, _)| *offset >= at.end) {
            *offset = *offset + with.len() - at.len();
        }
        self.bytes.splice(at, with.iter().copied());
    }

    /// Returns the present offsets of the headers that the rule matched.
    pub fn headers(&self, ports: &TunnelPorts) -> Headers {
        let mut bytes = self.bytes.clone();
        if let Some((at, port)) = self.matched_port {
            bytes[at..at + 2].copy_from_slice(&port.to_be_bytes());
        }
        Headers::of(&bytes, ports)
    }

    fn adjust_layer4(&mut self, stack: &Stack, before: &[u8], after: &[u8], fault: Fault) {
        // Unchanged fields leave the checksum as it is, whether 0 or 0xffff.
        if fault == Fault::Layer4ChecksumForgotten || before == after {
            return;
        }
        let Some((at, udp)) = layer4_checksum(&self.bytes, stack, fault) else { return };
        let new = adjust(&mut self.bytes, at, before, after);
        if !udp {
            self.zeros.push(at);
        } else if new == 0 {
            self.bytes[at..at + 2].fill(0xff);
        }
    }

    fn outer(&self, ports: &TunnelPorts) -> Stack {
        self.headers(ports).stacks.swap_remove(0)
    }

    /// Action `set`: writes a field of the outermost header of its kind.
    pub fn set(&mut self, field: Field, value: u128, ports: &TunnelPorts, fault: Fault) {
        let stack = self.outer(ports);
        let kind = field.spec().item;
        let Some(at) = header(&stack, kind, 0) else { return };
        let bytes = &mut self.bytes;
        let before = bytes.clone();
        let be = value.to_be_bytes();
        let low = |n: usize| &be[16 - n..];
        match field {
            Field::EthDst => bytes[at..at + 6].copy_from_slice(low(6)),
            Field::EthSrc => bytes[at + 6..at + 12].copy_from_slice(low(6)),
            Field::VlanVid => {
                bytes[at + 2] = bytes[at + 2] & 0xf0 | be[14] & 0x0f;
                bytes[at + 3] = be[15];
            }
            Field::VlanPcp => bytes[at + 2] = bytes[at + 2] & 0x1f | be[15] << 5,
            Field::VlanDei => bytes[at + 2] = bytes[at + 2] & 0xef | be[15] << 4,
            Field::Ipv4Src => bytes[at + 12..at + 16].copy_from_slice(low(4)),
            Field::Ipv4Dst => bytes[at + 16..at + 20].copy_from_slice(low(4)),
            Field::Ipv4Dscp if fault == Fault::DscpTakesEcn => bytes[at + 1] = be[15] << 2,
            Field::Ipv4Dscp => bytes[at + 1] = bytes[at + 1] & 3 | be[15] << 2,
            Field::Ipv4Ttl => bytes[at + 8] = be[15],
            Field::Ipv6Src => bytes[at + 8..at + 24].copy_from_slice(&be),
            Field::Ipv6Dst => bytes[at + 24..at + 40].copy_from_slice(&be),
            Field::Ipv6Dscp => {
                bytes[at] = bytes[at] & 0xf0 | be[15] >> 2;
                bytes[at + 1] = bytes[at + 1] & 0x3f | be[15] << 6;
            }
            Field::Ipv6Hops => bytes[at + 7] = be[15],
            Field::TcpSrc | Field::UdpSrc => bytes[at..at + 2].copy_from_slice(low(2)),
            Field::TcpDst | Field::UdpDst => {
                if field == Field::UdpDst && self.matched_port.is_none() {
                    self.matched_port = Some((at + 2, u16_at(bytes, at + 2)));
                }
                bytes[at + 2..at + 4].copy_from_slice(low(2));
            }
            other => panic!("{other:?} cannot be set"),
        }
        match kind {
            ItemKind::Ipv4 => self.ipv4_changed(&before, at, &stack, fault),
            ItemKind::Ipv6 => {
                // The checksum covers the final destination (RFC 8200 section 8.1), so the address of the
                // next hop is not in the sum.
                let to = if stack.has_segments_left && fault != Fault::NextHopInChecksum { at + 24 } else { at + 40 };
                let from = if stack.has_home_address { at + 24 } else { at + 8 };
                if from < to {
                    let after = self.bytes[from..to].to_vec();
                    self.adjust_layer4(&stack, &before[from..to], &after, fault);
                }
            }
            ItemKind::Tcp | ItemKind::Udp => {
                let after = self.bytes[at..at + 4].to_vec();
                self.adjust_layer4(&stack, &before[at..at + 4], &after, fault);
            }
            _ => {}
        }
    }

    /// Updates the header checksum, and the layer 4 checksum, which covers the addresses.
    fn ipv4_changed(&mut self, before: &[u8], at: usize, stack: &Stack, fault: Fault) {
        let words = |bytes: &[u8]| [&bytes[at..at + 10], &bytes[at + 12..at + 20]].concat();
        let after = words(&self.bytes);
        if fault != Fault::HeaderChecksumForgotten && words(before) != after {
            adjust(&mut self.bytes, at + 10, &words(before), &after);
        }
        let after = self.bytes[at + 12..at + 20].to_vec();
        self.adjust_layer4(stack, &before[at + 12..at + 20], &after, fault);
    }

    /// Action `dec-ttl` (RFC 1812 section 5.3.1: a packet without remaining hops is discarded).
    pub fn dec_ttl(&mut self, ports: &TunnelPorts, fault: Fault) -> Result<(), DropCause> {
        let stack = self.outer(ports);
        let least = if fault == Fault::HopsToNone { 0 } else { 1 };
        match stack.network {
            Network::Ipv4(at) => {
                if self.bytes[at + 8] <= least {
                    return Err(DropCause::NoHopsLeft);
                }
                let before = self.bytes.clone();
                self.bytes[at + 8] -= 1;
                self.ipv4_changed(&before, at, &stack, fault);
            }
            Network::Ipv6(at) => {
                if self.bytes[at + 7] <= least {
                    return Err(DropCause::NoHopsLeft);
                }
                self.bytes[at + 7] -= 1;
            }
            _ => {}
        }
        Ok(())
    }

    /// Action `push-vlan`: adds a tag in front of the existing ones.
    pub fn push_vlan(&mut self, tag: Tag, ports: &TunnelPorts, fault: Fault) -> Result<(), DropCause> {
        let tags = self.outer(ports).tags.len();
        if tags == 2 {
            return Err(DropCause::ThirdTag);
        }
        let at = if fault == Fault::TagPushedInside && tags > 0 { 16 } else { 12 };
        let [a, b] = tag.tpid.0.to_be_bytes();
        let [c, d] = tag.tci.to_be_bytes();
        self.splice(at..at, &[a, b, c, d]);
        Ok(())
    }

    /// Action `pop-vlan`: removes the outermost tag.
    pub fn pop_vlan(&mut self) {
        self.splice(12..16, &[]);
    }

    /// The four kinds of `decap` and `encap`.
    pub fn reformat(&mut self, reformat: &Reformat, ports: &TunnelPorts, fault: Fault) -> Result<(), DropCause> {
        match reformat.kind() {
            ReformatKind::L2TunnelToL2 | ReformatKind::L3TunnelToL2 => self.decap(reformat, ports, fault),
            ReformatKind::L2ToL2Tunnel => {
                self.splice(0..0, reformat.bytes());
                self.finish_outer(reformat.bytes().len(), None, fault);
                Ok(())
            }
            ReformatKind::L2ToL3Tunnel => {
                let stack = self.outer(ports);
                let Some(ip) = stack.ip_at() else { return Ok(()) };
                // Padding of a short Ethernet frame is not part of the IP packet.
                if fault != Fault::PaddingKept {
                    self.bytes.truncate(ip_end(&self.bytes, ip));
                }
                let version = self.bytes[ip] >> 4;
                self.splice(0..ip, reformat.bytes());
                self.finish_outer(reformat.bytes().len(), Some(version), fault);
                Ok(())
            }
        }
    }

    fn decap(&mut self, reformat: &Reformat, ports: &TunnelPorts, fault: Fault) -> Result<(), DropCause> {
        let headers = self.headers(ports);
        if headers.stacks[0].fragment != Fragment::No {
            return Err(DropCause::OuterFragment);
        }
        let outer = &headers.stacks[0];
        let outer_ecn = outer.ip_at().map_or(0, |ip| ecn(&self.bytes, ip));
        let inner = headers.stacks.get(1);
        let l2 = reformat.bytes().is_empty();
        // A decapsulated packet must be valid; a decapsulated frame need not be.
        let start = match inner {
            Some(inner) if l2 => inner.link,
            Some(inner) => inner.ip_at(),
            None => headers.frame.filter(|_| l2),
        };
        let Some(start) = start else { return Err(DropCause::NothingInside) };
        let end = match inner {
            Some(inner) if !l2 => inner.end,
            _ => outer.end,
        };
        if l2 && start + 14 > end {
            return Err(DropCause::NothingInside);
        }
        // Bytes behind the outer IP packet are padding.
        if fault != Fault::PaddingKept {
            self.bytes.truncate(end);
        }
        // The parsed inner IP header, or else bytes that look like one.
        let known = inner.and_then(Stack::ip_at).map(|ip| ip + reformat.bytes().len() - start);
        self.splice(0..start, reformat.bytes());
        self.decapsulated = true;
        if fault == Fault::EcnForgotten {
            return Ok(());
        }
        known.or_else(|| self.plain_ip()).map_or(Ok(()), |ip| self.merge_ecn(ip, outer_ecn))
    }

    /// Returns the offset of an IP header directly behind Ethernet and at most two tags.
    fn plain_ip(&self) -> Option<usize> {
        let mut at = 12;
        while at < 20 && at + 2 <= self.bytes.len() && [0x8100, 0x88a8].contains(&u16_at(&self.bytes, at)) {
            at += 4;
        }
        let ip = at + 2;
        let version = self.bytes.get(ip)? >> 4;
        let length = match (u16_at(&self.bytes, at), version) {
            (0x0800, 4) => 20,
            (0x86dd, 6) => 40,
            _ => return None,
        };
        (ip + length <= self.bytes.len()).then_some(ip)
    }

    /// Merges the ECN fields by RFC 6040 section 4.2, figure 4.
    fn merge_ecn(&mut self, ip: usize, outer: u8) -> Result<(), DropCause> {
        match (ecn(&self.bytes, ip), outer) {
            (0, 3) => return Err(DropCause::Congestion),
            (1 | 2, 3) => self.set_ecn(ip, 3),
            (2, 1) => self.set_ecn(ip, 1),
            _ => {}
        }
        Ok(())
    }

    fn set_ecn(&mut self, at: usize, ecn: u8) {
        if self.bytes[at] >> 4 == 4 {
            let before = self.bytes.clone();
            self.bytes[at + 1] = self.bytes[at + 1] & 0xfc | ecn;
            self.ipv4_changed(&before, at, &Stack::default(), Fault::None);
        } else {
            self.bytes[at + 1] = self.bytes[at + 1] & 0xcf | ecn << 4;
        }
    }

    /// Fills lengths and checksums of the first `header` bytes, which are outer headers.
    fn finish_outer(&mut self, header: usize, version: Option<u8>, fault: Fault) {
        let outer_headers = OuterHeaders { version, ..outer_offsets(&self.bytes[..header]) };
        let all = self.bytes.len();
        if let Some((version, ip)) = outer_headers.ip {
            let wrong = if fault == Fault::OuterLength { 4 } else { 0 };
            match version {
                4 => {
                    self.bytes[ip + 2..ip + 4].copy_from_slice(&((all - ip - wrong) as u16).to_be_bytes());
                    self.bytes[ip + 10..ip + 12].fill(0);
                    let header = usize::from(self.bytes[ip] & 15) * 4;
                    let checksum = !sum(&[&self.bytes[ip..ip + header]]);
                    self.bytes[ip + 10..ip + 12].copy_from_slice(&checksum.to_be_bytes());
                }
                _ => self.bytes[ip + 4..ip + 6].copy_from_slice(&((all - ip - 40) as u16).to_be_bytes()),
            }
            if let Some(udp) = outer_headers.udp {
                let length = all - udp;
                self.bytes[udp + 4..udp + 6].copy_from_slice(&(length as u16).to_be_bytes());
                // A checksum of 0 in the rule means no checksum (RFC 6935 over IPv6).
                if u16_at(&self.bytes, udp + 6) != 0 {
                    self.bytes[udp + 6..udp + 8].fill(0);
                    let pseudo = pseudo(&self.bytes, version, ip, 17, length);
                    let checksum = !sum(&[&pseudo, &self.bytes[udp..]]);
                    let checksum = if checksum == 0 { 0xffff } else { checksum };
                    self.bytes[udp + 6..udp + 8].copy_from_slice(&checksum.to_be_bytes());
                }
            }
        }
        self.outer_headers = Some(outer_headers);
    }
}

fn ecn(frame: &[u8], ip: usize) -> u8 {
    if frame[ip] >> 4 == 4 { frame[ip + 1] & 3 } else { frame[ip + 1] >> 4 & 3 }
}

fn ip_end(frame: &[u8], ip: usize) -> usize {
    match frame[ip] >> 4 {
        4 => ip + usize::from(u16_at(frame, ip + 2)),
        _ => ip + 40 + usize::from(u16_at(frame, ip + 4)),
    }
}

/// Finds the IP and UDP headers in a stack of outer headers.
pub fn outer_offsets(header: &[u8]) -> OuterHeaders {
    let mut at = 12;
    while [0x8100, 0x88a8].contains(&u16_at(header, at)) {
        at += 4;
    }
    let ip = at + 2;
    let (version, protocol, behind) = match u16_at(header, at) {
        0x0800 => (4, header[ip + 9], ip + usize::from(header[ip] & 15) * 4),
        0x86dd => (6, header[ip + 6], ip + 40),
        _ => {
            return OuterHeaders {
                length: header.len(),
                version: None,
                ip: None,
                udp: None,
                any_port: false,
                any_id: false,
            };
        }
    };
    let udp = (protocol == 17).then_some(behind);
    OuterHeaders {
        length: header.len(),
        version: None,
        ip: Some((version, ip)),
        udp,
        any_port: udp.is_some_and(|udp| u16_at(header, udp) == 0),
        any_id: version == 4 && header[ip + 6] & 0x40 == 0,
    }
}
