//! Common parts of the drivers that own the queues of a NIC.
//!
//! [`device::NicDevice`] manages the life cycle of a port: it opens the device, creates queues, hands them to
//! workers, and recreates broken ones. After a loss of the device, `port::reattach` starts it again.
//! [`tx_queue::NicTxQueue`] and [`rx_queue::NicRxQueue`] are the workers' side of the queues. A driver provides a
//! [`nic::Nic`] for capabilities and verbs objects, and its rings for descriptors and completions.

pub(crate) mod device;
mod log_limit;
pub(crate) mod mr_table;
pub(crate) mod nic;
pub(crate) mod open_device;
pub(crate) mod port_counter;
pub(crate) mod post_probe;
pub(crate) mod probe;
pub(crate) mod quarantine;
pub(crate) mod queue_fault;
pub(crate) mod registered_memory;
pub(crate) mod ring_handoff;
pub(crate) mod rules;
pub(crate) mod rx_interrupt;
pub(crate) mod rx_queue;
pub(crate) mod shared_memory;
pub(crate) mod shared_nic;
pub(crate) mod steering;
#[cfg(any(test, fuzzing))]
pub(crate) mod test_support;
pub(crate) mod tso;
pub(crate) mod tx_queue;

/// Bytes of an Ethernet header.
pub(crate) const ETHERNET_HEADER: usize = 14;
/// Bytes of two VLAN tags, which frames may have beyond the MTU.
const VLAN_TAG_BYTES: usize = 8;
/// Smallest number of ring entries.
pub(crate) const MIN_DEPTH: u32 = 64;

/// Returns the length in bytes of the longest frame at this MTU, without FCS.
pub(crate) fn max_frame_len(mtu: u16) -> usize {
    usize::from(mtu) + ETHERNET_HEADER + VLAN_TAG_BYTES
}

/// Returns the entries of a ring for `wanted` packets: a power of two from [`MIN_DEPTH`] to `max`, which is a
/// power of two.
pub(crate) fn ring_depth(wanted: u32, max: u32) -> u32 {
    wanted.max(MIN_DEPTH).next_power_of_two().min(max)
}

/// Default RSS hash key (Microsoft, "Verifying the RSS Hash Calculation").
pub(crate) const RSS_KEY: [u8; 40] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca, 0x2b,
    0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac,
    0x01, 0xfa,
];
