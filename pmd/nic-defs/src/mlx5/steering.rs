//! Match parameters and header modification in the format of the device.
//!
//! `mlx5dv_create_flow_matcher`, `mlx5dv_create_flow` and `mlx5dv_create_flow_action_modify_header` pass these
//! formats on unchanged. Sources: rdma-core `providers/mlx5/mlx5_ifc.h` and DPDK `drivers/common/mlx5/mlx5_prm.h`,
//! which agree.

use crate::table::bits;

/// Maximum bytes of match parameters.
pub const MATCH_BYTES: usize = 640;
/// Bytes of one part of the match parameters. All parts have this size.
pub const MATCH_PART: usize = 64;

/// Bit of `match_criteria_enable` for outer headers. The bits are in the order of the parts.
pub const CRITERIA_OUTER: u8 = 1 << 0;
/// Bit of `match_criteria_enable` for tunnel headers and other fields.
pub const CRITERIA_MISC: u8 = 1 << 1;
/// Bit of `match_criteria_enable` for inner headers.
pub const CRITERIA_INNER: u8 = 1 << 2;
/// Bit of `match_criteria_enable` for MPLS and registers.
pub const CRITERIA_MISC2: u8 = 1 << 3;
/// Bit of `match_criteria_enable` for TCP sequence numbers, VXLAN-GPE, ICMP and GTP.
pub const CRITERIA_MISC3: u8 = 1 << 4;
/// Bit of `match_criteria_enable` for samples of the flexible parser.
pub const CRITERIA_MISC4: u8 = 1 << 5;
/// Bit of `match_criteria_enable` for MACsec and words of tunnel headers.
pub const CRITERIA_MISC5: u8 = 1 << 6;

/// A bit field of the match parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatchField {
    /// Position of the first bit. Bits are counted from the start, most significant bit first.
    pub offset: u16,
    /// Number of bits.
    pub bits: u8,
}

impl MatchField {
    /// Creates a field of `bits` bits that starts at bit `offset` of the structure.
    pub(crate) const fn new(offset: u16, bits: u8) -> Self {
        Self { offset, bits }
    }

    /// Creates a field of `bits` bits at bit `at` (0 is the most significant) of byte `byte`.
    const fn at(byte: u16, at: u16, bits: u8) -> Self {
        Self { offset: byte * 8 + at, bits }
    }

    /// Returns the same field of the inner headers. Valid for fields of [`header`] only.
    #[must_use]
    pub const fn inner(self) -> Self {
        Self { offset: self.offset + 8 * 0x80, bits: self.bits }
    }

    /// Reads the field; its last bit is the least significant. Bits beyond the end of `parameters` read as zero.
    pub fn get(self, parameters: &[u8]) -> u128 {
        let mut value = 0;
        for bit in usize::from(self.offset)..usize::from(self.offset) + usize::from(self.bits) {
            let byte = parameters.get(bit / 8).copied().unwrap_or(0);
            value = value << 1 | u128::from(byte >> (7 - bit % 8) & 1);
        }
        value
    }

    /// Writes the field. Bits of `value` that do not fit and bits beyond the end of `parameters` are discarded.
    pub fn set(self, parameters: &mut [u8], value: u128) {
        for shift in 0..usize::from(self.bits) {
            let bit = usize::from(self.offset) + usize::from(self.bits) - 1 - shift;
            if let Some(byte) = parameters.get_mut(bit / 8) {
                let mask = 1 << (7 - bit % 8);
                *byte = if value >> shift & 1 != 0 { *byte | mask } else { *byte & !mask };
            }
        }
    }

    /// Returns the bit of `match_criteria_enable` for the part that contains the field.
    pub const fn criteria(self) -> u8 {
        1 << (self.offset as usize / 8 / MATCH_PART)
    }
}

/// Outer headers (`fte_match_set_lyr_2_4`). [`MatchField::inner`] gives the inner ones.
pub mod header {
    use super::MatchField;

