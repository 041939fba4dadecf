//! Header offsets, checksums and hashes of a frame, as a NIC computes them.
//!
//! This code is independent of the parser of `wirepath-wire` on purpose: an oracle must not share the
//! mistakes of the code that it checks.

use crate::slots::CachePadded;

/// Length of the Ethernet header in bytes.
pub const ETHERNET: usize = 14;
/// IP protocol number of TCP.
pub const TCP: u8 = 6;
/// IP protocol number of UDP.
pub const UDP: u8 = 17;

const VLAN: u16 = 0x8100;
const QINQ: u16 = 0x88a8;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const FRAGMENT_HEADER: u8 = 44;

/// IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// Header offsets of a frame. All offsets are inside the frame, and the headers are complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderOffsets {
    /// Tag control information of an outermost VLAN tag.
    pub vlan: Option<u16>,
    /// IP version, if there is an IP header.
    pub network: Option<Network>,
    /// Offset of the IP header.
    pub l3: usize,
    /// Transport protocol; 0 for fragments, truncated headers and protocols other than TCP and UDP.
    pub protocol: u8,
    /// Offset of the transport header.
    pub l4: usize,
    /// End of the IP packet. Padding of the frame is behind it.
    pub end: usize,
}

/// A pattern that frames with equal header offsets have in common. It covers the length and selected bits of
/// the first bytes. Only IPv4 packets without options and without VLAN tags have one.
#[derive(Clone, Copy, Debug)]
pub struct FramePattern {
    length: usize,
    /// Mask and value of each 8-byte word.
    words: [(u64, u64); Self::BYTES / 8],
}

impl FramePattern {
    /// Number of bytes covered: Ethernet, an IPv4 header without options, and a TCP header up to its flags.
    pub const BYTES: usize = 48;
    /// Offsets of the bytes that decide where headers are: EtherType, header length, total length, fragment,
    /// protocol.
    const LAYOUT_BYTES: [usize; 8] = [12, 13, 14, 16, 17, 20, 21, 23];

    /// Returns the pattern of a frame. It matches the frames that also have the same values in the bits
    /// selected by `bits`. Returns `None` for frames other than untagged IPv4 without options.
    pub fn from_frame(frame: &[u8], mut bits: [u8; Self::BYTES]) -> Option<Self> {
        let start: &[u8; Self::BYTES] = frame.first_chunk()?;
        if start[12..15] != [8, 0, 0x45] {
            return None;
        }
        Self::LAYOUT_BYTES.iter().for_each(|at| bits[*at] = 0xff);
        let (masks, words) = (bits.as_chunks::<8>().0, start.as_chunks::<8>().0);
        let word = |i: usize| (u64::from_ne_bytes(masks[i]), u64::from_ne_bytes(words[i]));
        Some(Self { length: frame.len(), words: std::array::from_fn(word).map(|(mask, word)| (mask, mask & word)) })
    }

    /// Returns true if a frame matches the pattern.
    #[inline]
    pub fn matches(&self, frame: &[u8]) -> bool {
        let Some(start) = frame.first_chunk::<{ Self::BYTES }>() else { return false };
        let words = start.as_chunks::<8>().0.iter().zip(&self.words);
        let differ = words.fold(0, |all, (word, (mask, value))| all | (u64::from_ne_bytes(*word) & mask) ^ value);
        differ == 0 && frame.len() == self.length
    }

    /// Returns the number of frames that match the pattern, up to the first that does not.
    #[inline]
    pub fn matching_prefix(&self, frames: &[&[u8]]) -> usize {
        frames.iter().take_while(|frame| self.matches(frame)).count()
    }
}

/// Checksum results of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChecksumResults {
    /// Result of [`HeaderOffsets::ip_checksum_ok`].
    pub ip: Option<bool>,
    /// Result of [`HeaderOffsets::transport_checksum_ok`].
    pub transport: Option<bool>,
    /// Ones' complement sum of the IP packet, or of everything behind the Ethernet header if there is no IP
    /// header.
    pub sum: u16,
}

fn be16(frame: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(frame.get(at..at + 2)?.try_into().ok()?))
}

/// Parses a frame. Parsing ends at the first header that is unknown or incomplete.
#[inline]
pub fn parse(frame: &[u8]) -> HeaderOffsets {
    let mut layers = HeaderOffsets { vlan: None, network: None, l3: 0, protocol: 0, l4: 0, end: frame.len() };
    let mut at = 12;
    let mut tags = 0;
    let kind = loop {
        match be16(frame, at) {
            Some(VLAN | QINQ) if tags < 2 => {
                if tags == 0 && be16(frame, at) == Some(VLAN) {
                    layers.vlan = be16(frame, at + 2);
                }
                tags += 1;
                at += 4;
            }
            Some(kind) => break kind,
            None => return layers,
        }
    };
    layers.l3 = at + 2;
    match kind {
        IPV4 => ipv4(frame, &mut layers),
        IPV6 => ipv6(frame, &mut layers),
        _ => {}
    }
    layers
}

