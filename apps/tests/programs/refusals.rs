//! Configurations and machines that the programs reject: one message with the position and the remedy, exit
//! code 2 for an invalid configuration and 1 for a failure of the machine. Nothing is started.

use std::path::{Path, PathBuf};

use wirepath_testlab::{Lab, Outcome, Requirement, copy_program, require, run};

const GATEWAY: &str = env!("CARGO_BIN_EXE_tunnel-gateway");
const L2FWD: &str = env!("CARGO_BIN_EXE_l2fwd");

const PORTS: &str = "[[port]]\nname = \"lan\"\ndriver = \"null\"\n\n[[port]]\nname = \"wan\"\ndriver = \"null\"\n\n";
const UNDERLAY: &str = "[underlay]\nport = \"wan\"\naddresses = [\"10.9.0.1/24\"]\n\n";

const SEGMENT: &str = "[[segment]]\nvni = 1\nremotes = [\"10.9.0.2\"]\nports = [{ port = \"lan\" }]\n";

/// Runs a program with a configuration.
fn with_config(binary: &str, text: &str) -> (Outcome, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bad.toml");
    std::fs::write(&file, text).unwrap();
    (run(&[binary, "--config", file.to_str().unwrap(), "--seconds", "1"]), file)
}

/// Checks that the configuration is rejected at `position` (line:column) for `key`, with a message that
/// contains `words`.
#[track_caller]
fn refused(binary: &str, text: &str, position: &str, key: &str, words: &[&str]) {
    let (outcome, file) = with_config(binary, text);
    let stderr = &outcome.stderr;
    assert_eq!(outcome.code, Some(2), "exit code; stderr: {stderr}");
    let location = format!("{}:{position}: {key}", file.display());
    assert!(stderr.contains(&location), "expected {location} in: {stderr}");
    for word in words {
        assert!(stderr.contains(word), "expected {word:?} in: {stderr}");
    }
    assert!(outcome.stdout.is_empty(), "nothing was started: {}", outcome.stdout);
}

#[test]
fn a_wrong_value_names_file_line_key_found_and_expected() {
    let text = PORTS.replacen("driver = \"null\"", "driver = \"null\"\nmtu = 70000", 1);
    refused(L2FWD, &text, "4:7", "port[0].mtu", &["70000", "68 to"]);
    refused(GATEWAY, &text, "4:7", "port[0].mtu", &["70000", "68 to"]);
}

#[test]
fn more_than_the_device_or_the_machine_has() {
    let text = PORTS.replacen(
        "driver = \"null\"",
        "driver = \"pcap\"\nqueues = 250\n[port.pcap]\nwrite = \"/dev/null\"\nformat = \"pcap\"",
        1,
    );
    refused(L2FWD, &text, "4:10", "port[0].queues", &["port 'lan'", "not 250"]);
    let (outcome, _) = with_config(L2FWD, &(PORTS.to_owned() + "[workers]\ncores = [1000]\n"));
    assert!(outcome.code == Some(2) && outcome.stderr.contains("core 1000 cannot be used"), "{}", outcome.stderr);
}

#[test]
fn an_unknown_key_names_the_nearest() {
    let text = PORTS.replacen("driver", "drivr", 1);
    refused(GATEWAY, &text, "3:1", "port[0].drivr", &["unknown key", "did you mean \"driver\""]);
    let text = PORTS.to_owned()
        + UNDERLAY
        + "[[segment]]\nname = \"x\"\nvni = 1\nremote = [\"10.9.0.2\"]\nports = [{ port = \"lan\" }]\n";
    refused(GATEWAY, &text, "16:1", "segment[0].remote", &["did you mean \"remotes\""]);
}

/// Checks that a configuration has exactly these errors, each `line:column: key: beginning of the message`.
#[track_caller]
fn all_refused(binary: &str, text: &str, errors: &[&str]) {
    let (outcome, file) = with_config(binary, text);
    assert_eq!(outcome.code, Some(2), "exit code; stderr: {}", outcome.stderr);
    let found: Vec<&str> = outcome.stderr.lines().collect();
    assert_eq!(found.len(), errors.len(), "{found:#?}");
    for (found, want) in found.iter().zip(errors) {
        assert!(found.starts_with(&format!("error: {}:{want}", file.display())), "expected {want} in: {found}");
    }
}

