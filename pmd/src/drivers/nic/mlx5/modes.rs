//! Choice of operating modes, by settings and capabilities of the device.

use wirepath_nic_defs::mlx5::{ETH_L2_INLINE, MINI_FORMAT_CSUM, MINI_FORMAT_CSUM_STRIDE, MINI_FORMAT_HASH};
use wirepath_nic_defs::uverbs::mlx5::{SW_PARSING, SW_PARSING_CSUM, SW_PARSING_LSO};
use wirepath_verbs::DeviceAttributes;
use wirepath_verbs::mlx5::Mlx5Capabilities;

use super::rx::{Layout, RxConfig};
use super::tx::TxConfig;
use super::{CqeCompression, Options, RxMode};
use crate::drivers::nic::common::queue_fault::QueueFault;
use crate::drivers::nic::common::rx_queue::buffers_for;
use crate::drivers::nic::common::{MIN_DEPTH, max_frame_len};
use crate::port::PortConfig;
use wirepath_packet::{DATA_ROOM, MAX_PACKET};

/// Largest MTU (linux: drivers/net/ethernet/mellanox/mlx5/core/en_main.c uses the firmware's limit, about
/// 9978).
pub(super) const MAX_MTU: u16 = 9900;
/// Log2 of the strides of a work request: the largest request has this many segments, besides the first.
const MAX_LOG_STRIDES: u32 = 4;
/// PCI device IDs of ConnectX-4 and ConnectX-4 Lx, physical and virtual functions. They need the Ethernet
/// header in every descriptor (dpdk: drivers/net/mlx5/mlx5.c, mlx5_set_min_inline).
const WANT_INLINE: std::ops::RangeInclusive<u32> = 0x1013..=0x1016;

/// Returns the nanoseconds of a clock tick, in 32.32 bits. 0: the frequency is not known.
fn tick(khz: u64) -> u64 {
    (1_000_000u64 << 32).checked_div(khz).unwrap_or(0)
}

/// The chosen modes, with notes on modes that are unavailable.
#[derive(Clone, Debug)]
pub(super) struct Modes {
    pub(super) send: TxConfig,
    layout: RxMode,
    /// Log2 of the strides of a work request.
    log_strides: u32,
    format: Option<u8>,
    pub(super) tick: u64,
    pub(super) strip: bool,
    pub(super) checksums: bool,
    pub(super) notes: Vec<String>,
    /// True if a fault may switch to inline headers.
    adapts: bool,
}

impl Modes {
    /// `needs_inline_header`: the kernel reports that descriptors must contain the Ethernet header.
    pub(super) fn choose(
        options: &Options,
        capabilities: &Mlx5Capabilities,
        attributes: &DeviceAttributes,
        needs_inline_header: bool,
    ) -> Self {
        let mut notes = vec![format!("the MTU is at most {MAX_MTU}, or that of the kernel's interface")];
        let needs_inline_header = needs_inline_header || WANT_INLINE.contains(&attributes.part_id);
        let required = if needs_inline_header { ETH_L2_INLINE } else { 0 };
        let inline_minimum = options.min_inline.unwrap_or(required);
        if options.multi_packet && !capabilities.multi_packet {
            notes.push(
                "one send descriptor per packet: the device does not support multi-packet descriptors".to_owned(),
            );
        }
        let mut layout = options.rx_mode;
        let mut log_strides = 0;
        if layout == RxMode::Striding {
            let fits = capabilities
                .striding
                .as_ref()
                .filter(|capabilities| capabilities.log_bytes.contains(&DATA_ROOM.ilog2()));
            let least =
                fits.map(|capabilities| *capabilities.log_strides.start()).filter(|least| *least <= MAX_LOG_STRIDES);
            match (least, fits) {
                (Some(least), Some(capabilities)) => {
                    log_strides = MAX_LOG_STRIDES.min(*capabilities.log_strides.end()).max(least);
                }
                _ => {
                    notes.push(format!(
                        "linear receive queue: the device does not support work requests of {} strides of \
                         {DATA_ROOM} bytes",
                        1 << MAX_LOG_STRIDES
                    ));
                    layout = RxMode::Linear;
                }
            }
        }
        let formats = capabilities.compression.map_or(0, |capabilities| capabilities.formats);
        let wanted = match (options.cqe_compression, layout) {
            _ if options.timestamps => None,
            (CqeCompression::Off, _) => None,
            (_, RxMode::Striding) => Some(MINI_FORMAT_CSUM_STRIDE),
            (CqeCompression::Checksum, _) => Some(MINI_FORMAT_CSUM),
            _ => Some(MINI_FORMAT_HASH),
        };
        let format = wanted.filter(|format| formats & u32::from(*format) != 0);
        if wanted != format {
            notes.push("one completion per packet: the device does not support this compression format".to_owned());
        }
        let tick = if options.timestamps { tick(attributes.clock_khz) } else { 0 };
        if !attributes.raw_packet.vlan_strip {
            notes.push("VLAN tags stay in received frames: the device cannot strip them".to_owned());
        }
        let max_tso = (attributes.max_tso as usize).min(MAX_PACKET);
        // Linux requires the same three (drivers/net/ethernet/mellanox/mlx5/core/en.h, `mlx5_tx_swp_supported`).
        let parser = SW_PARSING | SW_PARSING_CSUM | SW_PARSING_LSO;
        let sw_parser = options.tunnels && capabilities.sw_parsing & parser == parser;
        if max_tso > 0 && options.tunnels && !sw_parser {
            notes.push(
                "superframes in tunnels other than VXLAN and GRE are cut in software: the device takes no header \
                 offsets"
                    .to_owned(),
            );
        }
        Self {
            send: TxConfig {
                inline_minimum,
                inline: options.tx_inline,
                multi_packet: options.multi_packet
                    && capabilities.multi_packet
                    && inline_minimum == 0
                    && options.tx_inline == 0,
                max_tso,
                tunnels: if options.tunnels { capabilities.tunnels } else { 0 },
                sw_parser,
                blue_flame: options.blue_flame,
            },
            layout,
            log_strides,
            format,
            tick,
            strip: attributes.raw_packet.vlan_strip,
            checksums: attributes.raw_checksum,
            notes,
            adapts: options.min_inline.is_none(),
        }
    }

