//! Changes of the configuration of running programs: reload, single objects, and saving. No test needs a privilege.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use rustix::process::Signal;
use serde_json::{Value, json};
use wirepath_testlab::eventually;

use crate::running::{Running, WAIT_LIMIT};

const GATEWAY: &str = env!("CARGO_BIN_EXE_tunnel-gateway");
const L2FWD: &str = env!("CARGO_BIN_EXE_l2fwd");
const WIREPATH: &str = env!("CARGO_BIN_EXE_wirepath");

const PORTS: &str = "\
[[port]]
name = 'lan'
driver = 'null'
[port.null]
source = 'udp4'
[[port]]
name = 'lan2'
driver = 'null'
[[port]]
name = 'wan'
driver = 'null'
[control]
socket = 'control.sock'
";
const GATEWAY_TABLES: &str = "\
[rules]
file = 'acl.rules'
[underlay]
port = 'wan'
addresses = ['10.9.0.1/24']
# the first segment
[[segment]]
name = 'blue'
vni = 42
remotes = ['10.9.0.2'] # one
ports = [{ port = 'lan' }]
";

/// A running program with a rule file.
struct Program(Running);

impl Program {
    fn start(binary: &str, text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("acl.rules"), "ingress: port id wan / udp dst 53 => drop\n").unwrap();
        Self(Running::start(folder, binary, text, "control.sock"))
    }

    fn gateway() -> Self {
        Self::start(GATEWAY, &format!("{PORTS}{GATEWAY_TABLES}"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path(name)
    }

    fn write(&self, text: &str) {
        std::fs::write(self.path("config.toml"), text).unwrap();
    }

    fn log(&self) -> String {
        self.0.log()
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let socket = self.path("control.sock");
        Command::new(WIREPATH).args(arguments).arg("--socket").arg(socket).output().unwrap()
    }

    /// Runs `wirepath` and returns what it prints.
    #[track_caller]
    fn wirepath(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}\n{}", text(&output.stderr), self.log());
        text(&output.stdout)
    }

    /// Runs `wirepath`, which must refuse, and returns its error.
    #[track_caller]
    fn refused(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stderr)
    }

    /// Returns columns of a table.
    #[track_caller]
    fn rows(&self, table: &str, columns: &str) -> Value {
        let answer = self.wirepath(&["show", table, "--columns", columns, "--json"]);
        serde_json::from_str::<Value>(&answer).unwrap()["rows"].take()
    }

    #[track_caller]
    fn stop(self) -> Value {
        self.0.stop()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_saved_configuration_starts_to_the_same_state() {
    let program = Program::gateway();
    for change in [
        &["add", "remote", "segment=blue", "address=10.9.0.3"][..],
        &["add", "segment", "name=red", "vni=7", "remotes=10.9.0.9", "ports=lan2.5", "accept_unknown_remotes=true"],
        &["add", "static", "segment=red", "mac=02:00:00:00:00:09", "remote=10.9.0.9"],
        &["add", "address", "address=fd00:9::1/64"],
        &["add", "gateway", "address=10.9.0.254"],
        &["set", "underlay", "ttl=9"],
        &["set", "segment", "name=blue", "ageing=77"],
        &["add", "rule", "rule=ingress prio 3: port id wan / udp dst 99 => drop"],
        &["remove", "rule", "id=0"],
    ] {
        program.wirepath(change);
    }
    let tables = |program: &Program| {
        let tables = [
            ("segments", "segment,vni,ports,remotes"),
            ("remotes", "segment,remote,local,next_hop,max_frame"),
            ("rules", "rule"),
            ("neighbours", "address"),
        ];
        tables.map(|(table, columns)| program.rows(table, columns))
    };
    let before = tables(&program);
    assert_eq!(before[2], json!([{ "rule": "ingress prio 3: port id wan / udp dst 99 => drop" }]));
    let shown = program.wirepath(&["show", "config"]);
    program.wirepath(&["config", "save"]);
    let saved = std::fs::read_to_string(program.path("config.toml")).unwrap();
    assert_eq!(shown, saved);
    for kept in ["# the first segment", "# one", "ageing = 77"] {
        assert!(saved.contains(kept), "{saved}");
    }
    // The program finds no difference to what it wrote, and neither adds nor drops anything.
    let answer = program.wirepath(&["reload"]);
    assert!(!answer.contains("segment") && !answer.contains("underlay"), "{answer}");
    assert_eq!(tables(&program), before);
    program.stop();
    let again = Program::start(GATEWAY, &saved);
    assert_eq!(tables(&again), before);
    again.stop();
}

#[test]
fn a_reload_keeps_additions_and_reverts_changes() {
    let program = Program::gateway();
    program.wirepath(&["add", "remote", "segment=blue", "address=10.9.0.3"]);
    program.wirepath(&["add", "segment", "name=red", "vni=7", "remotes=10.9.0.9", "ports=lan2"]);
    program.wirepath(&["set", "segment", "name=red", "mtu=1300"]);
    program.wirepath(&["set", "segment", "name=blue", "mtu=1200"]);
    program.wirepath(&["add", "rule", "rule=ingress prio 3: port id wan / udp dst 99 => drop"]);
    let dry = program.wirepath(&["reload", "--dry-run"]);
    assert!(dry.contains("- segment.blue.mtu = 1200\n") && dry.contains("not applied"), "{dry}");
    assert!(!dry.contains("red") && !dry.contains("10.9.0.3"), "{dry}");
    assert!(program.wirepath(&["show", "config"]).contains("mtu = 1200"), "a dry run changes nothing");

    // The file gets the remote too, and another segment takes the VNI.
    let file = format!("{PORTS}{GATEWAY_TABLES}").replace("10.9.0.2']", "10.9.0.2', '10.9.0.3']");
    program.write(&(file.clone() + "[[segment]]\nname='green'\nvni=7\nremotes=['10.9.0.8']\nports=[{port='lan2'}]\n"));
    let error = program.refused(&["reload"]);
    assert!(error.contains("7 is the VNI of segment"), "{error}");
    program.write(&file);
    let done = program.wirepath(&["reload"]);
    assert!(done.contains("- segment.blue.mtu = 1200\n") && done.contains("applied"), "{done}");
    let rows = program.rows("segments", "segment,remotes");
    assert_eq!(rows, json!([{ "segment": "blue", "remotes": 2 }, { "segment": "red", "remotes": 1 }]));
    assert_eq!(program.rows("rules", "origin"), json!([{ "origin": "file" }, { "origin": "change" }]));
    // What the file has now is the file's: without it there, it is gone.
    program.write(&format!("{PORTS}{GATEWAY_TABLES}"));
    program.0.signal(Signal::HUP);
    assert!(eventually(WAIT_LIMIT, || program.log().contains("reload of the configuration by SIGHUP is done")));
    assert_eq!(program.rows("segments", "segment,remotes")[0]["remotes"], 1);
    program.wirepath(&["remove", "segment", "name=red"]);
    assert!(program.wirepath(&["reload"]).contains("does not differ"));
    program.stop();
}

#[test]
fn what_needs_a_restart_is_said_before_anything_changes() {
    let program = Program::gateway();
    let file = format!("{PORTS}{GATEWAY_TABLES}");
    let before = program.wirepath(&["show", "config"]);
    for (changed, error) in [
        (file.replace("[underlay]", "[underlay]\nudp_port = 8472"), "+ underlay.udp_port = 8472"),
        (file.replace("[underlay]", "[workers]\ncores = [0]\n[underlay]"), "+ workers.cores"),
        (file.replace("name = 'lan2'\n", "name = 'lan2'\nqueues = 2\n"), "+ port.lan2.queues = 2"),
        (file.replace("socket = 'control.sock'", "socket = 'other.sock'"), "~ control.socket = \"control.sock\""),
        (file.replace("10.9.0.2'", "10.9.0.1'"), "10.9.0.1 is an address of this gateway"),
        (file.replace("vni = 42", "vnii = 42"), "vnii"),
        (file.replace("[underlay]", "[underlay"), "config.toml:16:10"),
        (String::new(), "missing"),
    ] {
        // A second difference, which could be applied alone.
        program.write(&changed.replace("# one", "\nageing = 5"));
        let refused = program.refused(&["reload"]);
        assert!(refused.contains(error), "{error}: {refused}");
        assert_eq!(program.wirepath(&["show", "config"]), before);
    }
    std::fs::remove_file(program.path("config.toml")).unwrap();
    assert!(program.refused(&["reload"]).contains("config.toml: cannot read"));
    program.stop();
}

#[test]
fn single_objects_are_refused_with_a_reason() {
    let program = Program::gateway();
    for (change, why) in [
        (&["add", "remote", "segment=blu", "address=10.9.0.3"][..], "did you mean \"blue\"?"),
        (&["add", "remote", "segment=blue", "address=10.9.0.2"], "the remote 10.9.0.2 exists already"),
        (&["add", "remote", "segment=blue", "address=10.9.0.999"], "expected an IP address"),
        (&["add", "remote", "segment=blue", "address=192.0.2.1"], "is in no network of underlay.addresses"),
        (&["remove", "remote", "segment=blue", "address=10.9.0.2"], "expected at least one remote"),
        (&["remove", "segment", "name=blue"], "expected at least one table [[segment]]"),
        (&["remove", "address", "address=10.9.0.1/24"], "missing, expected at least an address"),
        (&["add", "segment", "name=red"], "segment[1].vni: missing"),
        (&["add", "segment", "name=red", "kind=gre"], "a tunnel with IP packets needs a router"),
        (&["add", "segment", "name=red", "kind=gre", "vrf=default", "remotes=10.9.0.9,10.9.0.8"], "expected one"),
        (&["add", "segment", "name=red", "vni=42"], "42 is the VNI of segment \"blue\" already"),
        (&["add", "segment", "name=red", "vni=7", "remotes=10.9.0.9"], "expected at least one port"),
        (&["add", "attachment", "segment=blue", "port=wan"], "is the underlay port"),
        (&["add", "segment_filter", "segment=blue", "rule=ingress: upd => drop"], "segment[0].filter[0]"),
        (&["add", "segment_filter", "segment=blue", "rule=egress: udp => drop"], "expected one at ingress"),
        (&["remove", "segment_filter", "segment=blue", "rule=ingress: udp => drop"], "there is no"),
        (&["add", "static", "segment=blue", "mac=02:00:00:00:00:01"], "segment[0].static[0]"),
        (&["add", "static", "segment=blue", "mac=03:00:00:00:00:01", "port=lan"], "unicast"),
        (&["set", "segment", "name=blue", "mtu=9000"], "leave"),
        (&["set", "segment", "name=blue", "mtu=many"], "expected a number"),
        (&["set", "segment", "name=blue", "mut=1"], "did you mean \"mtu\"?"),
        (
            &["set", "segment", "name=blue", "filter=any => drop"],
            "segment: \"filter\" is changed by \"add segment_filter\", \"remove segment_filter\"",
        ),
        (&["set", "segment", "name=blue", "static=x"], "\"set static\""),
        (&["set", "segment", "name=blue", "backups=x"], "\"add backup\""),
        (&["add", "vrf", "name=x", "routes=x"], "vrf: \"routes\" is changed by \"add route\""),
        (&["set", "remote", "segment=blue"], "\"set\" is not possible, only add, remove"),
        (&["add", "port", "name=x"], "device: missing"),
        (&["add", "port", "name=lan", "driver=null"], "the port \"lan\" exists already"),
        (&["add", "port", "name=x", "driver=af_packet", "device=none0"], "none0"),
        (&["set", "bfd", "management_vni=42"], "42 is the VNI of segment \"blue\", expected one that no segment has"),
        (&["set", "port", "name=lan", "mtu=1400"], "\"set\" is not possible, only add, remove"),
        (&["remove", "port", "name=lan3"], "there is no port \"lan3\""),
        (&["remove", "port", "name=lan"], "segment[0].ports[0].port"),
        (&["remove", "port", "name=wan"], "underlay.port"),
    ] {
        let error = program.refused(change);
        assert!(error.contains(why), "{change:?}: {error}");
        assert!(!error.contains("config.toml"), "a change has no position in a file: {error}");
    }
    assert!(program.wirepath(&["reload"]).contains("does not differ"), "no refused change is kept");
    let summary = program.stop();
    assert_eq!(summary["app"]["segments"].as_array().map(Vec::len), Some(1), "{summary}");
}

/// `wirepath show filters` prints a rule in one form, whatever form the configuration has.
#[test]
fn shown_rules_of_filters_can_be_removed() {
    let rules = [
        "ingress: any => drop",
        "ingress prio 007: any => count, drop",
        "ingress   prio 2:  eth  dst 02:00:00:00:00:0A => limit 5 pps",
        "ingress prio 3: eth type 0x88cc => drop",
        "ingress prio 4: vlan vid 7 => count",
        "ingress prio 5: port id lan / arp => count",
        "ingress prio 6: ipv4 src 10.0.0.0/8 dst 10.1.2.3 / tcp dst 0x50 => limit 1M bps",
        "ingress prio 7: ipv4 dscp 46 / udp src 53 => limit 1000000 bps, count",
        "ingress prio 8: ipv6 dst FD00:0::1 / tcp flags syn+!ack => drop",
        "ingress prio 9: ipv6 / icmpv6 type 135 => count",
        "ingress prio 10: icmp => limit 1000k bps",
        "ingress prio 11: ipv4 / udp / vxlan vni 9 / inner ipv4 dst 10.9.9.9 => drop",
    ];
    let list = |rules: &[&str]| rules.iter().map(|rule| format!("'{rule}'")).collect::<Vec<_>>().join(", ");
    let router = "vrf = 'x'\naddresses = ['10.5.0.1/24']\n";
    let filter = format!("ports = [{{ port = 'lan' }}]\n{router}filter = [{}]\n", list(&rules));
    let vrf = format!("[[vrf]]\nname = 'x'\nfilter = [{}]\n", list(&rules));
    let tables = GATEWAY_TABLES.replace("ports = [{ port = 'lan' }]\n", &filter);
    let program = Program::start(GATEWAY, &format!("{PORTS}{tables}{vrf}"));
    let rows = program.rows("filters", "of,name,rule");
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 2 * rules.len());
    for row in rows {
        let [of, name, rule] = ["of", "name", "rule"].map(|column| row[column].as_str().unwrap());
        let change = [format!("{of}_filter"), format!("{of}={name}"), format!("rule={rule}")];
        let change = change.each_ref().map(String::as_str);
        let again = program.refused(&[&["add"], &change[..]].concat());
        assert!(again.contains("exists already"), "{rule}: {again}");
        program.wirepath(&[&["remove"], &change[..]].concat());
    }
    assert_eq!(program.rows("filters", "rule"), json!([]));
    program.stop();
}

