//! A small overlay network: local hosts, the gateway, an underlay with remote VTEPs.
//!
//! ```text
//! host0 eth0 --- lan0 |         |
//! host1 eth0 --- lan1 | gateway | wan --- bridge --- eth0 remote0 (vx0: the kernel's vxlan device)
//!                                                --- eth0 remote1
//! ```

use std::fmt::Write;
use std::net::IpAddr;
use std::time::Duration;

use wirepath_testlab::{Lab, Namespace, Need, Veth, eventually, skip_or_fail};

use crate::program::Program;

/// The gateway.
pub(crate) const GATEWAY: &str = env!("CARGO_BIN_EXE_tunnel-gateway");
/// The bridge.
pub(crate) const L2FWD: &str = env!("CARGO_BIN_EXE_l2fwd");
/// VNI of the segment that hosts and remotes are in, unless a test says otherwise.
pub(crate) const VNI: u32 = 42;
/// How long something that must happen may take. Generous: it only ends a hopeless wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// What varies between runs of the same check.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    /// Name of the test.
    pub(crate) name: &'static str,
    /// Driver of the ports.
    pub(crate) driver: &'static str,
    /// Driver of the ports but for the first, the underlay's, if it is another one.
    pub(crate) others: Option<&'static str>,
    /// What the driver's table says, and that of the other driver.
    pub(crate) settings: [&'static str; 2],
    /// IPv6 underlay.
    pub(crate) ipv6: bool,
}

/// All ports by one driver, as it comes.
pub(crate) const fn by(driver: &'static str, ipv6: bool) -> Way {
    Way { name: "", driver, others: None, settings: [""; 2], ipv6 }
}

/// The emulated device behind ports of a driver, if it drives such.
pub(crate) fn device_of(driver: &str) -> Option<&'static str> {
    match driver {
        "mana" => Some("mana"),
        "mlx5" | "verbs" => Some("mlx5"),
        _ => None,
    }
}

/// Runs a check if the machine can.
pub(crate) fn with(way: Way, check: fn(Way)) {
    let needs = [Need::Root, Need::Program("ip"), Need::Program("ping"), Need::Program("tshark"), Need::Scapy];
    let kernel = if way.driver == "af_xdp" { Need::Kernel(6, 6) } else { Need::Kernel(5, 10) };
    // All providers come in one package.
    let rdma = way.is_emulated().then_some(Need::File("/etc/libibverbs.d/mana.driver"));
    for need in needs.into_iter().chain([kernel, Need::LinkType("vxlan")]).chain(rdma) {
        if let Err(why) = need.check() {
            return skip_or_fail(file!(), line!(), &format!("{}: {why}", way.name));
        }
    }
    check(way);
}

impl Way {
    /// Whether the ports are those of emulated NICs, behind which no kernel is.
    pub(crate) fn is_emulated(self) -> bool {
        device_of(self.driver).is_some()
    }

    /// The tables of port `n`, the underlay's or first being 0; `keys` for all of them.
    pub(crate) fn port(self, n: usize, name: &str, keys: &str) -> String {
        let (driver, settings) = match self.others {
            Some(driver) if n > 0 => (driver, self.settings[1]),
            _ => (self.driver, self.settings[0]),
        };
        let mut text = format!("[[port]]\nname = \"{name}\"\ndriver = \"{driver}\"\ndevice = \"{name}\"\n{keys}\n");
        if device_of(driver).is_some() {
            // What is taken away does not come back in these tests.
            writeln!(text, "[port.{driver}]\nseconds_after_fatal = 0\n{settings}\n").expect("a string grows");
        }
        text
    }

    /// Bytes that the tunnel adds to an inner frame, from the outer IP header on, and the inner Ethernet header.
    pub(crate) fn overhead(self) -> u32 {
        if self.ipv6 { 70 } else { 50 }
    }

    /// Underlay address of station `n`; the gateway is 1.
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

    fn prefix(self) -> u32 {
        if self.ipv6 { 64 } else { 24 }
    }
}

/// Addresses inside the overlay.
pub(crate) fn host_address(n: usize) -> String {
    format!("10.1.0.{}", 1 + n)
}
pub(crate) fn remote_address(n: usize) -> String {
    format!("10.1.0.{}", 101 + n)
}

/// All the machines.
pub(crate) struct World {
    pub(crate) way: Way,
    pub(crate) gateway: Namespace,
    pub(crate) hosts: Vec<Namespace>,
    pub(crate) remotes: Vec<Namespace>,
    /// The underlay's bridge.
    _net: Namespace,
    mtu: u32,
    pub(crate) lab: Lab,
}

impl World {
    /// Hosts and remotes with their cables; MTU of the underlay. Every remote has `vx0` for [`VNI`] and an address in it.
    pub(crate) fn new(way: Way, hosts: usize, remotes: usize, mtu: u32) -> Self {
        let lab = Lab::new(&way.name.replace("::", "-"));
        let gateway = lab.namespace("gw");
        let net = lab.namespace("net");
        net.ip("link add br0 type bridge mcast_snooping 0");
        net.ip("link set br0 up");
        Veth::new((&gateway, "wan"), (&net, "gw")).mtu(mtu).plug();
        net.ip("link set gw master br0");
        let mut world = Self { way, gateway, hosts: Vec::new(), remotes: Vec::new(), _net: net, mtu, lab };
        for n in 0..hosts {
            let host = world.lab.namespace(&format!("host{n}"));
            let lan = format!("lan{n}");
            Veth::new((&world.gateway, &lan), (&host, "eth0")).mtu(world.inner_mtu()).plug();
            host.ip(&format!("addr add {}/24 dev eth0", host_address(n)));
            world.hosts.push(host);
        }
        for n in 0..remotes {
            let remote = world.lab.namespace(&format!("remote{n}"));
            let port = format!("r{n}");
            Veth::new((&remote, "eth0"), (&world._net, &port)).mtu(mtu).plug();
            world._net.ip(&format!("link set {port} master br0"));
            if way.ipv6 {
                remote.ipv6("eth0");
            }
            remote.ip(&format!("addr add {}/{} dev eth0", way.remote(n), way.prefix()));
            world.remotes.push(remote);
            world.vxlan(n, "vx0", VNI);
            world.remotes[n].ip(&format!("addr add {}/24 dev vx0", remote_address(n)));
        }
        world
    }

