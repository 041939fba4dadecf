//! Completion-queue entries.

use crate::table::bits;

/// Bytes of an entry.
pub const CQE_BYTES: u32 = 64;
/// Offset of the word with queue number and owner bits ([`CqeTail`]), written last.
pub const CQE_TAIL: u32 = 60;
/// Values of the owner bits before they start again.
pub const OWNER_VALUES: u32 = 8;

/// Owner bits of the entry that a free-running entry counter stands at. The counter starts at `count`, so the first pass has owner 1
/// and zeroed memory is empty.
#[inline]
pub const fn owner(counter: u32, count: u32) -> u32 {
    (counter / count) % OWNER_VALUES
}

bits! {
    /// First word of an entry.
    struct CqeHead: u32 {
        /// `CQE_RX_*` or `CQE_TX_*`.
        cqe_type, with_cqe_type: 0, 6;
        /// [`CLIENT_ETHERNET`].
        client_type, with_client_type: 6, 2;
        /// What went wrong, for people.
        vendor_error, with_vendor_error: 8, 24;
    }

    /// Last word of an entry.
    struct CqeTail: u32 {
        /// Number of the work queue.
        queue, with_queue: 0, 24;
        /// A send queue.
        is_sq, with_is_sq: 24, 1;
        /// See [`owner`].
        owner, with_owner: 29, 3;
    }

    /// Second word of a receive completion.
    struct RxFlags: u32 {
        /// VLAN that was taken off.
        vlan_id, with_vlan_id: 0, 12;
        /// There was one.
        vlan_present, with_vlan_present: 12, 1;
        /// Outer IPv4 header checksum good.
        outer_ip_ok, with_outer_ip_ok: 13, 1;
        /// Outer IPv4 header checksum bad.
        outer_ip_bad, with_outer_ip_bad: 14, 1;
        /// `HASH_*`.
        hash_type, with_hash_type: 16, 9;
        /// IPv4 header checksum good.
        ip_ok, with_ip_ok: 25, 1;
        /// IPv4 header checksum bad.
        ip_bad, with_ip_bad: 26, 1;
        /// TCP checksum good.
        tcp_ok, with_tcp_ok: 27, 1;
        /// TCP checksum bad.
        tcp_bad, with_tcp_bad: 28, 1;
        /// UDP checksum good.
        udp_ok, with_udp_ok: 29, 1;
        /// UDP checksum bad.
        udp_bad, with_udp_bad: 30, 1;
    }

    /// Third word of a transmit completion.
    struct TxOffset: u32 {
        /// Offset in the list of entries.
        sgl, with_sgl: 0, 5;
        /// Offset of the WQE, in units.
        wqe, with_wqe: 5, 27;
    }
}

/// [`CqeHead::client_type`] of the Ethernet function.
pub const CLIENT_ETHERNET: u32 = 1;

/// Offset of [`RxFlags`].
pub const RX_FLAGS: u32 = 4;
/// Offset of the first packet's record: u16 length, 6 reserved bytes, u32 hash.
pub const RX_PACKETS: u32 = 8;
/// Bytes of a packet's record.
pub const RX_PACKET_BYTES: u32 = 12;
/// Most packets in an entry.
pub const RX_COALESCED: u32 = 4;
/// Offset of the work queue's position.
pub const RX_WQE_OFFSET: u32 = 56;
/// Offset of [`TxOffset`].
pub const TX_OFFSET: u32 = 8;

/// One packet.
pub const CQE_RX_OKAY: u32 = 1;
/// Up to [`RX_COALESCED`] packets; the list ends at length 0.
pub const CQE_RX_COALESCED_4: u32 = 2;
/// A fence has passed.
pub const CQE_RX_OBJECT_FENCE: u32 = 3;
/// A packet that did not fit into its buffers.
pub const CQE_RX_TRUNCATED: u32 = 4;

/// Sent.
pub const CQE_TX_OKAY: u32 = 32;
/// Source address refused.
pub const CQE_TX_SA_DROP: u32 = 33;
/// Longer than the MTU.
pub const CQE_TX_MTU_DROP: u32 = 34;
/// The OOB contradicts the queue or itself.
pub const CQE_TX_INVALID_OOB: u32 = 35;
/// Ethernet type refused.
pub const CQE_TX_INVALID_ETH_TYPE: u32 = 36;
/// The headers are not what the OOB says.
pub const CQE_TX_HDR_PROCESSING_ERROR: u32 = 37;
/// Function disabled.
pub const CQE_TX_VF_DISABLED: u32 = 38;
/// No such virtual port.
pub const CQE_TX_VPORT_IDX_OUT_OF_RANGE: u32 = 39;
/// Virtual port disabled.
pub const CQE_TX_VPORT_DISABLED: u32 = 40;
/// A VLAN tag where none is allowed.
pub const CQE_TX_VLAN_TAGGING_VIOLATION: u32 = 41;
/// The descriptor or its memory was wrong; the queue is stopped.
pub const CQE_TX_GDMA_ERR: u32 = 42;

/// Hashed: addresses of IPv4.
pub const HASH_IPV4: u32 = 1;
/// Hashed: addresses and ports of TCP over IPv4.
pub const HASH_TCP_IPV4: u32 = 2;
/// Hashed: addresses and ports of UDP over IPv4.
pub const HASH_UDP_IPV4: u32 = 4;
/// Hashed: addresses of IPv6.
pub const HASH_IPV6: u32 = 8;
/// Hashed: addresses and ports of TCP over IPv6.
pub const HASH_TCP_IPV6: u32 = 0x10;
/// Hashed: addresses and ports of UDP over IPv6.
pub const HASH_UDP_IPV6: u32 = 0x20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_follow_the_passes_of_the_ring() {
        // A ring of 3: counters 3, 4, 5 are the first pass.
        assert_eq!([3, 4, 5, 6].map(|n| owner(n, 3)), [1, 1, 1, 2]);
        assert_eq!(owner(8 * 3, 3), 0);
        assert_eq!(CqeTail::default().with_owner(7).with_is_sq(1).with_queue(0x12_3456).0, 0xe112_3456);
    }

    #[test]
    fn flags_lie_where_the_field_table_says() {
        assert_eq!(RxFlags::default().with_hash_type(0x1ff).0, 0x1ff << 16);
        assert_eq!(RxFlags(1 << 30).udp_bad(), 1);
        assert_eq!(CqeHead::default().with_cqe_type(CQE_TX_OKAY).with_client_type(CLIENT_ETHERNET).0, 0x60);
        // What does not fit is cut off and leaves the other fields alone.
        assert_eq!(RxFlags::default().with_vlan_id(0xffff).0, 0xfff);
    }
}
