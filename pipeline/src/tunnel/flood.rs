//! Head-end replication: one frame to all of a segment but where it came from.

use wirepath_pmd::drops::DropReason;
use wirepath_pmd::packet::{Frozen, Packet, Pool};

use super::stage::{Flow, GatewayTables, State};
use super::tables::{Destination, Remotes};
use crate::Context;

/// Longest frame that is copied for each destination. Up to here a copy (some tens of cycles) costs less than two counted references
/// and a second segment for the device to gather; and ARP, which most of this is, fits many times.
const COPIED: usize = 512;
/// Bytes of a longer frame that each copy has for itself, in front of the shared rest: where headers are put on and changed.
const PRIVATE: usize = 128;

/// A frame that is wanted more than once.
enum Original {
    /// Copied each time.
    Copied(Packet),
    /// Shared, but for its first bytes.
    Shared { head: [u8; PRIVATE], rest: Frozen, in_port: u16 },
}

impl Original {
    fn new(mut packet: Packet, wanted: usize) -> Self {
        let head = packet.data().first_chunk::<PRIVATE>().copied();
        match head {
            Some(head) if wanted > 1 && packet.len() > COPIED && packet.data().len() > PRIVATE => {
                let in_port = packet.in_port();
                let _ = packet.trim_front(PRIVATE);
                Self::Shared { head, rest: packet.freeze(), in_port }
            }
            _ => Self::Copied(packet),
        }
    }

    /// The last one, for which the original itself will do.
    fn last(self, pool: &Pool) -> Option<Packet> {
        match self {
            Self::Copied(packet) => Some(packet),
            shared => shared.copy(pool),
        }
    }

    /// One more; `None` if the pool is empty.
    fn copy(&self, pool: &Pool) -> Option<Packet> {
        match self {
            Self::Copied(packet) => packet.duplicate(pool),
            Self::Shared { head, rest, in_port } => {
                let mut packet = pool.take()?;
                packet.append(PRIVATE)?.copy_from_slice(head);
                packet.set_in_port(*in_port);
                packet.attach(rest).ok()
            }
        }
    }
}

impl GatewayTables {
    /// Sends a frame to all attachments of the segment but the one it came from and, if it came from one, to all remotes: what came
    /// out of a tunnel goes into none (split horizon).
    #[allow(clippy::too_many_arguments)]
    pub(super) fn flood(
        &self,
        state: &mut State,
        context: &mut Context<'_>,
        remotes: &Remotes,
        packet: Packet,
        from: Destination,
        segment: u16,
        flow: Flow,
    ) {
        let Some(members) = self.layout.segments.get(usize::from(segment)) else {
            return context.drop(packet, DropReason::NoSegment);
        };
        let is_local = matches!(from, Destination::Attachment(_));
        let locals = members.attachments.iter().map(|index| Destination::Attachment(*index)).filter(|to| *to != from);
        let overlay = members.remotes.iter().filter(|_| is_local).map(|index| Destination::Remote(*index));
        let wanted = locals.clone().count() + overlay.clone().count();
        let mut targets = locals.chain(overlay).peekable();
        if wanted == 0 {
            return context.drop(packet, DropReason::NoDestination);
        }
        if let Some(c) = state.counters.get(usize::from(segment)) {
            c.flooded.add(1);
        }
        let sender = match from {
            Destination::Attachment(index) => Some(index),
            Destination::Remote(_) => None,
        };
        let mut original = Some(Original::new(packet, wanted));
        // Only the first remote that is too small leads to a message.
        let mut told = false;
        while let Some(to) = targets.next() {
            let copy = match targets.peek() {
                Some(_) => original.as_ref().and_then(|original| original.copy(&state.pool)),
                None => original.take().and_then(|original| original.last(&state.pool)),
            };
            let Some(copy) = copy else {
                context.count_drops(DropReason::NoBuffer, 1);
                continue;
            };
            match to {
                Destination::Attachment(to) => self.deliver(state, context, copy, to),
                Destination::Remote(to) => {
                    let sender = sender.filter(|_| !told);
                    told |= remotes.list.get(to as usize).is_some_and(|remote| copy.len() > remote.max_frame);
                    self.send_to(state, context, remotes, copy, to, flow, sender);
                }
            }
        }
    }
}
