//! Capture files: the reader does not panic, terminates, and returns no frame longer than the file. A second
//! pass reads the same frames.

#![no_main]

use std::io::Cursor;

use libfuzzer_sys::fuzz_target;
use wirepath_pmd::drivers::r#virtual::pcap::{Format, MAX_FRAME, Precision, Reader, Writer};

type Frames = Vec<(u64, Vec<u8>)>;

fn read(reader: &mut Reader<Cursor<&[u8]>>, limit: usize) -> (Frames, Option<String>) {
    let mut frames = Vec::new();
    loop {
        match reader.next() {
            Ok(Some(record)) => {
                assert!(record.data.len() <= limit.min(MAX_FRAME));
                frames.push((record.timestamp, record.data.to_vec()));
            }
            Ok(None) => return (frames, None),
            Err(error) => {
                assert!(matches!(reader.next(), Ok(None)));
                return (frames, Some(error.to_string()));
            }
        }
    }
}

fuzz_target!(|file: &[u8]| {
    let Ok(mut reader) = Reader::new(Cursor::new(file)) else { return };
    let first = read(&mut reader, file.len());
    reader.get_mut().set_position(0);
    reader.restart().expect("the header was good before");
    assert_eq!(read(&mut reader, file.len()), first);

    // The frames can be written and read again.
    for format in [Format::Pcap, Format::Pcapng] {
        let mut copy = Vec::new();
        let mut writer = Writer::new(&mut copy, format, Precision::Nano, MAX_FRAME as u32, "fuzz").expect("a vector");
        for (timestamp, data) in &first.0 {
            writer.write(*timestamp, data.chunks(7), data.len()).expect("a vector");
        }
        drop(writer);
        let mut reader = Reader::new(Cursor::new(&copy[..])).expect("our own header");
        let (again, error) = read(&mut reader, copy.len());
        assert!(error.is_none() && again.len() == first.0.len());
        for ((before, data), (after, copied)) in first.0.iter().zip(&again) {
            assert_eq!(data, copied);
            // The timestamps of pcap have 32 bits for seconds.
            assert!(before == after || format == Format::Pcap && before / 1_000_000_000 > u64::from(u32::MAX));
        }
    }
});
