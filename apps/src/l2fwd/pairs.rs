use std::sync::Arc;

use wirepath_pipeline::{Context, PortInfo, Stage};
use wirepath_pmd::drops::DropReason;
use wirepath_pmd::packet::Batch;
use wirepath_pmd::port::PortId;

/// Sends what came in by a port out by its peer.
#[derive(Clone, Debug)]
pub struct Pairs {
    peers: Arc<[PortId]>,
    /// New addresses of frames that leave by a port: destination and source, as on the wire.
    addresses: Option<Arc<[[u8; 12]]>>,
}

impl Pairs {
    /// `peers[port]` is where the packets of `port` go. With `rewrite`, frames that leave by a port get its address as source (a port
    /// without one: 02:00:00:00:01:*port*) and 02:00:00:00:00:*port* as destination, as DPDK's `l2fwd` does.
    pub fn new(peers: &[PortId], rewrite: Option<&[PortInfo]>) -> Self {
        let addresses = |port: &PortInfo| {
            let [high, low] = port.id.to_be_bytes();
            let source = port.mac.map_or([2, 0, 0, 1, high, low], |mac| mac.octets());
            let mut both = [2, 0, 0, 0, high, low, 0, 0, 0, 0, 0, 0];
            both[6..].copy_from_slice(&source);
            both
        };
        Self { peers: peers.into(), addresses: rewrite.map(|ports| ports.iter().map(addresses).collect()) }
    }

    fn send(&self, context: &mut Context<'_>, port: PortId, batch: &mut Batch) {
        let Some(&peer) = self.peers.get(usize::from(port)) else {
            return context.drop_batch(batch, DropReason::NoStage);
        };
        if let Some(addresses) = self.addresses.as_ref().and_then(|all| all.get(usize::from(peer))) {
            for packet in batch.iter_mut() {
                if let Some(header) = packet.data_mut().first_chunk_mut::<12>() {
                    *header = *addresses;
                }
            }
        }
        context.send_batch(peer, batch);
    }
}

impl Stage for Pairs {
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        if let Some(port) = context.in_port() {
            return self.send(context, port, batch);
        }
        // Handed over, which nobody does in this program: one at a time.
        let mut one = Batch::new();
        batch.drain_front(batch.len(), |packet| {
            let port = packet.in_port();
            let _ = one.push(packet);
            self.send(context, port, &mut one);
        });
    }
}
