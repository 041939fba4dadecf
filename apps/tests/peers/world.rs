//! A small overlay network: local hosts, the gateway, and an underlay with remote VTEPs.
//!
//! ```text
//! host0 eth0 --- lan0 |         |
//! host1 eth0 --- lan1 | gateway | wan --- bridge --- eth0 remote0 (vx0: the kernel's vxlan device)
//!                                                --- eth0 remote1
//! ```

use std::fmt::Write;
use std::net::IpAddr;
use std::time::Duration;

use wirepath_testlab::{Lab, Namespace, Requirement, Veth, eventually, skip_or_fail};

use crate::program::Program;

/// The gateway.
pub(crate) const GATEWAY: &str = env!("CARGO_BIN_EXE_tunnel-gateway");
/// The bridge.
pub(crate) const L2FWD: &str = env!("CARGO_BIN_EXE_l2fwd");
/// VNI of the segment of hosts and remotes, unless a test uses another one.
pub(crate) const VNI: u32 = 42;
/// Time limit for events that must happen. It is generous, because it only ends tests that fail.
pub(crate) const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// Parameters of a test run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Variant {
    /// Name of the test.
    pub(crate) name: &'static str,
    /// Driver of the ports.
    pub(crate) driver: &'static str,
    /// Driver of all ports except the underlay port, if it is another one.
    pub(crate) others: Option<&'static str>,
    /// Keys of the driver's table, and of the other driver's table.
    pub(crate) settings: [&'static str; 2],
    /// IPv6 underlay.
    pub(crate) ipv6: bool,
}

/// Uses one driver with default settings for all ports.
pub(crate) const fn by(driver: &'static str, ipv6: bool) -> Variant {
    Variant { name: "", driver, others: None, settings: [""; 2], ipv6 }
}

/// Returns the kind of the emulated device for ports of a driver, if it has one.
pub(crate) fn device_of(driver: &str) -> Option<&'static str> {
    match driver {
        "mana" => Some("mana"),
        "mlx5" | "verbs" => Some("mlx5"),
        _ => None,
    }
}

/// Runs a check if the machine meets its requirements.
pub(crate) fn with(variant: Variant, check: fn(Variant)) {
    let needs = [
        Requirement::Root,
        Requirement::Program("ip"),
        Requirement::Program("ping"),
        Requirement::Program("tshark"),
        Requirement::Scapy,
    ];
    let kernel = if variant.driver == "af_xdp" { Requirement::Kernel(6, 6) } else { Requirement::Kernel(5, 10) };
    // One package contains all providers.
    let rdma = variant.is_emulated().then_some(Requirement::File("/etc/libibverbs.d/mana.driver"));
    for need in needs.into_iter().chain([kernel, Requirement::LinkType("vxlan")]).chain(rdma) {
        if let Err(why) = need.check() {
            return skip_or_fail(file!(), line!(), &format!("{}: {why}", variant.name));
        }
    }
    check(variant);
}

impl Variant {
    /// Returns whether the ports are on emulated NICs, which have no kernel interface.
    pub(crate) fn is_emulated(self) -> bool {
        device_of(self.driver).is_some()
    }

    /// Returns the tables of port `n`; port 0 is the first port or the underlay port. `keys` apply to all
    /// ports.
    pub(crate) fn port(self, n: usize, name: &str, keys: &str) -> String {
        let (driver, settings) = match self.others {
            Some(driver) if n > 0 => (driver, self.settings[1]),
            _ => (self.driver, self.settings[0]),
        };
        let mut text = format!("[[port]]\nname = \"{name}\"\ndriver = \"{driver}\"\ndevice = \"{name}\"\n{keys}\n");
        if device_of(driver).is_some() || !settings.is_empty() {
            writeln!(text, "[port.{driver}]\n{settings}\n").expect("a string grows");
        }
        text
    }

    /// Bytes that the tunnel adds to an inner frame from the outer IP header on, plus the inner Ethernet
    /// header.
    pub(crate) fn overhead(self) -> u32 {
        if self.ipv6 { 70 } else { 50 }
    }

    /// Underlay address of host `n`; the gateway is 1.
    pub(crate) fn address(self, n: usize) -> IpAddr {
        let text = if self.ipv6 { format!("fd00:9::{n:x}") } else { format!("10.9.0.{n}") };
        text.parse().expect("an address")
    }

