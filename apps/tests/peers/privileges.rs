//! Privileges of running programs, as the kernel reports them for each of their threads.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use serde_json::{Value, json};
use wirepath_testlab::{Lab, Veth, eventually};

use crate::program::Program;
use crate::reload::Client;
use crate::world::{L2FWD, VNI, Variant, WAIT_LIMIT, World, host_address, pings, remote_address};

/// Bits of `CapEff` (linux/capability.h).
const NET_ADMIN: u64 = 1 << 12;
const NET_RAW: u64 = 1 << 13;
const IPC_LOCK: u64 = 1 << 14;
const BPF: u64 = 1 << 39;

const CONTROL: &str = "[control]\nsocket = 'control.sock'\n";
/// A user without any privilege, on every machine (nobody).
const NOBODY: u32 = 65_534;

/// Returns what ports of a driver need.
fn needed(driver: &str) -> u64 {
    match driver {
        "af_packet" | "xdp_live" => NET_RAW | NET_ADMIN | BPF,
        "af_xdp" => NET_RAW | NET_ADMIN | BPF | IPC_LOCK,
        "tap" => NET_ADMIN,
        "mlx5" | "mana" | "verbs" => NET_RAW | IPC_LOCK,
        _ => 0,
    }
}

/// Checks the privileges of all threads of a program, and returns the number of threads.
#[track_caller]
fn assert_privileges(program: &mut Program, capabilities: u64, user: u32) -> usize {
    let folder = format!("/proc/{}/task", program.id());
    let threads: Vec<_> = std::fs::read_dir(folder).expect("a process").collect::<Result<_, _>>().expect("threads");
    let mut count = 0;
    for thread in threads {
        // A thread may end meanwhile.
        let Ok(status) = std::fs::read_to_string(thread.path().join("status")) else { continue };
        let fields: BTreeMap<&str, String> = status
            .lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(key, value)| (key, value.split_whitespace().collect::<Vec<_>>().join(" ")))
            .collect();
        let set = format!("{capabilities:016x}");
        let (none, ids) = ("0".repeat(16), [user.to_string().as_str(); 4].join(" "));
        for (field, value) in [
            ("CapPrm", &*set),
            ("CapEff", &set),
            ("CapBnd", &set),
            ("CapInh", &none),
            ("CapAmb", &none),
            ("NoNewPrivs", "1"),
            ("Seccomp", "2"),
            ("Uid", &ids),
            ("Gid", &ids),
        ] {
            assert_eq!(fields[field], value, "{field} of thread {}", fields["Name"]);
        }
        count += 1;
    }
    count
}

/// Reads the changed configuration file.
#[track_caller]
fn reload(program: &mut Program, config: &str) -> Value {
    program.write_config(config);
    Client::new(program).ask(&json!({ "request": "reload" }))
}

/// The gateway keeps what its ports need, from the start over a reload to the return of a lost device.
pub(crate) fn only_what_the_ports_need(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let config = world.one_segment() + CONTROL;
    let mut gateway = world.start_with(&config);
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    let capabilities = needed(variant.driver);
    assert!(assert_privileges(&mut gateway, capabilities, 0) >= 2, "the control thread and a worker");

    let answer = reload(&mut gateway, &config.replace("vni = 42", "vni = 42\nageing = 77"));
    assert_eq!(answer["applied"], true, "{answer}");
    assert_privileges(&mut gateway, capabilities, 0);

    if !variant.is_emulated() {
        world.replace_interfaces(&mut gateway);
        assert_privileges(&mut gateway, capabilities, 0);
    }
    assert!(pings(&world.hosts[0], &remote_address(0), 1200, 50));
    let summary = gateway.stop();
    let losses: u64 = (0..2).filter_map(|port| summary.json["ports"][port]["losses"].as_u64()).sum();
    assert_eq!(losses, if variant.is_emulated() { 0 } else { 2 }, "{}", summary.json);
}

