//! `pcap`: receives the frames of a pcap or pcapng file, and writes transmitted frames to another.
//!
//! ```toml
//! [[port]]
//! name = "replay"
//! driver = "pcap"
//! [port.pcap]
//! read = "in.pcap"
//! write = "out.pcapng"
//! ```
//!
//! - The worker that owns the queue reads and writes the files. Reading takes 320 KiB of memory for any file,
//!   and one read(2) for each 64 to 320 KiB. Writing collects 256 KiB for each write(2). Both may block on
//!   the disk.
//! - The written file may be a FIFO, for example with `tshark -i` as its reader. It needs a reader at the start, and
//!   its writes never wait. When the reader is slow, the port takes no packets, which the workers count as `tx_full`.
//!   A reader that ends is a loss of the port. The port reads regular files only.
//! - While the pool has no free buffer the port reads nothing, so no frame is lost.
//! - At the end of the file the port reports [`PortEvent::Finished`]. A file that ends inside a record counts
//!   as `file_cut_off` and is finished too. A malformed file is lost ([`PortEvent::Lost`]); the event names
//!   the offset.
//! - Frames that were captured incompletely are received as captured, and counted as `frames_captured_short`.
//! - The written file is flushed once a second and when the port stops. It consists of whole records at any
//!   time.
//! - A stopped port can be started again. Reading and writing then continue.
//!
//! The crate `pcap-file` 2.0 was not usable here. It refuses captures with a snap length below the frames'
//! length and takes every pcapng timestamp for nanoseconds. It also fails on a comment that is not UTF-8, and
//! allocates for every packet with options.

pub mod blocks;
mod format;
mod queues;
mod reader;
#[cfg(test)]
mod tests;
mod writer;

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub use format::{FileError, Format, MAX_FRAME, Precision};
use queues::{Replay, Sink, Source};
pub use reader::{Reader, Record};
use rustix::fs::OFlags;
use rustix::io::Errno;
pub use writer::Writer;

use rustix::fs::{Access, AtFlags, CWD, accessat};

use crate::drivers::{Candidate, Driver};
use crate::port::{
    Capabilities, Device, DeviceLink, DeviceStatistics, Link, Offloads, PortConfig, PortError, PortEvent, PortSpec,
    Queues,
};
use wirepath_packet::MAX_PACKET;
use wirepath_packet::counters::Counter;
use wirepath_settings::{Choice, ConfigError, ConfigTable, Integer, Key, Number, Settings, Text, WithDefault};

/// Flag of open(2): neither the call nor later reads and writes wait for a peer.
const O_NONBLOCK: i32 = OFlags::NONBLOCK.bits().cast_signed();
/// Time that the reader of a FIFO has to take the rest when a port stops.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(200);

const READ: Key<Text> = Key::text("read", "path of a file")
    .absent("the `device` of the port; without both, the port receives nothing")
    .about("File whose frames the port receives: pcap or pcapng, detected by its content.");
const TIMING: Key<WithDefault<Choice<bool>>> = Key::choice(
    "timing",
    &[
        ("fast", false, "as fast as the port is polled"),
        ("original", true, "with the intervals of the timestamps, divided by `speed`"),
    ],
)
.default_word("fast")
.about("Times at which the frames of the file are received.");
const SPEED: Key<WithDefault<Number>> = Key::number("speed", 1e-6, 1e6)
    .default(1.0)
    .when("timing = \"original\"")
    .about("Factor by which frames are received faster than they were captured: 2.0 is twice as fast.");
const LOOP: Key<WithDefault<Integer<u64>>> =
    Key::integer("loop", 0..=i64::MAX).default(1).about("Passes over the file. 0: for ever.");
const WRITE: Key<Text> = Key::text("write", "path of a file")
    .absent("sent frames are discarded")
    .about("File to which the port writes sent frames. An existing file is overwritten.");
