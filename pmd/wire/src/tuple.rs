//! Flow keys: addresses, protocol and ports in few words, ready to be hashed and compared.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::field::get;
use crate::ip::IpProtocol;
use crate::parse::{HeaderOffsets, L3Type, L4Type};

/// Addresses, protocol and ports of a flow.
///
/// Two words for IPv4, five for IPv6 ([`FiveTuple::words`]). Equal flows have equal words.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct FiveTuple {
    /// Ports (source in the high half), protocol, version, then the addresses in wire order.
    words: [u64; 5],
}

impl FiveTuple {
    /// Returns the tuple of an IP packet, or `None` without IP. Ports are 0 for other protocols and for later
    /// fragments.
    #[inline]
    pub fn of(frame: &[u8], layers: &HeaderOffsets) -> Option<FiveTuple> {
        let ports = match layers.l4_type() {
            L4Type::Tcp | L4Type::Udp => u32::from_be_bytes(*frame.get(layers.l4()..)?.first_chunk()?),
            _ => 0,
        };
        FiveTuple::with(frame, layers, ports, layers.protocol())
    }

    /// Returns the key that all packets of a flow and all fragments of a packet share. It is the whole tuple
    /// of unfragmented packets, and only the addresses of fragments (including the first).
    #[inline]
    pub fn common(frame: &[u8], layers: &HeaderOffsets) -> Option<FiveTuple> {
        // The fragments of an IPv6 packet may name different protocols (RFC 8200 section 4.5).
        if layers.is_fragment() {
            FiveTuple::with(frame, layers, 0, IpProtocol(0))
        } else {
            FiveTuple::of(frame, layers)
        }
    }

    #[inline(always)]
    fn with(frame: &[u8], layers: &HeaderOffsets, ports: u32, protocol: IpProtocol) -> Option<FiveTuple> {
        let mut words = [0; 5];
        let version = match layers.l3_type() {
            L3Type::Ipv4 => {
                words[1] = u64::from_be_bytes(get::<12, 8, 20>(layers.ipv4_header(frame)?));
                4
            }
            L3Type::Ipv6 => {
                let h = layers.ipv6_header(frame)?;
                words[1] = u64::from_be_bytes(get::<8, 8, 40>(h));
                words[2] = u64::from_be_bytes(get::<16, 8, 40>(h));
                words[3] = u64::from_be_bytes(get::<24, 8, 40>(h));
                words[4] = u64::from_be_bytes(get::<32, 8, 40>(h));
                6
            }
            _ => return None,
        };
        words[0] = u64::from(ports) << 32 | u64::from(protocol.0) << 8 | version;
        Some(FiveTuple { words })
    }

    /// Builds a tuple; `None` if the two addresses are of different IP versions.
    pub fn new(src: IpAddr, dst: IpAddr, protocol: IpProtocol, src_port: u16, dst_port: u16) -> Option<FiveTuple> {
        let mut words = [0; 5];
        let version = match (src, dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                words[1] = u64::from(src.to_bits()) << 32 | u64::from(dst.to_bits());
                4
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                let (src, dst) = (src.to_bits(), dst.to_bits());
                words[1..].copy_from_slice(&[(src >> 64) as u64, src as u64, (dst >> 64) as u64, dst as u64]);
                6
            }
            _ => return None,
        };
        let ports = u64::from(src_port) << 16 | u64::from(dst_port);
        words[0] = ports << 32 | u64::from(protocol.0) << 8 | version;
        Some(FiveTuple { words })
    }

    /// Returns the words that identify the tuple: 2 for IPv4, 5 for IPv6.
    #[inline]
    pub fn words(&self) -> &[u64] {
        if self.is_ipv4() { &self.words[..2] } else { &self.words }
    }

    /// True if the addresses are IPv4.
    #[inline]
    pub fn is_ipv4(&self) -> bool {
        self.words[0] & 0xff == 4
    }

    /// Source address.
    pub fn src(&self) -> IpAddr {
        if self.is_ipv4() {
            IpAddr::V4(Ipv4Addr::from_bits((self.words[1] >> 32) as u32))
        } else {
            IpAddr::V6(Ipv6Addr::from_bits(u128::from(self.words[1]) << 64 | u128::from(self.words[2])))
        }
    }

    /// Destination address.
    pub fn dst(&self) -> IpAddr {
        if self.is_ipv4() {
            IpAddr::V4(Ipv4Addr::from_bits(self.words[1] as u32))
        } else {
            IpAddr::V6(Ipv6Addr::from_bits(u128::from(self.words[3]) << 64 | u128::from(self.words[4])))
        }
    }

    /// Protocol.
    pub fn protocol(&self) -> IpProtocol {
        IpProtocol((self.words[0] >> 8) as u8)
    }

    /// Source port, 0 if there is none.
    pub fn src_port(&self) -> u16 {
        (self.words[0] >> 48) as u16
    }

    /// Destination port, 0 if there is none.
    pub fn dst_port(&self) -> u16 {
        (self.words[0] >> 32) as u16
    }
}

impl fmt::Debug for FiveTuple {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = self.protocol();
        write!(f, "{protocol} {} {} > {} {}", self.src(), self.src_port(), self.dst(), self.dst_port())
    }
}

/// Returns the entropy of a flow: a 32-bit hash that is equal for all its packets and for all fragments of a
/// packet.
///
/// It covers addresses, protocol and ports of IP packets, only the addresses of fragments, and Ethernet
/// addresses and EtherType of other frames. It selects a source port ([`source_port`]) or one of several
/// remotes. It is no defence against crafted collisions.
#[inline]
pub fn entropy(frame: &[u8], layers: &HeaderOffsets) -> u32 {
    match FiveTuple::common(frame, layers) {
        Some(tuple) if tuple.is_ipv4() => mix(mix(0, tuple.words[0]), tuple.words[1]),
        Some(tuple) => tuple.words.iter().fold(0, |h, w| mix(h, *w)),
        None => match frame.get(layers.l2()..).and_then(|f| f.first_chunk::<12>()) {
            Some(h) => {
                let a = u64::from_be_bytes(get::<0, 8, 12>(h));
                let b = u64::from(u32::from_be_bytes(get::<8, 4, 12>(h)));
                mix(mix(0, a), b << 16 | u64::from(layers.ethertype().0))
            }
            None => 0,
        },
    }
    .fold()
}

/// Multiply and fold: one 64 x 64 multiplication per word.
#[inline(always)]
fn mix(state: u64, word: u64) -> u64 {
    let product = u128::from(state ^ word ^ 0x9e37_79b9_7f4a_7c15) * 0xa076_1d64_78bd_642f;
    product as u64 ^ (product >> 64) as u64
}

trait Fold {
    fn fold(self) -> u32;
}

impl Fold for u64 {
    #[inline(always)]
    fn fold(self) -> u32 {
        (self ^ self >> 32) as u32
    }
}

/// Returns a source port for a tunnel's outer header, in 49152 to 65535 as RFC 7348 section 5 recommends.
#[inline]
pub fn source_port(entropy: u32) -> u16 {
    0xc000 | (entropy ^ entropy >> 16) as u16 & 0x3fff
}
