// UNSAFETY: works on raw memory as a lower bound for the cost of abstractions. Nothing depends on it.
#![allow(unsafe_code, missing_docs, clippy::undocumented_unsafe_blocks, clippy::cast_ptr_alignment)]

//! The floor: cost of the bare work on one core, without any generality. It is a reference for the cost of
//! abstractions, not a design: fixed headers, one table, no statistics and no error handling. `--help` describes the
//! arguments.

use std::arch::x86_64::*;
use std::time::Instant;

use clap::Parser;
use wirepath::cli;

const BURST: usize = 32;
const STRIDE: usize = 2368; // odd multiple of 64
const DATA: usize = 64 + 256; // metadata line + headroom

#[repr(C, align(64))]
struct Meta {
    offset: u16,
    len: u16,
    rest: [u8; 60],
}

#[repr(C, align(32))]
#[derive(Clone, Copy, Default)]
struct Entry {
    key: [u64; 3],
    used: u64,
}

/// A FIFO pool, so that all `buffers` rotate.
struct Pool {
    ring: Vec<*mut u8>,
    head: usize,
}

impl Pool {
    #[inline(always)]
    fn take(&mut self, out: &mut [*mut u8; BURST]) {
        let n = self.ring.len();
        for slot in out.iter_mut() {
            *slot = self.ring[self.head];
            self.head = if self.head + 1 == n { 0 } else { self.head + 1 };
        }
    }
}

#[inline(always)]
unsafe fn hash(key: [u64; 3]) -> usize {
    unsafe { _mm_crc32_u64(_mm_crc32_u64(_mm_crc32_u64(0, key[0]), key[1]), key[2]) as usize }
}

fn insert(table: &mut [Entry], key: [u64; 3]) {
    let mask = table.len() - 1;
    let mut at = unsafe { hash(key) } & mask;
    while table[at].used != 0 {
        if table[at].key == key {
            return;
        }
        at = (at + 1) & mask;
    }
    table[at] = Entry { key, used: 1 };
}

#[inline(always)]
unsafe fn find(table: &[Entry], h: usize, key: [u64; 3]) -> bool {
    let mask = table.len() - 1;
    let mut at = h & mask;
    loop {
        let e = unsafe { table.get_unchecked(at) };
        if e.key == key {
            return true;
        }
        if e.used == 0 {
            return false;
        }
        at = (at + 1) & mask;
    }
}

#[inline(always)]
unsafe fn u16be(p: *const u8) -> u16 {
    unsafe { u16::from_be((p as *const u16).read_unaligned()) }
}

/// Returns addresses, ports and protocol of an IPv4/UDP frame at `d`.
#[inline(always)]
unsafe fn five_tuple(d: *const u8) -> [u64; 3] {
    unsafe {
        [
            (d.add(26) as *const u64).read_unaligned(),
            (d.add(34) as *const u32).read_unaligned() as u64,
            *d.add(23) as u64,
        ]
    }
}

/// Returns addresses, ports and protocol of a random flow.
fn random_tuple(i: usize) -> [u64; 3] {
    let mut random = fastrand::Rng::with_seed(i as u64);
    [random.u64(..), random.u32(..).into(), 17]
}

#[inline(always)]
unsafe fn mac(d: *const u8) -> [u64; 3] {
    unsafe { [(d as *const u64).read_unaligned() & 0xffff_ffff_ffff, 0, 1] }
}

fn inner_frame(i: usize) -> [u8; 64] {
    let mut f = [0u8; 64];
    f[..6].copy_from_slice(&[2, 0x66, 0x77, (i >> 16) as u8, (i >> 8) as u8, i as u8]);
    f[6..12].copy_from_slice(&[2, 0x11, 0x22, 0x33, 0x44, 0x55]);
    f[12] = 8;
    f[14] = 0x45;
    f[17] = 50;
    f[22] = 64;
    f[23] = 17;
    f[26..34].copy_from_slice(&[192, 168, 1, 1, 192, 168, 2, 1]);
    f[34..36].copy_from_slice(&((1024 + i % 60000) as u16).to_be_bytes());
    f[36..38].copy_from_slice(&((2000 + i / 60000) as u16).to_be_bytes());
    f
}

