//! The tunnel devices of Debian's kernel as remotes of the gateway: a guest under QEMU on the underlay.
//!
//! ```text
//! host0 eth0 --- lan0 | gateway | wan --- bridge --- TAP guest --- eth0 | tun0: a tunnel device of the guest
//! ```
//!
//! A layer-3 tunnel of the guest is `tun0` too; the gateway routes between it and the network of the local host.
//!
//! MPLS has no device of its own: routes of the guest push and pop labels, and `tun0` carries them by UDP or GRE.
//!
//! SRv6 has no device. A namespace of the guest is the router of its network, and `tun0` is a cable to it:
//!
//! ```text
//! ... TAP guest --- eth0 router tun1 --- tun0
//! ```
//!
//! [`CELLS`] and [`SRV6`] have the tunnels. Each of them carries echo requests of many lengths, datagrams and TCP, over
//! both IP versions inside.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketType, ipproto};
use wirepath_testlab::{
    FramePort, LinuxGuest, Namespace, Requirement, eventually, oracle, print_uncaptured, skip_or_fail,
};

use crate::program::{Program, Summary};
use crate::world::{Variant, WAIT_LIMIT, World, colons, pings};

/// A tunnel between the gateway and a device of the guest's kernel.
struct Cell {
    /// Name in messages.
    name: &'static str,
    /// IPv6 underlay.
    ipv6: bool,
    /// Arguments of `ip link add tun0 type ...`. `{local}` is the guest, `{remote}` is the gateway.
    link: &'static str,
    /// Keys of the gateway's segment.
    segment: &'static str,
    /// Field of tshark, and its value in each packet of the tunnel. `{protocol}` and `{ethertype}` are numbers of the
    /// IP version inside. `*` at the end stands for any further digits.
    field: [&'static str; 2],
    /// IP versions inside.
    inner: &'static [Inner],
}

/// An IP version inside the tunnel.
#[derive(Clone, Copy)]
pub(crate) struct Inner {
    pub(crate) name: &'static str,
    /// Addresses of the host and of the guest, without and with the length of their prefix.
    pub(crate) host: [&'static str; 2],
    pub(crate) guest: [&'static str; 2],
    /// Bytes of the Ethernet, IP and UDP headers.
    pub(crate) headers: usize,
}

const IPV4: Inner =
    Inner { name: "IPv4", host: ["10.1.0.1", "10.1.0.1/24"], guest: ["10.1.0.101", "10.1.0.101/24"], headers: 42 };
const IPV6: Inner =
    Inner { name: "IPv6", host: ["fd00:1::1", "fd00:1::1/64"], guest: ["fd00:1::65", "fd00:1::65/64"], headers: 62 };
pub(crate) const BOTH: &[Inner] = &[IPV4, IPV6];
/// Both versions over a layer-3 tunnel, whose ends are in other networks.
const ROUTED: &[Inner] = &[
    Inner { guest: ["10.2.0.101", "10.2.0.101/24"], ..IPV4 },
    Inner { guest: ["fd00:2::65", "fd00:2::65/64"], ..IPV6 },
];
/// Networks of the local host, of the guest, and the gateway's addresses in the former.
const ROUTES: [[&str; 4]; 2] = [
    ["10.1.0.0/24", "10.2.0.0/24", "10.1.0.254", "10.1.0.254/24"],
    ["fd00:1::/64", "fd00:2::/64", "fd00:1::fe", "fd00:1::fe/64"],
];

const CELLS: &[Cell] = &[
    Cell {
        name: "VXLAN over IPv4",
        ipv6: false,
        link: "vxlan id 42 local {local} remote {remote} dev eth0 dstport 4789",
        segment: "kind = \"vxlan\"\nvni = 42",
        field: ["vxlan.vni", "42"],
        inner: BOTH,
    },
    Cell {
        name: "VXLAN over IPv6",
        ipv6: true,
        link: "vxlan id 42 local {local} remote {remote} dev eth0 dstport 4789",
        segment: "kind = \"vxlan\"\nvni = 42",
        field: ["vxlan.vni", "42"],
        inner: BOTH,
    },
    Cell {
        name: "GENEVE over IPv4",
        ipv6: false,
        link: "geneve id 42 remote {remote} dstport 6081",
        segment: "kind = \"geneve\"\nvni = 42",
        field: ["geneve.vni", "0x00002a"],
        inner: BOTH,
    },
    Cell {
        name: "GENEVE with an option over IPv6",
        ipv6: true,
        link: "geneve id 42 remote {remote} dstport 6081",
        segment: "kind = \"geneve\"\nvni = 42\ngeneve_options = [{ class = 0x0102, type = 3, data = \"0a0b0c0d\" }]",
        field: ["geneve.vni", "0x00002a"],
        inner: BOTH,
    },
    Cell {
        name: "gretap over IPv4",
        ipv6: false,
        link: "gretap local {local} remote {remote}",
        segment: "kind = \"gretap\"",
        field: ["gre.proto", "0x6558"],
        inner: BOTH,
    },
    Cell {
        name: "gretap with key, checksum and sequence over IPv4",
        ipv6: false,
        link: "gretap local {local} remote {remote} key 42 csum seq",
        segment: "kind = \"gretap\"\nvni = 42\ngre = { checksum = true, sequence = true }",
        field: ["gre.key", "0x0000002a"],
        inner: BOTH,
    },
    Cell {
        name: "gretap over IPv6",
        ipv6: true,
        link: "ip6gretap local {local} remote {remote} encaplimit none",
        segment: "kind = \"gretap\"",
        field: ["gre.proto", "0x6558"],
        inner: BOTH,
    },
    Cell {
        name: "gretap with key, checksum and sequence over IPv6",
        ipv6: true,
        link: "ip6gretap local {local} remote {remote} encaplimit none key 42 csum seq",
        segment: "kind = \"gretap\"\nvni = 42\ngre = { checksum = true, sequence = true }",
        field: ["gre.key", "0x0000002a"],
        inner: BOTH,
    },
    // Linux has no NVGRE. A device without a key of its own takes packets of every FlowID.
    Cell {
        name: "NVGRE over IPv4",
        ipv6: false,
        link: "gretap external",
        segment: "kind = \"nvgre\"\nvni = 0x123456",
        field: ["gre.key", "0x123456*"],
        inner: BOTH,
    },
    Cell {
        name: "NVGRE over IPv6",
        ipv6: true,
        link: "ip6gretap external",
        segment: "kind = \"nvgre\"\nvni = 0x123456",
        field: ["gre.key", "0x123456*"],
        inner: BOTH,
    },
    // The device "sit" carries IPv4 (RFC 2003) and IPv6 (RFC 4213).
    Cell {
        name: "IP in IPv4",
        ipv6: false,
        link: "sit local {local} remote {remote} mode any",
        segment: "kind = \"ipip\"",
        field: ["ip.proto", "{protocol}"],
        inner: ROUTED,
    },
    Cell {
        name: "IP in IPv6",
        ipv6: true,
        link: "ip6tnl local {local} remote {remote} mode any encaplimit none",
        segment: "kind = \"ipip\"",
        field: ["ipv6.nxt", "{protocol}"],
        inner: ROUTED,
    },
    // The device adds a destination option, the tunnel encapsulation limit (RFC 2473 section 4.1.1).
    Cell {
        name: "IP in IPv6 with a limit",
        ipv6: true,
        link: "ip6tnl local {local} remote {remote} mode any",
        segment: "kind = \"ipip\"",
        field: ["ipv6.version", "6"],
        inner: ROUTED,
    },
    Cell {
        name: "GRE over IPv4",
        ipv6: false,
        link: "gre local {local} remote {remote}",
        segment: "kind = \"gre\"",
        field: ["gre.proto", "{ethertype}"],
        inner: ROUTED,
    },
    Cell {
        name: "GRE with key, checksum and sequence over IPv4",
        ipv6: false,
        link: "gre local {local} remote {remote} key 42 csum seq",
        segment: "kind = \"gre\"\nvni = 42\ngre = { checksum = true, sequence = true }",
        field: ["gre.key", "0x0000002a"],
        inner: ROUTED,
    },
    Cell {
        name: "GRE with key over IPv6",
        ipv6: true,
        link: "ip6gre local {local} remote {remote} encaplimit none key 42",
        segment: "kind = \"gre\"\nvni = 42",
        field: ["gre.key", "0x0000002a"],
        inner: ROUTED,
    },
    Cell {
        name: "GENEVE with IP packets over IPv4",
        ipv6: false,
        link: "geneve id 42 remote {remote} dstport 6081 innerprotoinherit",
        segment: "kind = \"geneve\"\nvni = 42\npayload = \"ip\"",
        field: ["geneve.vni", "0x00002a"],
        inner: ROUTED,
    },
    Cell {
        name: "GENEVE with IP packets over IPv6",
        ipv6: true,
        link: "geneve id 42 remote {remote} dstport 6081 innerprotoinherit",
        segment: "kind = \"geneve\"\nvni = 42\npayload = \"ip\"",
        field: ["geneve.vni", "0x00002a"],
        inner: ROUTED,
    },
    // No cell has Ethernet in VXLAN-GPE: the device has no Ethernet header (vxlan_raw_setup in
    // drivers/net/vxlan/vxlan_core.c), so that neither bridges nor routes give it frames. Open vSwitch is
    // the peer for them.
    Cell {
        name: "VXLAN-GPE with IP packets over IPv4",
        ipv6: false,
        link: "vxlan dstport 4790 external gpe",
        segment: "kind = \"vxlan-gpe\"\nvni = 42\npayload = \"ip\"",
        field: ["vxlan.vni", "42"],
        inner: ROUTED,
    },
    Cell {
        name: "VXLAN-GPE with IP packets over IPv6",
        ipv6: true,
        link: "vxlan dstport 4790 external gpe",
        segment: "kind = \"vxlan-gpe\"\nvni = 42\npayload = \"ip\"",
        field: ["vxlan.vni", "42"],
        inner: ROUTED,
    },
    Cell {
        name: "MPLS over UDP and IPv4",
        ipv6: false,
        link: "ipip local {local} remote {remote} mode any encap fou encap-sport auto encap-dport 6635",
        segment: "kind = \"mpls-udp\"\nvni = 42\npayload = \"ip\"",
        field: ["mpls.label", "42"],
        inner: ROUTED,
    },
    Cell {
        name: "MPLS over UDP and IPv6",
        ipv6: true,
        link: "ip6tnl local {local} remote {remote} mode any encaplimit none encap fou encap-sport auto \
               encap-dport 6635 encap-udp6-csum",
        segment: "kind = \"mpls-udp\"\nvni = 42\npayload = \"ip\"",
        field: ["mpls.label", "42"],
        inner: ROUTED,
    },
    Cell {
        name: "MPLS over GRE and IPv4",
        ipv6: false,
        link: "gre local {local} remote {remote}",
        segment: "kind = \"mpls-gre\"\nvni = 42\npayload = \"ip\"",
        field: ["mpls.label", "42"],
        inner: ROUTED,
    },
    Cell {
        name: "MPLS over GRE and IPv6",
        ipv6: true,
        link: "ip6gre local {local} remote {remote} encaplimit none",
        segment: "kind = \"mpls-gre\"\nvni = 42\npayload = \"ip\"",
        field: ["mpls.label", "42"],
        inner: ROUTED,
    },
];

/// Key of the packets that the guest sends by NVGRE (RFC 7637 section 3.2): VSID 0x123456 and a FlowID.
const NVGRE_KEY: u32 = 0x1234_5677;
/// Script that makes the guest take labels over UDP.
const LABELS_OVER_UDP: &str = "
    modprobe -a fou fou6 ipip ip6_tunnel
    ip fou add port 6635 ipproto 137
    ip -6 fou add port 6635 ipproto 137
";
/// Script that makes the guest pop labels that arrive by `tun0`.
const POP_LABELS: &str = "
    modprobe -a mpls_router mpls_iptunnel mpls_gso
    sysctl -w net.mpls.platform_labels=1000 net.mpls.conf.tun0.input=1
    ip -f mpls route replace 42 dev lo ttl-propagate disabled
";

/// SRv6 of the guest.
struct Srv6 {
    /// Action of the SID [`GUEST_SID`] of the guest.
    action: &'static str,
    /// Arguments of `encap seg6` for packets to the gateway.
    encap: &'static str,
}

/// SID of the guest at which it decapsulates. `fc00:5::1` and `fc00:5::2` are SIDs at which it forwards.
const GUEST_SID: &str = "fc00:2::100";
/// Ends of the cable between the guest and its router.
const CABLE: &str = "veth peer name tun1 netns router";

const SRV6: &[(Cell, Srv6)] = &[
    (
        Cell {
            name: "SRv6 with H.Encaps and End.DT46",
            ipv6: true,
            link: CABLE,
            segment: "kind = \"srv6\"\npayload = \"ip\"\n\
                      srv6 = { local_sid = \"fc00:1::100\", segs = [\"fc00:2::100\"] }",
            field: ["ipv6.routing.type", "4"],
            inner: ROUTED,
        },
        Srv6 { action: "End.DT46 vrftable 100", encap: "mode encap segs fc00:1::100" },
    ),
    (
        Cell {
            name: "SRv6 with H.Encaps.Red and End.DT46, without header",
            ipv6: true,
            link: CABLE,
            segment: "kind = \"srv6\"\npayload = \"ip\"\n\
                      srv6 = { local_sid = \"fc00:1::100\", segs = [\"fc00:2::100\"], mode = \"encaps_red\" }",
            field: ["ipv6.nxt", "{protocol}"],
            inner: ROUTED,
        },
        Srv6 { action: "End.DT46 vrftable 100", encap: "mode encap.red segs fc00:1::100" },
    ),
    (
        Cell {
            name: "SRv6 with a path of three SIDs",
            ipv6: true,
            link: CABLE,
            segment: "kind = \"srv6\"\npayload = \"ip\"\nsrv6 = { local_sid = \"fc00:1::100\", \
                      segs = [\"fc00:5::1\", \"fc00:5::2\", \"fc00:2::100\"] }",
            field: ["ipv6.routing.type", "4"],
            inner: ROUTED,
        },
        Srv6 { action: "End.DT46 vrftable 100", encap: "mode encap segs fc00:5::2,fc00:5::1,fc00:1::100" },
    ),
    (
        Cell {
            name: "SRv6 with a reduced path, End.DT4",
            ipv6: true,
            link: CABLE,
            segment: "kind = \"srv6\"\npayload = \"ip\"\nsrv6 = { local_sid = \"fc00:1::100\", \
                      behaviour = \"end.dt4\", segs = [\"fc00:5::1\", \"fc00:2::100\"], mode = \"encaps_red\" }",
            field: ["ipv6.routing.type", "4"],
            inner: &[ROUTED[0]],
        },
        Srv6 { action: "End.DT4 vrftable 100", encap: "mode encap.red segs fc00:5::2,fc00:1::100" },
    ),
    (
        Cell {
            name: "SRv6 with a reduced path, End.DT6",
            ipv6: true,
            link: CABLE,
            segment: "kind = \"srv6\"\npayload = \"ip\"\nsrv6 = { local_sid = \"fc00:1::100\", \
                      behaviour = \"end.dt6\", segs = [\"fc00:5::1\", \"fc00:2::100\"], mode = \"encaps_red\" }",
            field: ["ipv6.routing.type", "4"],
            inner: &[ROUTED[1]],
        },
        Srv6 { action: "End.DT6 vrftable 100", encap: "mode encap.red segs fc00:5::2,fc00:1::100" },
    ),
    (
        Cell {
            name: "SRv6 with H.Encaps.L2 and End.DX2",
            ipv6: true,
            link: CABLE,
            segment: "kind = \"srv6\"\n\
                      srv6 = { local_sid = \"fc00:1::100\", segs = [\"fc00:5::1\", \"fc00:2::100\"] }",
            field: ["ipv6.routing.type", "4"],
            inner: BOTH,
        },
        Srv6 { action: "End.DX2 oif tun1", encap: "mode l2encap segs fc00:5::2,fc00:1::100" },
    ),
    (
        Cell {
            name: "SRv6 with H.Encaps.L2.Red and End.DX2, without header",
            ipv6: true,
            link: CABLE,
            segment: "kind = \"srv6\"\n\
                      srv6 = { local_sid = \"fc00:1::100\", segs = [\"fc00:2::100\"], mode = \"encaps_red\" }",
            field: ["ipv6.nxt", "143"],
            inner: BOTH,
        },
        Srv6 { action: "End.DX2 oif tun1", encap: "mode l2encap.red segs fc00:1::100" },
    ),
];

impl Cell {
    /// Returns whether the tunnel carries IP packets, so that the gateway routes.
    fn is_routed(&self) -> bool {
        self.inner.iter().any(|inner| BOTH.iter().all(|bridged| bridged.guest != inner.guest))
    }

    /// Returns whether the tunnel has MPLS labels.
    fn has_labels(&self) -> bool {
        self.segment.contains("mpls")
    }
}

impl Srv6 {
    /// Returns the script that makes the guest's router. The tunnel carries packets of up to `mtu` bytes, and the
    /// underlay those with [`TUNNEL`] bytes more.
    fn router(&self, cell: &Cell, mtu: usize, host: &Namespace) -> String {
        let outer_mtu = mtu + TUNNEL;
        let mut script = format!(
            "
            mkdir -p /var/run
            ip netns add router
            ip link set eth0 netns router
            ip link add tun0 type {CABLE}
            sysctl() {{ ip netns exec router /bin/sysctl -w \"$@\"; }}
            sysctl net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv6.conf.all.seg6_enabled=1
            sysctl net.ipv6.conf.eth0.seg6_enabled=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.tun1.rp_filter=0
            ip -n router link set lo up
            ip -n router link set eth0 mtu {outer_mtu} up
            ip -n router link set tun1 mtu {mtu} up
            ip -n router addr add fd00:9::2/64 dev eth0 nodad
            ip -n router sr tunsrc set fd00:9::2
            ip -n router -6 rule add to fc00::/16 lookup 90 prio 999
            ip -n router -6 route add fc00:1::/64 via fd00:9::1 dev eth0 table 90
            ip -n router -6 route add fc00:5::1 table 90 encap seg6local action End dev eth0
            ip -n router -6 route add fc00:5::2 table 90 encap seg6local action End dev eth0
            "
        );
        let Self { action, encap } = self;
        let device = if cell.is_routed() { "vrf1" } else { "tun1" };
        if cell.is_routed() {
            script += "
            ip -n router link add vrf1 type vrf table 100
            sysctl net.vrf.strict_mode=1
            ip -n router link set vrf1 up
            ip -n router link set tun1 master vrf1
            sysctl net.ipv4.conf.vrf1.rp_filter=0
            ip -n router addr add 10.2.0.1/24 dev tun1
            ip -n router addr add fd00:2::1/64 dev tun1 nodad
            ";
        } else {
            // Linux encapsulates the frames that it would route: those to its own Ethernet address. ARP frames are no
            // such frames.
            let mac = colons(host.mac("eth0"));
            script += &format!(
                "
            ip -n router link set tun1 address {mac}
            ethtool -K tun0 tx off tso off gso off
            ip neigh replace 10.1.0.1 lladdr {mac} dev tun0
            ip neigh replace fd00:1::1 lladdr {mac} dev tun0
            "
            );
        }
        let table = if cell.is_routed() { "vrf vrf1" } else { "" };
        for network in ["10.1.0.0/24", "fd00:1::/64"] {
            script += &format!("ip -n router route add {network} {table} encap seg6 {encap} dev eth0\n");
        }
        script
            + &format!("ip -n router -6 route add {GUEST_SID} table 90 encap seg6local action {action} dev {device}\n")
    }

    /// Returns the script that removes the router.
    fn remove() -> String {
        "ip netns del router
         until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
        "
        .to_owned()
    }
}

impl Inner {
    pub(crate) fn is_ipv6(&self) -> bool {
        self.name == IPV6.name
    }
}

/// Echo requests of ICMP, each with a reply. Drivers other than AF_PACKET carry a tenth. The guest's kernel answers
/// them, which takes a third of the time that a program in the guest takes.
const REQUESTS: u16 = 10_000;
/// Datagrams of UDP that tshark sees, in each direction.
const SAMPLE: u16 = 200;
/// Bytes of the messages on their way at the same time, so that no queue overflows. The guest's socket for replies of
/// ICMP has room for 128 KiB (icmp_init in net/ipv4/icmp.c).
const WINDOW: usize = 72 * 1024;
/// Least bytes that a message counts in the window. The kernels' buffers have headroom and a state of their own.
const LEAST: usize = 2560;
/// Bytes of the shortest and of the longest frame, without frame check sequence. The links of emulated NICs have an
/// MTU of 9000.
pub(crate) const SHORTEST: usize = 64;
pub(crate) const LONGEST: usize = 9000;
const LONGEST_EMULATED: usize = 8800;
/// Bytes of the longest frame on links with Ethernet's usual MTU.
const ETHERNET: usize = 1514;
/// Bytes of the underlay's MTU for tunnel headers.
pub(crate) const TUNNEL: usize = 200;
/// Bytes of TCP in each direction.
const TCP_BYTES: usize = 1 << 20;
/// Bytes of TCP in each direction as superframes.
const SUPERFRAME_BYTES: usize = 4 << 20;
/// Bytes of the receive buffer of the host's socket.
const BUFFER: usize = 4 << 20;
/// Time without progress after which a stream counts as broken and a datagram as lost.
const STALLED: Duration = Duration::from_secs(60);

/// The underlay with the guest.
struct Peer {
    world: World,
    /// Bytes of the longest frame.
    longest: usize,
    guest: LinuxGuest,
}

impl Peer {
    /// Boots the guest. Without one, the reason is printed or the test fails.
    fn boot(variant: Variant) -> Option<Self> {
        for need in Requirement::GUEST.into_iter().chain(["socat", "ethtool", "tc"].map(Requirement::Program)) {
            if let Err(why) = need.check() {
                skip_or_fail(file!(), line!(), &format!("{}: {why}", variant.name));
                return None;
            }
        }
        let longest = if variant.is_emulated() { LONGEST_EMULATED } else { LONGEST };
        let outer_mtu = longest + TUNNEL;
        let world = World::new(variant, 1, 0, outer_mtu as u32);
        world.hosts[0].ipv6("eth0");
        for inner in BOTH.iter().filter(|inner| inner.name != IPV4.name) {
            world.hosts[0].ip(&format!("addr add {} dev eth0 nodad", inner.host[1]));
        }
        world.net.ip("tuntap add guest mode tap vnet_hdr");
        world.net.ip(&format!("link set guest mtu {outer_mtu} master br0 up"));
        let mut guest = LinuxGuest::boot(&world.net, &["guest"], &["socat", "cat", "ethtool", "tc"]);
        // The queues of the echo server hold a window of the longest frames.
        guest.sh(&format!(
            "
            sysctl -w net.core.rmem_default=4194304 net.core.wmem_default=4194304 net.unix.max_dgram_qlen=512
            sysctl -w net.ipv6.conf.default.accept_dad=0 net.ipv6.conf.default.router_solicitations=0
            {LABELS_OVER_UDP}
            {}",
            underlay(outer_mtu)
        ));
        if variant.driver == "af_xdp" {
            // XDP does not say that the checksum of a GRE header is left to the device, as it is on a TAP.
            guest.sh("ethtool -K eth0 tx off");
        }
        Some(Self { world, longest, guest })
    }

    /// Makes both ends of a tunnel and waits until it carries packets.
    fn connect(&mut self, cell: &Cell, srv6: Option<&Srv6>, inner_mtu: usize) -> Program {
        let world = &mut self.world;
        world.variant.ipv6 = cell.ipv6;
        let (local, remote) = (world.variant.remote(0).to_string(), world.variant.vtep().to_string());
        let link = cell.link.replace("{local}", &local).replace("{remote}", &remote);
        match srv6 {
            Some(srv6) => _ = self.guest.sh(&srv6.router(cell, inner_mtu, &world.hosts[0])),
            None => _ = self.guest.sh(&format!("ip link add tun0 type {link}")),
        }
        if cell.has_labels() {
            self.guest.sh(POP_LABELS);
        }
        self.guest.sh(&format!("ip link set tun0 mtu {inner_mtu} up"));
        if link.contains("external") && !cell.is_routed() {
            // Such a device takes addresses and key from the frame.
            self.guest.sh(&format!(
                "tc qdisc add dev tun0 clsact
                 tc filter add dev tun0 egress protocol all flower action tunnel_key set src_ip {local} \
                    dst_ip {remote} id {NVGRE_KEY} ttl 64 nocsum
                "
            ));
        }
        for inner in cell.inner {
            let nodad = if inner.guest[0].contains(':') { "nodad" } else { "" };
            self.guest.sh(&format!("ip addr add {} dev tun0 {nodad}", inner.guest[1]));
        }
        let host = &world.hosts[0];
        host.ip(&format!("link set eth0 mtu {inner_mtu}"));
        world.gateway.ip(&format!("link set lan0 mtu {inner_mtu}"));
        // The guest's device has a new address.
        host.ip("neigh flush all");
        if srv6.is_some() && !cell.is_routed() {
            let mac = self.guest.sh("cat /sys/class/net/tun0/address");
            for inner in cell.inner {
                host.ip(&format!("neigh replace {} lladdr {} dev eth0 nud permanent", inner.guest[0], mac.trim()));
            }
        }
        let (lan, routes) = if cell.is_routed() {
            let [[v4, far4, router4, address4], [v6, far6, router6, address6]] = ROUTES;
            for (network, far, router) in [(v4, far4, router4), (v6, far6, router6)] {
                host.ip(&format!("route replace {far} via {router}"));
                if cell.inner.iter().all(|inner| inner.is_ipv6() != network.contains(':')) {
                    continue;
                }
                let via = match srv6 {
                    // The route has the tunnel of such a device.
                    None if link.contains("external") && cell.ipv6 => format!("encap ip6 id 42 dst {remote} csum"),
                    None if link.contains("external") => format!("encap ip id 42 dst {remote}"),
                    None if cell.has_labels() => "encap mpls 42".to_owned(),
                    None => String::new(),
                    Some(_) if network.contains(':') => "via fd00:2::1".to_owned(),
                    Some(_) => "via 10.2.0.1".to_owned(),
                };
                self.guest.sh(&format!("ip route replace {network} {via} dev tun0"));
            }
            let segment = format!(
                "addresses = [\"10.255.0.1/30\", \"fd00:ff::1/64\"]\n[[segment]]\nname = \"lan\"\n\
                 addresses = [\"{address4}\", \"{address6}\"]\n"
            );
            let route = |to: &str| format!("{{ to = \"{to}\", next_hops = [{{ segment = \"blue\" }}] }}");
            let routes = format!("[[vrf]]\nname = \"default\"\nroutes = [{}, {}]\n", route(far4), route(far6));
            (segment, routes)
        } else {
            (String::new(), String::new())
        };
        let variant = world.variant;
        // Linux drops packets of several workers that overtake each other (RFC 2890 section 2.2).
        let workers = if cell.segment.contains("sequence") { "[workers]\ncount = 1\n" } else { "" };
        // The next hop of the first SID.
        let gateways = if srv6.is_some() { format!("gateways = [\"{local}\"]\n") } else { String::new() };
        let config = workers.to_owned()
            + &variant.port(0, "wan", &format!("mtu = {}", self.longest + TUNNEL))
            + &variant.port(1, "lan0", &format!("mtu = {inner_mtu}"))
            + &format!(
                "[underlay]\nport = \"wan\"\naddresses = [\"{remote}/{}\"]\n{gateways}\
                 [[segment]]\nname = \"blue\"\n{}\nremotes = [\"{local}\"]\n{lan}\
                 ports = [{{ port = \"lan0\" }}]\n{routes}",
                if cell.ipv6 { 64 } else { 24 },
                cell.segment
            );
        let mut gateway = world.start_with(&config);
        for inner in cell.inner {
            let reached = eventually(WAIT_LIMIT, || {
                assert!(gateway.running(), "the gateway has ended");
                pings(&world.hosts[0], inner.guest[0], 56, 1)
            });
            assert!(reached, "{}: {} does not answer", cell.name, inner.guest[0]);
        }
        gateway
    }

    /// Stops the gateway and removes the guest's device. Neither has lost anything.
    fn disconnect(&mut self, cell: &Cell, srv6: Option<&Srv6>, gateway: Program) -> Summary {
        let summary = gateway.stop();
        // Solicitations of the host for IPv6 routers have no destination in a segment whose other member is the router.
        // What the guest's device sends by itself, such as MLD reports, has no label.
        let expected: &[&str] = match cell.is_routed() {
            true if cell.has_labels() => &["no_destination", "tunnel_payload"],
            true => &["no_destination"],
            false => &[],
        };
        crate::superframes::assert_no_loss_but(&summary.json, expected);
        let errors = "cat /sys/class/net/tun0/statistics/rx_errors /sys/class/net/tun0/statistics/tx_errors";
        let errors = self.guest.sh(errors);
        let [received, sent]: [u64; 2] =
            errors.lines().map(|it| it.parse().expect("a number")).collect::<Vec<_>>().try_into().expect("two numbers");
        // The control thread sends the first frames, which waited for the next hop. Others can overtake them.
        let late = if cell.segment.contains("sequence") { 8 } else { 0 };
        assert!(received <= late && sent == 0, "{}: errors of the guest's device: {errors}", cell.name);
        self.guest.sh("ip link del tun0");
        if srv6.is_some() {
            let outer_mtu = self.longest + TUNNEL;
            self.guest.sh(&(Srv6::remove() + &underlay(outer_mtu)));
            self.world.hosts[0].ip("neigh flush all nud permanent");
        }
        summary
    }

    /// Sends datagrams to an echo server in the guest and compares what returns.
    fn exchange(&mut self, inner: &Inner) {
        let version = if inner.guest[0].contains(':') { 6 } else { 4 };
        // Cat returns each datagram, since both of its ends are sockets.
        let echo = self
            .guest
            .start(&format!("exec socat -b 65535 UDP{version}-LISTEN:7,reuseaddr EXEC:/programs/cat,socktype=2"));
        self.guest.sh("until cat /proc/net/udp /proc/net/udp6 | grep -q ':0007 '; do sleep 0.05; done");
        let echo_port = self.world.hosts[0].inside(|| UdpSocket::bind((inner.host[0], 0)).expect("bind"));
        echo_port.connect((inner.guest[0], 7)).expect("an address");
        let lengths = |number| length(number, inner.headers, self.longest);
        let result = echo_all(&echo_port, None, inner, SAMPLE, lengths);
        result.unwrap_or_else(|why| self.fail(&why));
        self.guest.sh("kill $(pidof socat)");
        // A signal has ended it.
        let _ = self.guest.wait(echo);
    }

    /// Sends echo requests to the guest's kernel and compares what returns.
    fn ping(&mut self, inner: &Inner) -> u16 {
        let host = &self.world.hosts[0];
        let count = if self.world.variant.driver == "af_packet" { REQUESTS } else { REQUESTS / 10 };
        let result = ping_all(host, inner, count, |number| length(number, inner.headers, self.longest));
        result.unwrap_or_else(|why| self.fail(&why));
        count
    }

    /// Fails with what the kernels of both ends know about packets that do not return.
    fn fail(&mut self, why: &str) -> ! {
        const STATE: &str = "for n in '' $(ip netns list | cut -d ' ' -f 1); do
                 in=${n:+ip netns exec $n}
                 echo \"--- namespace ${n:-of the guest}\"
                 $in ip -s link; $in ip -s neigh; $in cat /proc/net/softnet_stat
                 $in cat /proc/net/snmp /proc/net/snmp6 | grep -v ' 0$'
             done
             dmesg | tail -n 20";
        let host = self.world.hosts[0].run(&[
            "sh",
            "-c",
            "ip -s link; ip -s neigh; cat /proc/net/snmp /proc/net/snmp6 | grep -v ' 0$'",
        ]);
        let guest = self.guest.run(STATE);
        panic!("{why}\n=== the host\n{}\n=== the guest\n{}{}", host.stdout, guest.stdout, guest.stderr);
    }

    /// Exchanges datagrams and shows the packets of both directions to tshark.
    fn sample(&mut self, cell: &Cell, inner: &Inner) {
        // The guest leaves the checksum of such a device to its TAP, where tshark could not verify it.
        let leaves_checksum = cell.link.contains("udp6-csum") && self.world.variant.driver != "af_xdp";
        if leaves_checksum {
            self.guest.sh("ethtool -K eth0 tx off");
        }
        let mut ends = ["gw", "guest"].map(|port| self.world.net.frames(port));
        self.exchange(inner);
        if leaves_checksum {
            self.guest.sh("ethtool -K eth0 tx on");
        }
        let frames = ends.each_mut().map(complete);
        let sent = frames.each_ref().map(Vec::len);
        let frames = frames.concat();
        oracle::assert_clean(&frames);
        let rows = oracle::fields(&frames, &[cell.field[0]]);
        let (protocol, ethertype) = if inner.is_ipv6() { ("41", "0x86dd") } else { ("4", "0x0800") };
        let value = cell.field[1].replace("{protocol}", protocol).replace("{ethertype}", ethertype);
        for (rows, from) in [(&rows[..sent[0]], "the gateway"), (&rows[sent[0]..], "the guest")] {
            // The outermost one of several headers comes first.
            let is_expected = |row: &&Vec<String>| {
                let first = row[0].split(',').next().unwrap_or_default();
                value.strip_suffix('*').map_or(first == value, |start| first.starts_with(start))
            };
            let found = rows.iter().filter(is_expected).count();
            assert!(
                found >= usize::from(SAMPLE),
                "{}: tshark finds {found} packets of {from} among {} with complete checksums: {:?}",
                cell.name,
                rows.len(),
                rows.first()
            );
        }
    }

    /// Sends TCP to the guest and back. The guest has the same SHA-256, and the host gets the same bytes back.
    fn stream(&mut self, inner: &Inner, bytes: usize) {
        let mut content = vec![0; bytes];
        fastrand::Rng::with_seed(bytes as u64).fill(&mut content);
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), &content).expect("write the content");
        let sum = |text: &str| text.split(' ').next().unwrap_or_default().to_owned();
        let outcome = wirepath_testlab::run(&["sha256sum", file.path().to_str().expect("a plain path")]);
        let expected = sum(&outcome.expect());

        let [host, guest] =
            [inner.host[0], inner.guest[0]].map(|address| address.parse::<IpAddr>().expect("an address"));
        let version = if host.is_ipv6() { 6 } else { 4 };
        let listener = format!("socat -u TCP{version}-LISTEN:5001,reuseaddr OPEN:/tmp/stream,creat,trunc");
        let receiver = self.guest.start(&listener);
        self.guest.sh("until cat /proc/net/tcp /proc/net/tcp6 | grep -q ':1389 .* 0A '; do sleep 0.05; done");
        let namespace = &self.world.hosts[0];
        let mut sender = namespace.inside(|| TcpStream::connect(SocketAddr::new(guest, 5001)).expect("connect"));
        sender.set_write_timeout(Some(STALLED)).expect("a timeout");
        sender.write_all(&content).expect("the stream goes on");
        drop(sender);
        self.guest.wait(receiver).expect();
        assert_eq!(sum(&self.guest.sh("sha256sum /tmp/stream")), expected, "SHA-256 in the guest");

        let listener = namespace.inside(|| TcpListener::bind(SocketAddr::new(host, 5001)).expect("listen"));
        let to = SocketAddr::new(host, 5001);
        let sender = self.guest.start(&format!("socat -u OPEN:/tmp/stream TCP{version}:{to}"));
        let (mut stream, _) = listener.accept().expect("a connection");
        stream.set_read_timeout(Some(STALLED)).expect("a timeout");
        let mut returned = Vec::new();
        stream.read_to_end(&mut returned).expect("the stream goes on");
        self.guest.wait(sender).expect();
        assert!(returned == content, "{} of {} bytes return, or they differ", returned.len(), content.len());
    }
}

/// Returns the script that makes the guest a host of the underlay.
fn underlay(outer_mtu: usize) -> String {
    format!(
        "ip link set eth0 mtu {outer_mtu} up
         ip addr add 10.9.0.2/24 dev eth0
         ip addr add fd00:9::2/64 dev eth0 nodad
        "
    )
}

/// Returns the frames of an interface whose checksums are complete.
fn complete(port: &mut FramePort) -> Vec<Vec<u8>> {
    port.drain().into_iter().filter(|frame| !frame.checksum_pending).map(|frame| frame.bytes).collect()
}

/// Length of a datagram. All lengths of Ethernet's frames occur in [`REQUESTS`] of them. Each fifth frame may be
/// longer: the guest takes much more time for such ones.
fn length(number: u16, headers: usize, longest: usize) -> usize {
    let longest = if number.is_multiple_of(5) { longest } else { longest.min(ETHERNET) };
    // The factor is a prime number and does not divide the number of lengths.
    SHORTEST + usize::from(number) * 2237 % (longest - SHORTEST + 1) - headers
}

/// Content of a datagram: its number and random bytes.
fn content(number: u16, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    fastrand::Rng::with_seed(number.into()).fill(&mut bytes);
    bytes[..2].copy_from_slice(&number.to_be_bytes());
    bytes
}

/// Time without progress after which datagrams are sent again: the guest or a queue of the kernel may lose some on a
/// loaded machine. The gateway loses none, as its own counters show.
const LATE: Duration = Duration::from_secs(5);
/// Datagrams of an exchange that may be sent again. A guest on a loaded machine may stand still for [`STALLED`].
const MAX_RESENT: usize = 96;

/// Sends messages to a destination that echoes them. Each returns unchanged. An error names those that do not return.
///
/// `types` are those of an echo request and its reply if the socket is one of ICMP, and `None` for UDP. The headers of
/// both protocols have the same length. The kernel fills the other fields of ICMP. `length` returns the bytes of the
/// content of each number.
fn echo_all(
    socket: &UdpSocket,
    types: Option<[u8; 2]>,
    inner: &Inner,
    count: u16,
    length: impl Fn(u16) -> usize,
) -> Result<(), String> {
    let header = types.map_or_else(Vec::new, |[request, _]| vec![request, 0, 0, 0, 0, 0, 0, 0]);
    socket.set_read_timeout(Some(LATE)).expect("a timeout");
    // Each datagram can occupy several times its length.
    rustix::net::sockopt::set_socket_recv_buffer_size_force(socket, BUFFER).expect("a buffer");
    let send = |number| {
        let message = [header.clone(), content(number, length(number))].concat();
        assert_eq!(socket.send(&message).expect("sent"), message.len());
    };
    let room = |number| length(number).max(LEAST);
    let (mut next, mut open, mut buffer) = (0, BTreeSet::new(), vec![0; 65_536]);
    let (mut resent, mut progress) = (Vec::new(), Instant::now());
    loop {
        // The server takes others when it has seen the first one.
        let window = if next <= 1 { 1 } else { WINDOW };
        while next < count && open.iter().map(|number| room(*number)).sum::<usize>() < window {
            send(next);
            open.insert(next);
            next += 1;
        }
        if open.is_empty() {
            if !resent.is_empty() {
                print_uncaptured(&format!("{}: {resent:?} of {count} messages were sent again", inner.name));
            }
            return Ok(());
        }
        let got = match socket.recv(&mut buffer) {
            Ok(got) => got,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => {
                let is_late = error.kind() == ErrorKind::WouldBlock && resent.len() < MAX_RESENT;
                if !is_late || progress.elapsed() >= STALLED {
                    return Err(format!("{open:?} do not return, after {resent:?}: {error}"));
                }
                open.iter().for_each(|number| send(*number));
                resent.extend(open.iter().copied());
                continue;
            }
        };
        progress = Instant::now();
        if let Some([_, reply]) = types {
            assert_eq!(buffer[0], reply, "the type of an ICMP message");
        }
        let received = &buffer[header.len()..got];
        let number = received.first_chunk().map_or(u16::MAX, |bytes| u16::from_be_bytes(*bytes));
        // The first one of two may still have been on its way.
        assert!(open.remove(&number) || resent.contains(&number), "{got} bytes of {number}, which was not sent");
        assert!(*received == content(number, length(number)), "datagram {number} has changed");
    }
}

/// Sends echo requests of ICMP from a host to the other end of a tunnel, as [`echo_all`] does.
pub(crate) fn ping_all(
    host: &Namespace,
    inner: &Inner,
    count: u16,
    length: impl Fn(u16) -> usize,
) -> Result<(), String> {
    // Every group may have sockets for echo requests.
    host.sysctl("net.ipv4.ping_group_range", "0 2147483647");
    let (family, protocol, request, reply) = if inner.is_ipv6() {
        (AddressFamily::INET6, ipproto::ICMPV6, 128, 129)
    } else {
        (AddressFamily::INET, ipproto::ICMP, 8, 0)
    };
    let socket = host.inside(|| rustix::net::socket(family, SocketType::DGRAM, Some(protocol)).expect("a socket"));
    let socket = UdpSocket::from(socket);
    socket.connect((inner.guest[0], 0)).expect("an address");
    echo_all(&socket, Some([request, reply]), inner, count, length)
}

/// Each tunnel carries frames of many lengths and TCP unharmed, and tshark accepts its packets.
pub(crate) fn carry(variant: Variant) {
    carry_in(variant, |_| true);
}

/// The tunnels over IPv4.
pub(crate) fn carry_over_ipv4(variant: Variant) {
    carry_in(variant, |cell| !cell.ipv6);
}

/// The tunnels over IPv6.
pub(crate) fn carry_over_ipv6(variant: Variant) {
    carry_in(variant, |cell| cell.ipv6);
}

fn carry_in(variant: Variant, select: impl Fn(&Cell) -> bool) {
    let Some(mut peer) = Peer::boot(variant) else { return };
    let cells = CELLS.iter().map(|cell| (cell, None)).chain(SRV6.iter().map(|(cell, srv6)| (cell, Some(srv6))));
    for (n, (cell, srv6)) in cells.filter(|(cell, _)| select(cell)).enumerate() {
        let gateway = peer.connect(cell, srv6, peer.longest);
        // The driver does not see what is inside. One of them carries all.
        let inners = match variant.driver {
            "af_packet" => cell.inner,
            _ => &cell.inner[n % cell.inner.len()..][..1],
        };
        let mut frames = 0;
        for inner in inners {
            let start = Instant::now();
            peer.sample(cell, inner);
            let requests = peer.ping(inner);
            peer.stream(inner, TCP_BYTES);
            print_uncaptured(&format!(
                "{}: {}, {} inside: {SAMPLE} datagrams, {requests} echo requests and {} MiB of TCP each way; {:.1} s",
                variant.name,
                cell.name,
                inner.name,
                TCP_BYTES >> 20,
                start.elapsed().as_secs_f64()
            ));
            frames += 2 * u64::from(SAMPLE + requests);
        }
        let summary = peer.disconnect(cell, srv6, gateway);
        assert!(summary.number("rx_packets") > frames, "{}", summary.json);
    }
}

/// Superframes of the host enter each tunnel whole that has the same header in all packets, and the guest gets the same
/// bytes. The guest's own offloads do not matter.
pub(crate) fn carry_superframes(variant: Variant) {
    let Some(mut peer) = Peer::boot(variant) else { return };
    let cells = CELLS.iter().map(|cell| (cell, None)).chain(SRV6.iter().map(|(cell, srv6)| (cell, Some(srv6))));
    // Superframes are cut before tunnels with labels.
    let have_one_header =
        |cell: &Cell| !["checksum", "sequence", "mpls"].iter().any(|field| cell.segment.contains(field));
    // A NIC does not skip the routing header of SRv6.
    let are_known = |srv6: Option<&_>| srv6.is_none() || !variant.is_emulated();
    for (cell, srv6) in cells.filter(|(cell, srv6)| have_one_header(cell) && are_known(*srv6)) {
        let gateway = peer.connect(cell, srv6, 1430);
        // The guest has its offloads for one IP version inside, and none for the other.
        for (inner, offloads) in cell.inner.iter().zip(["on", "off"]) {
            let namespace = if srv6.is_some() { "ip netns exec router" } else { "" };
            peer.guest.sh(&format!(
                "{namespace} ethtool -K eth0 tx {offloads} rx {offloads} tso {offloads} gso {offloads} gro {offloads}"
            ));
            peer.stream(inner, SUPERFRAME_BYTES);
        }
        let summary = peer.disconnect(cell, srv6, gateway);
        let wan = &summary.json["ports"][0]["tx_queues"];
        let sum = |counter: &str| -> u64 {
            wan.as_array().expect("queues").iter().filter_map(|queue| queue[counter].as_u64()).sum()
        };
        let (packets, bytes, cut) = (sum("packets"), sum("bytes"), sum("segmented"));
        let name = variant.name;
        print_uncaptured(&format!("{name}: {}: {bytes} bytes in {packets} packets, {cut} cut", cell.name));
        if srv6.is_some() && !cell.is_routed() {
            // Linux has no segmentation for Ethernet directly in IP.
            assert!(cut > 0, "{}", summary.json);
            continue;
        }
        // Acknowledgements and the packets of the start are small. Without superframes the mean is below the MTU.
        assert!(bytes > 1500 * packets, "{}", summary.json);
        // For a NIC, software cuts superframes of two frames if the outer header has a checksum, as over IPv6.
        let may_cut = variant.is_emulated() && cell.ipv6;
        assert!(if may_cut { cut * 10 < packets } else { cut == 0 }, "{cut} cut: {}", summary.json);
    }
}
