//! Well-formed files: other programs read the files of the writer, and the reader reads theirs.

use std::process::Command;

use wirepath_testlab::{Requirement, require};

use super::*;

fn run(arguments: &[&str]) -> String {
    let output = Command::new(arguments[0]).args(&arguments[1..]).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn written_files_are_read_back() {
    for (format, precision) in KINDS {
        let (got, error) = read(&file(&frames(), format, precision));
        assert!(error.is_none(), "{error:?}");
        assert_eq!(got.len(), frames().len());
        for (n, (got, want)) in got.iter().zip(frames()).enumerate() {
            let time = TIME + n as u64 * 1001;
            let unit = if precision == Precision::Nano { 1 } else { 1000 };
            assert_eq!((got.0, got.2), (time / unit * unit, want.len() as u32));
            assert_eq!(got.1, want);
        }
    }
}

#[test]
fn frames_are_cut_to_the_snap_length() {
    for format in [Format::Pcap, Format::Pcapng] {
        let mut file = Vec::new();
        let mut writer = Writer::new(&mut file, format, Precision::Nano, 100, "test").unwrap();
        for len in [99, 100, 101, 9000] {
            let frame = vec![len as u8; len];
            writer.write(TIME, frame.chunks(64), len).unwrap();
        }
        drop(writer);
        let (got, error) = read(&file);
        assert!(error.is_none());
        let lens: Vec<_> = got.iter().map(|(_, data, original)| (data.len(), *original)).collect();
        assert_eq!(lens, [(99, 99), (100, 100), (100, 101), (100, 9000)]);
    }
}

/// Checks the files with an independent reader that is always available.
#[test]
fn another_crate_reads_what_we_write() {
    let bytes = file(&frames(), Format::Pcap, Precision::Nano);
    let mut reader = pcap_file::pcap::PcapReader::new(&bytes[..]).unwrap();
    for (n, want) in frames().iter().enumerate() {
        let got = reader.next_packet().unwrap().unwrap();
        assert_eq!(got.timestamp.as_nanos(), u128::from(TIME) + n as u128 * 1001);
        assert_eq!((&*got.data, got.orig_len as usize), (&want[..], want.len()));
    }
    assert!(reader.next_packet().is_none());

    let bytes = file(&frames(), Format::Pcapng, Precision::Nano);
    let mut reader = pcap_file::pcapng::PcapNgReader::new(&bytes[..]).unwrap();
    let mut got = Vec::new();
    while let Some(block) = reader.next_block() {
        if let pcap_file::pcapng::Block::EnhancedPacket(packet) = block.unwrap() {
            got.push(packet.data.to_vec());
        }
    }
    assert_eq!(got, frames());
}

#[test]
fn wireshark_reads_what_we_write() {
    require!(Requirement::Program("tshark"), Requirement::Program("capinfos"));
    let folder = tempfile::tempdir().unwrap();
    for (n, (format, precision)) in KINDS.into_iter().enumerate() {
        let path = folder.path().join(n.to_string());
        std::fs::write(&path, file(&frames(), format, precision)).unwrap();
        let path = path.to_str().unwrap();
        let kind = run(&["capinfos", "-tE", path]);
        let (name, ending) = match (format, precision) {
            (Format::Pcapng, _) => ("pcapng", "Ethernet"),
            (Format::Pcap, Precision::Nano) => ("nanosecond", "Ethernet"),
            (Format::Pcap, Precision::Micro) => ("pcap", "Ethernet"),
        };
        assert!(kind.contains(name) && kind.contains(ending), "{kind}");
        let fields = ["tshark", "-n", "-r", path, "-T", "fields", "-e", "frame.time_epoch", "-e", "frame.len", "-e"];
        let rows = run(&[&fields[..], &["frame.cap_len"]].concat());
        let digits = if precision == Precision::Nano { 9 } else { 6 };
        for (n, (row, frame)) in rows.lines().zip(frames()).enumerate() {
            let time = (TIME + n as u64 * 1001).to_string();
            let expected = format!("{}.{}", &time[..10], &time[10..10 + digits]);
            let columns: Vec<_> = row.split('\t').collect();
            assert!(columns[0].starts_with(&expected), "{row}, expected {expected}");
            assert_eq!(columns[1..], [frame.len().to_string(), frame.len().to_string()]);
        }
        assert_eq!(rows.lines().count(), frames().len());
    }
}

#[test]
fn we_read_what_wireshark_and_tcpdump_write() {
    require!(Requirement::Program("editcap"), Requirement::Program("tcpdump"));
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("in"), file(&frames(), Format::Pcap, Precision::Nano)).unwrap();
    let expect = |name: &str, unit: u64| {
        let (got, error) = read(&std::fs::read(path(name)).unwrap());
        assert!(error.is_none(), "{name}: {error:?}");
        let want: Vec<_> = frames()
            .into_iter()
            .enumerate()
            .map(|(n, f)| ((TIME + n as u64 * 1001) / unit * unit, f.clone(), f.len() as u32))
            .collect();
        assert_eq!(got, want, "{name}");
    };
    for (kind, unit) in [("pcap", 1000), ("nsecpcap", 1), ("pcapng", 1)] {
        run(&["editcap", "-F", kind, &path("in"), &path(kind)]);
        expect(kind, unit);
    }
    run(&["editcap", "-F", "pcapng", "-a", "1:a comment", "-a", "3:another", &path("in"), &path("comments")]);
    expect("comments", 1);
    for (precision, unit) in [("micro", 1000), ("nano", 1)] {
        let precision_option = format!("--time-stamp-precision={precision}");
        run(&["tcpdump", "-r", &path("in"), &precision_option, "-w", &path("dumped")]);
        expect("dumped", unit);
    }
    run(&["editcap", "-F", "pcap", "-s", "64", &path("in"), &path("short")]);
    let (short, error) = read(&std::fs::read(path("short")).unwrap());
    assert!(error.is_none());
    let lens: Vec<_> = short.iter().map(|(_, data, original)| (data.len(), *original as usize)).collect();
    assert_eq!(lens, frames().iter().map(|f| (f.len().min(64), f.len())).collect::<Vec<_>>());
}

#[test]
fn scapy_and_we_read_each_other() {
    require!(Requirement::Scapy);
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    for (n, (format, precision)) in KINDS.into_iter().enumerate() {
        std::fs::write(path(&n.to_string()), file(&frames(), format, precision)).unwrap();
    }
    let none: [&[u8]; 0] = [];
    let script = format!(
        "
for n in range(4):
    for packet in RawPcapReader('{0}/' + str(n)):
        emit(packet[0])
packets = [Ether(frame[0]) for frame in RawPcapReader('{0}/0')]
wrpcap('{0}/big', packets, endianness='>')
wrpcapng('{0}/ng', packets)
",
        folder.path().display()
    );
    let said = wirepath_testlab::oracle::scapy(&none, &script);
    assert_eq!(said.frames, [frames(), frames(), frames(), frames()].concat());
    for name in ["big", "ng"] {
        let (got, error) = read(&std::fs::read(path(name)).unwrap());
        assert!(error.is_none(), "{name}: {error:?}");
        assert_eq!(got.into_iter().map(|(_, data, _)| data).collect::<Vec<_>>(), frames(), "{name}");
    }
}
