//! Reassembly of IP fragments (RFC 791 section 3.2, RFC 8200 section 4.5) within bounds of memory and time.
//!
//! Everybody can send fragments. So a [`Reassembler`] holds at most [`MAX_BYTES`] and [`MAX_PACKETS`], and of one
//! source only a quarter. A new packet evicts the oldest one. Overlapping fragments discard the whole packet (RFC
//! 5722). The data is copied, so fragments hold no buffers of ports.

#![deny(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use wirepath_wire::{HeaderOffsets, IpProtocol, L3Type, checksum, ipv4, ipv6};

use crate::drops::DropReason;
use crate::superframe::parts_from;
use crate::{Packet, Pool};

/// Nanoseconds after its first fragment in which a packet has to be complete. RFC 8200 allows 60 s. Fragments of one
/// packet arrive together, and IPv4 uses each identification again soon (RFC 4963).
pub const LIFETIME: u64 = 5_000_000_000;
/// Maximum number of bytes that wait, with 64 bytes for each fragment.
pub const MAX_BYTES: usize = 4 << 20;
/// Maximum number of packets that wait.
pub const MAX_PACKETS: usize = 256;
/// Maximum share of one source: a quarter.
const SOURCE_SHARE: usize = 4;
/// Memory of a fragment beside its data.
const PART_COST: usize = 64;
/// Maximum number of fragments of one packet.
const MAX_PARTS: usize = 128;
/// Least number of data bytes of all fragments over IPv6 but the last one. Only senders divide, and the least MTU is
/// 1280 bytes. Over IPv4, a router may divide a fragment again, and its small last part is not that of the packet.
const LEAST_PART: usize = 256;
/// Maximum number of data bytes of a packet, so that its IPv4 header of 20 bytes fits too.
const MAX_DATA: usize = 65_515;
/// Length of the Fragment header of IPv6.
const FRAGMENT_HEADER: usize = 8;

/// Identity of a packet, which all its fragments have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    src: IpAddr,
    dst: IpAddr,
    /// Protocol over IPv4; 0 over IPv6, whose fragments have it only in the first one (RFC 8200 section 4.5).
    protocol: u8,
    id: u32,
}

/// A received fragment.
struct Fragment {
    key: Key,
    offset: usize,
    more: bool,
    /// Start and length of its data in the packet.
    start: usize,
    len: usize,
    ecn: u8,
}

/// Headers of a packet, from its first fragment.
#[derive(Debug)]
struct Head {
    bytes: Box<[u8]>,
    /// Offset of the IP header.
    l3: usize,
}

/// A packet of which fragments are missing.
#[derive(Debug)]
struct Partial {
    /// Position in the order of arrival.
    number: u64,
    deadline: u64,
    /// Data by offset; the parts do not overlap.
    parts: BTreeMap<usize, Box<[u8]>>,
    /// Length of all data, once the last fragment is there.
    total: Option<usize>,
    /// Sum of the lengths of the parts.
    len: usize,
    /// Headers of the first fragment, without the Fragment header of IPv6.
    head: Option<Head>,
    /// One bit for each ECN codepoint of its fragments.
    ecn: u8,
    /// Reason why further fragments are dropped too, such as an overlap. The entry remains for them.
    discarded: Option<DropReason>,
}

impl Partial {
    fn cost(&self) -> usize {
        self.len + self.parts.len() * PART_COST
    }
}

/// Result of a fragment.
#[derive(Debug)]
pub enum Reassembled {
    /// The data was copied, and more is missing. The caller frees the fragment.
    Held,
    /// The packet is complete. It has no metadata but the input port of its last fragment.
    Whole(Packet),
    /// The fragment is to be dropped.
    Refused(DropReason),
}

/// Fragments of one worker that wait for others.
#[derive(Debug, Default)]
pub struct Reassembler {
    packets: HashMap<Key, Partial>,
    /// Keys in the order of arrival.
    order: BTreeMap<u64, Key>,
    /// Bytes and packets of each source.
    sources: HashMap<IpAddr, (usize, usize)>,
    bytes: usize,
    next: u64,
    /// Fragments that were held and are lost, by reason.
    lost: Vec<(DropReason, usize)>,
}

