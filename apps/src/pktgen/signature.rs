//! The payload of test packets: filler bytes, and at the end a signature by which the receiver recognises the packet.
//!
//! ```text
//! offset from the end   -18    -16    -14       -11       -7        -2
//!                       magic  length stream    sequence  time      CRC
//! bytes                 2      2      3         4         5         2
//! ```
//!
//! All fields are big-endian. The signature is at the end of the frame, as a device may change the headers in front of
//! it. `magic` is random for each run, so packets of other runs are foreign. `length` is that of the whole payload.
//! `time` are nanoseconds of the sender's clock modulo 2^40. The CRC is CRC-16/IBM-3740 over the 16 bytes before it:
//! it finds every error of one or two bits and every burst of up to 16 bits. The filler is known, so the receiver
//! compares it byte by byte.

/// Bytes of a signature.
pub const LEN: usize = 18;
/// Largest number of streams.
pub const MAX_STREAMS: usize = 1 << 24;
/// Largest payload in bytes: that of the longest frame that a port sends.
pub const MAX_PAYLOAD: usize = 9216;

const TIME_BITS: u32 = 40;

/// Content of a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Bytes of the payload, with the signature.
    pub payload_len: u16,
    /// Number of the stream, below [`MAX_STREAMS`].
    pub stream: u32,
    /// Number of the packet in its stream, modulo 2^32.
    pub sequence: u32,
    /// Nanoseconds of the sender's clock. The receiver gets them modulo 2^40.
    pub time: u64,
}

/// A received frame, as its last bytes show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// A packet of this run.
    Valid(Signature),
    /// A packet of this run whose payload has changed.
    Corrupt,
    /// Any other packet. It includes packets whose `magic` has changed.
    Foreign,
}

const fn crc_table() -> [u16; 256] {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        let (mut crc, mut bit) = ((i as u16) << 8, 0);
        while bit < 8 {
            crc = if crc & 0x8000 != 0 { crc << 1 ^ 0x1021 } else { crc << 1 };
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
}

static CRC_TABLE: [u16; 256] = crc_table();

fn crc(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0xffff, |crc, byte| crc << 8 ^ CRC_TABLE[usize::from((crc >> 8) as u8 ^ byte)])
}

const fn filler() -> [u8; MAX_PAYLOAD] {
    let mut bytes = [0; MAX_PAYLOAD];
    let (mut i, mut state) = (0, 0x2545_f491_4f6c_dd1d_u64);
    while i < MAX_PAYLOAD {
        // xorshift64.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes[i] = state as u8;
        i += 1;
    }
    bytes
}

/// Bytes of a payload before its signature. Every payload has the first ones.
pub static FILLER: [u8; MAX_PAYLOAD] = filler();

