//! DPDK's testpmd with its default arguments on an emulated ConnectX: queues, counters and rules are objects of
//! firmware commands (DevX).

use std::io::{Read, Write};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use wirepath_nic_emulator::launch::{self, Launch};
use wirepath_testlab::{FramePort, Lab, Namespace, Requirement, eventually, require};

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
        let mut command = launch.command("stdbuf");
        command.args(["-oL", "dpdk-testpmd", "--no-huge", "-m", "512", "--lcores=0@0,1@0"]);
        // Programs with the same prefix exclude each other.
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let prefix = format!("wirepath-{}-{}", std::process::id(), STARTED.fetch_add(1, Ordering::Relaxed));
        command.args([&format!("--file-prefix={prefix}"), "-a", "0000:00:10.0", "--", "-i"]);
        command.args(["--total-num-mbufs=4096", "--forward-mode=macswap", "--rxd=256", "--txd=256"]);
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
        testpmd.tell("quit");
        assert!(eventually(LIMIT, || testpmd.child.try_wait().unwrap().is_some()), "{}", testpmd.output());
        assert!(testpmd.child.wait().unwrap().success(), "{}", testpmd.output());
        let refused = std::fs::read_to_string(&log).unwrap_or_default();
        assert_eq!(refused, "", "{doorbells}: something was refused");
    }
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
    testpmd.tell("quit");
    assert!(eventually(LIMIT, || testpmd.child.try_wait().unwrap().is_some()), "{}", testpmd.output());
    assert!(testpmd.child.wait().unwrap().success(), "{}", testpmd.output());
    assert!(testpmd.output().contains("Indirect action #0 updated"), "{}", testpmd.output());
    assert_eq!(std::fs::read_to_string(&log).unwrap_or_default(), "", "something was refused");
}