    /// The gateway's underlay address.
    pub(crate) fn vtep(self) -> IpAddr {
        self.address(1)
    }

    /// Underlay address of a remote.
    pub(crate) fn remote(self, n: usize) -> IpAddr {
        self.address(2 + n)
    }

    pub(crate) fn prefix(self) -> u32 {
        if self.ipv6 { 64 } else { 24 }
    }
}

/// Returns an Ethernet address as Linux and scapy write it.
pub(crate) fn colons(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Addresses of the hosts and remotes inside the overlay.
pub(crate) fn host_address(n: usize) -> String {
    format!("10.1.0.{}", 1 + n)
}
pub(crate) fn remote_address(n: usize) -> String {
    format!("10.1.0.{}", 101 + n)
}

/// All namespaces of a test.
pub(crate) struct World {
    pub(crate) variant: Variant,
    pub(crate) gateway: Namespace,
    pub(crate) hosts: Vec<Namespace>,
    pub(crate) remotes: Vec<Namespace>,
    /// The bridge of the underlay.
    pub(crate) net: Namespace,
    mtu: u32,
    pub(crate) lab: Lab,
}

impl World {
    /// Creates hosts and remotes with their cables. `mtu` is that of the underlay. Every remote has `vx0` for
    /// [`VNI`] with an address.
    pub(crate) fn new(variant: Variant, hosts: usize, remotes: usize, mtu: u32) -> Self {
        let lab = Lab::new(&variant.name.replace("::", "-"));
        let gateway = lab.namespace("gw");
        let net = lab.namespace("net");
        net.ip("link add br0 type bridge mcast_snooping 0");
        net.ip("link set br0 up");
        let mut world = Self { variant, gateway, hosts: Vec::new(), remotes: Vec::new(), net, mtu, lab };
        world.plug_underlay();
        for n in 0..hosts {
            world.hosts.push(world.lab.namespace(&format!("host{n}")));
            world.plug_host(n);
        }
        for n in 0..remotes {
            world.plug_remote();
            world.vxlan(n, "vx0", VNI);
            world.remotes[n].ip(&format!("addr add {}/24 dev vx0", remote_address(n)));
        }
        world
    }

    /// Adds a host of the underlay with the address of a remote. It has no tunnel device.
    pub(crate) fn plug_remote(&mut self) {
        let (n, variant) = (self.remotes.len(), self.variant);
        let remote = self.lab.namespace(&format!("remote{n}"));
        let port = format!("r{n}");
        Veth::new((&remote, "eth0"), (&self.net, &port)).mtu(self.mtu).plug();
        self.net.ip(&format!("link set {port} master br0"));
        if variant.ipv6 {
            remote.ipv6("eth0");
        }
        remote.ip(&format!("addr add {}/{} dev eth0", variant.remote(n), variant.prefix()));
        self.remotes.push(remote);
    }

    /// Connects the gateway with the bridge of the underlay.
    pub(crate) fn plug_underlay(&self) {
        Veth::new((&self.gateway, "wan"), (&self.net, "gw")).mtu(self.mtu).plug();
        self.net.ip("link set gw master br0");
    }

    /// Removes a port of hosts and then the underlay, and makes each again. The gateway takes them back.
    #[track_caller]
    pub(crate) fn replace_interfaces(&self, program: &mut Program) {
        self.gateway.ip("link del lan0");
        self.plug_host(0);
        self.wait_for(program, &self.hosts[0], &remote_address(0));
        self.gateway.ip("link del wan");
        self.plug_underlay();
        self.wait_for(program, &self.hosts[0], &remote_address(0));
    }

    /// Connects a host with the gateway.
    pub(crate) fn plug_host(&self, n: usize) {
        let host = &self.hosts[n];
        Veth::new((&self.gateway, &format!("lan{n}")), (host, "eth0")).mtu(self.inner_mtu()).plug();
        host.ip(&format!("addr add {}/24 dev eth0", host_address(n)));
    }

    /// MTU of the inner packets.
    pub(crate) fn inner_mtu(&self) -> u32 {
        self.mtu - self.variant.overhead()
    }

    /// Adds a kernel VXLAN device to a remote, with the gateway as its only peer.
    pub(crate) fn vxlan(&self, remote: usize, name: &str, vni: u32) {
        let (local, peer) = (self.variant.remote(remote), self.variant.vtep());
        let namespace = &self.remotes[remote];
        namespace.ip(&format!("link add {name} type vxlan id {vni} local {local} remote {peer} dev eth0 dstport 4789"));
        namespace.ip(&format!("link set {name} up"));
    }

    /// Returns the tables of all ports and of the underlay.
    pub(crate) fn ports(&self) -> String {
        let mut text = self.variant.port(0, "wan", &format!("mtu = {}\n", self.mtu));
        for n in 0..self.hosts.len() {
            text += &self.variant.port(1 + n, &format!("lan{n}"), &format!("mtu = {}\n", self.inner_mtu()));
        }
        let (address, prefix) = (self.variant.vtep(), self.variant.prefix());
        writeln!(text, "[underlay]\nport = \"wan\"\naddresses = [\"{address}/{prefix}\"]\n").expect("a string grows");
        text
    }

    /// Returns a segment with all remotes.
    pub(crate) fn segment(&self, name: &str, vni: u32, ports: &[String]) -> String {
        let remotes: Vec<String> = (0..self.remotes.len()).map(|n| format!("\"{}\"", self.variant.remote(n))).collect();
        format!(
            "[[segment]]\nname = \"{name}\"\nvni = {vni}\nremotes = [{}]\nports = [{}]\n\n",
            remotes.join(", "),
            ports.join(", ")
        )
    }

    /// Starts the gateway with one segment of all hosts and remotes.
    pub(crate) fn start(&self) -> Program {
        self.start_with(&self.one_segment())
    }

    pub(crate) fn one_segment(&self) -> String {
        let ports: Vec<String> = (0..self.hosts.len()).map(|n| format!("{{ port = \"lan{n}\" }}")).collect();
        self.ports() + &self.segment("blue", VNI, &ports)
    }

    /// Starts the gateway on a NIC that rejects a command `count` times.
    pub(crate) fn start_refused(&self, command: &str, count: u32) -> Program {
        let fault = format!("[[fault]]\nkind = 'refuse'\ndevice = 'nic-wan'\ncommand = '{command}'\ncount = {count}\n");
        Program::start_with_faults(&self.gateway, GATEWAY, &self.one_segment(), &fault)
    }

    /// Starts the gateway with `hardware = "off"`, so that the workers do all work.
    pub(crate) fn start_without_nic(&self) -> Program {
        self.start_with(&(self.one_segment() + "[rules]\nhardware = \"off\"\n"))
    }

    /// Starts the gateway with a configuration.
    pub(crate) fn start_with(&self, config: &str) -> Program {
        Program::start(&self.gateway, GATEWAY, config)
    }

    /// Waits until a host reaches an address.
    #[track_caller]
    pub(crate) fn wait_for(&self, program: &mut Program, host: &Namespace, address: &str) {
        let reached = eventually(WAIT_LIMIT, || {
            assert!(program.running(), "the program has ended");
            pings(host, address, 56, 1)
        });
        assert!(reached, "{} does not reach {address}", host.name());
    }
}

/// Returns whether all pings of a size are answered without fragmentation.
pub(crate) fn pings(from: &Namespace, to: &str, size: u32, count: u32) -> bool {
    let (size, count_text) = (size.to_string(), count.to_string());
    // With a deadline (-w), ping waits for the last answer. Without one it waits only for two round trips
    // after the first answer, which is too short on a busy machine.
    let patience = if count == 1 { "-W" } else { "-w" };
    let outcome =
        from.run(&["ping", "-n", "-M", "do", "-i", "0.005", patience, "3", "-s", &size, "-c", &count_text, to]);
    // Lines that report missing answers are excluded.
    let answers: String = outcome.stdout.lines().filter(|line| line.contains(" bytes from ")).collect();
    let all = (1..=count).all(|number| answers.contains(&format!("icmp_seq={number} ")));
    if !all && count > 1 {
        // Printed with a failure: the lost answers and the delays of the others.
        println!("{}{}", outcome.stdout, outcome.stderr);
    }
    all
}

/// Returns an Ethernet frame of the local experimental EtherType 0x88b5 with `mark` in its payload.
pub(crate) fn ethernet(destination: [u8; 6], source: [u8; 6], mark: &str) -> Vec<u8> {
    let mut frame = [&destination[..], &source, &[0x88, 0xb5], mark.as_bytes()].concat();
    frame.resize(frame.len().max(60), 0);
    frame
}