impl Signature {
    /// Returns the bytes.
    pub fn emit(&self, magic: u16) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[0..2].copy_from_slice(&magic.to_be_bytes());
        bytes[2..4].copy_from_slice(&self.payload_len.to_be_bytes());
        bytes[4..7].copy_from_slice(&self.stream.to_be_bytes()[1..]);
        bytes[7..11].copy_from_slice(&self.sequence.to_be_bytes());
        bytes[11..16].copy_from_slice(&self.time.to_be_bytes()[3..]);
        let crc = crc(&bytes[..16]);
        bytes[16..18].copy_from_slice(&crc.to_be_bytes());
        bytes
    }

    /// Reads the end of a frame.
    pub fn read(frame: &[u8], magic: u16) -> Reading {
        let Some((before, bytes)) = frame.split_last_chunk::<LEN>() else { return Reading::Foreign };
        if bytes[0..2] != magic.to_be_bytes() {
            return Reading::Foreign;
        }
        Self::decode(before, bytes).map_or(Reading::Corrupt, Reading::Valid)
    }

    /// Reads the end of a frame of any run: its `magic`, and its signature if the payload is intact.
    ///
    /// One in 2^32 frames with random bytes at the end passes for an intact one.
    pub fn read_any(frame: &[u8]) -> Option<(u16, Option<Self>)> {
        let (before, bytes) = frame.split_last_chunk::<LEN>()?;
        Some((u16::from_be_bytes([bytes[0], bytes[1]]), Self::decode(before, bytes)))
    }

    /// Returns the signature, if it and the filler before it are intact.
    #[inline]
    fn decode(before: &[u8], bytes: &[u8; LEN]) -> Option<Self> {
        let [_, _, l0, l1, s0, s1, s2, q0, q1, q2, q3, t0, t1, t2, t3, t4, c0, c1] = *bytes;
        let signature = Self {
            payload_len: u16::from_be_bytes([l0, l1]),
            stream: u32::from_be_bytes([0, s0, s1, s2]),
            sequence: u32::from_be_bytes([q0, q1, q2, q3]),
            time: u64::from_be_bytes([0, 0, 0, t0, t1, t2, t3, t4]),
        };
        let fill = usize::from(signature.payload_len).checked_sub(LEN).filter(|fill| *fill <= before.len());
        let intact = crc(&bytes[..16]) == u16::from_be_bytes([c0, c1])
            && fill.is_some_and(|fill| FILLER.get(..fill) == Some(&before[before.len() - fill..]));
        intact.then_some(signature)
    }

    /// Returns the nanoseconds since the packet was sent, or 0 if `now` lies before that. Times above 2^39 ns (9
    /// minutes) are not possible.
    pub fn age(&self, now: u64) -> u64 {
        let age = now.wrapping_sub(self.time) & ((1 << TIME_BITS) - 1);
        if age >> (TIME_BITS - 1) == 0 { age } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(payload: usize) -> Vec<u8> {
        let signature = Signature { payload_len: payload as u16, stream: 0x01_0203, sequence: 7, time: 1 << 39 };
        let mut frame = vec![0xa5; 42];
        frame.extend_from_slice(&FILLER[..payload - LEN]);
        frame.extend_from_slice(&signature.emit(0xbeef));
        frame
    }

    #[test]
    fn the_crc_is_that_of_the_catalogue() {
        // Check value of CRC-16/IBM-3740 (reveng.sourceforge.io/crc-catalogue).
        assert_eq!(crc(b"123456789"), 0x29b1);
    }

    #[test]
    fn every_flipped_bit_of_a_payload_is_found() {
        for payload in [LEN, LEN + 1, 100] {
            let whole = frame(payload);
            assert!(matches!(Signature::read(&whole, 0xbeef), Reading::Valid(it) if it.stream == 0x01_0203));
            assert_eq!(Signature::read(&whole, 0xbeee), Reading::Foreign);
            assert!(matches!(Signature::read_any(&whole), Some((0xbeef, Some(it))) if it.sequence == 7));
            for bit in 0..payload * 8 {
                let mut frame = whole.clone();
                let at = frame.len() - payload + bit / 8;
                frame[at] ^= 1 << (bit % 8);
                let is_magic = (payload - LEN..payload - LEN + 2).contains(&(bit / 8));
                let expected = if is_magic { Reading::Foreign } else { Reading::Corrupt };
                assert_eq!(Signature::read(&frame, 0xbeef), expected, "bit {bit} of {payload} bytes");
                assert!(matches!(Signature::read_any(&frame), Some((_, None))), "bit {bit} of {payload} bytes");
            }
        }
    }

    #[test]
    fn lengths_beyond_the_frame_are_corrupt() {
        for payload_len in [0, 17, 61, 9217, 65535] {
            let mut bytes = vec![0; 42];
            let signature = Signature { payload_len, stream: 0, sequence: 0, time: 0 };
            bytes.extend_from_slice(&signature.emit(1));
            assert_eq!(Signature::read(&bytes, 1), Reading::Corrupt, "{payload_len}");
        }
        assert_eq!((Signature::read(&[0; 17], 0), Signature::read_any(&[0; 17])), (Reading::Foreign, None));
        assert_eq!(Signature::read_any(&[0; 60]), Some((0, None)), "padding is no signature");
    }

    #[test]
    fn ages_wrap() {
        let sent = Signature { payload_len: 18, stream: 0, sequence: 0, time: (1 << 40) - 5 };
        assert_eq!((sent.age((1 << 40) + 7), sent.age((3 << 40) + 7), sent.age((1 << 40) - 6)), (12, 12, 0));
    }
}
