use std::any::Any;
use std::fs::File;
use std::io::{self, ErrorKind, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::{FileError, O_NONBLOCK, Reader, Shared, Timing, Writer, file_error};
use crate::drivers::sw_offload;
use crate::port::{PortConfig, PortError, PortId, RxDriver, TxDriver};
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Pool};

/// Length of the shortest frame: an Ethernet header.
const SHORTEST: usize = 14;
/// Maximum time between a write and its flush.
const FLUSH: Duration = Duration::from_secs(1);

fn longest(config: &PortConfig) -> usize {
    usize::from(config.mtu) + SHORTEST + 8
}

/// A file that is being received, and the position in it.
pub(super) struct Replay {
    path: PathBuf,
    reader: Reader<File>,
    timing: Timing,
    /// Remaining passes, including the current one; `None` for ever.
    passes: Option<u64>,
    clock: Option<Clock>,
    /// Frames of the current pass so far.
    frames: u64,
    /// Read the last frame again, because it was not due or had no buffer.
    repeat_last: bool,
    ended: bool,
}

/// Relates the timestamps of the file to the machine's clock.
struct Clock {
    started: Instant,
    /// Nanoseconds of replay up to the last frame.
    elapsed: f64,
    last: u64,
}

impl Replay {
    pub(super) fn open(path: &Path, timing: Timing, passes: Option<u64>) -> Result<Self, PortError> {
        // Without O_NONBLOCK, a FIFO without a writer would block the start.
        let file = File::options().read(true).custom_flags(O_NONBLOCK).open(path);
        let file = file.map_err(|source| file_error(path, "open", source))?;
        let refused =
            |reason: String| PortError::Refused { driver: "pcap", device: path.display().to_string(), reason };
        // A pipe would block the worker and cannot be read twice.
        if !file.metadata().map_err(|source| file_error(path, "look at", source))?.is_file() {
            return Err(refused("not a regular file; only regular files can be read".to_owned()));
        }
        let reader = Reader::new(file).map_err(|error| refused(error.to_string()))?;
        Ok(Self {
            path: path.to_owned(),
            reader,
            timing,
            passes,
            clock: None,
            frames: 0,
            repeat_last: false,
            ended: false,
        })
    }

    /// Starts the next pass. Returns `false` if there is none.
    fn rewind(&mut self) -> Result<bool, FileError> {
        if let Some(passes) = &mut self.passes {
            *passes -= 1;
            if *passes == 0 {
                return Ok(false);
            }
        }
        // A file without frames would be read for ever within one poll.
        if self.frames == 0 {
            return Ok(false);
        }
        self.frames = 0;
        self.clock = None;
        self.reader.get_mut().seek(SeekFrom::Start(0))?;
        self.reader.restart()?;
        Ok(true)
    }
}

pub(super) struct Source {
    counters: Arc<QueueCounters>,
    shared: Arc<Shared>,
    replay: Option<Replay>,
    pool: Pool,
    port: PortId,
    longest: usize,
}

/// Reason to stop reading.
enum ReadStop {
    Pause,
    EndOfFile,
    Failed(FileError),
}

impl Source {
    pub(super) fn new(replay: Option<Replay>, shared: Arc<Shared>, config: &PortConfig) -> Self {
        Self {
            counters: Arc::default(),
            shared,
            replay,
            pool: config.pool.clone(),
            port: config.id,
            longest: longest(config),
        }
    }

    pub(super) fn into_replay(self) -> Option<Replay> {
        self.replay
    }

    /// Reads until the batch is full or reading must stop.
    fn read(&mut self, batch: &mut Batch) {
        let Some(replay) = &mut self.replay else { return };
        while !replay.ended && !batch.is_full() {
            let pause = replay.deliver(batch, &self.pool, self.port, self.longest, &self.counters, &self.shared);
            let error = match pause {
                ReadStop::Pause => return,
                ReadStop::EndOfFile => {
                    self.shared.passes.add(1);
                    match replay.rewind() {
                        Ok(true) => continue,
                        Ok(false) => None,
                        Err(error) => Some(error),
                    }
                }
                ReadStop::Failed(FileError::Truncated { offset }) => {
                    tracing::warn!("{}: at byte {offset}: the file ends inside a record", replay.path.display());
                    self.shared.cut_off.add(1);
                    self.shared.passes.add(1);
                    match replay.rewind() {
                        Ok(true) => continue,
                        Ok(false) => None,
                        Err(error) => Some(error),
                    }
                }
                ReadStop::Failed(error) => Some(error),
            };
            replay.ended = true;
            match error {
                None => self.shared.finished.store(true, Ordering::Release),
                Some(error) => self.shared.mark_lost(format!("pcap: {}: {error}", replay.path.display())),
            }
        }
    }
}

