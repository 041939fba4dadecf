// UNSAFETY: calls libibverbs.
#![allow(unsafe_code)]

//! Attributes of devices and ports.

use rdma_core_sys::verbs::*;

use crate::Result;
use crate::context::ContextInner;

/// Capabilities and limits of a device (ibv_query_device_ex(3)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceAttributes {
    /// Firmware version, as the device formats it.
    pub firmware: String,
    /// PCI vendor ID.
    pub vendor_id: u32,
    /// Part number of the vendor.
    pub part_id: u32,
    /// Number of ports.
    pub ports: u8,
    /// Maximum number of queue pairs.
    pub max_queue_pairs: u32,
    /// Maximum number of work requests in one queue.
    pub max_work_requests: u32,
    /// Maximum number of segments in one work request.
    pub max_segments: u32,
    /// Maximum number of completion queues.
    pub max_completion_queues: u32,
    /// Maximum number of entries in one completion queue.
    pub max_completions: u32,
    /// Maximum number of memory regions.
    pub max_memory_regions: u32,
    /// Maximum size of one memory region in bytes.
    pub max_memory_region_bytes: u64,
    /// Maximum number of receive work queues for indirection tables; 0 if there are none.
    pub max_receive_work_queues: u32,
    /// True if checksums of raw packets can be offloaded.
    pub raw_checksum: bool,
    /// True if `ibv_create_flow` can create flow rules.
    pub flow_steering: bool,
    /// Receive offloads of raw packets.
    pub raw_packet: RawPacketCapabilities,
    /// RSS capabilities for raw packets, if supported.
    pub rss: Option<RssCapabilities>,
    /// Maximum payload of one TSO request on raw packets in bytes; 0 if TSO is not supported.
    pub max_tso: u32,
    /// Valid bits of completion timestamps; 0 if there are no timestamps.
    pub timestamp_mask: u64,
    /// Frequency of the timestamp clock in kHz; 0 if unknown.
    pub clock_khz: u64,
}

/// Offloads for raw packets (`IBV_RAW_PACKET_CAP_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawPacketCapabilities {
    /// Strips the customer VLAN tag on reception.
    pub vlan_strip: bool,
    /// Can keep the frame check sequence at the end of received frames.
    pub scatter_fcs: bool,
    /// Validates checksums on reception.
    pub checksum: bool,
    /// Can wait for a receive buffer instead of dropping the packet.
    pub delay_drop: bool,
}

/// Receive-side scaling (RSS) capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RssCapabilities {
    /// Maximum number of indirection tables.
    pub max_tables: u32,
    /// Maximum number of entries in one indirection table.
    pub max_table_entries: u32,
    /// Fields that can be hashed (`IBV_RX_HASH_*`); 0 if the driver does not report them.
    pub fields: u64,
    /// True if the Toeplitz hash is supported.
    pub toeplitz: bool,
}

/// State of a port (`IBV_PORT_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PortState {
    /// The link is down.
    Down,
    /// The link is coming up.
    Initializing,
    /// The link is up.
    Active,
    /// Another value, as a number.
    Other(u32),
}

/// Link layer of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinkLayer {
    /// The device does not report it.
    Unspecified,
    /// InfiniBand.
    InfiniBand,
    /// Ethernet.
    Ethernet,
    /// Another value, as a number.
    Other(u8),
}

/// Current attributes of a port (ibv_query_port(3)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAttributes {
    /// Link state.
    pub state: PortState,
    /// Link layer.
    pub link_layer: LinkLayer,
    /// Link speed in Mb/s, if the device reports it.
    pub speed: Option<u32>,
}

fn count(value: i32) -> u32 {
    u32::try_from(value).unwrap_or(0)
}

pub(crate) fn query_device(context: &ContextInner) -> Result<DeviceAttributes> {
    let mut attr = ibv_device_attr_ex::zeroed();
    // SAFETY: the context is open, and `attr` is valid for the structure that the call writes.
    let answer = unsafe { ibv_query_device_ex(context.raw.as_ptr(), std::ptr::null(), &raw mut attr) };
    match answer {
        Some(result) => context.check("ibv_query_device_ex", result)?,
        None => {
            attr = ibv_device_attr_ex::zeroed();
            let query = context.ibverbs().ibv_query_device()?;
            // SAFETY: the context is open, and `attr.orig_attr` is valid for the structure that the call writes.
            let result = unsafe { query(context.raw.as_ptr(), &raw mut attr.orig_attr) };
            context.check("ibv_query_device", result)?;
        }
    }
    Ok(translate_device(&attr))
}