/// Routes come and go while the gateway runs.
#[test]
fn routes_change_while_the_gateway_runs() {
    let router = "ports = [{ port = 'lan' }]\nvrf = 'x'\naddresses = ['10.5.0.1/24']\n";
    let tables = GATEWAY_TABLES.replace("ports = [{ port = 'lan' }]\n", router);
    let program = Program::start(GATEWAY, &format!("{PORTS}{tables}[[vrf]]\nname = 'x'\n"));
    let has = || program.rows("routes", "to").to_string().contains("10.66.0.0/16");
    assert!(!has());
    let route = ["route", "vrf=x", "to=10.66.0.0/16"];
    program.wirepath(&[&["add"], &route[..], &["discard=blackhole"]].concat());
    assert!(has(), "{}", program.rows("routes", "to"));
    program.wirepath(&[&["remove"], &route[..]].concat());
    assert!(!has(), "{}", program.rows("routes", "to"));
    program.stop();
}

/// A remote that carried frames before its session has a line in the log at the end of the grace time.
#[test]
fn the_log_has_the_end_of_the_grace_time() {
    let program = Program::gateway();
    program.wirepath(&["set", "bfd", "transmit_interval=100"]);
    let is_out = || program.rows("remotes", "state").as_array().unwrap().iter().any(|row| row["state"] == "down");
    assert!(!is_out() && !program.log().contains("BFD session"), "{}", program.log());
    assert!(eventually(WAIT_LIMIT, is_out), "{}", program.rows("remotes", "state"));
    let log = program.log();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("BFD session with 10.9.0.2")).collect();
    assert!(matches!(&lines[..], [line] if line.contains("is down: it has not come up within 5 s")), "{log}");
    program.stop();
}