#[test]
fn all_errors_of_a_file_are_reported_at_once() {
    let gateway = "\
[[port]]
name = 'wan'
driver = 'null'
mtu = 1
[[port]]
name = 'lan'
driver = 'nul'
[port.null]
size = 1
[[port]]
name = 'third'
driver = 'af_xdp'
[port.af_xdp]
mod = 'native'
[underlay]
port = 'wam'
addresses = ['10.9.0.1']
tll = 3
[[segment]]
vnii = 42
remotes = ['10.9.0.2', 'x']
ports = [{ port = 'lan', vlann = 1 }, { port = 'lam' }]
[[segment]]
vni = 1
ports = [{ port = 'lan' }]
[workers]
cores = [1, 1]
idle = 'buzy'
[[rule]]
rule = 'ingress: port id lam => drop'
[[rule]]
rule = 'ingress: ipv5 => drop'
[rules]
fil = 'x'
";
    let unknown = "unknown key; did you mean";
    all_refused(
        GATEWAY,
        gateway,
        &[
            "4:7: port[0].mtu: found 1, expected an integer from 68 to 9202",
            "7:10: port[1].driver: found 'nul', expected one of ",
            "10:1: port[2].device: missing, expected the name of a network interface",
            &format!("14:1: port[2].af_xdp.mod: {unknown} \"mode\"?"),
            "16:8: underlay.port: found \"wam\", expected the name of a port; did you mean \"wan\"?",
            "17:14: underlay.addresses[0]: found '10.9.0.1', expected an address with its prefix length",
            &format!("18:1: underlay.tll: {unknown} \"ttl\"?"),
            &format!("20:1: segment[0].vnii: {unknown} \"vni\"?"),
            "21:24: segment[0].remotes[1]: found 'x', expected an IP address",
            &format!("22:26: segment[0].ports[0].vlann: {unknown} \"vlan\"?"),
            "22:48: segment[0].ports[1].port: found \"lam\", expected the name of a port; did you mean \"lan\"?",
            "23:1: segment[1].remotes: missing, expected at least one remote",
            "27:13: workers.cores[1]: core 1 is named twice",
            "28:8: workers.idle: found 'buzy', expected one of \"busy\", \"adaptive\", \"sleep\" (did you mean",
            "30:26: rule[0].rule: no port is called \"lam\"; did you mean \"lan\"?",
            "32:18: rule[1].rule: ",
            &format!("34:1: rules.fil: {unknown} \"file\"?"),
        ],
    );
    let l2fwd = "[[port]]\ndriver = 'null'\nquues = 1\n[[port]]\nname = 'b'\ndriver = 'null'\ndepth = 1\n\
                 [l2fwd]\npairs = [['a', 'c']]\nagein = 3\n[pol]\n";
    all_refused(
        L2FWD,
        l2fwd,
        &[
            "1:1: port[0].name: missing, expected a string",
            &format!("3:1: port[0].quues: {unknown} \"queues\"?"),
            "7:9: port[1].depth: found 1, expected an integer from 16 to 65536",
            "9:11: l2fwd.pairs[0][0]: there is no port \"a\"",
            &format!("10:1: l2fwd.agein: {unknown} \"ageing\"?"),
            &format!("11:2: pol: {unknown} \"pool\"?"),
        ],
    );
    let many: String = (0..30).map(|i| format!("[[port]]\nname = 'p{i}'\ndriver = 'null'\nmtu = 1\n")).collect();
    let (outcome, _) = with_config(L2FWD, &many);
    let lines: Vec<&str> = outcome.stderr.lines().collect();
    assert_eq!((lines.len(), lines[20]), (21, "error: and 10 more"), "{lines:#?}");
}

#[test]
fn a_core_that_is_not_there_has_a_position() {
    let text = PORTS.to_owned() + "[workers]\ncores = [0, 999]\n";
    refused(L2FWD, &text, "10:13", "workers.cores[1]", &["core 999 cannot be used; this program may run on cores 0"]);
    refused(GATEWAY, &(text + UNDERLAY + SEGMENT), "10:13", "workers.cores[1]", &["core 999 cannot be used"]);
    let text = PORTS.to_owned() + "[workers]\ncores = [0, 1, 2]\n";
    let (outcome, _) = with_config(L2FWD, &text);
    let idle = outcome.stderr.contains("bad.toml:10:16: workers.cores[2]: 3 workers, but the ports have only 2");
    let few = outcome.stderr.contains("workers.cores[2]: core 2 cannot be used");
    assert!(outcome.code == Some(2) && (idle || few), "{}", outcome.stderr);
}

#[test]
fn dangling_references_are_refused() {
    let segment = "[[segment]]\nname = \"x\"\nvni = 1\nremotes = [\"10.9.0.2\"]\nports = [{ port = \"lam\" }]\n";
    refused(GATEWAY, &(PORTS.to_owned() + UNDERLAY + segment), "17:19", "segment[0].ports[0].port", &["lam", "lan"]);
    let text = PORTS.to_owned() + "[l2fwd]\nmode = \"pairs\"\npairs = [[\"lan\", \"wam\"]]\n";
    let (outcome, file) = with_config(L2FWD, &text);
    assert_eq!(outcome.code, Some(2), "{}", outcome.stderr);
    assert!(
        outcome.stderr.contains(&format!("{}:11:", file.display())) && outcome.stderr.contains("wam"),
        "{}",
        outcome.stderr
    );
}