impl Reassembler {
    /// Creates a reassembler that holds nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// Bytes that wait, with the cost of each fragment.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of packets that wait, with those that were discarded and whose further fragments are dropped.
    pub fn len(&self) -> usize {
        self.packets.len()
    }

    /// Returns the numbers of fragments that were held and are lost since the last call.
    pub fn take_lost(&mut self) -> Vec<(DropReason, usize)> {
        std::mem::take(&mut self.lost)
    }

    /// Gives up packets whose time is over. `now` is in nanoseconds.
    pub fn expire(&mut self, now: u64) {
        while let Some((_, key)) = self.order.first_key_value() {
            let key = *key;
            if self.packets.get(&key).is_some_and(|partial| partial.deadline > now) {
                break;
            }
            self.remove(key, DropReason::FragmentTimeout);
        }
    }

    /// Takes a fragment whose headers are at `layers` in its first buffer. A complete packet is in buffers of `pool`.
    pub fn insert(&mut self, packet: &Packet, layers: &HeaderOffsets, now: u64, pool: &Pool) -> Reassembled {
        self.expire(now);
        let Some(fragment) = read(packet, layers) else { return Reassembled::Refused(DropReason::BadFragment) };
        let key = fragment.key;
        if !self.packets.contains_key(&key) {
            self.begin(key, now);
        }
        self.make_room(key, fragment.len + PART_COST);
        match self.add(packet, layers, &fragment) {
            Ok(true) => {
                match self.packets.get(&key).ok_or(DropReason::BadFragment).and_then(|it| build(it, &key, pool)) {
                    Ok(mut whole) => {
                        whole.set_in_port(packet.in_port());
                        self.forget(key);
                        Reassembled::Whole(whole)
                    }
                    Err(reason) => {
                        // No further fragment comes. This one is counted by the caller.
                        let parts = self.forget(key);
                        self.lose(reason, parts.saturating_sub(1));
                        Reassembled::Refused(reason)
                    }
                }
            }
            Ok(false) => Reassembled::Held,
            Err(reason) => {
                if matches!(reason, DropReason::FragmentOverlap | DropReason::FragmentLimit) {
                    self.discard(key, reason);
                }
                Reassembled::Refused(reason)
            }
        }
    }

    /// Adds the entry of a new packet, and evicts others if there are too many.
    fn begin(&mut self, key: Key, now: u64) {
        if self.sources.get(&key.src).is_some_and(|(_, packets)| *packets >= MAX_PACKETS / SOURCE_SHARE) {
            self.evict(key, true);
        }
        if self.packets.len() >= MAX_PACKETS {
            self.evict(key, false);
        }
        let number = self.next;
        self.next += 1;
        let partial = Partial {
            number,
            deadline: now.saturating_add(LIFETIME),
            parts: BTreeMap::new(),
            total: None,
            len: 0,
            head: None,
            ecn: 0,
            discarded: None,
        };
        self.packets.insert(key, partial);
        self.order.insert(number, key);
        self.sources.entry(key.src).or_default().1 += 1;
    }

    /// Evicts packets until there is room for more bytes of the packet `key`.
    fn make_room(&mut self, key: Key, more: usize) {
        while self.sources.get(&key.src).is_some_and(|(bytes, _)| bytes + more > MAX_BYTES / SOURCE_SHARE) {
            if !self.evict(key, true) {
                break;
            }
        }
        while self.bytes + more > MAX_BYTES && self.evict(key, false) {}
    }

    /// Removes the oldest packet, or that of the same source, but not `key` itself. Returns whether there was one.
    fn evict(&mut self, key: Key, of_source: bool) -> bool {
        let oldest = self.order.values().find(|it| **it != key && (!of_source || it.src == key.src)).copied();
        oldest.inspect(|oldest| self.remove(*oldest, DropReason::FragmentLimit)).is_some()
    }

