//! Malformed files, and valid ones that few writers produce.

use super::*;

/// Builds a file from words of one byte order and raw bytes.
struct Bytes {
    big: bool,
    bytes: Vec<u8>,
}

impl Bytes {
    fn new(big: bool) -> Self {
        Self { big, bytes: Vec::new() }
    }

    fn words(mut self, words: &[u32]) -> Self {
        for word in words {
            self.bytes.extend(if self.big { word.to_be_bytes() } else { word.to_le_bytes() });
        }
        self
    }

    fn halves(mut self, halves: &[u16]) -> Self {
        for half in halves {
            self.bytes.extend(if self.big { half.to_be_bytes() } else { half.to_le_bytes() });
        }
        self
    }

    fn raw(mut self, raw: &[u8]) -> Self {
        self.bytes.extend_from_slice(raw);
        self
    }

    fn pcap(self, link_type: u32) -> Self {
        self.words(&[0xa1b2_c3d4]).halves(&[2, 4]).words(&[0, 0, 65_535, link_type])
    }

    fn block(self, kind: u32, body: impl FnOnce(Self) -> Self) -> Self {
        let big = self.big;
        let mut body = body(Self::new(big)).bytes;
        body.resize(body.len().next_multiple_of(4), 0);
        let length = body.len() as u32 + 12;
        self.words(&[kind, length]).raw(&body).words(&[length])
    }

    fn section(self) -> Self {
        self.block(0x0a0d_0d0a, |b| b.words(&[0x1a2b_3c4d]).halves(&[1, 0]).words(&[u32::MAX, u32::MAX]))
    }

    fn interface(self, link_type: u16, options: &[u8]) -> Self {
        self.block(1, |b| b.halves(&[link_type, 0]).words(&[0]).raw(options))
    }

    fn packet(self, interface: u32, time: u64, captured: u32, data: &[u8]) -> Self {
        self.block(6, |b| {
            b.words(&[interface, (time >> 32) as u32, time as u32, captured, data.len() as u32]).raw(data)
        })
    }
}

fn refusal(bytes: &Bytes) -> String {
    let (_, error) = read(&bytes.bytes);
    error.expect("an error").to_string()
}

#[test]
fn malformed_files_are_refused_with_offset_and_reason() {
    let new = || Bytes::new(false);
    let cases: Vec<(Bytes, &str)> = vec![
        (new(), "at byte 0: neither pcap nor pcapng: the file is shorter than 4 bytes"),
        (new().raw(b"#!/bin/sh\n"), "at byte 0: neither pcap nor pcapng: starts with 0x622f2123"),
        (new().raw(&[0x1f, 0x8b, 8, 0, 0, 0]), "at byte 0: compressed; unpack it with gunzip first"),
        (new().words(&[0xa1b2_cd34, 0]), "at byte 0: the modified pcap format of old Linux kernels; convert it"),
        (new().words(&[0xa1b2_c3d4, 0]), "at byte 0: the file ends inside a record"),
        (new().words(&[0xa1b2_c3d4, 9, 0, 0, 0, 1]), "at byte 0: pcap version 9.0, expected 2.4"),
        (new().pcap(113), "frames of link type 113 (Linux cooked); only Ethernet (1) can be replayed"),
        (new().pcap(147), "frames of link type 147 (user-defined)"),
        (new().pcap(1).words(&[0, 0, u32::MAX, 60]), "at byte 24: a frame of 4294967295 bytes; 262144 at most"),
        (new().pcap(1).words(&[0, 0, 262_145, 60]), "at byte 24: a frame of 262145 bytes"),
        (new().pcap(1).words(&[0, 0, 60, 60]).raw(&[0; 59]), "at byte 24: the file ends inside a record"),
        (new().section().words(&[1, 0, 0]), "at byte 28: a block of 0 bytes, expected a multiple of 4 from 12"),
        (new().section().words(&[1, 13, 0]), "at byte 28: a block of 13 bytes"),
        (new().section().words(&[77, 0xffff_fffc, 0]), "at byte 28: a block of 4294967292 bytes"),
        (new().section().words(&[77, 4096, 0]), "at byte 28: the file ends inside a record"),
        (
            new().section().words(&[77, 12, 16]).section(),
            "at byte 36: a block that starts with length 12 and ends with 16",
        ),
        (new().block(0x0a0d_0d0a, |b| b.words(&[0x1234])), "a section with byte-order magic 0x00001234"),
        (new().block(0x0a0d_0d0a, |b| b.words(&[0x1a2b_3c4d])), "a section header that is too short"),
        (new().block(0x0a0d_0d0a, |b| b.words(&[0x1a2b_3c4d, 2, 0, 0])), "pcapng version 2.0, expected 1.0"),
        (new().section().block(1, |b| b), "an interface description that is too short"),
        (new().section().interface(127, &[]), "link type 127 (802.11 with radiotap)"),
        (new().section().packet(0, 0, 4, &[0; 4]), "a packet of interface 0, which was not described"),
        (new().section().interface(1, &[]).packet(1, 0, 4, &[0; 4]), "a packet of interface 1, which"),
        (
            new().section().interface(1, &[]).packet(0, 0, 9, &[0; 8]),
            "a frame of 9 bytes in a block with room for fewer",
        ),
        (new().section().interface(1, &[]).packet(0, 0, u32::MAX, &[0; 8]), "a frame of 4294967295 bytes in a block"),
        (new().section().interface(1, &[]).packet(0, 0, 262_148, &[0; 262_148]), "a frame of 262148 bytes; 262144"),
        (new().section().interface(1, &[]).block(6, |b| b.words(&[0])), "a packet block that is too short"),
        (new().section().interface(1, &[]).block(3, |b| b), "a packet block that is too short"),
    ];
    for (bytes, want) in cases {
        let got = refusal(&bytes);
        assert!(got.contains(want), "got: {got}\nwant: {want}");
    }
    let mut many = new().section();
    for _ in 0..4097 {
        many = many.interface(1, &[]);
    }
    assert!(refusal(&many).contains("more than 4096 interfaces in a section"));
}

