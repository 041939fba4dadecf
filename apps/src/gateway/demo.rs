//! The demonstration: a source of traffic, the gateway, and a VTEP behind a cable in memory that sends every frame back.
//!
//! ```text
//! source ──> gateway ──> wan ═════ peer ──┐
//!   sink <── gateway <── wan ═════ peer <─┘ the remote VTEP turns every frame round
//! ```
//!
//! Nothing in it is made easier: the gateway asks for its next hop by ARP, floods until it has learned, and then forwards.

use wirepath_pipeline::tunnel::Gateway;
use wirepath_pipeline::tunnel::underlay::{Addresses, Answer, Station};
use wirepath_pipeline::{Context, ControlPlane, Stage};
use wirepath_pmd::drops::DropReason;
use wirepath_pmd::packet::{Batch, Packet};
use wirepath_pmd::port::PortId;
use wirepath_wire::MacAddr;

/// The demonstration's configuration.
pub const CONFIG: &str = r#"
[[port]]
name = "lan"
driver = "null"
[port.null]
source = "udp4"
size = 64
flows = 1000

[[port]]
name = "wan"
driver = "memory"
device = "tunnel-gateway-demo"

[[port]]
name = "peer"
driver = "memory"
device = "tunnel-gateway-demo"

[underlay]
port = "wan"
addresses = ["10.9.0.1/24"]

[[segment]]
name = "blue"
vni = 42
remotes = ["10.9.0.2"]
attach = [{ port = "lan" }]
"#;

/// Name of the port behind which the remote VTEP sits.
pub const PEER: &str = "peer";

/// The remote VTEP's answers to ARP.
#[derive(Debug)]
pub struct Peer {
    port: PortId,
    station: Station,
}

impl Peer {
    /// The VTEP 10.9.0.2, behind `port`.
    pub fn new(port: PortId, mac: Option<MacAddr>) -> Self {
        let prefix = "10.9.0.2/24".parse().expect("an address with its prefix length");
        let mac = mac.unwrap_or(MacAddr([2, 0, 10, 9, 0, 2]));
        Self { port, station: Station::new(Addresses { mac, addresses: vec![prefix], gateways: Vec::new() }) }
    }

    /// Its port.
    pub fn port(&self) -> PortId {
        self.port
    }

    /// Answers a frame that is no tunnel packet.
    pub fn answer(&mut self, packet: Packet, plane: &mut ControlPlane) {
        let mut frame = packet.data().to_vec();
        let answer = match self.station.handle(&mut frame, plane.now() / 1_000_000).answer {
            Answer::Frame(frame) => frame,
            Answer::InPlace => frame,
            Answer::None => return,
            Answer::Refused(reason) => return plane.drop(packet, reason),
        };
        let reply = plane.pool(self.port).and_then(|pool| {
            let mut reply = pool.take()?;
            reply.extend_from_slice(&answer, pool).then_some(reply)
        });
        match reply {
            Some(reply) => plane.send(self.port, reply),
            None => plane.count_drops(DropReason::NoBuffer, 1),
        }
    }
}

/// The gateway's stage, and the remote VTEP's.
#[derive(Debug)]
pub struct Demo {
    /// The gateway.
    pub gateway: Gateway,
    /// Port of the remote VTEP.
    pub peer: PortId,
}

impl Stage for Demo {
    #[inline]
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        if context.in_port() != Some(self.peer) {
            return self.gateway.process(context, batch);
        }
        let peer = self.peer;
        batch.filter_map(|mut packet| {
            if turn_round(packet.data_mut()) {
                packet.set_out_port(peer);
                return Some(packet);
            }
            context.punt(packet, 0);
            None
        });
    }
}

/// Exchanges the addresses of a VXLAN packet over IPv4, outside and inside. `false`: it is none.
fn turn_round(frame: &mut [u8]) -> bool {
    // Ethernet, IPv4 without options, UDP, VXLAN, Ethernet, IPv4.
    let Some(h) = frame.first_chunk_mut::<84>() else { return false };
    if h[12..15] != [8, 0, 0x45] || h[23] != 17 || h[36..38] != 4789u16.to_be_bytes() {
        return false;
    }
    for at in [0, 50] {
        for i in at..at + 6 {
            h.swap(i, i + 6);
        }
        for i in at + 26..at + 30 {
            h.swap(i, i + 4);
        }
    }
    true
}
