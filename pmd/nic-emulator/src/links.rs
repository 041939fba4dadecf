//! Links between ports, and their impairments.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::fd::RawFd;
use std::path::Path;

use fastrand::Rng;

use crate::host::{Host, Interface, InterfaceKind};
use crate::topology::{Impairments, LinkSpec, PortSpec, Topology};

/// Maximum length of a frame from outside. It exceeds the limit of every port, so that oversized frames are
/// seen as such.
pub(crate) const MAX_FRAME: usize = 16 << 10;
/// Maximum number of frames that are delivered together.
pub(crate) const BURST: usize = 64;

/// The far end of a port's link.
pub(crate) enum LinkEnd {
    None,
    /// A port, as index among all ports. It may be the port itself.
    Port(usize),
    Sink,
    Generator(Generator),
    Interface(Box<dyn Interface>),
    Pcap(Pcap),
}

/// A port's link.
pub(crate) struct Link {
    pub(crate) end: LinkEnd,
    pub(crate) up: bool,
    impair: Impairments,
    /// True if the link has no impairments.
    unimpaired: bool,
    /// Source of the impairments. The same seed gives the same impairments.
    random: Rng,
    /// A frame that is delivered after the next one.
    delayed: Option<Vec<u8>>,
    pub(crate) counters: LinkCounters,
}

/// Counters of the frames that left the port, and of those that came from outside.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LinkCounters {
    pub(crate) delivered: u64,
    pub(crate) lost: u64,
    pub(crate) duplicated: u64,
    pub(crate) corrupted: u64,
    pub(crate) reordered: u64,
    pub(crate) down: u64,
    /// Frames that the far end did not accept.
    pub(crate) refused: u64,
    /// Frames that came from outside.
    pub(crate) arrived: u64,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("up", &self.up).field("counters", &self.counters).finish_non_exhaustive()
    }
}

/// The kernel's interface of a port, for frames that no flow rule takes.
pub(crate) struct KernelPort {
    interface: Box<dyn Interface>,
    /// Frames for the kernel, and those of them that it did not accept.
    pub(crate) received: u64,
    pub(crate) refused: u64,
    /// Frames of the kernel.
    pub(crate) sent: u64,
}

impl std::fmt::Debug for KernelPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelPort").field("received", &self.received).field("sent", &self.sent).finish_non_exhaustive()
    }
}

impl KernelPort {
    /// Opens the interfaces of all ports, in their order; `None` for ports without one.
    ///
    /// # Errors
    /// The interface that cannot be opened, and the cause.
    pub(crate) fn open_all<H: Host>(topology: &Topology, host: &H) -> Result<Vec<Option<Self>>, String> {
        let specs = topology.devices.iter().flat_map(|device| &device.ports);
        let open = |spec: &PortSpec| {
            let interface = host
                .open_interface(InterfaceKind::Kernel { mac: spec.mac, mtu: spec.mtu }, &spec.netdev)
                .map_err(|why| format!("the kernel's interface {}: {why}", spec.netdev))?;
            Ok(Self { interface, received: 0, refused: 0, sent: 0 })
        };
        specs.map(|spec| spec.kernel.then(|| open(spec)).transpose()).collect()
    }

    /// Passes a frame to the kernel.
    pub(crate) fn receive(&mut self, frame: &[u8]) {
        if self.interface.send(frame) { self.received += 1 } else { self.refused += 1 }
    }

    /// Returns the length of the next frame that the kernel sends; `None` if there is none.
    pub(crate) fn send(&mut self, frame: &mut [u8]) -> Option<usize> {
        let length = self.interface.receive(frame)?;
        self.sent += 1;
        Some(length)
    }

    /// Shows the kernel whether the port has a link.
    pub(crate) fn set_carrier(&mut self, up: bool) {
        self.interface.set_carrier(up);
    }

    /// Returns the descriptor that becomes readable when the kernel sends a frame.
    pub(crate) fn descriptor(&self) -> RawFd {
        self.interface.descriptor()
    }
}

/// Opens all links of a topology, in the order of ports.
///
/// # Errors
/// The link that cannot be opened, and the cause.
pub(crate) fn open<H: Host>(topology: &Topology, host: &H) -> Result<Vec<Link>, String> {
    let specs: Vec<_> = topology.devices.iter().flat_map(|device| &device.ports).collect();
    let mut links = Vec::new();
    for (at, spec) in specs.iter().enumerate() {
        let interface = |kind, name: &str| {
            host.open_interface(kind, name).map(LinkEnd::Interface).map_err(|why| format!("link to {name}: {why}"))
        };
        let end = match &spec.link {
            LinkSpec::None => LinkEnd::None,
            LinkSpec::Loop => LinkEnd::Port(at),
            LinkSpec::Cable(_) => {
                let other = specs.iter().enumerate().find(|(i, other)| *i != at && other.link == spec.link);
                other.map_or(LinkEnd::None, |(i, _)| LinkEnd::Port(i))
            }
            LinkSpec::Sink => LinkEnd::Sink,
            LinkSpec::Generator => LinkEnd::Generator(Generator::new(spec.mac)),
            LinkSpec::Tap(name) => interface(InterfaceKind::Tap, name)?,
            LinkSpec::Veth(name) => interface(InterfaceKind::Packet, name)?,
            LinkSpec::Pcap(path) => {
                LinkEnd::Pcap(Pcap::create(path).map_err(|why| format!("link to {}: {why}", path.display()))?)
            }
        };
        let random = Rng::with_seed(topology.seed.wrapping_add(at as u64));
        let unimpaired = spec.impair == Impairments::default();
        let counters = LinkCounters::default();
        links.push(Link { end, up: true, impair: spec.impair, unimpaired, random, delayed: None, counters });
    }
    Ok(links)
}