    /// Source MAC address. It precedes the destination address.
    pub const SRC_MAC: MatchField = MatchField::at(0x00, 0, 48);
    /// EtherType after the VLAN tags.
    pub const ETHERTYPE: MatchField = MatchField::at(0x06, 0, 16);
    /// Destination MAC address.
    pub const DST_MAC: MatchField = MatchField::at(0x08, 0, 48);
    /// Priority of the first tag.
    pub const FIRST_PRIO: MatchField = MatchField::at(0x0e, 0, 3);
    /// Drop eligible indicator of the first tag.
    pub const FIRST_CFI: MatchField = MatchField::at(0x0e, 3, 1);
    /// VLAN ID of the first tag.
    pub const FIRST_VID: MatchField = MatchField::at(0x0e, 4, 12);
    /// IPv4 protocol, or IPv6 next header after the extension headers.
    pub const IP_PROTOCOL: MatchField = MatchField::at(0x10, 0, 8);
    /// DSCP.
    pub const IP_DSCP: MatchField = MatchField::at(0x11, 0, 6);
    /// ECN.
    pub const IP_ECN: MatchField = MatchField::at(0x11, 6, 2);
    /// 1 if the first tag is a C-tag (0x8100).
    pub const CVLAN_TAG: MatchField = MatchField::at(0x12, 0, 1);
    /// 1 if the first tag is an S-tag (0x88a8).
    pub const SVLAN_TAG: MatchField = MatchField::at(0x12, 1, 1);
    /// 1 for an IP fragment, including the first fragment.
    pub const FRAGMENT: MatchField = MatchField::at(0x12, 2, 1);
    /// IP version: 4 or 6.
    pub const IP_VERSION: MatchField = MatchField::at(0x12, 3, 4);
    /// TCP control bits.
    pub const TCP_FLAGS: MatchField = MatchField::at(0x12, 7, 9);
    /// TCP source port.
    pub const TCP_SPORT: MatchField = MatchField::at(0x14, 0, 16);
    /// TCP destination port.
    pub const TCP_DPORT: MatchField = MatchField::at(0x16, 0, 16);
    /// IPv4 header length in words.
    pub const IPV4_IHL: MatchField = MatchField::at(0x1a, 0, 4);
    /// 1 if layer 3 is valid.
    pub const L3_OK: MatchField = MatchField::at(0x1a, 4, 1);
    /// 1 if layer 4 is valid.
    pub const L4_OK: MatchField = MatchField::at(0x1a, 5, 1);
    /// 1 if the IPv4 header checksum is good.
    pub const IPV4_CHECKSUM_OK: MatchField = MatchField::at(0x1a, 6, 1);
    /// 1 if the layer-4 checksum is good.
    pub const L4_CHECKSUM_OK: MatchField = MatchField::at(0x1a, 7, 1);
    /// Time to live or hop limit.
    pub const TTL: MatchField = MatchField::at(0x1b, 0, 8);
    /// UDP source port.
    pub const UDP_SPORT: MatchField = MatchField::at(0x1c, 0, 16);
    /// UDP destination port.
    pub const UDP_DPORT: MatchField = MatchField::at(0x1e, 0, 16);
    /// IPv6 source address.
    pub const SRC_IPV6: MatchField = MatchField::at(0x20, 0, 128);
    /// IPv4 source address: the last four bytes of the IPv6 field.
    pub const SRC_IPV4: MatchField = MatchField::at(0x2c, 0, 32);
    /// IPv6 destination address.
    pub const DST_IPV6: MatchField = MatchField::at(0x30, 0, 128);
    /// IPv4 destination address: the last four bytes of the IPv6 field.
    pub const DST_IPV4: MatchField = MatchField::at(0x3c, 0, 32);
}

/// Tunnel headers and other fields that exist once (`fte_match_set_misc`).
pub mod misc {
    use super::MatchField;

