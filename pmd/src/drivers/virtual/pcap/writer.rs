use std::io::{self, Write};

use super::blocks::{self, Interface, MAX_COMMENT, PacketBlock, PacketDirection};
use super::format::{Format, LINKTYPE_ETHERNET, MAGIC_MICRO, MAGIC_NANO, MAX_FRAME, Precision};

/// Bytes that are collected for a write: enough for the longest record.
const BUFFER: usize = MAX_FRAME + 4096;
/// Most bytes of a record beyond those of its frame: header, comment and padding.
const MAX_RECORD_OVERHEAD: usize = 80 + MAX_COMMENT;

/// Writes frames to a pcap or pcapng file. Only whole records are passed to write(2). If the writer is
/// killed, the file ends with the last flushed record, unless the kill interrupted the call itself.
///
/// The output may be non-blocking. Records that it does not take stay in the buffer; when the buffer is full, frames
/// are refused with [`io::ErrorKind::WouldBlock`].
#[derive(Debug)]
pub struct Writer<W: Write> {
    output: W,
    /// Whole records, of which the first `written` bytes are written. Starts at the beginning of a record.
    buffer: Vec<u8>,
    written: usize,
    format: Format,
    precision: Precision,
    snap: u32,
}

/// Position of a record in the buffer, and bytes of its frame.
struct BufferedRecord {
    start: usize,
    end: usize,
    frame: u32,
}

impl<W: Write> Writer<W> {
    /// Writes the file header. Frames are truncated to `snap` bytes, at most [`MAX_FRAME`]. `name` is the
    /// interface name in pcapng.
    pub fn new(output: W, format: Format, precision: Precision, snap: u32, name: &str) -> io::Result<Self> {
        let mut writer = Self {
            output,
            buffer: Vec::with_capacity(BUFFER),
            written: 0,
            format,
            precision,
            snap: snap.min(MAX_FRAME as u32),
        };
        match format {
            Format::Pcap => {
                let magic = if precision == Precision::Nano { MAGIC_NANO } else { MAGIC_MICRO };
                let header = [magic, 2 | 4 << 16, 0, 0, writer.snap, LINKTYPE_ETHERNET];
                blocks::words(&mut writer.buffer, &header);
            }
            Format::Pcapng => {
                blocks::section(&mut writer.buffer);
                let interface = Interface { name, description: "", snap: writer.snap, precision };
                blocks::interface(&mut writer.buffer, &interface);
            }
        }
        writer.flush()?;
        debug_assert!(!writer.is_dirty());
        Ok(writer)
    }

    /// Appends a frame of `len` bytes in one or more segments. `timestamp` is in nanoseconds since 1970.
    pub fn write<'a>(
        &mut self,
        timestamp: u64,
        segments: impl Iterator<Item = &'a [u8]>,
        len: usize,
    ) -> io::Result<()> {
        self.write_with_comment(timestamp, segments, len, "")
    }

    /// Makes room for the record of a frame of `len` bytes. [`io::ErrorKind::WouldBlock`] if the output takes too
    /// little.
    pub fn make_room(&mut self, len: usize) -> io::Result<()> {
        let wanted = len.min(self.snap as usize) + MAX_RECORD_OVERHEAD;
        if self.buffer.len() + wanted <= BUFFER {
            return Ok(());
        }
        let result = self.flush();
        if self.buffer.len() + wanted > BUFFER {
            let start = self.records().find(|record| record.end > self.written).map_or(self.written, |it| it.start);
            self.buffer.drain(..start);
            self.written -= start;
        }
        if self.buffer.len() + wanted <= BUFFER { Ok(()) } else { result }
    }

    /// Appends a frame with a comment of at most 255 bytes. Only pcapng files store the comment.
    pub fn write_with_comment<'a>(
        &mut self,
        timestamp: u64,
        segments: impl Iterator<Item = &'a [u8]>,
        len: usize,
        comment: &str,
    ) -> io::Result<()> {
        let captured = len.min(self.snap as usize);
        self.make_room(len)?;
        let unit = if self.precision == Precision::Nano { 1 } else { 1000 };
        match self.format {
            Format::Pcap => {
                let (seconds, fraction) = (timestamp / 1_000_000_000, timestamp % 1_000_000_000 / unit);
                let header = [seconds as u32, fraction as u32, captured as u32, len as u32];
                blocks::words(&mut self.buffer, &header);
                blocks::bytes(&mut self.buffer, segments, captured);
            }
            Format::Pcapng => {
                let direction = PacketDirection::Unknown;
                let block =
                    PacketBlock { interface: 0, timestamp: timestamp / unit, captured, len, direction, comment };
                blocks::packet(&mut self.buffer, &block, segments);
            }
        }
        Ok(())
    }

    /// Writes all collected records. After an error, what is not written stays in the buffer for the next call.
    pub fn flush(&mut self) -> io::Result<()> {
        while self.written < self.buffer.len() {
            match self.output.write(&self.buffer[self.written..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => self.written += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.buffer.clear();
        self.written = 0;
        self.output.flush()
    }

    /// Discards the records that are not written, or only in part. Returns their number and the bytes of their frames.
    pub fn discard(&mut self) -> (u64, u64) {
        let lost = self.records().filter(|record| record.end > self.written);
        let lost = lost.fold((0, 0), |(records, bytes), record| (records + 1, bytes + u64::from(record.frame)));
        self.buffer.clear();
        self.written = 0;
        lost
    }

    /// Returns the records in the buffer.
    fn records(&self) -> impl Iterator<Item = BufferedRecord> {
        let word =
            |at: usize| self.buffer.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes);
        let mut start = 0;
        std::iter::from_fn(move || {
            // Captured bytes and bytes of the frame, as `write_with_comment` writes them.
            let (len, frame) = match self.format {
                Format::Pcap => (16 + word(start + 8)? as usize, word(start + 12)?),
                Format::Pcapng => (word(start + 4)? as usize, word(start + 24)?),
            };
            let record = BufferedRecord { start, end: start + len, frame };
            start = record.end;
            Some(record)
        })
    }

    /// Returns whether records wait for the next flush.
    pub fn is_dirty(&self) -> bool {
        !self.buffer.is_empty()
    }
}

impl<W: Write> Drop for Writer<W> {
    fn drop(&mut self) {
        // Callers that want to know of an error flush before.
        let _ = self.flush();
    }
}