    /// Adds a fragment to its packet. Returns whether that is complete now.
    fn add(&mut self, packet: &Packet, layers: &HeaderOffsets, fragment: &Fragment) -> Result<bool, DropReason> {
        let partial = self.packets.get_mut(&fragment.key).ok_or(DropReason::FragmentLimit)?;
        if let Some(reason) = partial.discarded {
            return Err(reason);
        }
        let (offset, len) = (fragment.offset, fragment.len);
        let end = offset + len;
        let data = || copied(packet, fragment.start, len).ok_or(DropReason::Truncated);
        if partial.parts.get(&offset).is_some_and(|known| known.len() == len) {
            let same = partial.parts.get(&offset) == Some(&data()?);
            return Err(if same { DropReason::FragmentDuplicate } else { DropReason::FragmentOverlap });
        }
        let before = partial.parts.range(..=offset).next_back().map_or(0, |(at, part)| at + part.len());
        let behind = partial.parts.range(offset..).next().map_or(usize::MAX, |(at, _)| *at);
        let last = partial.parts.last_key_value().map_or(0, |(at, part)| at + part.len());
        let beyond = match (fragment.more, partial.total) {
            (true, Some(total)) => end > total,
            (false, Some(total)) => end != total,
            (false, None) => last > end,
            (true, None) => false,
        };
        if before > offset || behind < end || beyond {
            return Err(DropReason::FragmentOverlap);
        }
        if partial.parts.len() >= MAX_PARTS {
            return Err(DropReason::FragmentLimit);
        }
        if offset == 0 {
            let head = packet.data().get(..layers.l3() + header_len(packet, layers)).ok_or(DropReason::Truncated)?;
            let mut head: Box<[u8]> = head.into();
            if layers.l3_type() == L3Type::Ipv6 {
                let next = packet.data().get(layers.l3() + ipv6::HEADER_LEN).copied().ok_or(DropReason::Truncated)?;
                *head.get_mut(layers.l3() + 6).ok_or(DropReason::Truncated)? = next;
            }
            partial.head = Some(Head { bytes: head, l3: layers.l3() });
        }
        partial.parts.insert(offset, data()?);
        partial.len += len;
        partial.ecn |= 1 << fragment.ecn;
        if !fragment.more {
            partial.total = Some(end);
        }
        let is_complete = partial.total == Some(partial.len) && partial.head.is_some();
        self.bytes += len + PART_COST;
        self.sources.entry(fragment.key.src).or_default().0 += len + PART_COST;
        Ok(is_complete)
    }

    /// Frees the data of a packet whose further fragments are dropped for the same reason.
    fn discard(&mut self, key: Key, reason: DropReason) {
        let Some(partial) = self.packets.get_mut(&key) else { return };
        let (cost, parts) = (partial.cost(), partial.parts.len());
        (partial.parts, partial.len, partial.head, partial.discarded) = (BTreeMap::new(), 0, None, Some(reason));
        self.bytes -= cost;
        if let Some((bytes, _)) = self.sources.get_mut(&key.src) {
            *bytes -= cost;
        }
        self.lose(reason, parts);
    }

    /// Removes a packet that is lost.
    fn remove(&mut self, key: Key, reason: DropReason) {
        let parts = self.forget(key);
        self.lose(reason, parts);
    }

    /// Removes an entry. Returns the number of its fragments.
    fn forget(&mut self, key: Key) -> usize {
        let Some(partial) = self.packets.remove(&key) else { return 0 };
        self.order.remove(&partial.number);
        self.bytes -= partial.cost();
        if let Some((bytes, packets)) = self.sources.get_mut(&key.src) {
            *bytes -= partial.cost();
            *packets -= 1;
            if *packets == 0 {
                self.sources.remove(&key.src);
            }
        }
        partial.parts.len()
    }

    fn lose(&mut self, reason: DropReason, fragments: usize) {
        if fragments > 0 {
            self.lost.push((reason, fragments));
        }
    }
}

/// Length of the IP header without the Fragment header.
fn header_len(packet: &Packet, layers: &HeaderOffsets) -> usize {
    if layers.l3_type() == L3Type::Ipv6 {
        return ipv6::HEADER_LEN;
    }
    packet.data().get(layers.l3()).map_or(0, |byte| usize::from(byte & 15) * 4)
}

