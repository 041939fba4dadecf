//! Payload of IP: transport headers and tunnels.

use super::{Fragment, InnerStart, LabelPosition, Network, Stack, Tunnel, TunnelPorts, guess_label_payload, u16_at};

impl Stack {
    pub(super) fn layer4(&mut self, frame: &[u8], at: usize, ports: &TunnelPorts) -> InnerStart {
        if self.fragment == Fragment::Later {
            return InnerStart::Nothing;
        }
        self.layer4 = Some(at);
        let left = self.end - at;
        let v4 = matches!(self.network, Network::Ipv4(_));
        match self.protocol {
            4 | 41 | 143 if self.fragment != Fragment::No => return InnerStart::Nothing,
            4 => return InnerStart::Ip(4, at),
            41 => return InnerStart::Ip(6, at),
            143 => return InnerStart::Ethernet(at),
            // RFC 9293 section 3.1.
            6 => {
                if left < 20 {
                    return self.malformed("TCP header cut off");
                }
                let header = usize::from(frame[at + 12] >> 4) * 4;
                if header < 20 || header > left {
                    return self.malformed("TCP data offset");
                }
            }
            17 => return self.udp(frame, at, ports),
            47 => return self.gre(frame, at),
            // RFC 792: all messages have at least eight bytes. RFC 4303 section 2: SPI and sequence number.
            1 if v4 && left < 8 => return self.malformed("ICMP cut off"),
            50 if left < 8 => return self.malformed("ESP cut off"),
            58 if !v4 && left < 4 => return self.malformed("ICMPv6 cut off"),
            1 if v4 => {}
            58 if !v4 => {}
            50 => {}
            _ => return InnerStart::Nothing,
        }
        self.transport = Some((self.protocol, at));
        InnerStart::Nothing
    }

    /// Parses UDP (RFC 768), and the tunnel that its destination port identifies.
    fn udp(&mut self, frame: &[u8], at: usize, ports: &TunnelPorts) -> InnerStart {
        if at + 8 > self.end {
            return self.malformed("UDP header cut off");
        }
        let length = usize::from(u16_at(frame, at + 4));
        // The first fragment holds the beginning of a longer datagram.
        if length < 8 || at + length > self.end && self.fragment == Fragment::No {
            return self.malformed("UDP length");
        }
        self.transport = Some((17, at));
        // Tunnels are parsed only in unfragmented packets.
        if self.fragment != Fragment::No {
            return InnerStart::Nothing;
        }
        let port = u16_at(frame, at + 2);
        let (behind, end) = (at + 8, at + length);
        if port == ports.mpls {
            let mut within = self.clone();
            within.end = end;
            let Some(at) = within.label_stack(frame, LabelPosition::Udp, behind) else { return InnerStart::Nothing };
            *self = within;
            return guess_label_payload(frame, at, end);
        }
        // A malformed tunnel header does not count as a tunnel.
        if behind + 8 > end {
            return InnerStart::Nothing;
        }
        let flags = frame[behind];
        let inside = match port {
            // RFC 7348 section 5: the I flag MUST be set; other flags are ignored.
            port if port == ports.vxlan && flags & 0x08 != 0 => {
                self.tunnel = Tunnel::Vxlan(behind);
                InnerStart::Ethernet(behind + 8)
            }
            // draft-ietf-nvo3-vxlan-gpe section 3.1: version 0; without P it is VXLAN.
            port if port == ports.vxlan_gpe && flags & 0x30 == 0 => {
                self.tunnel = Tunnel::VxlanGpe(behind);
                match (flags & 0x04, frame[behind + 3]) {
                    (0, _) => InnerStart::Unspecified(behind + 8),
                    (_, 1) => InnerStart::Ip(4, behind + 8),
                    (_, 2) => InnerStart::Ip(6, behind + 8),
                    (_, 3) => InnerStart::Ethernet(behind + 8),
                    _ => InnerStart::Nothing,
                }
            }
            // RFC 8926 sections 3.4 and 3.5.
            port if port == ports.geneve && flags >> 6 == 0 => {
                let inside = behind + 8 + usize::from(flags & 0x3f) * 4;
                let mut option = behind + 8;
                while option < inside {
                    if inside > end {
                        return InnerStart::Nothing;
                    }
                    option += 4 + usize::from(frame[option + 3] & 0x1f) * 4;
                }
                if option != inside {
                    return InnerStart::Nothing;
                }
                self.tunnel = Tunnel::Geneve(behind);
                by_type(u16_at(frame, behind + 2), inside)
            }
            _ => return InnerStart::Nothing,
        };
        self.end = end;
        inside
    }

    /// Parses GRE (RFC 2784 section 2 and RFC 2890 section 2).
    fn gre(&mut self, frame: &[u8], at: usize) -> InnerStart {
        // A truncated tunnel header does not count as a tunnel.
        if at + 4 > self.end {
            return InnerStart::Nothing;
        }
        let flags = u16_at(frame, at);
        // Checksum (and the offset of RFC 1701), key, sequence number.
        let header = 4 + [0xc000, 0x2000, 0x1000].iter().filter(|&&bit| flags & bit != 0).count() * 4;
        if at + header > self.end {
            return InnerStart::Nothing;
        }
        self.transport = Some((47, at));
        self.tunnel = Tunnel::Gre(at);
        // The header counts, but not its payload, for another version. The same holds for flags that RFC 2784
        // section 2.3 does not define.
        if self.fragment != Fragment::No || flags & 0x4c07 != 0 {
            return InnerStart::Nothing;
        }
        let behind = at + header;
        match u16_at(frame, at + 2) {
            0x8847 | 0x8848 => match self.label_stack(frame, LabelPosition::Gre, behind) {
                Some(at) => guess_label_payload(frame, at, self.end),
                None => InnerStart::Nothing,
            },
            protocol => by_type(protocol, behind),
        }
    }
}

fn by_type(ether_type: u16, at: usize) -> InnerStart {
    match ether_type {
        0x6558 => InnerStart::Ethernet(at),
        0x0800 => InnerStart::Ip(4, at),
        0x86dd => InnerStart::Ip(6, at),
        _ => InnerStart::Nothing,
    }
}
