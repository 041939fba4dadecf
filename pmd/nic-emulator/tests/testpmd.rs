//! DPDK's testpmd with its default arguments on an emulated ConnectX: queues, counters and rules are objects of
//! firmware commands (DevX).

use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use wirepath_nic_emulator::launch::{self, Launch};
use wirepath_testlab::{FramePort, Lab, Namespace, Requirement, eventually, require};
use wirepath_wire::{Parser, Tunnels};

const LIMIT: Duration = Duration::from_secs(60);
const NEAR: [u8; 6] = [2, 0, 0, 0, 1, 1];
const FAR: [u8; 6] = [2, 0, 0, 0, 1, 2];

/// A running testpmd.
struct Testpmd {
    child: Child,
    commands: ChildStdin,
    output: Arc<Mutex<String>>,
}

impl Testpmd {
    fn start(launch: &Launch, host: &Namespace, queues: u32) -> Self {
        Self::start_with(launch, host, queues, &["--total-num-mbufs=4096", "--forward-mode=macswap"])
    }

    fn start_with(launch: &Launch, host: &Namespace, queues: u32, arguments: &[&str]) -> Self {
        let mut command = launch.command("stdbuf");
        command.args(["-oL", "dpdk-testpmd", "--no-huge", "-m", "512", "--lcores=0@0,1@0"]);
        // Programs with the same prefix exclude each other.
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let prefix = format!("wirepath-{}-{}", std::process::id(), STARTED.fetch_add(1, Ordering::Relaxed));
        command.args([&format!("--file-prefix={prefix}"), "-a", "0000:00:10.0", "--", "-i"]);
        command.args(["--rxd=256", "--txd=256"]).args(arguments);
        command.args([format!("--rxq={queues}"), format!("--txq={queues}")]);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = host.inside(|| command.spawn().unwrap());
        let (commands, mut stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let output = Arc::new(Mutex::new(String::new()));
        let collected = Arc::clone(&output);
        std::thread::spawn(move || {
            let mut some = [0; 4096];
            while let Ok(n @ 1..) = stdout.read(&mut some) {
                collected.lock().unwrap().push_str(&String::from_utf8_lossy(&some[..n]));
            }
        });
        Self { child, commands, output }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.commands, "{line}").unwrap();
    }

    /// Ends the program; returns its exit status.
    fn quit(&mut self) -> ExitStatus {
        self.tell("quit");
        assert!(eventually(LIMIT, || self.child.try_wait().unwrap().is_some()), "{}", self.output());
        self.child.wait().unwrap()
    }

    fn output(&self) -> String {
        self.output.lock().unwrap().clone()
    }

    /// Stops forwarding; returns the number of packets that each of two queues has received since the start.
    fn stop(&mut self) -> [u32; 2] {
        const END: &str = "Accumulated forward statistics";
        let before = self.output().matches(END).count();
        self.tell("stop");
        assert!(eventually(LIMIT, || self.output().matches(END).count() > before), "{}", self.output());
        let output = self.output();
        let last = output.split(END).nth(before).unwrap();
        [0, 1].map(|queue| {
            let received = last.split(&format!("RX Port= 0/Queue= {queue} ")).nth(1);
            let count = received.and_then(|rest| rest.split("RX-packets: ").nth(1)?.split_whitespace().next());
            count.map_or(0, |count| count.parse().unwrap())
        })
    }