    /// 1 if a GRE checksum is present.
    pub const GRE_C: MatchField = MatchField::at(0x40, 0, 1);
    /// 1 if a GRE key is present.
    pub const GRE_K: MatchField = MatchField::at(0x40, 2, 1);
    /// 1 if a GRE sequence number is present.
    pub const GRE_S: MatchField = MatchField::at(0x40, 3, 1);
    /// Function (VHCA) of the source port, in a switch over several functions.
    pub const SOURCE_VHCA_PORT: MatchField = MatchField::at(0x40, 4, 4);
    /// Send queue number, at egress.
    pub const SOURCE_SQN: MatchField = MatchField::at(0x41, 0, 24);
    /// Source virtual port.
    pub const SOURCE_PORT: MatchField = MatchField::at(0x46, 0, 16);
    /// Priority of the second tag.
    pub const OUTER_SECOND_PRIO: MatchField = MatchField::at(0x48, 0, 3);
    /// Drop eligible indicator of the second tag.
    pub const OUTER_SECOND_CFI: MatchField = MatchField::at(0x48, 3, 1);
    /// VLAN ID of the second tag.
    pub const OUTER_SECOND_VID: MatchField = MatchField::at(0x48, 4, 12);
    /// Priority of the second inner tag.
    pub const INNER_SECOND_PRIO: MatchField = MatchField::at(0x4a, 0, 3);
    /// Drop eligible indicator of the second inner tag.
    pub const INNER_SECOND_CFI: MatchField = MatchField::at(0x4a, 3, 1);
    /// VLAN ID of the second inner tag.
    pub const INNER_SECOND_VID: MatchField = MatchField::at(0x4a, 4, 12);
    /// 1 if the second tag is a C-tag.
    pub const OUTER_SECOND_CVLAN: MatchField = MatchField::at(0x4c, 0, 1);
    /// 1 if the second inner tag is a C-tag.
    pub const INNER_SECOND_CVLAN: MatchField = MatchField::at(0x4c, 1, 1);
    /// 1 if the second tag is an S-tag.
    pub const OUTER_SECOND_SVLAN: MatchField = MatchField::at(0x4c, 2, 1);
    /// 1 if the second inner tag is an S-tag.
    pub const INNER_SECOND_SVLAN: MatchField = MatchField::at(0x4c, 3, 1);
    /// EtherType of the GRE payload.
    pub const GRE_PROTOCOL: MatchField = MatchField::at(0x4e, 0, 16);
    /// GRE key: high 24 bits, then low 8 bits.
    pub const GRE_KEY: MatchField = MatchField::at(0x50, 0, 32);
    /// VXLAN network identifier.
    pub const VXLAN_VNI: MatchField = MatchField::at(0x54, 0, 24);
    /// Opcode of the RoCE base transport header.
    pub const BTH_OPCODE: MatchField = MatchField::at(0x57, 0, 8);
    /// GENEVE network identifier.
    pub const GENEVE_VNI: MatchField = MatchField::at(0x58, 0, 24);
    /// 1 for a GENEVE control packet.
    pub const GENEVE_OAM: MatchField = MatchField::at(0x5b, 7, 1);
    /// IPv6 flow label.
    pub const OUTER_FLOW_LABEL: MatchField = MatchField::at(0x5c, 12, 20);
    /// Inner IPv6 flow label.
    pub const INNER_FLOW_LABEL: MatchField = MatchField::at(0x60, 12, 20);
    /// Length of the GENEVE options in words.
    pub const GENEVE_OPT_LEN: MatchField = MatchField::at(0x64, 10, 6);
    /// EtherType of the GENEVE payload.
    pub const GENEVE_PROTOCOL: MatchField = MatchField::at(0x66, 0, 16);
    /// Destination queue pair of the RoCE base transport header.
    pub const BTH_DESTINATION: MatchField = MatchField::at(0x69, 0, 24);
    /// ESP SPI of the inner headers. It precedes the outer SPI.
    pub const INNER_ESP_SPI: MatchField = MatchField::at(0x6c, 0, 32);
    /// ESP SPI of the outer headers.
    pub const OUTER_ESP_SPI: MatchField = MatchField::at(0x70, 0, 32);
}

/// MPLS and registers (`fte_match_set_misc2`).
pub mod misc2 {
    use super::MatchField;

    /// First label stack entry after the outer Ethernet header.
    pub const OUTER_MPLS: MatchField = MatchField::at(0xc0, 0, 32);
    /// First label stack entry after the inner Ethernet header.
    pub const INNER_MPLS: MatchField = MatchField::at(0xc4, 0, 32);
    /// First label stack entry after GRE.
    pub const MPLS_OVER_GRE: MatchField = MatchField::at(0xc8, 0, 32);
    /// First label stack entry after UDP.
    pub const MPLS_OVER_UDP: MatchField = MatchField::at(0xcc, 0, 32);
    /// Register C0.
    pub const REG_C0: MatchField = reg_c(0);
    /// Register A: metadata of the send WQE, at egress.
    pub const REG_A: MatchField = MatchField::at(0xf0, 0, 32);
    /// Register B.
    pub const REG_B: MatchField = MatchField::at(0xf4, 0, 32);

    /// Returns the field of register C0 to C7. C7 has the lowest offset.
    ///
    /// # Panics
    /// `number` is above 7.
    pub const fn reg_c(number: u16) -> MatchField {
        assert!(number < 8);
        MatchField::at(0xec - 4 * number, 0, 32)
    }
}

/// TCP sequence numbers, VXLAN-GPE, ICMP and GTP (`fte_match_set_misc3`).
pub mod misc3 {
    use super::MatchField;

