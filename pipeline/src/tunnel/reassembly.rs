//! Reassembly of received fragments of tunnel packets.
//!
//! Fragments count only from remotes and next hops. All fragments between two addresses go to one worker, because
//! receive queues may spread them: those behind the first one have no ports. The bounds of memory and time are those of
//! [`Reassembler`](wirepath_packet::reassembly::Reassembler), for each worker.

use std::net::IpAddr;
use std::time::Duration;

use wirepath_packet::Packet;
use wirepath_packet::drops::DropReason;
use wirepath_packet::reassembly::Reassembled;
use wirepath_settings::{Flag, Key, WithDefault};
use wirepath_wire::HeaderOffsets;

use super::report::STAGE;
use super::stage::{StageState, View};
use super::tables::Remotes;
use crate::Context;

/// Key `reassembly` of the underlay.
pub(super) const REASSEMBLY: Key<WithDefault<Flag>> = Key::flag("reassembly")
    .default(true)
    .about("Joins fragments of tunnel packets from remotes. Without it they are dropped as `outer_fragment`.");
/// Interval at which packets are given up whose fragments are missing.
pub(super) const EXPIRY_INTERVAL: Duration = Duration::from_secs(1);

impl View<'_> {
    /// Decides about a fragment to an address of the gateway: `None` to take it.
    pub(super) fn refuse_fragment(&self, context: &Context<'_>, from: IpAddr) -> Option<DropReason> {
        if !self.layout.underlay.reassembly {
            return Some(DropReason::OuterFragment);
        }
        let known = self.known_hosts.read(context.guard());
        (!known.addresses.contains(&from)).then_some(DropReason::UnknownRemote)
    }

    /// Takes a fragment. A packet that is complete is decapsulated.
    #[cold]
    pub(super) fn reassemble(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        remotes: &Remotes,
        mut packet: Packet,
        layers: &HeaderOffsets,
        (from, to): (IpAddr, IpAddr),
    ) {
        let worker = worker_of(from, to, self.layout.workers());
        if worker != state.worker {
            if let Some(id) = self.layout.underlay.vlan {
                // The worker removed the tag before, and the other one expects it again.
                packet.set_vlan(id);
            }
            return context.enqueue_to_worker(worker, packet);
        }
        let found = state.reassembler.insert(&packet, layers, context.now(), &state.pool);
        self.count_lost(state, context);
        match found {
            Reassembled::Refused(reason) => context.drop(packet, reason),
            Reassembled::Held => {
                context.count_joined();
                context.trace(STAGE, |text| std::fmt::Write::write_str(text, "held until the other fragments arrive"));
            }
            Reassembled::Whole(whole) => {
                context.count_joined();
                context.count_generated();
                context.trace(STAGE, |text| std::fmt::Write::write_str(text, "the last fragment of a packet"));
                drop(packet);
                self.decapsulate_one(state, context, remotes, whole);
            }
        }
    }

    /// Gives up packets whose fragments are missing.
    pub(super) fn expire_fragments(&self, state: &mut StageState, context: &mut Context<'_>) {
        state.reassembler.expire(context.now());
        self.count_lost(state, context);
    }

    /// Counts fragments that were held and are lost.
    fn count_lost(&self, state: &mut StageState, context: &mut Context<'_>) {
        for (reason, count) in state.reassembler.take_lost() {
            // They were counted as joined when they arrived.
            (0..count).for_each(|_| context.count_generated());
            context.count_drops(reason, count);
        }
    }
}

/// Returns the worker that joins the fragments between two addresses.
fn worker_of(from: IpAddr, to: IpAddr, workers: usize) -> usize {
    let bits = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => u64::from(ip.to_bits()),
        IpAddr::V6(ip) => ip.to_bits() as u64 ^ (ip.to_bits() >> 64) as u64,
    };
    let mixed = (bits(from) ^ bits(to).rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 32) as usize % workers.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_spread_over_workers() {
        let counts = (0..1000u32).fold([0; 4], |mut counts, n| {
            let from = IpAddr::from((0x0a09_0000 + n).to_be_bytes());
            counts[worker_of(from, IpAddr::from([10, 9, 0, 1]), 4)] += 1;
            counts
        });
        assert!(counts.iter().all(|count| (150..350).contains(count)), "{counts:?}");
    }
}
