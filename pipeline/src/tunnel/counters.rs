//! Counters of the gateway's segments.

use wirepath_packet::counters::Counter;

/// A packet counter and a byte counter.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Packets.
    pub packets: Counter,
    /// Bytes of the inner frames without tunnel headers.
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

/// Counters of one thread for one segment. Only that thread writes them.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct SegmentCounters {
    /// Frames received from local attachments.
    pub local_rx: Traffic,
    /// Frames sent to local attachments.
    pub local_tx: Traffic,
    /// Frames received from tunnels.
    pub overlay_rx: Traffic,
    /// Frames sent into tunnels.
    pub overlay_tx: Traffic,
    /// Replicated frames: broadcast, multicast and unknown unicast.
    pub flooded: Counter,
    /// Replicated unicast frames with an unknown destination.
    pub unknown_unicast: Counter,
    /// Frames dropped by storm control: broadcast, multicast and unknown unicast.
    pub storm_drops: [Counter; 3],
    /// Replies to ARP and ND requests of local hosts.
    pub neighbour_replies: Counter,
    /// Copies of frames for the mirror.
    pub mirrored: Counter,
    /// Frames too long for the underlay.
    pub too_big: Counter,
    /// ICMP messages sent about frames that were too long.
    pub icmp_too_big: Counter,
    /// Fragments of tunnel packets that were longer than the path takes.
    pub outer_fragments: Counter,
    /// Packets that the router took from the segment.
    pub routed_in: Traffic,
    /// Packets that the router sent in the segment.
    pub routed_out: Traffic,
    /// ICMP errors that the router sent in the segment.
    pub icmp_errors: Counter,
    /// Segments of TCP whose MSS was lowered.
    pub mss_clamped: Counter,
    /// Frames sent into tunnels whose outer headers the NIC adds.
    pub nic_encapsulated: Counter,
    /// Frames received from tunnels whose outer headers the NIC removed.
    pub nic_decapsulated: Counter,
}

/// Counters of a segment, summed over all threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentStats {
    /// Packets and bytes received from local attachments.
    pub local_rx: (u64, u64),
    /// Packets and bytes sent to local attachments.
    pub local_tx: (u64, u64),
    /// Packets and bytes received from tunnels.
    pub overlay_rx: (u64, u64),
    /// Packets and bytes sent into tunnels.
    pub overlay_tx: (u64, u64),
    /// Replicated frames.
    pub flooded: u64,
    /// Unicast frames with an unknown destination.
    pub unknown_unicast: u64,
    /// Frames dropped by storm control: broadcast, multicast and unknown unicast.
    pub storm_drops: [u64; 3],
    /// Replies to ARP and ND requests of local hosts.
    pub neighbour_replies: u64,
    /// Copies of frames for the mirror.
    pub mirrored: u64,
    /// Frames too long for the underlay.
    pub too_big: u64,
    /// ICMP messages sent about frames that were too long.
    pub icmp_too_big: u64,
    /// Fragments of tunnel packets that were longer than the path takes.
    pub outer_fragments: u64,
    /// Packets and bytes that the router took from the segment.
    pub routed_in: (u64, u64),
    /// Packets and bytes that the router sent in the segment.
    pub routed_out: (u64, u64),
    /// ICMP errors that the router sent in the segment.
    pub icmp_errors: u64,
    /// Segments of TCP whose MSS was lowered.
    pub mss_clamped: u64,
    /// Frames sent into tunnels whose outer headers the NIC adds.
    pub nic_encapsulated: u64,
    /// Frames received from tunnels whose outer headers the NIC removed.
    pub nic_decapsulated: u64,
}

impl SegmentStats {
    /// Sums the counters of all threads.
    pub fn of(counters: &[SegmentCounters]) -> Self {
        let mut sum = Self::default();
        let traffic = |sum: &mut (u64, u64), t: &Traffic| *sum = (sum.0 + t.packets.get(), sum.1 + t.bytes.get());
        for counters in counters {
            traffic(&mut sum.local_rx, &counters.local_rx);
            traffic(&mut sum.local_tx, &counters.local_tx);
            traffic(&mut sum.overlay_rx, &counters.overlay_rx);
            traffic(&mut sum.overlay_tx, &counters.overlay_tx);
            traffic(&mut sum.routed_in, &counters.routed_in);
            traffic(&mut sum.routed_out, &counters.routed_out);
            sum.icmp_errors += counters.icmp_errors.get();
            sum.mss_clamped += counters.mss_clamped.get();
            sum.flooded += counters.flooded.get();
            sum.unknown_unicast += counters.unknown_unicast.get();
            sum.storm_drops = std::array::from_fn(|kind| sum.storm_drops[kind] + counters.storm_drops[kind].get());
            sum.mirrored += counters.mirrored.get();
            sum.neighbour_replies += counters.neighbour_replies.get();
            sum.too_big += counters.too_big.get();
            sum.icmp_too_big += counters.icmp_too_big.get();
            sum.outer_fragments += counters.outer_fragments.get();
            sum.nic_encapsulated += counters.nic_encapsulated.get();
            sum.nic_decapsulated += counters.nic_decapsulated.get();
        }
        sum
    }
}