const OUTER: [u8; 50] = [
    2, 0, 0, 0, 0, 0x99, 2, 0, 0, 0, 0, 1, 8, 0, 0x45, 0, 0, 100, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 9, 0, 1, 10, 9, 0,
    2, 0xc0, 0, 0x12, 0xb5, 0, 80, 0, 0, 8, 0, 0, 0, 0, 0, 10, 0,
];

/// Measures the bare work on one core as a lower bound: cycles of the time-stamp counter per packet, and packets per
/// second
#[derive(Debug, Parser)]
#[command(name = "wirepath-floor", version, term_width = cli::HELP_WIDTH)]
struct Arguments {
    /// Work per packet. table looks up numbered flows, which CRC32C distributes without collisions; random looks up
    /// random flows, which collide; both has encap and decap in turn, and looks up sources too
    #[arg(value_parser = ["io", "macswap", "encap", "decap", "both", "table", "random"], default_value = "encap")]
    mode: String,

    /// Number of flows
    #[arg(default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16_000_000))]
    flows: u32,

    /// Number of buffers that rotate
    #[arg(default_value_t = 32, value_parser = clap::value_parser!(u32).range(32..=1_000_000))]
    buffers: u32,

    /// Time of the measurement
    #[arg(default_value_t = 2.0)]
    seconds: f64,
}

