use std::io::{ErrorKind, Read};

use super::format::{
    BYTE_ORDER, ENHANCED_PACKET, FileError, Format, INTERFACE, LINKTYPE_ETHERNET, MAGIC_MICRO, MAGIC_NANO, MAX_BLOCK,
    MAX_FRAME, OLD_PACKET, PCAP_HEADER, RECORD_HEADER, SECTION, SIMPLE_PACKET, link_type_name,
};

/// Bytes of the buffer: the longest frame with its header, and more so that each read(2) is worth its cost.
const BUFFER: usize = MAX_FRAME + (64 << 10);
/// Maximum number of interfaces in a section.
const MAX_INTERFACES: usize = 4096;

/// Reads frames from a pcap or pcapng file, which it detects by the first bytes.
///
/// It needs 320 KiB for any file: no length in the file is used for an allocation. Reading ends at the first
/// error.
#[derive(Debug)]
pub struct Reader<R> {
    input: R,
    buffer: Box<[u8]>,
    /// Range of unread bytes in the buffer, and its offset in the file.
    start: usize,
    end: usize,
    offset: u64,
    /// Offset of the last record.
    record: u64,
    layout: Layout,
    swapped: bool,
    /// Bytes between the returned frame and the next record.
    unread: Unread,
    /// The last returned frame, while it is in the buffer.
    last: Option<BufferedFrame>,
    failed: bool,
}

#[derive(Debug)]
enum Layout {
    Pcap { interface: Interface },
    Pcapng { interfaces: Vec<Interface> },
}

#[derive(Clone, Copy, Debug, Default)]
struct Unread {
    bytes: u64,
    /// Length that a pcapng block repeats at its end.
    trailer: Option<u32>,
}

/// Properties of the capture interface.
#[derive(Clone, Copy, Debug)]
struct Interface {
    snap: u32,
    /// Timestamp units per second, and seconds to add.
    units: u128,
    seconds: i64,
    /// Bytes of frame check sequence at the end of the frames.
    check_sequence: usize,
}

/// A frame of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// Nanoseconds since 1970.
    pub timestamp: u64,
    /// Captured bytes, without frame check sequence. At most [`super::MAX_FRAME`] bytes; may be empty.
    pub data: &'a [u8],
    /// Bytes of the frame on the wire, according to the file.
    pub original_len: u32,
}

impl<R: Read> Reader<R> {
    /// Reads the file header.
    pub fn new(input: R) -> Result<Self, FileError> {
        let mut reader = Self {
            input,
            buffer: vec![0; BUFFER].into_boxed_slice(),
            start: 0,
            end: 0,
            offset: 0,
            record: 0,
            layout: Layout::Pcapng { interfaces: Vec::new() },
            swapped: false,
            unread: Unread::default(),
            last: None,
            failed: false,
        };
        reader.read_header()?;
        Ok(reader)
    }

    /// Returns the format of the file.
    pub fn format(&self) -> Format {
        match self.layout {
            Layout::Pcap { .. } => Format::Pcap,
            Layout::Pcapng { .. } => Format::Pcapng,
        }
    }

    /// Returns the input.
    pub fn get_mut(&mut self) -> &mut R {
        &mut self.input
    }

    /// Starts again, after the caller has set the input to its beginning.
    pub fn restart(&mut self) -> Result<(), FileError> {
        (self.start, self.end, self.offset, self.record) = (0, 0, 0, 0);
        (self.unread, self.last, self.failed) = (Unread::default(), None, false);
        self.read_header()
    }

    fn read_header(&mut self) -> Result<(), FileError> {
        self.swapped = false;
        if !self.fill(4)? {
            return Err(self.malformed("neither pcap nor pcapng: the file is shorter than 4 bytes"));
        }
        let magic = self.u32_at(0);
        match magic {
            SECTION => {
                // The section header is read with the first record. Until then there are no interfaces.
                self.layout = Layout::Pcapng { interfaces: Vec::new() };
                self.find_first_interface()
            }
            MAGIC_MICRO | MAGIC_NANO => self.read_pcap_header(magic, false),
            _ if [MAGIC_MICRO, MAGIC_NANO].contains(&magic.swap_bytes()) => {
                self.read_pcap_header(magic.swap_bytes(), true)
            }
            0xa1b2_cd34 | 0x34cd_b2a1 => {
                Err(self.malformed("the modified pcap format of old Linux kernels; convert it with editcap -F pcapng"))
            }
            _ if self.buffer.starts_with(&[0x1f, 0x8b]) => {
                Err(self.malformed("compressed; unpack it with gunzip first"))
            }
            0xfd2f_b528 => Err(self.malformed("compressed; unpack it with unzstd first")),
            _ => Err(self.malformed(format!("neither pcap nor pcapng: starts with {magic:#010x}"))),
        }
    }

