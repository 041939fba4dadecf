//! BFD control packets (RFC 5880 section 4.1), and the frames that carry them.

use std::net::IpAddr;

use wirepath_packet::drops::DropReason;
use wirepath_wire::{EtherType, IpProtocol, MacAddr, checksum, ethernet, ipv4, ipv6, udp};

use super::Micros;

/// UDP destination port of single-hop sessions (RFC 5881 section 4).
pub(in crate::tunnel) const SINGLE_HOP_PORT: u16 = 3784;
/// UDP destination port of multihop sessions (RFC 5883 section 5).
pub(in crate::tunnel) const MULTIHOP_PORT: u16 = 4784;
/// TTL of sent packets, and of received ones of single-hop sessions (RFC 5881 section 5).
pub(in crate::tunnel) const TTL: u8 = 255;
/// Length of a control packet without authentication, in bytes.
pub(super) const LEN: usize = 24;
/// Traffic class of sent packets: CS6, network control (RFC 4594 section 3.1).
pub(super) const TRAFFIC_CLASS: u8 = 48 << 2;

const POLL: u8 = 1 << 5;
const FINAL: u8 = 1 << 4;
const AUTHENTICATED: u8 = 1 << 2;
const DEMAND: u8 = 1 << 1;
const MULTIPOINT: u8 = 1;

/// State of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::tunnel) enum State {
    AdminDown,
    #[default]
    Down,
    Init,
    Up,
}

impl State {
    /// Returns the lower-case name for displays.
    pub(in crate::tunnel) const fn name(self) -> &'static str {
        match self {
            Self::AdminDown => "admin_down",
            Self::Down => "down",
            Self::Init => "init",
            Self::Up => "up",
        }
    }

    const fn from_bits(bits: u8) -> Self {
        match bits & 3 {
            0 => Self::AdminDown,
            1 => Self::Down,
            2 => Self::Init,
            _ => Self::Up,
        }
    }
}

/// Reason of the last change of state (RFC 5880 section 4.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::tunnel) struct Diagnostic(pub(super) u8);

impl Diagnostic {
    pub(super) const NONE: Self = Self(0);
    pub(super) const TIME_EXPIRED: Self = Self(1);
    pub(super) const NEIGHBOUR_DOWN: Self = Self(3);
    pub(super) const ADMIN_DOWN: Self = Self(7);

    /// Returns the text for displays.
    pub(in crate::tunnel) const fn text(self) -> &'static str {
        match self.0 {
            0 => "none",
            1 => "control detection time expired",
            2 => "echo function failed",
            3 => "neighbour signaled session down",
            4 => "forwarding plane reset",
            5 => "path down",
            6 => "concatenated path down",
            7 => "administratively down",
            8 => "reverse concatenated path down",
            _ => "reserved",
        }
    }
}

/// A control packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ControlPacket {
    pub(super) diagnostic: Diagnostic,
    pub(super) state: State,
    pub(super) poll: bool,
    pub(super) is_final: bool,
    pub(super) demand: bool,
    pub(super) multiplier: u8,
    pub(super) my_discriminator: u32,
    pub(super) your_discriminator: u32,
    pub(super) desired_min_tx: Micros,
    pub(super) required_min_rx: Micros,
}

impl ControlPacket {
    /// Reads the payload of a datagram, with the checks of RFC 5880 section 6.8.6 that need no session.
    pub(super) fn parse(payload: &[u8]) -> Result<Self, DropReason> {
        let bytes: &[u8; LEN] = payload.first_chunk().ok_or(DropReason::BfdInvalid)?;
        let word = |at: usize| bytes.get(at..).and_then(|b| b.first_chunk()).map_or(0, |b| u32::from_be_bytes(*b));
        let [first, second, multiplier, length, ..] = *bytes;
        let flags = second & 0x3f;
        let is_authenticated = flags & AUTHENTICATED != 0;
        let shortest = if is_authenticated { LEN + 2 } else { LEN };
        let length = usize::from(length);
        if first >> 5 != 1 || length < shortest || length > payload.len() || multiplier == 0 || flags & MULTIPOINT != 0
        {
            return Err(DropReason::BfdInvalid);
        }
        let packet = Self {
            diagnostic: Diagnostic(first & 0x1f),
            state: State::from_bits(second >> 6),
            poll: flags & POLL != 0,
            is_final: flags & FINAL != 0,
            demand: flags & DEMAND != 0,
            multiplier,
            my_discriminator: word(4),
            your_discriminator: word(8),
            desired_min_tx: word(12).into(),
            required_min_rx: word(16).into(),
        };
        let is_anonymous = packet.your_discriminator == 0 && matches!(packet.state, State::Init | State::Up);
        if packet.my_discriminator == 0 || is_anonymous {
            return Err(DropReason::BfdInvalid);
        }
        // No session uses authentication.
        if is_authenticated { Err(DropReason::BfdAuthentication) } else { Ok(packet) }
    }

