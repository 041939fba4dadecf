//! Configurations and machines that the programs reject: one message with the position and the remedy, exit
//! code 2 for an invalid configuration and 1 for a failure of the machine. Nothing is started.

use std::path::{Path, PathBuf};

use wirepath_testlab::{Lab, Outcome, Requirement, require, run};

const GATEWAY: &str = env!("CARGO_BIN_EXE_tunnel-gateway");
const L2FWD: &str = env!("CARGO_BIN_EXE_l2fwd");

const PORTS: &str = "[[port]]\nname = \"lan\"\ndriver = \"null\"\n\n[[port]]\nname = \"wan\"\ndriver = \"null\"\n\n";
const UNDERLAY: &str = "[underlay]\nport = \"wan\"\naddresses = [\"10.9.0.1/24\"]\n\n";

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
    std::fs::copy(L2FWD, &binary).unwrap();
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
    assert!(lines[1].starts_with("  af_xdp: a0: ") && lines[1].contains("CAP_NET"), "{}", lines[1]);
    assert!(lines[2].starts_with("  af_packet: a0: ") && lines[2].contains("CAP_NET_RAW"), "{}", lines[2]);
    assert_eq!(lines[3], "  mlx5, mana: the device is no port of a NIC of this driver");
}

#[test]
fn auto_takes_a_driver_with_enough_queues() {
    require!(all Requirement::LAB);
    let lab = Lab::new("autoqueues");
    let namespace = lab.namespace("here");
    lab.veth((&namespace, "a0"), (&namespace, "b0"));
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("c.toml");
    let run = |text: &str, more: &[&str]| {
        std::fs::write(&config, text).unwrap();
        let outcome = namespace.run(&[&[L2FWD, "--config", config.to_str().unwrap(), "--seconds", "0.1"], more].concat());
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
fn a_missing_privilege_is_one_line_with_the_remedy() {
    require!(all Requirement::LAB, Requirement::Program("setpriv"));
    let lab = Lab::new("nobody");
    let namespace = lab.namespace("here");
    lab.veth((&namespace, "a0"), (&namespace, "b0"));
    // A copy that every user can reach, wherever the build folder is.
    let folder = tempfile::Builder::new().permissions(mode(0o755)).tempdir().unwrap();
    let binary = folder.path().join("l2fwd");
    std::fs::copy(L2FWD, &binary).unwrap();
    for driver in ["af_packet", "af_xdp", "auto", "tap"] {
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
        assert!(
            stderr.contains("setcap") || stderr.contains("sudo") || stderr.contains("root"),
            "{driver}: names the remedy: {stderr}"
        );
        assert!(!stderr.contains("panicked"), "{driver}: {stderr}");
    }
}

fn mode(mode: u32) -> std::fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(mode)
}
