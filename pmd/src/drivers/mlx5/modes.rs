//! Which ways of working are chosen, of those that the device has.

use wirepath_nic_defs::mlx5::{ETH_L2_INLINE, MINI_FORMAT_CSUM, MINI_FORMAT_CSUM_STRIDE, MINI_FORMAT_HASH};
use wirepath_verbs::DeviceAttributes;
use wirepath_verbs::mlx5::Mlx5Capabilities;

use super::nic::MAX_MTU;
use super::rx::{Layout, ReceiveMode};
use super::tx::SendMode;
use super::{Compress, Options, Receive};
use crate::drivers::direct::fault::Fault;
use crate::drivers::direct::receive::buffers_for;
use crate::drivers::direct::{MIN_DEPTH, longest_frame};
use crate::packet::{DATA_ROOM, MAX_PACKET};
use crate::port::PortConfig;

/// Strides of a work request, as a logarithm: as many as its largest size has room for segments, less the first.
const MAX_LOG_STRIDES: u32 = 4;
/// Part numbers of ConnectX-4 and ConnectX-4 Lx, physical and virtual, which want the link-layer header in every descriptor
/// (dpdk: drivers/net/mlx5/mlx5.c, mlx5_set_min_inline).
const WANT_INLINE: std::ops::RangeInclusive<u32> = 0x1013..=0x1016;

/// What was chosen of what the device can do, and what was not and why.
#[derive(Clone, Debug)]
pub(super) struct Modes {
    pub(super) send: SendMode,
    layout: Receive,
    /// Strides of a work request, logarithm.
    log_strides: u32,
    format: Option<u8>,
    pub(super) tick: u64,
    pub(super) strip: bool,
    pub(super) checksums: bool,
    pub(super) notes: Vec<String>,
    /// Whether an error may lead to headers in descriptors.
    learns: bool,
}

impl Modes {
    pub(super) fn choose(options: &Options, can: &Mlx5Capabilities, attributes: &DeviceAttributes) -> Self {
        let mut notes = vec![format!("frames end at an MTU of {MAX_MTU}, or where the kernel's interface ends them")];
        let wants = if WANT_INLINE.contains(&attributes.part_id) { ETH_L2_INLINE } else { 0 };
        let inline_minimum = options.min_inline.unwrap_or(wants);
        if options.multi_packet && !can.multi_packet {
            notes.push("one send descriptor for each packet: the device has no multi-packet descriptors".to_owned());
        }
        let mut layout = options.receive;
        let mut log_strides = 0;
        if layout == Receive::Striding {
            let fits = can.striding.as_ref().filter(|can| can.log_bytes.contains(&DATA_ROOM.ilog2()));
            let least = fits.map(|can| *can.log_strides.start()).filter(|least| *least <= MAX_LOG_STRIDES);
            match (least, fits) {
                (Some(least), Some(can)) => log_strides = MAX_LOG_STRIDES.min(*can.log_strides.end()).max(least),
                _ => {
                    notes.push(format!(
                        "linear receive queue: the device has no work requests of up to {} strides of {DATA_ROOM} bytes",
                        1 << MAX_LOG_STRIDES
                    ));
                    layout = Receive::Linear;
                }
            }
        }
        let formats = can.compression.map_or(0, |can| can.formats);
        let wanted = match (options.compress, layout) {
            _ if options.timestamps => None,
            (Compress::Off, _) => None,
            (_, Receive::Striding) => Some(MINI_FORMAT_CSUM_STRIDE),
            (Compress::Checksum, _) => Some(MINI_FORMAT_CSUM),
            _ => Some(MINI_FORMAT_HASH),
        };
        let format = wanted.filter(|format| formats & u32::from(*format) != 0);
        if wanted != format {
            notes.push("one completion for each packet: the device cannot compress them in this format".to_owned());
        }
        let tick = if options.timestamps && attributes.clock_khz > 0 {
            // Nanoseconds of a tick in 32.32 bits.
            (1_000_000u64 << 32) / attributes.clock_khz
        } else {
            0
        };
        if options.timestamps && tick == 0 {
            notes.push("no timestamps: the device does not tell how fast its clock runs".to_owned());
        }
        if !attributes.raw_packet.vlan_strip {
            notes.push("VLAN tags stay in received frames: the device does not take them off".to_owned());
        }
        Self {
            send: SendMode {
                inline_minimum,
                inline: options.inline,
                multi_packet: options.multi_packet && can.multi_packet && inline_minimum == 0 && options.inline == 0,
                max_tso: (attributes.max_tso as usize).min(MAX_PACKET),
                tunnels: if options.tunnels { can.tunnels } else { 0 },
                blue_flame: options.blue_flame,
            },
            layout,
            log_strides,
            format,
            tick,
            strip: attributes.raw_packet.vlan_strip,
            checksums: attributes.raw_checksum,
            notes,
            learns: options.min_inline.is_none(),
        }
    }