/// Reads the fields of a fragment. Returns `None` for fragments that no packet has, or that nobody needs to send.
fn read(packet: &Packet, layers: &HeaderOffsets) -> Option<Fragment> {
    let (data, l3) = (packet.data(), layers.l3());
    let (key, start, units, more, ecn) = match layers.l3_type() {
        L3Type::Ipv4 => {
            let h: &[u8; ipv4::HEADER_LEN] = data.get(l3..)?.first_chunk()?;
            let word = u16::from_be_bytes([h[6], h[7]]);
            let key = Key {
                src: Ipv4Addr::new(h[12], h[13], h[14], h[15]).into(),
                dst: Ipv4Addr::new(h[16], h[17], h[18], h[19]).into(),
                protocol: h[9],
                id: u16::from_be_bytes([h[4], h[5]]).into(),
            };
            (
                key,
                l3 + header_len(packet, layers),
                word & ipv4::FRAGMENT_OFFSET,
                word & ipv4::MORE_FRAGMENTS != 0,
                h[1] & 3,
            )
        }
        L3Type::Ipv6 => {
            let h: &[u8; ipv6::HEADER_LEN + FRAGMENT_HEADER] = data.get(l3..)?.first_chunk()?;
            // Tunnel packets have no other headers in front.
            if h[6] != IpProtocol::FRAGMENT.0 {
                return None;
            }
            let address = |at: usize| h.get(at..)?.first_chunk::<16>().map(|it| IpAddr::from(Ipv6Addr::from(*it)));
            let word = u16::from_be_bytes([h[42], h[43]]);
            let id = u32::from_be_bytes([h[44], h[45], h[46], h[47]]);
            let key = Key { src: address(8)?, dst: address(24)?, protocol: 0, id };
            (key, l3 + h.len(), word >> 3, word & 1 != 0, h[1] >> 4 & 3)
        }
        L3Type::Arp | L3Type::Other => return None,
    };
    let len = layers.end().checked_sub(start).filter(|len| *len > 0 && layers.end() <= packet.len())?;
    let offset = usize::from(units) * 8;
    let is_tiny = len < LEAST_PART && key.src.is_ipv6();
    let is_odd = more && (!len.is_multiple_of(8) || is_tiny);
    (!is_odd && offset + len <= MAX_DATA).then_some(Fragment { key, offset, more, start, len, ecn })
}

/// Copies bytes of a packet.
fn copied(packet: &Packet, start: usize, len: usize) -> Option<Box<[u8]>> {
    let mut out = Vec::with_capacity(len);
    for part in parts_from(packet, start) {
        let missing = len - out.len();
        out.extend_from_slice(part.get(..missing.min(part.len()))?);
        if out.len() == len {
            break;
        }
    }
    (out.len() == len).then(|| out.into())
}

/// Writes a complete packet.
fn build(partial: &Partial, key: &Key, pool: &Pool) -> Result<Packet, DropReason> {
    let Head { bytes: head, l3 } = partial.head.as_ref().ok_or(DropReason::BadFragment)?;
    let is_ipv6 = key.src.is_ipv6();
    let mut whole = pool.take().ok_or(DropReason::NoBuffer)?;
    whole.append(head.len()).ok_or(DropReason::NoBuffer)?.copy_from_slice(head);
    let ip = whole.data_mut().get_mut(*l3..).ok_or(DropReason::BadFragment)?;
    let counted = if is_ipv6 { 0 } else { ip.len() };
    let total = u16::try_from(counted + partial.len).map_err(|_| DropReason::BadFragment)?;
    // RFC 3168 section 5.3: one mark marks the packet, which all its fragments must allow.
    let (is_marked, is_mixed) = (partial.ecn & 0b1000 != 0, partial.ecn & 1 != 0 && partial.ecn & 0b1110 != 0);
    if is_mixed {
        return Err(DropReason::BadEcn);
    }
    if let Some(h) = ip.first_chunk_mut::<{ ipv6::HEADER_LEN }>().filter(|_| is_ipv6) {
        h[4..6].copy_from_slice(&total.to_be_bytes());
        h[1] |= if is_marked { 0x30 } else { 0 };
    } else if let Some(h) = ip.first_chunk_mut::<{ ipv4::HEADER_LEN }>() {
        h[1] |= if is_marked { 3 } else { 0 };
        h[2..4].copy_from_slice(&total.to_be_bytes());
        h[6..8].fill(0);
        h[10..12].fill(0);
        let sum = checksum::sum(ip).checksum();
        ip.get_mut(10..12).ok_or(DropReason::BadFragment)?.copy_from_slice(&sum.to_be_bytes());
    }
    let is_built = partial.parts.values().all(|part| whole.extend_from_slice(part, pool));
    if is_built { Ok(whole) } else { Err(DropReason::NoBuffer) }
}