fn translate_device(attr: &ibv_device_attr_ex) -> DeviceAttributes {
    let basic = &attr.orig_attr;
    let raw_packet = |types: u32| types & (1 << IBV_QPT_RAW_PACKET) != 0;
    let capability = |bit| attr.raw_packet_caps & bit != 0;
    let firmware: Vec<u8> = basic.fw_ver.iter().map(|c| c.cast_unsigned()).take_while(|byte| *byte != 0).collect();
    DeviceAttributes {
        firmware: String::from_utf8_lossy(&firmware).into_owned(),
        vendor_id: basic.vendor_id,
        part_id: basic.vendor_part_id,
        ports: basic.phys_port_cnt,
        max_queue_pairs: count(basic.max_qp),
        max_work_requests: count(basic.max_qp_wr),
        max_segments: count(basic.max_sge),
        max_completion_queues: count(basic.max_cq),
        max_completions: count(basic.max_cqe),
        max_memory_regions: count(basic.max_mr),
        max_memory_region_bytes: basic.max_mr_size,
        max_receive_work_queues: attr.max_wq_type_rq,
        raw_checksum: basic.device_cap_flags & IBV_DEVICE_RAW_IP_CSUM != 0,
        flow_steering: basic.device_cap_flags & IBV_DEVICE_MANAGED_FLOW_STEERING != 0,
        raw_packet: RawPacketCapabilities {
            vlan_strip: capability(IBV_RAW_PACKET_CAP_CVLAN_STRIPPING),
            scatter_fcs: capability(IBV_RAW_PACKET_CAP_SCATTER_FCS),
            checksum: capability(IBV_RAW_PACKET_CAP_IP_CSUM),
            delay_drop: capability(IBV_RAW_PACKET_CAP_DELAY_DROP),
        },
        rss: raw_packet(attr.rss_caps.supported_qpts).then_some(RssCapabilities {
            max_tables: attr.rss_caps.max_rwq_indirection_tables,
            max_table_entries: attr.rss_caps.max_rwq_indirection_table_size,
            fields: attr.rss_caps.rx_hash_fields_mask,
            toeplitz: u32::from(attr.rss_caps.rx_hash_function) & IBV_RX_HASH_FUNC_TOEPLITZ != 0,
        }),
        max_tso: if raw_packet(attr.tso_caps.supported_qpts) { attr.tso_caps.max_tso } else { 0 },
        timestamp_mask: attr.completion_timestamp_mask,
        clock_khz: attr.hca_core_clock,
    }
}

pub(crate) fn query_port(context: &ContextInner, port: u8) -> Result<PortAttributes> {
    let mut attr = ibv_port_attr::zeroed();
    // SAFETY: the context is open, and `attr` is valid for the structure that the call writes.
    let answer = unsafe { ibv_query_port_ex(context.raw.as_ptr(), port, &raw mut attr) };
    let result = match answer {
        Some(result) => result,
        None => {
            let query = context.ibverbs().ibv_query_port()?;
            // SAFETY: the context is open, and `attr` is valid for writes: the old function writes its first part only.
            unsafe { query(context.raw.as_ptr(), port, &raw mut attr) }
        }
    };
    match result {
        0 => Ok(translate_port(&attr)),
        errno if errno > 0 => Err(context.error("ibv_query_port", errno, Some(port))),
        _ => Err(context.error("ibv_query_port", crate::context::last_errno(), Some(port))),
    }
}

fn translate_port(attr: &ibv_port_attr) -> PortAttributes {
    PortAttributes {
        state: match attr.state {
            IBV_PORT_DOWN => PortState::Down,
            IBV_PORT_INIT | IBV_PORT_ARMED => PortState::Initializing,
            IBV_PORT_ACTIVE => PortState::Active,
            other => PortState::Other(other),
        },
        link_layer: match attr.link_layer {
            IBV_LINK_LAYER_UNSPECIFIED => LinkLayer::Unspecified,
            IBV_LINK_LAYER_INFINIBAND => LinkLayer::InfiniBand,
            IBV_LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
            other => LinkLayer::Other(other),
        },
        speed: speed(attr.active_width, attr.active_speed),
    }
}

/// Returns the link speed in Mb/s from the codes of the InfiniBand specification (PortInfo: LinkWidthActive,
/// LinkSpeedActive and LinkSpeedExtActive), or `None` for unknown codes.
fn speed(width: u8, speed: u8) -> Option<u32> {
    let lanes = match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => return None,
    };
    let lane = match speed {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        _ => return None,
    };
    Some(lanes * lane)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_are_lanes_times_rate() {
        assert_eq!(speed(2, 32), Some(100_000));
        assert_eq!(speed(1, 1), Some(2_500));
        assert_eq!(speed(16, 64), Some(100_000));
        assert_eq!(speed(0, 32), None);
        assert_eq!(speed(2, 3), None);
    }

    #[test]
    fn invalid_values_are_not_capabilities() {
        let mut attr = ibv_device_attr_ex::zeroed();
        attr.orig_attr.max_qp = -1;
        attr.orig_attr.fw_ver = [0x41; 64];
        attr.tso_caps.max_tso = 65536;
        attr.rss_caps.supported_qpts = 1 << IBV_QPT_UD;
        let translated = translate_device(&attr);
        assert_eq!(translated.max_queue_pairs, 0);
        assert_eq!(translated.firmware.len(), 64);
        assert_eq!((translated.max_tso, translated.rss), (0, None), "capabilities of other queue pair types");
        attr.tso_caps.supported_qpts = 1 << IBV_QPT_RAW_PACKET;
        attr.rss_caps.supported_qpts = 1 << IBV_QPT_RAW_PACKET;
        attr.rss_caps.max_rwq_indirection_table_size = 64;
        let translated = translate_device(&attr);
        assert_eq!((translated.max_tso, translated.rss.unwrap().max_table_entries), (65536, 64));
        let mut port = ibv_port_attr::zeroed();
        port.state = 77;
        port.link_layer = 9;
        assert_eq!(
            translate_port(&port),
            PortAttributes { state: PortState::Other(77), link_layer: LinkLayer::Other(9), speed: None }
        );
    }
}
