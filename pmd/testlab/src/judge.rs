//! Outside judges: programs that we did not write say what they think of frames.

use std::path::Path;

use crate::need::python;
use crate::process::{Outcome, spawn};
use std::time::Duration;

/// Starting scapy on a busy machine takes seconds.
const LIMIT: Duration = Duration::from_secs(180);

/// Tshark shall look at every checksum, which it does not by default.
const CHECK: &[&str] = &[
    "-o",
    "ip.check_checksum:TRUE",
    "-o",
    "udp.check_checksum:TRUE",
    "-o",
    "tcp.check_checksum:TRUE",
    "-o",
    "udp.ignore_ipv6_zero_checksum:FALSE",
];

/// Frames as a pcap file with microseconds, one frame every microsecond.
pub fn pcap<F: AsRef<[u8]>>(frames: impl IntoIterator<Item = F>) -> Vec<u8> {
    // Magic, version 2.4, zone 0, accuracy 0, snap length, link type Ethernet.
    let header = [0xa1b2_c3d4u32, 0x0004_0002, 0, 0, 1 << 18, 1];
    let mut file: Vec<u8> = header.into_iter().flat_map(u32::to_ne_bytes).collect();
    for (at, frame) in frames.into_iter().enumerate() {
        let frame = frame.as_ref();
        let len = frame.len() as u32;
        file.extend([at as u32 / 1_000_000, at as u32 % 1_000_000, len, len].into_iter().flat_map(u32::to_ne_bytes));
        file.extend_from_slice(frame);
    }
    file
}

/// Frames of a pcap file that was written on this machine with microseconds or nanoseconds.
///
/// # Panics
/// If it is anything else.
pub fn read_pcap(file: &[u8]) -> Vec<Vec<u8>> {
    let word = |bytes: &[u8]| u32::from_ne_bytes(bytes[..4].try_into().expect("four bytes"));
    assert!(file.len() >= 24 && [0xa1b2_c3d4, 0xa1b2_3c4d].contains(&word(file)), "not a pcap file of this machine");
    let mut rest = &file[24..];
    let mut frames = Vec::new();
    while !rest.is_empty() {
        let len = word(&rest[8..]) as usize;
        frames.push(rest[16..16 + len].to_vec());
        rest = &rest[16 + len..];
    }
    frames
}

/// Fields of each frame as tshark sees them, one row for each frame; several values of one field are joined by commas.
#[track_caller]
pub fn fields<F: AsRef<[u8]>>(frames: &[F], names: &[&str]) -> Vec<Vec<String>> {
    fields_with(&[], frames, names)
}

/// The same with more arguments for tshark.
#[track_caller]
pub fn fields_with<F: AsRef<[u8]>>(more: &[&str], frames: &[F], names: &[&str]) -> Vec<Vec<String>> {
    let mut arguments = [more, &["-T", "fields", "-E", "separator=/t"]].concat();
    for name in names {
        arguments.extend(["-e", name]);
    }
    let text = tshark(frames, &arguments).expect();
    let rows: Vec<Vec<String>> = text.lines().map(|line| line.split('\t').map(str::to_owned).collect()).collect();
    assert_eq!(rows.len(), frames.len(), "tshark left frames out:\n{text}");
    rows
}

/// Panics unless tshark finds every frame whole: nothing malformed, no expert error, no bad checksum at any layer.
#[track_caller]
pub fn assert_clean<F: AsRef<[u8]>>(frames: &[F]) {
    // Status 0 is "bad"; severity 0x800000 is "error".
    let bad = "_ws.malformed || _ws.expert.severity >= 0x800000 || ip.checksum.status == 0 || udp.checksum.status == 0 \
               || tcp.checksum.status == 0 || icmp.checksum.status == 0 || icmpv6.checksum.status == 0";
    let found = tshark(frames, &["-Y", bad, "-V"]).expect();
    assert!(found.trim().is_empty(), "tshark objects:\n{}", &found[..found.len().min(6000)]);
}

#[track_caller]
fn tshark<F: AsRef<[u8]>>(frames: &[F], arguments: &[&str]) -> Outcome {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("frames.pcap");
    std::fs::write(&file, pcap(frames)).expect("write frames");
    let start = ["tshark", "-n", "-r", file.to_str().expect("a plain path")];
    spawn(&[&start, CHECK, arguments].concat()).wait(LIMIT)
}

/// What a script said of frames.
#[derive(Debug)]
pub struct Said {
    /// Lines that it printed.
    pub lines: Vec<String>,
    /// Frames that it made.
    pub frames: Vec<Vec<u8>>,
}

/// Runs a Python script with scapy loaded. `frames` is the list of given frames, as bytes; `emit(packet)` adds to the frames that
/// come back; what it prints comes back as lines. A failed assertion in it is a panic here.
#[track_caller]
pub fn scapy<F: AsRef<[u8]>>(frames: &[F], script: &str) -> Said {
    const START: &str = "\
import sys, logging
logging.getLogger('scapy').setLevel(logging.ERROR)
from scapy.all import *
from scapy.layers.vxlan import VXLAN
frames = [bytes(raw) for raw, _ in RawPcapReader(sys.argv[1])] if sys.argv[3] != '0' else []
_out = []
def emit(packet): _out.append(bytes(packet))
";
    const END: &str = "\nwriter = RawPcapWriter(sys.argv[2], linktype=1)\nwriter.write_header(None)\n[writer.write(f) for f in _out]\nwriter.close()\n";
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("a plain path").to_owned();
    let (input, output, code) = (path("in.pcap"), path("out.pcap"), path("script.py"));
    std::fs::write(&input, pcap(frames)).expect("write frames");
    std::fs::write(&code, [START, script, END].concat()).expect("write script");
    let python = python().unwrap_or_else(|why| panic!("{why}"));
    let count = frames.len().to_string();
    let text = spawn(&[python, &code, &input, &output, &count]).wait(LIMIT).expect();
    let made = std::fs::read(Path::new(&output)).expect("what scapy wrote");
    Said { lines: text.lines().map(str::to_owned).collect(), frames: read_pcap(&made) }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;
    use crate::Need;

    #[test]
    fn the_judges_agree_on_a_tunnel_and_object_to_a_broken_one() {
        crate::require!(Need::Program("tshark"), Need::Scapy);
        let none: [&[u8]; 0] = [];
        let said = scapy(
            &none,
            "
inner = Ether(src='02:00:00:00:00:01', dst='02:00:00:00:00:02')/IP(src='10.0.0.1', dst='10.0.0.2')/UDP(sport=1, dport=2)/b'x'
emit(Ether()/IPv6(src='fd00::1', dst='fd00::2')/UDP(sport=50000, dport=4789)/VXLAN(vni=42, flags='Instance')/inner)
print('made', len(_out))
",
        );
        assert_eq!((said.lines[0].as_str(), said.frames.len()), ("made 1", 1));
        assert_clean(&said.frames);
        assert_eq!(fields(&said.frames, &["vxlan.vni", "ip.src"]), [["42", "10.0.0.1"]]);
        let again = scapy(&said.frames, "print(Ether(frames[0])[VXLAN].vni)");
        assert_eq!(again.lines, ["42"]);
        let mut broken = said.frames;
        *broken[0].last_mut().unwrap() ^= 1;
        assert!(catch_unwind(|| assert_clean(&broken)).is_err());
    }
}
