//! A fabric of three leaves with FRR: two gateways, and a leaf with the kernel's VXLAN device. Each has a BGP session
//! with each other one, so the end of one bgpd leaves the routes of the other two.
//!
//! ```text
//! tester a0, a1 --- | gateway 1 | wan ---|
//! host0         --- |           |        |
//! tester b0, b1 --- | gateway 2 | wan ---|--- bridge
//! host1         --- |           |        |
//! tester c0, c1 --- | kernel    | eth0 --|
//! far           --- | leaf      |
//! ```
//!
//! The ring has a flow in each direction between each two leaves. The hosts disturb.

use std::cell::RefCell;
use std::time::Duration;

use wirepath_testlab::{Namespace, Veth};

use super::{Ring, Soak, Watched, send_paced};
use crate::evpn::{Fabric, Frr, Gateway, blue_segment, is_missing, wait_for_entry};
use crate::evpn_leaves::{SECOND, neighbour_lines, plug_second, start_second};
use crate::underlay::SHARED;
use crate::world::{VNI, Variant, colons, ethernet};

/// Ports of the tester in the order of the ring, and their leaves.
const RING: [&str; 6] = ["a0", "b0", "c0", "a1", "c1", "b1"];
const LEAF_OF: [usize; 6] = [0, 1, 2, 0, 2, 1];
/// Address of the host that moves.
const ROAMING: [u8; 6] = [2, 0x72, 0, 0, 0, 1];
/// Addresses that flap.
const FLAPPING: u16 = 1000;

/// Line of bgpd for its EVPN address family. Without it, FRR holds an address at its place after five moves in 180 s.
/// A run of minutes moves the same addresses more often.
const EVPN: &str = "  no dup-addr-detection\n";

fn flapping(n: u16) -> [u8; 6] {
    let [high, low] = n.to_be_bytes();
    [2, 0x71, 0, 0, high, low]
}

struct Site<'a> {
    fabric: &'a Fabric,
    gateways: &'a [Gateway; 2],
    vteps: [String; 3],
    frr: RefCell<[Frr<'a>; 3]>,
    /// A host at each leaf.
    hosts: [&'a Namespace; 3],
    /// Ethernet addresses of the tester's ports.
    ring: [[u8; 6]; 6],
}

/// Returns the configuration behind the underlay's address: ports to the tester, and a segment with them.
fn tables(mtu: u32, ring: [&str; 2]) -> String {
    let port =
        |name| format!("[[port]]\nname = \"{name}\"\ndriver = \"af_packet\"\ndevice = \"{name}\"\nmtu = {mtu}\n");
    let [first, second] = ring;
    format!("{SHARED}{}{}", ring.map(port).concat(), blue_segment(&["lan0", first, second], ""))
}

impl Site<'_> {
    /// Waits until each leaf knows the others and all addresses of the tester.
    fn wait_for_routes(&self) {
        for (own, gateway) in self.gateways.iter().enumerate() {
            gateway.wait_for_remotes(&self.others(&[own]));
            for (mac, leaf) in self.ring.iter().zip(LEAF_OF).filter(|(_, leaf)| *leaf != own) {
                gateway.wait_for_mac(&colons(*mac), Some((&self.vteps[leaf], "external")));
            }
        }
        for (mac, leaf) in self.ring.iter().zip(LEAF_OF).filter(|(_, leaf)| *leaf != 2) {
            self.wait_at_kernel_leaf(&colons(*mac), leaf);
        }
    }

    fn wait_at_kernel_leaf(&self, mac: &str, leaf: usize) {
        let device = format!("vx{VNI}");
        wait_for_entry(self.fabric.leaf(), &device, mac, Some(&format!("dst {} ", self.vteps[leaf])));
    }

    /// Returns the sorted VTEPs of all leaves but some.
    fn others(&self, but: &[usize]) -> Vec<String> {
        let mut others: Vec<String> =
            (0..3).filter(|leaf| !but.contains(leaf)).map(|n| self.vteps[n].clone()).collect();
        others.sort_unstable();
        others
    }

    /// Kills bgpd of a leaf, waits until the others have lost its routes, and starts it again.
    fn bgpd_restarts(&self, leaf: usize) {
        let mut frr = self.frr.borrow_mut();
        frr[leaf].kill_bgpd();
        for (own, gateway) in self.gateways.iter().enumerate().filter(|(own, _)| *own != leaf) {
            gateway.wait_for_remotes(&self.others(&[own, leaf]));
        }
        frr[leaf].start_bgpd();
        drop(frr);
        self.wait_for_routes();
    }

    /// Waits until all leaves have an address at one of them. `announce` sends from there before each look.
    fn wait_for_host(&self, mac: [u8; 6], leaf: usize, announce: impl Fn()) {
        let text = colons(mac);
        announce();
        for (own, gateway) in self.gateways.iter().enumerate() {
            let place = if own == leaf { ("lan0", "learned") } else { (&*self.vteps[leaf], "external") };
            gateway.wait_for_sender(&text, Some(place), &announce);
        }
        if leaf == 2 {
            wait_for_entry(self.fabric.leaf(), "port", &text, Some("master"));
        } else {
            self.wait_at_kernel_leaf(&text, leaf);
        }
    }

    /// A host moves to each leaf in turn and back to the first one.
    fn hosts_move(&self) {
        for leaf in [0, 1, 2, 0] {
            let port = self.hosts[leaf].frames("eth0");
            self.wait_for_host(ROAMING, leaf, || port.send(&ethernet([0xff; 6], ROAMING, "here")).expect("sent"));
        }
    }

    /// Many addresses move from leaf to leaf at once. The frames have a known destination.
    fn addresses_flap(&self) {
        for leaf in [0, 1, 2, 1, 0] {
            let frame = |n| ethernet(self.ring[2], flapping(n), "flapping");
            send_paced(self.hosts[leaf], (0..FLAPPING).map(frame));
        }
        for n in [0, FLAPPING / 2, FLAPPING - 1] {
            let port = self.hosts[0].frames("eth0");
            let announce = || port.send(&ethernet(self.ring[2], flapping(n), "flapping")).expect("sent");
            self.wait_for_host(flapping(n), 0, announce);
        }
    }
}