const FORMAT: Key<Choice<Format>> = Key::choice(
    "format",
    &[
        ("pcap", Format::Pcap, "the classic format"),
        ("pcapng", Format::Pcapng, "the format with interfaces and comments"),
    ],
)
.absent("by the suffix of `write`: .pcap, .cap, .dmp, .pcapng or .ntar")
.about("Format of the written file.");
const PRECISION: Key<WithDefault<Choice<Precision>>> = Key::choice(
    "precision",
    &[("nano", Precision::Nano, "nanoseconds"), ("micro", Precision::Micro, "microseconds, which every tool reads")],
)
.default_word("nano")
.about("Unit of the written timestamps.");
const SNAP: Key<WithDefault<Integer<u32>>> = Key::integer("snap", 64..=MAX_FRAME as i64)
    .unit("bytes")
    .default(MAX_FRAME as u32)
    .about("Bytes of a frame that are written at most.");

static TABLE: ConfigTable = ConfigTable {
    name: "pcap",
    about: "Settings of driver = \"pcap\". At least one of `read`, `write` and the port's `device` is needed.",
    absent: "the port reads the file that `device` names",
    keys: &[&READ, &TIMING, &SPEED, &LOOP, &WRITE, &FORMAT, &PRECISION, &SNAP],
    example: "[port.pcap]\nread = \"in.pcap\"\nwrite = \"out.pcapng\"\n",
    ..ConfigTable::EMPTY
};

/// The driver.
#[derive(Debug)]
pub struct Pcap;

/// Times at which the frames of a file are received.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Timing {
    /// As fast as the port is polled.
    Fast,
    /// With the intervals of their timestamps, divided by this factor. A timestamp that goes back counts as
    /// no interval.
    Original(f64),
}

/// Options of a `pcap` port.
#[derive(Clone, Debug)]
pub struct Options {
    /// File to receive from.
    pub read: Option<PathBuf>,
    /// When its frames are received.
    pub timing: Timing,
    /// Number of passes over the file; `None` for ever.
    pub passes: Option<u64>,
    /// File to write to.
    pub write: Option<PathBuf>,
    /// Format of the written file.
    pub format: Format,
    /// Unit of the written timestamps.
    pub precision: Precision,
    /// Maximum bytes of a frame that are written.
    pub snap: u32,
}

impl Default for Options {
    /// Neither reads nor writes. One pass, fast, pcapng with nanoseconds, whole frames.
    fn default() -> Self {
        Self {
            read: None,
            timing: Timing::Fast,
            passes: Some(1),
            write: None,
            format: Format::Pcapng,
            precision: Precision::Nano,
            snap: MAX_FRAME as u32,
        }
    }
}

impl Driver for Pcap {
    fn name(&self) -> &'static str {
        "pcap"
    }

    fn about(&self) -> &'static str {
        "receives the frames of a capture file and writes what is transmitted to another"
    }

    fn table(&self) -> &'static ConfigTable {
        &TABLE
    }

    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn PortSpec>, ConfigError> {
        Ok(Box::new(Options::from_settings(device, settings)?))
    }

    fn candidates(&self) -> Vec<Candidate> {
        vec![Candidate {
            device: "any file".to_owned(),
            usable: Ok("pcap or pcapng file of Ethernet frames".to_owned()),
        }]
    }
}

impl Options {
    fn from_settings(device: Option<&str>, settings: &Settings<'_>) -> Result<Self, ConfigError> {
        let read = settings.read(&READ)?;
        if read.is_some() && device.is_some() {
            return Err(settings.error_in(&READ, "the port's device names a file to read already; keep one of the two"));
        }
        let read = read.or_else(|| device.map(str::to_owned)).map(PathBuf::from);
        let write = settings.read(&WRITE)?.map(PathBuf::from);
        if read.is_none() && write.is_none() {
            return Err(settings.error("read: missing, expected a file to read, or one to write (write)"));
        }
        if read.is_some() && read == write {
            return Err(settings.error_in(&WRITE, "the file that is read would be overwritten"));
        }
        let format = match settings.read(&FORMAT)? {
            Some(format) => format,
            None => match write.as_deref().and_then(Path::extension).and_then(|suffix| suffix.to_str()) {
                Some("pcap" | "cap" | "dmp") => Format::Pcap,
                Some("pcapng" | "ntar") => Format::Pcapng,
                _ if write.is_none() => Format::Pcapng,
                _ => {
                    let message = "cannot tell the format by the suffix; expected .pcap or .pcapng, or format";
                    return Err(settings.error_in(&WRITE, message));
                }
            },
        };
        let original = settings.read(&TIMING)?;
        let speed = settings.read(&SPEED)?;
        if settings.has(&SPEED) && !original {
            return Err(settings.error_in(&SPEED, "has a meaning only with timing = \"original\""));
        }
        let timing = if original { Timing::Original(speed) } else { Timing::Fast };
        let passes = settings.read(&LOOP)?;
        let precision = settings.read(&PRECISION)?;
        Ok(Self {
            read,
            timing,
            passes: (passes > 0).then_some(passes),
            write,
            format,
            precision,
            snap: settings.read(&SNAP)?,
        })
    }
}

