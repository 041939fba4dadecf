//! Joins two ports, and limits the TCP SYNs of each IPv4 source, on several workers.
//!
//! Each worker has a table of the sources whose packets it receives. RSS gives it all packets of a flow. It ages the
//! table by a timer; the control thread lists the tables, and a job of each worker clears them:
//!
//!     cargo run --release --example limiter -- --seconds 3               # two workers on generated traffic
//!     cargo run --release --example limiter -- --config my-ports.toml    # `queues = 2`, [workers], [limiter]
//!     wirepath show sources
//!     wirepath command reset

#[path = "limiter/sources.rs"]
mod sources;

use std::sync::Arc;
use std::time::Duration;

use wirepath::prelude::*;
use wirepath::wire::tcp::flags::{ACK, SYN};

pub(crate) use sources::Sources;

const DEMONSTRATION: &str = "
port = [
    { name = 'outside', driver = 'null', queues = 2, null = { source = 'tcp4_syn', flows = 100 } },
    { name = 'inside', driver = 'null', queues = 2 },
]
[workers]
count = 2
[limiter]
rate = 1000
";

/// Seconds until a source without SYNs is forgotten.
const AGEING: u32 = 60;

/// The table `[limiter]`: SYNs per second that a source may send to each worker.
pub(crate) struct Rate(pub(crate) u32);

impl AppSettings for Rate {
    fn read(top: &Settings<'_>, _: &[String]) -> Result<Self, ConfigError> {
        top.required_table("limiter")?.complete(|table| table.required_integer("rate", 1..=1_000_000).map(Self))
    }
}

/// The stage of a worker.
pub(crate) struct Limiter {
    pub(crate) rate: u32,
    pub(crate) sources: Arc<Sources>,
    pub(crate) syn_rate: DropReason,
    pub(crate) syns: CounterId,
}

impl Stage for Limiter {
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        context.parse_each(batch, |context, mut packet, headers| {
            packet.set_out_port(packet.in_port().map(PortId::paired));
            let layers = headers.outer();
            let is_syn = layers.tcp(packet.data()).is_some_and(|tcp| tcp.flags() & (SYN | ACK) == SYN);
            let Some(ip) = layers.ipv4(packet.data()).filter(|_| is_syn) else { return Some(packet) };
            context.count(self.syns, 1);
            if self.sources.count(ip.src(), context.seconds()) > Some(self.rate) {
                context.drop(packet, self.syn_rate);
                return None;
            }
            Some(packet)
        });
    }

    fn timer_interval(&self) -> Option<Duration> {
        Some(Duration::from_secs(1))
    }

    fn timer(&mut self, context: &mut Context<'_>) {
        let now = context.seconds();
        self.sources.forget(|seen| now.saturating_sub(seen) > AGEING);
    }
}

static SOURCES: TableSpec = TableSpec {
    name: "sources",
    about: "IPv4 sources of TCP SYNs",
    metric: None,
    columns: &[
        Column::key("worker", "Worker that receives the SYNs"),
        Column::key("source", "IPv4 address"),
        Column::gauge("syns", Unit::Packets, "SYNs within the second of the last one"),
    ],
};
static RESET: CommandSpec = CommandSpec { name: "reset", about: "Forgets all sources", arguments: &[] };

/// The control thread's part: the tables of all workers.
pub(crate) struct LimiterControl(pub(crate) Arc<[Arc<Sources>]>);

impl Control for LimiterControl {
    fn tables(&mut self) -> Vec<&'static TableSpec> {
        vec![&SOURCES]
    }

    fn list(&mut self, _: &'static TableSpec, page: &mut Page<'_>, _: &mut ControlPlane) {
        let all = self.0.iter().enumerate().flat_map(|(worker, table)| table.iter().map(move |it| (worker, it)));
        page.extend(all, |(worker, (source, _, syns))| vec![worker.into(), source.to_string().into(), syns.into()]);
    }

    fn commands(&mut self) -> Vec<&'static CommandSpec> {
        vec![&RESET]
    }

    fn command(&mut self, _: &Command<'_>, plane: &mut ControlPlane) -> Result<Value, String> {
        // Each worker clears its own table, so a table has one writer.
        let tables = Arc::clone(&self.0);
        plane.run_on_workers(move |context| tables[context.worker()].forget(|_| true));
        Ok(json!({ "reset": true }))
    }
}

fn main() -> ExitCode {
    wirepath::main(|| {
        let app = App::<Rate>::from_args("limiter", "Limits the TCP SYNs of each source.", DEMONSTRATION)?;
        app.run(|runtime, rate| {
            let rate = rate.0;
            let workers = runtime.config().workers.len();
            let tables: Arc<[_]> = (0..workers).map(|_| Arc::new(Sources::new())).collect();
            let syn_rate = DropReason::register("syn_rate", "the source sends too many SYNs")?;
            let syns = CounterId::register("syns", Unit::Packets, "TCP SYNs over IPv4")?;
            let control = LimiterControl(Arc::clone(&tables));
            let make =
                move |worker: &WorkerInfo| Limiter { rate, sources: Arc::clone(&tables[worker.index]), syn_rate, syns };
            Ok((make, control))
        })
    })
}