#[test]
fn rare_but_legal_files_are_read() {
    let frame = [7; 60];
    for big in [false, true] {
        let new = || Bytes::new(big);
        let (got, error) = read(&new().pcap(1).words(&[5, 6, 60, 9000]).raw(&frame).words(&[4, 0, 0, 0]).bytes);
        assert!(error.is_none());
        assert_eq!(
            got,
            [(5_000_006_000, frame.to_vec(), 9000), (4_000_000_000, vec![], 0)],
            "empty frame, time going back"
        );
        // Frame check sequence of two 16-bit words.
        let (got, _) = read(&new().pcap(2 << 28 | 1 << 26 | 1).words(&[0, 0, 60, 60]).raw(&frame).bytes);
        assert_eq!(got[0].1.len(), 56);

        // if_tsresol 3 (milliseconds), if_tsoffset 100 seconds, if_fcslen 32 bits; then 2^-10; then an
        // invalid value.
        let offset = if big { 100u64.to_be_bytes() } else { 100u64.to_le_bytes() };
        let milli = new().halves(&[9, 1]).raw(&[3, 0, 0, 0]).halves(&[14, 8]).raw(&offset);
        let milli = milli.halves(&[13, 1]).raw(&[32, 0, 0, 0]).halves(&[0, 0]).bytes;
        let binary = new().halves(&[9, 1]).raw(&[0x80 | 10, 0, 0, 0]).bytes;
        let nonsense = new().halves(&[9, 1]).raw(&[0x7f, 0, 0, 0]).halves(&[2, 400]).bytes;
        let file = new()
            .section()
            .block(10, |b| b.raw(&[9; 300]))
            .interface(1, &milli)
            .interface(1, &binary)
            .interface(1, &nonsense)
            .packet(0, 5, 60, &frame)
            .packet(1, 512, 60, &frame)
            .packet(2, 512, 60, &frame)
            .block(3, |b| b.words(&[60]).raw(&frame))
            .block(2, |b| b.halves(&[1, 0]).words(&[0, 1024, 60, 61]).raw(&frame))
            .section()
            .interface(1, &[])
            .packet(0, 7, 60, &frame);
        let (got, error) = read(&file.bytes);
        assert!(error.is_none(), "{error:?}");
        let times: Vec<_> = got.iter().map(|(time, data, _)| (*time, data.len())).collect();
        let want = [(100_005_000_000, 56), (500_000_000, 60), (0, 60), (0, 56), (1_000_000_000, 60), (7000, 60)];
        assert_eq!(times, want);
        // A simple packet that was truncated to the interface's snap length.
        let short =
            new().section().block(1, |b| b.halves(&[1, 0]).words(&[20])).block(3, |b| b.words(&[60]).raw(&[1; 20]));
        assert_eq!(read(&short.bytes).0, [(0, vec![1; 20], 60)]);
    }
    // Options that exceed the reader's buffer.
    let huge = Bytes::new(false)
        .section()
        .interface(1, &[])
        .block(6, |b| b.words(&[0, 0, 0, 60, 60]).raw(&frame).halves(&[1, 65_000]).raw(&vec![1; 600_000]));
    let (got, error) = read(&huge.packet(0, 0, 60, &frame).bytes);
    assert!(error.is_none(), "{error:?}");
    assert_eq!(got.len(), 2);
}

#[test]
fn a_file_of_the_other_byte_order_can_be_read_twice() {
    let frame = [7; 60];
    let old = Bytes::new(true).pcap(1).words(&[5, 6, 60, 60]).raw(&frame).bytes;
    let new = Bytes::new(true).section().interface(1, &[]).packet(0, 9, 60, &frame).bytes;
    for file in [old, new] {
        let mut reader = Reader::new(std::io::Cursor::new(&file[..])).unwrap();
        for _ in 0..3 {
            assert_eq!(reader.next().unwrap().unwrap().data, frame);
            assert!(reader.next().unwrap().is_none());
            reader.get_mut().set_position(0);
            reader.restart().unwrap();
        }
    }
}

#[test]
fn a_file_may_end_anywhere() {
    let short: Vec<Vec<u8>> = frames().into_iter().take(4).collect();
    for (format, precision) in KINDS {
        let whole = file(&short, format, precision);
        for end in 0..whole.len() {
            let (got, error) = read(&whole[..end]);
            assert!(got.iter().zip(&short).all(|(got, want)| got.1 == *want));
            match error {
                None => assert!(got.len() < short.len()),
                Some(FileError::Truncated { offset }) => assert!(offset <= end as u64),
                Some(error) => assert!(end < 4, "{end}: {error}"),
            }
        }
    }
}

#[test]
fn corrupted_files_cause_no_panic() {
    let mut random = fastrand::Rng::with_seed(1);
    let short: Vec<Vec<u8>> = frames().into_iter().take(3).collect();
    for (format, precision) in KINDS {
        let whole = file(&short, format, precision);
        for _ in 0..3000 {
            let mut damaged = whole.clone();
            for _ in 0..random.usize(1..=4) {
                let at = random.usize(..damaged.len());
                damaged[at] = [0, 1, 0x7f, 0xff, random.u8(..)][random.usize(..5)];
            }
            let (got, _) = read(&damaged);
            assert!(got.len() <= damaged.len() / 12, "each record takes some of the file");
        }
    }
}
