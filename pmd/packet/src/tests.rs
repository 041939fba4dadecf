use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};

use super::driver::{CompletionSource, LANES, LengthRange, OffloadResult, RxDescriptorOps, RxPacketInfo, U64x8};
use super::*;

fn full(pool: &Pool) -> bool {
    pool.available() == pool.capacity()
}

fn numbered(pool: &Pool, len: usize) -> Packet {
    let mut packet = pool.take().unwrap();
    let bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
    assert!(packet.extend_from_slice(&bytes, pool));
    packet
}

fn bytes(packet: &Packet) -> Vec<u8> {
    packet.segments().flatten().copied().collect()
}

#[test]
fn every_buffer_can_be_taken_and_freed() {
    for count in [1, 127, 128, 129, 1000] {
        let pool = Pool::new("p", count).unwrap();
        let mut taken: Vec<Packet> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(taken.len(), count as usize);
        assert_eq!(pool.available(), 0);
        let mut handles: Vec<u32> = taken.iter().map(|p| p.handle().index).collect();
        handles.sort_unstable();
        assert!(handles.iter().copied().eq(0..count), "each buffer once");
        while let Some(packet) = taken.pop() {
            drop(packet);
        }
        assert!(full(&pool));
    }
}

#[test]
fn batches_take_and_free_in_bulk() {
    let pool = Pool::new("p", 100).unwrap();
    let mut batch = Batch::new();
    assert_eq!(pool.take_batch(80, &mut batch), BATCH);
    assert!(batch.is_full());
    let mut second = Batch::new();
    assert_eq!(pool.take_batch(64, &mut second), 36, "the remaining buffers");
    batch.free_front(10);
    assert_eq!((batch.len(), pool.available()), (54, 10));
    batch.clear();
    drop(second);
    assert!(full(&pool));
}

#[test]
fn a_new_packet_has_no_metadata_of_the_last() {
    let pool = Pool::new("p", 1).unwrap();
    let mut packet = numbered(&pool, 100);
    packet.set_rss_hash(7);
    packet.set_vlan(9);
    packet.set_timestamp(1);
    packet.set_app([1, 2]);
    packet.set_checksum_status(ChecksumStatus::L3_BAD);
    assert!(packet.trim_front(50));
    drop(packet);
    let packet = pool.take().unwrap();
    assert_eq!((packet.len(), packet.headroom(), packet.tailroom()), (0, HEADROOM, DATA_ROOM));
    assert_eq!((packet.rss_hash(), packet.vlan(), packet.timestamp(), packet.app()), (None, None, None, [0, 0]));
    assert!(packet.checksum_status().is_empty());
}

#[test]
fn data_stays_inside_the_buffer() {
    let pool = Pool::new("p", 4).unwrap();
    let mut packet = numbered(&pool, DATA_ROOM);
    assert!(!packet.is_chain());
    assert!(packet.prepend_slice(HEADROOM + 1).is_none());
    assert!(packet.prepend::<HEADROOM>().is_some());
    assert!(packet.prepend::<1>().is_none());
    assert!(packet.append(1).is_none());
    assert_eq!(packet.data().len(), HEADROOM + DATA_ROOM);
    assert!(!packet.trim_front(HEADROOM + DATA_ROOM + 1));
    assert!(packet.trim_front(HEADROOM + DATA_ROOM));
    assert_eq!((packet.len(), packet.tailroom()), (0, 0));
    assert!(packet.prepend_slice(usize::MAX).is_none());
    for (headroom, len) in
        [(HEADROOM + DATA_ROOM + 1, 0), (0, HEADROOM + DATA_ROOM + 1), (usize::MAX, 1), (1, usize::MAX)]
    {
        assert!(!packet.set_data(headroom, len));
    }
    assert!(packet.set_data(HEADROOM + DATA_ROOM, 0));
    assert!(packet.set_data(0, HEADROOM + DATA_ROOM));
}