    /// The hash of a compressed completion is there in one format only.
    pub(super) fn has_hash(&self) -> bool {
        self.format.is_none_or(|format| format == MINI_FORMAT_HASH)
    }

    /// In words.
    pub(super) fn text(&self) -> String {
        let receive = match self.layout {
            Receive::Linear => "linear receive".to_owned(),
            Receive::Striding => format!("striding receive ({} strides of {DATA_ROOM} bytes)", 1 << self.log_strides),
        };
        let completions = match self.format {
            None => "plain completions",
            Some(MINI_FORMAT_HASH) => "completions compressed by hash",
            Some(MINI_FORMAT_CSUM) => "completions compressed by checksum",
            Some(_) => "completions compressed by stride",
        };
        let send = match self.send {
            SendMode { multi_packet: true, .. } => "multi-packet send".to_owned(),
            SendMode { inline_minimum: 0, inline: 0, .. } => "send by pointer".to_owned(),
            SendMode { inline_minimum, inline, .. } => {
                format!("send with {} bytes inline", inline.max(inline_minimum))
            }
        };
        let register = match self.send.blue_flame {
            0 => String::new(),
            bytes => format!(", lone descriptors of up to {bytes} bytes by BlueFlame"),
        };
        format!("direct verbs, {receive}, {completions}, {send}{register}")
    }

    /// How packets lie in the receive queues of a port.
    pub(super) fn layout(&self, config: &PortConfig) -> Layout {
        match self.layout {
            Receive::Linear => Layout::Linear { buffers: buffers_for(longest_frame(config.mtu)) },
            Receive::Striding => Layout::Striding { log: self.log_strides },
        }
    }

    /// How its receive queues work.
    pub(super) fn receive(&self, config: &PortConfig) -> ReceiveMode {
        let longest = longest_frame(config.mtu) as u32;
        ReceiveMode { layout: self.layout(config), format: self.format, tick: self.tick, longest }
    }

    /// Work requests of a receive ring: one of long frames holds about as many buffers as one of short frames.
    pub(super) fn receive_depth(&self, config: &PortConfig) -> u32 {
        let buffers = self.layout(config).buffers() as u32;
        let least = match self.layout {
            Receive::Linear => MIN_DEPTH,
            // More than one at a time, so that the next is there when one is used up.
            Receive::Striding => (MIN_DEPTH >> self.log_strides).max(4),
        };
        (config.depth / buffers).max(least).next_power_of_two()
    }

    /// Draws a conclusion from an error: some devices want the link-layer header in every descriptor, which no verb tells.
    pub(super) fn learn(&mut self, fault: Fault) {
        if fault.is_malformed() && self.learns && self.send.inline_minimum == 0 {
            self.send.inline_minimum = ETH_L2_INLINE;
            self.send.multi_packet = false;
            self.notes.push(format!(
                "{ETH_L2_INLINE} bytes of each packet lie in its send descriptor: the device refused one without"
            ));
        }
    }
}
