//! The receive hash of NICs in software: Toeplitz over addresses and ports.

use std::fmt;

use wirepath_flow::{HashFields, MAX_RSS_QUEUES, Rss};
use wirepath_packet::Packet;
use wirepath_wire::{HeaderOffsets, IpProtocol, L3Type, L4Type, Parser};

use super::Headers;

/// Key length in bytes.
pub const RSS_KEY_LEN: usize = 40;

/// Default key of ports: the key of Microsoft's "RSS hashing functions", which has published test vectors.
pub const DEFAULT_RSS_KEY: [u8; RSS_KEY_LEN] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca, 0x2b,
    0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac,
    0x01, 0xfa,
];

/// Longest input in bytes: two IPv6 addresses and two ports.
const LONGEST: usize = 36;

/// A prepared Toeplitz key: a table of the hash contribution of each nibble of the input.
#[derive(Clone)]
pub struct Toeplitz {
    table: Box<[[u32; 16]; LONGEST * 2]>,
}

impl Toeplitz {
    /// Prepares a key. The table takes 4.6 KB.
    pub fn new(key: &[u8; RSS_KEY_LEN]) -> Self {
        let bit = |at: usize| u32::from(key[at / 8] >> (7 - at % 8) & 1);
        // The 32 bits of the key that start at this bit.
        let window = |at: usize| (at..at + 32).fold(0, |word, at| word << 1 | bit(at));
        let mut table = Box::new([[0; 16]; LONGEST * 2]);
        for (half, adds) in table.iter_mut().enumerate() {
            for (value, add) in adds.iter_mut().enumerate() {
                let bits = (0..4).filter(|bit| value >> (3 - bit) & 1 == 1);
                *add = bits.fold(0, |sum, bit| sum ^ window(half * 4 + bit));
            }
        }
        Self { table }
    }

    /// Returns the hash of up to 36 bytes. Further bytes are ignored.
    #[inline]
    pub fn hash(&self, input: &[u8]) -> u32 {
        let halves = input.iter().flat_map(|byte| [byte >> 4, byte & 15]);
        self.table.iter().zip(halves).fold(0, |hash, (adds, half)| hash ^ adds[usize::from(half)])
    }
}

impl Default for Toeplitz {
    /// Uses [`DEFAULT_RSS_KEY`].
    fn default() -> Self {
        Self::new(&DEFAULT_RSS_KEY)
    }
}

impl fmt::Debug for Toeplitz {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Toeplitz").finish_non_exhaustive()
    }
}

/// An `rss` action.
#[derive(Debug)]
pub(super) struct RssAction {
    queues: Box<[u16]>,
    on: HashFields,
    key: Option<Toeplitz>,
}

impl RssAction {
    pub(super) fn new(rss: &Rss) -> Self {
        Self { queues: rss.queues[..].into(), on: rss.on, key: rss.key.as_ref().map(Toeplitz::new) }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        let key = self.key.as_ref().map_or(0, |key| size_of_val(&*key.table));
        size_of_val(self) + size_of_val(&*self.queues) + key
    }

    /// Stores the hash of the packet and returns its queue.
    pub(super) fn run(&self, packet: &mut Packet, headers: &Headers, port: &Toeplitz) -> u16 {
        let inner = self.on.0 & HashFields::INNER != 0;
        let again;
        let layers = match (inner, &headers.outer, &headers.inner) {
            (true, _, inner) => inner.as_ref(),
            (false, Some(outer), _) => Some(outer),
            (false, None, _) => {
                let parser = Parser { verify_ipv4: false, ..Parser::default() };
                again = parser.parse_stack(packet.data(), 0, packet.len()).ok();
                again.as_ref()
            }
        };
        let mut input = Input { bytes: [0; LONGEST], len: 0 };
        if layers.is_none_or(|layers| input.fill(packet.data(), layers, self.on).is_none()) || input.len == 0 {
            return self.queue(0);
        }
        let hash = self.key.as_ref().unwrap_or(port).hash(&input.bytes[..input.len]);
        packet.set_rss_hash(hash);
        self.queue(hash)
    }

    fn queue(&self, hash: u32) -> u16 {
        let index = hash as usize % MAX_RSS_QUEUES % self.queues.len().max(1);
        self.queues.get(index).copied().unwrap_or(0)
    }
}

/// The bytes to hash.
struct Input {
    bytes: [u8; LONGEST],
    len: usize,
}

