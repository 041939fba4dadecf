//! Fragments of the outer IP packet, for tunnel packets that are longer than the path takes.
//!
//! In a segment with `outer_fragmentation`, packets that are longer than the path MTU leave as fragments. They have the
//! flag DF cleared over IPv4, and a Fragment header over IPv6. Shorter packets keep the flag DF, so routers with a
//! smaller MTU go on to report it ([`super::path_mtu`]). The hosts of the segment then need not know the MTU of the
//! path.

use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, Ordering};

use wirepath_packet::Packet;
use wirepath_packet::drops::DropReason;
use wirepath_packet::fragment::Fragmenter;
use wirepath_settings::{Flag, Key, WithDefault};
use wirepath_wire::build::OuterHeaders;

use super::headers::ETHERNET_LEN;
use super::stage::{StageState, View};
use super::tables::Remote;
use crate::Context;

/// Key `outer_fragmentation` of a segment.
pub(super) const OUTER_FRAGMENTATION: Key<WithDefault<Flag>> = Key::flag("outer_fragmentation").default(false).about(
    "Sends tunnel packets that are longer than the path takes as IP fragments, instead of an ICMP error to the sender.",
);
/// Largest inner IP packet in bytes of a segment with fragments, unless its `mtu` is smaller.
pub(super) const MAX_INNER_MTU: u16 = 9202;
/// Counters for identifications. Addresses that share one only use its numbers up sooner.
const COUNTERS: usize = 256;

/// Identifications of fragmented packets, which all workers share.
///
/// The packets to an address have consecutive numbers from an unpredictable one on (RFC 7739 section 5.3).
/// Over IPv4 they repeat after 65 536 packets. A fast flow with losses can then be joined from different
/// packets (RFC 4963). Over IPv6 they have 32 bits.
#[derive(Debug)]
pub(super) struct FragmentIds {
    counters: Box<[AtomicU32]>,
    hasher: RandomState,
}

impl FragmentIds {
    pub(super) fn new() -> Self {
        Self { counters: (0..COUNTERS).map(|_| AtomicU32::new(0)).collect(), hasher: RandomState::new() }
    }

    /// Returns the identification of the next packet to an address.
    fn next(&self, remote: IpAddr) -> u32 {
        let hash = self.hasher.hash_one(remote);
        let counter = &self.counters[hash as usize % COUNTERS];
        ((hash >> 32) as u32).wrapping_add(counter.fetch_add(1, Ordering::Relaxed))
    }

    /// Prepares to divide a tunnel packet to a remote into fragments that the path takes.
    pub(super) fn divide(
        &self,
        packet: Packet,
        template: &OuterHeaders,
        remote: &Remote,
    ) -> Result<Fragmenter, (Packet, DropReason)> {
        // The Ethernet header of the frames of a layer-3 tunnel is not carried.
        let not_carried = if template.carries_packets() { ETHERNET_LEN } else { 0 };
        let mtu = (remote.max_frame + template.len() - template.l3()).saturating_sub(not_carried);
        Fragmenter::of_own(packet, template.l3(), mtu, self.next(remote.address))
    }
}

impl View<'_> {
    /// Sends a tunnel packet to a remote as fragments.
    #[cold]
    pub(super) fn send_outer_fragments(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        packet: Packet,
        template: &OuterHeaders,
        remote: &Remote,
    ) {
        let mut fragments = match self.fragment_ids.divide(packet, template, remote) {
            Ok(fragments) => fragments,
            Err((packet, reason)) => return context.drop(packet, reason),
        };
        let counters = self.layout.counters(remote.segment, state.worker);
        // One of the fragments stands for the packet.
        context.count_copies(fragments.remaining().saturating_sub(1));
        while let Some(fragment) = fragments.next_fragment(&state.pool) {
            match fragment {
                Ok(fragment) => {
                    if let Some(c) = counters {
                        c.outer_fragments.add(1);
                    }
                    context.send(self.layout.underlay.port, fragment);
                }
                Err(reason) => context.count_drops(reason, 1),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn identifications_differ_and_start_anywhere() {
        let remote = IpAddr::from([10, 9, 0, 2]);
        let ids = FragmentIds::new();
        let found: HashSet<u32> = (0..10_000).map(|_| ids.next(remote)).collect();
        assert_eq!(found.len(), 10_000);
        let starts: HashSet<u32> = (0..100).map(|_| FragmentIds::new().next(remote)).collect();
        assert!(starts.len() > 95 && starts.iter().any(|id| *id > u32::MAX / 2), "{starts:?}");
    }
}
