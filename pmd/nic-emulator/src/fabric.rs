//! The links between ports, and what they do to frames.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::fd::RawFd;
use std::path::Path;

use crate::host::{Host, Wire, WireKind};
use crate::topology::{Impairments, LinkSpec, Topology};

/// Longest frame from outside: longer than any port takes, so that what is too long is seen as such.
pub(crate) const LONGEST: usize = 16 << 10;
/// Frames that arrive together at most.
pub(crate) const TOGETHER: usize = 64;

/// The far end of a port's link.
pub(crate) enum End {
    None,
    /// A port among all ports: another one, or the same.
    Port(usize),
    Sink,
    Generator(Generator),
    Wire(Box<dyn Wire>),
    Pcap(Pcap),
}

/// A port's link.
pub(crate) struct Link {
    pub(crate) end: End,
    pub(crate) up: bool,
    impair: Impairments,
    /// It does nothing to frames.
    clean: bool,
    random: Random,
    /// A frame that the next one overtakes.
    late: Option<Vec<u8>>,
    pub(crate) counters: LinkCounters,
}

/// What a link did to frames that left its port.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LinkCounters {
    pub(crate) delivered: u64,
    pub(crate) lost: u64,
    pub(crate) duplicated: u64,
    pub(crate) corrupted: u64,
    pub(crate) reordered: u64,
    pub(crate) down: u64,
    /// The far end did not take it.
    pub(crate) refused: u64,
    /// Came from outside.
    pub(crate) arrived: u64,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("up", &self.up).field("counters", &self.counters).finish_non_exhaustive()
    }
}

/// Opens all links of a topology, ports in order.
///
/// # Errors
/// Which link cannot be opened, and why.
pub(crate) fn open<H: Host>(topology: &Topology, host: &H) -> Result<Vec<Link>, String> {
    let specs: Vec<_> = topology.devices.iter().flat_map(|device| &device.ports).collect();
    let mut links = Vec::new();
    for (at, spec) in specs.iter().enumerate() {
        let wire = |kind, name: &str| {
            host.open_wire(kind, name).map(End::Wire).map_err(|why| format!("link to {name}: {why}"))
        };
        let end = match &spec.link {
            LinkSpec::None => End::None,
            LinkSpec::Loop => End::Port(at),
            LinkSpec::Cable(_) => {
                let other = specs.iter().enumerate().find(|(i, other)| *i != at && other.link == spec.link);
                other.map_or(End::None, |(i, _)| End::Port(i))
            }
            LinkSpec::Sink => End::Sink,
            LinkSpec::Generator => End::Generator(Generator::new(spec.mac)),
            LinkSpec::Tap(name) => wire(WireKind::Tap, name)?,
            LinkSpec::Veth(name) => wire(WireKind::Packet, name)?,
            LinkSpec::Pcap(path) => {
                End::Pcap(Pcap::create(path).map_err(|why| format!("link to {}: {why}", path.display()))?)
            }
        };
        let random = Random(topology.seed.wrapping_add(at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let clean = spec.impair == Impairments::default();
        let counters = LinkCounters::default();
        links.push(Link { end, up: true, impair: spec.impair, clean, random, late: None, counters });
    }
    Ok(links)
}

impl Link {
    /// Whether frames that leave here are counted and nothing else.
    pub(crate) fn only_counts(&self) -> bool {
        matches!(self.end, End::Sink | End::Generator(_)) && self.clean
    }

    /// The descriptor of an outside end.
    pub(crate) fn descriptor(&self) -> Option<RawFd> {
        match &self.end {
            End::Wire(wire) => Some(wire.descriptor()),
            _ => None,
        }
    }

    /// Sends frames over the link: what the far end gets goes to `deliver`, which says how many were taken.
    pub(crate) fn carry(&mut self, frames: &[&[u8]], mut deliver: impl FnMut(&mut End, &[&[u8]]) -> usize) {
        if !self.up {
            self.counters.down += frames.len() as u64;
            return;
        }
        if self.clean {
            let taken = deliver(&mut self.end, frames);
            self.counters.delivered += taken as u64;
            self.counters.refused += (frames.len() - taken) as u64;
            return;
        }
        for frame in frames {
            self.carry_one(frame, &mut deliver);
        }
    }

    /// With what the link does to frames.
    fn carry_one(&mut self, frame: &[u8], mut deliver: impl FnMut(&mut End, &[&[u8]]) -> usize) {
        let Self { end, impair, random, late, counters, .. } = self;
        let mut hand = |frame: &[u8], counters: &mut LinkCounters| {
            if deliver(end, &[frame]) > 0 { counters.delivered += 1 } else { counters.refused += 1 }
        };
        if random.happens(impair.lose) {
            counters.lost += 1;
            return;
        }
        let mut changed;
        let mut frame = frame;
        if random.happens(impair.corrupt) {
            counters.corrupted += 1;
            changed = frame.to_vec();
            let bit = random.next() as usize % (changed.len() * 8);
            changed[bit / 8] ^= 1 << (bit % 8);
            frame = &changed;
        }
        if late.is_none() && random.happens(impair.reorder) {
            counters.reordered += 1;
            *late = Some(frame.to_vec());
            return;
        }
        hand(frame, counters);
        if random.happens(impair.duplicate) {
            counters.duplicated += 1;
            hand(frame, counters);
        }
        if let Some(frame) = late.take() {
            hand(&frame, counters);
        }
    }
}

/// A small random generator (xorshift64*): the same seed gives the same faults.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
    }

    fn happens(&mut self, share: f64) -> bool {
        share > 0.0 && (self.next() as f64) < share * (1u64 << 53) as f64
    }
}

