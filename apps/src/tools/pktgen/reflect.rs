//! `wirepath pktgen reflect`: sends every packet back.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use wirepath::Config;
use wirepath::cli::{self, Failure, Stop, print_summary};
use wirepath::control_socket::ControlSocket;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, PortId};
use wirepath_pipeline::{Context, Control, Rates, RunOptions, Runtime};

use crate::pktgen::ports::{PortName, Role};

/// Sends every packet back to where it came from, with addresses and ports swapped
///
/// MAC addresses, IP addresses and the ports of TCP and UDP are exchanged, of the outermost headers; checksums stay
/// valid. Packets with invalid headers or a group address are dropped and counted. It runs until Ctrl-C and prints a
/// summary.
#[derive(Debug, Args)]
pub(super) struct Options {
    /// Ports to reflect on: DRIVER:DEVICE, a DEVICE, or the name of a port in --config
    #[arg(short, long, value_name = "PORT", required = true)]
    port: Vec<PortName>,

    /// Configuration with tables [[port]] and [workers]
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Stop after this time [default: never]
    #[arg(short, long, value_name = "N", value_parser = cli::seconds)]
    seconds: Option<Duration>,
}

/// Shows rates.
struct Live(bool);

impl Control for Live {
    fn rates(&mut self, rates: &Rates) {
        if self.0 {
            cli::show_live(&cli::rates_table(rates));
        }
    }
}

/// Exchanges the addresses of each packet and sends it to the port that it came from.
fn reflect(context: &mut Context<'_>, batch: &mut Batch) {
    let port: Option<PortId> = context.in_port();
    context.parse_each(batch, |context, mut packet, parsed| {
        // A group address is no source, and two reflectors would send such packets to each other for ever.
        if packet.data().first().is_some_and(|byte| byte & 1 != 0) {
            context.drop(packet, DropReason::NotRoutable);
            return None;
        }
        let mut headers = packet.headers_mut(parsed);
        if let Some(mut udp) = headers.udp() {
            udp.swap_ports();
        } else if let Some(mut tcp) = headers.tcp() {
            tcp.swap_ports();
        }
        if let Some(mut ip) = headers.ip() {
            ip.swap_addresses();
        }
        if let Some(mut ethernet) = headers.ethernet() {
            ethernet.swap_addresses();
        }
        packet.set_out_port(port);
        Some(packet)
    });
}

pub(super) fn run(options: &Options, json: bool) -> Result<(), Failure> {
    let (configured, runtime, control) = match &options.config {
        Some(path) => {
            let config = Config::load(path)?;
            (config.ports, config.runtime, config.control)
        }
        None => Default::default(),
    };
    let role = Role { sends: true, receives: true };
    let names: Vec<(PortName, Role)> = options.port.iter().map(|name| (name.clone(), role)).collect();
    let settings = PortName::settings(&names, configured)?.into_iter().map(|(port, _)| port).collect();
    let stop = Stop::on_signals()?;
    let mut opened = Runtime::open(settings, runtime)?;
    if let Some(socket) = ControlSocket::open(&control, "pktgen-reflect", options.config.as_deref())? {
        opened.set_management(Box::new(socket));
    }
    let is_live = !json && cli::can_redraw();
    let run = RunOptions {
        duration: options.seconds,
        stop: Some(stop.flag()),
        report_every: is_live.then_some(Duration::from_secs(1)),
    };
    let mut control = Live(is_live);
    let mut running = opened.start(|_| reflect)?;
    running.run(&mut control, &run);
    let summary = running.stop(&mut control);
    print_summary(&summary, "", json)?;
    if summary.failures.is_empty() { Ok(()) } else { Err(Failure::failed(summary.failures.join("; "))) }
}