/// Parses the IP header at `l3` and the header behind it.
pub fn parse_ip(frame: &[u8], l3: usize) -> HeaderOffsets {
    let mut layers = HeaderOffsets { vlan: None, network: None, l3, protocol: 0, l4: 0, end: frame.len() };
    match frame.get(l3).map(|byte| byte >> 4) {
        Some(4) => ipv4(frame, &mut layers),
        Some(6) => ipv6(frame, &mut layers),
        _ => {}
    }
    layers
}

fn ipv4(frame: &[u8], layers: &mut HeaderOffsets) {
    let l3 = layers.l3;
    let Some(header) = frame.get(l3..l3 + 20) else { return };
    let length = usize::from(header[0] & 0xf) * 4;
    let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
    if header[0] >> 4 != 4 || length < 20 || total < length || l3 + total > frame.len() {
        return;
    }
    layers.network = Some(Network::V4);
    layers.l4 = l3 + length;
    layers.end = l3 + total;
    let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0;
    if !fragment {
        transport(header[9], layers);
    }
}

fn ipv6(frame: &[u8], layers: &mut HeaderOffsets) {
    let l3 = layers.l3;
    let Some(header) = frame.get(l3..l3 + 40) else { return };
    let payload = usize::from(u16::from_be_bytes([header[4], header[5]]));
    if header[0] >> 4 != 6 || l3 + 40 + payload > frame.len() {
        return;
    }
    layers.network = Some(Network::V6);
    layers.l4 = l3 + 40;
    layers.end = l3 + 40 + payload;
    let mut next = header[6];
    // Hop-by-hop, routing and destination options: the first two bytes are the next header and the length.
    while [0, 43, 60].contains(&next) {
        let Some(extension) = frame.get(layers.l4..layers.l4 + 8) else { return };
        next = extension[0];
        layers.l4 += 8 + 8 * usize::from(extension[1]);
        if layers.l4 > layers.end {
            return;
        }
    }
    if next != FRAGMENT_HEADER {
        transport(next, layers);
    }
}

fn transport(protocol: u8, layers: &mut HeaderOffsets) {
    let least = match protocol {
        TCP => 20,
        UDP => 8,
        _ => return,
    };
    if layers.l4 + least <= layers.end {
        layers.protocol = protocol;
    }
}

/// Returns the frame in up to two pieces. With `untagged` the outermost VLAN tag is left out.
#[inline]
pub fn split_vlan(frame: &[u8], untagged: bool) -> [&[u8]; 2] {
    if untagged { [&frame[..12], &frame[16..]] } else { [frame, &[]] }
}

/// Returns the ones' complement sum of 16-bit words (RFC 1071), folded into 16 bits. An odd last byte counts
/// as the upper half of a word. The sum is 0 only if all bytes are 0.
#[inline]
pub fn sum(bytes: &[u8]) -> u64 {
    u64::from(folded(words(bytes)))
}

/// Returns the ones' complement sum of 64-bit words in memory order, not folded.
///
/// RFC 1071, section 2(B): the sum may be computed with the bytes of all words swapped if the result is
/// swapped back. Words of any size are possible, because the carry out of a word is added at its other end.
#[inline]
fn words(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let sum = words.iter().fold(0, |sum, word| add_with_carry(sum, u64::from_le_bytes(*word)));
    if rest.is_empty() {
        return sum;
    }
    let last = match bytes.last_chunk::<8>() {
        // The shift removes the bytes of the last word that were already added.
        Some(last) => u64::from_le_bytes(*last) >> (64 - 8 * rest.len()),
        None => rest.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)),
    };
    add_with_carry(sum, last)
}

/// Returns the sum of an IP header as [`words`] does. A header of 20 bytes, the usual length, is summed
/// without a loop.
#[inline]
fn header_words(header: &[u8]) -> u64 {
    <&[u8; 20]>::try_from(header).map_or_else(|_| words(header), |plain| words(plain))
}

/// Adds two sums of [`words`] with end-around carry.
#[inline]
fn add_with_carry(one: u64, other: u64) -> u64 {
    let (sum, carry) = one.overflowing_add(other);
    sum + u64::from(carry)
}