#[test]
fn numbers_out_of_range() {
    let segment = "[[segment]]\nname = \"x\"\nvni = 16777216\nremotes = [\"10.9.0.2\"]\nports = [{ port = \"lan\" }]\n";
    refused(GATEWAY, &(PORTS.to_owned() + UNDERLAY + segment), "15:7", "segment[0].vni", &["16777216", "16777215"]);
}

#[test]
fn no_toml_at_all_and_no_file() {
    let (outcome, file) = with_config(GATEWAY, "[[port]\n");
    assert_eq!(outcome.code, Some(2));
    assert!(outcome.stderr.contains(&format!("{}:1:", file.display())), "{}", outcome.stderr);
    for binary in [GATEWAY, L2FWD] {
        let outcome = run(&[binary, "--config", "/nonexistent/x.toml"]);
        assert_eq!(outcome.code, Some(2), "{}", outcome.stderr);
        assert!(outcome.stderr.contains("/nonexistent/x.toml"), "{}", outcome.stderr);
        let outcome = run(&[binary, "--confg", "x"]);
        assert_eq!(outcome.code, Some(2), "{}", outcome.stderr);
    }
}

#[test]
fn help_and_version() {
    for binary in [GATEWAY, L2FWD] {
        let help = run(&[binary, "--help"]).expect();
        for option in ["--config", "--seconds", "--json"] {
            assert!(help.contains(option), "{option} in: {help}");
        }
        assert!(run(&[binary, "--version"]).expect().contains(env!("CARGO_PKG_VERSION")));
    }
}

#[test]
fn an_interface_that_is_not_there_is_named() {
    require!(all Requirement::LAB);
    let lab = Lab::new("nodevice");
    let namespace = lab.namespace("here");
    for driver in ["af_packet", "af_xdp", "auto"] {
        let text = format!(
            "[[port]]\nname = \"a\"\ndriver = \"{driver}\"\ndevice = \"nosuch0\"\n[[port]]\nname = \"b\"\ndriver = \
            \"null\"\n\
             [l2fwd]\nmode = \"pairs\"\npairs = [[\"a\", \"b\"]]\n"
        );
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("c.toml");
        std::fs::write(&file, text).unwrap();
        let outcome = namespace.run(&[L2FWD, "--config", file.to_str().unwrap(), "--seconds", "1"]);
        assert_eq!(outcome.code, Some(1), "{driver}: {}", outcome.stderr);
        assert_eq!(outcome.stderr.matches("nosuch0").count(), 1, "{driver}: {}", outcome.stderr);
    }
}

const ONE_VETH: &str = "[[port]]\nname = \"a\"\ndevice = \"a0\"\n[[port]]\nname = \"b\"\ndriver = \"null\"\n";

#[test]
fn auto_names_the_likely_cause_first_on_real_lines() {
    require!(all Requirement::LAB, Requirement::Program("setpriv"));
    let lab = Lab::new("autolines");
    let namespace = lab.namespace("here");
    lab.veth((&namespace, "a0"), (&namespace, "b0"));
    let folder = tempfile::Builder::new().permissions(mode(0o755)).tempdir().unwrap();
    let (binary, config) = (folder.path().join("l2fwd"), folder.path().join("c.toml"));
    copy_program(L2FWD, &binary);
    std::fs::write(&config, ONE_VETH).unwrap();
    std::fs::set_permissions(&config, mode(0o644)).unwrap();
    let (binary, config) = (binary.to_str().unwrap(), config.to_str().unwrap());
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"];
    let outcome = namespace.run(&[&nobody[..], &["--bounding-set=-all", binary, "--config", config]].concat());
    assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
    assert!(!outcome.stderr.contains("\\n"), "no escaped line ends: {}", outcome.stderr);
    let lines: Vec<&str> = outcome.stderr.lines().skip_while(|line| !line.starts_with("error: ")).collect();
    assert_eq!(lines.len(), 4, "{lines:#?}");
    assert!(lines[0].contains("c.toml:3:10: port[0].device: port 'a': no driver can open 'a0':"), "{}", lines[0]);
    // On a virtual cable, af_packet comes first.
    assert!(lines[1].starts_with("  af_packet: a0: ") && lines[1].contains("CAP_NET_RAW"), "{}", lines[1]);
    assert!(lines[2].starts_with("  af_xdp: a0: ") && lines[2].contains("CAP_NET"), "{}", lines[2]);
    assert_eq!(lines[3], "  mlx5, mana: the device is no port of a NIC of this driver");
}

