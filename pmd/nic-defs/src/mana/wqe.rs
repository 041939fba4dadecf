//! Work-queue elements (WQEs).

use crate::table::bits;

/// Basic unit of work queues, in bytes. A WQE starts at a multiple of it and is padded to a multiple of it.
pub const WQE_UNIT: u32 = 32;
/// Maximum length of a transmit WQE, in bytes.
pub const MAX_TX_WQE: u32 = 512;
/// Maximum length of a receive WQE, in bytes.
pub const MAX_RX_WQE: u32 = 256;
/// Bytes of the WQE header, which precedes the client OOB.
pub const WQE_HEADER: u32 = 8;
/// Bytes of the short client OOB. Receive WQEs contain one that is unused.
pub const OOB_SHORT: u32 = 8;
/// Bytes of the long client OOB.
pub const OOB_LONG: u32 = 24;
/// Bytes of one scatter-gather entry: u64 address, u32 key, u32 size.
pub const SGE_BYTES: u32 = 16;
/// Value of [`WqeFlags::oob_words`] for [`OOB_SHORT`].
pub const OOB_WORDS_SHORT: u32 = 2;
/// Value of [`WqeFlags::oob_words`] for [`OOB_LONG`].
pub const OOB_WORDS_LONG: u32 = 6;

/// Returns the basic units of a WQE with `sges` scatter-gather entries and an OOB of `oob` bytes. A WQE has at least
/// one entry, which is a dummy if `sges` is 0.
pub const fn wqe_units(oob: u32, sges: u32) -> u32 {
    let sges = if sges == 0 { 1 } else { sges };
    (WQE_HEADER + oob + SGE_BYTES * sges).div_ceil(WQE_UNIT)
}

bits! {
    /// Word 0 of the WQE header.
    struct WqeLast: u32 {
        /// Header bytes of the first entry, for segmentation (LSO).
        last_vbytes, with_last_vbytes: 24, 8;
    }

    /// Word 1 of the WQE header.
    struct WqeFlags: u32 {
        /// Number of scatter-gather entries.
        sges, with_sges: 0, 8;
        /// Length of the client OOB in words of 4 bytes.
        oob_words, with_oob_words: 8, 3;
        /// 1 if the first entry is part of the OOB, for segmentation.
        oob_in_sgl, with_oob_in_sgl: 11, 1;
        /// Flow control by credits.
        consume_credit, with_consume_credit: 12, 1;
        /// 1 to wait for earlier work requests.
        fence, with_fence: 13, 1;
        /// Segment size (MSS), valid with `oob_in_sgl`.
        client_data_unit, with_client_data_unit: 16, 14;
        /// Sequence check.
        check_sn, with_check_sn: 30, 1;
        /// 1 if data follows instead of a scatter-gather list.
        sgl_direct, with_sgl_direct: 31, 1;
    }

    /// Word 0 of the transmit OOB.
    struct TxOob: u32 {
        /// [`FORMAT_SHORT`] (8 bytes) or [`FORMAT_LONG`] (24 bytes).
        format, with_format: 0, 2;
        /// The outer header is IPv4.
        is_outer_ipv4, with_is_outer_ipv4: 2, 1;
        /// The outer header is IPv6.
        is_outer_ipv6, with_is_outer_ipv6: 3, 1;
        /// Compute the IPv4 header checksum.
        compute_ip_csum, with_compute_ip_csum: 4, 1;
        /// Compute the TCP checksum; the field holds the sum of the pseudo header.
        compute_tcp_csum, with_compute_tcp_csum: 5, 1;
        /// Compute the UDP checksum; the field holds the sum of the pseudo header.
        compute_udp_csum, with_compute_udp_csum: 6, 1;
        /// 1 to suppress the completion of this WQE.
        suppress_completion, with_suppress_completion: 7, 1;
        /// Completion queue.
        vcq, with_vcq: 8, 24;
    }

    /// Word 1 of the transmit OOB.
    struct TxOob1: u32 {
        /// Bytes from the start of the frame to the transport header.
        transport_offset, with_transport_offset: 0, 10;
        /// Send queue number without its low [`VSQ_FRAME_SHIFT`] bits.
        vsq_frame, with_vsq_frame: 10, 14;
        /// Virtual port, short form.
        vport, with_vport: 24, 8;
    }

    /// Word 2 of the long transmit OOB.
    struct TxOob2: u32 {
        /// The packet is encapsulated.
        is_encap, with_is_encap: 0, 1;
        /// The inner header is IPv6.
        inner_is_ipv6, with_inner_is_ipv6: 1, 1;
        /// The inner TCP header has options.
        inner_tcp_options, with_inner_tcp_options: 2, 1;
        /// Insert the VLAN tag.
        inject_vlan, with_inject_vlan: 3, 1;
        /// Priority.
        pcp, with_pcp: 16, 3;
        /// Drop eligible.
        dei, with_dei: 19, 1;
        /// VLAN.
        vlan_id, with_vlan_id: 20, 12;
    }

    /// Word 3 of the long transmit OOB.
    struct TxOob3: u32 {
        /// Bytes from the start of the frame to the inner frame.
        inner_frame_offset, with_inner_frame_offset: 0, 10;
        /// Bytes from the inner frame to the inner IP header.
        inner_ip_offset, with_inner_ip_offset: 10, 6;
        /// Virtual port, long form.
        long_vport, with_long_vport: 16, 12;
    }
}

/// Value of [`TxOob::format`] for the short OOB.
pub const FORMAT_SHORT: u32 = 0;
/// Value of [`TxOob::format`] for the long OOB.
pub const FORMAT_LONG: u32 = 1;
/// Low bits of the send queue number that [`TxOob1::vsq_frame`] omits.
pub const VSQ_FRAME_SHIFT: u32 = 10;
/// Maximum header bytes of a packet for segmentation (LSO).
pub const MAX_LSO_HEADER: u32 = 256;
