//! The subcommand `wirepath flow` from the command line.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json as json_value};

fn flow(arguments: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_wirepath"))
        .arg("flow")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// Runs the command and returns exit code, standard output and standard error.
fn run_flow(arguments: &[&str], input: &str) -> (i32, String, String) {
    let output = flow(arguments, input);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn json(arguments: &[&str], input: &str) -> (i32, Value) {
    let (code, out, _) = run_flow(arguments, input);
    assert_eq!(out.lines().count(), 1, "one object on one line");
    (code, serde_json::from_str(&out).unwrap())
}

#[test]
fn rules_come_back_in_canonical_form_and_can_be_read_again() {
    let text = "ingress prio 010: ipv4 dst 10.0.0.0/8 / udp dst 0x35 => drop # DNS\negress: any => count\n";
    let canonical = "ingress prio 10: ipv4 dst 10.0.0.0/8 / udp dst 53 => drop\negress prio 0: any => count\n";
    assert_eq!(run_flow(&["check", "-"], text), (0, canonical.to_owned(), String::new()));
    assert_eq!(run_flow(&["check", "-"], canonical).1, canonical);
    let (code, tables, _) = run_flow(&["check", "-", "--toml"], text);
    assert_eq!((code, run_flow(&["check", "-"], &tables).1.as_str()), (0, canonical), "{tables}");
    let (code, report) = json(&["check", "-", "--json"], text);
    assert_eq!((code, &report["ok"]), (0, &Value::Bool(true)));
    assert_eq!(run_flow(&["check", "-"], &report.to_string()).1, canonical, "{report}");
}

#[test]
fn every_wrong_rule_is_shown_with_its_word() {
    let text = "ingress: ipv5 => drop\ningress: any => drop\ningress: ipv4\n    dst 10.0.0.300 => drop\n";
    let (code, out, error) = run_flow(&["check", "-"], text);
    assert_eq!((code, out.as_str()), (2, "ingress prio 0: any => drop\n"));
    let lines: Vec<&str> = error.lines().collect();
    assert_eq!(
        lines,
        [
            "error: -:1:10: unknown item \"ipv5\"; did you mean \"ipv4\"?",
            "  ingress: ipv5 => drop",
            "           ^^^^",
            "error: -:4:9: found \"10.0.0.300\", expected an IPv4 address or prefix such as 10.0.0.0/8",
            "      dst 10.0.0.300 => drop",
            "          ^^^^^^^^^^",
            "error: 2 of 3 rules are wrong",
        ]
    );
    let (code, report) = json(&["check", "-", "--json"], text);
    assert_eq!((code, &report["ok"], report["errors"].as_array().unwrap().len()), (2, &Value::Bool(false), 2));
    assert_eq!((&report["errors"][1]["line"], &report["errors"][1]["column"]), (&4.into(), &9.into()));
}

#[test]
fn rules_of_a_configuration_know_its_ports() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("l2fwd.toml");
    let check = |text: &str, more: &[&str]| {
        std::fs::write(&file, text).unwrap();
        let mut arguments = vec!["check", file.to_str().unwrap()];
        arguments.extend(more);
        run_flow(&arguments, "")
    };
    let ports = "[[port]]\nname = \"lan\"\ndriver = \"null\"\n[[port]]\nname = \"wan\"\ndriver = \"null\"\n";
    let rule = |text: &str| format!("{ports}[[rule]]\nrule = \"{text}\"\n");
    let (code, out, error) = check(&rule("ingress: port id wan => redirect lan"), &[]);
    assert_eq!((code, out.as_str(), error.as_str()), (0, "ingress prio 0: port id wan => redirect lan\n", ""));
    let (code, _, error) = check(&rule("ingress: port id wam => drop"), &[]);
    assert!(
        code == 2 && error.contains(":8:26: rule[0].rule: no port is called \"wam\"; did you mean \"wan\"?"),
        "{error}"
    );
    assert!(error.contains("\n                           ^^^\n"), "{error}");
    // Errors outside the rules are reported too.
    let (code, out, error) = check(&(rule("ingress: any => drop") + "[l2fwd]\nmode = \"brige\"\n"), &[]);
    assert!(code == 2 && error.contains("did you mean \"bridge\"?") && out.contains("any => drop"), "{error}");
    // The start would refuse this.
    let (code, _, error) = check(&rule("ingress: any => queue 1"), &[]);
    assert!(code == 2 && error.contains("error: ") && error.contains("port \"lan\" has no queue 1"), "{error}");
    let twice = rule("ingress: any => count") + "[[rule]]\nrule = \"ingress: any => drop\"\n";
    let (code, _, error) = check(&twice, &[]);
    assert!(code == 0 && error.contains("warning: "), "{error}");
    assert_eq!(check(&twice, &["--strict"]).0, 2);
}

#[test]
fn rules_are_printed_with_the_names_of_ports() {
    let rule = "ingress prio 5: port id wan / ipv4 => mirror lan";
    let config = format!(
        "[[port]]\nname = 'lan'\ndriver = 'null'\n[[port]]\nname = 'wan'\ndriver = 'null'\n[[rule]]\nrule = '{rule}'\n"
    );
    let (code, out, error) = run_flow(&["check", "-"], &config);
    assert_eq!((code, out.trim()), (0, rule), "{error}");
    let (code, report) = json(&["check", "-", "--json"], &config);
    assert_eq!((code, &report["ports"]), (0, &json_value!(["lan", "wan"])), "{report}");
    // What `check` prints can be checked again, as text and as JSON.
    let (code, out, _) = run_flow(&["check", "-", "--ports", "lan,wan"], &out);
    assert_eq!((code, out.trim()), (0, rule));
    let (code, out, error) = run_flow(&["check", "-", "--ports", "lan,wan"], &report.to_string());
    assert_eq!((code, out.trim()), (0, rule), "{error}");
    let (code, out, _) = run_flow(&["explain", "-"], &config);
    assert!(code == 0 && out.contains(rule), "{out}");
    let (_, report) = json(&["explain", "-", "--json"], &config);
    assert_eq!(report["rules"][0]["rule"], "ingress prio 5: port id 1 / ipv4 => mirror 0");
    assert_eq!(report["rules"][0]["text"], rule);
}

#[test]
fn a_rule_that_never_runs_is_reported() {
    let text = "ingress prio 1: ipv4 dst 10.0.0.0/8 => drop\ningress prio 2: ipv4 dst 10.1.2.3 / tcp => count\n";
    let (code, _, error) = run_flow(&["check", "-"], text);
    assert_eq!(code, 0);
    assert!(
        error
            .starts_with("warning: -:2:1: never runs: the rule in line 1, with a lower number, fits all its packets\n"),
        "{error}"
    );
    let (_, report) = json(&["check", "-", "--json"], text);
    assert_eq!((&report["warnings"][0]["kind"], &report["warnings"][0]["rule"]), (&"shadowed".into(), &1.into()));
}

#[test]
fn the_language_is_listed() {
    let (code, items, _) = run_flow(&["items"], "");
    assert!(code == 0 && items.contains("vxlan-gpe") && items.contains("an IPv4 address or prefix"), "{items}");
    let (code, actions, _) = run_flow(&["actions"], "");
    assert!(code == 0 && actions.contains("rss [queues QUEUES]"), "{actions}");
    let (_, items) = json(&["items", "--json"], "");
    assert!(items["items"].as_array().unwrap().iter().any(|item| item["name"] == "geneve"));
    let (_, actions) = json(&["actions", "--json"], "");
    assert!(actions["actions"].as_array().unwrap().iter().any(|action| action["name"] == "dec-ttl"));
}

#[test]
fn unreadable_input_is_bad_usage() {
    assert_eq!(run_flow(&["check", "/nonexistent.rules"], "").0, 2);
    assert_eq!(run_flow(&["check"], "").0, 2);
    assert_eq!(run_flow(&["check", "-"], "\u{0}\u{1b}[2J").0, 2);
    assert_eq!(flow(&["check", "-", "--form", "json"], "[").status.code(), Some(2));
    let (code, _, error) = run_flow(&["check", "-"], "ingress: \u{1b}[2J => drop\n");
    assert!(code == 2 && !error.contains('\u{1b}'), "{error:?}");
    assert!(!Path::new("-").exists());
}

/// A NIC that matches Ethernet, IP and VXLAN and can decapsulate and encapsulate VXLAN.
const NIC: &str = r#"{
    "driver": "mlx5", "device": "mlx5_0", "backend": "dv", "tag_bits": 24,
    "ingress": {
        "levels": 2, "counters": 100,
        "items": [
            {"item": "eth", "fields": {"dst": "exact", "tags": "any"}},
            {"item": "ipv4", "fields": {"src": "any", "dst": "any", "ecn": "any", "frag": "0x1"}},
            {"item": "udp", "fields": {"dst": "exact"}},
            {"item": "vxlan", "fields": {"vni": "exact"}, "implies": "udp dst 4789"},
            {"item": "geneve", "fields": {"vni": "exact"}, "implies": "udp dst 6081"}
        ],
        "aside": ["ipv4 frag yes"], "tells_order": true,
        "actions": {"most": 2, "reformats": [{"kind": "decap l2", "tunnels": ["vxlan"]}], "fates": ["next", "drop"]}
    },
    "egress": {
        "levels": 2,
        "items": [{"item": "meta", "fields": {"data": "any"}}],
        "actions": {
            "most": 1, "fates": ["next", "drop"],
            "reformats": [{"kind": "encap l2", "max_header": 128, "tunnels": ["vxlan"], "fills_source_port": ["vxlan"]}]
        }
    }
}"#;