#[test]
fn auto_takes_a_driver_with_enough_queues() {
    require!(all Requirement::LAB);
    let lab = Lab::new("autoqueues");
    let namespace = lab.namespace("here");
    // Where auto tries af_xdp first.
    namespace.ip("tuntap add a0 mode tap");
    namespace.ip("link set a0 up");
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("c.toml");
    let run = |text: &str, more: &[&str]| {
        std::fs::write(&config, text).unwrap();
        let outcome =
            namespace.run(&[&[L2FWD, "--config", config.to_str().unwrap(), "--seconds", "0.1"], more].concat());
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        outcome.stderr
    };
    let log = run(&ONE_VETH.replacen("a0\"", "a0\"\nqueues = 2", 1), &[]);
    assert!(log.contains("auto took af_packet"), "{log}");
    assert!(log.contains("`ethtool -L a0 combined 2`"), "{log}");
    // A virtual interface is no port of a NIC, so the drivers of NICs are worth a line for developers only.
    let log = run(ONE_VETH, &[]);
    assert!(log.contains("auto took af_xdp") && !log.contains("mlx5") && !log.contains("mana"), "{log}");
    let log = run(ONE_VETH, &["--verbose"]);
    assert!(log.contains("DEBUG") && log.contains("auto passed over mlx5"), "{log}");
}

#[test]
fn the_mtu_is_that_of_the_interface() {
    require!(all Requirement::LAB);
    let lab = Lab::new("mtudefault");
    let namespace = lab.namespace("here");
    lab.veth((&namespace, "a0"), (&namespace, "b0"));
    for end in ["a0", "b0"] {
        namespace.ip(&format!("link set dev {end} mtu 3000"));
    }
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("c.toml");
    for driver in ["af_packet", "af_xdp"] {
        for (more, want) in [
            ("", "port a: MTU 3000, that of the device"),
            ("mtu = 1500\n", "port a: MTU 1500, as configured; the device has 3000"),
        ] {
            let text = format!("[[port]]\nname = 'a'\ndevice = 'a0'\ndriver = '{driver}'\n{more}");
            std::fs::write(&config, text).unwrap();
            let outcome = namespace.run(&[L2FWD, "--config", config.to_str().unwrap(), "--seconds", "0.1"]);
            assert!(outcome.code == Some(0) && outcome.stderr.contains(want), "{driver}: {}", outcome.stderr);
        }
    }
}

