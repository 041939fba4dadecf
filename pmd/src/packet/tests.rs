use std::sync::atomic::{AtomicU64, Ordering};

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
fn every_buffer_can_be_taken_and_comes_back() {
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
    assert_eq!(pool.take_batch(64, &mut second), 36, "what is left");
    batch.free_front(10);
    assert_eq!((batch.len(), pool.available()), (54, 10));
    batch.clear();
    drop(second);
    assert!(full(&pool));
}

#[test]
fn a_fresh_packet_has_no_history() {
    let pool = Pool::new("p", 1).unwrap();
    let mut packet = numbered(&pool, 100);
    packet.set_rss_hash(7);
    packet.set_vlan(9);
    packet.set_timestamp(1);
    packet.set_app([1, 2]);
    packet.set_verdicts(Verdicts::L3_BAD);
    assert!(packet.trim_front(50));
    drop(packet);
    let packet = pool.take().unwrap();
    assert_eq!((packet.len(), packet.headroom(), packet.tailroom()), (0, HEADROOM, DATA_ROOM));
    assert_eq!((packet.rss_hash(), packet.vlan(), packet.timestamp(), packet.app()), (None, None, None, [0, 0]));
    assert!(packet.verdicts().is_empty());
}

#[test]
fn the_data_never_leaves_the_buffer() {
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
fn truncation_frees_what_is_cut_off() {
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
fn a_pool_that_runs_dry_recovers() {
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
fn frozen_payload_is_shared_and_freed_once() {
    let pool = Pool::new("p", 16).unwrap();
    let payload = numbered(&pool, 5000).freeze();
    let mut copies: Vec<Packet> = (0..3u8)
        .map(|i| {
            let mut header = pool.take().unwrap();
            header.append(50).unwrap().fill(i);
            header.attach(&payload).unwrap()
        })
        .collect();
    assert_eq!((payload.references(), pool.outstanding()), (4, 3 + 3));
    drop(payload);
    for (i, copy) in copies.iter_mut().enumerate() {
        assert_eq!((copy.len(), copy.segment_count()), (5050, 4));
        let all = bytes(copy);
        assert!(all[..50].iter().all(|&b| b == i as u8));
        assert!(all[50..].iter().enumerate().all(|(k, &b)| b == (k % 251) as u8));
        assert!(!copy.truncate(100), "the cut would change what others see");
        assert!(copy.append_segment(pool.take().unwrap()).is_err());
        assert!(!copy.pull_up(60));
        assert!(copy.truncate(50) && copy.truncate(20));
        assert_eq!(copy.segment_count(), 1);
    }
    drop(copies);
    assert!(full(&pool));
}

#[test]
fn buffers_come_back_from_other_threads() {
    let pool = Pool::new("p", 2000).unwrap();
    for _ in 0..3 {
        let packets: Vec<Packet> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(packets.len(), 2000);
        std::thread::spawn(move || drop(packets)).join().unwrap();
        assert!(full(&pool), "the ended thread kept none");
    }
}

#[test]
fn two_threads_trade_buffers_and_lose_none() {
    let pool = Pool::new("p", 1500).unwrap();
    let threads: Vec<_> = (0..4u64)
        .map(|seed| {
            let pool = pool.clone();
            std::thread::spawn(move || {
                let mut held: Vec<Packet> = Vec::new();
                let mut x = seed * 7919 + 1;
                for _ in 0..20_000 {
                    x ^= x << 13;
                    x ^= x >> 7;
                    x ^= x << 17;
                    if x % 5 < 3 {
                        if let Some(mut packet) = pool.take() {
                            // A buffer that two threads own would show here.
                            packet.append(8).unwrap().copy_from_slice(&x.to_ne_bytes());
                            packet.set_app([x, seed]);
                            held.push(packet);
                        }
                    } else if !held.is_empty() {
                        let packet = held.swap_remove(x as usize % held.len());
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
    assert!(others.iter().all(|p| p.id() != packet.handle().pool), "an id in use is not given again");
    drop(packet);
}

#[test]
fn a_batch_of_mixed_pools_and_chains_returns_all() {
    let a = Pool::new("a", 300).unwrap();
    let b = Pool::new("b", 300).unwrap();
    for _ in 0..10 {
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
fn an_arena_is_cut_until_it_is_full() {
    let mut arena = Arena::new(1000, None).unwrap();
    let a = arena.pool("a", 600).unwrap();
    let b = arena.pool("b", 400).unwrap();
    assert!(std::ptr::eq(&raw const **a.region(), &raw const **b.region()));
    assert!(b.region_offset() >= a.region_offset() + 600 * STRIDE);
    assert!(matches!(arena.pool("c", 1 << 20), Err(PoolError::ArenaFull { .. })));
    assert!(matches!(Arena::new(0, None), Err(PoolError::BadSize(0))));
    let packet = b.take().unwrap();
    let (region, offset) = packet.place();
    assert!(std::ptr::eq(&raw const **region, &raw const **b.region()));
    assert_eq!(offset, b.region_offset() + packet.handle().index as usize * STRIDE);
}

#[test]
fn no_buffer_is_counted_in_two_places() {
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
    // A pool without handles is freed as soon as all buffers are counted as free: one count too many and packets dangle.
    const HELD: u32 = 20;
    const ROUNDS: u32 = 5_000;
    const OTHERS: usize = 64;
    let pool = Pool::new("p", 600).unwrap();
    // Odd while buffers are given back and none is taken.
    let phase = AtomicU32::new(0);
    let (end, started) = (std::sync::Barrier::new(OTHERS + 1), std::sync::Barrier::new(OTHERS + 1));
    std::thread::scope(|scope| {
        let mut all: Vec<Packet> = std::iter::from_fn(|| pool.take()).collect();
        let held = all.split_off(600 - HELD as usize);
        // Caches of other threads, empty ones: counting takes longer.
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
            let mut most = 0;
            loop {
                let before = phase.load(SeqCst);
                let available = pool.available();
                if before % 2 == 1 && phase.load(SeqCst) == before {
                    most = most.max(available);
                }
                if before == 2 * ROUNDS {
                    return most;
                }
            }
        });
        for _ in 0..ROUNDS {
            // More than a thread keeps at hand: magazines go to the shared list while the count is taken.
            let taken: Vec<Packet> = std::iter::from_fn(|| pool.take()).collect();
            phase.fetch_add(1, SeqCst);
            drop(taken);
            phase.fetch_add(1, SeqCst);
        }
        end.wait();
        assert!(watcher.join().unwrap() <= 600 - HELD);
        drop(held);
    });
}

#[test]
fn no_cut_changes_a_shared_segment() {
    let pool = Pool::new("p", 16).unwrap();
    let payload = numbered(&pool, 5000).freeze();
    let header = || {
        let mut header = pool.take().unwrap();
        header.append(50).unwrap().fill(7);
        header
    };
    let mut copy = header().attach(&payload).unwrap();
    for len in 51..5050 {
        assert!(!copy.truncate(len), "{len}");
    }
    assert_eq!((copy.len(), bytes(&copy).len(), payload.segments().count()), (5050, 5050, 3));
    assert!(bytes(&copy)[50..].iter().enumerate().all(|(k, &b)| b == (k % 251) as u8));
    // A shared segment behind a shared one with a private head of its own.
    let mut nested = header().attach(&copy.freeze()).unwrap();
    for len in 51..5100 {
        assert!(!nested.truncate(len), "{len}");
    }
    assert_eq!(bytes(&nested).len(), 5100);
    assert!(nested.truncate(50));
    drop((nested, payload));
    assert!(full(&pool));
}

#[test]
fn copies_that_share_what_lies_behind_their_headers() {
    let pool = Pool::new("p", 40).unwrap();
    for len in [0, 10, 100, 101, 1500, 2048, 5000] {
        let mut packet = numbered(&pool, len);
        packet.set_mark(7);
        let whole = bytes(&packet);
        let mut copies = vec![packet.share(100, &pool).unwrap()];
        // A second time the tail is shared already.
        copies.push(packet.share(100, &pool).unwrap());
        let third = copies[0].share(40, &pool).unwrap();
        copies.push(third);
        let places = |packet: &Packet| packet.segment_places().map(|place| place.offset).collect::<Vec<_>>();
        for copy in &copies {
            assert_eq!((bytes(copy) == whole, copy.len(), copy.mark()), (true, len, Some(7)), "{len}");
            assert_eq!(places(copy).last() == places(&packet).last(), len > 100, "{len}: payload is not copied");
        }
        // What each has for itself, the others do not see.
        packet.data_mut().fill(0);
        assert!(copies.iter().all(|copy| bytes(copy) == whole));
        assert!(!packet.truncate(len.saturating_sub(1)) || len <= 101);
        drop(packet);
        assert!(copies.iter().all(|copy| bytes(copy) == whole));
        drop(copies);
        assert!(full(&pool), "{len}");
    }
    // Chains whose first segment ends before: their second one is shared as it is.
    let mut chain = numbered(&pool, 30);
    chain.append_segment(numbered(&pool, 300)).unwrap();
    let whole = bytes(&chain);
    let copy = chain.share(100, &pool).unwrap();
    assert_eq!((bytes(&copy), copy.segment_count(), chain.segment_count()), (whole.clone(), 2, 2));
    drop(chain);
    assert_eq!(bytes(&copy), whole);
    drop(copy);
    assert!(full(&pool));
    // Not enough buffers: nothing happens.
    let mut packet = numbered(&pool, 2000);
    let mut held: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
    assert!(packet.share(100, &pool).is_none());
    held.pop();
    assert!(packet.share(100, &pool).is_none());
    assert_eq!(packet.segment_count(), 1);
    held.pop();
    assert!(packet.share(100, &pool).is_some());
}

#[test]
fn a_payload_does_not_grow_a_packet_beyond_the_longest() {
    let pool = Pool::new("p", 200).unwrap();
    let payload = numbered(&pool, MAX_PACKET).freeze();
    let mut header = pool.take().unwrap();
    header.append(1).unwrap().fill(0);
    let mut header = header.attach(&payload).unwrap_err();
    assert_eq!(payload.references(), 1);
    assert!(header.truncate(0));
    assert_eq!(header.attach(&payload).unwrap().len(), MAX_PACKET);
}

#[test]
fn a_thread_that_ends_gives_back_what_its_thread_locals_hold() {
    thread_local! {
        static KEPT: std::cell::RefCell<(Option<Packet>, Option<Batch>)> = const { std::cell::RefCell::new((None, None)) };
    }
    let pool = Pool::new("p", 600).unwrap();
    let clone = pool.clone();
    std::thread::spawn(move || {
        // Made before the thread's cache, so destroyed after it.
        KEPT.with_borrow_mut(|kept| *kept = (None, None));
        let mut batch = Batch::new();
        clone.take_batch(BATCH, &mut batch);
        KEPT.with_borrow_mut(|kept| *kept = (clone.take(), Some(batch)));
    })
    .join()
    .unwrap();
    assert!(full(&pool));
    let all: Vec<Packet> = std::iter::from_fn(|| pool.take()).collect();
    assert_eq!(all.len(), 600, "and others can take it");
}

#[test]
fn an_orphaned_pool_goes_with_the_thread_that_frees_its_last_packet() {
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
fn a_part_of_a_pool_is_another_processes() {
    use wirepath_memory::{Region, RegionBuilder};
    let bytes = Arena::bytes(1000).unwrap();
    let region = RegionBuilder::new(bytes).shared().huge_pages(false).map().unwrap();
    let other = Region::attach(region.descriptor().unwrap().try_clone_to_owned().unwrap()).unwrap();
    let other = Arc::new(other);
    let mut arena = Arena::in_region(region);
    let _first = arena.pool("first", 10).unwrap();
    let pool = arena.pool("lender", 900).unwrap();
    let held = [pool.take().unwrap(), pool.take().unwrap()];
    let lent = pool.lend(300).unwrap();
    assert_eq!((pool.outstanding(), lent.count()), (302, 300));
    assert!(pool.lend(599).is_none() && pool.outstanding() == 302, "as many are not free");
    let ranges = lent.ranges();
    assert_eq!(ranges.iter().map(ExactSizeIterator::len).sum::<usize>(), 300);
    let borrowed = Pool::borrowed("borrower", &other, pool.region_offset(), pool.span(), &ranges).unwrap();
    assert_eq!((borrowed.capacity(), borrowed.available(), borrowed.span()), (300, 300, 900));
    let mut packets: Vec<Packet> = std::iter::from_fn(|| borrowed.take()).collect();
    assert_eq!(packets.len(), 300);
    for packet in &mut packets {
        packet.append(64).unwrap().fill(0xa5);
    }
    // What is not lent is not touched.
    for (i, packet) in held.into_iter().enumerate() {
        assert!(packet.data().is_empty(), "{i}");
    }
    // The other process is killed with packets in its hands: theirs is the pool's memory all the same.
    std::mem::forget(packets);
    drop(lent);
    assert_eq!(pool.outstanding(), 0);
    let all: Vec<Packet> = std::iter::from_fn(|| pool.take()).collect();
    assert!(all.len() == 900 && all.iter().all(|packet| packet.data().is_empty()));
    // What does not fit the region, or is said twice, is refused.
    let refused = |offset: usize, count: u32, lent: &[std::ops::Range<u32>]| {
        assert!(matches!(Pool::borrowed("wrong", &other, offset, count, lent), Err(PoolError::NotLent { .. })));
    };
    let offset = pool.region_offset();
    refused(usize::MAX - 63, 900, &[0..1]);
    refused(offset + 1, 900, &[0..1]);
    refused(offset, 1 << 20, &[0..1]);
    refused(offset, 900, &[]);
    refused(offset, 900, &[0..901]);
    refused(offset, 900, &[0..4, 3..5]);
    refused(offset, 900, &[4..4]);
    assert!(matches!(Pool::borrowed("wrong", &other, offset, 0, &[0..1]), Err(PoolError::BadSize(0))));
}

#[test]
fn buffers_of_a_chain_that_was_freed_are_posted_one_by_one() {
    let pool = Pool::new("posted", 4).unwrap();
    let mut chain = pool.take().unwrap();
    for _ in 0..3 {
        chain.append_segment(pool.take().unwrap()).unwrap();
    }
    drop(chain);
    // Posted as they are: their metadata is what the chain left.
    let mut slots = [pool.take().unwrap(), pool.take().unwrap()];
    let hand = pool.hand(&pool.blank().in_port(5)).unwrap();
    let first = hand.exchange(&mut slots[0], 1500).unwrap();
    assert!(hand.exchange(&mut slots[0], 2049).is_none(), "more than a buffer holds");
    let second = hand.exchange(&mut slots[0], 2048).unwrap();
    assert!(hand.exchange(&mut slots[1], 60).is_none() && !hand.has(1), "none is free");
    assert_eq!((first.len(), first.rss_hash(), first.verdicts()), (1500, None, Verdicts::NONE));
    assert_eq!((second.len(), second.data().len(), second.rss_hash()), (2048, 2048, None));
    assert!(!first.is_chain() && !second.is_chain() && first.in_port() == 5);
    drop((first, second));
    assert_eq!(pool.outstanding(), 2, "those in the slots");
    drop(slots);
    assert_eq!(pool.outstanding(), 0);
}

/// What a device that is played tells of a packet: its length, and whether something else than usual, and something more, is to be noted.
struct Told(u32, bool, bool);

/// Entries in order, `N` of which are treated at once. A length of 0 ends them.
#[derive(Clone, Copy)]
struct Play<const N: usize>(u32);

impl<const N: usize> Tellings for Play<N> {
    const TOGETHER: usize = N;
    type Entry = Told;
    type Place = AtomicU64;

    fn usual(&self) -> Noted {
        Noted::new(Verdicts::L3_GOOD, true)
    }

    fn next(&mut self, entry: &Told) -> Option<Received> {
        let Told(len, odd, more) = *entry;
        let noted = odd.then(|| Noted::new(Verdicts::L4_BAD, false));
        (len != 0).then(|| Received { over: len.wrapping_sub(60).into(), noted, hash: Some(self.0), more })
    }

    fn took(&mut self) {
        self.0 += 1;
    }

    fn post(&self, place: &AtomicU64, address: u64) {
        place.store(address, Ordering::Relaxed);
    }

    fn note(_: &Told, packet: &mut Packet) {
        packet.set_mark(9);
    }
}

/// Lets the packets of `lens` come in runs of `portion`, as far as they do, and looks at all that is said of them.
fn play<const N: usize>(lens: &[u32], portion: usize) {
    let pool = Pool::new("play", 300).unwrap();
    let mut slots: Vec<_> = (0..64).map(|_| pool.take().unwrap()).collect();
    let filled: Vec<_> = slots.iter().map(Packet::fresh_address).collect();
    let places: Vec<_> = (0..64).map(|_| AtomicU64::new(0)).collect();
    let told: Vec<_> = lens.iter().enumerate().map(|(i, len)| Told(*len, i % 11 == 7, i % 13 == 12)).collect();
    let good = lens.iter().take_while(|len| (60..=1514).contains(*len)).count();
    let mut batch = Batch::new();
    let (mut by, mut got) = (Play::<N>(1000), 0);
    let mut burst = pool.hand(&pool.blank().in_port(5)).unwrap().burst(&mut batch, Lengths::new(60, 1514));
    while got < told.len() {
        let (slots, places, told) = (&mut slots[got..], &places[got..], &told[got..]);
        // In two pieces, as at the end of a ring.
        let pieces = |at: usize| if at < 5 { &told[at..5.min(told.len())] } else { &told[at..] };
        let n = burst.run(slots, places, portion, pieces, &mut by);
        assert_eq!(n, portion.min(good - got).min(told.len()));
        assert_eq!(burst.latest(n).len(), n);
        if n == 0 {
            break;
        }
        got += n;
    }
    assert_eq!(
        (got, by.0, burst.bytes()),
        (good, 1000 + good as u32, lens[..good].iter().map(|len| u64::from(*len)).sum())
    );
    drop(burst);
    assert_eq!(batch.len(), good);
    for (i, packet) in batch.iter().enumerate() {
        let (odd, more) = (i % 11 == 7, i % 13 == 12);
        let verdicts = if odd { Verdicts::L4_BAD } else { Verdicts::L3_GOOD };
        assert_eq!((packet.len() as u32, packet.fresh_address()), (lens[i], filled[i]));
        assert_eq!((packet.rss_hash(), packet.verdicts()), ((!odd).then_some(1000 + i as u32), verdicts));
        assert_eq!((packet.mark(), packet.in_port()), (more.then_some(9), 5));
        assert_eq!(slots[i].fresh_address(), places[i].load(Ordering::Relaxed));
    }
    assert!(slots[good..].iter().zip(&filled[good..]).all(|(packet, at)| packet.fresh_address() == *at));
    assert_eq!(pool.outstanding() as usize, 64 + good);
    drop((batch, slots));
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn filled_buffers_change_places_with_fresh_ones_one_by_one_or_together() {
    for ends in [0, 59, 1515, u32::MAX] {
        for good in (0..30).chain([63, 64]) {
            let mut lens: Vec<_> = (0..64).map(|i| 60 + i * 23).collect();
            if let Some(end) = lens.get_mut(good) {
                *end = ends;
            }
            for portion in [1, 7, 64] {
                play::<0>(&lens, portion);
                play::<4>(&lens, portion);
                play::<8>(&lens, portion);
            }
        }
    }
}

#[test]
fn chains_and_packets_of_other_pools_are_freed_among_others() {
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
