//! Head-end replication: sends one frame to all members of a segment except its origin.

use std::fmt::Write as _;

use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::superframe::longest_frame;
use wirepath_packet::{Packet, Pool, PortId, SharedSegment};

use super::report::STAGE;
use super::stage::{Flow, StageState, View};
use super::tables::{Destination, Remotes};
use crate::Context;

/// Longest frame that is copied for each destination. Up to this length a copy (some tens of cycles) costs
/// less than two reference counts and a second segment for the device to gather. ARP, which is most of the
/// flooded traffic, is far shorter.
const MAX_COPIED_FRAME: usize = 512;
/// Bytes of a longer frame that each copy owns, in front of the shared rest. Headers are added and changed
/// there.
const COPIED_HEAD: usize = 128;

/// Source of the copies of a flooded frame.
enum FloodSource {
    /// The frame is copied for each destination.
    Copied(Packet),
    /// The frame is shared except for its first bytes.
    Shared { head: [u8; COPIED_HEAD], rest: SharedSegment, in_port: Option<PortId>, superframe: Option<Superframe> },
}

/// Offload requests of a superframe.
#[derive(Clone, Copy)]
struct Superframe {
    flags: Flags,
    mss: u16,
}

impl FloodSource {
    fn new(mut packet: Packet, wanted: usize) -> Self {
        let head = packet.data().first_chunk::<COPIED_HEAD>().copied();
        match head {
            Some(head) if wanted > 1 && packet.len() > MAX_COPIED_FRAME && packet.data().len() > COPIED_HEAD => {
                let in_port = packet.in_port();
                let is_superframe = packet.flags().contains(Flags::TX_SEGMENT);
                let superframe = is_superframe.then(|| Superframe { flags: packet.flags(), mss: packet.mss() });
                let _ = packet.trim_front(COPIED_HEAD);
                Self::Shared { head, rest: packet.into_shared(), in_port, superframe }
            }
            _ => Self::Copied(packet),
        }
    }

    /// Returns the last copy, which reuses the original frame.
    fn last(self, pool: &Pool) -> Option<Packet> {
        match self {
            Self::Copied(packet) => Some(packet),
            shared => shared.copy(pool),
        }
    }

    /// Returns a copy; `None` if the pool is empty.
    fn copy(&self, pool: &Pool) -> Option<Packet> {
        match self {
            Self::Copied(packet) => packet.duplicate(pool),
            Self::Shared { head, rest, in_port, superframe } => {
                let mut packet = pool.take()?;
                packet.append(COPIED_HEAD)?.copy_from_slice(head);
                packet.set_in_port(*in_port);
                if let Some(Superframe { flags, mss }) = *superframe {
                    packet.set_flags(flags);
                    packet.set_mss(mss);
                }
                packet.append_shared(rest).ok()
            }
        }
    }
}

impl View<'_> {
    /// Sends a frame to all attachments of the segment except its origin, and from an isolated attachment to no other
    /// isolated one. If the frame came from an attachment or the router, it also goes to all remotes. A frame from a
    /// tunnel goes to no tunnel (split horizon).
    #[allow(clippy::too_many_arguments)]
    pub(super) fn flood(
        &self,
        state: &mut StageState,
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
        let is_local = !matches!(from, Destination::Remote(_));
        let reaches = |to: u32| match from {
            Destination::Attachment(from) => from != to && !self.layout.are_isolated(from, to),
            Destination::Remote(_) | Destination::Group(_) | Destination::Router => true,
        };
        let locals = members.attachments.iter().copied().filter(|to| reaches(*to)).map(Destination::Attachment);
        let overlay = members.remotes.iter().filter(|_| is_local).map(|index| Destination::Remote(*index));
        let wanted = locals.clone().count() + overlay.clone().count();
        let mut targets = locals.chain(overlay).peekable();
        if wanted == 0 {
            return context.drop(packet, DropReason::NoDestination);
        }
        if let Some(c) = self.layout.counters(segment, state.worker) {
            c.flooded.add(1);
        }
        let sender = match from {
            Destination::Attachment(index) => Some(index),
            Destination::Remote(_) | Destination::Group(_) | Destination::Router => None,
        };
        context.trace(STAGE, |text| write!(text, "flooded to {wanted} destinations"));
        context.count_copies(wanted - 1);
        let mut original = Some(FloodSource::new(packet, wanted));
        // Only the first remote whose MTU is too small causes an ICMP message.
        let mut icmp_sent = false;
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
                    let sender = sender.filter(|_| !icmp_sent);
                    icmp_sent |= remotes
                        .list
                        .get(to as usize)
                        .is_some_and(|remote| longest_frame(&copy) > remote.longest_frame());
                    self.send_to(state, context, remotes, copy, to, flow, sender);
                }
                // Groups and the router are not in the lists of members.
                Destination::Group(_) | Destination::Router => context.drop(copy, DropReason::NoDestination),
            }
        }
    }
}
