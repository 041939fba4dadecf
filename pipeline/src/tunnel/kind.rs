//! The kinds of tunnels. One entry of [`KINDS`] registers a kind for the configuration, for encapsulation and
//! decapsulation, and for displays.

use wirepath_wire::build::{VxlanConfig, VxlanEncap};
use wirepath_wire::{Vni, vxlan};

/// A kind of tunnel over UDP.
#[derive(Debug)]
pub struct TunnelKind {
    /// Value of the key `kind` in the configuration.
    pub name: &'static str,
    /// Description of one line.
    pub about: &'static str,
    /// Name of the segment identifier in displays.
    pub id_name: &'static str,
    /// Largest segment identifier.
    pub max_id: u32,
    /// Default UDP destination port.
    pub udp_port: u16,
    /// Length of the tunnel header in bytes.
    pub header_len: usize,
    /// Flags that the first byte of a tunnel header must have.
    pub(super) required_flags: u8,
    /// Builds the outer headers of a remote; `None` if its addresses do not fit together.
    pub(super) template: fn(&VxlanConfig<'_>) -> Option<VxlanEncap>,
    /// Returns the segment identifier of a tunnel header; `None` if the header is invalid.
    pub(super) segment_id: fn(&[u8; 8]) -> Option<u32>,
}

/// All kinds; the first one is the default.
pub static KINDS: [TunnelKind; 1] = [TunnelKind {
    name: "vxlan",
    about: "VXLAN (RFC 7348)",
    id_name: "VNI",
    max_id: Vni::MAX,
    udp_port: vxlan::PORT,
    header_len: vxlan::HEADER_LEN,
    required_flags: vxlan::FLAG_VNI,
    template: |config| VxlanEncap::new(config).ok(),
    segment_id: |header| {
        let id = u32::from_be_bytes([0, header[4], header[5], header[6]]);
        (header[0] & vxlan::FLAG_VNI != 0).then_some(id)
    },
}];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_reads_its_own_headers() {
        for kind in &KINDS {
            let mut header = [0xff, 0, 0, 0, 0x12, 0x34, 0x56, 0];
            assert_eq!((kind.segment_id)(&header), Some(0x12_3456), "{}", kind.name);
            header[0] = !kind.required_flags;
            assert_eq!((kind.segment_id)(&header), None, "{}", kind.name);
        }
    }
}