#[cfg(test)]
mod tests {
    use wirepath_wire::{Parser, Tunnels};

    use super::*;
    use crate::fragment::Fragmenter;

    /// Returns a frame with an IP packet from a source, whose data depends on the seed.
    fn frame(v6: bool, source: u16, class: u8, len: usize, seed: usize) -> Vec<u8> {
        let mut out = vec![2; 12];
        let [high, low] = source.to_be_bytes();
        if v6 {
            out.extend([0x86, 0xdd, 0x60 | class >> 4, class << 4, 0, 0]);
            out.extend((len as u16).to_be_bytes());
            out.extend([253, 64, 0xfd]);
            out.extend([0; 13]);
            out.extend([high, low]);
            out.extend([0xfd; 16]);
        } else {
            out.extend([8, 0, 0x45, class]);
            out.extend((20 + len as u16).to_be_bytes());
            out.extend([0, 0, 0, 0, 64, 253, 0, 0, 10, 9, high, low, 10, 9, 0, 1]);
            let sum = checksum::sum(&out[14..34]).checksum();
            out[24..26].copy_from_slice(&sum.to_be_bytes());
        }
        out.extend((0..len).map(|i| ((i + seed) * 31 / 7) as u8));
        out
    }

    fn packet(pool: &Pool, bytes: &[u8]) -> Packet {
        let mut packet = pool.take().unwrap();
        assert!(packet.extend_from_slice(bytes, pool));
        packet
    }

    fn fragments(pool: &Pool, frame: &[u8], mtu: usize, id: u32) -> Vec<Vec<u8>> {
        let mut fragments = Fragmenter::of_own(packet(pool, frame), 14, mtu, id).unwrap();
        std::iter::from_fn(|| fragments.next_fragment(pool))
            .map(|it| it.unwrap().segments().flatten().copied().collect())
            .collect()
    }

    /// Passes a fragment. Returns the whole packet, or the reason of a drop.
    fn insert(it: &mut Reassembler, pool: &Pool, bytes: &[u8], now: u64) -> Result<Option<Vec<u8>>, DropReason> {
        let parser = Parser { tunnels: Tunnels::NONE, ..Parser::default() };
        let packet = packet(pool, bytes);
        let layers = parser.parse_stack(packet.data(), 0, packet.len()).map_err(DropReason::from)?;
        match it.insert(&packet, &layers, now, pool) {
            Reassembled::Held => Ok(None),
            Reassembled::Whole(whole) => Ok(Some(whole.segments().flatten().copied().collect())),
            Reassembled::Refused(reason) => Err(reason),
        }
    }

    #[test]
    fn packets_are_joined_in_any_order() {
        let pool = Pool::new("reassembly", 256).unwrap();
        let (mut it, mut random) = (Reassembler::new(), fastrand::Rng::with_seed(3));
        for round in 0..200u32 {
            let mut expected = Vec::new();
            let mut all = Vec::new();
            for n in 0..4u16 {
                let (v6, len, mtu) = (random.bool(), random.usize(1500..9000), random.usize(576..1500));
                let frame = frame(v6, n, 0xb8, len, round as usize);
                all.extend(fragments(&pool, &frame, mtu, round));
                expected.push(frame);
            }
            random.shuffle(&mut all);
            let mut found = Vec::new();
            for bytes in &all {
                if let Some(mut whole) = insert(&mut it, &pool, bytes, 0).unwrap() {
                    if whole[12..14] == [8, 0] {
                        assert!(checksum::sum(&whole[14..34]).is_valid());
                        // The identification of the fragments stays.
                        assert_eq!(whole[18..20], (round as u16).to_be_bytes());
                        whole[18..20].fill(0);
                        resum(&mut whole);
                    }
                    found.push(whole);
                } else if random.bool() {
                    assert_eq!(insert(&mut it, &pool, bytes, 0), Err(DropReason::FragmentDuplicate));
                }
            }
            found.sort();
            expected.sort();
            assert_eq!(found.len(), 4);
            assert!(found == expected, "all bytes, headers and checksums");
            assert_eq!((it.len(), it.bytes(), it.sources.len(), it.order.len()), (0, 0, 0, 0));
        }
        assert!(it.take_lost().is_empty());
        assert_eq!(pool.outstanding(), 0);
    }