/// A reload repeats the changes of what was added, also in another spelling and within an added segment.
#[test]
fn changes_of_additions_are_repeated() {
    let program = Program::gateway();
    for change in [
        &["add", "address", "address=fd00:9::1/64"][..],
        &["add", "remote", "segment=blue", "address=fd00:9::5"],
        &["remove", "remote", "segment=blue", "address=FD00:9:0::5"],
        &["add", "segment", "name=red", "vni=7", "remotes=10.9.0.9,10.9.0.8", "ports=lan2,lan2.5"],
        &["remove", "attachment", "segment=red", "port=lan2", "vlan=5"],
        &["remove", "remote", "segment=red", "address=10.9.0.8"],
        &["add", "segment", "name=green", "vni=8", "remotes=10.9.0.9", "ports=lan2.5"],
        &["add", "segment", "name=gone", "vni=9", "remotes=10.9.0.9", "ports=lan2.6"],
        &["add", "remote", "segment=gone", "address=10.9.0.8"],
        &["remove", "segment", "name=gone"],
        &["add", "remote", "segment=green", "address=10.9.0.7"],
        &["set", "segment", "name=green", "remotes=10.9.0.6"],
    ] {
        program.wirepath(change);
    }
    let before = program.wirepath(&["show", "config"]);
    assert!(program.wirepath(&["reload"]).contains("does not differ"));
    assert_eq!(program.rows("segments", "segment,ports,remotes").as_array().map(Vec::len), Some(3));
    let green = program.rows("remotes", "segment,remote");
    let green = green.as_array().unwrap().iter().filter(|row| row["segment"] == "green");
    assert_eq!(green.map(|row| &row["remote"]).collect::<Vec<_>>(), ["10.9.0.6"]);
    let after = program.wirepath(&["show", "config"]);
    assert_eq!(after.lines().count(), before.lines().count(), "{after}");
    // Saved additions belong to the file.
    program.wirepath(&["config", "save"]);
    program.write(&format!("{PORTS}{GATEWAY_TABLES}"));
    program.wirepath(&["reload"]);
    assert_eq!(program.rows("segments", "segment"), json!([{ "segment": "blue" }]));
    // A device gets the text, and stays a device.
    let socket = program.path("control.sock");
    let command = format!("{WIREPATH} config save --socket {} /dev/stdout | cat", socket.display());
    let saved = Command::new("sh").arg("-c").arg(command).output().unwrap();
    assert!(text(&saved.stdout).contains("# the first segment"), "{saved:?}");
    program.stop();
}

