//! Open vSwitch as the remote, with its datapath in user space: a third implementation of the tunnels.
//!
//! ```text
//! host0 eth0 --- lan0 | gateway | wan --- bridge --- eth0 under | Open vSwitch | overlay, an interface of its host
//! ```

use std::time::Duration;

use tempfile::TempDir;
use wirepath_testlab::{Background, Namespace, Requirement, Veth, eventually, print_uncaptured, run, skip_or_fail};

use crate::superframes::{DATAGRAMS, assert_no_loss, datagrams};
use crate::world::{Variant, WAIT_LIMIT, World, host_address, pings, remote_address};

/// Schema of the database (Debian: openvswitch-switch).
const SCHEMA: &str = "/usr/share/openvswitch/vswitch.ovsschema";
/// Bytes of TCP in each direction.
const BYTES: u64 = 16 << 20;
/// MTU inside the tunnels.
const MTU: u32 = 1400;

/// A tunnel: its name, the words that add it to Open vSwitch, and keys of the gateway's segment.
type Tunnel = (&'static str, &'static str, &'static str);

const TUNNELS: [Tunnel; 6] = [
    ("VXLAN", "type=vxlan", "kind = \"vxlan\""),
    ("VXLAN-GPE", "type=vxlan options:exts=gpe options:dst_port=4790", "kind = \"vxlan-gpe\""),
    (
        "GENEVE with an option",
        "type=geneve",
        "kind = \"geneve\"\ngeneve_options = [{ class = 0x0102, type = 3, data = \"0a0b0c0d\" }]",
    ),
    // Not both: Open vSwitch 3.1 computes the checksum before it writes the sequence number.
    ("gretap with checksum", "type=gre options:csum=true", "kind = \"gretap\"\ngre = { checksum = true }"),
    ("gretap with sequence", "type=gre options:seq=true", "kind = \"gretap\"\ngre = { sequence = true }"),
    // A pseudowire. Open vSwitch has no control word.
    ("MPLS over GRE", "type=gre options:packet_type=ptap", "kind = \"mpls-gre\"\nmpls = { control_word = false }"),
];

/// Database and switch in a namespace, with files of their own.
struct Switch<'a> {
    namespace: &'a Namespace,
    folder: TempDir,
    processes: Vec<Background>,
}