    /// A router with a smaller MTU leaves a small part of each fragment, which is not the last one of the packet.
    #[test]
    fn fragments_that_were_divided_again_are_joined() {
        let pool = Pool::new("reassembly", 64).unwrap();
        let (mut it, whole) = (Reassembler::new(), frame(false, 1, 0, 4000, 0));
        let mut all = Vec::new();
        for part in fragments(&pool, &whole, 1500, 9) {
            if part.len() <= 14 + 1400 {
                all.push(part);
                continue;
            }
            let layers =
                Parser { tunnels: Tunnels::NONE, ..Parser::default() }.parse_stack(&part, 0, part.len()).unwrap();
            let mut divided = Fragmenter::new(packet(&pool, &part), &layers, 1400).ok().unwrap();
            let parts = std::iter::from_fn(|| divided.next_fragment(&pool));
            all.extend(parts.map(|it| it.unwrap().segments().flatten().copied().collect::<Vec<u8>>()));
        }
        assert_eq!(all.iter().filter(|part| part.len() < 14 + 20 + 256).count(), 2, "small parts in the middle");
        let last = all.pop().unwrap();
        for part in &all {
            assert_eq!(insert(&mut it, &pool, part, 0), Ok(None));
        }
        let joined = insert(&mut it, &pool, &last, 0).unwrap().unwrap();
        assert_eq!((joined.len(), &joined[34..]), (whole.len(), &whole[34..]));
        assert_eq!((it.len(), pool.outstanding()), (0, 0));
    }

    #[test]
    fn overlaps_discard_the_packet() {
        let pool = Pool::new("reassembly", 64).unwrap();
        for v6 in [false, true] {
            let parts = fragments(&pool, &frame(v6, 1, 0, 4000, 0), 1300, 7);
            let data = if v6 { 62 } else { 34 };
            let word = if v6 { 56 } else { 20 };
            // The second fragment, moved by eight bytes, with other bytes, or longer than the packet.
            let moved = |units: i16| {
                let mut bytes = parts[1].clone();
                let step = if v6 { units << 3 } else { units };
                let value = u16::from_be_bytes([bytes[word], bytes[word + 1]]).wrapping_add_signed(step);
                bytes[word..word + 2].copy_from_slice(&value.to_be_bytes());
                resum(&mut bytes);
                bytes
            };
            let mut changed = parts[1].clone();
            changed[data + 9] ^= 1;
            for other in [moved(1), moved(-1), changed, moved(300)] {
                let mut it = Reassembler::new();
                for part in [&parts[0], &parts[1], &parts[3]] {
                    assert_eq!(insert(&mut it, &pool, part, 0), Ok(None));
                }
                assert_eq!(insert(&mut it, &pool, &other, 0), Err(DropReason::FragmentOverlap), "{v6}");
                assert_eq!((it.take_lost(), it.bytes()), (vec![(DropReason::FragmentOverlap, 3)], 0));
                assert_eq!(insert(&mut it, &pool, &parts[2], 0), Err(DropReason::FragmentOverlap), "and all others");
                it.expire(LIFETIME);
                assert!(it.is_empty() && it.take_lost().is_empty());
            }
        }
    }

    fn resum(bytes: &mut [u8]) {
        if bytes[12..14] == [8, 0] {
            bytes[24..26].fill(0);
            let sum = checksum::sum(&bytes[14..34]).checksum();
            bytes[24..26].copy_from_slice(&sum.to_be_bytes());
        }
    }

    #[test]
    fn fragments_that_nobody_needs_are_refused() {
        let pool = Pool::new("reassembly", 64).unwrap();
        let mut it = Reassembler::new();
        // Tiny ones, and one that ends beyond all packets.
        for part in &fragments(&pool, &frame(true, 1, 0, 1000, 0), 160, 7)[..3] {
            assert_eq!(insert(&mut it, &pool, part, 0), Err(DropReason::BadFragment));
        }
        let mut beyond = fragments(&pool, &frame(false, 1, 0, 1400, 0), 700, 7).remove(1);
        beyond[20..22].copy_from_slice(&0x1fff_u16.to_be_bytes());
        resum(&mut beyond);
        assert_eq!(insert(&mut it, &pool, &beyond, 0), Err(DropReason::BadFragment));
        assert!(it.is_empty());
    }