/// Folds a sum of [`words`] into 16 bits in network order.
#[inline]
fn folded(words: u64) -> u16 {
    fold(words).swap_bytes()
}

/// Folds a sum into 16 bits.
#[inline]
pub fn fold(sum: u64) -> u16 {
    // The sum is added to itself with exchanged halves. The upper half is then the sum of both halves with
    // the carry of the lower one.
    let sum = (sum.wrapping_add(sum.rotate_left(32)) >> 32) as u32;
    (sum.wrapping_add(sum.rotate_left(16)) >> 16) as u16
}

/// Writes the transport checksum, as hardware does if the sender requests the offload.
pub fn complete(frame: &mut [u8], layers: &HeaderOffsets) {
    let Some(at) = layers.checksum_at() else { return };
    frame[at..at + 2].fill(0);
    let sum = layers.pseudo_header(frame, layers.end - layers.l4) + sum(&frame[layers.l4..layers.end]);
    let checksum = match !fold(sum) {
        // A zero checksum means that there is none (RFC 768).
        0 => 0xffff,
        checksum => checksum,
    };
    frame[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
}

impl HeaderOffsets {
    /// Returns the sum of the pseudo header for `length` bytes of transport header and payload.
    pub fn pseudo_header(&self, frame: &[u8], length: usize) -> u64 {
        let addresses = match self.network {
            Some(Network::V4) => &frame[self.l3 + 12..self.l3 + 20],
            Some(Network::V6) => &frame[self.l3 + 8..self.l3 + 40],
            None => &[],
        };
        sum(addresses) + length as u64 + u64::from(self.protocol)
    }

    /// Returns the offset of the TCP or UDP checksum field in the frame.
    pub fn checksum_at(&self) -> Option<usize> {
        match self.protocol {
            TCP => Some(self.l4 + 16),
            UDP => Some(self.l4 + 6),
            _ => None,
        }
    }

    /// Returns true if the IPv4 header checksum is correct; `None` if the packet is not IPv4.
    pub fn ip_checksum_ok(&self, frame: &[u8]) -> Option<bool> {
        (self.network == Some(Network::V4)).then(|| {
            let header = &frame[self.l3..self.l4];
            fold(header_words(header)) == 0xffff
        })
    }

    /// Returns true if the TCP or UDP checksum is correct; `None` if there is no checksum.
    pub fn transport_checksum_ok(&self, frame: &[u8]) -> Option<bool> {
        self.transport_ok(frame, None)
    }

    /// Returns the same result. `payload` is the [`words`] sum of everything behind the IP header, if it is
    /// known.
    #[inline]
    fn transport_ok(&self, frame: &[u8], payload: Option<u64>) -> Option<bool> {
        let at = self.checksum_at()?;
        let mut end = self.end;
        if self.protocol == UDP {
            if frame[at..at + 2] == [0, 0] {
                return None;
            }
            end = self.l4 + usize::from(be16(frame, self.l4 + 4)?);
            if end < self.l4 + 8 || end > self.end {
                return Some(false);
            }
        }
        let payload = payload.filter(|_| end == self.end).unwrap_or_else(|| words(&frame[self.l4..end]));
        Some(fold(self.pseudo_header(frame, end - self.l4) + u64::from(folded(payload))) == 0xffff)
    }

    /// Returns all checksum results. Every byte except the addresses of the pseudo header is summed only
    /// once.
    #[inline]
    pub fn checksums(&self, frame: &[u8]) -> ChecksumResults {
        if self.network.is_none() {
            let sum = folded(words(frame.get(ETHERNET..).unwrap_or_default()));
            return ChecksumResults { ip: None, transport: None, sum };
        }
        // Headers have an even length, so the sum of the following bytes can be added. IPv6 extension lengths
        // may lead behind the end.
        let l4 = self.l4.min(self.end);
        let (header, payload) = (header_words(&frame[self.l3..l4]), words(&frame[l4..self.end]));
        ChecksumResults {
            ip: (self.network == Some(Network::V4)).then(|| fold(header) == 0xffff),
            transport: self.transport_ok(frame, Some(payload)),
            sum: folded(add_with_carry(header, payload)),
        }
    }

    /// Returns source and destination address as RSS hashes them; empty if there is no IP header.
    pub fn addresses<'f>(&self, frame: &'f [u8]) -> &'f [u8] {
        match self.network {
            Some(Network::V4) => &frame[self.l3 + 12..self.l3 + 20],
            Some(Network::V6) => &frame[self.l3 + 8..self.l3 + 40],
            None => &[],
        }
    }

    /// Returns addresses and ports as RSS hashes them, if they are contiguous: in IPv4 without options.
    #[inline]
    pub fn tuple<'f>(&self, frame: &'f [u8]) -> Option<&'f [u8; 12]> {
        frame.get(self.tuple_at()?..)?.first_chunk()
    }

    /// Returns the offset of [`Self::tuple`] in the frame.
    #[inline]
    pub fn tuple_at(&self) -> Option<usize> {
        (self.network == Some(Network::V4) && self.l4 == self.l3 + 20).then_some(self.l3 + 12)
    }
}

