//! An application that operators look into and change while it runs: it returns UDP datagrams to their senders, except
//! those to blocked ports.
//!
//! It adds a drop reason, a counter and commands of its own. They need no code for displays:
//!
//!     cargo run --release --example blocklist &       # on generated traffic; --config FILE: on ports of a file
//!     wirepath command                                # lists the commands
//!     wirepath command block port=9
//!     wirepath show counters
//!     wirepath show drops --where reason=blocked_port
//!     wirepath capture --drops=blocked_port -w - | tshark -r -

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::Parser as _;
use serde_json::{Value, json};
use wirepath::cli::{self, Failure};
use wirepath::control_socket::{ControlSettings, ControlSocket};
use wirepath_packet::{Batch, drops::DropReason};
use wirepath_pipeline::epoch::{Domain, Shared};
use wirepath_pipeline::registry::{Argument, ArgumentKind, Command, CommandSpec, Unit};
use wirepath_pipeline::{Context, Control, ControlPlane, CounterId, RunOptions, Runtime, RuntimeConfig, Summary};
use wirepath_settings::Source;
use wirepath_wire::L4Type;

const GENERATED: &str = "[[port]]\nname = 'generator'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\nflows = 100\n";

const PORT: Argument = Argument::required("port", ArgumentKind::Number, "UDP destination port");
static COMMANDS: [&CommandSpec; 3] = [
    &CommandSpec { name: "block", about: "Drops datagrams to a port", arguments: &[PORT] },
    &CommandSpec { name: "unblock", about: "Returns datagrams to a port again", arguments: &[PORT] },
    &CommandSpec { name: "blocked", about: "Lists the blocked ports", arguments: &[] },
];

/// Blocked ports. The control thread replaces the set as a whole; workers read it without locks.
struct Blocklist {
    ports: BTreeSet<u16>,
    shared: Arc<Shared<BTreeSet<u16>>>,
}

impl Blocklist {
    fn new(domain: &Domain) -> Self {
        Self { ports: BTreeSet::new(), shared: Arc::new(Shared::new(domain, BTreeSet::new())) }
    }
}

impl Control for Blocklist {
    fn commands(&mut self) -> Vec<&'static CommandSpec> {
        COMMANDS.to_vec()
    }

    fn command(&mut self, command: &Command<'_>, _: &mut ControlPlane) -> Result<Value, String> {
        let port = || {
            let number = command.number("port")?.unwrap_or_default();
            u16::try_from(number).map_err(|_| format!("port: found {number}, expected at most 65535"))
        };
        let changed = match command.name {
            "block" => self.ports.insert(port()?),
            "unblock" => self.ports.remove(&port()?),
            "blocked" => return Ok(json!({ "ports": self.ports })),
            _ => return Err(command.unknown()),
        };
        self.shared.replace(self.ports.clone());
        Ok(json!({ "changed": changed, "ports": self.ports }))
    }
}

/// Runs the application until the flag is set or the time is over.
pub(crate) fn run(source: &Source, duration: Option<Duration>, stop: Arc<AtomicBool>) -> Result<Summary, Failure> {
    let blocked = DropReason::register("blocked_port", "the destination port is blocked").map_err(Failure::failed)?;
    let returned = CounterId::register("datagrams_returned", Unit::Packets, "Datagrams returned to their senders")
        .map_err(Failure::failed)?;
    let document = source.parse()?;
    let ports = RuntimeConfig::ports_from_settings(&document.settings())?;
    let config = RuntimeConfig::from_settings(&document.settings())?;
    let settings = ControlSettings::read(&document.settings())?;
    let mut runtime = Runtime::open(ports, config)?;
    if let Some(socket) = ControlSocket::open(&settings, "blocklist", None)? {
        runtime.set_management(Box::new(socket));
    }

    let mut control = Blocklist::new(runtime.domain());
    let stage = |_: &_| {
        let ports = Arc::clone(&control.shared);
        move |context: &mut Context<'_>, batch: &mut Batch| {
            let ports = ports.read(context.guard());
            context.parse_each(batch, |context, mut packet, headers| {
                let layers = headers.outer();
                let udp = layers.udp(packet.data()).filter(|_| layers.l4_type() == L4Type::Udp);
                let Some(udp) = udp else {
                    context.drop(packet, DropReason::RuleDrop);
                    return None;
                };
                if ports.contains(&udp.dst_port()) {
                    context.drop(packet, blocked);
                    return None;
                }
                context.count(returned, 1);
                packet.set_out_port(packet.in_port());
                Some(packet)
            });
        }
    };
    let options = RunOptions { duration, stop: Some(stop), ..RunOptions::default() };
    // The stages keep the shared set, so the control can be lent to the run.
    let mut running = runtime.start(stage)?;
    running.run(&mut control, &options);
    Ok(running.stop(&mut control))
}

#[derive(clap::Parser)]
struct Arguments {
    #[arg(long)]
    config: Option<PathBuf>,
    #[arg(long)]
    seconds: Option<u64>,
}

fn main() -> ExitCode {
    cli::main(|| {
        let arguments = Arguments::parse();
        let generated = || Ok(Source::new("generated traffic", GENERATED));
        let source = arguments.config.as_deref().map_or_else(generated, Source::load)?;
        let stop = cli::Stop::on_signals()?.flag();
        let summary = run(&source, arguments.seconds.map(Duration::from_secs), stop)?;
        cli::print_summary(&summary, "", false)
    })
}
