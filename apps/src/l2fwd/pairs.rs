use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use wirepath_packet::Batch;
use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_pipeline::{Context, Control, ControlPlane, PortInfo, Stage};
use wirepath_pmd::port::PortEvent;
use wirepath_wire::MacAddr;

/// Ethernet address that the control thread may change while workers read it.
#[derive(Debug)]
struct CurrentMac(AtomicU64);

impl CurrentMac {
    /// Creates an address.
    fn new(mac: MacAddr) -> Self {
        Self(AtomicU64::new(mac.to_u64()))
    }

    /// Returns the address.
    #[inline(always)]
    fn get(&self) -> MacAddr {
        MacAddr::from_u64(self.0.load(Ordering::Relaxed))
    }

    /// Changes the address.
    fn set(&self, mac: MacAddr) {
        self.0.store(mac.to_u64(), Ordering::Relaxed);
    }
}

/// New destination and source address of frames that leave by a port.
#[derive(Debug)]
struct NewAddresses {
    destination: MacAddr,
    source: CurrentMac,
}

/// Sends packets received by a port to its peer port.
#[derive(Clone, Debug)]
pub struct Pairs {
    peers: Arc<[PortId]>,
    /// New addresses for each port; `None` if frames keep theirs.
    addresses: Option<Arc<[NewAddresses]>>,
}

/// The control-thread part of [`Pairs`]: follows the addresses of the ports.
#[derive(Clone, Debug)]
pub struct PairsControl {
    addresses: Option<Arc<[NewAddresses]>>,
}

impl Pairs {
    /// Creates the stage. `peers[port]` is the output port for packets of `port`. With `rewrite`, frames
    /// leave with the port's address as source and 02:00:00:00:00:*port* as destination, like DPDK's `l2fwd`.
    /// A port without an address uses 02:00:00:00:01:*port*.
    pub fn new(peers: &[PortId], rewrite: Option<&[PortInfo]>) -> Self {
        let addresses = |port: &PortInfo| {
            let [high, low] = port.id.number().to_be_bytes();
            let source = port.mac.unwrap_or(MacAddr::new(2, 0, 0, 1, high, low));
            NewAddresses { destination: MacAddr::new(2, 0, 0, 0, high, low), source: CurrentMac::new(source) }
        };
        Self { peers: peers.into(), addresses: rewrite.map(|ports| ports.iter().map(addresses).collect()) }
    }

    /// Returns the control part, for the control thread.
    pub fn control(&self) -> PairsControl {
        PairsControl { addresses: self.addresses.clone() }
    }

    fn send(&self, context: &mut Context<'_>, port: PortId, batch: &mut Batch) {
        let Some(&peer) = self.peers.get(port.index()) else {
            return context.drop_batch(batch, DropReason::NoOutputPort);
        };
        if let Some(addresses) = self.addresses.as_ref().and_then(|all| all.get(peer.index())) {
            let mut both = [0; 12];
            both[..6].copy_from_slice(&addresses.destination.octets());
            both[6..].copy_from_slice(&addresses.source.get().0);
            for packet in batch.iter_mut() {
                if let Some(header) = packet.data_mut().first_chunk_mut::<12>() {
                    *header = both;
                }
            }
        }
        if context.is_tracing() {
            let (from, to) = (context.port_name(port), context.port_name(peer));
            context.trace("pairs", |text| write!(text, "port {from} is joined with port {to}"));
        }
        context.send_batch(peer, batch);
    }
}

impl Stage for Pairs {
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        if let Some(port) = context.in_port() {
            return self.send(context, port, batch);
        }
        // Another worker handed the packets over, which does not happen in this program. They are sent one by
        // one.
        let mut one = Batch::new();
        batch.drain_front(batch.len(), |packet| {
            let Some(port) = packet.in_port() else { return context.drop(packet, DropReason::NoOutputPort) };
            let _ = one.push(packet);
            self.send(context, port, &mut one);
        });
    }
}

impl Control for PairsControl {
    fn port_event(&mut self, port: PortId, event: &PortEvent, _: &mut ControlPlane) {
        if let PortEvent::Address(mac) = event
            && let Some(addresses) = self.addresses.as_ref().and_then(|all| all.get(port.index()))
        {
            addresses.source.set(*mac);
        }
    }
}
