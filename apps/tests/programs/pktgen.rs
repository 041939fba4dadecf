//! `wirepath pktgen`: tshark judges what it sends; devices of the kernel with known behaviour judge what it measures.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use serde_json::Value;
use wirepath_testlab::{Lab, Requirement, oracle, require};

const WIREPATH: &str = env!("CARGO_BIN_EXE_wirepath");

fn output(arguments: &[&str]) -> Output {
    Command::new(WIREPATH).args(["-q", "pktgen"]).args(arguments).output().unwrap()
}

/// Runs the tool with `--json` and returns the result.
#[track_caller]
fn result(arguments: &[&str]) -> Value {
    let output = output(&[&["--json"], arguments].concat());
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Asserts that the tool refuses its arguments with an error.
#[track_caller]
pub(super) fn assert_refused(output: &Output, error: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}: {text}");
    assert!(text.contains(error), "{error}: {text}");
}

/// Writes a configuration of a cable in memory with faults, and returns its path.
pub(super) fn memory_cable(faults: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ports.toml");
    let text = format!(
        "[[port]]\nname = 'out'\ndriver = 'memory'\ndevice = 'x'\n\
         [[port]]\nname = 'in'\ndriver = 'memory'\ndevice = 'x'\n{faults}"
    );
    std::fs::write(&path, text).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (folder, path)
}

/// Writes packets to a file and returns its frames.
#[track_caller]
fn frames(arguments: &[&str]) -> Vec<Vec<u8>> {
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join("out.pcap");
    let port = format!("pcap:{}", path.display());
    let all = [&["--tx", &port, "--no-self-check", "--rate", "max"], arguments].concat();
    let json = result(&all);
    let frames = oracle::read_pcap(&std::fs::read(path).unwrap());
    assert_eq!(json["result"]["sent"], frames.len());
    frames
}

/// Header stacks, the shortest size that has room for them, and the protocols that tshark sees.
const STACKS: &[(&str, &str, &str)] = &[
    ("ipv4 / udp", "64", "eth:ethertype:ip:udp:data"),
    ("ipv4 / tcp", "76", "eth:ethertype:ip:tcp:data"),
    ("ipv6 / udp", "84", "eth:ethertype:ipv6:udp:data"),
    ("ipv6 / tcp flags syn+ack", "96", "eth:ethertype:ipv6:tcp:data"),
    ("ipv4 / icmp", "64", "eth:ethertype:ip:icmp:data"),
    ("ipv6 / icmpv6", "84", "eth:ethertype:ipv6:icmpv6:data"),
    ("ipv4", "64", "eth:ethertype:ip:data"),
    ("vlan vid 5 / ipv4 / udp", "68", "eth:ethertype:vlan:ethertype:ip:udp:data"),
    (
        "vlan vid 5 tpid 0x88a8 / vlan vid 6 / ipv6 / udp",
        "92",
        "eth:ethertype:ieee8021ad:ethertype:vlan:ethertype:ipv6:udp:data",
    ),
    ("mpls label 100 / mpls label 200 / ipv4 / udp", "72", "eth:ethertype:mpls:ip:udp:data"),
    ("ipv4 / esp spi 0x100", "64", "eth:ethertype:ip:esp"),
    ("ipv4 / udp / vxlan vni 5 / eth / ipv4 / udp", "114", "eth:ethertype:ip:udp:vxlan:eth:ethertype:ip:udp:data"),
    ("ipv6 / udp / vxlan vni 5 / eth / ipv6 / tcp", "166", "eth:ethertype:ipv6:udp:vxlan:eth:ethertype:ipv6:tcp:data"),
    ("ipv4 / udp / geneve vni 9 / eth / ipv4 / tcp", "126", "eth:ethertype:ip:udp:geneve:eth:ethertype:ip:tcp:data"),
    ("ipv6 / udp / geneve vni 9 / ipv4 / udp", "120", "eth:ethertype:ipv6:udp:geneve:ip:udp:data"),
    ("ipv4 / udp / vxlan-gpe vni 7 / ipv4 / udp", "100", "eth:ethertype:ip:udp:ip:udp:data"),
    ("ipv4 / gre / ipv4 / udp", "88", "eth:ethertype:ip:gre:ip:udp:data"),
    ("ipv4 / gre key 77 / eth / ipv6 / udp", "126", "eth:ethertype:ip:gre:eth:ethertype:ipv6:udp:data"),
    ("ipv6 / gre / mpls label 8 / inner ipv4 / udp", "112", "eth:ethertype:ipv6:gre:mpls:ip:udp:data"),
    ("ipv4 / inner ipv4 / udp", "84", "eth:ethertype:ip:ip:udp:data"),
    ("ipv4 / inner ipv6 / tcp", "116", "eth:ethertype:ip:ipv6:tcp:data"),
    ("ipv6 / inner ipv4 / icmp", "104", "eth:ethertype:ipv6:ip:icmp:data"),
    ("ipv4 / udp / mpls label 9 / inner ipv4 / udp", "96", "eth:ethertype:ip:udp:mpls:ip:udp:data"),
];