fn main() {
    let Arguments { mode, flows, buffers, seconds } = Arguments::parse();
    let (mode, flows, buffers) = (mode.as_str(), flows as usize, buffers as usize);

    let layout = std::alloc::Layout::from_size_align(buffers * STRIDE, 1 << 21).unwrap();
    let memory = unsafe { std::alloc::alloc_zeroed(layout) };
    let mut pool = Pool { ring: (0..buffers).map(|i| unsafe { memory.add(i * STRIDE) }).collect(), head: 0 };
    if mode == "both" {
        return measure_bridge(Bridge::new(flows), pool, seconds);
    }

    let mut table = vec![Entry::default(); (flows * 2).next_power_of_two().max(64)];
    let frames: Vec<[u8; 114]> = (0..flows)
        .map(|i| {
            let mut f = [0u8; 114];
            if mode == "decap" {
                f[..50].copy_from_slice(&OUTER);
                f[50..].copy_from_slice(&inner_frame(i));
            } else {
                f[..64].copy_from_slice(&inner_frame(i));
            }
            f
        })
        .collect();
    for i in 0..flows {
        let f = inner_frame(i);
        let key = match mode {
            "decap" => unsafe { mac(f.as_ptr()) },
            "random" => random_tuple(i),
            _ => unsafe { five_tuple(f.as_ptr()) },
        };
        insert(&mut table, key);
    }
    let frame_len = if mode == "decap" { 114 } else { 64 };
    let lookups = mode == "table" || mode == "random";
    let keys: Vec<[u64; 3]> = if lookups {
        let mut random = fastrand::Rng::with_seed(1);
        (0..1 << 20)
            .map(|_| {
                let i = random.usize(..flows);
                if mode == "random" { random_tuple(i) } else { unsafe { five_tuple(inner_frame(i).as_ptr()) } }
            })
            .collect()
    } else {
        Vec::new()
    };

    let (mut flow, mut packets, mut errors, mut at) = (0usize, 0u64, 0u64, 0usize);
    let mut burst = [std::ptr::null_mut(); BURST];
    let (start, tsc) = (Instant::now(), unsafe { _rdtsc() });
    while start.elapsed().as_secs_f64() < seconds {
        for _ in 0..2000 {
            unsafe {
                if lookups {
                    let batch = &keys[at..at + BURST];
                    at = (at + BURST) & ((1 << 20) - 1);
                    let mut h = [0; BURST];
                    for i in 0..BURST {
                        h[i] = hash(batch[i]);
                        _mm_prefetch(table.as_ptr().add(h[i] & (table.len() - 1)) as *const i8, _MM_HINT_T0);
                    }
                    for i in 0..BURST {
                        errors += !find(&table, h[i], batch[i]) as u64;
                    }
                    packets += BURST as u64;
                    continue;
                }
                pool.take(&mut burst);
                for &b in &burst {
                    let m = &mut *(b as *mut Meta);
                    m.offset = DATA as u16;
                    m.len = frame_len as u16;
                }
                match mode {
                    "io" => {}
                    "macswap" => {
                        for &b in &burst {
                            let d = b.add((*(b as *const Meta)).offset as usize);
                            let dst = (d as *const u64).read_unaligned() & 0xffff_ffff_ffff;
                            let src = (d.add(4) as *const u64).read_unaligned() >> 16;
                            (d as *mut u64).write_unaligned(src | dst << 48);
                            (d.add(8) as *mut u32).write_unaligned((dst >> 16) as u32);
                        }
                    }
                    _ => {
                        for &b in &burst {
                            std::ptr::copy_nonoverlapping(frames[flow].as_ptr(), b.add(DATA), frame_len);
                            flow = if flow + 1 == flows { 0 } else { flow + 1 };
                        }
                        let (mut h, mut k) = ([0; BURST], [[0u64; 3]; BURST]);
                        for i in 0..BURST {
                            let m = &*(burst[i] as *const Meta);
                            let d = burst[i].add(m.offset as usize);
                            if u16be(d.add(12)) != 0x800 || *d.add(14) != 0x45 || u16be(d.add(16)) + 14 > m.len {
                                errors += 1;
                            }
                            if mode == "decap" {
                                let vni = (d.add(46) as *const u32).read_unaligned().swap_bytes() >> 8;
                                if *d.add(23) != 17 || u16be(d.add(36)) != 4789 || *d.add(42) != 8 || vni != 10 {
                                    errors += 1;
                                }
                                k[i] = mac(d.add(50));
                            } else {
                                k[i] = five_tuple(d);
                            }
                            h[i] = hash(k[i]);
                            _mm_prefetch(table.as_ptr().add(h[i] & (table.len() - 1)) as *const i8, _MM_HINT_T0);
                        }
                        for i in 0..BURST {
                            errors += !find(&table, h[i], k[i]) as u64;
                            let m = &mut *(burst[i] as *mut Meta);
                            if mode == "decap" {
                                m.offset += 50;
                                m.len -= 50;
                                continue;
                            }
                            m.offset -= 50;
                            m.len += 50;
                            let d = burst[i].add(m.offset as usize);
                            std::ptr::copy_nonoverlapping(OUTER.as_ptr(), d, 50);
                            let ip_len = m.len - 14;
                            (d.add(16) as *mut u16).write_unaligned(ip_len.to_be());
                            let mut sum = 0xd926u32 + ip_len as u32; // the other words of this header
                            sum = (sum & 0xffff) + (sum >> 16);
                            (d.add(24) as *mut u16).write_unaligned((!(sum as u16)).to_be());
                            (d.add(38) as *mut u16).write_unaligned((ip_len - 20).to_be());
                            (d.add(34) as *mut u16).write_unaligned((0xc000 | h[i] as u16 & 0x3fff).to_be());
                        }
                    }
                }
            }
            packets += BURST as u64;
            std::hint::black_box(&mut pool);
        }
    }
    let (cycles, elapsed) = (unsafe { _rdtsc() } - tsc, start.elapsed().as_secs_f64());
    assert_eq!(errors, 0);
    println!("{:.1} cycles/packet, {:.0} packets/s", cycles as f64 / packets as f64, packets as f64 / elapsed);
}

// The bridge has functions of its own, down to the checks of headers: the loop of the other modes took up to a tenth
// longer when they shared some.

/// A host and the side of the gateway where it is.
#[repr(C, align(16))]
#[derive(Clone, Copy, Default)]
struct Host {
    mac: u64,
    side: u64,
}