    fn read_pcap_header(&mut self, magic: u32, swapped: bool) -> Result<(), FileError> {
        self.swapped = swapped;
        if !self.fill(PCAP_HEADER)? {
            return Err(self.cut_off());
        }
        let major = self.u16_at(4);
        if major != 2 {
            return Err(self.malformed(format!("pcap version {major}.{}, expected 2.4", self.u16_at(6))));
        }
        let link_type = self.u32_at(20);
        self.check_link_type(link_type & 0xffff)?;
        // draft-ietf-opsawg-pcap, section 4: with the P bit, the four highest bits hold the length of the
        // frame check sequence.
        let check_sequence = if link_type & 1 << 26 != 0 { (link_type >> 28) as usize * 2 } else { 0 };
        let units = if magic == MAGIC_NANO { 1_000_000_000 } else { 1_000_000 };
        self.layout =
            Layout::Pcap { interface: Interface { snap: self.u32_at(16), units, seconds: 0, check_sequence } };
        self.unread = Unread { bytes: PCAP_HEADER as u64, trailer: None };
        Ok(())
    }

    /// Reads up to the first interface, so that an unsupported file is refused when it is opened.
    fn find_first_interface(&mut self) -> Result<(), FileError> {
        while matches!(&self.layout, Layout::Pcapng { interfaces } if interfaces.is_empty()) {
            // No packet can precede it: a packet refers to a described interface.
            if self.next_block()?.is_none() {
                break;
            }
        }
        Ok(())
    }

