//! A gateway with ports of all kinds at once.
//!
//! ```text
//! tester xdp0 --- xdp0 (af_xdp)      |         |              | r0 --- bridge, vx0 | remote0
//!        pack --- pack (af_packet)|         |              | r1 --- bridge, vx0 | remote1
//!        nic  --- nic (mlx5)      | gateway | wan - bridge | r2 --- bridge, vx0 | remote2
//!        tap0 --- tap0 (tap)      |  "blue" |              | r3 --- bridge, vx0 | remote3
//!        far  --- far (af_packet) |         |              |               vx0  | remote4
//!            "green" --- memory --|         |
//!                        pcap   --|         |
//! spare eth0 --- spare (af_packet)|         |
//! ```
//!
//! The tester has both ends of all tunnels but those of the host `spare` and of the last remote, which disturb.

use std::io::Write;
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;
use wirepath::control_socket::Client;
use wirepath_pipeline::tunnel::underlay::Addresses;
use wirepath_testlab::{Namespace, Veth, eventually, oracle, run};
use wirepath_wire::MacAddr;

use super::{Ring, Soak, Watched, send_paced};
use crate::faults::{CONTROL, WIREPATH};
use crate::program::Program;
use crate::world::{VNI, Variant, WAIT_LIMIT, World, colons, ethernet, pings};

/// Ports of the tester. Local ports and those behind remotes take turns, but the last one and the first one.
const RING: [&str; 9] = ["xdp0", "r0", "packet0", "r1", "nic0", "r2", "tap0", "r3", "far0"];
/// Local ports of the gateway that receive from the tester, with the number of their flow.
const INPUTS: [(usize, &str); 5] = [(0, "xdp0"), (2, "packet0"), (4, "nic0"), (6, "tap0"), (8, "far0")];
/// Remotes whose hosts belong to the tester. The next one disturbs.
const REMOTES: usize = 4;
/// Addresses of the host and the remote that disturb.
const SPARE: &str = "10.1.0.50";
const SPARE_REMOTE: &str = "10.1.0.150";
/// Limits of the segment, in frames per second, and of the port that disturbs, in addresses.
const STORM_LIMIT: u64 = 20;
const MAC_LIMIT: u64 = 1000;
/// Frames of a flood.
const FLOOD: usize = 3000;
/// Link changes and reloads in a window, and clients of the control socket.
const CHANGES: u64 = 3;
const CLIENTS: usize = 150;

struct Site {
    world: World,
    /// The host that disturbs.
    spare: Namespace,
    config: String,
    /// Files of the pcap port.
    folder: TempDir,
}

impl Site {
    fn new(variant: Variant) -> (Self, Ring) {
        let mut world = World::new(variant, 0, 0, 1500);
        let tester = world.lab.namespace("tester");
        for port in ["xdp0", "packet0", "nic0", "far0"] {
            Veth::new((&world.gateway, port), (&tester, port)).plug();
        }
        for n in 0..=REMOTES {
            world.plug_remote();
            world.vxlan(n, "vx0", VNI);
        }
        for n in 0..REMOTES {
            let remote = &world.remotes[n];
            remote.ip("link add br0 type bridge mcast_snooping 0");
            Veth::new((remote, "port"), (&tester, &format!("r{n}"))).plug();
            for port in ["vx0", "port"] {
                remote.ip(&format!("link set {port} master br0"));
            }
            remote.ip("link set br0 up");
        }
        world.remotes[REMOTES].ip(&format!("addr add {SPARE_REMOTE}/24 dev vx0"));
        let spare = world.lab.namespace("spare");
        Veth::new((&world.gateway, "spare"), (&spare, "eth0")).mtu(world.inner_mtu()).plug();
        spare.ip(&format!("addr add {SPARE}/24 dev eth0"));

        let folder = tempfile::tempdir().expect("a folder");
        let site = Self { config: String::new(), world, spare, folder };
        let frames = [1, 2, 3].map(|n| ethernet([0xff; 6], [2, 0, 0, 0, 0xca, n], "from a file"));
        std::fs::write(site.file("in.pcap"), oracle::pcap(frames)).expect("a capture");
        (Self { config: site.config(), ..site }, Ring::new(tester, &RING))
    }

