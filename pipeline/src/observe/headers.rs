//! The headers of a frame in one line.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use wirepath_wire::{HeaderOffsets, L3Type, L4Type, MacAddr, Parser, Tunnel};

/// Displays the headers of a frame, in the words of rule patterns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Headers<'a> {
    /// The first bytes of the frame.
    pub(super) frame: &'a [u8],
    /// Length of the frame in bytes.
    pub(super) len: usize,
    pub(super) parser: &'a Parser,
}

impl fmt::Display for Headers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parsed = match self.parser.parse_chain(self.frame, self.len) {
            Ok(parsed) => parsed,
            Err(error) => {
                if let Some(header) = self.frame.first_chunk::<14>() {
                    ethernet(f, header)?;
                    write!(f, " type {:#06x}, ", u16::from_be_bytes([header[12], header[13]]))?;
                }
                return write!(f, "{error}");
            }
        };
        self.stack(f, parsed.outer())?;
        match parsed.tunnel() {
            Tunnel::None => return Ok(()),
            tunnel => write!(f, " / {}", format!("{tunnel:?}").to_ascii_lowercase())?,
        }
        if let Some(vni) = parsed.vni() {
            write!(f, " vni {}", vni.get())?;
        }
        if let Some(error) = parsed.tunnel_error() {
            return write!(f, ", {error}");
        }
        match parsed.inner() {
            Some(inner) => {
                f.write_str(" / ")?;
                self.stack(f, inner)
            }
            None => Ok(()),
        }
    }
}

fn ethernet(f: &mut fmt::Formatter<'_>, header: &[u8; 14]) -> fmt::Result {
    let [a, b, c, d, e, g, h, i, j, k, l, m, ..] = *header;
    write!(f, "eth {} > {}", MacAddr([h, i, j, k, l, m]), MacAddr([a, b, c, d, e, g]))
}

impl Headers<'_> {
    fn at<const N: usize>(&self, at: usize) -> Option<&[u8; N]> {
        self.frame.get(at..).and_then(|bytes| bytes.first_chunk())
    }

    fn number(&self, at: usize) -> u16 {
        self.at(at).map_or(0, |bytes| u16::from_be_bytes(*bytes))
    }

    fn stack(&self, f: &mut fmt::Formatter<'_>, it: &HeaderOffsets) -> fmt::Result {
        if it.has_ethernet()
            && let Some(header) = self.at::<14>(it.l2())
        {
            ethernet(f, header)?;
            for tag in (0..it.tag_count()).filter_map(|i| it.tag(i)) {
                write!(f, " / vlan {}", tag.tci & 0xfff)?;
                if tag.tci >> 13 != 0 {
                    write!(f, " prio {}", tag.tci >> 13)?;
                }
            }
            f.write_str(" / ")?;
        }
        match it.l3_type() {
            L3Type::Arp => {
                let Some(h) = self.at::<28>(it.l3()) else { return f.write_str("arp") };
                let (sender, target) = (Ipv4Addr::new(h[14], h[15], h[16], h[17]), &h[24..]);
                let target = Ipv4Addr::new(target[0], target[1], target[2], target[3]);
                return match h[7] {
                    1 => write!(f, "arp request for {target} from {sender}"),
                    2 => write!(f, "arp reply of {sender} to {target}"),
                    operation => write!(f, "arp operation {operation}"),
                };
            }
            L3Type::Ipv4 => {
                let Some(h) = it.ipv4_header(self.frame) else { return f.write_str("ipv4") };
                let (src, dst) = (Ipv4Addr::new(h[12], h[13], h[14], h[15]), Ipv4Addr::new(h[16], h[17], h[18], h[19]));
                write!(f, "ipv4 {src} > {dst} ttl {}", h[8])?;
                traffic_class(f, h[1])?;
            }
            L3Type::Ipv6 => {
                let Some(h) = it.ipv6_header(self.frame) else { return f.write_str("ipv6") };
                let address = |at: usize| {
                    let bytes: Option<&[u8; 16]> = h.get(at..).and_then(|bytes| bytes.first_chunk());
                    Ipv6Addr::from(bytes.copied().unwrap_or_default())
                };
                write!(f, "ipv6 {} > {} hop limit {}", address(8), address(24), h[7])?;
                traffic_class(f, h[0] << 4 | h[1] >> 4)?;
            }
            L3Type::Other => return write!(f, "type {:#06x}", it.ethertype().0),
        }
        if it.is_fragment() {
            f.write_str(if it.is_first_fragment() { " first fragment" } else { " later fragment" })?;
        }
        let (l4, ports) = (it.l4(), (self.number(it.l4()), self.number(it.l4() + 2)));
        let byte = |at: usize| self.frame.get(at).copied().unwrap_or(0);
        match it.l4_type() {
            L4Type::Udp => write!(f, " / udp {} > {}", ports.0, ports.1),
            L4Type::Tcp => write!(f, " / tcp {} > {} flags {:#04x}", ports.0, ports.1, byte(l4 + 13)),
            kind @ (L4Type::Icmpv4 | L4Type::Icmpv6) => {
                let (name, echo) = if kind == L4Type::Icmpv4 { ("icmp", [8, 0]) } else { ("icmpv6", [128, 129]) };
                write!(f, " / {name} ")?;
                match echo.iter().position(|kind| *kind == byte(l4)) {
                    Some(reply) => {
                        f.write_str(if reply == 0 { "echo request" } else { "echo reply" })?;
                        write!(f, " id {} seq {}", self.number(l4 + 4), self.number(l4 + 6))
                    }
                    None => write!(f, "type {} code {}", byte(l4), byte(l4 + 1)),
                }
            }
            L4Type::Gre | L4Type::None => Ok(()),
            L4Type::Esp => f.write_str(" / esp"),
            L4Type::Other => write!(f, " / protocol {}", it.protocol().0),
        }
    }
}

