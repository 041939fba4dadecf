//! Options of the tools that generate traffic: ports, threads and flows.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use wirepath::Config;
use wirepath::cli::{self, Failure};

use crate::pktgen::Generator;
use crate::pktgen::flows::{FlowSet, Pick};
use crate::pktgen::headers::Stack;
use crate::pktgen::ports::{PortName, Role};
use crate::pktgen::size::Sizes;

/// Most threads.
const MAX_THREADS: u16 = 64;
/// Longest file of header stacks in bytes.
const MAX_FILE: u64 = 16 << 20;

/// Ports of a generator, and its threads.
#[derive(Debug, Args)]
pub(super) struct GeneratorArguments {
    /// Ports that send: DRIVER:DEVICE such as af_xdp:eth1, a DEVICE, or the name of a port in --config
    #[arg(long, value_name = "PORT")]
    tx: Vec<PortName>,

    /// Ports that receive. Without such a port, nothing is measured but the sending
    #[arg(long, value_name = "PORT")]
    rx: Vec<PortName>,

    /// Ports that send and receive
    #[arg(short, long, value_name = "PORT")]
    port: Vec<PortName>,

    /// Configuration with tables [[port]], for ports with settings of their own
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Time after the sending in which packets may arrive, in seconds
    #[arg(long, value_name = "N", default_value = "0.5", value_parser = cli::seconds)]
    pub(super) drain: Duration,

    /// Threads: with 1 it sends and receives in turn; of several, the last one receives and the others send
    #[arg(
        short, long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_THREADS))
    )]
    pub(super) threads: u16,

    /// Processors of the threads, such as 2,3
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    pub(super) cores: Vec<usize>,
}

/// Flows of the sending ports.
#[derive(Debug, Args)]
pub(super) struct StreamArguments {
    /// Header stack in the words of flow rules, with ranges and lists of values; several stacks are sent in turn
    /// [default: ipv4 / udp]
    #[arg(short = 'H', long, value_name = "STACK")]
    headers: Vec<String>,

    /// File with a header stack in each line; # begins a comment
    #[arg(long, value_name = "FILE")]
    headers_file: Option<PathBuf>,

    /// Send the first N flows of each stack only [default: all combinations of the values]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    flows: Option<u64>,

    /// Order of the flows: turn, random, zipf or zipf:EXPONENT
    #[arg(long, value_name = "ORDER", default_value = "turn")]
    pick: Pick,

    /// Seed of random flows and sizes
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

impl GeneratorArguments {
    /// Returns the ports with what each of them does.
    pub(super) fn roles(&self) -> Result<Vec<(PortName, Role)>, Failure> {
        let mut ports: Vec<(PortName, Role)> = Vec::new();
        let mut add = |names: &[PortName], sends: bool, receives: bool| {
            for name in names {
                match ports.iter_mut().find(|(other, _)| other == name) {
                    Some((_, role)) => *role = Role { sends: role.sends | sends, receives: role.receives | receives },
                    None => ports.push((name.clone(), Role { sends, receives })),
                }
            }
        };
        add(&self.port, true, true);
        add(&self.tx, true, false);
        add(&self.rx, false, true);
        if !ports.iter().any(|(_, role)| role.sends) {
            return Err(Failure::usage("no port sends; give --tx PORT or --port PORT, see --help"));
        }
        Ok(ports)
    }

    /// Opens and starts the ports.
    pub(super) fn open(&self, ports: &[(PortName, Role)]) -> Result<Generator, Failure> {
        let configured = match &self.config {
            Some(file) => Config::load(file)?.ports,
            None => Vec::new(),
        };
        let settings = PortName::settings(ports, configured)?;
        Generator::open(settings, self.threads, self.cores.clone())
    }
}

impl StreamArguments {
    /// Reads the flows, whose frames have these lengths.
    pub(super) fn flows(&self, sizes: Sizes) -> Result<FlowSet, Failure> {
        let mut stacks = Vec::new();
        for text in &self.headers {
            stacks.push(Stack::parse(text).map_err(|error| Failure::usage(format!("--headers: {error}")))?);
        }
        if let Some(file) = &self.headers_file {
            let refuse = |error: &dyn std::fmt::Display| Failure::usage(format!("{}: {error}", file.display()));
            if std::fs::metadata(file).map_err(|error| refuse(&error))?.len() > MAX_FILE {
                return Err(refuse(&format!("at most {} MiB are read", MAX_FILE >> 20)));
            }
            let text = std::fs::read_to_string(file).map_err(|error| refuse(&error))?;
            for (line, number) in text.lines().zip(1..) {
                let line = line.split('#').next().unwrap_or_default().trim();
                if !line.is_empty() {
                    let stack = Stack::parse(line);
                    stacks
                        .push(stack.map_err(|error| Failure::usage(format!("{}:{number}: {error}", file.display())))?);
                }
            }
        }
        if stacks.is_empty() {
            stacks.push(Stack::parse("ipv4 / udp").map_err(Failure::failed)?);
        }
        Ok(FlowSet { stacks, flows: self.flows, sizes, pick: self.pick, seed: self.seed })
    }
}
