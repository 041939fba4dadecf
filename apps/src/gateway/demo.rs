//! The demonstration: a traffic source, the gateway, and a VTEP behind an in-memory cable that returns every
//! frame.
//!
//! ```text
//! source ──> gateway ──> wan ═════ peer ──┐
//!   sink <── gateway <── wan ═════ peer <─┘ the remote VTEP returns every frame
//! ```
//!
//! The gateway works as usual: it resolves its next hop by ARP, floods until it has learned addresses, and
//! then forwards.

use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Packet};
use wirepath_pipeline::tunnel::Gateway;
use wirepath_pipeline::tunnel::underlay::{Addresses, HostReply, UnderlayHost};
use wirepath_pipeline::{Context, ControlPlane, Stage, StageTimers};
use wirepath_wire::MacAddr;

/// Configuration of the demonstration.
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
ports = [{ port = "lan" }]
"#;

/// Name of the port to the remote VTEP.
pub const PEER: &str = "peer";

/// The remote VTEP, which answers ARP.
#[derive(Debug)]
pub struct Peer {
    port: PortId,
    host: UnderlayHost,
}

impl Peer {
    /// Creates the VTEP 10.9.0.2 on `port`.
    pub fn new(port: PortId, mac: Option<MacAddr>) -> Self {
        let prefix = "10.9.0.2/24".parse().expect("an address with its prefix length");
        let mac = mac.unwrap_or(MacAddr([2, 0, 10, 9, 0, 2]));
        Self { port, host: UnderlayHost::new(Addresses { mac, addresses: vec![prefix], gateways: Vec::new() }) }
    }

    /// Returns the VTEP's port.
    pub fn port(&self) -> PortId {
        self.port
    }

    /// Answers a frame that is not a tunnel packet.
    pub fn answer(&mut self, packet: Packet, plane: &mut ControlPlane) {
        let answer = match self.host.handle(packet.data(), plane.now() / 1_000_000).reply {
            HostReply::Frame(frame) => frame,
            HostReply::None => return plane.consume(packet, "neighbour_messages"),
            HostReply::Drop(reason) => return plane.drop(packet, reason),
        };
        plane.consume(packet, "neighbour_messages");
        plane.count_generated();
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

/// The stages of the gateway and of the remote VTEP.
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
            if swap_addresses(packet.data_mut()) {
                packet.set_out_port(peer);
                return Some(packet);
            }
            context.punt(packet, 0);
            None
        });
    }

    fn idle(&mut self, context: &mut Context<'_>) {
        self.gateway.idle(context);
    }

    fn run_timers(&mut self, timers: &mut StageTimers, context: &mut Context<'_>) {
        self.gateway.run_timers(timers, context);
    }
}

/// Swaps the outer and inner addresses of a VXLAN packet over IPv4. Returns `false` for other frames.
fn swap_addresses(frame: &mut [u8]) -> bool {
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