#[test]
fn tshark_finds_every_header_stack_correct() {
    require!(Requirement::Program("tshark"));
    for (stack, least, protocols) in STACKS {
        // The shortest, an odd and a long length.
        let least_value: usize = least.parse().unwrap();
        let sizes = format!("{least},{},1518", least_value + 13);
        let frames = frames(&["--headers", stack, "--size", &sizes, "--count", "6"]);
        let lengths: Vec<usize> = frames.iter().map(Vec::len).collect();
        assert_eq!(lengths, [least_value - 4, least_value + 9, 1514].repeat(2), "{stack}");
        // The sequence numbers of TCP and ESP do not change.
        let order = ["-o", "tcp.analyze_sequence_numbers:FALSE", "-o", "esp.do_esp_sequence_analysis:FALSE"];
        oracle::assert_clean_with(&order, &frames);
        for row in oracle::fields_with(&order, &frames, &["frame.protocols"]) {
            assert!(row[0].starts_with(protocols), "{stack}: {row:?}");
        }
        // One byte less has no room for the signature.
        if least_value > 64 {
            let shorter = (least_value - 1).to_string();
            let refused = output(&["--tx", "null:", "--headers", stack, "--size", &shorter]);
            let error = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert!(refused.status.code() == Some(2) && error.contains(&format!("so at least {least}")), "{error}");
        }
    }
}

#[test]
fn flows_have_the_asked_values() {
    require!(Requirement::Program("tshark"));
    let stack = "eth dst 02:00:00:00:00:09 / vlan vid 10-11 / ipv4 src 10.0.0.1-10.0.0.3 / udp src 7,9";
    let rows = oracle::fields(
        &frames(&["--headers", stack, "--size", "68", "--count", "24"]),
        &["vlan.id", "ip.src", "udp.srcport", "eth.dst"],
    );
    let mut expected = Vec::new();
    for port in ["7", "9"] {
        for host in 1..=3 {
            for vid in ["10", "11"] {
                expected.push(vec![
                    vid.to_owned(),
                    format!("10.0.0.{host}"),
                    port.to_owned(),
                    "02:00:00:00:00:09".to_owned(),
                ]);
            }
        }
    }
    assert_eq!(rows, [expected.clone(), expected].concat(), "all combinations, twice");
    let few = frames(&["--headers", stack, "--size", "68", "--count", "24", "--flows", "2"]);
    let few = oracle::fields(&few, &["ip.src"]);
    assert!(few.iter().all(|row| row[0] == "10.0.0.1"));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("stacks");
    std::fs::write(&file, "ipv4 dst 10.0.0.1 / udp # one\n\n# none\nipv6 / udp\n").unwrap();
    let frames = frames(&["--headers-file", file.to_str().unwrap(), "--size", "84", "--count", "4"]);
    let kinds: Vec<u8> = frames.iter().map(|frame| frame[14] >> 4).collect();
    assert_eq!(kinds, [4, 6, 4, 6]);
}

#[test]
fn imix_has_its_shares() {
    let frames = frames(&["--size", "imix", "--count", "1200"]);
    let count = |len: usize| frames.iter().filter(|frame| frame.len() + 4 == len).count();
    assert_eq!((count(64), count(570), count(1518)), (700, 400, 100));
}

/// Returns the times of a pcap file with nanoseconds or microseconds, in seconds.
fn tshark_times(file: &Path) -> Vec<f64> {
    let output = Command::new("tshark")
        .args(["-n", "-T", "fields", "-e", "frame.time_relative", "-r"])
        .arg(file)
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap().lines().map(|line| line.parse().unwrap()).collect()
}