/// A kind of disturbance.
#[derive(Clone, Copy)]
enum Disturbance {
    Nothing,
    Bgpd,
    Moves,
    Flaps,
}

/// Traffic passes all leaves while bgpd of one of them starts again, hosts move, and many addresses flap. Flows between
/// two leaves lose no packet by what happens at the third one.
pub(crate) fn leaves_restart_and_hosts_move(variant: Variant) {
    if is_missing(variant) {
        return;
    }
    let fabric = Fabric::shared(variant);
    let (world, leaf, far) = (&fabric.world, fabric.leaf(), &fabric.far);
    let [second, host1] = plug_second(&fabric);
    let tester = world.lab.namespace("tester");
    let namespaces = [&world.gateway, &second, leaf];
    for (port, at) in RING.into_iter().zip(LEAF_OF) {
        Veth::new((namespaces[at], port), (&tester, port)).plug();
        if at == 2 {
            leaf.ip(&format!("link set {port} master br{VNI}"));
        }
    }
    let macs = RING.map(|port| tester.mac(port));

    let vteps = [variant.vtep(), variant.address(SECOND), variant.remote(0)].map(|vtep| vtep.to_string());
    let frr = [0, 1, 2].map(|own: usize| {
        let [first, second] = [1, 2].map(|step| &*vteps[(own + step) % 3]);
        let [base, activate] = neighbour_lines(second);
        Frr::routing(namespaces[own], &vteps[own], first, "", &base, &(activate + EVPN))
    });
    let [first_tables, second_tables] = [["a0", "a1"], ["b0", "b1"]].map(|ring| tables(world.inner_mtu(), ring));
    let mut gateways = [fabric.gateway_of(&first_tables), start_second(&fabric, &second, &second_tables)];
    let ids = gateways.each_mut().map(|gateway| gateway.program.id());
    let ring = Ring::new(tester, &RING);
    let site = Site {
        fabric: &fabric,
        gateways: &gateways,
        vteps,
        frr: RefCell::new(frr),
        hosts: [fabric.host(), &host1, far],
        ring: macs,
    };
    // The first frames of each port make its address known.
    ring.trial(50, Duration::from_millis(500));
    site.wait_for_routes();

    let watched = vec![
        Watched::new("gateway 1", &site.gateways[0].program, ids[0], &[(0, "a0"), (3, "a1")]),
        Watched::new("gateway 2", &site.gateways[1].program, ids[1], &[(1, "b0"), (5, "b1")]),
    ];
    let mut soak = Soak::new(variant.name, &ring, watched);
    let all = [Disturbance::Nothing, Disturbance::Bgpd, Disturbance::Moves, Disturbance::Flaps];
    while let Some(round) = soak.round(&all) {
        for disturbance in round {
            if soak.is_over() {
                break;
            }
            match disturbance {
                Disturbance::Nothing => soak.window("nothing", |_| false, |_| ()),
                Disturbance::Moves => soak.window("a host moves between leaves", |_| false, |_| site.hosts_move()),
                Disturbance::Flaps => soak.window("addresses flap", |_| false, |_| site.addresses_flap()),
                Disturbance::Bgpd => {
                    let at = soak.random.usize(..3);
                    let what = format!("bgpd of leaf {} starts again", at + 1);
                    let is_hit = |n: usize| LEAF_OF[n] == at || LEAF_OF[(n + 1) % RING.len()] == at;
                    soak.window(&what, is_hit, |_| site.bgpd_restarts(at));
                    ring.wait_until_known();
                }
            }
        }
    }
    soak.end();
    drop(site);
    for gateway in gateways {
        let (_, log) = gateway.program.stop_with_log();
        assert!(!log.contains("panic"), "{log}");
    }
}