    fn file(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn config(&self) -> String {
        let mut text = self.world.ports().replace("[underlay]", "#PORTS\n[underlay]");
        let mut ports = String::new();
        for (name, driver) in [("xdp0", "af_xdp"), ("packet0", "af_packet"), ("nic0", "mlx5"), ("tap0", "tap")] {
            ports += &format!("[[port]]\nname = \"{name}\"\ndriver = \"{driver}\"\ndevice = \"{name}\"\n");
        }
        for name in ["far0", "spare"] {
            ports += &format!("[[port]]\nname = \"{name}\"\ndriver = \"af_packet\"\ndevice = \"{name}\"\n");
        }
        for name in ["patch0", "patch1"] {
            ports += &format!("[[port]]\nname = \"{name}\"\ndriver = \"memory\"\ndevice = \"patch\"\n");
        }
        ports += &format!(
            "[[port]]\nname = \"file\"\ndriver = \"pcap\"\n[port.pcap]\nread = \"{}\"\nwrite = \"{}\"\n",
            self.file("in.pcap"),
            self.file("out.pcap")
        );
        text = text.replace("#PORTS\n", &ports) + CONTROL + "[rules]\n";
        let attached =
            ["xdp0", "packet0", "nic0", "tap0", "patch0", "file"].map(|port| format!("{{ port = \"{port}\" }}"));
        let spare = format!("{{ port = \"spare\", mac_limit = {MAC_LIMIT} }}");
        let all: Vec<String> = attached.into_iter().chain([spare]).collect();
        let blue = self.world.segment("blue", VNI, &all);
        let limits = format!("broadcast_limit = {STORM_LIMIT}\nunknown_unicast_limit = {STORM_LIMIT}\n");
        let green = "[[segment]]\nname = \"green\"\nvni = 43\naccept_unknown_remotes = true\n\
                     ports = [{ port = \"patch1\" }, { port = \"far0\" }]\n";
        text + blue.trim_end() + "\n" + &limits + green
    }

    /// Starts the gateway and waits until the host that disturbs reaches its remote.
    fn start(&self, tester: &Namespace) -> Program {
        let mut program = self.world.start_with(&self.config);
        let socket = program.path("operators.sock");
        let answers = eventually(WAIT_LIMIT, || {
            assert!(program.running(), "the program has ended");
            Client::connect(&socket).is_ok()
        });
        assert!(answers, "no control socket");
        // The answer comes when the ports have started, which need their interfaces until then.
        assert!(!program.rows("ports").is_empty());
        self.world.gateway.ip(&format!("link set tap0 netns {}", tester.name()));
        tester.ip("link set tap0 up");
        self.world.wait_for(&mut program, &self.spare, SPARE_REMOTE);
        program
    }

    /// Waits until the host that disturbs and its remote reach each other again.
    #[track_caller]
    fn wait_for_spare(&self) {
        let reached = eventually(WAIT_LIMIT, || pings(&self.spare, SPARE_REMOTE, 56, 1));
        assert!(reached, "the host that disturbs does not reach its remote");
    }
}

/// A number of a row of a table.
fn number(program: &Program, table: &str, key: (&str, &str), column: &str) -> u64 {
    let rows = program.rows(table);
    let row = rows.iter().find(|row| row[key.0] == *key.1).unwrap_or_else(|| panic!("no {} in {rows:?}", key.1));
    row[column].as_u64().unwrap_or_else(|| panic!("no number {column}: {row:?}"))
}

fn blue(program: &Program, column: &str) -> u64 {
    number(program, "segments", ("segment", "blue"), column)
}

/// Returns an Ethernet address that nothing has.
fn invented(random: &mut fastrand::Rng) -> [u8; 6] {
    let [a, b, c, d] = random.u32(..).to_be_bytes();
    [2, 0x5a, a, b, c, d]
}

type Disturbance = (&'static str, fn(&Site, &Program, &mut fastrand::Rng));

const DISTURBANCES: [Disturbance; 8] = [
    ("nothing", |_, _, _| ()),
    ("reloads of the configuration", reloads),
    ("a flood of addresses", addresses),
    ("a flood of ARP requests and unknown destinations", storm),
    ("a remote that ends and starts again", remote_restarts),
    ("link changes of another port", link_changes),
    ("clients of the control socket", clients),
    ("all tables shown", tables),
];

/// A segment comes and goes, and a timer of the segment of all flows changes.
fn reloads(site: &Site, program: &Program, random: &mut fastrand::Rng) {
    for _ in 0..CHANGES {
        let ageing = random.u32(400..100_000);
        let changed = site.config.replace("vni = 42\n", &format!("vni = 42\nageing = {ageing}\n"));
        let more = "[[segment]]\nname = \"red\"\nvni = 44\nremotes = [\"10.9.0.200\"]\n\
                    ports = [{ port = \"spare\", vlan = 7 }]\n";
        for text in [changed + more, site.config.clone()] {
            program.write_config(&text);
            let mut client = Client::connect(&program.path("operators.sock")).expect("a connection");
            let answer = client.ask(&json!({ "request": "reload" })).expect("an answer");
            assert_eq!(answer["applied"], true, "{answer}");
        }
    }
}

/// Frames with invented sources to a known destination, which fill the limit of their port.
fn addresses(site: &Site, program: &Program, random: &mut fastrand::Rng) {
    let refused = blue(program, "refused");
    let known = site.world.remotes[REMOTES].mac("vx0");
    send_paced(&site.spare, (0..FLOOD).map(|_| ethernet(known, invented(random), "an invented source")));
    let is_refused = eventually(WAIT_LIMIT, || blue(program, "refused") > refused);
    assert!(is_refused, "{:?}", program.rows("segments"));
}

/// Requests for all addresses in turn, and frames to destinations that nothing has.
fn storm(site: &Site, program: &Program, random: &mut fastrand::Rng) {
    let counts = || ["storm_broadcast", "storm_unknown"].map(|column| blue(program, column));
    let (before, own) = (counts(), site.spare.mac("eth0"));
    let prefix = format!("{SPARE}/24").parse().expect("a prefix");
    let host = Addresses { mac: MacAddr(own), addresses: vec![prefix], gateways: Vec::new() };
    let frame = |n| match n % 2 {
        0 => host.solicitation(Ipv4Addr::from_bits(random.u32(..)).into(), None).expect("a request"),
        _ => ethernet(invented(random), own, "to nothing"),
    };
    send_paced(&site.spare, (0..FLOOD).map(frame));
    let are_limited = eventually(WAIT_LIMIT, || counts().iter().zip(before).all(|(now, before)| *now > before));
    assert!(are_limited, "{:?}", program.rows("segments"));
}

/// The last remote loses its cable with its tunnel, and comes back with the same addresses, as a machine that starts
/// again.
fn remote_restarts(site: &Site, _program: &Program, _random: &mut fastrand::Rng) {
    let (world, remote) = (&site.world, &site.world.remotes[REMOTES]);
    let [own, inner] = ["eth0", "vx0"].map(|device| colons(remote.mac(device)));
    let cable = format!("r{REMOTES}");
    world.net.ip(&format!("link del {cable}"));
    let answer = site.spare.run(&["ping", "-n", "-c", "1", "-W", "1", SPARE_REMOTE]);
    assert!(!answer.success, "the remote has not ended: {}", answer.stdout);
    Veth::new((remote, "eth0"), (&world.net, &cable)).macs(&own, "02:00:00:00:ee:01").plug();
    world.net.ip(&format!("link set {cable} master br0"));
    remote.ip(&format!("addr add {}/{} dev eth0", world.variant.remote(REMOTES), world.variant.prefix()));
    world.vxlan(REMOTES, "vx0", VNI);
    remote.ip(&format!("link set vx0 address {inner}"));
    remote.ip(&format!("addr add {SPARE_REMOTE}/24 dev vx0"));
    site.wait_for_spare();
}

fn link_changes(site: &Site, program: &Program, _random: &mut fastrand::Rng) {
    let is = |state: &str| program.rows("ports").iter().any(|row| row["port"] == "spare" && row["state"] == *state);
    for _ in 0..CHANGES {
        for state in ["down", "up"] {
            site.spare.ip(&format!("link set eth0 {state}"));
            assert!(eventually(WAIT_LIMIT, || is(state)), "{state}: {:?}", program.rows("ports"));
        }
    }
    site.wait_for_spare();
}

/// Clients that say nothing, send a part of a request, or leave before their answer.
fn clients(_site: &Site, program: &Program, _random: &mut fastrand::Rng) {
    let socket = program.path("operators.sock");
    let mut open = Vec::new();
    for n in 0..CLIENTS {
        let mut client = UnixStream::connect(&socket).expect("a place in the queue");
        let request: &[u8] = match n % 3 {
            0 => b"",
            1 => b"{\"request\":\"sh",
            _ => b"{\"request\":\"show\",\"table\":\"fdb\"}\n",
        };
        client.write_all(request).expect("sent");
        if n % 3 < 2 {
            open.push(client);
        }
        if n % 10 == 0 {
            assert!(!program.rows("ports").is_empty(), "an operator is answered");
        }
    }
}

fn tables(_site: &Site, program: &Program, _random: &mut fastrand::Rng) {
    let socket = program.path("operators.sock").display().to_string();
    let list = run(&[WIREPATH, "show", "--json", "--socket", &socket]).expect();
    let json: Value = serde_json::from_str(&list).expect("JSON");
    let names: Vec<&str> =
        json["tables"].as_array().expect("tables").iter().filter_map(|it| it["name"].as_str()).collect();
    assert!(names.len() > 15, "{list}");
    for name in names {
        run(&[WIREPATH, "show", name, "--socket", &socket]).expect();
    }
}

/// A rule drops packets of one flow. The run names the flow, the disturbance and the reason.
fn a_loss_is_found(soak: &mut Soak<'_>, program: &Program) {
    let what = "a rule that drops";
    let socket = program.path("operators.sock").display().to_string();
    let failure = soak.try_window(
        what,
        |_| false,
        |_| {
            let rule = "rule=ingress prio 1: port id far0 / udp => drop";
            run(&[WIREPATH, "add", "rule", rule, "--socket", &socket]).expect();
            let drops = || program.rows("drops").iter().any(|row| row["reason"] == "rule_drop");
            assert!(eventually(WAIT_LIMIT, drops), "{:?}", program.rows("rules"));
            let id = program.rows("rules")[0]["id"].to_string();
            run(&[WIREPATH, "remove", "rule", &format!("id={id}"), "--socket", &socket]).expect();
        },
    );
    let failure = failure.expect("a failure");
    let expected = ["packets from far0 to xdp0 do not arrive there", what, "dropped by the gateway worker 0 rule_drop"];
    assert!(expected.iter().all(|text| failure.contains(text)), "{failure}");
    assert_eq!(failure.matches("do not arrive there").count(), 1, "the other flows lose nothing: {failure}");
}

/// Ports of all kinds carry flows around a ring, and none of them loses a packet, whatever happens beside them.
pub(crate) fn all_ports_at_once(variant: Variant) {
    let (site, ring) = Site::new(variant);
    let mut program = site.start(&ring.tester);
    let id = program.id();
    let watched = Watched::new("the gateway", &program, id, &INPUTS);
    let mut soak = Soak::new(variant.name, &ring, vec![watched]);
    a_loss_is_found(&mut soak, &program);
    while let Some(round) = soak.round(&DISTURBANCES) {
        for (what, disturb) in round {
            if soak.is_over() {
                break;
            }
            soak.window(what, |_| false, |random| disturb(&site, &program, random));
        }
    }
    soak.end();
    let sent = number(&program, "ports", ("port", "file"), "tx_packets");
    let (summary, log) = program.stop_with_log();
    assert!(!log.contains("panic"), "{log}");
    let written = count_frames(Path::new(&site.file("out.pcap")));
    assert!(sent > 0 && written >= sent, "{written} frames in the file, {sent} sent to it: {}", summary.json);
}

/// Counts the frames of a capture, which may be too long for the memory.
fn count_frames(file: &Path) -> u64 {
    let text = run(&["capinfos", "-M", "-c", "-T", "-r", &file.display().to_string()]).expect();
    text.split_whitespace().last().and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{text}"))
}