/// Tables of a segment are given as in the file.
#[test]
fn a_segment_with_sids_is_added_and_shown() {
    let program = Program::gateway();
    program.wirepath(&["add", "address", "address=fd00:9::1/64"]);
    let segment = ["add", "segment", "name=sr", "kind=srv6", "remotes=fd00:9::2", "ports=lan2"];
    for (srv6, why) in [
        ("srv6={ local_sid = 'fd00:9::100' }", "segs"),
        ("srv6={ local_sid = 'fd00:9::1', segs = ['fd00:9::2'] }", "segment[1].srv6"),
        ("srv6={ local_sid = 'fd00:9::100', segs = ['fd00:9::2'], mod = 'encaps' }", "did you mean \"mode\"?"),
        ("srv6=fd00:9::100", "srv6: found \"fd00:9::100\", expected a TOML value as in a configuration file"),
        ("srv6='fd00:9::100'", "segment[1].srv6"),
    ] {
        let error = program.refused(&[&segment[..], &[srv6]].concat());
        assert!(error.contains(why), "{srv6}: {error}");
    }
    let srv6 = "srv6={ local_sid = 'fd00:9::100', segs = ['fd00:9::2'] }";
    program.wirepath(&[&segment[..], &[srv6]].concat());
    let sids = |program: &Program| program.rows("segments", "segment,sid");
    let shown = json!([{ "segment": "blue", "sid": null }, { "segment": "sr", "sid": "fd00:9::100" }]);
    assert_eq!(sids(&program), shown);
    program.wirepath(&["set", "segment", "name=sr", "srv6={ local_sid = 'fd00:9::101', segs = ['fd00:9::2'] }"]);
    assert_eq!(sids(&program)[1]["sid"], "fd00:9::101");
    program.wirepath(&["set", "segment", "name=blue", "kind=gretap", "gre={ checksum = true }"]);
    assert!(program.wirepath(&["show", "config"]).contains("gre = { checksum = true }"));
    program.wirepath(&["set", "segment", "name=blue", "kind=mpls-udp", "gre=", "mpls={ control_word = false }"]);
    let shown = program.wirepath(&["show", "config"]);
    assert!(shown.contains("mpls = { control_word = false }") && shown.contains("kind = \"mpls-udp\""), "{shown}");
    let error = program.refused(&["set", "segment", "name=blue", "vni=15"]);
    assert!(error.contains("expected an integer from 16 to 1048575"), "{error}");
    let error = program.refused(&["set", "segment", "name=blue", "mpls={ word = false }"]);
    assert!(error.contains("segment[0].mpls.word"), "{error}");
    // Without a NIC, remotes have no place.
    let places = program.rows("remotes", "encap,encap_why,decap,decap_why");
    assert_eq!(places[0], json!({ "encap": null, "encap_why": null, "decap": null, "decap_why": null }));
    program.stop();
}