impl PortSpec for Options {
    fn driver(&self) -> &'static str {
        "pcap"
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        let replay = match &self.read {
            Some(path) => Some(Replay::open(path, self.timing, self.passes)?),
            None => None,
        };
        Ok(Box::new(PcapDevice {
            options: *self,
            state: Arc::default(),
            replay,
            writer: None,
            finished_reported: false,
            lost_reported: false,
        }))
    }
}

/// State that the queues share with the device.
#[derive(Debug, Default)]
struct Shared {
    finished: AtomicBool,
    lost: AtomicBool,
    loss_reason: Mutex<String>,
    captured_short: Counter,
    backward: Counter,
    cut_off: Counter,
    passes: Counter,
}

impl Shared {
    /// Marks the file as lost: it can no longer be read or written.
    fn mark_lost(&self, why: String) {
        let mut first = self.loss_reason.lock().unwrap_or_else(PoisonError::into_inner);
        if first.is_empty() {
            *first = why;
        }
        self.lost.store(true, Ordering::Release);
    }

    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }
}

struct PcapDevice {
    options: Options,
    state: Arc<Shared>,
    /// `None` while the port runs: the receive queue owns it then.
    replay: Option<Replay>,
    writer: Option<Writer<File>>,
    finished_reported: bool,
    lost_reported: bool,
}

impl PcapDevice {
    fn name(&self) -> String {
        let files = [&self.options.read, &self.options.write];
        files.into_iter().flatten().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
    }

    fn create(&self, path: &Path) -> Result<Writer<File>, PortError> {
        let options = &self.options;
        // Without O_NONBLOCK, a FIFO without a reader would block the start, and a slow reader the worker.
        let file = File::options().write(true).create(true).truncate(true).custom_flags(O_NONBLOCK).open(path);
        if file.as_ref().is_err_and(|error| error.raw_os_error() == Some(Errno::NXIO.raw_os_error())) {
            let reason = "nobody reads this FIFO; start its reader first".to_owned();
            return Err(PortError::Refused { driver: "pcap", device: path.display().to_string(), reason });
        }
        file.and_then(|file| Writer::new(file, options.format, options.precision, options.snap, "wirepath"))
            .map_err(|source| file_error(path, "create", source))
    }
}

/// Returns the error of creating a file, without creating or changing it.
fn can_create(path: &Path) -> std::io::Result<()> {
    let may = |path: &Path, access| Ok(accessat(CWD, path, access, AtFlags::EACCESS)?);
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(std::io::Error::from_raw_os_error(libc::EISDIR)),
        // Opening a pipe would wait for its reader.
        Ok(_) => may(path, Access::WRITE_OK),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            may(folder, Access::WRITE_OK | Access::EXEC_OK)
        }
        Err(error) => Err(error),
    }
}

/// Converts a failed system call on a file to a port error.
fn file_error(path: &Path, what: &str, source: std::io::Error) -> PortError {
    let device = path.display().to_string();
    match source.kind() {
        std::io::ErrorKind::NotFound => PortError::NoDevice {
            driver: "pcap",
            device,
            hint: "no such file or directory; relative paths start at the working directory of the program".to_owned(),
        },
        _ => PortError::System { driver: "pcap", device, what: what.to_owned(), source, hint: String::new() },
    }
}