impl Host {
    fn insert(self, hosts: &mut [Self]) {
        let mask = hosts.len() - 1;
        let mut at = unsafe { host_hash(self.mac) } & mask;
        while hosts[at].side != 0 {
            at = (at + 1) & mask;
        }
        hosts[at] = self;
    }
}

/// Returns the side of a host; 0 if it is not known.
#[inline(always)]
unsafe fn side_of(hosts: &[Host], h: usize, mac: u64) -> u64 {
    let mask = hosts.len() - 1;
    let mut at = h & mask;
    loop {
        let host = unsafe { hosts.get_unchecked(at) };
        if host.mac == mac || host.side == 0 {
            return host.side;
        }
        at = (at + 1) & mask;
    }
}

/// Returns whether the frame at `d` has an IPv4 packet within its length.
#[inline(always)]
unsafe fn is_ipv4(d: *const u8, len: u16) -> bool {
    unsafe { u16be(d.add(12)) == 0x800 && *d.add(14) == 0x45 && u16be(d.add(16)) + 14 <= len }
}

/// Returns whether the IPv4 packet at `d` is in the one VXLAN segment.
#[inline(always)]
unsafe fn is_vxlan(d: *const u8) -> bool {
    unsafe {
        let vni = (d.add(46) as *const u32).read_unaligned().swap_bytes() >> 8;
        *d.add(23) == 17 && u16be(d.add(36)) == 4789 && *d.add(42) == 8 && vni == 10
    }
}

/// Puts the outer headers in front of a frame.
#[inline(always)]
unsafe fn add_outer(buffer: *mut u8, m: &mut Meta, hash: usize) {
    m.offset -= 50;
    m.len += 50;
    unsafe {
        let d = buffer.add(m.offset as usize);
        std::ptr::copy_nonoverlapping(OUTER.as_ptr(), d, 50);
        let ip_len = m.len - 14;
        (d.add(16) as *mut u16).write_unaligned(ip_len.to_be());
        let mut sum = 0xd926u32 + ip_len as u32; // the other words of this header
        sum = (sum & 0xffff) + (sum >> 16);
        (d.add(24) as *mut u16).write_unaligned((!(sum as u16)).to_be());
        (d.add(38) as *mut u16).write_unaligned((ip_len - 20).to_be());
        (d.add(34) as *mut u16).write_unaligned((0xc000 | hash as u16 & 0x3fff).to_be());
    }
}

/// Sides of the gateway: the value of [`Host::side`].
const LOCAL: u64 = 1;
const DISTANT: u64 = 2;

/// Returns the Ethernet address of a host on a side.
fn host(side: u64, i: usize) -> [u8; 6] {
    [2, side as u8, 0x77, (i >> 16) as u8, (i >> 8) as u8, i as u8]
}

/// Returns the inner frame of a flow from one side to the other.
fn frame_from(side: u64, i: usize) -> [u8; 64] {
    let mut frame = inner_frame(i);
    frame[..6].copy_from_slice(&host(LOCAL + DISTANT - side, i));
    frame[6..12].copy_from_slice(&host(side, i));
    frame
}

/// Hash of an Ethernet address.
#[inline(always)]
unsafe fn host_hash(mac: u64) -> usize {
    unsafe { _mm_crc32_u64(0, mac) as usize }
}

/// A bridge between both sides that has learned all hosts, and frames of the same flows from each side.
struct Bridge {
    hosts: Vec<Host>,
    local: Vec<[u8; 64]>,
    distant: Vec<[u8; 114]>,
    /// First flow of the next burst, and its side.
    next: (usize, u64),
}

impl Bridge {
    fn new(flows: usize) -> Self {
        let mut hosts = vec![Host::default(); (flows * 4).next_power_of_two().max(64)];
        for side in [LOCAL, DISTANT] {
            for i in 0..flows {
                let mac = unsafe { mac(frame_from(side, i)[6..].as_ptr())[0] };
                Host { mac, side }.insert(&mut hosts);
            }
        }
        let local = (0..flows).map(|i| frame_from(LOCAL, i)).collect();
        let distant = (0..flows).map(|i| tunnelled(&frame_from(DISTANT, i))).collect();
        Self { hosts, local, distant, next: (0, LOCAL) }
    }