    /// Sequence number of the inner TCP header. It precedes the outer one.
    pub const INNER_TCP_SEQ: MatchField = MatchField::at(0x100, 0, 32);
    /// Sequence number of the outer TCP header.
    pub const OUTER_TCP_SEQ: MatchField = MatchField::at(0x104, 0, 32);
    /// Acknowledgement number of the inner TCP header.
    pub const INNER_TCP_ACK: MatchField = MatchField::at(0x108, 0, 32);
    /// Acknowledgement number of the outer TCP header.
    pub const OUTER_TCP_ACK: MatchField = MatchField::at(0x10c, 0, 32);
    /// VXLAN-GPE network identifier.
    pub const GPE_VNI: MatchField = MatchField::at(0x111, 0, 24);
    /// Next protocol of VXLAN-GPE.
    pub const GPE_NEXT_PROTOCOL: MatchField = MatchField::at(0x114, 0, 8);
    /// VXLAN-GPE flags.
    pub const GPE_FLAGS: MatchField = MatchField::at(0x115, 0, 8);
    /// Second word of the ICMP header.
    pub const ICMP_DATA: MatchField = MatchField::at(0x118, 0, 32);
    /// Second word of the ICMPv6 header.
    pub const ICMPV6_DATA: MatchField = MatchField::at(0x11c, 0, 32);
    /// ICMP type.
    pub const ICMP_TYPE: MatchField = MatchField::at(0x120, 0, 8);
    /// ICMP code.
    pub const ICMP_CODE: MatchField = MatchField::at(0x121, 0, 8);
    /// ICMPv6 type.
    pub const ICMPV6_TYPE: MatchField = MatchField::at(0x122, 0, 8);
    /// ICMPv6 code.
    pub const ICMPV6_CODE: MatchField = MatchField::at(0x123, 0, 8);
    /// Tunnel endpoint identifier of GTP.
    pub const GTP_TEID: MatchField = MatchField::at(0x128, 0, 32);
}

/// Words sampled by the flexible parser (`fte_match_set_misc4`).
pub mod misc4 {
    use super::MatchField;

    /// Returns the field with the value of sample 0 to 7.
    ///
    /// # Panics
    /// `number` is above 7.
    pub const fn sample_value(number: u16) -> MatchField {
        assert!(number < 8);
        MatchField::at(0x140 + 8 * number, 0, 32)
    }

    /// Returns the field with the parser's ID of sample 0 to 7.
    ///
    /// # Panics
    /// `number` is above 7.
    pub const fn sample_id(number: u16) -> MatchField {
        assert!(number < 8);
        MatchField::at(0x144 + 8 * number, 0, 32)
    }
}

/// MACsec tag and words of tunnel headers (`fte_match_set_misc5`).
pub mod misc5 {
    use super::MatchField;

    /// Returns the field of word 0 to 3 of the MACsec tag.
    ///
    /// # Panics
    /// `number` is above 3.
    pub const fn macsec_tag(number: u16) -> MatchField {
        assert!(number < 4);
        MatchField::at(0x180 + 4 * number, 0, 32)
    }

    /// Returns the field of word 0 to 3 of the tunnel header after UDP.
    ///
    /// # Panics
    /// `number` is above 3.
    pub const fn tunnel_header(number: u16) -> MatchField {
        assert!(number < 4);
        MatchField::at(0x190 + 4 * number, 0, 32)
    }
}

bits! {
    /// First word of a header modification command (`set_action_in`, `add_action_in`, `copy_action_in`).
    struct Modify: u32 {
        /// Number of bits; 0 means 32.
        length, with_length: 0, 5;
        /// First bit in the field, counted from the least significant.
        offset, with_offset: 8, 5;
        /// Field, one of `MODIFY_*`.
        field, with_field: 16, 12;
        /// [`MODIFY_SET`], [`MODIFY_ADD`] or [`MODIFY_COPY`]. The second word is the data, or the target field of a
        /// copy.
        action, with_action: 28, 4;
    }
}

/// Value of [`Modify::action`]: writes data.
pub const MODIFY_SET: u32 = 1;
/// Value of [`Modify::action`]: adds data.
pub const MODIFY_ADD: u32 = 2;
/// Value of [`Modify::action`]: copies a field.
pub const MODIFY_COPY: u32 = 3;