#[test]
fn recorded_capabilities_show_where_rules_run() {
    let folder = tempfile::tempdir().unwrap();
    let nic = folder.path().join("nic.json");
    std::fs::write(&nic, NIC).unwrap();
    let config = folder.path().join("l2fwd.toml");
    let rules = [
        "ingress prio 1: ipv4 src 10.0.0.1 => mark 1",
        "ingress prio 2: ipv4 src 10.0.0.2 => mark 2, redirect b",
        "ingress prio 3: port id a / tcp dst 22 => drop",
        "ingress prio 4: ipv4 src 10.0.0.8 dst 10.0.0.9 => drop",
        "ingress prio 0: ipv4 src 10.0.0.9 ecn 0 / udp / vxlan vni 7 => decap l2",
    ];
    let tables: String = rules.map(|rule| format!("[[rule]]\nrule = '{rule}'\n")).concat();
    let ports =
        "[[port]]\nname = 'a'\ndriver = 'null'\n[[port]]\nname = 'b'\ndriver = 'null'\n[l2fwd]\nmode = 'pairs'\n";
    std::fs::write(&config, format!("{ports}{tables}")).unwrap();
    let (config, nic) = (config.to_str().unwrap(), nic.to_str().unwrap());
    std::fs::write(nic, NIC.replace(r#""tells_order": true"#, r#""tells_order": false"#)).unwrap();
    let (code, text, _) = run_flow(&["explain", config, "--capabilities", nic], "");
    assert!(
        code == 0 && text.contains("split     decap: mlx5_0 (mlx5dv) cannot match on valid outer headers"),
        "{text}"
    );
    std::fs::write(nic, NIC).unwrap();
    let (code, report) = json(&["explain", config, "--capabilities", nic, "--json"], "");
    assert_eq!(code, 0, "{report}");
    let on_a = |i: usize| &report["rules"][i]["ports"][0];
    let is = |i: usize, word: &str, why: &str| {
        assert_eq!(on_a(i)["where"], word, "{}", on_a(i));
        assert!(on_a(i)["why"].as_str().unwrap().contains(why), "{}", on_a(i));
    };
    is(0, "hardware", "in the NIC");
    is(1, "split", "a NIC cannot redirect to another port");
    is(2, "software", "tcp: mlx5_0 (mlx5dv) cannot match it");
    // The NIC supports the rule, but packets to port 22 would bypass the rule above it.
    is(3, "software", "ingress prio 3: port id a / tcp dst 22 => drop");
    is(4, "hardware", "left to software: packets with wrong outer lengths or checksums");
    let (code, text, _) = run_flow(&["explain", config, "--capabilities", nic], "");
    assert!(code == 0 && text.starts_with("RULE  PORT  DRIVER  WHERE     WHY\n"), "{text}");
    assert!(text.contains("=> mark 2, redirect b\n      a     null    split     redirect: a NIC"), "{text}");
    // The gateway's own tunnels are shown too.
    let simple = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/tunnel-gateway-simple.toml");
    let (code, report) = json(&["explain", simple.to_str().unwrap(), "--capabilities", nic, "--json"], "");
    assert_eq!(code, 0, "{report}");
    let own: Vec<&Value> = report["gateway"].as_array().unwrap().iter().map(|own| &own["where"]).collect();
    assert_eq!(own[..2], ["hardware", "hardware"], "{report}");
    // Errors in such a file are reported, and an endless file is not read forever.
    let (code, _, error) = run_flow(&["explain", config, "--capabilities", "/dev/zero"], "");
    assert!(code == 2 && error.contains("expected a regular file"), "{error}");
    std::fs::write(nic, NIC.replace("\"vni\"", "\"vin\"")).unwrap();
    let (code, _, error) = run_flow(&["explain", config, "--capabilities", nic], "");
    assert!(code == 2 && error.contains("item \"vxlan\" has no field \"vin\""), "{error}");
    let (code, _, error) = run_flow(&["explain", config, "--capabilities", config], "");
    assert!(code == 2 && error.contains("not what `wirepath devices --rules` prints"), "{error}");
}

/// The reason names the port of the configuration, not one that the rule could name instead.
#[test]
fn a_tunnel_on_another_udp_port_has_its_own_reason() {
    let folder = tempfile::tempdir().unwrap();
    let (nic, config) = (folder.path().join("nic.json"), folder.path().join("gateway.toml"));
    std::fs::write(&nic, NIC).unwrap();
    let why = |udp_port: &str, rule: &str| {
        let text = format!(
            "[[port]]\nname = 'wan'\ndriver = 'null'\n[[port]]\nname = 'lan'\ndriver = 'null'\n[underlay]\n\
             port = 'wan'\naddresses = ['10.9.0.1/24']\nkind = 'geneve'\n{udp_port}[[segment]]\nvni = 42\n\
             remotes = ['10.9.0.2']\nports = [{{ port = 'lan' }}]\n[[rule]]\nrule = 'ingress: {rule} => drop'\n"
        );
        std::fs::write(&config, text).unwrap();
        let arguments = ["explain", config.to_str().unwrap(), "--capabilities", nic.to_str().unwrap(), "--json"];
        let (code, report) = json(&arguments, "");
        assert_eq!(code, 0, "{report}");
        report["rules"][0]["ports"][0]["why"].as_str().unwrap().to_owned()
    };
    assert_eq!(why("", "ipv4 / udp / geneve vni 7"), "in the NIC");
    let other = "geneve: here the tunnel has UDP port 6081, which the rule excludes";
    assert_eq!(why("", "ipv4 / udp dst 7000 / geneve vni 7"), other);
    let only = "geneve: mlx5_0 (mlx5dv) matches it only in packets with \"udp dst 6081\", but here the tunnel has UDP \
                port 7000";
    for rule in ["ipv4 / udp / geneve vni 7", "ipv4 / udp dst 7000 / geneve vni 7"] {
        assert_eq!(why("udp_port = 7000\n", rule), only);
    }
}

#[test]
fn a_rule_is_refused_on_the_port_that_stands_in_its_way() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("l2fwd.toml");
    let ports = "[[port]]\nname = 'a'\ndriver = 'null'\n[[port]]\nname = 'b'\ndriver = 'null'\nqueues = 4\n";
    std::fs::write(&config, format!("{ports}[[rule]]\nrule = 'ingress: any => queue 2'\n")).unwrap();
    let (code, report) = json(&["explain", config.to_str().unwrap(), "--json"], "");
    let on = |port: usize| {
        let it = &report["rules"][0]["ports"][port];
        (it["port"].as_str().unwrap(), it["where"].as_str().unwrap(), it["why"].as_str().unwrap())
    };
    let (name, location, why) = on(0);
    assert!((code, name, location) == (2, "a", "refused") && why.contains("port \"a\" has no queue 2"), "{report}");
    let (name, location, why) = on(1);
    assert!((name, location) == ("b", "software") && !why.contains("queue"), "{report}");
}

#[test]
fn rules_alone_give_ports_no_names() {
    let folder = tempfile::tempdir().unwrap();
    let rules = folder.path().join("some.rules");
    std::fs::write(&rules, "egress: any => count\n").unwrap();
    let (code, _, error) = run_flow(&["match", rules.to_str().unwrap(), "--pcap", "none.pcap", "--out", "wan"], "");
    assert!(code == 2 && error.contains("found \"wan\", expected the number of a port"), "{error}");
}
