use std::fmt;

use super::ToKernel;
use crate::packet::offload::bits;
pub use wirepath_wire::MacAddr as MacAddress;

bits! {
    /// Work that a device takes over.
    Offloads: u32 {
        /// Receive: verdicts on the IPv4 header checksum.
        RX_L3_CHECKSUM = 0;
        /// Receive: verdicts on TCP and UDP checksums.
        RX_L4_CHECKSUM = 1;
        /// Receive: verdicts on inner checksums of tunnelled packets.
        RX_TUNNEL_CHECKSUM = 2;
        /// Receive: VLAN tags taken off into the metadata.
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
        /// Transmit: outer and inner checksums of tunnelled packets.
        TX_TUNNEL_CHECKSUM = 10;
        /// Transmit: VLAN tags inserted from the metadata.
        TX_VLAN_INSERT = 11;
        /// Transmit: TCP segmentation.
        TX_SEGMENT = 12;
        /// Transmit: packets of several segments, without a copy.
        TX_CHAINS = 13;
        /// Transmit: metadata for egress rules.
        TX_METADATA = 14;
    }
}

/// What a port can do and the mode it is in, as data.
#[derive(Clone, Debug)]
pub struct Capabilities {
    /// Name of the driver.
    pub driver: &'static str,
    /// Interface, file or address that the driver opened.
    pub device: String,
    /// The mode that the port really got, in words: `"native XDP, copy, need-wakeup"`.
    pub mode: String,
    /// What the port does not do although one might expect it, each with the reason: fallbacks taken, things that the tests could not
    /// prove on the hardware at hand.
    pub notes: Vec<String>,
    /// Link-layer address, where the device has one.
    pub mac: Option<MacAddress>,
    /// Most receive queues.
    pub max_rx_queues: u16,
    /// Most transmit queues.
    pub max_tx_queues: u16,
    /// Largest MTU in bytes.
    pub max_mtu: u16,
    /// Most ring entries.
    pub max_depth: u32,
    /// Work that the device takes over.
    pub offloads: Offloads,
    /// Most segments of a packet that goes out without a copy.
    pub max_tx_segments: u16,
    /// NUMA node of the device, where it has one.
    pub numa_node: Option<u32>,
    /// Whether an idle worker can sleep until the port has packets.
    pub can_wait: bool,
    /// What becomes of the VLAN tags of received frames.
    pub vlan_tags: VlanTags,
    /// How packets get to the kernel's network stack. As `mode`, certain only once the port is started.
    pub to_kernel: ToKernel,
}

/// What becomes of the VLAN tags of received frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VlanTags {
    /// Every tag is in the frame, or beside it in the packet's metadata.
    Kept,
    /// A tag that the kernel or the device holds beside the frame does not reach the port: a tagged frame may look untagged. An
    /// application that tells segments apart by VLAN must refuse the port.
    Lost,
}

impl Capabilities {
    /// Of a plain device: one queue each way, frames to 9216 bytes, nothing taken over.
    pub fn plain(driver: &'static str, device: impl Into<String>) -> Self {
        Self {
            driver,
            device: device.into(),
            mode: String::new(),
            notes: Vec::new(),
            mac: None,
            max_rx_queues: 1,
            max_tx_queues: 1,
            max_mtu: 9216 - 14,
            max_depth: 1 << 16,
            offloads: Offloads::NONE,
            max_tx_segments: 1,
            numa_node: None,
            can_wait: false,
            vlan_tags: VlanTags::Kept,
            to_kernel: ToKernel::No(super::NO_KERNEL),
        }
    }
}

/// Up or down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// Packets flow.
    Up,
    /// No carrier, or switched off.
    Down,
}

/// State of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Up or down.
    pub state: LinkState,
    /// Speed in Mbit/s, where the device says so.
    pub speed: Option<u32>,
}

impl Link {
    /// Up, at no particular speed.
    pub const UP: Self = Self { state: LinkState::Up, speed: None };
    /// Down.
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