/// A frame that fills a line of memory.
#[repr(align(64))]
struct Line([u8; 64]);

/// Flows of a generator, by source port.
const FLOWS: usize = 256;

/// An endless source of UDP packets of 64 bytes.
pub(crate) struct Generator {
    frames: Box<[Line; FLOWS]>,
    next: usize,
}

impl Generator {
    fn new(to: [u8; 6]) -> Self {
        let frames = std::array::from_fn(|flow| {
            let mut frame = [0u8; 64];
            frame[..6].copy_from_slice(&to);
            frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0xee, 0xee]);
            frame[12..14].copy_from_slice(&[0x08, 0x00]);
            let ip: [u8; 20] = [0x45, 0, 0, 50, 0, 0, 0x40, 0, 64, 17, 0, 0, 198, 18, 0, 1, 198, 18, 0, 2];
            frame[14..34].copy_from_slice(&ip);
            let checksum = !crate::frame::fold(crate::frame::sum(&ip));
            frame[24..26].copy_from_slice(&checksum.to_be_bytes());
            frame[34..36].copy_from_slice(&(1024 + flow as u16).to_be_bytes());
            frame[36..38].copy_from_slice(&9u16.to_be_bytes());
            frame[38..40].copy_from_slice(&30u16.to_be_bytes());
            Line(frame)
        });
        Self { frames: Box::new(frames), next: 0 }
    }

    /// Offers frames: `take` says how many of them were taken.
    pub(crate) fn offer(&mut self, take: impl FnOnce(&[&[u8]]) -> usize) -> usize {
        let frames: [&[u8]; TOGETHER] = std::array::from_fn(|i| &self.frames[(self.next + i) % FLOWS].0[..]);
        let taken = take(&frames);
        self.next = (self.next + taken) % FLOWS;
        taken
    }
}

/// A pcap file of what is sent, numbered instead of timed: the same run gives the same file.
pub(crate) struct Pcap {
    file: BufWriter<File>,
    frames: u32,
}

impl Pcap {
    fn create(path: &Path) -> std::io::Result<Self> {
        let mut file = BufWriter::new(File::create(path)?);
        // Magic, version 2.4, zone, accuracy, snap length, Ethernet.
        for word in [0xa1b2_c3d4u32, 0x0004_0002, 0, 0, 1 << 18, 1] {
            file.write_all(&word.to_ne_bytes())?;
        }
        file.flush()?;
        Ok(Self { file, frames: 0 })
    }

    pub(crate) fn write(&mut self, frame: &[u8]) -> bool {
        let length = frame.len() as u32;
        let header = [self.frames / 1_000_000, self.frames % 1_000_000, length, length];
        self.frames = self.frames.wrapping_add(1);
        header.iter().all(|word| self.file.write_all(&word.to_ne_bytes()).is_ok())
            && self.file.write_all(frame).is_ok()
            // A program that is killed leaves a whole file.
            && self.file.flush().is_ok()
    }
}
