//! The program `wirepath` from the command line.

use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use wirepath_nic_emulator::launch;
use wirepath_pmd::ipc::AttachedPort;
use wirepath_testlab::{Requirement, eventually, require};

fn wirepath(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_wirepath")).args(arguments).output().unwrap()
}

fn json(arguments: &[&str]) -> (Option<i32>, Value) {
    let output = wirepath(arguments);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 1, "one object on one line");
    (output.status.code(), serde_json::from_str(&text).unwrap())
}

#[test]
fn devices_of_every_driver_are_listed() {
    let (code, report) = json(&["devices", "--json"]);
    assert_eq!(code, Some(0));
    let devices = report["devices"].as_array().unwrap();
    for driver in ["memory", "pcap"] {
        let offer = devices.iter().find(|offer| offer["driver"] == driver).unwrap();
        assert_eq!(offer["usable"], true, "needs no privilege");
    }
    for offer in devices {
        let text = if offer["usable"] == true { &offer["mode"] } else { &offer["reason"] };
        assert!(text.as_str().is_some_and(|text| !text.is_empty()), "{offer}");
    }
    assert!(report["drivers"].as_array().unwrap().iter().any(|driver| driver["driver"] == "auto"));
    // The report contains the encapsulation by RDMA queue pairs, or one line with the reason why there is
    // none.
    let encapsulation = report["encapsulation"].as_object().unwrap();
    let no = encapsulation.get("no").and_then(Value::as_str);
    let can = encapsulation.get("by-queue-pair").is_some_and(|can| can["max_header"] == 32);
    assert!(can || no.is_some_and(|why| why.contains("is not installed")), "{encapsulation:?}");

    let output = wirepath(&["devices"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("DEVICE") && text.contains("af_packet"), "{text}");
}

#[test]
fn doctor_exits_with_1_if_a_check_fails() {
    let (code, report) = json(&["doctor", "--json"]);
    let findings = report["findings"].as_array().unwrap();
    let failed = findings.iter().filter(|finding| finding["level"] == "FAIL").count();
    assert_eq!((code, &report["ok"]), (Some(i32::from(failed > 0)), &Value::Bool(failed == 0)));
    for finding in findings.iter().filter(|finding| finding["level"] != "OK") {
        assert!(finding["remedy"].as_str().is_some_and(|remedy| !remedy.is_empty()), "{finding}");
    }
    let output = wirepath(&["doctor"]);
    assert_eq!(output.status.code(), code);
    let lines = String::from_utf8(output.stdout).unwrap();
    assert_eq!(lines.lines().filter(|line| !line.trim_start().starts_with('>')).count(), findings.len(), "{lines}");
}

#[test]
fn rdma_nics_are_listed_with_mode_or_reason() {
    require!(Requirement::File("/etc/libibverbs.d/mana.driver"));
    let nic = "[[device]]\nkind = 'mana'\n[[device.port]]\nnetdev = 'eth7'\n";
    let held = format!("{nic}[[fault]]\nkind = 'port-held'\n");
    for (topology, usable) in [(nic, true), (&held, false)] {
        let nics = launch::prepare(topology);
        let run = |command: &str| {
            let output = nics.command(env!("CARGO_BIN_EXE_wirepath")).args([command, "--json"]).output().unwrap();
            serde_json::from_slice::<Value>(&output.stdout).unwrap()
        };
        let devices = run("devices");
        let offers = devices["devices"].as_array().unwrap();
        let offer = offers.iter().find(|offer| offer["driver"] == "mana" && offer["device"] == "eth7").unwrap();
        assert_eq!(offer["usable"], usable, "{offer}");
        let doctor = run("doctor");
        let find =
            |name: &str| doctor["findings"].as_array().unwrap().iter().find(|f| f["check"] == name).unwrap().clone();
        assert!(find("RDMA libraries")["found"].as_str().unwrap().contains("libmana"));
        let finding = find("RDMA devices");
        if usable {
            let mode = offer["mode"].as_str().unwrap();
            assert!(mode.contains("checksums") && mode.contains("no flow rules in the device"), "{mode}");
            assert_eq!((&finding["level"], &finding["found"]), (&Value::from("OK"), &Value::from("mana0")));
        } else {
            assert!(offer["reason"].as_str().unwrap().contains("eth7 holds the port"), "{offer}");
            assert_eq!(
                (&finding["level"], &finding["remedy"]),
                (&Value::from("WARN"), &Value::from("ip link set dev eth7 down"))
            );
        }
    }
}

#[test]
fn a_connectx_lists_what_it_segments() {
    require!(Requirement::File("/etc/libibverbs.d/mlx5.driver"));
    for (keys, plain, in_tunnels) in [
        ("", true, true),
        ("tunnels = false", true, true),
        ("tunnels = false\nsw_parser = false", true, false),
        ("max_tso = 0", false, false),
    ] {
        let topology = format!("[[device]]\nkind = 'mlx5'\n{keys}\n[[device.port]]\nnetdev = 'eth7'\n");
        let output =
            launch::prepare(&topology).command(env!("CARGO_BIN_EXE_wirepath")).args(["devices", "--json"]).output();
        let devices: Value = serde_json::from_slice(&output.unwrap().stdout).unwrap();
        let mut offers = devices["devices"].as_array().unwrap().iter();
        let offer = offers.find(|offer| offer["driver"] == "mlx5" && offer["device"] == "eth7").unwrap();
        let words: Vec<_> = offer["mode"].as_str().unwrap().split([',', ';']).map(str::trim).collect();
        let has = |word| words.contains(&word);
        assert_eq!((has("segmentation"), has("segmentation in tunnels")), (plain, in_tunnels), "{keys}: {words:?}");
    }
}

#[test]
fn connectx_is_listed_by_both_drivers() {
    require!(Requirement::File("/etc/libibverbs.d/mlx5.driver"));
    let nic = "[[device]]\nkind = 'mlx5'\n[[device.port]]\nnetdev = 'eth7'\n";
    for (fault, level, remedy) in
        [("", "OK", Value::Null), ("[[fault]]\nkind = 'port-down'\n", "WARN", Value::from("ip link set dev eth7 up"))]
    {
        let nics = launch::prepare(&format!("{nic}{fault}"));
        let run = |command: &str| {
            let output = nics.command(env!("CARGO_BIN_EXE_wirepath")).args([command, "--json"]).output().unwrap();
            serde_json::from_slice::<Value>(&output.stdout).unwrap()
        };
        let devices = run("devices");
        let offers: Vec<_> = devices["devices"].as_array().unwrap().iter().filter(|o| o["device"] == "eth7").collect();
        let mode = |driver: &str| {
            let offer = offers.iter().find(|offer| offer["driver"] == driver).unwrap();
            offer["mode"].as_str().unwrap_or_else(|| panic!("{offer}")).to_owned()
        };
        assert!(mode("mlx5").contains("multi-packet send"), "{offers:?}");
        let info = &offers[0]["info"];
        assert!(
            info["mac"].is_string() && info["mtu"] == 9000 && info["speed"] == 100_000 && info["pci"] == "0000:00:10.0",
            "{info}"
        );
        let rules = |driver: &str| {
            let offer = offers.iter().find(|offer| offer["driver"] == driver).unwrap();
            (offer["rules"]["backend"].clone(), offer["no_rules"].clone())
        };
        assert_eq!(rules("mlx5"), (Value::from("dv"), Value::Null), "{offers:?}");
        assert_eq!(rules("verbs"), (Value::from("ibv"), Value::Null), "{offers:?}");
        assert!(mode("verbs").contains("plain verbs, transmit checksums by the device"), "{offers:?}");
        let doctor = run("doctor");
        let finding = doctor["findings"].as_array().unwrap().iter().find(|f| f["check"] == "RDMA devices").unwrap();
        assert_eq!((&finding["level"], &finding["remedy"]), (&Value::from(level), &remedy), "{finding}");
    }
}

#[test]
fn rule_capabilities_are_the_same_with_auto() {
    require!(Requirement::File("/etc/libibverbs.d/mlx5.driver"));
    let nics = launch::prepare("[[device]]\nkind = 'mlx5'\n[[device.port]]\nnetdev = 'eth7'\n");
    let run = |arguments: &[&str]| nics.command(env!("CARGO_BIN_EXE_wirepath")).args(arguments).output().unwrap();
    let reports: Vec<Value> = ["mlx5:eth7", "auto:eth7"]
        .map(|device| serde_json::from_slice(&run(&["devices", "--rules", device]).stdout).unwrap())
        .into();
    assert!(reports[0]["driver"] == "mlx5" && reports[0] == reports[1], "{reports:?}");
    // A device without rule hardware is not opened.
    let none = run(&["devices", "--rules", "af_xdp:lo"]);
    let text = String::from_utf8_lossy(&none.stderr).into_owned();
    assert!(none.status.code() == Some(1) && text.contains("af_xdp:lo has no hardware for flow rules"), "{text}");

    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("l2fwd.toml");
    let backend = std::cell::Cell::new("auto");
    let explain = |rules: &str, more: &[&str]| {
        let port = |name: &str, driver: &str| {
            format!("[[port]]\nname = \"{name}\"\ndriver = \"{driver}\"\ndevice = \"{name}\"\n")
        };
        let ports =
            port("eth7", "mlx5") + &format!("[port.mlx5]\nrules = \"{}\"\n", backend.get()) + &port("eth8", "auto");
        let rule = "[[rule]]\nrule = \"ingress: port id eth7 / udp dst 53 => mark 7\"\n";
        std::fs::write(&config, ports + rule + rules).unwrap();
        let output = run(&[&["flow", "explain", config.to_str().unwrap(), "--json"], more].concat());
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let row = &report["rules"][0]["ports"][0];
        (row["where"].as_str().unwrap().to_owned(), row["why"].as_str().unwrap().to_owned())
    };
    let (location, why) = explain("", &[]);
    assert!(location == "software" && why.contains("--port and --capabilities show which"), "{location}: {why}");
    assert_eq!(explain("", &["--port", "mlx5:eth7"]).0, "hardware");
    // The port's own settings are used.
    backend.set("ibv");
    let (location, why) = explain("", &["--port", "mlx5:eth7"]);
    assert!(location == "software" && why.contains("(ibv_create_flow)"), "{location}: {why}");
    let (location, why) = explain("[rules]\nhardware = \"off\"\n", &["--port", "mlx5:eth7"]);
    assert!(location == "software" && why.contains("hardware = \"off\""), "{location}: {why}");
}

/// Each part of a tunnel has its place, or the reason why no NIC does it.
#[test]
fn tunnels_and_routes_are_explained() {
    require!(Requirement::File("/etc/libibverbs.d/mlx5.driver"));
    let nics = launch::prepare("[[device]]\nkind = 'mlx5'\n[[device.port]]\nnetdev = 'eth7'\n");
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("gateway.toml");
    let mut text = "[[port]]\nname = 'wan'\ndriver = 'mlx5'\ndevice = 'eth7'\n[[port]]\nname = 'lan'\n\
                    driver = 'null'\n\
                    [underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24', 'fd00:9::1/64']\n"
        .to_owned();
    let routed = "addresses = ['10.NET.0.1/30']";
    // Keys of the segment, number of rules of each direction, and words of the reasons for workers.
    let segments: [(&str, usize, [Option<&str>; 2]); 12] = [
        ("kind = 'vxlan'\nvni = 1\nremotes = ['10.9.0.2']", 1, [None, None]),
        ("kind = 'vxlan'\nvni = 2\nremotes = ['fd00:9::2']", 1, [Some("RFC 8200"), Some("outer UDP checksum")]),
        ("kind = 'geneve'\nvni = 1\nremotes = ['10.9.0.2']", 1, [None, None]),
        ("kind = 'geneve'\nvni = 2\npayload = 'ip'\nremotes = ['10.9.0.2']\nROUTED", 2, [None, None]),
        ("kind = 'gretap'\nremotes = ['10.9.0.2']", 1, [None, None]),
        ("kind = 'gretap'\nvni = 5\nremotes = ['10.9.0.3']", 1, [None, Some("entropy into the key")]),
        ("kind = 'gretap'\nremotes = ['fd00:9::2']", 1, [None, Some("flow label")]),
        ("kind = 'gretap'\ngre = { sequence = true }\nremotes = ['10.9.0.4']", 1, [None, Some("sequence numbers")]),
        ("kind = 'gre'\nremotes = ['10.9.0.5']\nROUTED", 2, [None, None]),
        ("kind = 'gre'\nvni = 5\nremotes = ['10.9.0.5']\nROUTED", 2, [None, Some("entropy into the key")]),
        ("kind = 'ipip'\nremotes = ['10.9.0.5']\nROUTED", 2, [None, None]),
        ("kind = 'ipip'\nremotes = ['fd00:9::5']\nROUTED", 2, [None, Some("flow label")]),
    ];
    for (n, (keys, ..)) in segments.iter().enumerate() {
        let network = routed.replace("NET", &(100 + n).to_string());
        let ports = format!("ports = [{{ port = 'lan', vlan = {} }}]", n + 1);
        let keys = if keys.contains("ROUTED") { keys.replace("ROUTED", &network) } else { format!("{keys}\n{ports}") };
        text += &format!("[[segment]]\nname = 's{n}'\n{keys}\n");
    }
    text += "[[vrf]]\nname = 'default'\nroutes = [{ to = '10.2.0.0/16', next_hops = [{ segment = 's8' }] }]\n";
    let explain = |text: &str, form: &[&str]| {
        std::fs::write(&config, text).unwrap();
        let arguments = [&["flow", "explain", config.to_str().unwrap(), "--port", "mlx5:eth7"], form].concat();
        let output = nics.command(env!("CARGO_BIN_EXE_wirepath")).args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let report: Value = serde_json::from_str(&explain(&text, &["--json"])).unwrap();
    let parts = report["gateway"].as_array().unwrap();
    for (n, (keys, rules, reasons)) in segments.iter().enumerate() {
        for (direction, reason) in ["ingress", "egress"].iter().zip(reasons) {
            let name = format!("s{n}");
            let found: Vec<&Value> =
                parts.iter().filter(|it| it["segment"] == *name && it["direction"] == *direction).collect();
            let places: Vec<&Value> = found.iter().map(|it| &it["where"]).collect();
            match reason {
                None => assert_eq!(places, vec!["hardware"; *rules], "{keys}: {found:?}"),
                Some(reason) => {
                    let why = found[0]["why"].as_str().unwrap();
                    assert!(places.iter().all(|place| **place == "software") && why.contains(reason), "{keys}: {why}");
                }
            }
        }
    }
    let route = &report["routes"][0];
    assert_eq!(
        (&route["vrf"], &route["to"], &route["where"]),
        (&"default".into(), &"10.2.0.0/16".into(), &"software".into())
    );
    let shown = explain(&text, &[]);
    let part = "segment s6 to fd00:9::2, number 7\n    software: encap: the NIC does not write the flow label";
    assert!(shown.contains(part) && shown.contains("vrf default 10.2.0.0/16"), "{shown}");
    // A rule that may match tunnel packets as they leave has the workers encapsulate.
    let watched = text + "[[rule]]\nrule = \"egress: port id wan / udp => count\"\n";
    let report: Value = serde_json::from_str(&explain(&watched, &["--json"])).unwrap();
    let part = &report["gateway"][1];
    assert!(part["where"] == "software" && part["why"].as_str().unwrap().contains("an egress rule"), "{part}");
}

#[test]
fn an_interrupted_process_detaches() {
    require!(Requirement::File("/etc/libibverbs.d/mlx5.driver"));
    let nics = launch::prepare("[[device]]\nkind = 'mlx5'\n[[device.port]]\nnetdev = 'eth7'\n");
    let folder = tempfile::tempdir().unwrap();
    let (config, socket) = (folder.path().join("l2fwd.toml"), folder.path().join("port.sock"));
    let text = format!(
        "[[port]]\nname = 'a'\ndriver = 'mlx5'\ndevice = 'eth7'\n[port.mlx5]\nattach = '{}'\nattach_rx_queues = 1\n\
         [[port]]\nname = 'b'\ndriver = 'null'\n[pool]\nshared = true\n",
        socket.display()
    );
    std::fs::write(&config, text).unwrap();
    let program = |name: &str, arguments: &[&str]| {
        let mut command = nics.command(name);
        command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let l2fwd = program(env!("CARGO_BIN_EXE_l2fwd"), &["--config", config.to_str().unwrap(), "--json"]);
    let limit = std::time::Duration::from_secs(60);
    assert!(eventually(limit, || socket.exists()));
    let path = socket.to_str().unwrap();
    // The time limit is never reached.
    let attached =
        program(env!("CARGO_BIN_EXE_wirepath"), &["attach", path, "--json", "--receive", &u64::MAX.to_string()]);
    let status = || AttachedPort::query(&socket).unwrap();
    assert!(eventually(limit, || status().attached == 1));
    let interrupt = |child: std::process::Child| {
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    assert_eq!(interrupt(attached)["done"]["received"], 0);
    assert_eq!((status().attached_ever, status().lost), (1, 0), "it has reports that it goes");
    let counters = &interrupt(l2fwd)["ports"][0]["device_counters"];
    assert_eq!(counters["attachments_lost"], 0, "{counters}");
}

#[test]
fn bad_usage_exits_with_2_and_help_has_examples() {
    assert_eq!(wirepath(&["devcies"]).status.code(), Some(2));
    assert_eq!(wirepath(&[]).status.code(), Some(2));
    assert_eq!(wirepath(&["doctor", "--jsn"]).status.code(), Some(2));
    let help = wirepath(&["--help"]);
    assert_eq!(help.status.code(), Some(0));
    let text = String::from_utf8(help.stdout).unwrap();
    assert!(["devices", "doctor", "Examples:", "Exit code:"].iter().all(|word| text.contains(word)), "{text}");
    let version = String::from_utf8(wirepath(&["--version"]).stdout).unwrap();
    assert_eq!(version.trim(), concat!("wirepath ", env!("CARGO_PKG_VERSION")));
}

/// Writes a topology to a new folder and prepares the command, with the preload library built for this
/// profile.
fn emulated(topology: &str) -> (tempfile::TempDir, Command) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("nics.toml"), topology).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_wirepath"));
    command.args(["emulate", "--topology", "nics.toml"]).current_dir(&folder);
    command.env(wirepath_nic_emulator::launch::PRELOAD, wirepath_nic_emulator::launch::build_library());
    (folder, command)
}

#[test]
fn any_program_runs_on_emulated_nics() {
    require!(Requirement::Program("ibv_devinfo"), Requirement::File("/etc/libibverbs.d/mana.driver"));
    let (_folder, mut command) = emulated("[[device]]\nkind = 'mana'\nname = 'nic_of_paper'\n[[device.port]]\n");
    let output = command.args(["--", "ibv_devinfo", "-d", "nic_of_paper"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("hca_id:\tnic_of_paper"), "{output:?}");
}

#[test]
fn auto_finds_ports_without_an_interface_and_by_number() {
    require!(Requirement::File("/etc/libibverbs.d/mana.driver"));
    let (folder, mut command) = emulated(
        "[[device]]\nkind = 'mana'\n[[device.port]]\nnetdev = 'paper0'\nlink = 'loop'\n[[device.port]]\nlink = \
        'loop'\n",
    );
    let port = |name: &str, device: &str| format!("[[port]]\nname = \"{name}\"\ndevice = \"{device}\"\n");
    std::fs::write(folder.path().join("c.toml"), port("a", "paper0") + &port("b", "mana0/2")).unwrap();
    let output = command.args(["--", env!("CARGO_BIN_EXE_l2fwd"), "--config", "c.toml", "--seconds", "0.2"]).output();
    let output = output.unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && text.matches("auto took mana").count() == 2, "{text}");
}

/// Every completion of a received packet is corrupt. The program goes on with the other port and names this one.
#[test]
fn a_port_that_only_resets_fails_the_program() {
    require!(Requirement::File("/etc/libibverbs.d/mlx5.driver"));
    let (folder, _) = emulated(
        "[[device]]\nkind = 'mlx5'\nname = 'mlx50'\n[[device.port]]\nlink = 'generator'\n\
         [[fault]]\nkind = 'hostile'\nqueue = 'rx'\nwhat = 'length'\ncount = 1000000000\n",
    );
    let config = "[[port]]\nname = 'a'\ndriver = 'mlx5'\ndevice = 'mlx50'\n[[port]]\nname = 'b'\ndriver = 'null'\n";
    std::fs::write(folder.path().join("c.toml"), config).unwrap();
    // A slow machine gets more time.
    let ran = ["2", "8", "30"].into_iter().find_map(|seconds| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_wirepath"));
        command.args(["emulate", "--topology", "nics.toml", "--", env!("CARGO_BIN_EXE_l2fwd"), "--config", "c.toml"]);
        command.args(["--json", "--seconds", seconds]).current_dir(&folder);
        let output = command.env(launch::PRELOAD, launch::build_library()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let summary: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {text}"));
        let failed = !summary["failures"].as_array().expect("a list").is_empty();
        failed.then_some((output.status.code(), summary, text))
    });
    let (code, summary, text) = ran.expect("a failure");
    let failure = summary["failures"][0].as_str().expect("a sentence");
    assert!(failure.starts_with("port a failed: mlx5 port mlx50: receive queue 0 was reset "), "{failure}");
    assert_eq!(code, Some(1), "{text}");
    // The resets before are logged a few times only.
    assert!((1..=8).contains(&text.matches(" is reset: ").count()), "{text}");
}

#[test]
fn the_exit_code_of_the_program_is_returned() {
    let nic = "[[device]]\nkind = 'mana'\n[[device.port]]\n";
    let (_folder, mut command) = emulated(nic);
    assert_eq!(command.args(["--", "sh", "-c", "exit 7"]).status().unwrap().code(), Some(7));
    let (_folder, mut command) = emulated(nic);
    assert_eq!(command.args(["--", "sh", "-c", "kill -9 $$"]).status().unwrap().code(), Some(128 + 9));
    let (_folder, mut command) = emulated(nic);
    let output = command.args(["--", "no-such-program"]).output().unwrap();
    assert!(output.status.code() == Some(127) && String::from_utf8_lossy(&output.stderr).contains("no-such-program"));
    let (_folder, mut command) = emulated(&format!("control = 'no/such/folder/socket'\n{nic}"));
    let output = command.args(["--", "true"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && text.contains("control = \"no/such/folder/socket\""), "{text}");
    let (_folder, mut command) = emulated("[[device]]\nkind = 'mana'\n[[device.prot]]\n");
    let output = command.args(["--", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("nics.toml:3") && text.contains("did you mean \"port\"?"), "{text}");
}

/// Reads counters of a running program and injects faults.
#[test]
fn commands_reach_a_running_program() {
    require!(Requirement::Program("ibv_asyncwatch"), Requirement::File("/etc/libibverbs.d/mana.driver"));
    let nic = "control = 'nic.sock'\n[[device]]\nkind = 'mana'\n[[device.port]]\n";
    let (folder, mut command) = emulated(nic);
    let output = folder.path().join("out");
    let program = ["--", "stdbuf", "-oL", "ibv_asyncwatch", "-d", "mana0"];
    let mut child = command.args(program).stdout(std::fs::File::create(&output).unwrap()).spawn().unwrap();
    let limit = std::time::Duration::from_secs(60);
    let ask = |request: &str| {
        let (_other, mut command) = emulated(nic);
        command.current_dir(&folder).args(["--command", request]).output().unwrap()
    };
    let seen = |text: &str| std::fs::read_to_string(&output).is_ok_and(|out| out.contains(text));
    assert!(eventually(limit, || seen("async event FD")));
    let answer = ask("counters");
    let counters: Value = serde_json::from_slice(&answer.stdout).unwrap();
    assert_eq!(counters["devices"][0]["ports"][0]["up"], true);
    assert_eq!(ask("kind = 'port-down'").status.code(), Some(0));
    assert!(
        eventually(limit, || seen("IBV_EVENT_PORT_ERR") || seen("port error")),
        "{:?}",
        std::fs::read_to_string(&output)
    );
    let wrong = ask("kind = 'port-dwn'");
    assert!(
        wrong.status.code() == Some(2) && String::from_utf8_lossy(&wrong.stdout).contains("did you mean"),
        "{wrong:?}"
    );
    // The signal is forwarded to the running program.
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(128 + 15));
}

#[test]
fn show_has_tables_of_emulated_nics() {
    require!(Requirement::File("/etc/libibverbs.d/mana.driver"));
    let port = "[[device.port]]\nlink = ";
    let topology = format!(
        "control = 'nic.sock'\nlog = 'nic.log'\n[[device]]\nkind = 'mana'\nname = 'nic_a'\n{port}'generator'\n\
         [[device]]\nkind = 'mana'\nname = 'nic_b'\n{port}'sink'\n[[fault]]\ndevice = 'nic_b'\nkind = 'refuse'\n\
         command = 'reg_mr'\nafter = 1000000\n"
    );
    let (folder, mut command) = emulated(&topology);
    let ports =
        ["nic_a", "nic_b"].map(|name| format!("[[port]]\nname = '{name}'\ndriver = 'mana'\ndevice = '{name}'\n"));
    std::fs::write(folder.path().join("l2fwd.toml"), ports.concat() + "[pool]\nhuge_pages = 'never'\n").unwrap();
    let program = ["--", env!("CARGO_BIN_EXE_l2fwd"), "--config", "l2fwd.toml", "--json"];
    let mut child = command.args(program).stdout(std::process::Stdio::null()).spawn().unwrap();
    let show = |arguments: &[&str]| -> (Option<i32>, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_wirepath"));
        command.args(["show", "emulator"]).args(arguments).current_dir(&folder);
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    let tables = || -> Value { serde_json::from_str(&show(&["--socket", "nic.sock", "--json"]).1).unwrap_or_default() };
    let limit = std::time::Duration::from_secs(60);
    let delivered = || tables()["links"][1]["delivered"].as_u64().is_some_and(|frames| frames > 100);
    assert!(eventually(limit, delivered), "{}", tables());
    let (_other, mut inject) = emulated(&topology);
    let request = ["--command", "device = 'nic_a'\nkind = 'port-down'"];
    assert!(inject.current_dir(&folder).args(request).status().unwrap().success());
    let tables = tables();
    let cell = |table: &str, row: usize, column: &str| tables[table][row][column].clone();
    assert_eq!([cell("devices", 0, "name"), cell("devices", 1, "contexts")], [json!("nic_a"), json!(1)], "{tables}");
    assert_eq!([cell("ports", 0, "up"), cell("ports", 1, "up")], [json!(false), json!(true)], "{tables}");
    assert_eq!([cell("links", 0, "to"), cell("links", 1, "to")], [json!("generator"), json!("sink")], "{tables}");
    assert_eq!(cell("send_queues", 0, "device"), "nic_a", "{tables}");
    assert_eq!([cell("faults", 0, "device"), cell("faults", 0, "count")], [json!("nic_b"), json!(1)], "{tables}");
    assert!(cell("faults", 0, "fault").as_str().unwrap().starts_with("reg_mr refused"), "{tables}");
    let lines = tables["log"].as_array().unwrap();
    assert_eq!(lines.last().unwrap()["line"], "nic_a: injected fault: port 1 down", "{tables}");
    let (code, text) = show(&["--socket", "nic.sock"]);
    for heading in ["devices:", "ports:", "send queues:", "receive queues:", "links:", "faults:", "log:"] {
        assert!(code == Some(0) && text.lines().any(|line| line == heading), "{text}");
    }
    for (arguments, why) in [
        (&["--socket", "nic.sock", "-n", "1"][..], "only --socket, --watch and --json"),
        (&[], "expected --socket FILE"),
        (&["--socket", "l2fwd.toml"], "is a program running on these NICs"),
    ] {
        let (code, text) = show(arguments);
        assert!(code.is_some_and(|code| code > 0) && text.contains(why), "{arguments:?}: {text}");
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(child.wait().unwrap().success());
}

#[test]
fn the_old_name_of_command_names_the_new_one() {
    let (_folder, mut command) = emulated("[[device]]\nkind = 'mana'\n[[device.port]]\n");
    let output = command.args(["--ask", "counters"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && text.contains("--ask is now called --command"), "{text}");
}

/// Runs the command at the top of both files of a pair in `configs/`.
#[test]
fn the_example_pairs_of_nics_forward() {
    require!(Requirement::File("/etc/libibverbs.d/mlx5.driver"), Requirement::File("/etc/libibverbs.d/mana.driver"));
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for nic in ["mlx5", "mana"] {
        let (topology, config) = (format!("configs/emulated-{nic}.toml"), format!("configs/l2fwd-{nic}.toml"));
        let line = format!("wirepath emulate --topology {topology} -- l2fwd --config {config} --seconds 5");
        for file in [&topology, &config] {
            let text = std::fs::read_to_string(root.join(file)).unwrap();
            assert!(text.lines().any(|comment| comment == format!("#   {line}")), "{file} names the command");
        }
        let mut command = Command::new(env!("CARGO_BIN_EXE_wirepath"));
        let words =
            line.split(' ').skip(1).map(|word| if word == "l2fwd" { env!("CARGO_BIN_EXE_l2fwd") } else { word });
        command.args(words).arg("--json").current_dir(&root);
        command.env(launch::PRELOAD, launch::build_library());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{nic}: {output:?}");
        let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
        let (received, sent) = (&summary["ports"][0]["rx_packets"], &summary["ports"][1]["tx_packets"]);
        assert!(
            received.as_u64().is_some_and(|n| n > 100) && sent.as_u64().is_some_and(|n| n > 100),
            "{nic}: {summary}"
        );
    }
}

/// Returns the indented lines after the line that begins with `title`.
fn indented<'t>(help: &'t str, title: &str) -> Vec<&'t str> {
    let lines = help.lines().skip_while(|line| !line.starts_with(title)).skip(1);
    lines.skip_while(|line| line.is_empty()).take_while(|line| line.is_empty() || line.starts_with(' ')).collect()
}

#[test]
fn examples_of_help_texts_can_be_pasted() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("acl.rules"), "").unwrap();
    let config = folder.path().join("c.toml");
    for (program, titles) in [
        (env!("CARGO_BIN_EXE_l2fwd"), &["Example configuration:"][..]),
        (env!("CARGO_BIN_EXE_tunnel-gateway"), &["Example configuration:", "SIGHUP):"]),
    ] {
        // A terminal that is narrower than the examples wraps nothing.
        let output = Command::new(program).arg("--help").env("COLUMNS", "40").output().unwrap();
        let help = String::from_utf8(output.stdout).unwrap();
        let text: Vec<&str> = titles.iter().flat_map(|title| indented(&help, title)).collect();
        assert!(text.iter().any(|line| line.contains("[[port]]")) && text.iter().any(|line| line.contains("[[rule]]")));
        std::fs::write(&config, text.join("\n")).unwrap();
        let output = Command::new(program).arg("--config").arg(&config).arg("--check=file").output().unwrap();
        assert!(output.status.success(), "{program}: {output:?}\n{}", text.join("\n"));
    }
    // Every example of a command is one that the program knows.
    let help = Command::new(env!("CARGO_BIN_EXE_wirepath")).arg("--help").env("COLUMNS", "40").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let examples: Vec<&str> = indented(&help, "Examples:").into_iter().map(str::trim).collect();
    let commands: Vec<&&str> = examples.iter().filter(|line| line.starts_with("wirepath ")).collect();
    assert!(commands.len() >= 9, "{examples:?}");
    for example in commands {
        let words = example.split("  ").next().unwrap().split(' ').skip(1);
        let words: Vec<&str> =
            words.take_while(|word| !["--", "|"].contains(word) && !word.chars().all(char::is_uppercase)).collect();
        let output = wirepath(&[&words[..], &["--help"]].concat());
        assert_eq!(output.status.code(), Some(0), "{example}");
    }
}

#[test]
fn devices_have_addresses_and_sizes() {
    require!(all Requirement::LAB);
    let lab = wirepath_testlab::Lab::new("deviceinfo");
    let namespace = lab.namespace("here");
    lab.veth((&namespace, "a0"), (&namespace, "b0"));
    namespace.ip("link set dev a0 address 02:00:00:00:00:aa mtu 3000");
    let text = namespace.run(&[env!("CARGO_BIN_EXE_wirepath"), "devices"]).expect();
    let heading = "DEVICE  MAC                MTU   LINK  MBIT/S  QUEUES      NUMA  PCI";
    let rows: Vec<&str> = text.lines().skip_while(|line| *line != heading).skip(1).collect();
    let row = rows.iter().find(|row| row.starts_with("a0 ")).unwrap_or_else(|| panic!("{text}"));
    assert_eq!(row.split_whitespace().collect::<Vec<_>>()[..3], ["a0", "02:00:00:00:00:aa", "3000"], "{row}");
    assert!(row.contains("1 rx, 1 tx"), "{row}");
    let json = namespace.run(&[env!("CARGO_BIN_EXE_wirepath"), "devices", "--json"]).expect();
    let report: Value = serde_json::from_str(&json).unwrap();
    let offers = report["devices"].as_array().unwrap();
    for offer in offers.iter().filter(|offer| offer["device"] == "a0") {
        let info = &offer["info"];
        assert_eq!(
            (&info["mac"], &info["mtu"], &info["rx_queues"]),
            (&"02:00:00:00:00:aa".into(), &3000.into(), &1.into())
        );
        assert!(info["speed"].is_u64() && info["numa_node"].is_null() && info["pci"].is_null(), "{info}");
    }
}