    #[test]
    fn incomplete_packets_are_given_up() {
        let pool = Pool::new("reassembly", 64).unwrap();
        let mut it = Reassembler::new();
        let parts = fragments(&pool, &frame(true, 1, 0, 4000, 0), 1300, 7);
        assert_eq!(insert(&mut it, &pool, &parts[0], 10), Ok(None));
        assert_eq!(insert(&mut it, &pool, &parts[1], 4_000_000_000), Ok(None));
        it.expire(LIFETIME + 9);
        assert_eq!(it.len(), 1);
        it.expire(LIFETIME + 10);
        assert_eq!((it.take_lost(), it.len(), it.bytes()), (vec![(DropReason::FragmentTimeout, 2)], 0, 0));
        // An old number can be used again.
        for part in &parts[..3] {
            assert_eq!(insert(&mut it, &pool, part, LIFETIME + 11), Ok(None));
        }
        assert!(insert(&mut it, &pool, &parts[3], LIFETIME + 11).unwrap().is_some());
    }

    #[test]
    fn floods_are_bounded_and_leave_others_alone() {
        let pool = Pool::new("reassembly", 512).unwrap();
        let mut it = Reassembler::new();
        let good = fragments(&pool, &frame(false, 9, 0, 3000, 0), 1300, 7);
        assert_eq!(insert(&mut it, &pool, &good[0], 0), Ok(None));
        // One source: its first fragments evict its own ones only.
        let flood = |source: u16, id: u32| fragments(&pool, &frame(true, source, 0, 9000, 0), 8900, id).swap_remove(0);
        for id in 0..1000 {
            assert_eq!(insert(&mut it, &pool, &flood(1, id), 0), Ok(None));
            assert!(it.bytes() <= MAX_BYTES && it.len() <= MAX_PACKETS / 4 + 1);
        }
        assert_eq!(insert(&mut it, &pool, &good[1], 0), Ok(None));
        assert!(insert(&mut it, &pool, &good[2], 0).unwrap().is_some(), "another source is not disturbed");
        let lost = |it: &mut Reassembler| it.take_lost().iter().map(|(_, n)| n).sum::<usize>();
        assert_eq!(lost(&mut it), 1000 - MAX_PACKETS / 4);
        // Many sources.
        for id in 0..2000 {
            assert_eq!(insert(&mut it, &pool, &flood(100 + (id % 50) as u16, id), 0), Ok(None));
            assert!(it.bytes() <= MAX_BYTES && it.len() <= MAX_PACKETS);
        }
        assert_eq!(lost(&mut it) + it.len(), 2000 + MAX_PACKETS / 4);
        let held = it.len();
        it.expire(LIFETIME);
        assert_eq!((lost(&mut it), it.bytes(), it.sources.len()), (held, 0, 0));
        assert_eq!(pool.outstanding(), 0);
    }

    /// RFC 3168 section 5.3.
    #[test]
    fn marks_of_fragments_mark_the_packet() {
        let pool = Pool::new("reassembly", 64).unwrap();
        for v6 in [false, true] {
            for (class, marked, expected) in
                [(2u8, 3u8, Ok(3)), (2, 2, Ok(2)), (0, 0, Ok(0)), (0, 3, Err(DropReason::BadEcn))]
            {
                let mut it = Reassembler::new();
                let mut parts = fragments(&pool, &frame(v6, 1, class, 3000, 0), 1300, 7);
                let at = 15;
                parts[1][at] = if v6 { marked << 4 } else { marked };
                resum(&mut parts[1]);
                let last = parts.pop().unwrap();
                for part in &parts {
                    assert_eq!(insert(&mut it, &pool, part, 0), Ok(None));
                }
                let found = insert(&mut it, &pool, &last, 0);
                let mark = found.map(|whole| whole.map_or(9, |it| if v6 { it[15] >> 4 & 3 } else { it[15] & 3 }));
                assert_eq!(mark, expected, "{v6} {class} {marked}");
            }
        }
    }
}
