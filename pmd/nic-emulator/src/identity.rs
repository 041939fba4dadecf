//! Identifiers of RDMA devices, derived from MAC addresses, and the common part of query replies.

use wirepath_nic_defs::uverbs::{self, ioctl, write};
use zerocopy::FromZeros;

use crate::topology::{DeviceSpec, PortSpec};

/// Returns the EUI-64 of a MAC address.
pub(crate) fn guid(mac: [u8; 6]) -> [u8; 8] {
    [mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]]
}

/// Returns the EUI-64 of a MAC address in the notation of sysfs.
pub(crate) fn guid_text(mac: [u8; 6]) -> String {
    guid(mac).chunks(2).map(|pair| format!("{:02x}{:02x}", pair[0], pair[1])).collect::<Vec<_>>().join(":")
}

/// Returns the GID tables: one RoCE v2 entry per port, with a link-local address derived from the MAC
/// address.
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

/// Returns the device attributes that all emulated NICs have in common. `queues` is the maximum number of queues.
pub(crate) fn device_reply(
    spec: &DeviceSpec,
    vendor_id: u32,
    vendor_part_id: u32,
    queues: u32,
) -> write::ExtendedQueryDeviceReply {
    let mut reply = write::ExtendedQueryDeviceReply::new_zeroed();
    let guid = guid(spec.ports[0].mac);
    reply.base = write::QueryDeviceReply {
        node_guid: guid,
        sys_image_guid: guid,
        vendor_id,
        vendor_part_id,
        max_qp: queues,
        max_qp_wr: spec.max_queue,
        max_cq: queues,
        max_mr: 1 << 20,
        max_pd: 1 << 16,
        max_raw_ethy_qp: queues,
        phys_port_cnt: spec.ports.len() as u8,
        ..write::QueryDeviceReply::new_zeroed()
    };
    reply.response_length = size_of::<write::ExtendedQueryDeviceReply>() as u32;
    reply
}

/// Returns the state of an Ethernet port, as the kernel reports it.
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