    /// Returns the bytes of the packet. The bit C is clear, because the control thread sends and judges packets (RFC
    /// 5880 section 4.1). There is no echo function.
    pub(super) fn bytes(&self) -> [u8; LEN] {
        let mut out = [0; LEN];
        let flag = |set: bool, bit: u8| if set { bit } else { 0 };
        let flags = flag(self.poll, POLL) | flag(self.is_final, FINAL) | flag(self.demand, DEMAND);
        out[0] = 1 << 5 | self.diagnostic.0 & 0x1f;
        out[1] = (self.state as u8) << 6 | flags;
        out[2] = self.multiplier;
        out[3] = LEN as u8;
        out[4..8].copy_from_slice(&self.my_discriminator.to_be_bytes());
        out[8..12].copy_from_slice(&self.your_discriminator.to_be_bytes());
        out[12..16].copy_from_slice(&(self.desired_min_tx as u32).to_be_bytes());
        out[16..20].copy_from_slice(&(self.required_min_rx as u32).to_be_bytes());
        out
    }
}

/// Addresses and ports of the frames of a session.
#[derive(Clone, Copy, Debug)]
pub(super) struct Envelope {
    pub(super) macs: (MacAddr, MacAddr),
    pub(super) local: IpAddr,
    pub(super) remote: IpAddr,
    pub(super) ports: (u16, u16),
}