/// A capture of a segment goes on when the segment gets another VNI, and ends when it is removed.
#[test]
fn a_capture_follows_the_name_of_its_segment() {
    let program = Program::gateway();
    let file = program.path("blue.pcapng");
    let mut capture = Command::new(WIREPATH);
    capture.args(["capture", "--json", "--rate", "1000", "--segment", "blue", "--socket"]);
    capture.arg(program.path("control.sock")).arg("--write").arg(&file);
    let mut capture = capture.stdout(Stdio::piped()).spawn().unwrap();
    let len = || std::fs::metadata(&file).map_or(0, |data| data.len());
    assert!(eventually(WAIT_LIMIT, || len() > 10_000), "{}", program.log());
    program.wirepath(&["set", "segment", "name=blue", "vni=43"]);
    let before = len();
    assert!(eventually(WAIT_LIMIT, || len() > before + 10_000), "nothing is captured after the change");

    program.wirepath(&["add", "segment", "name=red", "vni=7", "remotes=10.9.0.9", "ports=lan2"]);
    program.wirepath(&["remove", "segment", "name=blue"]);
    assert!(eventually(WAIT_LIMIT, || capture.try_wait().unwrap().is_some()), "the capture ends");
    let output = capture.wait_with_output().unwrap();
    let figures: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &figures["end"]), (Some(0), &json!("segment_removed")));
    let error = program.refused(&["capture", "--write", "-", "--segment", "blue"]);
    assert!(error.contains("there is no segment \"blue\""), "{error}");
    program.stop();
}