#[test]
fn chains_carry_long_packets() {
    let pool = Pool::new("p", 16).unwrap();
    for len in [DATA_ROOM + 1, 9216, 3 * DATA_ROOM] {
        let packet = numbered(&pool, len);
        let expected: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
        assert_eq!((packet.len(), packet.segment_count()), (len, len.div_ceil(DATA_ROOM)));
        assert_eq!(bytes(&packet), expected);
        let copy = packet.duplicate(&pool).unwrap();
        assert_eq!(bytes(&copy), expected);
        let mut out = vec![0; len + 10];
        assert_eq!(packet.copy_to(&mut out), len);
        assert_eq!(out[..len], expected);
        drop((packet, copy));
        assert!(full(&pool));
    }
}

#[test]
fn truncation_frees_the_segments_behind() {
    let pool = Pool::new("p", 16).unwrap();
    for len in [0, 1, DATA_ROOM - 1, DATA_ROOM, DATA_ROOM + 1, 2 * DATA_ROOM, 5000, 9000, 10_000] {
        let mut packet = numbered(&pool, 9000);
        assert!(packet.truncate(len));
        let want = len.min(9000);
        assert_eq!((packet.len(), bytes(&packet).len()), (want, want));
        assert_eq!(pool.outstanding() as usize, packet.segment_count());
        drop(packet);
        assert!(full(&pool));
    }
}

#[test]
fn pull_up_keeps_the_bytes() {
    let pool = Pool::new("p", 16).unwrap();
    let mut packet = pool.take().unwrap();
    packet.append(10).unwrap().fill(1);
    for fill in [2u8, 3, 4] {
        let mut segment = pool.take().unwrap();
        segment.append(20).unwrap().fill(fill);
        packet.append_segment(segment).unwrap();
    }
    let before = bytes(&packet);
    assert!(packet.pull_up(45));
    assert_eq!((packet.data().len(), packet.len(), packet.segment_count()), (45, 70, 3));
    assert_eq!(bytes(&packet), before);
    assert!(!packet.pull_up(71));
    assert!(packet.pull_up(70));
    assert_eq!((packet.segment_count(), bytes(&packet)), (1, before));
    drop(packet);
    assert!(full(&pool));
}

#[test]
fn an_exhausted_pool_recovers() {
    let pool = Pool::new("p", 3).unwrap();
    let mut packet = pool.take().unwrap();
    assert!(!packet.extend_from_slice(&[0; 9216], &pool), "needs five buffers");
    assert_eq!(pool.available(), 0);
    assert!(pool.take().is_none());
    assert_eq!(pool.take_batch(8, &mut Batch::new()), 0);
    drop(packet);
    assert!(full(&pool));
    assert!(pool.take().is_some());
}

#[test]
fn shared_payload_is_freed_once() {
    let pool = Pool::new("p", 16).unwrap();
    let payload = numbered(&pool, 5000).into_shared();
    let mut copies: Vec<Packet> = (0..3u8)
        .map(|i| {
            let mut header = pool.take().unwrap();
            header.append(50).unwrap().fill(i);
            header.append_shared(&payload).unwrap()
        })
        .collect();
    assert_eq!((payload.references(), pool.outstanding()), (4, 3 + 3));
    drop(payload);
    for (i, copy) in copies.iter_mut().enumerate() {
        assert_eq!((copy.len(), copy.segment_count()), (5050, 4));
        let all = bytes(copy);
        assert!(all[..50].iter().all(|&b| b == i as u8));
        assert!(all[50..].iter().enumerate().all(|(k, &b)| b == (k % 251) as u8));
        assert!(!copy.truncate(100), "the segment is shared");
        assert!(copy.append_segment(pool.take().unwrap()).is_err());
        assert!(!copy.pull_up(60));
        assert!(copy.truncate(50) && copy.truncate(20));
        assert_eq!(copy.segment_count(), 1);
    }
    drop(copies);
    assert!(full(&pool));
}

#[test]
fn buffers_return_from_other_threads() {
    let pool = Pool::new("p", 2000).unwrap();
    for _ in 0..3 {
        let packets: Vec<Packet> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(packets.len(), 2000);
        std::thread::spawn(move || drop(packets)).join().unwrap();
        assert!(full(&pool), "the ended thread keeps no buffer");
    }
}