/// Field: source MAC address, upper 32 bits.
pub const MODIFY_SRC_MAC_HIGH: u32 = 0x01;
/// Field: source MAC address, lower 16 bits.
pub const MODIFY_SRC_MAC_LOW: u32 = 0x02;
/// Field: EtherType.
pub const MODIFY_ETHERTYPE: u32 = 0x03;
/// Field: destination MAC address, upper 32 bits.
pub const MODIFY_DST_MAC_HIGH: u32 = 0x04;
/// Field: destination MAC address, lower 16 bits.
pub const MODIFY_DST_MAC_LOW: u32 = 0x05;
/// Field: DSCP.
pub const MODIFY_DSCP: u32 = 0x06;
/// Field: TCP control bits.
pub const MODIFY_TCP_FLAGS: u32 = 0x07;
/// Field: TCP source port.
pub const MODIFY_TCP_SPORT: u32 = 0x08;
/// Field: TCP destination port.
pub const MODIFY_TCP_DPORT: u32 = 0x09;
/// Field: time to live.
pub const MODIFY_TTL: u32 = 0x0a;
/// Field: UDP source port.
pub const MODIFY_UDP_SPORT: u32 = 0x0b;
/// Field: UDP destination port.
pub const MODIFY_UDP_DPORT: u32 = 0x0c;
/// Field: IPv6 source address. Four consecutive fields, the most significant word first.
pub const MODIFY_SRC_IPV6: u32 = 0x0d;
/// Field: IPv6 destination address. Four consecutive fields, the most significant word first.
pub const MODIFY_DST_IPV6: u32 = 0x11;
/// Field: IPv4 source address.
pub const MODIFY_SRC_IPV4: u32 = 0x15;
/// Field: IPv4 destination address.
pub const MODIFY_DST_IPV4: u32 = 0x16;
/// Field: VLAN ID of the first tag.
pub const MODIFY_FIRST_VID: u32 = 0x17;
/// Offset added to a field number for the same field of the inner headers (0x31 to 0x46).
pub const MODIFY_INNER: u32 = 0x30;
/// Field: hop limit.
pub const MODIFY_HOP_LIMIT: u32 = 0x47;
/// Field: hop limit of the inner header.
pub const MODIFY_INNER_HOP_LIMIT: u32 = 0x48;
/// Field: register A.
pub const MODIFY_REG_A: u32 = 0x49;
/// Field: register B.
pub const MODIFY_REG_B: u32 = 0x50;
/// Field: register C0. C1 to C7 follow.
pub const MODIFY_REG_C0: u32 = 0x51;
/// Field: TCP sequence number. The number of the inner header follows.
pub const MODIFY_TCP_SEQ: u32 = 0x59;
/// Field: TCP acknowledgement number. The number of the inner header follows.
pub const MODIFY_TCP_ACK: u32 = 0x5b;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_belong_to_their_criteria_part() {
        assert_eq!(header::DST_IPV4.criteria(), CRITERIA_OUTER);
        assert_eq!(header::SRC_MAC.inner().criteria(), CRITERIA_INNER);
        assert_eq!(header::DST_IPV4.inner().criteria(), CRITERIA_INNER);
        assert_eq!(misc::GRE_C.criteria(), CRITERIA_MISC);
        assert_eq!(misc::OUTER_ESP_SPI.criteria(), CRITERIA_MISC);
        assert_eq!(misc2::REG_A.criteria(), CRITERIA_MISC2);
        assert_eq!(misc3::GTP_TEID.criteria(), CRITERIA_MISC3);
        assert_eq!(misc4::sample_id(7).criteria(), CRITERIA_MISC4);
        assert_eq!(misc5::tunnel_header(3).criteria(), CRITERIA_MISC5);
        assert_eq!((misc2::reg_c(7).offset, misc2::REG_C0.offset), (0xd0 * 8, 0xec * 8));
    }

    #[test]
    fn field_set_and_get_touch_only_their_bits() {
        let fields = [
            header::SRC_MAC,
            header::TCP_FLAGS.inner(),
            header::IP_VERSION,
            header::DST_IPV6,
            misc::SOURCE_SQN,
            misc::GENEVE_OPT_LEN,
            misc::OUTER_FLOW_LABEL,
            misc5::tunnel_header(3),
        ];
        for field in fields {
            for background in [0u8, 0xff] {
                let mut parameters = [background; MATCH_BYTES];
                let value = 0x1234_5678_9abc_def0_0fed_cba9_8765_4321 & (u128::MAX >> (128 - u32::from(field.bits)));
                field.set(&mut parameters, value);
                assert_eq!(field.get(&parameters), value, "{field:?}");
                field.set(&mut parameters, if background == 0 { 0 } else { u128::MAX });
                assert_eq!(parameters, [background; MATCH_BYTES], "{field:?}");
            }
        }
        let mut short = [0u8; 4];
        header::SRC_MAC.set(&mut short, 0xa1b2_c3d4_e5f6);
        assert_eq!((short, header::SRC_MAC.get(&short)), ([0xa1, 0xb2, 0xc3, 0xd4], 0xa1b2_c3d4_0000));
    }
}