#[test]
fn a_check_looks_at_the_machine() {
    require!(all Requirement::LAB, Requirement::Program("setpriv"));
    let lab = Lab::new("checkmachine");
    let namespace = lab.namespace("here");
    lab.veth((&namespace, "a0"), (&namespace, "b0"));
    let folder = tempfile::Builder::new().permissions(mode(0o755)).tempdir().unwrap();
    let (binary, config) = (folder.path().join("tunnel-gateway"), folder.path().join("c.toml"));
    copy_program(GATEWAY, &binary);
    let text = "[[port]]\nname = 'wan'\ndriver = 'af_xdp'\ndevice = 'a0'\n\
                [[port]]\nname = 'lan'\ndriver = 'null'\n\
                [underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n\
                [[segment]]\nname = 'blue'\nvni = 42\nremotes = ['10.9.0.2']\nports = [{ port = 'lan' }]\n";
    let write = |text: &str| {
        std::fs::write(&config, text).unwrap();
        std::fs::set_permissions(&config, mode(0o644)).unwrap();
    };
    let check = |text: &str, more: &[&str]| {
        write(text);
        namespace.run(&[&[binary.to_str().unwrap(), "--config", config.to_str().unwrap()], more].concat())
    };
    let outcome = check(text, &["--check"]);
    let want = "configuration is valid; ports: 2, segments: 1, remotes: 1\n\
                port wan: af_xdp on a0, MTU 1500 (that of the device), at most 1 queues\n\
                port lan: null, MTU 1500 (the default; the device has none)\nsegment blue: inner MTU 1450\n";
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(0), want), "{}", outcome.stderr);
    let outcome = check(text, &["--check", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!((&report["inner_mtu"]["blue"], &report["machine"]["ports"][0]["mtu"]), (&1450.into(), &1500.into()));
    // All that the start would refuse is in one answer.
    let wrong = text.replace("a0", "nosuch0") + "[workers]\ncores = [0, 999]\n";
    let outcome = check(&wrong, &["--check"]);
    let lines: Vec<&str> = outcome.stderr.lines().collect();
    assert_eq!((outcome.code, lines.len()), (Some(2), 2), "{lines:#?}");
    assert!(lines[0].contains("c.toml:17:13: workers.cores[1]: core 999 cannot be used"), "{lines:#?}");
    assert!(lines[1].contains("c.toml:4:10: port[0].device: port 'wan': af_xdp: no device 'nosuch0'"), "{lines:#?}");
    let outcome = check(&text.replace("'a0'\n", "'a0'\nmtu = 9000\nqueues = 2\n"), &["--check"]);
    let lines: Vec<&str> = outcome.stderr.lines().collect();
    assert_eq!((outcome.code, lines.len()), (Some(2), 1), "{lines:#?}");
    assert!(lines[0].contains("c.toml:6:10: port[0].queues: port 'wan': "), "{lines:#?}");
    assert!(lines[0].contains("ethtool -L a0 combined 2"), "{lines:#?}");
    let outcome = check(&text.replace("'a0'\n", "'a0'\nmtu = 3000\n"), &["--check"]);
    let want = "c.toml:5:7: port[0].mtu: port 'wan': driver af_xdp supports mtu from 68 to 1500, not 3000; \
                `ip link set dev a0 mtu 3000`";
    assert!(outcome.code == Some(2) && outcome.stderr.contains(want), "{}", outcome.stderr);
    let narrow = text.replace("vni = 42", "vni = 42\nmtu = 1451");
    let outcome = check(&narrow, &["--check"]);
    assert!(outcome.code == Some(2) && outcome.stderr.contains("found 1451, but 1500 bytes"), "{}", outcome.stderr);
    // Without privileges, the start would be refused.
    write(text);
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"];
    let (binary, config) = (binary.to_str().unwrap(), config.to_str().unwrap());
    let outcome =
        namespace.run(&[&nobody[..], &["--bounding-set=-all", binary, "--config", config, "--check"]].concat());
    assert!(outcome.code == Some(1) && outcome.stderr.contains("CAP_NET_RAW"), "{outcome:?}");
    // Nothing was started.
    assert!(!namespace.ip("link show dev a0").contains("xdp"));
}

#[test]
fn addresses_of_the_kernel_are_found_in_every_namespace() {
    require!(Requirement::Root, Requirement::Program("ip"), Requirement::Program("unshare"));
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("gateway.toml");
    let text = "[[port]]\nname = 'wan'\ndriver = 'tap'\ndevice = 't0'\n[[port]]\nname = 'lan'\ndriver = 'null'\n\
                [underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24', 'fd00:9::1/64']\n\
                [[segment]]\nname = 'blue'\nvni = 42\nremotes = ['10.9.0.2']\nports = [{ port = 'lan' }]\n";
    std::fs::write(&config, text).unwrap();
    let check = |before: &str| {
        let script = format!("{before}exec {GATEWAY} --check --config {}", config.display());
        run(&["unshare", "--net", "sh", "-c", &script])
    };
    // A new namespace has no address, and its loopback interface is down.
    for before in ["", "ip link set lo up && ", "ip address add 10.9.0.7/24 dev lo && "] {
        let outcome = check(before);
        assert_eq!(outcome.code, Some(0), "{before}: {}", outcome.stderr);
    }
    for address in ["10.9.0.1/24", "fd00:9::1/64"] {
        // Until duplicate detection (RFC 4862) has run, nobody can bind an address.
        let flag = if address.contains(':') { "nodad" } else { "" };
        let outcome = check(&format!("ip link set lo up && ip address add {address} dev lo {flag} && "));
        assert_eq!(outcome.code, Some(2), "{address}: {}", outcome.stderr);
        assert!(outcome.stderr.contains("is configured in the kernel"), "{}", outcome.stderr);
    }
}

#[test]
fn a_missing_privilege_is_one_line_with_the_remedy() {
    require!(all Requirement::LAB, Requirement::Program("setpriv"));
    let lab = Lab::new("nobody");
    let namespace = lab.namespace("here");
    lab.veth((&namespace, "a0"), (&namespace, "b0"));
    // A copy that every user can reach, wherever the build folder is.
    let folder = tempfile::Builder::new().permissions(mode(0o755)).tempdir().unwrap();
    let binary = folder.path().join("l2fwd");
    copy_program(L2FWD, &binary);
    for driver in ["af_packet", "af_xdp", "auto", "tap", "xdp_live"] {
        let device = if driver == "tap" { "wptap0" } else { "a0" };
        let config = folder.path().join(format!("{driver}.toml"));
        let text = format!(
            "[[port]]\nname = \"a\"\ndriver = \"{driver}\"\ndevice = \"{device}\"\n[[port]]\nname = \"b\"\ndriver = \
            \"null\"\n\
             [l2fwd]\nmode = \"pairs\"\npairs = [[\"a\", \"b\"]]\n"
        );
        std::fs::write(&config, text).unwrap();
        std::fs::set_permissions(&config, mode(0o644)).unwrap();
        let path = |path: &Path| path.to_str().unwrap().to_owned();
        let outcome = namespace.run(&[
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "--inh-caps=-all",
            "--bounding-set=-all",
            &path(&binary),
            "--config",
            &path(&config),
            "--seconds",
            "1",
        ]);
        let stderr = &outcome.stderr;
        assert_eq!(outcome.code, Some(1), "{driver}: {stderr}");
        assert!(stderr.contains("CAP_NET"), "{driver}: names the capability: {stderr}");
        let remedy = format!("`setcap cap_net_raw,cap_net_admin,cap_bpf,cap_ipc_lock+ep {}`", path(&binary));
        assert!(stderr.contains(&remedy), "{driver}: names the remedy: {stderr}");
        assert!(!stderr.contains("panicked"), "{driver}: {stderr}");
    }
}

#[test]
fn doctor_and_the_programs_grant_the_same() {
    require!(Requirement::Program("setpriv"));
    let folder = tempfile::Builder::new().permissions(mode(0o755)).tempdir().unwrap();
    let copy = |name: &str, from: &str| {
        let path = folder.path().join(name);
        copy_program(from, &path);
        path.to_str().unwrap().to_owned()
    };
    let (doctor, l2fwd) = (copy("wirepath", env!("CARGO_BIN_EXE_wirepath")), copy("l2fwd", L2FWD));
    let nobody =
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"];
    let outcome = run(&[&nobody[..], &[&doctor, "doctor"]].concat());
    let line = outcome.stdout.lines().find(|line| line.contains("> setcap")).unwrap_or_else(|| panic!("{outcome:?}"));
    let all = "cap_net_raw,cap_net_admin,cap_bpf,cap_ipc_lock+ep";
    assert!(line.contains(&format!("> setcap {all} {doctor} {all} {l2fwd}")), "{line}");
}

fn mode(mode: u32) -> std::fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(mode)
}