#[test]
fn captures_are_sent_as_they_are() {
    require!(Requirement::Program("tshark"));
    let folder = tempfile::tempdir().unwrap();
    let (read, written) = (folder.path().join("in.pcap"), folder.path().join("out.pcapng"));
    let sent: Vec<Vec<u8>> = (0..20u8).map(|n| vec![n; 60 + usize::from(n)]).collect();
    // Frames of the oracle are a microsecond apart; here they are 10 ms apart.
    let mut file = oracle::pcap(&sent);
    let mut at = 24;
    for n in 0..20u32 {
        file[at..at + 4].copy_from_slice(&0u32.to_be_bytes());
        file[at + 4..at + 8].copy_from_slice(&(n * 10_000).to_be_bytes());
        at += 16 + sent[n as usize].len();
    }
    std::fs::write(&read, file).unwrap();
    let port = format!("pcap:{}", written.display());
    let all = ["--tx", &port, "--no-self-check", "--pcap", read.to_str().unwrap(), "--passes", "2"];
    let json = result(&all);
    assert_eq!(json["result"]["sent"], 40);
    let times = tshark_times(&written);
    assert_eq!(times.len(), 40);
    // Each pass has 19 intervals of 10 ms. Times are those of the write, in bursts of a loaded machine.
    assert!((0.36..3.0).contains(&times[39]), "{times:?}");
    let json = result(&[&all[..], &["--rate", "1Mpps"]].concat());
    assert!(json["result"]["seconds"].as_f64().unwrap() < 0.3, "{json}");
    let frames = Command::new("tshark")
        .args(["-r", written.to_str().unwrap(), "-F", "pcap", "-w", "-"])
        .output()
        .unwrap()
        .stdout;
    assert_eq!(oracle::read_pcap(&frames), [sent.clone(), sent].concat());
}

#[test]
fn impossible_requests_are_refused_with_the_limit() {
    let folder = tempfile::tempdir().unwrap();
    let pcap = format!("pcap:{}/x.pcap", folder.path().display());
    for (arguments, error) in [
        (&["--rx", "null:"][..], "no port sends; give --tx PORT or --port PORT"),
        (&["--tx", "nul:x"], "there is no driver \"nul\""),
        (&["--tx", "no-such-if"], "no-such-if"),
        (&["--tx", "null:", "--rate", "0"], "expected `max`, or a number above 0"),
        (&["--tx", "null:", "--rate", "2Gpps"], "at most 1000000000 packets per second"),
        (&["--tx", "null:", "--rate", "50%"], "reports no speed"),
        (&["--tx", "null:", "--size", "63"], "from 64 to 9216"),
        (&["--tx", "null:", "--size", "9216"], "port null_ sends at most 1526 bytes"),
        (&["--tx", "null:", "--headers", "ipv4 / upd"], "did you mean \"udp\"?"),
        (&["--tx", "null:", "--headers", "ipv4 src 10.0.0.0/8 / udp"], "16777216 flows, and 1048576 are possible"),
        (&["--tx", "null:", "--pick", "zip"], "expected turn, random, zipf"),
        (&["--tx", "null:", "--pcap", "/nowhere"], "/nowhere: No such file"),
        (&["--tx", "null:", "--pcap", "/dev/null"], "/dev/null"),
        (&["--tx", "null:", "--count", "1", "--seconds", "1"], "cannot be used with"),
        (&["--tx", "null:", "--config", "/nowhere"], "/nowhere"),
        (&["--tx", &pcap, "--threads", "4"], "queues from 0 to 1, not 3"),
        (&["--tx", "null:", "--hlog", "/nowhere/x"], "/nowhere/x"),
        (&["reflect"], "--port"),
    ] {
        assert_refused(&output(arguments), error);
    }
}

#[test]
fn a_result_is_text_and_a_log() {
    let folder = tempfile::tempdir().unwrap();
    let hlog = folder.path().join("run.hlog");
    let hlog = hlog.to_str().unwrap();
    let (_cable, config) =
        memory_cable("[port.faults]\nseed = 3\nrx = { loss = 0.1, duplicate = 0.05, reorder = 0.05 }\n");
    let arguments = ["--config", &config, "--tx", "out", "--rx", "in", "--count", "5000", "--rate", "50kpps"];
    let output = output(&[&arguments[..], &["--hlog", hlog]].concat());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    for line in ["port out: memory:x", "own error: delay of the generator itself p50", "sent         5000 packets"] {
        assert!(text.contains(line), "{line}: {text}");
    }
    assert!(text.contains("p99.99") && text.contains("injected_fault"), "{text}");
    assert!(std::fs::read_to_string(hlog).unwrap().contains("Tag=latency,"));
    // The port counts its own faults: the tool must find the same.
    let json = result(&arguments);
    let (found, port) = (&json["result"], &json["result"]["ports"][1]);
    assert_eq!(found["lost"], port["rx_drops"]["injected_fault"], "{json}");
    let number = |value: &Value| value.as_u64().unwrap();
    let duplicates = number(&port["rx_injected_copies"]);
    assert_eq!(number(&found["duplicates"]), duplicates, "{json}");
    assert!(number(&found["lost"]) > 300 && duplicates > 100, "{json}");
    assert!(json["self_check"]["latency_ns"]["p50"].as_u64().unwrap() > 0);
}

