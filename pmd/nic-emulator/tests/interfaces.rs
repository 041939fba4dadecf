//! Links to network interfaces: a C program reflects frames on an emulated NIC whose link is a veth pair or a
//! TAP interface.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use wirepath_nic_emulator::launch;
use wirepath_testlab::{FramePort, Lab, Namespace, Requirement, require};

const HEADERS: [Requirement; 3] = [
    Requirement::Program("cc"),
    Requirement::File("/usr/include/infiniband/manadv.h"),
    Requirement::File("/etc/libibverbs.d/mana.driver"),
];
const LIMIT: Duration = Duration::from_secs(60);

fn compile(folder: &Path) -> PathBuf {
    let program = folder.join("reflect");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reflect.c");
    let output = Command::new("cc")
        .args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program)
        .arg(source)
        .args(["-lmana", "-libverbs"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// Starts the reflector; returns when its queues are ready.
fn reflector(launch: &launch::Launch, program: &Path, host: &Namespace) -> Child {
    let mut child = host.inside(|| launch.command(program).stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    child
}

fn frame(length: usize, mark: u8, tag: Option<u16>) -> Vec<u8> {
    let mut frame = vec![0x02, 0, 0, 0, 0, 0x0b, 0x02, 0, 0, 0, 0, 0x0a];
    if let Some(tag) = tag {
        frame.extend([0x81, 0x00]);
        frame.extend(tag.to_be_bytes());
    }
    frame.extend([0x88, 0xb5]);
    frame.extend((frame.len()..length).map(|at| (at as u8) ^ mark));
    frame
}

/// Checks that frames return complete and with their VLAN tags, then stops the reflector.
fn exchange(port: &mut FramePort, mut child: Child) {
    for (i, length) in [60, 64, 1000, 1514, 1514, 60, 300].into_iter().cycle().take(70).enumerate() {
        let tag = (i % 3 == 1).then_some(i as u16 + 100);
        let sent = frame(length, i as u8, tag);
        port.send(&sent).unwrap();
        let back =
            port.receive_where(LIMIT, |frame| frame.bytes.get(6..12) == Some(&sent[..6])).expect("it comes back");
        assert_eq!(back.bytes[..6], sent[6..12]);
        assert_eq!(back.bytes[12..], sent[12..], "frame {i}, tag {tag:?}");
    }
    let mut end = frame(60, 0, None);
    end[13] = 0xb6;
    port.send(&end).unwrap();
    assert!(child.wait().unwrap().success());
}

#[test]
fn veth_pairs_work_as_links() {
    require!(all HEADERS);
    require!(all Requirement::LAB);
    let lab = Lab::new("nicveth");
    let (near, far) = (lab.namespace("near"), lab.namespace("far"));
    lab.veth((&near, "wire"), (&far, "eth0"));
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path());
    for doorbells in ["trap", "queue", "scan"] {
        let nic = format!(
            "doorbells = '{doorbells}'\n[[device]]\nkind = 'mana'\n[[device.port]]\nmtu = 1500\nlink = 'veth:wire'\n"
        );
        let launch = launch::prepare(&nic);
        let child = reflector(&launch, &program, &near);
        exchange(&mut far.frames("eth0"), child);
    }
}

#[test]
fn tap_interfaces_work_as_links() {
    require!(all HEADERS);
    require!(all Requirement::LAB);
    require!(Requirement::File("/dev/net/tun"));
    let lab = Lab::new("nictap");
    let host = lab.namespace("host");
    let folder = tempfile::tempdir().unwrap();
    let program = compile(folder.path());
    let launch = launch::prepare("[[device]]\nkind = 'mana'\n[[device.port]]\nlink = 'tap:nic0'\n");
    let child = reflector(&launch, &program, &host);
    exchange(&mut host.frames("nic0"), child);
}

#[test]
fn missing_interfaces_are_reported() {
    require!(Requirement::Program("ibv_devinfo"), Requirement::File("/etc/libibverbs.d/mana.driver"));
    let launch = launch::prepare("[[device]]\nkind = 'mana'\n[[device.port]]\nlink = 'veth:nosuch'\n");
    let output = launch.command("ibv_devinfo").output().unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("link to nosuch: No such device"), "{text}");
}
