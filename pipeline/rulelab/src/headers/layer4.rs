//! What IP carries, tunnels among it.

use super::{Fragment, Inside, Network, Place, Stack, Tunnel, TunnelPorts, guess, u16_at};

impl Stack {
    pub(super) fn layer4(&mut self, frame: &[u8], at: usize, ports: &TunnelPorts) -> Inside {
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
}

fn by_type(ether_type: u16, at: usize) -> Inside {
    match ether_type {
        0x6558 => Inside::Ethernet(at),
        0x0800 => Inside::Ip(4, at),
        0x86dd => Inside::Ip(6, at),
        _ => Inside::Nothing,
    }
}