#[test]
fn ports_come_and_go_while_the_gateway_runs() {
    let program = Program::gateway();
    let names = |program: &Program| -> Vec<String> {
        let rows = program.rows("ports", "port");
        rows.as_array().unwrap().iter().map(|row| row["port"].as_str().unwrap().to_owned()).collect()
    };
    program.wirepath(&["add", "port", "name=lan3", "driver=null"]);
    assert_eq!(names(&program), ["lan", "lan2", "wan", "lan3"]);
    program.wirepath(&["add", "segment", "name=red", "vni=7", "remotes=10.9.0.9", "ports=lan3"]);
    program.wirepath(&["add", "rule", "rule=ingress prio 3: port id lan3 / udp dst 99 => drop"]);
    let attached = program.refused(&["remove", "port", "name=lan3"]);
    assert!(attached.contains("no port is called \"lan3\"") || attached.contains("lan3"), "{attached}");
    program.wirepath(&["remove", "segment", "name=red"]);
    let named = program.refused(&["remove", "port", "name=lan3"]);
    assert!(named.contains("cannot be removed, because flow rules name it:\n  rule 1: "), "{named}");
    assert!(named.contains("port id lan3"), "{named}");
    program.wirepath(&["remove", "rule", "id=1"]);
    program.wirepath(&["remove", "port", "name=lan3"]);
    assert_eq!(names(&program), ["lan", "lan2", "wan"]);

    // The file removes a port and adds one with its attachment, at once. A dry run opens nothing.
    let file = format!("{PORTS}{GATEWAY_TABLES}");
    let second = "[[port]]\nname = 'new'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\n[control]";
    let changed = file.replace("[[port]]\nname = 'lan2'\ndriver = 'null'\n", "").replace("[control]", second);
    let segment = "[[segment]]\nname = 'red'\nvni = 7\nremotes = ['10.9.0.9']\nports = [{ port = 'new' }]\n";
    let missing = "driver = 'af_packet'\ndevice = 'none0'\n";
    let unusable = second.replace("driver = 'null'\n[port.null]\nsource = 'udp4'\n", missing);
    program.write(&format!("{changed}{segment}").replace(second, &unusable));
    assert!(program.wirepath(&["reload", "--dry-run"]).contains("not applied: this was a dry run"));
    let error = program.refused(&["reload"]);
    assert!(error.contains("none0"), "{error}");
    assert_eq!(names(&program), ["lan", "lan2", "wan"]);
    program.write(&format!("{changed}{segment}"));
    let dry = program.wirepath(&["reload", "--dry-run"]);
    assert!(dry.contains("+ port.new.driver = \"null\"\n") && dry.contains("- port.lan2.name"), "{dry}");
    assert!(dry.contains("note: port \"new\" was not opened, so errors of its device"), "{dry}");
    assert_eq!(names(&program), ["lan", "lan2", "wan"]);
    program.wirepath(&["reload"]);
    let mut now = names(&program);
    now.sort();
    assert_eq!(now, ["lan", "new", "wan"]);
    let received = || program.rows("segments", "segment,local_rx_packets")[1]["local_rx_packets"].as_u64();
    assert!(eventually(WAIT_LIMIT, || received() > Some(1000)), "the new port receives: {:?}", received());

    // The port comes back, in another place of the list.
    program.write(&file);
    program.0.signal(Signal::HUP);
    assert!(eventually(WAIT_LIMIT, || program.log().contains("reload of the configuration by SIGHUP is done")));
    for _ in 0..20 {
        program.wirepath(&["add", "port", "name=lan3", "driver=null"]);
        program.wirepath(&["add", "attachment", "segment=blue", "port=lan3"]);
        assert_eq!(program.rows("segments", "ports"), json!([{ "ports": "lan lan3" }]));
        program.wirepath(&["remove", "attachment", "segment=blue", "port=lan3"]);
        program.wirepath(&["remove", "port", "name=lan3"]);
    }
    program.wirepath(&["config", "save"]);
    assert!(program.wirepath(&["reload"]).contains("does not differ"));
    let summary = program.stop();
    assert_eq!((&summary["in_flight"], &summary["leaked_buffers"]), (&json!(0), &json!(0)), "{summary}");
    let ports = summary["ports"].as_array().unwrap();
    assert_eq!(ports.last().unwrap()["name"], "removed ports", "{summary}");
}

