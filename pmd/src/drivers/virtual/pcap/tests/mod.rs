mod files;
mod malformed;
mod port;

use super::*;

/// Nanoseconds since 1970: a time in 2026.
const TIME: u64 = 1_790_000_000_123_456_789;

/// Frames of critical sizes: an Ethernet header, a buffer, a jumbo frame.
fn frames() -> Vec<Vec<u8>> {
    let sizes = [14, 60, 61, 64, 1514, 2048, 2049, 9000, 9216];
    let pattern = |n: usize, size: usize| (0..size).map(|i| (i * 7 + n) as u8).collect();
    sizes.into_iter().enumerate().map(|(n, size)| pattern(n, size)).collect()
}

/// Returns a file with these frames, 1001 nanoseconds apart.
fn file(frames: &[Vec<u8>], format: Format, precision: Precision) -> Vec<u8> {
    let mut file = Vec::new();
    let mut writer = Writer::new(&mut file, format, precision, MAX_FRAME as u32, "test").unwrap();
    for (n, frame) in frames.iter().enumerate() {
        writer.write(TIME + n as u64 * 1001, frame.chunks(100), frame.len()).unwrap();
    }
    drop(writer);
    file
}

/// Timestamp, data and original length of a frame.
type Owned = (u64, Vec<u8>, u32);

/// Reads all frames. Also returns the error that ended the reading.
fn read(file: &[u8]) -> (Vec<Owned>, Option<FileError>) {
    let mut all = Vec::new();
    let mut reader = match Reader::new(file) {
        Ok(reader) => reader,
        Err(error) => return (all, Some(error)),
    };
    loop {
        match reader.next() {
            Ok(Some(record)) => {
                let record = (record.timestamp, record.data.to_vec(), record.original_len);
                assert_eq!(reader.last_frame().unwrap().data, record.1);
                all.push(record);
            }
            Ok(None) => return (all, None),
            Err(error) => {
                assert!(matches!(reader.next(), Ok(None)), "an error ends the reading");
                return (all, Some(error));
            }
        }
    }
}

const KINDS: [(Format, Precision); 4] = [
    (Format::Pcap, Precision::Micro),
    (Format::Pcap, Precision::Nano),
    (Format::Pcapng, Precision::Micro),
    (Format::Pcapng, Precision::Nano),
];