/// Two namespaces with a cable: `east` in the first one, `west` in the second one.
fn cable(name: &str) -> (Lab, wirepath_testlab::Namespace, wirepath_testlab::Namespace) {
    let lab = Lab::new(name);
    let (left, right) = (lab.namespace("left"), lab.namespace("right"));
    lab.veth((&left, "east"), (&right, "west"));
    (lab, left, right)
}

#[test]
fn a_reflector_returns_every_packet() {
    require!(all Requirement::LAB);
    let (_lab, left, right) = cable("reflect");
    let reflector = right.spawn(&[WIREPATH, "--json", "-q", "pktgen", "reflect", "--port", "af_packet:west"]);
    std::thread::sleep(Duration::from_secs(2));
    let run = left.run(&[
        WIREPATH,
        "--json",
        "-q",
        "pktgen",
        "--port",
        "af_packet:east",
        "--count",
        "3000",
        "--rate",
        "5kpps",
        "--headers",
        "ipv4 src 10.0.0.1-10.0.0.9 / udp",
        "--size",
        "64,1518",
    ]);
    let json: Value = serde_json::from_str(&run.expect()).unwrap();
    let summary = reflector.terminate(Duration::from_secs(20)).expect();
    let found = &json["result"];
    assert_eq!((&found["sent"], &found["lost"], &found["duplicates"]), (&3000.into(), &0.into(), &0.into()), "{json}");
    assert!(found["latency_ns"]["min"].as_u64().unwrap() > 0 && summary.contains("\"tx_packets\""), "{json}");
}

/// Live frames of XDP: they are recycled with their former contents and lengths, and go in bursts.
#[test]
fn live_frames_keep_order_contents_and_counts() {
    require!(all Requirement::LAB);
    require!(Requirement::Kernel(5, 18), Requirement::Program("ethtool"));
    let (_lab, left, right) = cable("live");
    let live = ["--port", "xdp_live:east", "--count", "6000", "--rate", "20kpps", "--size", "64,570,1518,68,1000"];
    let run = || left.run(&[&[WIREPATH, "--json", "-q", "pktgen", "--no-self-check"][..], &live].concat());
    let refused = run();
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("switch GRO on there (`ethtool -K PEER gro on`)"), "{}", refused.stderr);
    right.run(&["ethtool", "-K", "west", "gro", "on"]).expect();
    let reflector = right.spawn(&[WIREPATH, "--json", "-q", "pktgen", "reflect", "--port", "af_packet:west"]);
    std::thread::sleep(Duration::from_secs(2));
    let json: Value = serde_json::from_str(&run().expect()).unwrap();
    reflector.terminate(Duration::from_secs(20)).expect();
    let found = &json["result"];
    for (figure, wanted) in
        [("sent", 6000), ("lost", 0), ("reordered", 0), ("duplicates", 0), ("corrupt", 0), ("foreign", 0)]
    {
        assert_eq!(found[figure], wanted, "{figure}: {json}");
    }
    assert_eq!(left.statistic("east", "tx_dropped"), 0);
}