/// Changes of several clients at once are carried out one after the other, each whole.
#[test]
fn changes_at_once_are_serialised() {
    let program = Program::gateway();
    let socket = program.path("control.sock");
    std::thread::scope(|scope| {
        for client in 0..8 {
            let socket = &socket;
            scope.spawn(move || {
                let stream = wirepath_control_socket::connect(socket, WAIT_LIMIT).unwrap();
                let mut reader = std::io::BufReader::new(stream);
                for n in 0..8 {
                    let address = format!("10.9.0.{}", 10 + client * 8 + n);
                    let arguments = json!({ "segment": "blue", "address": address });
                    let request = json!({ "request": "add", "object": "remote", "arguments": arguments });
                    std::io::Write::write_all(reader.get_mut(), format!("{request}\n").as_bytes()).unwrap();
                    if client == 7 && n == 7 {
                        // The last client dies before its answer. Its change is carried out nevertheless.
                        return;
                    }
                    let mut line = String::new();
                    std::io::BufRead::read_line(&mut reader, &mut line).unwrap();
                    assert!(line.contains("\"applied\":true"), "{line}");
                }
            });
        }
    });
    assert!(eventually(WAIT_LIMIT, || program.rows("segments", "remotes")[0]["remotes"] == 65), "{}", program.log());
    program.stop();
}

