use std::fmt;

use super::KernelPunt;
use wirepath_packet::flag_set;
pub use wirepath_wire::MacAddr;

flag_set! {
    /// Offloads of a device.
    Offloads: u32 {
        /// Receive: checksum status of the IPv4 header.
        RX_L3_CHECKSUM = 0;
        /// Receive: checksum status of TCP and UDP.
        RX_L4_CHECKSUM = 1;
        /// Receive: status of inner checksums of tunnel packets.
        RX_TUNNEL_CHECKSUM = 2;
        /// Receive: VLAN tags are stripped into the metadata.
        RX_VLAN_STRIP = 3;
        /// Receive: RSS hash in the metadata.
        RX_HASH = 4;
        /// Receive: hardware timestamps.
        RX_TIMESTAMP = 5;
        /// Receive: marks of flow rules.
        RX_MARK = 6;
        /// Receive: packets of several segments.
        RX_CHAINS = 7;
        /// Transmit: IPv4 header checksum.
        TX_L3_CHECKSUM = 8;
        /// Transmit: TCP and UDP checksums.
        TX_L4_CHECKSUM = 9;
        /// Transmit: outer and inner checksums of tunnel packets.
        TX_TUNNEL_CHECKSUM = 10;
        /// Transmit: VLAN tags are inserted from the metadata.
        TX_VLAN_INSERT = 11;
        /// Transmit: TCP segmentation.
        TX_SEGMENT = 12;
        /// Transmit: packets of several segments, without a copy.
        TX_CHAINS = 13;
        /// Transmit: metadata for egress rules.
        TX_METADATA = 14;
        /// Receive: superframes of TCP and UDP that another port must segment.
        RX_SUPERFRAMES = 15;
    }
}

/// Capabilities of a port and the mode that it runs in, as data.
#[derive(Clone, Debug)]
pub struct Capabilities {
    /// Name of the driver.
    pub driver: &'static str,
    /// Interface, file or address that the driver opened.
    pub device: String,
    /// Name of the kernel's interface of the device, if it is another one.
    pub interface: Option<String>,
    /// Mode that the port runs in, for example `"native XDP, copy, need-wakeup"`.
    pub mode: String,
    /// Missing features that a user may expect, each with the reason: fallbacks, and features that the tests
    /// could not verify on the available hardware.
    pub notes: Vec<String>,
    /// Link-layer address, if the device has one.
    pub mac: Option<MacAddr>,
    /// Largest number of receive queues.
    pub max_rx_queues: u16,
    /// Largest number of transmit queues.
    pub max_tx_queues: u16,
    /// MTU of the device itself in bytes, if it has one. A port must not send longer packets.
    pub mtu: Option<u32>,
    /// Largest MTU of a port in bytes.
    pub max_mtu: u16,
    /// Largest number of ring entries.
    pub max_depth: u32,
    /// Offloads of the device.
    pub offloads: Offloads,
    /// Largest number of segments of a packet that is transmitted without a copy.
    pub max_tx_segments: u16,
    /// NUMA node of the device, if it has one.
    pub numa_node: Option<u32>,
    /// True if an idle worker can sleep until the port has packets.
    pub can_wait: bool,
    /// Treatment of the VLAN tags of received frames.
    pub vlan_tags: VlanTags,
    /// True if the port can leave a part of the packets with the kernel ([`super::Bifurcation`]).
    pub can_bifurcate: bool,
    /// Path of packets to the kernel's network stack. Like `mode`, it is final only after the start of the
    /// port.
    pub kernel_punt: KernelPunt,
}

/// Treatment of the VLAN tags of received frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VlanTags {
    /// Every tag is in the frame or in the packet's metadata.
    Kept,
    /// Tags that the kernel or the device stripped do not reach the port, so a tagged frame may look
    /// untagged. An application that distinguishes segments by VLAN must refuse the port.
    Lost,
}

impl Capabilities {
    /// Returns the name of the kernel's interface of the device. A device without one has its own name here.
    pub fn interface(&self) -> &str {
        self.interface.as_deref().unwrap_or(&self.device)
    }

    /// Capabilities of a device without special features: one queue per direction, frames of up to 9216
    /// bytes, no offloads.
    pub fn plain(driver: &'static str, device: impl Into<String>) -> Self {
        Self {
            driver,
            device: device.into(),
            interface: None,
            mode: String::new(),
            notes: Vec::new(),
            mac: None,
            max_rx_queues: 1,
            max_tx_queues: 1,
            mtu: None,
            max_mtu: 9216 - 14,
            max_depth: 1 << 16,
            offloads: Offloads::NONE,
            max_tx_segments: 1,
            numa_node: None,
            can_wait: false,
            vlan_tags: VlanTags::Kept,
            can_bifurcate: false,
            kernel_punt: KernelPunt::No(super::NO_KERNEL),
        }
    }
}

/// Link state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// The link carries packets.
    Up,
    /// The link has no carrier, or is administratively down.
    Down,
}

/// State and speed of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// State.
    pub state: LinkState,
    /// Speed in Mbit/s, if the device reports it.
    pub speed: Option<u32>,
}

impl Link {
    /// Link up, speed unknown.
    pub const UP: Self = Self { state: LinkState::Up, speed: None };
    /// Link down.
    pub const DOWN: Self = Self { state: LinkState::Down, speed: None };
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.state, self.speed) {
            (LinkState::Down, _) => f.write_str("down"),
            (LinkState::Up, None) => f.write_str("up"),
            (LinkState::Up, Some(speed)) => write!(f, "up, {speed} Mbit/s"),
        }
    }
}