#[test]
fn testpmd_as_a_reflector_loses_nothing() {
    require!(all Requirement::LAB);
    require!(Requirement::Program("dpdk-testpmd"));
    let (_lab, left, right) = cable("testpmd");
    let prefix = format!("--file-prefix=wirepath-pktgen-{}", std::process::id());
    let vdev = "--vdev=net_af_packet0,iface=west";
    let eal = ["dpdk-testpmd", "--no-huge", "--no-pci", "-m", "512", "--lcores=0@0,1@0", &prefix, vdev];
    // It forwards until it is killed, and needs no terminal with statistics.
    let own = ["--", "--forward-mode=macswap", "--total-num-mbufs=4096", "--stats-period=1"];
    let testpmd = right.spawn(&[&eal[..], &own].concat());
    let all = ["--port", "af_packet:east", "--count", "1000", "--rate", "2kpps", "--no-self-check", "--drain", "2"];
    let run = || -> Value {
        let run = left.run(&[&[WIREPATH, "--json", "-q", "pktgen"], &all[..]].concat());
        serde_json::from_str(&run.expect()).unwrap()
    };
    // It starts within some seconds, and begins with a packet in the middle of a run.
    let answers = |json: &Value| json["result"]["received"].as_u64().unwrap() > 0;
    assert!((0..20).any(|_| answers(&run())), "testpmd returns packets");
    let json = run();
    testpmd.kill();
    let found = &json["result"];
    assert_eq!((&found["sent"], &found["lost"], &found["corrupt"]), (&1000.into(), &0.into(), &0.into()), "{json}");
}

#[test]
fn an_interrupted_run_prints_its_result() {
    require!(all Requirement::LAB);
    let (_lab, left, _right) = cable("interrupt");
    let run = left.spawn(&[WIREPATH, "--json", "-q", "pktgen", "--tx", "af_packet:east", "--seconds", "600"]);
    std::thread::sleep(Duration::from_secs(3));
    let json: Value = serde_json::from_str(&run.terminate(Duration::from_secs(20)).expect()).unwrap();
    assert!(json["result"]["stopped"] == true && json["result"]["sent"].as_u64().unwrap() > 100, "{json}");
}

/// A bridge between the interfaces `east` and `west` of two namespaces. Frames towards `west` pass a token bucket with
/// these options of tc-tbf(8).
pub(super) fn shaped_bridge(name: &str, bucket: &str) -> (Lab, [wirepath_testlab::Namespace; 3]) {
    let lab = Lab::new(name);
    let hosts = ["left", "right", "bridge"].map(|name| lab.namespace(name));
    let [left, right, bridge] = &hosts;
    lab.veth((left, "east"), (bridge, "p1"));
    lab.veth((right, "west"), (bridge, "p2"));
    bridge.ip("link add br0 type bridge forward_delay 0");
    for port in ["p1", "p2"] {
        bridge.ip(&format!("link set {port} master br0"));
    }
    bridge.ip("link set br0 up");
    let bucket: Vec<&str> = bucket.split(' ').collect();
    bridge.run(&[&["tc", "qdisc", "add", "dev", "p2", "root", "tbf"], &bucket[..]].concat()).expect();
    (lab, hosts)
}

#[test]
fn the_rate_of_a_token_bucket_is_found() {
    require!(all Requirement::LAB);
    let (_lab, [left, right, _bridge]) = shaped_bridge("tbf", "rate 8mbit burst 50kb limit 200kb");
    // Both ports belong to one process, which needs both interfaces.
    right.ip(&format!("link set west netns {}", left.name()));
    left.ip("link set west up");
    std::thread::sleep(Duration::from_secs(1));
    let run = |rate: &str| {
        let run = left.run(&[
            WIREPATH,
            "--json",
            "-q",
            "pktgen",
            "--tx",
            "af_packet:east",
            "--rx",
            "af_packet:west",
            "--seconds",
            "4",
            "--rate",
            rate,
            "--size",
            "1004",
        ]);
        let json: Value = serde_json::from_str(&run.expect()).unwrap();
        json["result"].clone()
    };
    // tbf counts 1000 bytes of each frame, so 1000 packets per second pass.
    let above = run("2000");
    let number = |json: &Value, key: &str| json[key].as_f64().unwrap_or_else(|| panic!("{key}: {json}"));
    let (sent, received) = (number(&above, "sent"), number(&above, "received"));
    assert!((sent - 8000.0).abs() < 160.0, "{above}");
    // Besides the rate, the bucket passes 50 packets and its queue 200, after the end.
    assert!((received - 4250.0).abs() < 4250.0 * 0.03, "{above}");
    assert_eq!(number(&above, "lost"), sent - received);
    assert_eq!(number(&above, "duplicates") + number(&above, "reordered") + number(&above, "corrupt"), 0.0, "{above}");
    // The queue has 200 kB at 1 MB/s, so it delays by 0.2 s.
    let delay = number(&above["latency_ns"], "p50") / 1e9;
    assert!((delay - 0.2).abs() < 0.02, "{above}");
    let below = run("800");
    assert_eq!(number(&below, "lost"), 0.0, "{below}");
    assert!((number(&below, "received_pps") - 800.0).abs() < 16.0, "{below}");
}