/// The gateway becomes another user. It serves operators, and takes lost devices back.
pub(crate) fn another_user(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let config = world.one_segment() + CONTROL + "[privileges]\nuser = 'nobody'\n";
    let mut gateway = world.start_with(&config);
    world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    let capabilities = needed(variant.driver);
    assert_privileges(&mut gateway, capabilities, NOBODY);
    let owner = std::fs::metadata(gateway.file("control.sock")).expect("a socket").uid();
    assert_eq!(owner, NOBODY, "the user may connect to the program");

    // Files of root alone cannot be read any more.
    let file = gateway.file("config.toml");
    let permit = |mode| std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).expect("a mode");
    permit(0o600);
    let answer = reload(&mut gateway, &config.replace("vni = 42", "vni = 42\nageing = 77"));
    assert!(answer["error"].as_str().is_some_and(|error| error.contains("Permission denied")), "{answer}");
    permit(0o644);
    let answer = reload(&mut gateway, &config.replace("vni = 42", "vni = 42\nageing = 77"));
    assert_eq!(answer["applied"], true, "{answer}");

    if !variant.is_emulated() {
        world.gateway.ip("link del lan0");
        world.plug_host(0);
        world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
    }
    assert_privileges(&mut gateway, capabilities, NOBODY);
    gateway.stop();
}

/// A port that shares its frames with the kernel needs no program at its interface. Cables (veth) are an exception.
pub(crate) fn a_shared_interface(variant: Variant) {
    let lab = Lab::new(&variant.name.replace("::", "-"));
    let (middle, host) = (lab.namespace("middle"), lab.namespace("host"));
    Veth::new((&middle, "cable"), (&host, "eth0")).plug();
    middle.ip("link add br0 type bridge mcast_snooping 0");
    middle.ip("link set cable master br0");
    middle.ip("link set br0 up");
    host.ip("addr add 10.3.0.1/24 dev eth0");
    let config = format!(
        "[[port]]\nname = \"a\"\ndriver = \"af_packet\"\ndevice = \"br0\"\n[port.af_packet]\nexclusive = false\n\
         [[port]]\nname = \"b\"\ndriver = \"null\"\n{CONTROL}"
    );
    let mut l2fwd = Program::start(&middle, L2FWD, &config);
    wait_for_start(&mut l2fwd);
    assert_privileges(&mut l2fwd, NET_RAW, 0);
    middle.ip("link del br0");
    middle.ip("link add br0 type bridge mcast_snooping 0");
    middle.ip("link set cable master br0");
    middle.ip("link set br0 up");
    let back = eventually(WAIT_LIMIT, || {
        let answer = Client::new(&mut l2fwd).ask(&json!({ "request": "show", "table": "ports" }));
        let text = answer.to_string();
        assert!(l2fwd.running(), "l2fwd has ended");
        !text.contains("\"lost\"") && !text.contains("\"away\"")
    });
    assert!(back, "the interface is back");
    assert_privileges(&mut l2fwd, NET_RAW, 0);
    let summary = l2fwd.stop();
    assert_eq!(summary.json["ports"][0]["losses"], 1, "{}", summary.json);
}

/// Waits until the ports of a program are started. The filter of system calls is the last step before the workers.
#[track_caller]
fn wait_for_start(program: &mut Program) {
    let started = eventually(WAIT_LIMIT, || {
        assert!(program.running(), "the program has ended");
        let status = std::fs::read_to_string(format!("/proc/{}/status", program.id())).expect("a running program");
        status.contains("Seccomp:\t2")
    });
    assert!(started, "no filter of system calls");
}