#[test]
fn threads_share_a_pool_and_lose_no_buffer() {
    let pool = Pool::new("p", 1500).unwrap();
    let threads: Vec<_> = (0..4u64)
        .map(|seed| {
            let pool = pool.clone();
            std::thread::spawn(move || {
                let mut in_use: Vec<Packet> = Vec::new();
                let mut rng = fastrand::Rng::with_seed(seed);
                for _ in 0..if cfg!(miri) { 200 } else { 20_000 } {
                    let x = rng.u64(..);
                    if x % 5 < 3 {
                        if let Some(mut packet) = pool.take() {
                            // A buffer with two owners would fail the comparison below.
                            packet.append(8).unwrap().copy_from_slice(&x.to_ne_bytes());
                            packet.set_app([x, seed]);
                            in_use.push(packet);
                        }
                    } else if !in_use.is_empty() {
                        let packet = in_use.swap_remove(x as usize % in_use.len());
                        assert_eq!(packet.data(), packet.app()[0].to_ne_bytes());
                        assert_eq!(packet.app()[1], seed);
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    assert!(full(&pool));
}

#[test]
fn packets_outlive_their_pool_handle() {
    let pool = Pool::new("short-lived", 300).unwrap();
    let packet = numbered(&pool, 100);
    drop(pool);
    assert_eq!(packet.len(), 100);
    let others: Vec<Pool> = (0..4).map(|_| Pool::new("other", 10).unwrap()).collect();
    assert!(others.iter().all(|p| p.id() != packet.handle().pool), "an id in use is not assigned again");
    drop(packet);
}

#[test]
fn a_batch_of_mixed_pools_and_chains_is_freed() {
    let a = Pool::new("a", 300).unwrap();
    let b = Pool::new("b", 300).unwrap();
    for _ in 0..if cfg!(miri) { 1 } else { 10 } {
        let mut batch = Batch::new();
        for i in 0..BATCH {
            let len = if i % 7 == 0 { 5000 } else { 60 };
            batch.push(numbered(if i % 3 == 0 { &a } else { &b }, len)).unwrap();
        }
        assert!(batch.push(numbered(&a, 1)).is_err());
        let mut seen = 0;
        batch.drain_front(5, |_| seen += 1);
        batch.filter_map(|packet| (packet.len() > 60).then_some(packet));
        assert_eq!((seen, batch.len()), (5, 9));
        drop(batch);
        assert!(full(&a) && full(&b));
    }
}

#[test]
fn an_arena_has_pools_until_it_is_full() {
    let mut arena = Arena::new(1000, None).unwrap();
    let a = arena.pool("a", 600).unwrap();
    let b = arena.pool("b", 400).unwrap();
    assert!(std::ptr::eq(&raw const **a.region(), &raw const **b.region()));
    assert!(b.region_offset() >= a.region_offset() + 600 * STRIDE);
    assert!(matches!(arena.pool("c", 1 << 20), Err(PoolError::ArenaFull { .. })));
    assert!(matches!(Arena::new(0, None), Err(PoolError::BadSize(0))));
    let packet = b.take().unwrap();
    let (region, offset) = packet.buffer_location();
    assert!(std::ptr::eq(&raw const **region, &raw const **b.region()));
    assert_eq!(offset, b.region_offset() + packet.handle().index as usize * STRIDE);
}

#[test]
fn no_buffer_is_counted_in_two_places() {
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
    // A pool without handles is freed when all buffers are counted as free. A count that is too high would
    // free it under its packets.
    const IN_USE: u32 = 20;
    const ROUNDS: u32 = if cfg!(miri) { 5 } else { 5_000 };
    const OTHERS: usize = if cfg!(miri) { 4 } else { 64 };
    let pool = Pool::new("p", 600).unwrap();
    // Odd while buffers are freed and none is taken.
    let phase = AtomicU32::new(0);
    let (end, started) = (std::sync::Barrier::new(OTHERS + 1), std::sync::Barrier::new(OTHERS + 1));
    std::thread::scope(|scope| {
        let mut all: Vec<Packet> = std::iter::from_fn(|| pool.take()).collect();
        let in_use = all.split_off(600 - IN_USE as usize);
        // Empty caches of other threads make the count slower.
        for _ in 0..OTHERS {
            scope.spawn(|| {
                assert!(pool.take().is_none());
                started.wait();
                end.wait();
            });
        }
        started.wait();
        drop(all);
        let watcher = scope.spawn(|| {
            let mut max_available = 0;
            loop {
                let before = phase.load(SeqCst);
                let available = pool.available();
                if before % 2 == 1 && phase.load(SeqCst) == before {
                    max_available = max_available.max(available);
                }
                if before == 2 * ROUNDS {
                    return max_available;
                }
            }
        });
        for _ in 0..ROUNDS {
            // More buffers than a cache holds: magazines move to the shared list during the count.
            let taken: Vec<Packet> = std::iter::from_fn(|| pool.take()).collect();
            phase.fetch_add(1, SeqCst);
            drop(taken);
            phase.fetch_add(1, SeqCst);
        }
        end.wait();
        assert!(watcher.join().unwrap() <= 600 - IN_USE);
        drop(in_use);
    });
}

#[test]
fn truncation_changes_no_shared_segment() {
    let pool = Pool::new("p", 16).unwrap();
    let payload = numbered(&pool, 5000).into_shared();
    let header = || {
        let mut header = pool.take().unwrap();
        header.append(50).unwrap().fill(7);
        header
    };
    let mut copy = header().append_shared(&payload).unwrap();
    for len in 51..5050 {
        assert!(!copy.truncate(len), "{len}");
    }
    assert_eq!((copy.len(), bytes(&copy).len(), payload.segments().count()), (5050, 5050, 3));
    assert!(bytes(&copy)[50..].iter().enumerate().all(|(k, &b)| b == (k % 251) as u8));
    // A shared segment behind another shared one, with a private header of its own.
    let mut nested = header().append_shared(&copy.into_shared()).unwrap();
    for len in 51..5100 {
        assert!(!nested.truncate(len), "{len}");
    }
    assert_eq!(bytes(&nested).len(), 5100);
    assert!(nested.truncate(50));
    drop((nested, payload));
    assert!(full(&pool));
}

#[test]
fn clones_share_the_payload_behind_their_headers() {
    let pool = Pool::new("p", 40).unwrap();
    for len in [0, 10, 100, 101, 1500, 2048, 5000] {
        let mut packet = numbered(&pool, len);
        packet.set_mark(7);
        let whole = bytes(&packet);
        let mut copies = vec![packet.clone_shared(100, &pool).unwrap()];
        // The payload is shared already the second time.
        copies.push(packet.clone_shared(100, &pool).unwrap());
        let third = copies[0].clone_shared(40, &pool).unwrap();
        copies.push(third);
        let offsets = |packet: &Packet| packet.dma_segments().map(|segment| segment.offset).collect::<Vec<_>>();
        for copy in &copies {
            assert_eq!((bytes(copy) == whole, copy.len(), copy.mark()), (true, len, Some(7)), "{len}");
            assert_eq!(offsets(copy).last() == offsets(&packet).last(), len > 100, "{len}: payload is not copied");
        }
        // A change of private bytes is invisible to the others.
        packet.data_mut().fill(0);
        assert!(copies.iter().all(|copy| bytes(copy) == whole));
        assert!(!packet.truncate(len.saturating_sub(1)) || len <= 101);
        drop(packet);
        assert!(copies.iter().all(|copy| bytes(copy) == whole));
        drop(copies);
        assert!(full(&pool), "{len}");
    }
    // A chain with a short first segment: the second segment is shared as a whole.
    let mut chain = numbered(&pool, 30);
    chain.append_segment(numbered(&pool, 300)).unwrap();
    let whole = bytes(&chain);
    let copy = chain.clone_shared(100, &pool).unwrap();
    assert_eq!((bytes(&copy), copy.segment_count(), chain.segment_count()), (whole.clone(), 2, 2));
    drop(chain);
    assert_eq!(bytes(&copy), whole);
    drop(copy);
    assert!(full(&pool));
    // Too few buffers: no change.
    let mut packet = numbered(&pool, 2000);
    let mut in_use: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
    assert!(packet.clone_shared(100, &pool).is_none());
    in_use.pop();
    assert!(packet.clone_shared(100, &pool).is_none());
    assert_eq!(packet.segment_count(), 1);
    in_use.pop();
    assert!(packet.clone_shared(100, &pool).is_some());
}

#[test]
fn append_shared_keeps_the_length_limit() {
    let pool = Pool::new("p", 200).unwrap();
    let payload = numbered(&pool, MAX_PACKET).into_shared();
    let mut header = pool.take().unwrap();
    header.append(1).unwrap().fill(0);
    let mut header = header.append_shared(&payload).unwrap_err();
    assert_eq!(payload.references(), 1);
    assert!(header.truncate(0));
    assert_eq!(header.append_shared(&payload).unwrap().len(), MAX_PACKET);
}

#[test]
fn thread_exit_returns_packets_in_thread_locals() {
    thread_local! {
        static KEPT: RefCell<(Option<Packet>, Option<Batch>)> = const { RefCell::new((None, None)) };
    }
    let pool = Pool::new("p", 600).unwrap();
    let clone = pool.clone();
    std::thread::spawn(move || {
        // Created before the thread's cache, so destroyed after it.
        KEPT.with_borrow_mut(|kept| *kept = (None, None));
        let mut batch = Batch::new();
        clone.take_batch(BATCH, &mut batch);
        KEPT.with_borrow_mut(|kept| *kept = (clone.take(), Some(batch)));
    })
    .join()
    .unwrap();
    assert!(full(&pool));
    let all: Vec<Packet> = std::iter::from_fn(|| pool.take()).collect();
    assert_eq!(all.len(), 600, "other threads can take the buffers");
}

#[test]
fn an_orphaned_pool_is_freed_with_its_last_packet() {
    let pool = Pool::new("p", 10).unwrap();
    let region = Arc::downgrade(pool.region());
    let packet = pool.take().unwrap();
    drop(pool);
    assert!(region.upgrade().is_some());
    std::thread::spawn(move || drop(packet)).join().unwrap();
    assert!(region.upgrade().is_none());
}

#[test]
#[allow(clippy::single_range_in_vec_init, reason = "a list of ranges")]
#[cfg_attr(miri, ignore = "Miri has no shared memory")]
fn a_lease_is_a_pool_of_another_process() {
    use wirepath_memory::{Region, RegionBuilder};
    let bytes = Arena::bytes(1000).unwrap();
    let region = RegionBuilder::new(bytes).shared().huge_pages(false).map().unwrap();
    let other = Region::from_memfd(region.descriptor().unwrap().try_clone_to_owned().unwrap()).unwrap();
    let other = Arc::new(other);
    let mut arena = Arena::in_region(region);
    let _first = arena.pool("first", 10).unwrap();
    let pool = arena.pool("server", 900).unwrap();
    let in_use = [pool.take().unwrap(), pool.take().unwrap()];
    let leased = pool.lease(300).unwrap();
    assert_eq!((pool.outstanding(), leased.count()), (302, 300));
    assert!(pool.lease(599).is_none() && pool.outstanding() == 302, "fewer buffers are free");
    let ranges = leased.ranges();
    assert_eq!(ranges.iter().map(ExactSizeIterator::len).sum::<usize>(), 300);
    let client = Pool::from_lease("client", &other, pool.region_offset(), pool.region_buffers(), &ranges).unwrap();
    assert_eq!((client.capacity(), client.available(), client.region_buffers()), (300, 300, 900));
    let mut packets: Vec<Packet> = std::iter::from_fn(|| client.take()).collect();
    assert_eq!(packets.len(), 300);
    for packet in &mut packets {
        packet.append(64).unwrap().fill(0xa5);
    }
    // Buffers that are not leased stay unchanged.
    for (i, packet) in in_use.into_iter().enumerate() {
        assert!(packet.data().is_empty(), "{i}");
    }
    // The other process is killed while it owns packets: their buffers still return to the pool.
    std::mem::forget(packets);
    drop(leased);
    assert_eq!(pool.outstanding(), 0);
    let all: Vec<Packet> = std::iter::from_fn(|| pool.take()).collect();
    assert!(all.len() == 900 && all.iter().all(|packet| packet.data().is_empty()));
    // Ranges that exceed the region or overlap are refused.
    let refused = |offset: usize, count: u32, leased: &[std::ops::Range<u32>]| {
        assert!(matches!(
            Pool::from_lease("wrong", &other, offset, count, leased),
            Err(PoolError::InvalidLease { .. })
        ));
    };
    let offset = pool.region_offset();
    refused(usize::MAX - 63, 900, &[0..1]);
    refused(offset + 1, 900, &[0..1]);
    refused(offset, 1 << 20, &[0..1]);
    refused(offset, 900, &[]);
    refused(offset, 900, &[0..901]);
    refused(offset, 900, &[0..4, 3..5]);
    refused(offset, 900, &[4..4]);
    assert!(matches!(Pool::from_lease("wrong", &other, offset, 0, &[0..1]), Err(PoolError::BadSize(0))));
}

#[test]
fn buffers_of_a_freed_chain_are_swapped_one_by_one() {
    let pool = Pool::new("posted", 4).unwrap();
    let mut chain = pool.take().unwrap();
    for _ in 0..3 {
        chain.append_segment(pool.take().unwrap()).unwrap();
    }
    drop(chain);
    // The metadata of these buffers is what the chain left.
    let mut slots = [pool.take().unwrap(), pool.take().unwrap()];
    // SAFETY: the handle is a local variable, no burst is made of it, and the packets in `slots` belong to the pool.
    let handle = unsafe { pool.cache_handle(&pool.meta_template().in_port(PortId::new(5))) }.unwrap();
    let first = handle.swap(&mut slots[0], 1500).unwrap();
    assert!(handle.swap(&mut slots[0], 2049).is_none(), "more than a buffer holds");
    let second = handle.swap(&mut slots[0], 2048).unwrap();
    assert!(handle.swap(&mut slots[1], 60).is_none() && !handle.has_free(1), "no buffer is free");
    assert_eq!((first.len(), first.rss_hash(), first.checksum_status()), (1500, None, ChecksumStatus::NONE));
    assert_eq!((second.len(), second.data().len(), second.rss_hash()), (2048, 2048, None));
    assert!(!first.is_chain() && !second.is_chain() && first.in_port() == Some(PortId::new(5)));
    drop((first, second));
    assert_eq!(pool.outstanding(), 2, "the packets in the slots");
    drop(slots);
    assert_eq!(pool.outstanding(), 0);
}

/// Completion of a fake device: packet length, whether the offload result is unusual, and whether there is
/// further metadata.
struct FakeCompletion {
    len: u32,
    unusual: bool,
    has_metadata: bool,
}

/// Descriptor format of a fake device: completions in order, `N` of which are unrolled. A length of 0 ends them.
#[derive(Clone, Copy)]
struct FakeDevice<const N: usize> {
    next_hash: u32,
}

impl<const N: usize> RxDescriptorOps for FakeDevice<N> {
    const UNROLL: usize = N;
    type Completion = FakeCompletion;
    type Descriptor = AtomicU64;

    fn default_offload(&self) -> OffloadResult {
        OffloadResult::new(ChecksumStatus::L3_GOOD, true)
    }

    fn parse(&mut self, completion: &FakeCompletion) -> Option<RxPacketInfo> {
        let FakeCompletion { len, unusual, has_metadata } = *completion;
        let offload = unusual.then(|| OffloadResult::new(ChecksumStatus::L4_BAD, false));
        let excess_len = len.wrapping_sub(60).into();
        (len != 0).then_some(RxPacketInfo { excess_len, offload, hash: Some(self.next_hash), has_metadata })
    }

    fn advance(&mut self) {
        self.next_hash += 1;
    }

    fn post(&self, descriptor: &AtomicU64, address: u64) {
        descriptor.store(address, Ordering::Relaxed);
    }

    fn write_metadata(_: &FakeCompletion, packet: &mut Packet) {
        packet.set_mark(9);
    }
}

/// Receives packets of the lengths `lens`, at most `limit` with each call, up to the first bad length, and
/// checks their metadata.
fn receive_all<const N: usize>(lens: &[u32], limit: usize) {
    let pool = Pool::new("receive", 300).unwrap();
    let mut slots: Vec<_> = (0..64).map(|_| pool.take().unwrap()).collect();
    let filled: Vec<_> = slots.iter().map(Packet::default_data_address).collect();
    let descriptors: Vec<_> = (0..64).map(|_| AtomicU64::new(0)).collect();
    let completion =
        |(i, &len): (usize, &u32)| FakeCompletion { len, unusual: i % 11 == 7, has_metadata: i % 13 == 12 };
    let completions: Vec<_> = lens.iter().enumerate().map(completion).collect();
    let good = lens.iter().take_while(|len| (60..=1514).contains(*len)).count();
    let mut batch = Batch::new();
    let (mut ops, mut got) = (FakeDevice::<N> { next_hash: 1000 }, 0);
    // The length in the template does not count.
    let template = pool.meta_template().in_port(PortId::new(5)).len(DATA_ROOM);
    // SAFETY: handle and burst are local variables, this function uses the pool only after the burst, and the
    // packets in `slots` belong to the pool.
    let handle = unsafe { pool.cache_handle(&template) }.unwrap();
    let mut burst = handle.burst(&mut batch, LengthRange::new(60, 1514));
    while got < completions.len() {
        let (slots, descriptors, rest) = (&mut slots[got..], &descriptors[got..], &completions[got..]);
        // In two pieces, as at the end of a ring.
        let pieces = |at: usize| if at < 5 { &rest[at..5.min(rest.len())] } else { &rest[at..] };
        let n = burst.receive(slots, descriptors, limit, pieces, &mut ops);
        assert_eq!(n, limit.min(good - got).min(rest.len()));
        assert_eq!(burst.last_packets(n).len(), n);
        if n == 0 {
            break;
        }
        got += n;
    }
    assert_eq!(
        (got, ops.next_hash, burst.bytes()),
        (good, 1000 + good as u32, lens[..good].iter().map(|len| u64::from(*len)).sum())
    );
    drop(burst);
    assert_eq!(batch.len(), good);
    for (i, packet) in batch.iter().enumerate() {
        let (unusual, has_metadata) = (i % 11 == 7, i % 13 == 12);
        let checksum_status = if unusual { ChecksumStatus::L4_BAD } else { ChecksumStatus::L3_GOOD };
        assert_eq!((packet.len() as u32, packet.default_data_address()), (lens[i], filled[i]));
        let hash = (!unusual).then_some(1000 + i as u32);
        assert_eq!((packet.rss_hash(), packet.checksum_status()), (hash, checksum_status));
        assert_eq!((packet.mark(), packet.in_port()), (has_metadata.then_some(9), Some(PortId::new(5))));
        assert_eq!(slots[i].default_data_address(), descriptors[i].load(Ordering::Relaxed));
    }
    assert!(slots[good..].iter().zip(&filled[good..]).all(|(packet, at)| packet.default_data_address() == *at));
    assert_eq!(pool.outstanding() as usize, 64 + good);
    drop((batch, slots));
    assert_eq!(pool.outstanding(), 0);
}

/// Descriptor format whose completions are words that are parsed in eights. The method with the number
/// `fault` panics.
#[derive(Clone, Copy)]
struct Panicking {
    fault: u32,
    advanced: u32,
}

impl Panicking {
    fn check(&self, method: u32) {
        assert!(method != self.fault || self.advanced < 3, "method {method}");
    }
}

impl RxDescriptorOps for Panicking {
    type Completion = AtomicU64;
    type Descriptor = AtomicU64;

    fn default_offload(&self) -> OffloadResult {
        OffloadResult::NOTHING
    }

    fn parse(&mut self, _: &AtomicU64) -> Option<RxPacketInfo> {
        self.check(0);
        Some(RxPacketInfo {
            excess_len: 0,
            offload: None,
            hash: None,
            has_metadata: self.fault == 1 && self.advanced > 2,
        })
    }

    fn advance(&mut self) {
        self.check(2);
        self.advanced += 1;
    }

    fn parse_x8(&self, completions: &[AtomicU64; LANES]) -> Option<U64x8> {
        self.check(3);
        Some(U64x8::load_atomic(completions))
    }

    fn post(&self, _: &AtomicU64, _: u64) {
        self.check(4);
    }

    fn write_metadata(_: &AtomicU64, _: &mut Packet) {
        panic!("method 1");
    }
}

/// Completions of [`Panicking`], in eights as long as there are as many.
struct InEights<'a>(&'a [AtomicU64]);

impl<'a> CompletionSource<'a, AtomicU64> for InEights<'a> {
    fn completions(&self, packet: usize) -> &'a [AtomicU64] {
        &self.0[packet..]
    }

    fn chunks_x8(&self, packet: usize) -> Option<impl FnMut() -> &'a [AtomicU64; LANES]> {
        let mut chunks = self.0[packet..].as_chunks::<LANES>().0.iter();
        Some(move || chunks.next().unwrap())
    }
}

#[test]
fn a_panic_in_a_driver_gives_no_buffer_two_owners() {
    for fault in 0..5 {
        for in_eights in [false, true] {
            let pool = Pool::new("panic", 200).unwrap();
            let mut slots: Vec<_> = (0..20).map(|_| pool.take().unwrap()).collect();
            let words: Vec<_> = (0..20).map(|_| AtomicU64::new(0)).collect();
            let mut batch = Batch::new();
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                // SAFETY: handle and burst are local variables, nothing uses the pool meanwhile, and the
                // slots hold packets of the pool.
                let handle = unsafe { pool.cache_handle(&pool.meta_template()) }.unwrap();
                let mut burst = handle.burst(&mut batch, LengthRange::new(60, 1514));
                let mut ops = Panicking { fault, advanced: 0 };
                if in_eights {
                    burst.receive(&mut slots, &words, usize::MAX, InEights(&words), &mut ops)
                } else {
                    burst.receive(&mut slots, &words, usize::MAX, |at: usize| &words[at..], &mut ops)
                }
            }));
            assert_eq!(result.is_err(), in_eights || fault != 3, "{fault}");
            let rest: Vec<Packet> = std::iter::from_fn(|| pool.take()).collect();
            let mut buffers: Vec<_> =
                slots.iter().chain(batch.iter()).chain(&rest).map(|packet| packet.handle().index).collect();
            buffers.sort_unstable();
            assert!(buffers.into_iter().eq(0..200), "{fault} {in_eights}");
        }
    }
}