    /// Returns true if completions contain the hash. Only one compressed format does.
    pub(super) fn has_hash(&self) -> bool {
        self.format.is_none_or(|format| format == MINI_FORMAT_HASH)
    }

    /// Describes the modes.
    pub(super) fn text(&self) -> String {
        let receive = match self.layout {
            RxMode::Linear => "linear receive".to_owned(),
            RxMode::Striding => format!("striding receive ({} strides of {DATA_ROOM} bytes)", 1 << self.log_strides),
        };
        let completions = match self.format {
            None => "plain completions",
            Some(MINI_FORMAT_HASH) => "completions compressed by hash",
            Some(MINI_FORMAT_CSUM) => "completions compressed by checksum",
            Some(_) => "completions compressed by stride",
        };
        let send = match self.send {
            TxConfig { multi_packet: true, .. } => "multi-packet send".to_owned(),
            TxConfig { inline_minimum: 0, inline: 0, .. } => "send by pointer".to_owned(),
            TxConfig { inline_minimum, inline, .. } => {
                format!("send with {} bytes inline", inline.max(inline_minimum))
            }
        };
        let register = match self.send.blue_flame {
            0 => String::new(),
            bytes => format!(", single descriptors up to {bytes} bytes by BlueFlame"),
        };
        format!("direct verbs, {receive}, {completions}, {send}{register}")
    }

    /// Returns the buffer layout of a port's receive queues.
    pub(super) fn layout(&self, config: &PortConfig) -> Layout {
        match self.layout {
            RxMode::Linear => Layout::Linear { buffers: buffers_for(max_frame_len(config.mtu)) },
            RxMode::Striding => Layout::Striding { log: self.log_strides },
        }
    }

    /// Returns the configuration of a port's receive queues.
    pub(super) fn receive(&self, config: &PortConfig) -> RxConfig {
        let longest = max_frame_len(config.mtu) as u32;
        RxConfig { layout: self.layout(config), format: self.format, tick: self.tick, longest }
    }

    /// Returns the work requests of a receive ring. The number of buffers is about the same for short and
    /// long frames.
    pub(super) fn receive_depth(&self, config: &PortConfig) -> u32 {
        let buffers = self.layout(config).buffers() as u32;
        let least = match self.layout {
            RxMode::Linear => MIN_DEPTH,
            // More than one request at a time, so that the next is posted when one is used up.
            RxMode::Striding => (MIN_DEPTH >> self.log_strides).max(4),
        };
        (config.depth / buffers).max(least).next_power_of_two()
    }

    /// Returns true if a malformed-descriptor error may switch to inline headers.
    pub(super) fn adapts(&self) -> bool {
        self.adapts && self.send.inline_minimum == 0
    }

    /// Switches to inline headers after a malformed-descriptor error. An administrator can change the mode of a
    /// virtual function while it is in use (devlink-dev(8), `inline-mode`).
    pub(super) fn adapt_to_fault(&mut self, fault: QueueFault) {
        if fault.is_malformed() && self.adapts() {
            self.send.inline_minimum = ETH_L2_INLINE;
            self.send.multi_packet = false;
            self.notes.push(format!(
                "{ETH_L2_INLINE} bytes of each packet are inline: the device refused a descriptor without"
            ));
        }
    }
}