impl Input {
    fn fill(&mut self, frame: &[u8], layers: &HeaderOffsets, on: HashFields) -> Option<()> {
        let has = |bit| on.0 & bit != 0;
        let (src, dst) = match layers.l3_type() {
            L3Type::Ipv4 => layers.ipv4_header(frame)?[12..].split_at(4),
            L3Type::Ipv6 => layers.ipv6_header(frame)?[8..].split_at(16),
            _ => return None,
        };
        if has(HashFields::SRC) {
            self.add(src);
        }
        if has(HashFields::DST) {
            self.add(dst);
        }
        // All fragments must have the same hash, and later fragments have no ports.
        if layers.is_fragment() {
            return Some(());
        }
        let l4: &[u8; 4] = match (layers.l4_type(), layers.protocol()) {
            (L4Type::Tcp | L4Type::Udp, _) | (_, IpProtocol::ESP) => frame.get(layers.l4()..)?.first_chunk()?,
            _ => return Some(()),
        };
        if layers.protocol() == IpProtocol::ESP {
            if has(HashFields::SPI) {
                self.add(l4);
            }
            return Some(());
        }
        if has(HashFields::SRC_PORT) {
            self.add(&l4[..2]);
        }
        if has(HashFields::DST_PORT) {
            self.add(&l4[2..]);
        }
        Some(())
    }

    fn add(&mut self, bytes: &[u8]) {
        if let Some(room) = self.bytes.get_mut(self.len..self.len + bytes.len()) {
            room.copy_from_slice(bytes);
            self.len += bytes.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::IpAddr;

    /// Computes the hash bit by bit, as in the specification.
    fn naive(key: &[u8], input: &[u8]) -> u32 {
        let bit = |bytes: &[u8], at: usize| bytes[at / 8] >> (7 - at % 8) & 1;
        let mut hash = 0;
        for at in (0..input.len() * 8).filter(|&at| bit(input, at) == 1) {
            hash ^= (0..32).fold(0, |word, k| word << 1 | u32::from(bit(key, at + k)));
        }
        hash
    }

    #[test]
    fn published_vectors() {
        // Microsoft, "Verifying the RSS hash calculation": destination, source, hash of addresses, hash with
        // TCP ports.
        let vectors = [
            ("161.142.100.80", 1766, "66.9.149.187", 2794, 0x323e8fc2u32, 0x51ccc178u32),
            ("65.69.140.83", 4739, "199.92.111.2", 14230, 0xd718262a, 0xc626b0ea),
            ("12.22.207.184", 38024, "24.19.198.95", 12898, 0xd2d0a5de, 0x5c2b394a),
            ("209.142.163.6", 2217, "38.27.205.30", 48228, 0x82989176, 0xafc7327f),
            ("202.188.127.2", 1303, "153.39.163.191", 44251, 0x5d1809c5, 0x10e828a2),
            ("3ffe:2501:200:3::1", 1766, "3ffe:2501:200:1fff::7", 2794, 0x2cc18cd5, 0x40207d3d),
            ("ff02::1", 4739, "3ffe:501:8::260:97ff:fe40:efab", 14230, 0x0f0c461c, 0xdde51bbf),
            ("fe80::200:f8ff:fe21:67cf", 38024, "3ffe:1900:4545:3:200:f8ff:fe21:67cf", 44251, 0x4b61e985, 0x02d1feef),
        ];
        let toeplitz = Toeplitz::default();
        let bytes = |address: &str| match address.parse::<IpAddr>().unwrap() {
            IpAddr::V4(it) => it.octets().to_vec(),
            IpAddr::V6(it) => it.octets().to_vec(),
        };
        for (dst, dst_port, src, src_port, addresses, all) in vectors {
            let mut input = [bytes(src), bytes(dst)].concat();
            assert_eq!(toeplitz.hash(&input), addresses, "{src} {dst}");
            input.extend(u16::to_be_bytes(src_port));
            input.extend(u16::to_be_bytes(dst_port));
            assert_eq!(toeplitz.hash(&input), all, "{src} {dst}");
        }
    }

    #[test]
    fn toeplitz_hash_agrees_with_its_definition() {
        let mut rng = fastrand::Rng::with_seed(1);
        for len in 0..=LONGEST {
            let key: [u8; RSS_KEY_LEN] = std::array::from_fn(|_| rng.u8(..));
            let input: Vec<u8> = (0..len).map(|_| rng.u8(..)).collect();
            assert_eq!(Toeplitz::new(&key).hash(&input), naive(&key, &input), "{len}");
        }
    }
}