    /// Receives a burst from the sides in turn and forwards it. Returns the number of packets that are wrong.
    #[inline(always)]
    unsafe fn turn(&mut self, burst: &[*mut u8; BURST]) -> u64 {
        unsafe {
            if self.next.1 == LOCAL {
                copy_frames(&self.local, self.next.0, burst);
                self.next.1 = DISTANT;
                self.forward(burst, LOCAL)
            } else {
                self.next = (copy_frames(&self.distant, self.next.0, burst), LOCAL);
                self.forward(burst, DISTANT)
            }
        }
    }

    /// Forwards a burst from a side: looks up destination and source of each frame.
    #[inline(always)]
    unsafe fn forward(&self, burst: &[*mut u8; BURST], side: u64) -> u64 {
        let (mut h, mut k) = ([[0; 2]; BURST], [[0u64; 2]; BURST]);
        let mut errors = 0;
        unsafe {
            for i in 0..BURST {
                let m = &*(burst[i] as *const Meta);
                let mut d = burst[i].add(m.offset as usize);
                if !is_ipv4(d, m.len) {
                    errors += 1;
                }
                if side == DISTANT {
                    if !is_vxlan(d) {
                        errors += 1;
                    }
                    d = d.add(50);
                }
                k[i] = [mac(d)[0], mac(d.add(6))[0]];
                for (h, key) in h[i].iter_mut().zip(k[i]) {
                    *h = host_hash(key);
                    _mm_prefetch(self.hosts.as_ptr().add(*h & (self.hosts.len() - 1)) as *const i8, _MM_HINT_T0);
                }
            }
            for i in 0..BURST {
                errors += (side_of(&self.hosts, h[i][0], k[i][0]) != LOCAL + DISTANT - side) as u64;
                errors += (side_of(&self.hosts, h[i][1], k[i][1]) != side) as u64;
                let m = &mut *(burst[i] as *mut Meta);
                if side == DISTANT {
                    m.offset += 50;
                    m.len -= 50;
                } else {
                    let flow = hash(five_tuple(burst[i].add(m.offset as usize)));
                    add_outer(burst[i], m, flow);
                }
            }
        }
        errors
    }
}

/// Copies frames into a burst, from a flow on. Returns the flow behind the last one.
#[inline(always)]
unsafe fn copy_frames<const N: usize>(frames: &[[u8; N]], mut flow: usize, burst: &[*mut u8; BURST]) -> usize {
    for &b in burst {
        unsafe {
            let m = &mut *(b as *mut Meta);
            (m.offset, m.len) = (DATA as u16, N as u16);
            std::ptr::copy_nonoverlapping(frames[flow].as_ptr(), b.add(DATA), N);
        }
        flow = if flow + 1 == frames.len() { 0 } else { flow + 1 };
    }
    flow
}

/// Returns a frame behind the outer headers.
fn tunnelled(inner: &[u8; 64]) -> [u8; 114] {
    let mut frame = [0; 114];
    frame[..50].copy_from_slice(&OUTER);
    frame[50..].copy_from_slice(inner);
    frame
}

/// Measures a bridge.
#[inline(never)]
fn measure_bridge(mut bridge: Bridge, mut pool: Pool, seconds: f64) {
    let (mut packets, mut errors) = (0, 0);
    let mut burst = [std::ptr::null_mut(); BURST];
    let (start, tsc) = (Instant::now(), unsafe { _rdtsc() });
    while start.elapsed().as_secs_f64() < seconds {
        for _ in 0..2000 {
            pool.take(&mut burst);
            errors += unsafe { bridge.turn(&burst) };
            packets += BURST as u64;
            std::hint::black_box(&mut pool);
        }
    }
    let (cycles, elapsed) = (unsafe { _rdtsc() } - tsc, start.elapsed().as_secs_f64());
    assert_eq!(errors, 0);
    println!("{:.1} cycles/packet, {:.0} packets/s", cycles as f64 / packets as f64, packets as f64 / elapsed);
}