impl Replay {
    /// Moves frames to the batch until it is full or reading must stop.
    fn deliver(
        &mut self,
        batch: &mut Batch,
        pool: &Pool,
        port: PortId,
        longest: usize,
        counters: &QueueCounters,
        shared: &Shared,
    ) -> ReadStop {
        loop {
            if batch.is_full() {
                return ReadStop::Pause;
            }
            let next =
                if std::mem::take(&mut self.repeat_last) { Ok(self.reader.last_frame()) } else { self.reader.next() };
            let record = match next {
                Ok(Some(record)) => record,
                Ok(None) => return ReadStop::EndOfFile,
                Err(error) => return ReadStop::Failed(error),
            };
            if let Timing::Original(speed) = self.timing
                && !Clock::is_due(&mut self.clock, record.timestamp, speed, shared)
            {
                self.repeat_last = true;
                return ReadStop::Pause;
            }
            let data = record.data;
            if !(SHORTEST..=longest).contains(&data.len()) {
                let reason = if data.len() < SHORTEST { DropReason::TooShort } else { DropReason::TooLong };
                counters.drops.add(reason, 1);
                self.frames += 1;
                continue;
            }
            let packet = pool.take().and_then(|mut packet| packet.extend_from_slice(data, pool).then_some(packet));
            let Some(mut packet) = packet else {
                self.repeat_last = true;
                return ReadStop::Pause;
            };
            packet.set_in_port(port);
            packet.set_timestamp(record.timestamp);
            if record.original_len as usize > data.len() {
                shared.captured_short.add(1);
            }
            self.frames += 1;
            // The loop checked that the batch has space.
            let _ = batch.push(packet);
        }
    }
}

impl Clock {
    fn is_due(clock: &mut Option<Self>, timestamp: u64, speed: f64, shared: &Shared) -> bool {
        let now = Instant::now();
        let clock = clock.get_or_insert(Self { started: now, elapsed: 0.0, last: timestamp });
        if timestamp < clock.last {
            // Continue from this timestamp.
            shared.backward.add(1);
            clock.last = timestamp;
        }
        let at = clock.elapsed + (timestamp - clock.last) as f64 / speed;
        if (now - clock.started).as_nanos() as f64 >= at {
            (clock.elapsed, clock.last) = (at, timestamp);
            return true;
        }
        false
    }
}

impl RxDriver for Source {
    fn receive(&mut self, batch: &mut Batch) {
        let start = batch.len();
        self.read(batch);
        let new = &batch.as_slice()[start..];
        self.counters.count_burst(new.len() as u64, crate::port::bytes_of(new));
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn set_counters(&mut self, counters: Arc<QueueCounters>) {
        self.counters = counters;
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

pub(super) struct Sink {
    counters: Arc<QueueCounters>,
    shared: Arc<Shared>,
    writer: Option<Writer<File>>,
    path: PathBuf,
    longest: usize,
    flushed: Instant,
}

impl Sink {
    pub(super) fn new(writer: Option<Writer<File>>, path: PathBuf, shared: Arc<Shared>, config: &PortConfig) -> Self {
        Self { counters: Arc::default(), shared, writer, path, longest: longest(config), flushed: Instant::now() }
    }

    /// Writes the rest until `deadline`, and drops what the file does not take.
    pub(super) fn finish(mut self, deadline: Instant) -> (Option<Writer<File>>, io::Result<()>) {
        let Some(writer) = &mut self.writer else { return (None, Ok(())) };
        let mut result = writer.flush();
        while result.as_ref().is_err_and(|error| error.kind() == ErrorKind::WouldBlock) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
            result = writer.flush();
        }
        if result.is_err() {
            let (packets, bytes) = writer.discard();
            self.counters.count_unsent(DropReason::Stopping, packets, bytes);
        }
        (self.writer, result)
    }

    fn flush_if_due(&mut self) {
        let Some(writer) = &mut self.writer else { return };
        if !writer.is_dirty() || self.flushed.elapsed() < FLUSH || self.shared.is_lost() {
            return;
        }
        self.flushed = Instant::now();
        if let Err(error) = writer.flush() {
            self.fail(&error);
        }
    }

    /// Handles an error of a write. A FIFO that is full takes more later; another error ends the port.
    fn fail(&mut self, error: &io::Error) {
        let Some(writer) = self.writer.as_mut().filter(|_| error.kind() != ErrorKind::WouldBlock) else { return };
        let (packets, bytes) = writer.discard();
        self.counters.count_unsent(DropReason::TxError, packets, bytes);
        self.shared.mark_lost(format!("pcap: {}: write: {error}", self.path.display()));
    }
}

impl TxDriver for Sink {
    fn transmit(&mut self, batch: &mut Batch) {
        let reason = match &self.writer {
            Some(_) if !self.shared.is_lost() => None,
            Some(_) => Some(DropReason::DeviceLost),
            None => Some(DropReason::NoDestination),
        };
        if let Some(reason) = reason {
            self.counters.drops.add(reason, batch.len() as u64);
            batch.clear();
            return;
        }
        let Some(writer) = &mut self.writer else { return };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
        let (mut taken, mut packets, mut bytes, mut failed) = (0, 0, 0, None);
        for packet in batch.iter_mut() {
            if let Err(error) = writer.make_room(packet.len()) {
                failed = Some(error);
                break;
            }
            taken += 1;
            let outcome = sw_offload::apply(packet).and_then(|()| match packet.len() {
                len if len < SHORTEST => Err(DropReason::TooShort),
                len if len > self.longest => Err(DropReason::TooLong),
                len => writer.write(now, packet.segments(), len).map(|()| len).map_err(|_| DropReason::TxError),
            });
            match outcome {
                Ok(len) => {
                    packets += 1;
                    bytes += len as u64;
                }
                Err(reason) => self.counters.drops.add(reason, 1),
            }
        }
        batch.free_front(taken);
        self.counters.count_burst(packets, bytes);
        if let Some(error) = failed {
            self.fail(&error);
        }
        self.flush_if_due();
    }

    fn reclaim(&mut self) {
        self.flush_if_due();
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn set_counters(&mut self, counters: Arc<QueueCounters>) {
        self.counters = counters;
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