    /// Returns the next frame. `None` at the end of the file and after an error.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<Option<Record<'_>>, FileError> {
        self.last = None;
        if self.failed {
            return Ok(None);
        }
        let found = match self.layout {
            Layout::Pcap { interface } => self.next_record(interface),
            Layout::Pcapng { .. } => self.next_packet_block(),
        };
        self.failed = !matches!(found, Ok(Some(_)));
        self.last = found?;
        Ok(self.last_frame())
    }

    /// Returns the last frame of [`Self::next`] again.
    pub fn last_frame(&self) -> Option<Record<'_>> {
        self.last.map(|BufferedFrame { timestamp, at, len, original_len }| {
            let at = self.start + at;
            Record { timestamp, data: &self.buffer[at..at + len], original_len }
        })
    }

    fn next_record(&mut self, interface: Interface) -> Result<Option<BufferedFrame>, FileError> {
        self.skip_unread()?;
        self.record = self.offset;
        if !self.fill(1)? {
            return Ok(None);
        }
        if !self.fill(RECORD_HEADER)? {
            return Err(self.cut_off());
        }
        let (seconds, fraction, captured, original_len) =
            (self.u32_at(0), self.u32_at(4), self.u32_at(8), self.u32_at(12));
        let len = captured as usize;
        if len > MAX_FRAME {
            return Err(self.malformed(format!("a frame of {captured} bytes; {MAX_FRAME} at most")));
        }
        if !self.fill(RECORD_HEADER + len)? {
            return Err(self.cut_off());
        }
        self.unread = Unread { bytes: (RECORD_HEADER + len) as u64, trailer: None };
        // A fraction of more than a second is invalid but harmless.
        let unit = if interface.units == 1_000_000 { 1000 } else { 1 };
        let timestamp = u64::from(seconds) * 1_000_000_000 + u64::from(fraction) * unit;
        let len = len - interface.check_sequence.min(len);
        Ok(Some(BufferedFrame { timestamp, at: RECORD_HEADER, len, original_len }))
    }

    fn next_packet_block(&mut self) -> Result<Option<BufferedFrame>, FileError> {
        loop {
            match self.next_block()? {
                None => return Ok(None),
                Some(Block::Packet(found)) => return Ok(Some(found)),
                Some(Block::Other) => {}
            }
        }
    }

    /// Reads the next block. Its needed bytes are in the buffer afterwards, and `unread` leads to the block
    /// behind it.
    fn next_block(&mut self) -> Result<Option<Block>, FileError> {
        self.skip_unread()?;
        self.record = self.offset;
        if !self.fill(1)? {
            return Ok(None);
        }
        if !self.fill(12)? {
            return Err(self.cut_off());
        }
        // The type of a section header is the same in both byte orders. The following magic number tells the
        // byte order of the section.
        let kind = self.u32_at(0);
        if kind == SECTION {
            self.swapped = match u32::from_le_bytes(self.bytes(8)) {
                BYTE_ORDER => false,
                other if other.swap_bytes() == BYTE_ORDER => true,
                other => return Err(self.malformed(format!("a section with byte-order magic {other:#010x}"))),
            };
        }
        let length = self.u32_at(4);
        if !length.is_multiple_of(4) || !(12..=MAX_BLOCK).contains(&length) {
            return Err(
                self.malformed(format!("a block of {length} bytes, expected a multiple of 4 from 12 to {MAX_BLOCK}"))
            );
        }
        // Options behind the longest frame are ignored.
        let body_end = (length as usize - 4).min(BUFFER);
        let seen = match kind {
            SECTION | INTERFACE | OLD_PACKET | SIMPLE_PACKET | ENHANCED_PACKET => body_end,
            _ => 12,
        };
        if !self.fill(seen)? {
            return Err(self.cut_off());
        }
        self.unread = Unread { bytes: u64::from(length) - 4, trailer: Some(length) };
        match kind {
            SECTION => self.section(body_end),
            INTERFACE => self.interface(body_end),
            OLD_PACKET | SIMPLE_PACKET | ENHANCED_PACKET => self.packet(kind, body_end).map(Some),
            _ => Ok(Some(Block::Other)),
        }
    }

    fn section(&mut self, body_end: usize) -> Result<Option<Block>, FileError> {
        if body_end < 24 {
            return Err(self.malformed("a section header that is too short"));
        }
        let major = self.u16_at(12);
        if major != 1 {
            return Err(self.malformed(format!("pcapng version {major}.{}, expected 1.0", self.u16_at(14))));
        }
        self.layout = Layout::Pcapng { interfaces: Vec::new() };
        Ok(Some(Block::Other))
    }

    fn interface(&mut self, body_end: usize) -> Result<Option<Block>, FileError> {
        if body_end < 16 {
            return Err(self.malformed("an interface description that is too short"));
        }
        self.check_link_type(self.u16_at(8).into())?;
        let mut interface = Interface { snap: self.u32_at(12), units: 1_000_000, seconds: 0, check_sequence: 0 };
        let mut at = 16;
        while at + 4 <= body_end {
            let (code, len) = (self.u16_at(at), usize::from(self.u16_at(at + 2)));
            if code == 0 || at + 4 + len > body_end {
                break;
            }
            match (code, len) {
                (9, 1) => interface.units = units(self.bytes::<1>(at + 4)[0]),
                (13, 1) => {
                    // The value counts bits, but some writers store bytes.
                    let value = usize::from(self.bytes::<1>(at + 4)[0]);
                    interface.check_sequence = if value >= 16 { value / 8 } else { value };
                }
                (14, 8) => {
                    let raw = u64::from_le_bytes(self.bytes(at + 4));
                    interface.seconds = (if self.swapped { raw.swap_bytes() } else { raw }) as i64;
                }
                _ => {}
            }
            at += 4 + len.next_multiple_of(4);
        }
        if let Layout::Pcapng { interfaces } = &mut self.layout
            && interfaces.len() < MAX_INTERFACES
        {
            interfaces.push(interface);
            return Ok(Some(Block::Other));
        }
        Err(self.malformed(format!("more than {MAX_INTERFACES} interfaces in a section")))
    }

    fn packet(&mut self, kind: u32, body_end: usize) -> Result<Block, FileError> {
        let header = if kind == SIMPLE_PACKET { 12 } else { 28 };
        if body_end < header {
            return Err(self.malformed("a packet block that is too short"));
        }
        let number = match kind {
            ENHANCED_PACKET => self.u32_at(8) as usize,
            OLD_PACKET => self.u16_at(8).into(),
            _ => 0,
        };
        let Layout::Pcapng { interfaces } = &self.layout else { return Ok(Block::Other) };
        let Some(interface) = interfaces.get(number).copied() else {
            return Err(self.malformed(format!("a packet of interface {number}, which was not described")));
        };
        let (captured, original_len, timestamp) = if kind == SIMPLE_PACKET {
            let original_len = self.u32_at(8);
            let snap = if interface.snap == 0 { u32::MAX } else { interface.snap };
            // Simple packet blocks have no captured length: the end of the block is the limit.
            (original_len.min(snap).min((self.unread.bytes - header as u64) as u32), original_len, 0)
        } else {
            let units = u128::from(self.u32_at(12)) << 32 | u128::from(self.u32_at(16));
            (self.u32_at(20), self.u32_at(24), interface.nanoseconds(units))
        };
        let len = captured as usize;
        if u64::from(captured) > self.unread.bytes - header as u64 {
            return Err(self.malformed(format!("a frame of {captured} bytes in a block with room for fewer")));
        }
        if len > MAX_FRAME {
            return Err(self.malformed(format!("a frame of {captured} bytes; {MAX_FRAME} at most")));
        }
        let len = len - interface.check_sequence.min(len);
        Ok(Block::Packet(BufferedFrame { timestamp, at: header, len, original_len }))
    }

    fn check_link_type(&self, link_type: u32) -> Result<(), FileError> {
        if link_type == LINKTYPE_ETHERNET {
            return Ok(());
        }
        let name = link_type_name(link_type);
        Err(self.malformed(format!("frames of link type {link_type} ({name}); only Ethernet (1) can be replayed")))
    }

    /// Skips the rest of the last record.
    fn skip_unread(&mut self) -> Result<(), FileError> {
        let rest = std::mem::take(&mut self.unread);
        let mut left = rest.bytes;
        while left > 0 {
            if self.start == self.end && !self.fill(1)? {
                return Err(self.cut_off());
            }
            let n = left.min((self.end - self.start) as u64);
            self.start += n as usize;
            self.offset += n;
            left -= n;
        }
        let Some(length) = rest.trailer else { return Ok(()) };
        if !self.fill(4)? {
            return Err(self.cut_off());
        }
        let repeated = self.u32_at(0);
        if repeated != length {
            return Err(self.malformed(format!("a block that starts with length {length} and ends with {repeated}")));
        }
        self.start += 4;
        self.offset += 4;
        Ok(())
    }

    /// Ensures that the next `n` bytes are in the buffer. Returns `false` if the file ends before.
    fn fill(&mut self, n: usize) -> Result<bool, FileError> {
        debug_assert!(n <= BUFFER);
        while self.end - self.start < n {
            if self.start > 0 && self.start + n > BUFFER {
                self.buffer.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, self.end - self.start);
            }
            if self.start == self.end {
                (self.start, self.end) = (0, 0);
            }
            match self.input.read(&mut self.buffer[self.end..]) {
                Ok(0) => return Ok(false),
                Ok(got) => self.end += got,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(true)
    }

    /// Returns bytes of the unread part. The caller has ensured with `fill` that they are in the buffer.
    fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        let at = self.start + at;
        *self.buffer[at..self.end].first_chunk().expect("filled before")
    }

    fn u32_at(&self, at: usize) -> u32 {
        let raw = u32::from_le_bytes(self.bytes(at));
        if self.swapped { raw.swap_bytes() } else { raw }
    }

    fn u16_at(&self, at: usize) -> u16 {
        let raw = u16::from_le_bytes(self.bytes(at));
        if self.swapped { raw.swap_bytes() } else { raw }
    }

    fn malformed(&self, what: impl Into<String>) -> FileError {
        FileError::Malformed { offset: self.offset, what: what.into() }
    }

    fn cut_off(&self) -> FileError {
        FileError::Truncated { offset: self.record }
    }
}

enum Block {
    Packet(BufferedFrame),
    Other,
}

/// A frame in the buffer, `at` bytes behind the start of its record.
#[derive(Clone, Copy, Debug)]
struct BufferedFrame {
    timestamp: u64,
    at: usize,
    len: usize,
    original_len: u32,
}

/// Returns the units per second of an `if_tsresol` option; 0 if they are too fine to be plausible.
fn units(resolution: u8) -> u128 {
    let exponent = u32::from(resolution & 0x7f);
    let base: u128 = if resolution & 0x80 != 0 { 2 } else { 10 };
    base.checked_pow(exponent).filter(|&units| units <= 1 << 64).unwrap_or(0)
}

impl Interface {
    /// Converts a timestamp to nanoseconds since 1970; 0 for invalid values.
    fn nanoseconds(&self, units: u128) -> u64 {
        // At most 2⁶⁴ units, so this cannot overflow.
        let Some(nanoseconds) = (units * 1_000_000_000).checked_div(self.units) else { return 0 };
        let shifted = nanoseconds as i128 + i128::from(self.seconds) * 1_000_000_000;
        u64::try_from(shifted).unwrap_or(0)
    }
}