#[test]
fn a_save_without_a_table_of_rules_is_read_again() {
    let text = format!("{PORTS}{GATEWAY_TABLES}").replace("[rules]\nfile = 'acl.rules'\n", "");
    let text = text.replace("[{ port = 'lan' }]", "[{ port = 'lan' }, { port = 'lan2' }]");
    let program = Program::start(GATEWAY, &text);
    program.wirepath(&["add", "rule", "rule=ingress prio 3: port id wan / udp dst 99 => drop"]);
    program.wirepath(&["config", "save"]);
    assert!(program.wirepath(&["reload"]).contains("does not differ"));
    assert_eq!(program.rows("rules", "origin"), json!([{ "origin": "configuration" }]));
    program.stop();
}

#[test]
fn l2fwd_reloads_its_rules_and_nothing_else() {
    let ports =
        PORTS.replace("name = 'wan'", "name = 'wan'\n").replace("[control]", "[rules]\nfile = 'acl.rules'\n[control]");
    let ports = ports + "[l2fwd]\nmode = 'bridge'\n";
    let program = Program::start(L2FWD, &ports);
    std::fs::write(program.path("acl.rules"), "ingress: port id lan / udp dst 1 => drop\n").unwrap();
    assert!(program.wirepath(&["reload"]).contains("note: flow rules: 1 new, 1 removed\napplied"));
    let rules = program.rows("rules", "rule");
    assert_eq!(rules, json!([{ "rule": "ingress prio 0: port id lan / udp dst 1 => drop" }]));
    program.write(&ports.replace("'bridge'", "'bridge'\nageing = 9"));
    assert!(program.refused(&["reload"]).contains("+ l2fwd.ageing = 9"));
    program.stop();
}