#[test]
fn superframes_may_go_to_every_port() {
    require!(all Requirement::LAB);
    let lab = Lab::new("whole");
    let host = lab.namespace("host");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("whole.toml");
    let tap = "[[port]]\nname = \"lan\"\ndriver = \"tap\"\ndevice = \"tap0\"\n[port.tap]\nsuperframes = \"whole\"\n";
    let others = "[[port]]\nname = \"wan\"\ndriver = \"null\"\n";
    let segment = "[[segment]]\nname = \"a\"\nvni = 1\nremotes = [\"10.9.0.2\"]\nports = [{ port = \"lan\" }]\n";
    for (binary, rest) in [
        (L2FWD, "[l2fwd]\npairs = [[\"lan\", \"wan\"]]\n".to_owned()),
        (L2FWD, "[l2fwd]\nmode = \"bridge\"\n".to_owned()),
        (GATEWAY, format!("{UNDERLAY}{segment}")),
    ] {
        std::fs::write(&file, format!("{tap}{others}{rest}")).unwrap();
        let outcome = host.run(&[binary, "--config", file.to_str().unwrap(), "--seconds", "1"]);
        assert_eq!(outcome.code, Some(0), "{rest}: {}", outcome.stderr);
    }
}

const L2FWD_PAIR: &str = "[[port]]\nname = 'b'\ndriver = 'null'\n";
const GATEWAY_REST: &str = "[[port]]\nname = 'lan'\ndriver = 'null'\n[underlay]\nport = 'wan'\n\
                            addresses = ['10.9.0.1/24']\n[[segment]]\nname = 'blue'\nvni = 42\n\
                            remotes = ['10.9.0.2']\nports = [{ port = 'lan' }]\n";

/// A configuration that this machine cannot start, and the exit code.
struct Refusal {
    name: &'static str,
    binary: &'static str,
    text: String,
    code: i32,
}