/// The Toeplitz hash with an expanded key: a table of the contribution of each byte value at each position.
#[derive(Clone)]
pub struct Toeplitz {
    table: Box<CachePadded<[[u32; 256]; MAX_HASH_INPUT]>>,
    /// The IPv4 addresses hashed last, and their contribution.
    last: ([u8; 8], u32),
}

impl std::fmt::Debug for Toeplitz {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Toeplitz").finish_non_exhaustive()
    }
}

/// Maximum input length: two IPv6 addresses and two ports.
const MAX_HASH_INPUT: usize = 36;

impl Toeplitz {
    /// Expands a key of 40 bytes.
    pub fn new(key: &[u8; 40]) -> Self {
        let window = |bit: usize| -> u32 {
            (0..32).fold(0, |word, i| {
                let at = bit + i;
                word << 1 | u32::from(key[at / 8] >> (7 - at % 8) & 1)
            })
        };
        let mut table = Box::new(CachePadded([[0u32; 256]; MAX_HASH_INPUT]));
        for (position, row) in table.0.iter_mut().enumerate() {
            let windows: [u32; 8] = std::array::from_fn(|bit| window(position * 8 + bit));
            for (value, entry) in row.iter_mut().enumerate() {
                *entry = (0..8).filter(|bit| value >> (7 - bit) & 1 == 1).fold(0, |hash, bit| hash ^ windows[bit]);
            }
        }
        Self { table, last: Default::default() }
    }

    /// Returns the hash of IPv4 addresses and ports. Consecutive packets often have the same addresses, so
    /// their contribution is cached.
    #[inline]
    pub fn hash_tuple(&mut self, tuple: &[u8; 12]) -> u32 {
        let (addresses, ports) = tuple.split_at(8);
        if self.last.0 != addresses {
            self.last = (addresses.try_into().expect("two of four bytes"), self.hash([addresses]));
        }
        let rows = self.table.0[8..].iter();
        ports.iter().zip(rows).fold(self.last.1, |hash, (byte, row)| hash ^ row[usize::from(*byte)])
    }

    /// Returns the hash of the concatenated parts, at most 36 bytes together.
    #[inline]
    pub fn hash<const PARTS: usize>(&self, parts: [&[u8]; PARTS]) -> u32 {
        let (mut hash, mut rows) = (0, &self.table.0[..]);
        for part in parts {
            // Processes 4 bytes at a time: an address is one or more words, and the two ports are one.
            let (words, rest) = part.as_chunks::<4>();
            for word in words {
                let Some((these, others)) = rows.split_first_chunk::<4>() else { return hash };
                rows = others;
                let terms = [0, 1, 2, 3].map(|i| these[i][usize::from(word[i])]);
                hash ^= (terms[0] ^ terms[1]) ^ (terms[2] ^ terms[3]);
            }
            for (byte, row) in rest.iter().zip(rows) {
                hash ^= row[usize::from(*byte)];
            }
            rows = rows.get(rest.len()..).unwrap_or_default();
        }
        hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Key and vectors of Microsoft's "Verifying the RSS Hash Calculation".
    const KEY: [u8; 40] = [
        0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca,
        0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b,
        0xbe, 0xac, 0x01, 0xfa,
    ];

    #[test]
    fn toeplitz_gives_the_published_hashes() {
        let hash = Toeplitz::new(&KEY);
        let addresses = [66, 9, 149, 187, 161, 142, 100, 80];
        let ports = [0x0a, 0xea, 0x06, 0xe6]; // 2794 to 1766
        assert_eq!(hash.hash([&addresses]), 0x323e_8fc2);
        assert_eq!(hash.hash([&addresses, &ports]), 0x51cc_c178);
        let mut hash = hash;
        let tuple = *[&addresses[..], &ports].concat().first_chunk().unwrap();
        // The cache is empty at first, then holds the same addresses, then others.
        assert_eq!([hash.hash_tuple(&tuple), hash.hash_tuple(&tuple)], [0x51cc_c178; 2]);
        assert_eq!((hash.hash_tuple(&[0; 12]), hash.hash_tuple(&tuple)), (0, 0x51cc_c178));
        let v6: Vec<u8> = [
            "3ffe:2501:200:1fff::7".parse::<std::net::Ipv6Addr>().unwrap().octets(),
            "3ffe:2501:200:3::1".parse::<std::net::Ipv6Addr>().unwrap().octets(),
        ]
        .concat();
        assert_eq!(hash.hash([&v6]), 0x2cc1_8cd5);
        assert_eq!(hash.hash([&v6, &[0x0a, 0xea, 0x06, 0xe6]]), 0x4020_7d3d);
    }

    #[test]
    fn sums_are_those_of_sixteen_bit_words() {
        let mut bytes = [0u8; 80];
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = (i * i * 37 + 11) as u8;
        }
        for start in 0..9 {
            for end in start..bytes.len() {
                let part = &bytes[start..end];
                let words = part.chunks(2).map(|pair| u64::from(pair[0]) << 8 | u64::from(*pair.get(1).unwrap_or(&0)));
                assert_eq!(fold(sum(part)), fold(words.sum()), "{part:?}");
            }
        }
        assert_eq!((sum(&[0; 40]), sum(&[0xff; 40])), (0, 0xffff));
    }

