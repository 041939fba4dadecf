use std::io::{self, Write};

use super::format::{
    BYTE_ORDER, ENHANCED_PACKET, Format, INTERFACE, LINKTYPE_ETHERNET, MAGIC_MICRO, MAGIC_NANO, MAX_FRAME, Precision,
    SECTION,
};

/// Bytes that are collected for a write: enough for the longest record.
const BUFFER: usize = MAX_FRAME + 4096;

/// Writes frames to a pcap or pcapng file. Only whole records are passed to write(2). If the writer is
/// killed, the file ends with the last flushed record, unless the kill interrupted the call itself.
#[derive(Debug)]
pub struct Writer<W: Write> {
    output: W,
    buffer: Vec<u8>,
    format: Format,
    precision: Precision,
    snap: u32,
}

impl<W: Write> Writer<W> {
    /// Writes the file header. Frames are truncated to `snap` bytes, at most [`MAX_FRAME`]. `name` is the
    /// interface name in pcapng.
    pub fn new(output: W, format: Format, precision: Precision, snap: u32, name: &str) -> io::Result<Self> {
        let mut writer =
            Self { output, buffer: Vec::with_capacity(BUFFER), format, precision, snap: snap.min(MAX_FRAME as u32) };
        match format {
            Format::Pcap => {
                let magic = if precision == Precision::Nano { MAGIC_NANO } else { MAGIC_MICRO };
                writer.words(&[magic, 2 | 4 << 16, 0, 0, writer.snap, LINKTYPE_ETHERNET]);
            }
            Format::Pcapng => {
                writer.block(SECTION, |it| {
                    // Version 1.0, section of unknown length.
                    it.words(&[BYTE_ORDER, 1, u32::MAX, u32::MAX]);
                    it.option(4, b"wirepath");
                    it.words(&[0]);
                });
                writer.block(INTERFACE, |it| {
                    it.words(&[LINKTYPE_ETHERNET, it.snap]);
                    it.option(2, &name.as_bytes()[..name.len().min(255)]);
                    it.option(9, &[if precision == Precision::Nano { 9 } else { 6 }]);
                    it.words(&[0]);
                });
            }
        }
        writer.flush()?;
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

    /// Appends a frame with a comment of at most 255 bytes. Only pcapng files store the comment.
    pub fn write_with_comment<'a>(
        &mut self,
        timestamp: u64,
        segments: impl Iterator<Item = &'a [u8]>,
        len: usize,
        comment: &str,
    ) -> io::Result<()> {
        let captured = len.min(self.snap as usize);
        let comment = &comment.as_bytes()[..comment.len().min(255)];
        if self.buffer.len() + captured + comment.len() + 80 > BUFFER {
            self.flush()?;
        }
        let unit = if self.precision == Precision::Nano { 1 } else { 1000 };
        match self.format {
            Format::Pcap => {
                let (seconds, fraction) = (timestamp / 1_000_000_000, timestamp % 1_000_000_000 / unit);
                self.words(&[seconds as u32, fraction as u32, captured as u32, len as u32]);
                self.data(segments, captured);
            }
            Format::Pcapng => self.block(ENHANCED_PACKET, |it| {
                let units = timestamp / unit;
                it.words(&[0, (units >> 32) as u32, units as u32, captured as u32, len as u32]);
                it.data(segments, captured);
                it.pad();
                if !comment.is_empty() {
                    it.option(1, comment);
                    it.words(&[0]);
                }
            }),
        }
        Ok(())
    }

    /// Writes all collected records.
    pub fn flush(&mut self) -> io::Result<()> {
        let result = self.output.write_all(&self.buffer);
        // After an error the written length is unknown. A lost record is better than a duplicate one.
        self.buffer.clear();
        result.and_then(|()| self.output.flush())
    }

    /// Returns whether records wait for the next flush.
    pub fn is_dirty(&self) -> bool {
        !self.buffer.is_empty()
    }

    fn words(&mut self, words: &[u32]) {
        for word in words {
            self.buffer.extend_from_slice(&word.to_le_bytes());
        }
    }

    fn data<'a>(&mut self, segments: impl Iterator<Item = &'a [u8]>, captured: usize) {
        let mut left = captured;
        for segment in segments {
            let n = segment.len().min(left);
            self.buffer.extend_from_slice(&segment[..n]);
            left -= n;
        }
        debug_assert_eq!(left, 0);
    }

    fn pad(&mut self) {
        self.buffer.resize(self.buffer.len().next_multiple_of(4), 0);
    }

    fn option(&mut self, code: u16, value: &[u8]) {
        self.words(&[u32::from(code) | (value.len() as u32) << 16]);
        self.buffer.extend_from_slice(value);
        self.pad();
    }

    fn block(&mut self, kind: u32, body: impl FnOnce(&mut Self)) {
        // Blocks start at multiples of 4, also in the buffer: the length of every block is such a multiple.
        let start = self.buffer.len();
        self.words(&[kind, 0]);
        body(self);
        let length = (self.buffer.len() - start + 4) as u32;
        self.buffer[start + 4..start + 8].copy_from_slice(&length.to_le_bytes());
        self.words(&[length]);
    }
}

impl<W: Write> Drop for Writer<W> {
    fn drop(&mut self) {
        // Callers that want to know of an error flush before.
        let _ = self.flush();
    }
}
