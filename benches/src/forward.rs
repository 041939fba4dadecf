//! Forwarding between two ports: the cost of the framework.

use clap::ValueEnum;
use wirepath::cli::Failure;
use wirepath_apps::pktgen::ports::{PortName, Role};
use wirepath_packet::Batch;
use wirepath_pipeline::{Context, Stage};
use wirepath_pmd::drivers::PortSettings;
use wirepath_wire::ethernet;

use crate::measure::{self, Common, Figures, PacketLimit};

/// Queues of a port without a device.
const MAX_QUEUES: u16 = 256;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Ports to forward between
    #[arg(long, value_enum, default_value_t = Driver::Null)]
    driver: Driver,

    /// Two ports of this machine instead of --driver, named as for `wirepath pktgen`. Others send to them: offer more
    /// than the workers can take, because the cycles include turns without a packet
    #[arg(long, value_name = "A,B", value_delimiter = ',', conflicts_with_all = ["driver", "size", "buffers"])]
    through: Vec<PortName>,

    /// Operation on each packet
    #[arg(long, value_enum, default_value_t = Mode::Macswap)]
    mode: Mode,

    /// Bytes of a frame
    #[arg(long, value_name = "BYTES", default_value_t = 64, value_parser = clap::value_parser!(u16).range(60..=2048))]
    size: u16,

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

pub(crate) fn run(arguments: &Arguments) -> Result<Figures, Failure> {
    let queues = arguments.workers.saturating_mul(arguments.queues);
    if queues > MAX_QUEUES {
        return Err(Failure::usage(format!(
            "--workers and --queues: {queues} queues; at most {MAX_QUEUES} are possible"
        )));
    }
    let ports = if arguments.through.is_empty() {
        ports_without_device(arguments, queues)?
    } else {
        named_ports(&arguments.through, queues)?
    };
    let (common, limit) = (arguments.common.with_workers(arguments.workers), &arguments.limit);
    match arguments.mode {
        Mode::Io => measure::run(ports, &common, limit, |_| Ok(Box::new(|_| cross(|_| ())))),
        Mode::Mac => measure::run(ports, &common, limit, |_| Ok(Box::new(|_| cross(rewrite)))),
        Mode::Macswap => measure::run(ports, &common, limit, |_| Ok(Box::new(|_| cross(swap)))),
    }
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

fn named_ports(names: &[PortName], queues: u16) -> Result<Vec<PortSettings>, Failure> {
    let [a, b] = names else {
        return Err(Failure::usage("--through: expected two ports, such as af_xdp:eth0,af_xdp:eth1"));
    };
    let role = Role { sends: true, receives: true };
    let ports = PortName::settings(&[(a.clone(), role), (b.clone(), role)], Vec::new())?;
    Ok(ports.into_iter().map(|(port, _)| PortSettings { queues, ..port }).collect())
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