impl Link {
    /// Returns true if frames that leave the port are only counted.
    pub(crate) fn is_count_only(&self) -> bool {
        matches!(self.end, LinkEnd::Sink | LinkEnd::Generator(_)) && self.unimpaired
    }

    /// Returns the descriptor of a network interface at the far end.
    pub(crate) fn descriptor(&self) -> Option<RawFd> {
        match &self.end {
            LinkEnd::Interface(interface) => Some(interface.descriptor()),
            _ => None,
        }
    }

    /// Sends frames over the link. `deliver` gets those that reach the far end, and returns how many it
    /// accepted.
    pub(crate) fn transmit(&mut self, frames: &[&[u8]], mut deliver: impl FnMut(&mut LinkEnd, &[&[u8]]) -> usize) {
        if !self.up {
            self.counters.down += frames.len() as u64;
            return;
        }
        if self.unimpaired {
            let taken = deliver(&mut self.end, frames);
            self.counters.delivered += taken as u64;
            self.counters.refused += (frames.len() - taken) as u64;
            return;
        }
        for frame in frames {
            self.transmit_impaired(frame, &mut deliver);
        }
    }

    /// Sends a frame over a link with impairments.
    fn transmit_impaired(&mut self, frame: &[u8], mut deliver: impl FnMut(&mut LinkEnd, &[&[u8]]) -> usize) {
        let Self { end, impair, random, delayed, counters, .. } = self;
        let mut send = |frame: &[u8], counters: &mut LinkCounters| {
            if deliver(end, &[frame]) > 0 { counters.delivered += 1 } else { counters.refused += 1 }
        };
        if happens(random, impair.lose) {
            counters.lost += 1;
            return;
        }
        let mut changed;
        let mut frame = frame;
        if happens(random, impair.corrupt) {
            counters.corrupted += 1;
            changed = frame.to_vec();
            let bit = random.usize(..changed.len() * 8);
            changed[bit / 8] ^= 1 << (bit % 8);
            frame = &changed;
        }
        if delayed.is_none() && happens(random, impair.reorder) {
            counters.reordered += 1;
            *delayed = Some(frame.to_vec());
            return;
        }
        send(frame, counters);
        if happens(random, impair.duplicate) {
            counters.duplicated += 1;
            send(frame, counters);
        }
        if let Some(frame) = delayed.take() {
            send(&frame, counters);
        }
    }
}

/// Returns true with a given probability.
fn happens(random: &mut Rng, probability: f64) -> bool {
    probability > 0.0 && random.f64() < probability
}

/// A frame that fills a cache line.
#[repr(align(64))]
struct CacheLine([u8; 64]);

/// Number of flows of a generator; they differ in the UDP source port.
const FLOWS: usize = 256;

/// An endless source of UDP packets in frames of 64 bytes.
pub(crate) struct Generator {
    frames: Box<[CacheLine; FLOWS]>,
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
            CacheLine(frame)
        });
        Self { frames: Box::new(frames), next: 0 }
    }

    /// Passes a burst of frames to `take`, which returns how many it accepted.
    pub(crate) fn generate(&mut self, take: impl FnOnce(&[&[u8]]) -> usize) -> usize {
        let frames: [&[u8]; BURST] = std::array::from_fn(|i| &self.frames[(self.next + i) % FLOWS].0[..]);
        let taken = take(&frames);
        self.next = (self.next + taken) % FLOWS;
        taken
    }
}

/// A pcap file of sent frames. Its timestamps are frame numbers, so that the same run gives the same file.
///
/// The writer of the crate `pcap-file` cannot flush after a frame, which would lose frames when a program is killed.
pub(crate) struct Pcap {
    file: BufWriter<File>,
    frames: u32,
}

impl Pcap {
    fn create(path: &Path) -> std::io::Result<Self> {
        let mut file = BufWriter::new(File::create(path)?);
        // Magic number, version 2.4, time zone, accuracy, snap length, link type Ethernet.
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
            // The file is complete even if the program is killed.
            && self.file.flush().is_ok()
    }
}
