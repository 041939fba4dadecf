//! What RDMA devices tell of their ports: identifiers derived from their addresses, and their state.

use wirepath_nic_defs::uverbs::{self, ioctl, write};
use zerocopy::FromZeros;

use crate::topology::{DeviceSpec, PortSpec};

/// EUI-64 of a MAC.
pub(crate) fn guid(mac: [u8; 6]) -> [u8; 8] {
    [mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]]
}

/// EUI-64 of a MAC as sysfs writes GUIDs.
pub(crate) fn guid_text(mac: [u8; 6]) -> String {
    guid(mac).chunks(2).map(|pair| format!("{:02x}{:02x}", pair[0], pair[1])).collect::<Vec<_>>().join(":")
}

/// The GID tables: link-local addresses made of the MAC, as RoCE devices have them.
pub(crate) fn gids(spec: &DeviceSpec) -> Vec<ioctl::GidEntry> {
    let entry = |(at, port): (usize, &PortSpec)| {
        let mut gid = [0u8; 16];
        gid[..2].copy_from_slice(&[0xfe, 0x80]);
        gid[8..].copy_from_slice(&guid(port.mac));
        let (high, low) = gid.split_at(8);
        let word = |half: &[u8]| u64::from_ne_bytes(half.try_into().expect("eight bytes"));
        ioctl::GidEntry {
            gid: [word(high), word(low)],
            gid_index: 0,
            port_num: at as u32 + 1,
            gid_type: uverbs::GID_TYPE_ROCE_V2,
            netdev_ifindex: 0,
        }
    };
    spec.ports.iter().enumerate().map(entry).collect()
}

/// State of an Ethernet port, as the kernel tells it.
pub(crate) fn port_reply(mtu: u32, up: bool, max_message: u32) -> ioctl::QueryPortReply {
    let mtu = match mtu {
        4096.. => uverbs::MTU_4096,
        2048.. => uverbs::MTU_2048,
        1024.. => uverbs::MTU_1024,
        _ => uverbs::MTU_512,
    };
    let mut reply = ioctl::QueryPortReply::new_zeroed();
    reply.legacy_resp = write::QueryPortReply {
        max_msg_sz: max_message,
        gid_tbl_len: 1,
        pkey_tbl_len: 1,
        state: if up { uverbs::PORT_ACTIVE } else { uverbs::PORT_DOWN },
        max_mtu: mtu,
        active_mtu: mtu,
        max_vl_num: 1,
        active_width: 2,  // 4X
        active_speed: 32, // EDR: 100 Gbit/s
        phys_state: if up { 5 } else { 3 },
        link_layer: uverbs::LINK_LAYER_ETHERNET,
        ..write::QueryPortReply::new_zeroed()
    };
    reply
}