impl Envelope {
    /// Returns the frame with a packet; `None` if the addresses have different IP versions.
    pub(super) fn frame(&self, packet: &ControlPacket) -> Option<Vec<u8>> {
        let (src_port, dst_port) = self.ports;
        let mut datagram = [0; udp::HEADER_LEN + LEN];
        udp::Repr { src_port, dst_port, payload_len: LEN as u16 }.emit(&mut datagram).ok()?;
        datagram[udp::HEADER_LEN..].copy_from_slice(&packet.bytes());
        let payload_len = datagram.len() as u16;
        let mut out = vec![0; ethernet::HEADER_LEN + ipv6::HEADER_LEN + datagram.len()];
        let (src, dst) = self.macs;
        let (ethertype, header) = match self.local {
            IpAddr::V4(_) => (EtherType::IPV4, ipv4::HEADER_LEN),
            IpAddr::V6(_) => (EtherType::IPV6, ipv6::HEADER_LEN),
        };
        let at = ethernet::Repr { dst, src, ethertype }.emit(&mut out).ok()?;
        match (self.local, self.remote) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                checksum::udp4(src, dst, &mut datagram);
                ipv4::Repr {
                    src,
                    dst,
                    protocol: IpProtocol::UDP,
                    payload_len,
                    ttl: TTL,
                    traffic_class: TRAFFIC_CLASS,
                    ident: 0,
                    fragment_word: 0x4000,
                }
                .emit(out.get_mut(at..)?)
                .ok()?;
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                checksum::udp6(src, dst, &mut datagram);
                ipv6::Repr {
                    src,
                    dst,
                    next_header: IpProtocol::UDP,
                    payload_len,
                    hop_limit: TTL,
                    traffic_class: TRAFFIC_CLASS,
                    flow_label: 0,
                }
                .emit(out.get_mut(at..)?)
                .ok()?;
            }
            _ => return None,
        }
        let at = at + header;
        out.get_mut(at..at + datagram.len())?.copy_from_slice(&datagram);
        out.truncate(at + datagram.len());
        Some(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKET: ControlPacket = ControlPacket {
        diagnostic: Diagnostic(3),
        state: State::Init,
        poll: true,
        is_final: false,
        demand: false,
        multiplier: 5,
        my_discriminator: 0x0102_0304,
        your_discriminator: 0x0506_0708,
        desired_min_tx: 1_000_000,
        required_min_rx: 300_000,
    };

    #[test]
    fn packets_survive_writing_and_reading() {
        for (poll, is_final, demand) in [(true, false, false), (false, true, false), (false, false, true)] {
            for state in [State::AdminDown, State::Down, State::Init, State::Up] {
                let packet = ControlPacket { poll, is_final, demand, state, ..PACKET };
                assert_eq!(ControlPacket::parse(&packet.bytes()), Ok(packet));
            }
        }
    }

    #[test]
    fn malformed_packets_are_refused() {
        let good = PACKET.bytes();
        let with = |at: usize, value: u8| {
            let mut bytes = good;
            bytes[at] = value;
            ControlPacket::parse(&bytes)
        };
        let invalid = Err(DropReason::BfdInvalid);
        for version in (0..8u8).filter(|version| *version != 1) {
            assert_eq!(with(0, version << 5), invalid, "version {version}");
        }
        assert_eq!(with(1, good[1] | MULTIPOINT), invalid);
        assert_eq!(with(2, 0), invalid, "multiplier");
        assert_eq!(with(3, 23), invalid, "length");
        assert_eq!(with(3, 25), invalid, "longer than the datagram");
        assert_eq!(with(1, good[1] | AUTHENTICATED), invalid, "too short for authentication");
        for len in 0..LEN {
            assert_eq!(ControlPacket::parse(&good[..len]), invalid, "{len} bytes");
        }
        assert_eq!(ControlPacket::parse(&ControlPacket { my_discriminator: 0, ..PACKET }.bytes()), invalid);
        for (state, accepted) in
            [(State::AdminDown, true), (State::Down, true), (State::Init, false), (State::Up, false)]
        {
            let anonymous = ControlPacket { your_discriminator: 0, state, ..PACKET };
            assert_eq!(ControlPacket::parse(&anonymous.bytes()).is_ok(), accepted, "{state:?}");
        }
        let mut long = [0; 26];
        long[..LEN].copy_from_slice(&good);
        long[1] |= AUTHENTICATED;
        long[3] = 26;
        assert_eq!(ControlPacket::parse(&long), Err(DropReason::BfdAuthentication));
        long[1] &= !AUTHENTICATED;
        assert!(ControlPacket::parse(&long).is_ok(), "trailing bytes do not matter");
    }

    #[test]
    fn any_bytes_are_read_without_panic() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..100_000 {
            let len = random.usize(0..40);
            let mut bytes: Vec<u8> = (0..len).map(|_| random.u8(..)).collect();
            if let Some(first) = bytes.first_mut() {
                *first = *first & 0x1f | 1 << 5;
            }
            if let Ok(packet) = ControlPacket::parse(&bytes) {
                assert!(packet.my_discriminator != 0 && packet.multiplier != 0);
            }
        }
    }

    #[test]
    fn frames_have_valid_checksums() {
        for (local, remote) in [("10.9.0.1", "10.9.0.2"), ("fd00:9::1", "fd00:9::2")] {
            let envelope = Envelope {
                macs: (MacAddr([2, 0, 0, 0, 0, 1]), MacAddr([2, 0, 0, 0, 0, 2])),
                local: local.parse().unwrap(),
                remote: remote.parse().unwrap(),
                ports: (50_000, SINGLE_HOP_PORT),
            };
            let frame = envelope.frame(&PACKET).unwrap();
            let parsed = wirepath_wire::parse(&frame).unwrap();
            let layers = parsed.outer();
            let view = layers.udp(&frame).unwrap();
            assert_eq!((view.src_port(), view.dst_port(), view.payload().len()), (50_000, SINGLE_HOP_PORT, LEN));
            let end = layers.l4() + udp::HEADER_LEN + LEN;
            let datagram = &frame[layers.l4()..end];
            let (sum, ttl) = match (envelope.local, envelope.remote) {
                (IpAddr::V4(a), IpAddr::V4(b)) => (checksum::pseudo4(a, b, IpProtocol::UDP, 32), frame[22]),
                (IpAddr::V6(a), IpAddr::V6(b)) => (checksum::pseudo6(a, b, IpProtocol::UDP, 32), frame[21]),
                _ => unreachable!(),
            };
            assert!(sum.and(checksum::sum(datagram)).is_valid());
            assert_eq!((ttl, frame.len()), (TTL, end));
        }
        let mixed = Envelope {
            macs: (MacAddr::ZERO, MacAddr::ZERO),
            local: "10.9.0.1".parse().unwrap(),
            remote: "fd00::1".parse().unwrap(),
            ports: (1, 2),
        };
        assert_eq!(mixed.frame(&PACKET), None);
    }
}