    #[test]
    fn combined_checksums_equal_single_ones() {
        let mut random = fastrand::Rng::with_seed(1);
        let mut seen = std::collections::HashSet::new();
        for round in 0..20_000usize {
            let mut next = || random.usize(..);
            let mut frame = vec![0u8; 14 + next() % 120];
            frame.iter_mut().for_each(|byte| *byte = next() as u8);
            frame[12..14].copy_from_slice(&[[8, 0], [0x86, 0xdd], [0x81, 0], [9, 9]][next() % 4]);
            let l3 = 14;
            let rest = frame.len() - l3;
            if let Some(first) = frame.get_mut(l3) {
                *first = [0x45, 0x46, 0x60, 0x60][next() % 4];
            }
            if rest >= 44 {
                let (length, end) = (rest - next() % 4, next() % 8);
                frame[l3 + 6..l3 + 8].fill(0);
                if frame[l3] == 0x60 {
                    frame[l3 + 4..l3 + 6].copy_from_slice(&((length - 40) as u16).to_be_bytes());
                    frame[l3 + 6] = [UDP, TCP, 0, 60][next() % 4];
                } else {
                    frame[l3 + 2..l3 + 4].copy_from_slice(&(length as u16).to_be_bytes());
                    frame[l3 + 9] = [UDP, TCP][next() % 2];
                    if next() % 2 == 0 {
                        frame[l3 + 10..l3 + 12].fill(0);
                        let header = l3..l3 + usize::from(frame[l3] & 15) * 4;
                        let checksum = !fold(sum(&frame[header]));
                        frame[l3 + 10..l3 + 12].copy_from_slice(&checksum.to_be_bytes());
                    }
                }
                let layers = parse(&frame);
                if layers.protocol == UDP {
                    let length = (layers.end - layers.l4 - end / 4) as u16;
                    frame[layers.l4 + 4..layers.l4 + 6].copy_from_slice(&length.to_be_bytes());
                }
                match next() % 3 {
                    0 => complete(&mut frame, &layers),
                    1 => {
                        if let Some(at) = layers.checksum_at() {
                            frame[at..at + 2].fill(0);
                        }
                    }
                    _ => {}
                }
            }
            let layers = parse(&frame);
            let checks = layers.checksums(&frame);
            let summed = if layers.network.is_some() { layers.l3..layers.end } else { ETHERNET..frame.len() };
            let (ip, transport) = (layers.ip_checksum_ok(&frame), layers.transport_checksum_ok(&frame));
            assert_eq!(
                checks,
                ChecksumResults { ip, transport, sum: fold(sum(&frame[summed])) },
                "{round}: {frame:02x?}"
            );
            seen.insert((ip, transport, layers.network.is_some()));
        }
        assert!(seen.len() >= 9, "{seen:?}");
    }

    #[test]
    fn truncated_headers_are_not_parsed() {
        let mut frame = vec![0u8; 64];
        frame[12..14].copy_from_slice(&IPV4.to_be_bytes());
        frame[14] = 0x45;
        frame[17] = 40;
        frame[23] = TCP;
        assert_eq!((parse(&frame).protocol, parse(&frame).l4, parse(&frame).end), (TCP, 34, 54));
        for length in 0..54 {
            assert_eq!(parse(&frame[..length]).network, None, "{length} bytes");
        }
        frame[20] = 0x20; // more fragments
        assert_eq!((parse(&frame).network, parse(&frame).protocol), (Some(Network::V4), 0));
    }
}
