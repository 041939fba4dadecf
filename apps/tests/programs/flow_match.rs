//! The subcommands `wirepath flow match` and `explain` with captures that scapy built. tshark reads the files
//! that they write.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use wirepath_testlab::{Requirement, oracle, require};

fn flow(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_wirepath")).arg("flow").args(arguments).output().unwrap()
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

/// A folder with a configuration, rules and a capture.
struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

const PORTS: &str = "[[port]]\nname = \"lan\"\ndriver = \"null\"\n[[port]]\nname = \"wan\"\ndriver = \"null\"\n\
            [[port]]\nname = \"probe\"\n\
                     driver = \"null\"\n[[port]]\nname = \"spare\"\ndriver = \"null\"\n";

const RULES: &str = r#"
[[rule]]
rule = "ingress prio 1: port id lan / ipv4 dst 192.0.2.1 / tcp dst 23 => count, drop"
[[rule]]
rule = "ingress prio 2: port id lan / ipv4 / udp dst 53 => mirror probe, mark 5"
[[rule]]
rule = "ingress prio 3: udp dst 7 => redirect probe"
[[rule]]
rule = "ingress prio 4: ipv4 ttl 1 => dec-ttl"
[[rule]]
rule = "ingress prio 5: ipv4 / udp dst 100 => set udp dst 200, set ipv4 ttl 9, push-vlan vid 7 pcp 3"
[[rule]]
rule = "ingress prio 6: udp dst 4789 / vxlan vni 42 => decap l2"
[[rule]]
rule = "ingress prio 7: ipv4 / udp dst 300 => limit 1 pps burst 2"
[[rule]]
rule = "egress prio 1: port id wan / meta mark 5 => push-vlan vid 99"
[[rule]]
rule = "egress prio 2: ipv6 => drop"
"#;

const PACKETS: &str = "
e = Ether(src='02:00:00:00:00:01', dst='02:00:00:00:00:02')
i = IP(src='10.0.0.1', dst='192.0.2.1', ttl=64)
emit(e/i/TCP(dport=23))
emit(e/i/TCP(dport=24))
emit(e/i/UDP(sport=1, dport=53)/DNS(rd=1, qd=DNSQR(qname='example.org')))
emit(e/i/UDP(sport=1, dport=7)/b'echo')
emit(e/IP(src='10.0.0.1', dst='10.0.0.2', ttl=1)/ICMP())
emit(e/i/UDP(sport=1, dport=100)/b'payload')
emit(e/i/UDP(sport=1, dport=4789)/VXLAN(vni=42, flags=8)/Ether(src='02:00:00:00:00:05', dst='02:00:00:00:00:06')/IP(\
            src='10.7.0.1', dst='10.7.0.2')/UDP(sport=8, dport=9)/b'inner')
emit(e/IPv6(src='fd00::1', dst='fd00::2')/UDP(sport=1, dport=2)/b'six')
for n in range(3):
    emit(e/i/UDP(sport=n, dport=300)/b'much')
emit(Ether(bytes(e/i/TCP(dport=24))[:30]))
";

#[test]
fn each_packet_with_its_rule_and_result() {
    require!(Requirement::Scapy, Requirement::Program("tshark"));
    let files = Files::new();
    let frames = oracle::scapy::<Vec<u8>>(&[], PACKETS).frames;
    let capture = files.write("in.pcap", oracle::pcap(&frames));
    let pairs = "[l2fwd]\npairs = [[\"lan\", \"wan\"], [\"probe\", \"spare\"]]\n";
    let config = files.write("l2fwd.toml", format!("{PORTS}{pairs}{RULES}"));
    let out = files.path("out.pcapng");
    let output = flow(&["match", &config, "--pcap", &capture, "--write", out.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(output.stderr));
    let stdout = text(output.stdout);
    let lines: Vec<&str> = stdout.lines().map(str::trim).collect();
    let expected = [
        "1  rule 0    dropped (rule_drop): a rule drops the packet",
        "2  no rule   out of port wan",
        "3  rules 1, 7 copy out of port probe; mark 5; rewritten, 4 bytes longer; mark 5; out of port wan",
        "4  rule 2    out of port probe",
        "5  rule 3    dropped (hop_limit): the TTL or hop limit is exhausted where a rule or a router decrements it",
        "6  rule 4    rewritten, 4 bytes longer; out of port wan",
        "7  rule 5    rewritten, 50 bytes shorter; out of port wan",
        "8  rule 8    dropped (rule_drop): a rule drops the packet",
        "9  rule 6    out of port wan",
        "10  rule 6    out of port wan",
        "11  rule 6    dropped (meter_exceeded):",
        "12  no rule   dropped (truncated): the frame ends inside a header",
    ];
    for (line, expected) in lines.iter().zip(expected) {
        assert!(line.starts_with(expected), "found {line}\nnot   {expected}\n{stdout}");
    }
    assert_eq!(lines[12], "12 packets; 2 match no rule");
    assert!(lines[14].starts_with("0     ") && lines[14].contains(" 1        54 "), "{}", lines[14]);

    // tshark reads the written capture.
    let names = ["frame.comment", "vlan.id", "vlan.priority", "ip.ttl", "udp.dstport", "ip.src"];
    let fields = names.iter().flat_map(|name| ["-e", name]);
    let read = Command::new("tshark")
        .args(["-r", out.to_str().unwrap(), "-T", "fields", "-E", "separator=|"])
        .args(fields)
        .output()
        .unwrap();
    let seen = text(read.stdout);
    assert_eq!(
        seen.lines().collect::<Vec<_>>(),
        [
            "packet 2: out of port wan||||",
            "packet 3, rule 1: copy out of port probe|||64|53|10.0.0.1",
            "packet 3, rule 1: out of port wan|99|0|64|53|10.0.0.1",
            "packet 4, rule 2: out of port probe|||64|7|10.0.0.1",
            "packet 6, rule 4: out of port wan|7|3|9|200|10.0.0.1",
            "packet 7, rule 5: out of port wan|||64|9|10.7.0.1",
            "packet 9, rule 6: out of port wan|||64|300|10.0.0.1",
            "packet 10, rule 6: out of port wan|||64|300|10.0.0.1",
        ]
        .map(|line| if line.starts_with("packet 2:") {
            "packet 2: out of port wan|||64||10.0.0.1"
        } else {
            line
        }),
    );
    let written = files.path("out.pcap");
    let output = flow(&["match", &config, "--pcap", &capture, "--write", written.to_str().unwrap(), "--summary"]);
    assert!(!text(output.stdout).contains("out of port"), "figures only");
    let written = oracle::read_pcap(&std::fs::read(written).unwrap());
    oracle::assert_clean(&written);
    assert_eq!((written.len(), &written[0]), (8, &frames[1]));
}

#[test]
fn as_json_and_from_other_ports() {
    require!(Requirement::Scapy);
    let files = Files::new();
    let frames = oracle::scapy::<Vec<u8>>(&[], PACKETS).frames;
    let capture = files.write("in.pcap", oracle::pcap(&frames));
    let config = files.write("l2fwd.toml", format!("{PORTS}{RULES}"));
    let json = |more: &[&str]| -> Value {
        let mut arguments = vec!["match", &config, "--pcap", &capture, "--json"];
        arguments.extend(more);
        let output = flow(&arguments);
        assert!(output.status.success(), "{}", text(output.stderr));
        serde_json::from_str(&text(output.stdout)).unwrap()
    };
    let report = json(&[]);
    let rules: Vec<&Value> = report["packets"].as_array().unwrap().iter().map(|packet| &packet["rule"]).collect();
    assert_eq!(rules[..3], [&Value::from(0), &Value::Null, &Value::from(1)]);
    assert_eq!(report["rules"][6]["packets"], 3);
    assert_eq!(report["unmatched"], 2);
    // Rules of port lan do not apply to packets from wan.
    let report = json(&["--port", "wan"]);
    assert_eq!(report["packets"][0]["rule"], Value::Null);
    // Only egress rules.
    let report = json(&["--out", "wan"]);
    assert_eq!((&report["packets"][0]["rule"], &report["packets"][7]["egress_rule"]), (&Value::Null, &8.into()));
    let output = flow(&["match", &config, "--pcap", &capture, "--port", "wam"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(output.stderr).contains("there is no port \"wam\"; the ports are lan, wan, probe, spare"));
    // A rule file without a configuration, and a file that is not a capture.
    let rules = files.write("acl.rules", "ingress: tcp dst 23 => drop\n");
    let output = flow(&["match", &rules, "--pcap", &capture, "--summary"]);
    assert!(text(output.stdout).starts_with("12 packets; 11 match no rule\n"));
    assert_eq!(flow(&["match", &rules, "--pcap", &rules]).status.code(), Some(1));
    assert_eq!(flow(&["match", &rules, "--pcap", "/nonexistent"]).status.code(), Some(2));
    let wrong = files.write("wrong.rules", "ingress: tcp dst 23 => drip\n");
    let output = flow(&["match", &wrong, "--pcap", &capture]);
    assert!(output.status.code() == Some(2) && text(output.stderr).contains("did you mean \"drop\"?"));
}

#[test]
fn where_rules_would_run() {
    let files = Files::new();
    let config = |rules: &str| {
        let ports = "[[port]]\nname = \"x\"\ndriver = \"af_xdp\"\ndevice = \"eth0\"\n[[port]]\nname = \"p\"\ndriver \
        = \"af_packet\"\n\
                     device = \"eth1\"\n";
        let rules: String = rules.lines().map(|rule| format!("[[rule]]\nrule = \"{rule}\"\n")).collect();
        files.write("c.toml", format!("{ports}{rules}"))
    };
    let explain = |rules: &str| -> (Option<i32>, Value) {
        let output = flow(&["explain", &config(rules), "--json"]);
        (output.status.code(), serde_json::from_str(&text(output.stdout)).unwrap())
    };
    let (code, report) = explain(
        "ingress prio 1: udp / vxlan vni 7 => drop\ningress prio 2: port id x / arp => kernel\ningress prio 3: port \
        id x / ipv4 => count, kernel\negress: any => count",
    );
    assert_eq!((code, &report["ok"]), (Some(0), &Value::Bool(true)));
    let location = |rule: usize, port: usize| report["rules"][rule]["ports"][port]["where"].as_str().unwrap();
    assert_eq!(
        [location(0, 0), location(0, 1), location(1, 0), location(2, 0), location(3, 1)],
        ["software", "software", "xdp", "injected", "software"]
    );
    let why = report["rules"][2]["ports"][0]["why"].as_str().unwrap();
    assert!(why.contains("rule 0 comes first") && why.contains("tunnel headers"), "{why}");
    // A port that keeps frames from the kernel, and a rule for all ports.
    let (code, report) = explain("ingress: ipv4 => kernel");
    assert_eq!(
        (code, &report["rules"][0]["ports"][0]["where"], &report["rules"][0]["ports"][1]["where"]),
        (Some(2), &"xdp".into(), &"refused".into())
    );
    assert!(report["rules"][0]["ports"][1]["why"].as_str().unwrap().contains("exclusive = false"));
    let (code, report) = explain("ingress: port id x => queue 4");
    assert_eq!((code, &report["rules"][0]["ports"][0]["where"]), (Some(2), &"refused".into()));

    let gateway = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/tunnel-gateway-acl.toml");
    let output = flow(&["explain", gateway.to_str().unwrap()]);
    let stdout = text(output.stdout);
    assert!(output.status.success() && stdout.contains("segment blue to 10.9.0.2, number 1"), "{stdout}");
    assert!(stdout.contains("vxlan vni 42 => decap l2, mark 1"), "{stdout}");
    let rules = files.write("a.rules", "ingress: any => drop\n");
    assert_eq!(flow(&["explain", &rules]).status.code(), Some(2));
}
