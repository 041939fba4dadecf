//! Independent implementations, tshark and scapy, that check frames and create them.

use std::path::Path;
use std::time::Duration;

use pcap_file::pcap::{PcapHeader, PcapPacket, PcapReader, PcapWriter};

use crate::process::{Outcome, spawn};
use crate::requirements::python;

/// Snap length of pcap files. Superframes are shorter.
const SNAP_LENGTH: u32 = 1 << 18;
/// Maximum run time. Starting scapy on a busy machine takes seconds.
const LIMIT: Duration = Duration::from_secs(180);

/// Makes tshark verify every checksum; by default it does not.
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

/// Returns frames as a pcap file, one microsecond apart.
pub fn pcap<F: AsRef<[u8]>>(frames: impl IntoIterator<Item = F>) -> Vec<u8> {
    let header = PcapHeader { snaplen: SNAP_LENGTH, ..PcapHeader::default() };
    let mut writer = PcapWriter::with_header(Vec::new(), header).expect("a header");
    for (number, frame) in (0..).zip(frames) {
        let frame = frame.as_ref();
        let packet = PcapPacket::new(Duration::from_micros(number), frame.len() as u32, frame);
        writer.write_packet(&packet).expect("a frame below the snap length");
    }
    writer.into_writer()
}

/// Returns the frames of a pcap file.
///
/// # Panics
/// If it is another kind of file or malformed.
pub fn read_pcap(file: &[u8]) -> Vec<Vec<u8>> {
    let mut reader = PcapReader::new(file).expect("a pcap file");
    let next = || reader.next_raw_packet().map(|frame| frame.expect("a frame").data.into_owned());
    std::iter::from_fn(next).collect()
}

/// Returns fields of each frame as tshark parses them, one row for each frame. Several values of a field are
/// joined by commas.
#[track_caller]
pub fn fields<F: AsRef<[u8]>>(frames: &[F], names: &[&str]) -> Vec<Vec<String>> {
    fields_with(&[], frames, names)
}

/// Like [`fields`], with additional arguments for tshark.
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

/// Panics unless tshark finds every frame correct: not malformed, no expert error, and no bad checksum at any
/// layer.
#[track_caller]
pub fn assert_clean<F: AsRef<[u8]>>(frames: &[F]) {
    assert_clean_with(&[], frames);
}

/// Like [`assert_clean`], with additional arguments for tshark.
#[track_caller]
pub fn assert_clean_with<F: AsRef<[u8]>>(more: &[&str], frames: &[F]) {
    // Status 0 is "bad"; severity 0x800000 is "error".
    let bad = "_ws.malformed || _ws.expert.severity >= 0x800000 || ip.checksum.status == 0 || udp.checksum.status == 0 \
               || tcp.checksum.status == 0 || icmp.checksum.status == 0 || icmpv6.checksum.status == 0";
    let found = tshark(frames, &[more, &["-Y", bad, "-V"]].concat()).expect();
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

/// Output of a script.
#[derive(Debug)]
pub struct ScriptOutput {
    /// Lines that it printed.
    pub lines: Vec<String>,
    /// Frames that it emitted.
    pub frames: Vec<Vec<u8>>,
}

/// Runs a Python script with scapy loaded. In it, `frames` is the list of the given frames as bytes, and
/// `emit(packet)` adds to the returned frames. Printed lines are returned too. A failed assertion in the
/// script panics here.
#[track_caller]
pub fn scapy<F: AsRef<[u8]>>(frames: &[F], script: &str) -> ScriptOutput {
    const START: &str = "\
import sys, logging
logging.getLogger('scapy').setLevel(logging.ERROR)
from scapy.config import conf
# The other layers take half of the start.
conf.load_layers = ['dns', 'inet', 'inet6', 'ipsec', 'l2', 'vxlan']
from scapy.all import *
from scapy.layers.vxlan import VXLAN
frames = [bytes(raw) for raw, _ in RawPcapReader(sys.argv[1])] if sys.argv[3] != '0' else []
_out = []
def emit(packet): _out.append(bytes(packet))
";
    const END: &str = "
writer = RawPcapWriter(sys.argv[2], linktype=1)
writer.write_header(None)
[writer.write(f) for f in _out]
writer.close()
";
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("a plain path").to_owned();
    let (input, output, code) = (path("in.pcap"), path("out.pcap"), path("script.py"));
    std::fs::write(&input, pcap(frames)).expect("write frames");
    std::fs::write(&code, [START, script, END].concat()).expect("write script");
    let python = python().unwrap_or_else(|why| panic!("{why}"));
    let count = frames.len().to_string();
    let text = spawn(&[python, &code, &input, &output, &count]).wait(LIMIT).expect();
    let made = std::fs::read(Path::new(&output)).expect("what scapy wrote");
    ScriptOutput { lines: text.lines().map(str::to_owned).collect(), frames: read_pcap(&made) }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;
    use crate::Requirement;

    #[test]
    fn tshark_and_scapy_accept_and_reject_a_tunnel() {
        crate::require!(Requirement::Program("tshark"), Requirement::Scapy);
        let none: [&[u8]; 0] = [];
        let said = scapy(
            &none,
            "
ether = Ether(src='02:00:00:00:00:01', dst='02:00:00:00:00:02')
inner = ether/IP(src='10.0.0.1', dst='10.0.0.2')/UDP(sport=1, dport=2)/b'x'
outer = Ether()/IPv6(src='fd00::1', dst='fd00::2')/UDP(sport=50000, dport=4789)
emit(outer/VXLAN(vni=42, flags='Instance')/inner)
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
