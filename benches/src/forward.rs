//! Forwarding between two ports: the cost of the framework.

use clap::ValueEnum;
use wirepath::cli::Failure;
use wirepath_packet::Batch;
use wirepath_pipeline::{Context, Stage};
use wirepath_pmd::drivers::PortSettings;
use wirepath_pmd::drivers::r#virtual::null::FrameSpec;
use wirepath_wire::{MacAddr, ethernet};

use crate::measure::{self, Common, Figures, PacketLimit, Work};
use crate::real::{Offered, RealPorts};

/// Queues of a port without a device.
const MAX_QUEUES: u16 = 256;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Ports to forward between
    #[arg(long, value_enum, default_value_t = Driver::Null, conflicts_with = "through")]
    driver: Driver,

    #[command(flatten)]
    real: RealPorts,

    /// Operation on each packet
    #[arg(long, value_enum, default_value_t = Mode::Macswap)]
    mode: Mode,

    /// Bytes of a frame, without frame check sequence
    #[arg(long, value_name = "BYTES", default_value_t = 64, value_parser = clap::value_parser!(u16).range(60..=2048))]
    size: u16,

    /// Flows that a generator or a capture has, which differ in their UDP ports
    #[arg(
        long, value_name = "N", default_value_t = 1000, requires = "through",
        value_parser = clap::value_parser!(u32).range(1..=1_000_000)
    )]
    flows: u32,

    /// Number of workers; each has a queue of each port in each direction, and a core of its own from --core on
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    workers: u16,

    /// Queues of each port for each worker
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    queues: u16,

    #[command(flatten)]
    pub(crate) common: Common,

    #[command(flatten)]
    limit: PacketLimit,
}

#[derive(Clone, Copy, ValueEnum)]
enum Driver {
    /// Source and sink without a device, which touch no frame
    Null,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Mode {
    /// None: only from port to port
    Io,
    /// Rewrite both addresses
    Mac,
    /// Swap the two addresses
    Macswap,
}

pub(crate) fn run(arguments: &Arguments) -> Result<Option<Figures>, Failure> {
    let queues = arguments.workers.saturating_mul(arguments.queues);
    if queues > MAX_QUEUES {
        return Err(Failure::usage(format!(
            "--workers and --queues: {queues} queues; at most {MAX_QUEUES} are possible"
        )));
    }
    let ports = match arguments.real.settings(["a", "b"], queues)? {
        Some(ports) => ports.into(),
        None => ports_without_device(arguments, queues)?,
    };
    match arguments.mode {
        Mode::Io => measure(arguments, ports, |_| ()),
        Mode::Mac => measure(arguments, ports, rewrite),
        Mode::Macswap => measure(arguments, ports, swap),
    }
}

fn measure(
    arguments: &Arguments,
    ports: Vec<PortSettings>,
    change: impl Fn(&mut [u8]) + Copy + Send + 'static,
) -> Result<Option<Figures>, Failure> {
    let common = arguments.common.with_workers(arguments.workers);
    let frames = |source: u8, destination: u8| {
        let spec = FrameSpec {
            size: arguments.size.into(),
            flows: arguments.flows,
            source_mac: MacAddr([2, 0, 0, 0, 0, source]),
            destination_mac: MacAddr([2, 0, 0, 0, 0, destination]),
            vary_destination_mac: false,
            ..FrameSpec::default()
        };
        spec.build().map_err(Failure::usage)
    };
    let offered = match arguments.real.needs_frames() {
        true => [Some(frames(0xa, 0xb)?), Some(frames(0xb, 0xa)?)],
        false => Offered::default(),
    };
    measure::run(ports, &common, &arguments.limit, &arguments.real, |_| {
        Ok(Work { stages: Box::new(move |_| cross(change)), offered })
    })
}

fn ports_without_device(arguments: &Arguments, queues: u16) -> Result<Vec<PortSettings>, Failure> {
    let Driver::Null = arguments.driver;
    let (size, ring) = (arguments.size, arguments.common.ring());
    let port = |name| {
        format!(
            "[[port]]\nname = \"{name}\"\ndriver = \"null\"\nqueues = {queues}\nnull = {{ source = \
             \"untouched\", size = {size}, ring = {ring} }}\n"
        )
    };
    measure::ports(&(port("a") + &port("b")))
}

/// Sends the packets of one port to the other, after `change` has processed each frame.
pub(crate) fn cross(change: impl Fn(&mut [u8]) + Send) -> impl Stage {
    move |context: &mut Context<'_>, batch: &mut Batch| {
        let Some(port) = context.in_port() else { return };
        for packet in batch.iter_mut() {
            change(packet.data_mut());
        }
        context.send_batch(port.paired(), batch);
    }
}

fn swap(frame: &mut [u8]) {
    if let Ok(mut header) = ethernet::ViewMut::new(frame) {
        header.swap_addresses();
    }
}

fn rewrite(frame: &mut [u8]) {
    if let Some(addresses) = frame.first_chunk_mut::<12>() {
        *addresses = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    }
}
