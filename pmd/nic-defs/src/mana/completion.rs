//! Completion-queue entries (CQEs).

use crate::table::bits;

/// Bytes of a CQE.
pub const CQE_BYTES: u32 = 64;
/// Byte offset of [`CqeTail`], which holds queue number and owner bits. The device writes it last.
pub const CQE_TAIL: u32 = 60;
/// Number of values of the owner bits; after them the owner bits wrap.
pub const OWNER_VALUES: u32 = 8;

/// Returns the owner bits of the CQE at a free-running entry counter, in a ring of `count` entries.
///
/// The counter starts at `count`. The first pass therefore has owner 1, and zeroed memory holds no valid CQE.
#[inline]
pub const fn owner(counter: u32, count: u32) -> u32 {
    (counter / count) % OWNER_VALUES
}

bits! {
    /// First word of a CQE.
    struct CqeHead: u32 {
        /// `CQE_RX_*` or `CQE_TX_*`.
        cqe_type, with_cqe_type: 0, 6;
        /// [`CLIENT_ETHERNET`].
        client_type, with_client_type: 6, 2;
        /// Vendor error code, for diagnostics.
        vendor_error, with_vendor_error: 8, 24;
    }

    /// Last word of a CQE.
    struct CqeTail: u32 {
        /// Number of the work queue.
        queue, with_queue: 0, 24;
        /// 1 if the work queue is a send queue.
        is_sq, with_is_sq: 24, 1;
        /// Owner bits, see [`owner`].
        owner, with_owner: 29, 3;
    }

    /// Second word of a receive completion.
    struct RxFlags: u32 {
        /// VLAN ID of the stripped tag.
        vlan_id, with_vlan_id: 0, 12;
        /// 1 if a VLAN tag was stripped.
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
        /// Offset in the scatter-gather list.
        sgl, with_sgl: 0, 5;
        /// Offset of the WQE in its ring, in basic units.
        wqe, with_wqe: 5, 27;
    }
}

/// [`CqeHead::client_type`] of the Ethernet function.
pub const CLIENT_ETHERNET: u32 = 1;

/// Byte offset of [`RxFlags`].
pub const RX_FLAGS: u32 = 4;
/// Byte offset of the first packet record: u16 length, 6 reserved bytes, u32 hash.
pub const RX_PACKETS: u32 = 8;
/// Bytes of a packet record.
pub const RX_PACKET_BYTES: u32 = 12;
/// Maximum number of packets in a CQE.
pub const RX_COALESCED: u32 = 4;
/// Byte offset of the WQE's position in its work queue.
pub const RX_WQE_OFFSET: u32 = 56;
/// Byte offset of [`TxOffset`].
pub const TX_OFFSET: u32 = 8;

/// CQE type: one received packet.
pub const CQE_RX_OKAY: u32 = 1;
/// CQE type: up to [`RX_COALESCED`] received packets. A length of 0 ends the list.
pub const CQE_RX_COALESCED_4: u32 = 2;
/// CQE type: a fence completed.
pub const CQE_RX_OBJECT_FENCE: u32 = 3;
/// CQE type: a received packet was longer than its buffers.
pub const CQE_RX_TRUNCATED: u32 = 4;

/// CQE type: the packet was sent.
pub const CQE_TX_OKAY: u32 = 32;
/// CQE type: the source address is not allowed.
pub const CQE_TX_SA_DROP: u32 = 33;
/// CQE type: the packet is longer than the MTU.
pub const CQE_TX_MTU_DROP: u32 = 34;
/// CQE type: the OOB is inconsistent or does not match the queue.
pub const CQE_TX_INVALID_OOB: u32 = 35;
/// CQE type: the EtherType is not allowed.
pub const CQE_TX_INVALID_ETH_TYPE: u32 = 36;
/// CQE type: the headers do not match the OOB.
pub const CQE_TX_HDR_PROCESSING_ERROR: u32 = 37;
/// CQE type: the virtual function is disabled.
pub const CQE_TX_VF_DISABLED: u32 = 38;
/// CQE type: the virtual port does not exist.
pub const CQE_TX_VPORT_IDX_OUT_OF_RANGE: u32 = 39;
/// CQE type: the virtual port is disabled.
pub const CQE_TX_VPORT_DISABLED: u32 = 40;
/// CQE type: a VLAN tag is not allowed.
pub const CQE_TX_VLAN_TAGGING_VIOLATION: u32 = 41;
/// CQE type: invalid descriptor or memory access. The device stops the queue.
pub const CQE_TX_GDMA_ERR: u32 = 42;

/// Hash type: IPv4 addresses.
pub const HASH_IPV4: u32 = 1;
/// Hash type: IPv4 addresses and TCP ports.
pub const HASH_TCP_IPV4: u32 = 2;
/// Hash type: IPv4 addresses and UDP ports.
pub const HASH_UDP_IPV4: u32 = 4;
/// Hash type: IPv6 addresses.
pub const HASH_IPV6: u32 = 8;
/// Hash type: IPv6 addresses and TCP ports.
pub const HASH_TCP_IPV6: u32 = 0x10;
/// Hash type: IPv6 addresses and UDP ports.
pub const HASH_UDP_IPV6: u32 = 0x20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_bits_follow_ring_passes() {
        // In a ring of 3 entries, counters 3, 4 and 5 are the first pass.
        assert_eq!([3, 4, 5, 6].map(|n| owner(n, 3)), [1, 1, 1, 2]);
        assert_eq!(owner(8 * 3, 3), 0);
        assert_eq!(CqeTail::default().with_owner(7).with_is_sq(1).with_queue(0x12_3456).0, 0xe112_3456);
    }

    #[test]
    fn flags_use_the_documented_bits() {
        assert_eq!(RxFlags::default().with_hash_type(0x1ff).0, 0x1ff << 16);
        assert_eq!(RxFlags(1 << 30).udp_bad(), 1);
        assert_eq!(CqeHead::default().with_cqe_type(CQE_TX_OKAY).with_client_type(CLIENT_ETHERNET).0, 0x60);
        // Bits that do not fit are discarded and do not change other fields.
        assert_eq!(RxFlags::default().with_vlan_id(0xffff).0, 0xfff);
    }
}