/// Returns configurations that a machine with the interfaces a0 (MTU 1500) and r0 (default route) refuses. `folder` is
/// an empty folder.
fn refusals(folder: &str) -> Vec<Refusal> {
    let l2fwd = |name, code, first: &str, rest: &str| Refusal {
        name,
        binary: L2FWD,
        text: format!("[[port]]\nname = 'a'\n{first}\n{L2FWD_PAIR}{rest}"),
        code,
    };
    let gateway = |name, code, first: &str, rest: &str| Refusal {
        name,
        binary: GATEWAY,
        text: format!("[[port]]\nname = 'wan'\n{first}\n{rest}"),
        code,
    };
    let pcap = |keys: &str| format!("driver = 'pcap'\n[port.pcap]\n{keys}");
    let generic = "driver = 'af_xdp'\ndevice = 'a0'\n[port.af_xdp]\nmode = 'generic'";
    let null = "driver = 'null'";
    let shared = GATEWAY_REST.replace("port = 'wan'\n", "port = 'wan'\ncontrol = 'kernel'\n");
    vec![
        l2fwd("no interface, af_packet", 1, "driver = 'af_packet'\ndevice = 'nosuch0'", ""),
        l2fwd("no interface, af_xdp", 1, "driver = 'af_xdp'\ndevice = 'nosuch0'", ""),
        l2fwd("no interface, auto", 1, "device = 'nosuch0'", ""),
        l2fwd("MTU, af_packet", 2, "driver = 'af_packet'\ndevice = 'a0'\nmtu = 3000", ""),
        l2fwd("MTU, af_xdp", 2, "driver = 'af_xdp'\ndevice = 'a0'\nmtu = 3000", ""),
        l2fwd("queues, af_packet", 2, "driver = 'af_packet'\ndevice = 'a0'\nqueues = 65", ""),
        l2fwd("queues, af_xdp", 2, "driver = 'af_xdp'\ndevice = 'a0'\nqueues = 2", ""),
        l2fwd("queues, tap", 2, "driver = 'tap'\ndevice = 'wpchk0'\nqueues = 65", ""),
        l2fwd("queues, pcap", 2, &pcap("write = '/dev/null'\nformat = 'pcap'").replacen('\n', "\nqueues = 9\n", 1), ""),
        l2fwd("no capture", 1, &pcap(&format!("read = '{folder}/none.pcap'")), ""),
        l2fwd("no folder of a capture", 1, &pcap(&format!("write = '{folder}/none/a.pcap'")), ""),
        l2fwd("a capture that is a folder", 1, &pcap(&format!("write = '{folder}'\nformat = 'pcap'")), ""),
        l2fwd("not a TAP interface", 1, "driver = 'tap'\ndevice = 'a0'", ""),
        l2fwd("IPv6 is off", 1, "driver = 'tap'\ndevice = 'wpchk0'\n[port.tap]\naddress = ['fd00::1/64']", ""),
        l2fwd("default route", 1, "device = 'r0'", ""),
        l2fwd("core", 2, null, "[workers]\ncores = [0, 999]\n"),
        Refusal {
            text: format!("[[port]]\nname = 'a'\n{null}\n[workers]\ncores = [0, 1]\n"),
            ..l2fwd("idle", 2, "", "")
        },
        l2fwd("huge pages", 1, null, "[pool]\nbuffers = 16777215\nhuge_pages = 'require'\n"),
        l2fwd(
            "cable",
            1,
            "driver = 'memory'\ndevice = 'x'",
            &["p", "q"].map(|name| format!("[[port]]\nname = '{name}'\ndriver = 'memory'\ndevice = 'x'\n")).concat(),
        ),
        l2fwd("socket in no folder", 1, null, &format!("[control]\nsocket = '{folder}/none/s'\n")),
        l2fwd("socket that is a file", 1, null, &format!("[control]\nsocket = '{folder}/file'\n")),
        l2fwd("socket in use", 2, null, &format!("[control]\nsocket = '{folder}/used'\n")),
        l2fwd(
            "kernel, exclusive",
            2,
            "driver = 'af_packet'\ndevice = 'a0'",
            "[[rule]]\nrule = 'ingress: ipv4 => kernel'\n",
        ),
        l2fwd(
            "kernel, after auto passed over af_xdp",
            2,
            "device = 'a0'\nqueues = 2",
            "[[rule]]\nrule = 'ingress: port id a / ipv4 => kernel'\n",
        ),
        l2fwd("lost tags, rule", 2, generic, "[[rule]]\nrule = 'ingress: vlan vid 5 => drop'\n"),
        gateway("lost tags, underlay", 2, generic, &GATEWAY_REST.replace("port = 'wan'\n", "port = 'wan'\nvlan = 7\n")),
        gateway(
            "lost tags, segment",
            2,
            null,
            &GATEWAY_REST.replace(null, generic).replace("'lan' }", "'lan', vlan = 7 }"),
        ),
        gateway(
            "address of the kernel",
            2,
            "driver = 'af_packet'\ndevice = 'a0'",
            &GATEWAY_REST.replace("10.9.0.1", "10.8.0.1"),
        ),
        gateway("address that the kernel lacks", 2, "driver = 'af_packet'\ndevice = 'a0'", &shared),
        gateway("driver that does not share with the kernel", 1, null, &shared),
        gateway(
            "shared and not exclusive",
            1,
            "driver = 'af_packet'\ndevice = 'a0'\n[port.af_packet]\nexclusive = false",
            &shared.replace("10.9.0.1", "10.8.0.1"),
        ),
        gateway(
            "inner MTU",
            2,
            "driver = 'af_packet'\ndevice = 'a0'",
            &GATEWAY_REST.replace("vni = 42", "vni = 42\nmtu = 1451"),
        ),
    ]
}

