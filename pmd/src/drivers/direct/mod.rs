//! What drivers have in common that own the queues of a NIC through direct verbs.
//!
//! [`device::DirectDevice`] is the life of a port: it opens the device, makes queues and hands them to workers, mends them while the
//! program runs, and waits for a device that is reset. [`send::Sender`] and [`receive::Receiver`] are the workers' ends. A driver adds a
//! [`device::Nic`], which knows capabilities and verbs objects, and its rings, which know descriptors and completions.

pub mod attach;
pub(crate) mod bell;
pub(crate) mod device;
pub(crate) mod exchange;
pub(crate) mod fault;
pub(crate) mod find;
pub(crate) mod graves;
#[cfg(any(test, fuzzing))]
pub(crate) mod hostile;
pub(crate) mod keys;
pub(crate) mod opened;
pub(crate) mod receive;
pub(crate) mod registered;
pub(crate) mod rules;
pub(crate) mod send;
pub(crate) mod steering;

/// Bytes of an Ethernet header.
pub(crate) const SHORTEST: usize = 14;
/// VLAN tags that may come on top of the MTU.
const TAGS: usize = 8;
/// Fewest entries of a ring that are made.
pub(crate) const MIN_DEPTH: u32 = 64;

/// Bytes of the longest frame at this MTU.
pub(crate) fn longest_frame(mtu: u16) -> usize {
    usize::from(mtu) + SHORTEST + TAGS
}

/// The hash key of Microsoft's specification of receive-side scaling.
pub(crate) const RSS_KEY: [u8; 40] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca, 0x2b,
    0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac,
    0x01, 0xfa,
];