impl<'a> Switch<'a> {
    fn start(namespace: &'a Namespace) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut switch = Self { namespace, folder, processes: Vec::new() };
        let file = |name: &str| switch.path(name);
        run(&["ovsdb-tool", "create", &file("conf.db"), SCHEMA]).expect();
        let remote = format!("--remote=punix:{}", file("db.sock"));
        let control = |name: &str| format!("--unixctl={}", file(name));
        let environment = format!("OVS_RUNDIR={}", file(""));
        let database = ["env", &environment, "ovsdb-server", &file("conf.db"), &remote, &control("db.ctl")];
        let database = namespace.spawn(&database);
        let is_there = |name: &str| eventually(WAIT_LIMIT, || std::fs::exists(file(name)).unwrap_or(false));
        assert!(is_there("db.sock"), "the database does not start");
        let vswitchd = ["env", &environment, "ovs-vswitchd", &format!("unix:{}", file("db.sock")), &control("vs.ctl")];
        let vswitchd = namespace.spawn(&vswitchd);
        assert!(is_there("vs.ctl"), "Open vSwitch does not start");
        switch.processes = vec![vswitchd, database];
        switch
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Runs a command of the database with words separated by blanks.
    #[track_caller]
    fn vsctl(&self, words: &str) -> String {
        let database = format!("--db=unix:{}", self.path("db.sock"));
        let start = ["ovs-vsctl", "--timeout=30", &database];
        run(&start.into_iter().chain(words.split_whitespace()).collect::<Vec<_>>()).expect()
    }

    /// Runs a command of OpenFlow on the bridge of the overlay.
    #[track_caller]
    fn ofctl(&self, command: &str, words: &[&str]) -> String {
        let bridge = format!("unix:{}", self.path("overlay.mgmt"));
        run(&[&["ovs-ofctl", command, &bridge], words].concat()).expect()
    }

    /// Waits until an interface exists and sets it up with an address.
    #[track_caller]
    fn plug(&self, interface: &str, address: &str) {
        let exists = || self.namespace.run(&["ip", "link", "show", interface]).success;
        assert!(eventually(WAIT_LIMIT, exists), "Open vSwitch makes no interface {interface}");
        if address.contains(':') {
            self.namespace.ipv6(interface);
        }
        self.namespace.ip(&format!("link set {interface} up"));
        let nodad = if address.contains(':') { "nodad" } else { "" };
        self.namespace.ip(&format!("addr add {address} dev {interface} {nodad}"));
    }
}

/// Each tunnel carries TCP and datagrams in both directions, and GENEVE the options of both.
pub(crate) fn carry(variant: Variant) {
    for need in [Requirement::Program("ovs-vswitchd"), Requirement::File(SCHEMA)] {
        if let Err(why) = need.check() {
            return skip_or_fail(file!(), line!(), &format!("{}: {why}", variant.name));
        }
    }
    TUNNELS.into_iter().for_each(|tunnel| carry_one(variant, tunnel));
}

fn carry_one(variant: Variant, (name, tunnel, segment): Tunnel) {
    let world = World::new(variant, 1, 0, 1500);
    let remote = world.lab.namespace("ovs");
    Veth::new((&remote, "eth0"), (&world.net, "r0")).plug();
    world.net.ip("link set r0 master br0");
    let switch = Switch::start(&remote);
    switch.vsctl("add-br under -- set bridge under datapath_type=netdev -- add-port under eth0");
    switch.vsctl("add-br overlay -- set bridge overlay datapath_type=netdev");
    let prefix = if variant.ipv6 { 64 } else { 24 };
    switch.plug("under", &format!("{}/{prefix}", variant.remote(0)));
    switch.plug("overlay", &format!("{}/24", remote_address(0)));
    remote.ip(&format!("link set overlay mtu {MTU}"));
    let host = &world.hosts[0];
    host.ip(&format!("link set eth0 mtu {MTU}"));

    let (vtep, local) = (variant.vtep(), variant.remote(0));
    let has_label = segment.contains("mpls");
    let key = if has_label { "" } else { "options:key=42" };
    switch.vsctl(&format!(
        "add-port overlay tun -- set interface tun ofport_request=7 {key} options:remote_ip={vtep} \
         options:local_ip={local} {tunnel}"
    ));
    switch.ofctl("del-flows", &[]);
    let flows = if segment.contains("geneve_options") {
        // The option is part of the match, and packets to the gateway have another value of it.
        switch.ofctl("add-tlv-map", &["{class=0x102,type=3,len=4}->tun_metadata0"]);
        [
            "in_port=7,tun_metadata0=0x0a0b0c0d,actions=output:LOCAL",
            "in_port=LOCAL,actions=set_field:0x01020304->tun_metadata0,output:7",
        ]
    } else if has_label {
        [
            "in_port=7,packet_type=(1,0x8847),mpls_label=42,mpls_bos=1,\
             actions=decap(packet_type(ns=0,type=0)),output:LOCAL",
            "in_port=LOCAL,actions=encap(mpls),set_mpls_label(42),set_mpls_ttl(64),output:7",
        ]
    } else {
        ["in_port=7,actions=output:LOCAL", "in_port=LOCAL,actions=output:7"]
    };
    flows.iter().for_each(|flow| drop(switch.ofctl("add-flow", &["--protocols=OpenFlow15", flow])));
    let config = world.ports()
        + &format!(
            "[[segment]]\nname = \"blue\"\nvni = 42\nremotes = [\"{local}\"]\nports = [{{ port = \"lan0\" }}]\n\
             {segment}\n"
        );
    let mut gateway = world.start_with(&config);
    let reached = eventually(WAIT_LIMIT, || {
        assert!(gateway.running(), "the gateway has ended");
        pings(host, &remote_address(0), 56, 1)
    });
    assert!(reached, "{name}: Open vSwitch does not answer\n{}", switch.ofctl("dump-flows", &[]));
    for (from, to, address) in [(host, &remote, remote_address(0)), (&remote, host, host_address(0))] {
        let (sent, received) = crate::tcp::transfer(from, to, &address, BYTES);
        assert_eq!((sent, sent.0), (received, BYTES), "{name}: bytes and checksum to {address}");
        // A burst can overflow the packet socket of Open vSwitch. The gateway's own drops are checked at its end.
        let arrived = datagrams(from, to, &address);
        assert!(arrived > DATAGRAMS / 2, "{name}: {arrived} datagrams to {address}");
    }
    let summary = gateway.stop();
    assert_no_loss(&summary.json);
    print_uncaptured(&format!(
        "{}: {name}: {} MiB of TCP each way, {} packets received",
        variant.name,
        BYTES >> 20,
        summary.number("rx_packets")
    ));
    for process in switch.processes {
        process.terminate(Duration::from_secs(30));
    }
}
