//! What the segments of a gateway count.

use std::sync::Arc;

use wirepath_pmd::counters::Counter;

/// Packets and bytes.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Packets.
    pub packets: Counter,
    /// Bytes of the inner frames, without tunnel headers.
    pub bytes: Counter,
}

impl Traffic {
    /// Adds packets.
    #[inline(always)]
    pub fn add(&self, packets: usize, bytes: usize) {
        self.packets.add(packets as u64);
        self.bytes.add(bytes as u64);
    }
}

/// What one worker did for one segment: written by that worker only.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct SegmentCounters {
    /// From local stations.
    pub local_rx: Traffic,
    /// To local stations.
    pub local_tx: Traffic,
    /// Out of tunnels.
    pub overlay_rx: Traffic,
    /// Into tunnels.
    pub overlay_tx: Traffic,
    /// Frames that were replicated: broadcast, multicast and unknown unicast.
    pub flooded: Counter,
    /// Of these: unicast frames whose destination was not known.
    pub unknown_unicast: Counter,
    /// Frames too long for the underlay.
    pub too_big: Counter,
    /// ICMP messages about that.
    pub told_too_big: Counter,
    /// Of those into tunnels: the NIC puts the headers on.
    pub nic_encapsulated: Counter,
    /// Of those out of tunnels: the NIC has taken the headers off.
    pub nic_decapsulated: Counter,
}

/// The same as plain numbers, over all workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentStats {
    /// Packets and bytes from local stations.
    pub local_rx: (u64, u64),
    /// Packets and bytes to local stations.
    pub local_tx: (u64, u64),
    /// Packets and bytes out of tunnels.
    pub overlay_rx: (u64, u64),
    /// Packets and bytes into tunnels.
    pub overlay_tx: (u64, u64),
    /// Frames that were replicated.
    pub flooded: u64,
    /// Unicast frames whose destination was not known.
    pub unknown_unicast: u64,
    /// Frames too long for the underlay.
    pub too_big: u64,
    /// ICMP messages about that.
    pub told_too_big: u64,
    /// Of those into tunnels: the NIC puts the headers on.
    pub nic_encapsulated: u64,
    /// Of those out of tunnels: the NIC has taken the headers off.
    pub nic_decapsulated: u64,
}

/// The counters of all workers.
#[derive(Clone, Debug)]
pub struct GatewayCounters {
    workers: Vec<Arc<[SegmentCounters]>>,
}

impl GatewayCounters {
    /// All zero.
    pub fn new(workers: usize, segments: usize) -> Self {
        let one = || (0..segments).map(|_| SegmentCounters::default()).collect();
        Self { workers: (0..workers).map(|_| one()).collect() }
    }

    /// Those that one worker writes.
    pub fn worker(&self, index: usize) -> Option<Arc<[SegmentCounters]>> {
        self.workers.get(index).cloned()
    }

    /// Sum over the workers for one segment.
    pub fn segment(&self, index: usize) -> SegmentStats {
        let mut sum = SegmentStats::default();
        let traffic = |sum: &mut (u64, u64), t: &Traffic| *sum = (sum.0 + t.packets.get(), sum.1 + t.bytes.get());
        for counters in self.workers.iter().filter_map(|worker| worker.get(index)) {
            traffic(&mut sum.local_rx, &counters.local_rx);
            traffic(&mut sum.local_tx, &counters.local_tx);
            traffic(&mut sum.overlay_rx, &counters.overlay_rx);
            traffic(&mut sum.overlay_tx, &counters.overlay_tx);
            sum.flooded += counters.flooded.get();
            sum.unknown_unicast += counters.unknown_unicast.get();
            sum.too_big += counters.too_big.get();
            sum.told_too_big += counters.told_too_big.get();
            sum.nic_encapsulated += counters.nic_encapsulated.get();
            sum.nic_decapsulated += counters.nic_decapsulated.get();
        }
        sum
    }
}