#[test]
fn a_check_refuses_what_the_start_refuses() {
    require!(all Requirement::LAB, Requirement::Program("setpriv"), Requirement::File("/dev/net/tun"));
    let lab = Lab::new("checkstart");
    let host = lab.namespace("here");
    lab.veth((&host, "a0"), (&host, "b0"));
    lab.veth((&host, "r0"), (&host, "s0"));
    host.ip("addr add 10.8.0.1/24 dev a0");
    host.ip("addr add 10.7.0.1/24 dev r0");
    host.ip("route add default via 10.7.0.2 dev r0");
    host.sysctl("net.ipv6.conf.default.disable_ipv6", "1");
    let folder = tempfile::Builder::new().permissions(mode(0o755)).tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("file"), "").unwrap();
    let used = std::os::unix::net::UnixListener::bind(path("used")).unwrap();
    let config = path("c.toml");
    let cores = std::thread::available_parallelism().unwrap().get();
    let state = || (host.ip("-o -d address"), std::fs::read_dir(folder.path()).unwrap().count());
    // The first line of the errors and the exit code.
    let refusal = |arguments: &[&str]| {
        let outcome = host.run(arguments);
        let first = outcome.stderr.lines().find(|line| line.starts_with("error: ")).map(str::to_owned);
        (outcome.code, first.unwrap_or(outcome.stderr))
    };
    for Refusal { name, binary, text, code } in refusals(folder.path().to_str().unwrap()) {
        if name == "idle" && cores < 2 {
            continue;
        }
        std::fs::write(&config, &text).unwrap();
        let before = state();
        let check = refusal(&[binary, "--config", &config, "--check"]);
        assert_eq!(state(), before, "{name}: the check changes nothing");
        let start = refusal(&[binary, "--config", &config, "--seconds", "0.2"]);
        assert_eq!(start.0, Some(code), "{name}: {}", start.1);
        assert_eq!(check, start, "{name}");
    }
    // Users without capabilities, and with some of them.
    let (binary, tap) = (path("l2fwd"), "driver = 'tap'\ndevice = 'wpchk0'");
    copy_program(L2FWD, &binary);
    let user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let none = ["--inh-caps=-all", "--bounding-set=-all"];
    let raw = ["--inh-caps=-all,+net_raw", "--ambient-caps=-all,+net_raw"];
    let packet = "driver = 'af_packet'\ndevice = 'a0'";
    for (port, capabilities, needs) in [
        (packet, none, "CAP_NET_RAW"),
        ("driver = 'af_xdp'\ndevice = 'a0'", none, "CAP_NET_RAW"),
        ("device = 'a0'", none, "CAP_NET_RAW"),
        (tap, none, "CAP_NET_ADMIN"),
        (packet, raw, "CAP_BPF and CAP_NET_ADMIN"),
        ("driver = 'af_xdp'\ndevice = 'a0'", raw, "CAP_BPF"),
        (tap, raw, "CAP_NET_ADMIN"),
    ] {
        std::fs::write(&config, format!("[[port]]\nname = 'a'\n{port}\n{L2FWD_PAIR}")).unwrap();
        let run = |more: &[&str]| {
            let program = [&user[..], &capabilities, &[&binary, "--config", &config], more].concat();
            let outcome = host.run(&program);
            let lines = outcome.stderr.lines().skip_while(|line| !line.starts_with("error: "));
            (outcome.code, lines.collect::<Vec<_>>().join("\n"))
        };
        let start = run(&["--seconds", "0.2"]);
        assert!(start.0 == Some(1) && start.1.contains(needs), "{port}: {start:?}");
        assert_eq!(run(&["--check"]), start, "{port}");
    }
    // What can be started is accepted, and is not there afterwards.
    let good = format!(
        "[[port]]\nname = 'a'\n{tap}\n[[port]]\nname = 'b'\ndriver = 'pcap'\n[port.pcap]\nwrite = '{}'\n\
                        [control]\nsocket = '{}'\n",
        path("new.pcap"),
        path("new.sock")
    );
    std::fs::write(&config, good).unwrap();
    let before = state();
    let outcome = host.run(&[L2FWD, "--config", &config, "--check"]);
    assert_eq!((outcome.code, state()), (Some(0), before), "{}", outcome.stderr);
    assert_eq!(host.run(&[L2FWD, "--config", &config, "--seconds", "0.2"]).code, Some(0));
    drop(used);
}

#[test]
fn more_ports_than_a_program_may_have() {
    let ports =
        |n: usize| -> String { (0..n).map(|i| format!("[[port]]\nname = 'p{i}'\ndriver = 'null'\n")).collect() };
    let bridge = |n| ports(n) + "[l2fwd]\nmode = 'bridge'\n";
    refused(L2FWD, &bridge(1025), "3073:1", "port[1024]", &["1025 ports, expected at most 1024"]);
    let (outcome, _) = with_config(L2FWD, &bridge(1025));
    assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("c.toml");
    std::fs::write(&file, bridge(1024)).unwrap();
    let outcome = run(&[L2FWD, "--config", file.to_str().unwrap(), "--check"]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
}