    /// MTU of the inner packets.
    pub(crate) fn inner_mtu(&self) -> u32 {
        self.mtu - self.way.overhead()
    }

    /// Gives a remote a kernel VXLAN device whose only peer is the gateway.
    pub(crate) fn vxlan(&self, remote: usize, name: &str, vni: u32) {
        let (local, peer) = (self.way.remote(remote), self.way.vtep());
        let namespace = &self.remotes[remote];
        namespace.ip(&format!("link add {name} type vxlan id {vni} local {local} remote {peer} dev eth0 dstport 4789"));
        namespace.ip(&format!("link set {name} up"));
    }

    /// Tables of all ports and the underlay.
    pub(crate) fn ports(&self) -> String {
        let mut text = self.way.port(0, "wan", &format!("mtu = {}\n", self.mtu));
        for n in 0..self.hosts.len() {
            text += &self.way.port(1 + n, &format!("lan{n}"), &format!("mtu = {}\n", self.inner_mtu()));
        }
        let (address, prefix) = (self.way.vtep(), self.way.prefix());
        writeln!(text, "[underlay]\nport = \"wan\"\naddresses = [\"{address}/{prefix}\"]\n").expect("a string grows");
        text
    }

    /// A segment with all remotes.
    pub(crate) fn segment(&self, name: &str, vni: u32, attach: &[String]) -> String {
        let remotes: Vec<String> = (0..self.remotes.len()).map(|n| format!("\"{}\"", self.way.remote(n))).collect();
        format!(
            "[[segment]]\nname = \"{name}\"\nvni = {vni}\nremotes = [{}]\nattach = [{}]\n\n",
            remotes.join(", "),
            attach.join(", ")
        )
    }

    /// The gateway with one segment of all hosts and remotes.
    pub(crate) fn start(&self) -> Program {
        self.start_with(&self.one_segment())
    }

    fn one_segment(&self) -> String {
        let attach: Vec<String> = (0..self.hosts.len()).map(|n| format!("{{ port = \"lan{n}\" }}")).collect();
        self.ports() + &self.segment("blue", VNI, &attach)
    }

    /// The same, where the underlay's NIC refuses a command so many times.
    pub(crate) fn start_refused(&self, command: &str, count: u32) -> Program {
        let fault = format!("[[fault]]\nkind = 'refuse'\ndevice = 'nic-wan'\ncommand = '{command}'\ncount = {count}\n");
        Program::start_with_faults(&self.gateway, GATEWAY, &self.one_segment(), &fault)
    }

    /// The same, with all of it done by the workers.
    pub(crate) fn start_without_nic(&self) -> Program {
        self.start_with(&(self.one_segment() + "[rules]\nhardware = \"off\"\n"))
    }

    /// The gateway with a configuration.
    pub(crate) fn start_with(&self, config: &str) -> Program {
        Program::start(&self.gateway, GATEWAY, config)
    }

    /// Waits until a host reaches an address.
    #[track_caller]
    pub(crate) fn wait_for(&self, program: &mut Program, host: &Namespace, address: &str) {
        let reached = eventually(PATIENCE, || {
            assert!(program.running(), "the program has ended");
            pings(host, address, 56, 1)
        });
        assert!(reached, "{} does not reach {address}", host.name());
    }
}

/// Whether pings of a size are all answered, whole (no fragments).
pub(crate) fn pings(from: &Namespace, to: &str, size: u32, count: u32) -> bool {
    let (size, most) = (size.to_string(), count.to_string());
    // With a deadline (-w) it waits for the last answer; without one only for two round trips after the first, which a busy machine exceeds.
    let patience = if count == 1 { "-W" } else { "-w" };
    let outcome = from.run(&["ping", "-n", "-M", "do", "-i", "0.005", patience, "3", "-s", &size, "-c", &most, to]);
    // Not the lines that say why there is no answer.
    let answers: String = outcome.stdout.lines().filter(|line| line.contains(" bytes from ")).collect();
    let all = (1..=count).all(|number| answers.contains(&format!("icmp_seq={number} ")));
    if !all && count > 1 {
        // Shown with a failure: which ones were lost, and how late the others were.
        println!("{}{}", outcome.stdout, outcome.stderr);
    }
    all
}

/// An Ethernet frame of the local experimental EtherType 0x88b5 with a mark in its payload.
pub(crate) fn ethernet(destination: [u8; 6], source: [u8; 6], mark: &str) -> Vec<u8> {
    let mut frame = [&destination[..], &source, &[0x88, 0xb5], mark.as_bytes()].concat();
    frame.resize(frame.len().max(60), 0);
    frame
}