/// A port of a driver that the program does not use yet is refused with the remedy, and taken where `keep` names it.
pub(crate) fn ports_of_other_drivers(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let ports = |keep: &str| {
        let wan =
            "[[port]]\nname = \"wan\"\ndriver = \"null\"\nmtu = 1500\n[[port]]\nname = \"quiet\"\ndriver = \"null\"\n";
        let remotes = format!("remotes = [\"{}\"]", variant.remote(0));
        let underlay = format!("[underlay]\nport = \"wan\"\naddresses = [\"{}/24\"]\n", variant.vtep());
        let segment =
            format!("[[segment]]\nname = \"blue\"\nvni = {VNI}\n{remotes}\nports = [{{ port = \"quiet\" }}]\n");
        format!("{wan}{underlay}{CONTROL}[privileges]\nkeep = [{keep}]\n{segment}")
    };
    let with = |config: &str, driver: &str| {
        let port = format!("[[port]]\nname = \"new\"\ndriver = \"{driver}\"\ndevice = \"lan0\"\n");
        let segment = format!(
            "[[segment]]\nname = \"red\"\nvni = 77\nremotes = [\"{}\"]\nports = [{{ port = \"new\" }}]\n",
            variant.remote(0)
        );
        format!("{port}{config}{segment}")
    };
    let config = ports("");
    let mut gateway = world.start_with(&config);
    wait_for_start(&mut gateway);
    assert_privileges(&mut gateway, 0, 0);
    for (driver, missing) in [("af_packet", "CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF"), ("tap", "CAP_NET_ADMIN")] {
        let answer = reload(&mut gateway, &with(&config, driver));
        let error = answer["error"].as_str().unwrap_or_default();
        let expected = format!("the program gave up {missing} after its start; name the driver in the key \"keep\"");
        assert!(error.contains(&expected), "{answer}");
    }
    // The kernel's tables of EVPN need a capability too.
    let evpn = config.replace("remotes = ", "control = \"kernel\"\n#");
    let answer = reload(&mut gateway, &evpn);
    let error = answer["error"].as_str().unwrap_or_default();
    assert!(error.contains("control = \"kernel\" needs CAP_NET_ADMIN, which the program gave up"), "{answer}");
    gateway.stop();

    let config = ports("\"af_packet\"");
    let mut gateway = world.start_with(&config);
    wait_for_start(&mut gateway);
    assert_privileges(&mut gateway, needed("af_packet"), 0);
    let answer = reload(&mut gateway, &with(&config, "af_packet"));
    assert_eq!(answer["applied"], true, "{answer}");
    let mut host = world.hosts[0].frames("eth0");
    host.drain();
    assert_privileges(&mut gateway, needed("af_packet"), 0);
    // The new port receives.
    assert!(!pings(&world.hosts[0], "10.1.0.77", 56, 1));
    let summary = gateway.stop();
    assert!(summary.number("rx_packets") > 0, "{}", summary.json);
}

/// The kernel's interface of a TAP port, whose program has one capability.
pub(crate) fn a_tap_port(variant: Variant) {
    let lab = Lab::new(&variant.name.replace("::", "-"));
    let middle = lab.namespace("middle");
    let config = format!(
        "[[port]]\nname = \"a\"\ndriver = \"tap\"\ndevice = \"tap0\"\n[port.tap]\naddress = \"10.3.0.1/24\"\n\
         [[port]]\nname = \"b\"\ndriver = \"null\"\n{CONTROL}"
    );
    let mut l2fwd = Program::start(&middle, L2FWD, &config);
    wait_for_start(&mut l2fwd);
    assert_privileges(&mut l2fwd, NET_ADMIN, 0);
    middle.ip("link del tap0");
    let back = eventually(WAIT_LIMIT, || {
        assert!(l2fwd.running(), "l2fwd has ended");
        middle.run(&["ip", "addr", "show", "dev", "tap0"]).stdout.contains("10.3.0.1/24")
    });
    assert!(back, "the interface is back with its address");
    assert_privileges(&mut l2fwd, NET_ADMIN, 0);
    l2fwd.stop();
}

/// Without `drop`, a program keeps all capabilities; without the list, all system calls.
pub(crate) fn nothing_is_given_up(variant: Variant) {
    let world = World::new(variant, 1, 1, 1500);
    let status = |program: &mut Program| {
        std::fs::read_to_string(format!("/proc/{}/status", program.id())).expect("a running program")
    };
    let own = std::fs::read_to_string("/proc/self/status").expect("a status");
    let all = own.lines().find(|line| line.starts_with("CapEff:")).expect("capabilities");
    for (keys, filter, new) in [("drop = false", "2", "1"), ("drop = false\nsystem_calls = 'any'", "0", "0")] {
        let mut gateway = world.start_with(&format!("{}[privileges]\n{keys}\n", world.one_segment()));
        world.wait_for(&mut gateway, &world.hosts[0], &remote_address(0));
        let status = status(&mut gateway);
        for line in [all, &format!("Seccomp:\t{filter}"), &format!("NoNewPrivs:\t{new}")] {
            assert!(status.contains(line), "{keys}: {line}: {status}");
        }
        assert!(pings(&world.remotes[0], &host_address(0), 56, 5));
        gateway.stop();
    }
}