impl Device for PcapDevice {
    fn capabilities(&self) -> Capabilities {
        let mut mode = Vec::new();
        let mut notes = Vec::new();
        match &self.options.read {
            Some(path) => mode.push(format!(
                "reads {} ({})",
                path.display(),
                match self.options.timing {
                    Timing::Fast => "fast".to_owned(),
                    Timing::Original(speed) => format!("original timing, speed {speed}"),
                }
            )),
            None => notes.push("no file to read: nothing is received".to_owned()),
        }
        match &self.options.write {
            Some(path) => mode.push(format!("writes {} ({:?})", path.display(), self.options.format)),
            None => notes.push("no file to write: what is transmitted is dropped and counted".to_owned()),
        }
        Capabilities {
            mode: mode.join(", "),
            notes,
            offloads: Offloads::RX_CHAINS.with(Offloads::TX_CHAINS).with(Offloads::RX_TIMESTAMP),
            max_tx_segments: u16::MAX,
            ..Capabilities::plain("pcap", self.name())
        }
    }

    fn check(&mut self, config: &PortConfig) -> Result<(), PortError> {
        config.check(&self.capabilities())?;
        let written = self.options.write.as_deref().filter(|_| self.writer.is_none());
        written.map_or(Ok(()), |path| can_create(path).map_err(|source| file_error(path, "create", source)))
    }

    fn start(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        // The first start creates the file; later starts append to it.
        if let (None, Some(path)) = (&self.writer, &self.options.write) {
            self.writer = Some(self.create(path)?);
        }
        let mut queues = Queues::default();
        if config.rx_queues > 0 {
            queues.rx.push(Box::new(Source::new(self.replay.take(), Arc::clone(&self.state), config)));
        }
        if config.tx_queues > 0 {
            let path = self.options.write.clone().unwrap_or_default();
            queues.tx.push(Box::new(Sink::new(self.writer.take(), path, Arc::clone(&self.state), config)));
        }
        Ok(queues)
    }

    fn stop(&mut self, queues: Queues) -> Result<(), PortError> {
        let mut result = Ok(());
        for queue in queues.rx {
            if let Ok(source) = queue.into_any().downcast::<Source>() {
                self.replay = source.into_replay();
            }
        }
        for queue in queues.tx {
            if let Ok(sink) = queue.into_any().downcast::<Sink>() {
                let (writer, flushed) = sink.finish(Instant::now() + DRAIN_TIMEOUT);
                self.writer = writer;
                result = result.and(flushed);
            }
        }
        let path = self.options.write.as_deref().unwrap_or(Path::new(""));
        result.map_err(|source| file_error(path, "write", source))
    }

    fn statistics(&mut self) -> Option<&mut dyn DeviceStatistics> {
        Some(self)
    }
}

impl DeviceLink for PcapDevice {
    fn link(&mut self) -> Link {
        if self.state.is_lost() { Link::DOWN } else { Link::UP }
    }

    fn events(&mut self) -> Vec<PortEvent> {
        let mut events = Vec::new();
        if self.state.is_lost() && !self.lost_reported {
            self.lost_reported = true;
            events.push(PortEvent::Lost(self.state.loss_reason.lock().unwrap_or_else(PoisonError::into_inner).clone()));
        }
        if self.state.finished.load(Ordering::Acquire) && !self.finished_reported {
            self.finished_reported = true;
            events.push(PortEvent::Finished);
        }
        events
    }
}

impl DeviceStatistics for PcapDevice {
    fn extra_statistics(&mut self) -> Vec<(&'static str, u64)> {
        let state = &self.state;
        vec![
            ("file_passes", state.passes.get()),
            ("file_cut_off", state.cut_off.get()),
            ("frames_captured_short", state.captured_short.get()),
            ("timestamps_going_back", state.backward.get()),
        ]
    }
}

const _: () = assert!(MAX_FRAME <= MAX_PACKET);