fn traffic_class(f: &mut fmt::Formatter<'_>, class: u8) -> fmt::Result {
    match (class >> 2, class & 3) {
        (0, 0) => Ok(()),
        (dscp, 0) => write!(f, " dscp {dscp}"),
        (0, ecn) => write!(f, " ecn {ecn}"),
        (dscp, ecn) => write!(f, " dscp {dscp} ecn {ecn}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(frame: &[u8]) -> String {
        Headers { frame, len: frame.len(), parser: &Parser::default() }.to_string()
    }

    #[test]
    fn headers_are_shown_from_the_outside_in() {
        let ethernet = [&[2, 0, 0, 0, 0, 2], &[2, 0, 0, 0, 0, 1]].map(|mac: &[u8; 6]| mac.as_slice()).concat();
        let ip = [0x45, 0, 0, 28, 0, 0, 0, 0, 63, 1, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        let echo = [8, 0, 0, 0, 0, 5, 0, 6];
        let plain = [&ethernet[..], &[8, 0], &ip, &echo].concat();
        let parser = Parser { verify_ipv4: false, ..Parser::default() };
        let shown = Headers { frame: &plain, len: plain.len(), parser: &parser }.to_string();
        let expected = "eth 02:00:00:00:00:01 > 02:00:00:00:00:02 / ipv4 10.0.0.1 > 10.0.0.2 ttl 63 \
                        / icmp echo request id 5 seq 6";
        assert_eq!(shown, expected);
        let tagged = [&ethernet[..], &[0x81, 0, 0x20, 7, 0x88, 0xb5], &[0; 40]].concat();
        assert_eq!(line(&tagged), "eth 02:00:00:00:00:01 > 02:00:00:00:00:02 / vlan 7 prio 1 / type 0x88b5");
        // No length and no content is a panic.
        for len in 0..plain.len() {
            line(&plain[..len]);
            let mut bytes = tagged.clone();
            fastrand::Rng::with_seed(len as u64).fill(&mut bytes[12..]);
            line(&bytes);
        }
    }
}
