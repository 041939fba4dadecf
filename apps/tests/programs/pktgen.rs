//! `wirepath pktgen`: tshark judges what it sends; devices of the kernel with known behaviour judge what it measures.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use serde_json::{Value, json};
use wirepath_nic_emulator::launch;
use wirepath_testlab::{Lab, Requirement, oracle, require};

const WIREPATH: &str = env!("CARGO_BIN_EXE_wirepath");

fn output(arguments: &[&str]) -> Output {
    Command::new(WIREPATH).args(["-q", "pktgen"]).args(arguments).output().unwrap()
}

/// Runs the tool with `--json` and returns the result.
#[track_caller]
fn result(arguments: &[&str]) -> Value {
    let output = output(&[arguments, &["--json"]].concat());
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

/// Runs the tool between two emulated ConnectX NICs on a cable, with and without timestamps of the receiving one.
/// Returns both results.
fn between_nics(topology: &str, arguments: &[&str]) -> [Value; 2] {
    let folder = tempfile::tempdir().unwrap();
    let device =
        |name: &str| format!("[[device]]\nkind = 'mlx5'\nname = '{name}'\n[[device.port]]\nlink = 'cable:a'\n");
    [true, false].map(|timestamps| {
        let nics = launch::prepare(&format!("{}{}{topology}", device("near"), device("far")));
        let config = folder.path().join("ports.toml");
        let text = format!(
            "[[port]]\nname = 'out'\ndriver = 'mlx5'\ndevice = 'near'\n\
             [[port]]\nname = 'in'\ndriver = 'mlx5'\ndevice = 'far'\n[port.mlx5]\ntimestamps = {timestamps}\n"
        );
        std::fs::write(&config, text).unwrap();
        let mut command = nics.command(WIREPATH);
        command.args(["-q", "pktgen", "-c", config.to_str().unwrap(), "--tx", "out", "--rx", "in", "--json"]);
        let output = command.arg("--no-self-check").args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["result"].take()
    })
}

const MLX5: Requirement = Requirement::File("/etc/libibverbs.d/mlx5.driver");

#[test]
fn delays_end_when_the_nic_received_the_packet() {
    require!(MLX5);
    let [nic, software] = between_nics("", &["--count", "3000", "--rate", "3kpps"]);
    for result in [&nic, &software] {
        assert_eq!((&result["received"], &result["lost"]), (&3000.into(), &0.into()), "{result}");
        assert_eq!(result["latency_ns"]["n"], 3000);
    }
    assert_eq!((&nic["latency_clock"], &software["latency_clock"]), (&"nic".into(), &"tsc".into()));
    assert_eq!(software["ports"][1]["clock"], json!({ "source": "tsc" }));
    assert_eq!(nic["ports"][0]["clock"], Value::Null, "it only sends");
    let clock = &nic["ports"][1]["clock"];
    let counts = ["used", "missing", "invalid"].map(|name| clock[name].as_u64().unwrap());
    assert_eq!((&clock["source"], counts), (&"nic".into(), [3000, 0, 0]), "{clock}");
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{nic}"));
    // It has at least half of the time of a reading. A relation that does not hold would have seconds.
    let uncertainty = number(&clock["uncertainty_ns"]);
    assert!(uncertainty > 0.0 && uncertainty < 1e9, "{nic}");
    // What a delay by software has more is the wait for the poll.
    assert_eq!(clock["waits_ns"]["n"], 3000);
    assert!(number(&clock["waits_ns"]["mean"]) > 0.0, "{clock}");
}

#[test]
fn wrong_time_stamps_of_a_nic_are_counted_and_not_used() {
    require!(MLX5);
    let fault = "[[fault]]\nkind = 'hostile'\ndevice = 'far'\nwhat = 'time'\nafter = 100\ncount = 50\n";
    let [nic, software] = between_nics(fault, &["--count", "500", "--rate", "5kpps"]);
    for result in [&nic, &software] {
        assert_eq!((&result["received"], &result["lost"]), (&500.into(), &0.into()), "{result}");
        assert!(result["latency_ns"]["max"].as_u64().unwrap() < 30_000_000_000, "{result}");
    }
    let clock = &nic["ports"][1]["clock"];
    let counts = ["used", "missing", "invalid"].map(|name| clock[name].as_u64().unwrap());
    assert_eq!(counts, [450, 0, 50], "{clock}");
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

fn number(json: &Value, key: &str) -> u64 {
    json[key].as_u64().unwrap_or_else(|| panic!("{key}: {json}"))
}

/// Asserts figures of a result.
#[track_caller]
fn assert_figures(json: &Value, expected: &[(&str, u64)]) {
    for (key, wanted) in expected {
        assert_eq!(json[key], *wanted, "{key}: {json}");
    }
}

/// Receives the frames of a capture.
#[track_caller]
fn receive_frames(frames: &[Vec<u8>], more: &[&str]) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("in.pcap");
    std::fs::write(&file, oracle::pcap(frames)).unwrap();
    let port = format!("pcap:{}", file.display());
    result(&[&["receive", "--port", &port], more].concat())["result"].clone()
}

/// Stream and sequence number in the signature of a frame.
fn signature(frame: &[u8]) -> (u32, u32) {
    let end = frame.len();
    let number =
        |from: usize, to: usize| frame[end - from..end - to].iter().fold(0, |n, byte| n << 8 | u32::from(*byte));
    (number(14, 11), number(11, 7))
}

#[test]
fn a_receiver_agrees_with_a_simple_count() {
    let sent = frames(&["--headers", "ipv4 src 10.0.0.1-10.0.0.3 / udp", "--size", "64,570", "--count", "3000"]);
    let mut random = fastrand::Rng::with_seed(5);
    let mut arrived: Vec<Vec<u8>> = Vec::new();
    let mut late: Vec<(usize, Vec<u8>)> = Vec::new();
    for (n, frame) in sent.iter().enumerate() {
        match random.u8(..100) {
            // The first three packets of each stream are missing, and a tenth of the others.
            _ if n < 9 => {}
            0..10 => {}
            10..15 => late.push((n + random.usize(1..200), frame.clone())),
            15..20 => {
                arrived.push(frame.clone());
                late.push((n + random.usize(1..200), frame.clone()));
            }
            _ => arrived.push(frame.clone()),
        }
        late.retain(|(at, frame)| {
            if *at == n {
                arrived.push(frame.clone());
            }
            *at > n
        });
    }
    // A simple count with sets, for each stream.
    let mut expected = Vec::new();
    for stream in 0..3 {
        let (mut seen, mut duplicates, mut reordered) = (std::collections::BTreeSet::new(), 0, 0);
        for (_, sequence) in arrived.iter().map(|frame| signature(frame)).filter(|it| it.0 == stream) {
            let is_below = seen.last().is_some_and(|last| sequence < *last);
            match seen.insert(sequence) {
                true => reordered += u64::from(is_below),
                false => duplicates += 1,
            }
        }
        let (first, last) = (u64::from(*seen.first().unwrap()), u64::from(*seen.last().unwrap()));
        expected.push([seen.len() as u64, last - first + 1 - seen.len() as u64, duplicates, reordered, first, last]);
    }
    let json = receive_frames(&arrived, &[]);
    let keys = ["received", "lost", "duplicates", "reordered", "first_sequence", "highest_sequence"];
    let streams = json["runs"][0]["streams"].as_array().unwrap();
    let found: Vec<_> = streams.iter().map(|stream| keys.map(|key| number(stream, key))).collect();
    assert_eq!(found, expected, "{json}");
    let sum = |at: usize| expected.iter().map(|figures| figures[at]).sum::<u64>();
    assert!(sum(1) > 200 && sum(2) > 100 && sum(3) > 100 && sum(4) >= 9, "{expected:?}");
    let sums = [("received", sum(0)), ("lost", sum(1)), ("duplicates", sum(2)), ("reordered", sum(3))];
    assert_figures(&json, &sums);
    assert_figures(&json, &[("before_first", sum(4)), ("foreign", 0), ("corrupt", 0), ("untracked", 0)]);
    let port = &json["ports"][0];
    let bytes = arrived.iter().map(|frame| frame.len() as u64 + 4).sum();
    assert_figures(port, &[("packets", arrived.len() as u64), ("bytes", bytes)]);
    let short = arrived.iter().filter(|frame| frame.len() == 60).count() as u64;
    assert_figures(&port["sizes"], &[("64", short), ("512-1023", arrived.len() as u64 - short), ("65-127", 0)]);
    assert!(json.get("latency_ns").is_none() && json.get("jitter_ns").is_none(), "{json}");
}

#[test]
fn corrupt_and_foreign_packets_count_apart() {
    let mut all = frames(&["--count", "100"]);
    let run = u16::from_be_bytes([all[0][60 - 18], all[0][60 - 17]]);
    // A flipped bit of the sequence number, and one of the run number.
    all[50][60 - 8] ^= 1;
    all[60][60 - 18] ^= 0x80;
    all.extend([vec![0; 60], vec![0xa5; 17], vec![7; 1518]]);
    let json = receive_frames(&all, &[]);
    assert_figures(&json, &[("packets", 103), ("received", 98), ("lost", 2), ("corrupt", 1), ("foreign", 4)]);
    assert_figures(&json["ports"][0]["sizes"], &[("64", 101), ("below 64", 1), ("above 1518", 1)]);
    assert_eq!(json["runs"].as_array().unwrap().len(), 1, "{json}");
    assert_eq!(json["runs"][0]["run"], format!("{run:#06x}"), "{json}");
    let few = receive_frames(&all, &["--count", "55"]);
    assert_figures(&few, &[("packets", 55), ("received", 54), ("lost", 1), ("corrupt", 1), ("foreign", 0)]);
    let flows = frames(&["--headers", "ipv4 src 10.0.0.1-10.0.0.9 / udp", "--count", "90"]);
    let json = receive_frames(&flows, &["--max-streams", "4"]);
    assert_figures(&json, &[("received", 40), ("untracked", 50), ("lost", 0), ("foreign", 0)]);
}

#[test]
fn a_reception_is_text() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("in.pcap");
    let mut sent = frames(&["--headers", "ipv4 src 10.0.0.1-10.0.0.40 / udp", "--count", "400"]);
    sent.remove(200);
    std::fs::write(&file, oracle::pcap(&sent)).unwrap();
    let output = output(&["receive", "--port", &format!("pcap:{}", file.display())]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    for part in [
        ": 399 packets, 25536 bytes, 0 packets foreign\n",
        "bit/s (L1)",
        "\n64          ",
        "received     399 packets\n",
        "lost         1 (0.2500 %), up to the highest received sequence numbers\n",
        "and 20 more streams, which --json has\n",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let port = format!("pcap:{}", file.display());
    for (arguments, error) in [
        (&["--port", &port, "--port", &port][..], "is given twice"),
        (&["--port", &port, "--core", "99999"], "core 99999 is not one of"),
        (&["--port", "nul:x"], "there is no driver \"nul\""),
        (&["--port", &port, "--max-streams", "0"], "1..=1048576"),
        (&["--port", &port, "--count", "0"], "--count"),
        (&["--port", "x", "--config", "/nowhere"], "/nowhere"),
        (&[], "--port"),
    ] {
        assert_refused(&self::output(&[&["receive"], arguments].concat()), error);
    }
}

/// Starts a receiver with `--json`, and waits until it has opened its ports.
fn receiver(namespace: &wirepath_testlab::Namespace, arguments: &[&str]) -> wirepath_testlab::Background {
    let receiver = namespace.spawn(&[&[WIREPATH, "--json", "-q", "pktgen", "receive"], arguments].concat());
    std::thread::sleep(Duration::from_secs(2));
    receiver
}

/// Runs a generator with `--json` and returns its result.
#[track_caller]
fn generate(namespace: &wirepath_testlab::Namespace, arguments: &[&str]) -> Value {
    let run = namespace.run(&[&[WIREPATH, "--json", "-q", "pktgen", "--no-self-check"], arguments].concat());
    let json: Value = serde_json::from_str(&run.expect()).unwrap();
    json["result"].clone()
}

#[test]
fn a_receiver_counts_the_packets_of_every_generator() {
    require!(all Requirement::LAB);
    let (_lab, left, right) = cable("receive");
    let receiver = receiver(&right, &["--port", "af_packet:west"]);
    let flows = ["--tx", "af_packet:east", "--headers", "ipv4 src 10.0.0.1-10.0.0.9 / udp", "--size", "64,1518"];
    // Two generators at once, then one that starts again.
    let other = left.spawn(&[&[WIREPATH, "--json", "-q", "pktgen", "--seconds", "2"], &flows[..]].concat());
    let second = generate(&left, &[&flows[..], &["--seconds", "3", "--rate", "2kpps"]].concat());
    let first: Value = serde_json::from_str(&other.wait(Duration::from_secs(20)).expect()).unwrap();
    let third = generate(&left, &[&flows[..], &["--count", "900", "--rate", "5kpps"]].concat());
    // Frames of a capture are foreign.
    let folder = tempfile::tempdir().unwrap();
    let capture = folder.path().join("foreign.pcap");
    std::fs::write(&capture, oracle::pcap((0..50u8).map(|n| [&[2; 12][..], &[8, 0], &[n; 86]].concat()))).unwrap();
    generate(&left, &["--tx", "af_packet:east", "--pcap", capture.to_str().unwrap(), "--rate", "1kpps"]);
    std::thread::sleep(Duration::from_millis(200));
    let json: Value = serde_json::from_str(&receiver.terminate(Duration::from_secs(20)).expect()).unwrap();
    let found = &json["result"];
    let runs = found["runs"].as_array().unwrap();
    let sent = [&first["result"], &second, &third];
    assert_eq!(runs.len(), sent.len(), "{json}");
    for sent in sent {
        let run = runs.iter().find(|run| run["run"] == sent["run"]).unwrap_or_else(|| panic!("{sent}: {json}"));
        assert_figures(run, &[("received", number(sent, "sent")), ("lost", 0), ("duplicates", 0), ("reordered", 0)]);
        assert_eq!((number(run, "before_first"), run["streams"].as_array().unwrap().len()), (0, 9), "{run}");
    }
    let total: u64 = sent.iter().map(|sent| number(sent, "sent")).sum();
    assert_figures(found, &[("packets", total + 50), ("received", total), ("foreign", 50), ("lost", 0)]);
    let port = &found["ports"][0];
    let sizes = &port["sizes"];
    assert_figures(sizes, &[("65-127", 50)]);
    assert_eq!(number(sizes, "64") + number(sizes, "1024-1518"), total, "{json}");
    assert!(number(sizes, "64").abs_diff(number(sizes, "1024-1518")) <= 3, "{json}");
    // Of the seconds of the run alone, the mean rate is that of the sender.
    let run = runs.iter().find(|run| run["run"] == second["run"]).unwrap();
    let pps = |which: &str| run["pps"][which].as_f64().unwrap();
    assert!((pps("mean") - 2000.0).abs() < 100.0, "{run}");
    assert!(pps("lowest") <= pps("highest") && (pps("highest") - 2000.0).abs() < 400.0, "{run}");
    assert_eq!((&json["result"]["stopped"], &json["result"]["failure"]), (&true.into(), &Value::Null));
}

/// The generator and the receiver have sockets on the same interface, so they see the same packets.
#[test]
fn a_receiver_finds_the_faults_that_the_generator_finds() {
    require!(all Requirement::LAB);
    let lab = Lab::new("faults");
    let host = lab.namespace("host");
    lab.veth((&host, "east"), (&host, "west"));
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("ports.toml");
    let text = "[[port]]\nname = 'out'\ndriver = 'af_packet'\ndevice = 'east'\n[port.faults]\nseed = 4\n\
                tx = { loss = 0.05, duplicate = 0.05, reorder = 0.05, distance = 20, corrupt = 0.02 }\n";
    std::fs::write(&config, text).unwrap();
    let receiver = receiver(&host, &["--port", "af_packet:west"]);
    let config = ["--config", config.to_str().unwrap()];
    let ports = ["--tx", "out", "--rx", "af_packet:west", "--count", "20000", "--rate", "10kpps", "--size", "100"];
    let sent = generate(&host, &[&config[..], &ports].concat());
    let json: Value = serde_json::from_str(&receiver.terminate(Duration::from_secs(20)).expect()).unwrap();
    let found = &json["result"];
    assert_eq!(found["runs"][0]["run"], sent["run"], "{json}");
    for key in ["received", "duplicates", "reordered", "max_reorder_distance", "corrupt", "foreign", "beyond_window"] {
        assert_eq!(found[key], sent[key], "{key}: {sent} {json}");
    }
    for key in ["duplicates", "reordered", "corrupt"] {
        assert!(number(found, key) > 100, "{key}: {json}");
    }
    // All 20000 packets were sent, lost by the port or changed by it. Those after the last received one are unknown.
    let after = 19_999 - number(&found["runs"][0]["streams"][0], "highest_sequence");
    assert_eq!(
        number(found, "received") + number(found, "lost") + number(found, "before_first") + after,
        20_000,
        "{json}"
    );
    assert!(number(found, "lost") > 1000, "{json}");
}

/// The generator does not run for a while, so that its own ring overflows. Another one fills it.
#[test]
fn a_generator_tells_its_own_drops() {
    require!(all Requirement::LAB);
    let (_lab, left, right) = cable("gendrops");
    let slow = ["--port", "af_packet:west", "--rate", "100pps", "--seconds", "600"];
    let mut frames = left.frames("east");
    let generator = right.spawn(&[&[WIREPATH, "--json", "-q", "pktgen", "--no-self-check"][..], &slow].concat());
    let is_ours = |frame: &wirepath_testlab::Frame| frame.bytes[12..14] == [8, 0];
    assert!(frames.receive_where(Duration::from_secs(20), is_ours).is_some(), "the generator sends");
    drop(frames);
    generator.signal(rustix::process::Signal::STOP);
    let other = generate(&left, &["--tx", "af_packet:east", "--size", "1518", "--count", "20000", "--rate", "40kpps"]);
    generator.signal(rustix::process::Signal::CONT);
    std::thread::sleep(Duration::from_secs(2));
    let json: Value = serde_json::from_str(&generator.terminate(Duration::from_secs(20)).expect()).unwrap();
    let port = &json["result"]["ports"][0];
    let dropped: u64 = port["device_drops"].as_object().unwrap().values().map(|n| n.as_u64().unwrap()).sum();
    assert!(dropped > 1000, "{json}");
    assert_figures(port, &[("foreign", number(&other, "sent") - dropped)]);
}

#[test]
fn a_receiver_stops_at_its_limits() {
    require!(all Requirement::LAB);
    let (_lab, left, right) = cable("limits");
    let counting = receiver(&right, &["--port", "af_packet:west", "--count", "100"]);
    let timed = receiver(&right, &["--port", "af_packet:west", "--seconds", "4"]);
    generate(&left, &["--tx", "af_packet:east", "--count", "500", "--rate", "5kpps"]);
    let json = |receiver: wirepath_testlab::Background| -> Value {
        let json: Value = serde_json::from_str(&receiver.wait(Duration::from_secs(20)).expect()).unwrap();
        json["result"].clone()
    };
    let (counting, timed) = (json(counting), json(timed));
    assert_figures(&counting, &[("packets", 100), ("received", 100), ("lost", 0)]);
    assert_figures(&timed, &[("packets", 500), ("received", 500), ("lost", 0)]);
    assert!((4.0..5.0).contains(&timed["seconds"].as_f64().unwrap()), "{timed}");
    assert_eq!((&timed["stopped"], &counting["stopped"]), (&false.into(), &false.into()));
}

#[test]
fn a_receiver_tells_its_own_drops() {
    require!(all Requirement::LAB);
    let (_lab, left, right) = cable("owndrops");
    let receiver = receiver(&right, &["--port", "af_packet:west"]);
    let first = generate(&left, &["--tx", "af_packet:east", "--count", "100"]);
    // A receiver that does not run takes nothing out of its ring, which holds some thousand packets.
    receiver.signal(rustix::process::Signal::STOP);
    let second = generate(&left, &["--tx", "af_packet:east", "--size", "1518", "--count", "20000", "--rate", "40kpps"]);
    receiver.signal(rustix::process::Signal::CONT);
    std::thread::sleep(Duration::from_millis(500));
    let json: Value = serde_json::from_str(&receiver.terminate(Duration::from_secs(20)).expect()).unwrap();
    let found = &json["result"];
    let drops = found["ports"][0]["device_drops"].as_object().unwrap();
    let dropped: u64 = drops.values().map(|n| n.as_u64().unwrap()).sum();
    assert!(dropped > 1000, "{json}");
    let sent = number(&first, "sent") + number(&second, "sent");
    assert_figures(found, &[("packets", sent - dropped), ("foreign", 0)]);
}