    /// Queries a rule until it has counted `hits` packets; returns the packets and bytes of the last answer.
    fn counted(&mut self, rule: u32, hits: u64) -> (u64, u64) {
        let answers = |output: &str, name: &str| -> Vec<u64> {
            output.split(name).skip(1).filter_map(|rest| rest.split_whitespace().next()?.parse().ok()).collect()
        };
        let mut last = (0, 0);
        eventually(LIMIT, || {
            let before = answers(&self.output(), " bytes: ").len();
            self.tell(&format!("flow query 0 {rule} count"));
            assert!(eventually(LIMIT, || answers(&self.output(), " bytes: ").len() > before), "{}", self.output());
            let output = self.output();
            last = (*answers(&output, " hits: ").last().unwrap(), *answers(&output, " bytes: ").last().unwrap());
            last.0 >= hits
        });
        last
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a UDP frame for the NIC.
fn frame(length: usize, port: u16, mark: u8) -> Vec<u8> {
    let mut frame = [&NEAR[..], &FAR, &[8, 0, 0x45, 0]].concat();
    frame.extend((length as u16 - 14).to_be_bytes());
    frame.extend([0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0x30, 0x39]);
    let sum: u32 = frame[14..34].chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    frame[24..26].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    frame.extend(port.to_be_bytes());
    frame.extend((length as u16 - 34).to_be_bytes());
    frame.extend([0, 0]);
    frame.extend((frame.len()..length).map(|at| (at as u8) ^ mark));
    frame
}

/// Sends a frame until it comes back with swapped addresses.
fn wait_until_forwarding(port: &mut FramePort, testpmd: &Testpmd) {
    let probe = frame(100, 1, 0);
    let came = eventually(LIMIT, || {
        port.send(&probe).unwrap();
        port.receive_where(Duration::from_millis(200), |frame| frame.bytes.get(6..12) == Some(&NEAR)).is_some()
    });
    assert!(came, "{}", testpmd.output());
    // Probes that were sent meanwhile.
    while port.receive_where(Duration::from_millis(300), |frame| frame.bytes.get(6..12) == Some(&NEAR)).is_some() {}
}

#[test]
fn testpmd_forwards_and_counts_with_default_arguments() {
    require!(all Requirement::LAB);
    require!(Requirement::Program("dpdk-testpmd"), Requirement::Program("stdbuf"));
    let lab = Lab::new("testpmd");
    let (near, far) = (lab.namespace("near"), lab.namespace("far"));
    lab.veth((&near, "nic0"), (&far, "eth0"));
    near.ip("link set nic0 address 02:00:00:00:01:01");
    for doorbells in ["trap", "queue", "scan"] {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("nic.log");
        let launch = launch::prepare(&format!(
            "doorbells = '{doorbells}'\nlog = '{}'\n[[device]]\nkind = 'mlx5'\nname = 'nic0'\n[[device.port]]\n\
             mac = '02:00:00:00:01:01'\nlink = 'veth:nic0'\nnetdev = 'nic0'\nmtu = 1500\n",
            log.display()
        ));
        let mut testpmd = Testpmd::start(&launch, &near, 1);
        testpmd.tell("start");
        let mut port = far.frames("eth0");
        wait_until_forwarding(&mut port, &testpmd);
        for (i, length) in [60, 64, 65, 300, 1000, 1513, 1514].into_iter().cycle().take(70).enumerate() {
            let sent = frame(length, 2, i as u8);
            port.send(&sent).unwrap();
            let back = port.receive_where(LIMIT, |frame| frame.bytes.get(6..12) == Some(&NEAR)).expect("it comes back");
            assert_eq!(back.bytes, [&FAR[..], &NEAR, &sent[12..]].concat(), "{doorbells}: frame {i}");
        }
        testpmd.tell("flow create 0 ingress pattern eth / ipv4 / udp dst is 9 / end actions count / drop / end");
        testpmd
            .tell("flow create 0 ingress pattern eth / ipv4 / udp dst is 10 / end actions count / queue index 0 / end");
        assert!(eventually(LIMIT, || testpmd.output().contains("Flow rule #1 created")), "{}", testpmd.output());
        for i in 0..5 {
            port.send(&frame(200, 9, i)).unwrap();
        }
        for i in 0..7 {
            let sent = frame(100, 10, i);
            port.send(&sent).unwrap();
            let back = port.receive_where(LIMIT, |frame| frame.bytes.get(6..12) == Some(&NEAR)).expect("it comes back");
            assert_eq!(back.bytes[12..], sent[12..], "{doorbells}: a dropped frame has come back");
        }
        assert_eq!(testpmd.counted(0, 5), (5, 5 * 200), "{doorbells}");
        assert_eq!(testpmd.counted(1, 7), (7, 7 * 100), "{doorbells}");
        testpmd.tell("flow destroy 0 rule 0");
        testpmd.tell("stop");
        assert!(testpmd.quit().success(), "{}", testpmd.output());
        let refused = std::fs::read_to_string(&log).unwrap_or_default();
        assert_eq!(refused, "", "{doorbells}: something was refused");
    }
}

/// The time stamps that net_mlx5 finds in completions count ticks of the core clock.
#[test]
fn testpmd_shows_time_stamps_in_ticks_of_the_clock() {
    const KHZ: f64 = 78_125.0;
    require!(all Requirement::LAB);
    require!(Requirement::Program("dpdk-testpmd"), Requirement::Program("stdbuf"));
    let lab = Lab::new("testpmd-stamps");
    let (near, far) = (lab.namespace("near"), lab.namespace("far"));
    lab.veth((&near, "nic0"), (&far, "eth0"));
    near.ip("link set nic0 address 02:00:00:00:01:01");
    let folder = tempfile::tempdir().unwrap();
    let launch = launch::prepare(&format!(
        "doorbells = 'queue'\nlog = '{}/nic.log'\n[[device]]\nkind = 'mlx5'\nname = 'nic0'\nclock_khz = {KHZ}\n\
         [[device.port]]\nmac = '02:00:00:00:01:01'\nlink = 'veth:nic0'\nnetdev = 'nic0'\nmtu = 1500\n",
        folder.path().display()
    ));
    let arguments = ["--total-num-mbufs=4096", "--forward-mode=rxonly", "--enable-rx-timestamp"];
    let mut testpmd = Testpmd::start_with(&launch, &near, 1, &arguments);
    testpmd.tell("set verbose 1");
    testpmd.tell("start");
    let port = far.frames("eth0");
    let length = 333;
    // Stamps of the frames of this length.
    let stamps = |output: &str| -> Vec<u64> {
        let packets = output.lines().filter(|line| line.contains(&format!("length={length} ")));
        packets.filter_map(|line| line.split("timestamp ").nth(1)?.split_whitespace().next()?.parse().ok()).collect()
    };
    // The first one says that testpmd receives; its time on the way is not known.
    assert!(
        eventually(LIMIT, || {
            port.send(&frame(length, 2, 0)).unwrap();
            std::thread::sleep(Duration::from_millis(200));
            !stamps(&testpmd.output()).is_empty()
        }),
        "{}",
        testpmd.output()
    );
    std::thread::sleep(Duration::from_millis(500));
    let before = stamps(&testpmd.output()).len();
    let mut sent = Vec::new();
    for i in 1..=3 {
        let at = Instant::now();
        port.send(&frame(length, 2, i)).unwrap();
        assert!(
            eventually(LIMIT, || stamps(&testpmd.output()).len() >= before + usize::from(i)),
            "{}",
            testpmd.output()
        );
        sent.push((at, Instant::now()));
        std::thread::sleep(Duration::from_millis(150));
    }
    let stamps = stamps(&testpmd.output()).split_off(before);
    assert_eq!(stamps.len(), 3, "{}", testpmd.output());
    for i in 1..3 {
        let milliseconds = (stamps[i] - stamps[i - 1]) as f64 / KHZ;
        let least = (sent[i].0 - sent[i - 1].1).as_secs_f64() * 1e3;
        let most = (sent[i].1 - sent[i - 1].0).as_secs_f64() * 1e3;
        assert!((least..=most).contains(&milliseconds), "{least} {milliseconds} {most}");
    }
    testpmd.tell("stop");
    testpmd.quit();
    assert_eq!(std::fs::read_to_string(folder.path().join("nic.log")).unwrap_or_default(), "", "something was refused");
}

#[test]
fn testpmd_changes_the_queues_of_a_shared_table() {
    require!(all Requirement::LAB);
    require!(Requirement::Program("dpdk-testpmd"), Requirement::Program("stdbuf"));
    let lab = Lab::new("testpmd-tables");
    let (near, far) = (lab.namespace("near"), lab.namespace("far"));
    lab.veth((&near, "nic0"), (&far, "eth0"));
    near.ip("link set nic0 address 02:00:00:00:01:01");
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("nic.log");
    let launch = launch::prepare(&format!(
        "doorbells = 'scan'\nlog = '{}'\n[[device]]\nkind = 'mlx5'\nname = 'nic0'\n[[device.port]]\n\
         mac = '02:00:00:00:01:01'\nlink = 'veth:nic0'\nnetdev = 'nic0'\nmtu = 1500\n",
        log.display()
    ));
    let mut testpmd = Testpmd::start(&launch, &near, 2);
    testpmd.tell("start");
    let mut port = far.frames("eth0");
    wait_until_forwarding(&mut port, &testpmd);
    testpmd.stop();
    testpmd.tell("flow indirect_action 0 create ingress action rss queues 0 end types ip end / end");
    let rule = "flow create 0 ingress pattern eth / ipv4 / udp dst is 11 / end actions indirect 0 / end";
    let update = "flow indirect_action 0 update 0 action rss queues 1 end types ip end / end";
    // The table of the action survives a stop of the port, its rules do not.
    for (commands, expected) in
        [(vec![rule], 0), (vec![update], 1), (vec!["port stop 0", "port start 0", "flow flush 0", rule], 1)]
    {
        commands.iter().for_each(|command| testpmd.tell(command));
        testpmd.tell("start");
        wait_until_forwarding(&mut port, &testpmd);
        for i in 0..40 {
            let sent = frame(100, 11, i);
            port.send(&sent).unwrap();
            let back = port.receive_where(LIMIT, |frame| frame.bytes.get(6..12) == Some(&NEAR)).expect("it comes back");
            assert_eq!(back.bytes[12..], sent[12..], "{commands:?}");
        }
        // Probes and packets of the far kernel reach either queue.
        let received = testpmd.stop();
        assert!(received[expected] >= 40 && received[1 - expected] < 40, "{commands:?}: {received:?}");
    }
    assert!(testpmd.quit().success(), "{}", testpmd.output());
    assert!(testpmd.output().contains("Indirect action #0 updated"), "{}", testpmd.output());
    assert_eq!(std::fs::read_to_string(&log).unwrap_or_default(), "", "something was refused");
}

/// In DPDK's isolated mode, the port receives what its rules take. The kernel's interface has the rest, and the kernel
/// sends by it.
#[test]
fn isolated_mode_leaves_frames_to_the_kernel() {
    require!(all Requirement::LAB);
    require!(Requirement::Program("dpdk-testpmd"), Requirement::Program("stdbuf"), Requirement::Program("ping"));
    let lab = Lab::new("testpmd-isolated");
    let (near, far) = (lab.namespace("near"), lab.namespace("far"));
    lab.veth((&near, "cable"), (&far, "eth0"));
    // The kernel answers at its interface alone.
    near.ip("link set cable arp off");
    far.ip("addr add 10.0.0.1/24 dev eth0");
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("nic.log");
    let launch = launch::prepare(&format!(
        "doorbells = 'scan'\nlog = '{}'\n[[device]]\nkind = 'mlx5'\nname = 'nic0'\n[[device.port]]\n\
         mac = '02:00:00:00:01:01'\nlink = 'veth:cable'\nnetdev = 'nic0'\nkernel = true\nmtu = 1500\n",
        log.display()
    ));
    let arguments = ["--total-num-mbufs=4096", "--forward-mode=macswap", "--flow-isolate-all"];
    let mut testpmd = Testpmd::start_with(&launch, &near, 1, &arguments);
    assert!(eventually(LIMIT, || testpmd.output().contains("testpmd>")), "{}", testpmd.output());
    near.ip("addr add 10.0.0.2/24 dev nic0");
    assert_eq!((near.mac("nic0"), near.mtu("nic0")), (NEAR, 1500));
    let mut kernel = near.frames("nic0");
    let mut port = far.frames("eth0");
    testpmd.tell("start");
    let ping = |count: &str| far.run(&["ping", "-c", count, "-i", "0.01", "-w", "20", "10.0.0.2"]);
    assert_eq!(ping("20").code, Some(0), "the kernel has all frames before there is a rule");

    let is_taken = |bytes: &[u8]| bytes[12..14] == [8, 0] && bytes[23] == 17 && bytes[36..38] == 4789_u16.to_be_bytes();
    let pattern = "pattern eth / ipv4 dst is 10.0.0.2 / udp dst is 4789 / end";
    testpmd.tell(&format!("flow create 0 ingress {pattern} actions queue index 0 / end"));
    assert!(eventually(LIMIT, || testpmd.output().contains("Flow rule #0 created")), "{}", testpmd.output());
    for i in 0..100 {
        let (taken, left) = (frame(200 + i, 4789, i as u8), frame(200 + i, 4790, i as u8));
        port.send(&left).unwrap();
        port.send(&taken).unwrap();
        let swapped = [&FAR[..], &NEAR, &taken[12..]].concat();
        assert!(port.receive_where(LIMIT, |frame| frame.bytes == swapped).is_some(), "frame {i} comes back");
        let seen = kernel.receive_where(LIMIT, |frame| {
            assert!(!is_taken(&frame.bytes), "the kernel sees a frame of the program");
            frame.bytes.get(36..38) == Some(&4790_u16.to_be_bytes())
        });
        assert_eq!(seen.expect("the kernel has it").bytes, left, "frame {i}");
    }
    assert!(!kernel.drain().iter().any(|frame| is_taken(&frame.bytes)), "the kernel sees a frame of the program");
    assert_eq!(ping("20").code, Some(0), "the kernel has the other frames beside the rule");
    // Without the rule they are the kernel's.
    testpmd.tell("flow flush 0");
    let left = frame(100, 4789, 7);
    let is_back = || {
        port.send(&left).unwrap();
        kernel.receive_where(Duration::from_millis(200), |frame| frame.bytes == left).is_some()
    };
    assert!(eventually(LIMIT, is_back), "{}", testpmd.output());
    testpmd.tell("stop");
    testpmd.quit();
    assert_eq!(std::fs::read_to_string(&log).unwrap_or_default(), "", "something was refused");
}

/// TCP payload of the segments that testpmd requests.
const MSS: u16 = 800;

/// Returns an IP header in front of `payload`, with the right checksum.
fn ip(is_ipv6: bool, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let length = payload.len() as u16;
    if is_ipv6 {
        let [high, low] = length.to_be_bytes();
        let start = [0x60, 0, 0, 7, high, low, protocol, 64];
        return [&start[..], &[0xfd, 0, 0, 0, 0, 0, 0, 1].repeat(2), &[0xfd; 16], payload].concat();
    }
    let [high, low] = (20 + length).to_be_bytes();
    let mut header = [0x45, 0, high, low, 0xff, 0xfe, 0x40, 0, 64, protocol, 0, 0, 198, 18, 0, 1, 198, 18, 0, 2];
    let checksum = wirepath_wire::checksum::sum(&header).checksum();
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    [&header[..], payload].concat()
}

fn ethernet(is_ipv6: bool, destination: [u8; 6], payload: &[u8]) -> Vec<u8> {
    let ethertype = if is_ipv6 { [0x86, 0xdd] } else { [8, 0] };
    [&destination[..], &FAR, &ethertype, payload].concat()
}

/// Returns a TCP segment.
fn tcp(options: usize, payload: usize, flags: u8) -> Vec<u8> {
    let words = (20 + options) as u8 / 4;
    let header = [0x30, 0x39, 0, 9, 0xff, 0xff, 0xff, 0, 0, 0, 0, 2, words << 4, flags, 32, 0, 0, 0, 0, 0];
    [&header[..], &vec![1; options], &(0..payload).map(|i| (i * 7 + i / 256) as u8).collect::<Vec<_>>()].concat()
}

/// Returns a datagram without checksum.
fn udp(port: u16, payload: &[u8]) -> Vec<u8> {
    let fields = [50_000, port, 8 + payload.len() as u16, 0];
    [&fields.iter().flat_map(|field| field.to_be_bytes()).collect::<Vec<_>>()[..], payload].concat()
}

/// Returns the frames that software cuts from a superframe.
fn cut(frame: &[u8]) -> Vec<Vec<u8>> {
    let parse =
        |port| Parser { tunnels: Tunnels::ALL.with_vxlan(Some(port)), ..Parser::default() }.parse(frame).unwrap();
    let parsed = Some(parse(4789)).filter(|parsed| parsed.inner().is_some()).unwrap_or_else(|| parse(8472));
    let l4 = parsed.innermost().l4();
    let mut segments = wirepath_wire::segment::Segmenter::new(frame, &parsed, l4, MSS).unwrap();
    let mut header = vec![0; segments.header_len()];
    let frames = std::iter::from_fn(|| {
        let payload = segments.next_into(&mut header, frame)?.unwrap().payload;
        Some([&header[..], &frame[payload]].concat())
    });
    frames.collect()
}

/// Sends a superframe and compares the frames that come back with those that software makes. The forwarder changes
/// their Ethernet addresses.
fn comes_back_cut(port: &mut FramePort, frame: &[u8], what: &str, output: impl Fn() -> String) {
    port.send(frame).unwrap();
    for (i, wanted) in cut(frame).iter().enumerate() {
        let back = port.receive_where(Duration::from_secs(5), |frame| frame.bytes.get(6..12) == Some(&NEAR));
        let back = back.unwrap_or_else(|| panic!("{what}: frame {i} is missing: {}", output())).bytes;
        assert_eq!(back[12..], wanted[12..], "{what}: frame {i}");
    }
}

/// Returns counters of the send queues: superframes that the NIC segmented, and those of them in tunnels.
fn segmented(control: &Path) -> [u64; 2] {
    let mut socket = UnixStream::connect(control).unwrap();
    writeln!(socket, "counters").unwrap();
    socket.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    let all: serde_json::Value = serde_json::from_str(&answer).unwrap();
    let queues = all["devices"][0]["send_queues"].as_array().unwrap();
    ["segmented", "segmented_in_tunnels"].map(|name| queues.iter().map(|queue| queue[name].as_u64().unwrap()).sum())
}

/// An emulated ConnectX on the near end of a cable that takes frames of 9000 bytes.
struct JumboNic {
    near: Namespace,
    far: Namespace,
    folder: tempfile::TempDir,
    launch: Launch,
    _lab: Lab,
}

impl JumboNic {
    fn new(name: &str) -> Self {
        let lab = Lab::new(name);
        let (near, far) = (lab.namespace("near"), lab.namespace("far"));
        lab.veth((&near, "nic0"), (&far, "eth0"));
        near.ip("link set nic0 address 02:00:00:00:01:01 mtu 9000");
        far.ip("link set eth0 mtu 9000");
        let folder = tempfile::tempdir().unwrap();
        let launch = launch::prepare(&format!(
            "doorbells = 'trap'\nlog = '{0}/nic.log'\ncontrol = '{0}/control'\n[[device]]\nkind = 'mlx5'\n\
             name = 'nic0'\n[[device.port]]\nmac = '02:00:00:00:01:01'\nlink = 'veth:nic0'\nnetdev = 'nic0'\n\
             mtu = 9000\n",
            folder.path().display()
        ));
        Self { near, far, folder, launch, _lab: lab }
    }

    fn segmented(&self) -> [u64; 2] {
        segmented(&self.folder.path().join("control"))
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("nic.log")).unwrap_or_default()
    }
}

/// Outer and inner IP version, bytes of payload, and TCP flags.
fn superframes() -> impl Iterator<Item = (bool, bool, usize, u8)> {
    let versions = [(false, false), (false, true), (true, false), (true, true)].into_iter();
    versions.flat_map(|(outer6, inner6)| {
        [(4001, 0x10), (1600, 0x19), (801, 0x18), (7003, 0x11)].map(|(payload, flags)| (outer6, inner6, payload, flags))
    })
}

#[test]
fn testpmd_has_tcp_in_tunnels_segmented() {
    require!(all Requirement::LAB);
    require!(Requirement::Program("dpdk-testpmd"), Requirement::Program("stdbuf"));
    let nic = JumboNic::new("testpmd-tso");
    let arguments = ["--total-num-mbufs=2048", "--mbuf-size=9400", "--max-pkt-len=9018", "--forward-mode=csum"];
    let mut testpmd = Testpmd::start_with(&nic.launch, &nic.near, 1, &arguments);
    for command in [
        "port stop 0",
        "csum set ip hw 0",
        "csum set tcp hw 0",
        "csum set outer-ip hw 0",
        "csum parse-tunnel on 0",
        &format!("tso set {MSS} 0"),
        &format!("tunnel_tso set {MSS} 0"),
        "port start 0",
        "start",
    ] {
        testpmd.tell(command);
    }
    let mut port = nic.far.frames("eth0");
    // A frame of one segment comes back as it is.
    let probe = ethernet(false, NEAR, &ip(false, 6, &tcp(0, 100, 0x10)));
    let came = eventually(LIMIT, || {
        port.send(&probe).unwrap();
        port.receive_where(Duration::from_millis(200), |frame| frame.bytes.get(6..12) == Some(&NEAR)).is_some()
    });
    assert!(came, "{}", testpmd.output());
    while port.receive_where(Duration::from_millis(300), |frame| frame.bytes.get(6..12) == Some(&NEAR)).is_some() {}
    let vxlan = [8, 0, 0, 0, 0, 0, 42, 0];
    let geneve = [0, 0, 0x65, 0x58, 0, 0, 42, 0];
    for (outer6, inner6, payload, flags) in superframes() {
        let what = |tunnel: &str| format!("{tunnel}, {outer6} {inner6} {payload} {flags:#x}");
        let inner = ip(inner6, 6, &tcp(12, payload, flags));
        let framed = ethernet(inner6, [2; 6], &inner);
        let protocol = if inner6 { [0x86, 0xdd] } else { [8, 0] };
        for (name, protocol, content) in [
            ("vxlan", 17, udp(4789, &[&vxlan[..], &framed].concat())),
            ("geneve", 17, udp(6081, &[&geneve[..], &framed].concat())),
            ("gre", 47, [&[0, 0][..], &protocol, &inner].concat()),
            ("gretap", 47, [&[0, 0, 0x65, 0x58][..], &framed].concat()),
        ] {
            let frame = ethernet(outer6, NEAR, &ip(outer6, protocol, &content));
            comes_back_cut(&mut port, &frame, &what(name), || testpmd.output());
        }
        let frame = ethernet(inner6, NEAR, &inner);
        comes_back_cut(&mut port, &frame, &what("no tunnel"), || testpmd.output());
    }
    assert_eq!(nic.segmented(), [16 * 5, 16 * 4]);
    testpmd.tell("stop");
    assert!(testpmd.quit().success(), "{}", testpmd.output());
    assert_eq!(nic.log(), "", "something was refused");
}

/// Compiles and starts the program of DPDK that gives the NIC the offsets of headers.
fn start_generic(nic: &JumboNic) -> Running {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tunnel_tso.c");
    let program = nic.folder.path().join("tunnel_tso");
    let command = format!(
        "cc -std=gnu11 -O2 -Wall -Wextra -Werror -o {} {} $(pkg-config --cflags --libs libdpdk)",
        program.display(),
        source.display()
    );
    let compiled = Command::new("sh").args(["-c", &command]).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let mut command = nic.launch.command(&program);
    command.args(["--no-huge", "-m", "512", "--lcores=0@0", "-a", "0000:00:10.0"]);
    command.args([&format!("--file-prefix=wirepath-tso-{}", std::process::id()), "--", &MSS.to_string()]);
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    let mut child = nic.near.inside(|| command.spawn().unwrap());
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while line.trim() != "started" {
        line.clear();
        assert!(output.read_line(&mut line).unwrap() > 0, "the program has ended");
    }
    Running(child)
}

/// A program that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// DPDK passes offsets of headers only for its generic kinds of tunnels, which testpmd does not have.
#[test]
fn dpdk_has_tcp_in_tunnels_segmented_by_offsets() {
    require!(all Requirement::LAB);
    require!(
        Requirement::Program("cc"),
        Requirement::Program("pkg-config"),
        Requirement::File("/usr/include/dpdk/rte_ethdev.h")
    );
    let nic = JumboNic::new("dpdk-tso");
    let _program = start_generic(&nic);
    let mut port = nic.far.frames("eth0");
    let mut sent = 0;
    for (outer6, inner6, payload, flags) in superframes() {
        let inner = ip(inner6, 6, &tcp(12, payload, flags));
        let framed = ethernet(inner6, [2; 6], &inner);
        let protocol = if inner6 { [0x86, 0xdd] } else { [8, 0] };
        let vxlan = [8, 0, 0, 0, 0, 0, 42, 0];
        let geneve_ip = [&[0, 0][..], &protocol, &[0, 0, 42, 0]].concat();
        let option = [2, 0, 0x65, 0x58, 0, 0, 42, 0, 1, 2, 3, 1, 9, 9, 9, 9];
        // Lengths of everything between both IP headers.
        for (name, length, protocol, content) in [
            ("vxlan", 30, 17, udp(4789, &[&vxlan[..], &framed].concat())),
            ("vxlan, other port", 30, 17, udp(8472, &[&vxlan[..], &framed].concat())),
            ("geneve, option", 38, 17, udp(6081, &[&option[..], &framed].concat())),
            ("geneve, IP", 16, 17, udp(6081, &[&geneve_ip[..], &inner].concat())),
            ("gpe", 30, 17, udp(4790, &[&[12, 0, 0, 3, 0, 0, 42, 0][..], &framed].concat())),
            ("gpe, IP", 16, 17, udp(4790, &[&[12, 0, 0, 1 + u8::from(inner6), 0, 0, 42, 0][..], &inner].concat())),
            ("nvgre", 22, 47, [&[0x20, 0, 0x65, 0x58, 0, 0, 42, 7][..], &framed].concat()),
            ("ip in ip", 0, if inner6 { 41 } else { 4 }, inner.clone()),
        ] {
            let l3 = |is_ipv6| if is_ipv6 { 40 } else { 20 };
            let kinds = u8::from(outer6) | u8::from(inner6) << 1 | u8::from(protocol == 17) << 2;
            let lengths = [2, kinds, l3(outer6), length, l3(inner6), 32];
            let mut frame = ethernet(outer6, NEAR, &ip(outer6, protocol, &content));
            frame[6..12].copy_from_slice(&lengths);
            let what = format!("{name}, {outer6} {inner6} {payload} {flags:#x}");
            comes_back_cut(&mut port, &frame, &what, || nic.log());
            sent += 1;
        }
    }
    assert_eq!((nic.segmented(), nic.log()), ([sent; 2], String::new()));
}