#[test]
fn receive_swaps_filled_buffers_for_free_ones() {
    // Miri takes seconds for each call.
    let goods: Vec<usize> = if cfg!(miri) { vec![9, 64] } else { (0..30).chain([63, 64]).collect() };
    for ends in [0, 59, 1515, u32::MAX] {
        for &good in &goods {
            let mut lens: Vec<_> = (0..64).map(|i| 60 + i * 23).collect();
            if let Some(end) = lens.get_mut(good) {
                *end = ends;
            }
            for limit in [1, 7, 64] {
                receive_all::<0>(&lens, limit);
                receive_all::<4>(&lens, limit);
                receive_all::<8>(&lens, limit);
            }
        }
    }
}

#[test]
fn a_batch_frees_chains_and_packets_of_other_pools() {
    let (pool, other) = (Pool::new("free", 64).unwrap(), Pool::new("other", 64).unwrap());
    for odd in [vec![], vec![0], vec![5, 6], vec![19]] {
        for chained in [vec![], vec![0, 5], vec![18]] {
            let mut batch = Batch::new();
            for i in 0..20 {
                let mut packet = if odd.contains(&i) { other.take().unwrap() } else { pool.take().unwrap() };
                packet.append(10 + i).unwrap();
                if chained.contains(&i) {
                    let mut more = pool.take().unwrap();
                    more.append(3).unwrap();
                    packet.append_segment(more).unwrap();
                }
                drop(batch.push(packet));
            }
            assert_eq!(batch.clear(), (10..30).sum::<u64>() + 3 * chained.len() as u64);
            assert_eq!((pool.outstanding(), other.outstanding()), (0, 0), "{odd:?} {chained:?}");
        }
    }
}
