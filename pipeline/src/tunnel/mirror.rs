//! Mirror of a segment: a copy of each received frame goes to a port.
//!
//! Each frame of a segment enters the gateway once, from a local port or from a tunnel, and is copied there, on the
//! slow path.

use wirepath_packet::Packet;
use wirepath_packet::drops::DropReason;
use wirepath_packet::superframe::longest_frame;
use wirepath_pmd::port::PortId;
use wirepath_settings::{Key, Text};

use super::headers::{ETHERNET_LEN, VLAN_TAG_LEN};
use super::stage::{StageState, View};
use crate::{Context, PortInfo};

pub(super) const MIRROR: Key<Text> = Key::text("mirror", "name of a port")
    .absent("no copies")
    .about("Port that gets a copy of each frame of the segment, without tunnel headers. No segment may use it.");

/// Port that gets the copies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mirror {
    port: PortId,
    /// Longest frame that the port sends, in bytes.
    max_frame: usize,
}

impl Mirror {
    pub(super) fn new(port: &PortInfo) -> Self {
        Self { port: port.id, max_frame: usize::from(port.mtu) + ETHERNET_LEN + VLAN_TAG_LEN }
    }
}

impl View<'_> {
    /// Sends a copy of a frame to the mirror of its segment, if it has one.
    pub(super) fn mirror(&self, state: &StageState, context: &mut Context<'_>, packet: &Packet, segment: u16) {
        let mirror = self.layout.segments.get(usize::from(segment)).and_then(|segment| segment.mirror);
        let Some(Mirror { port, max_frame }) = mirror else { return };
        context.count_copies(1);
        let Some(mut copy) = packet.duplicate(&state.pool) else { return context.count_drops(DropReason::NoBuffer, 1) };
        if longest_frame(&copy) > max_frame {
            return context.drop(copy, DropReason::TooBigForMtu);
        }
        if let Some(c) = self.layout.counters(segment, state.worker) {
            c.mirrored.add(1);
        }
        copy.set_out_port(port);
        context.send(port, copy);
    }
}
