//! Distributes the flows to a virtual address and port among backends, between the ports 0 (clients) and 1 (backends).
//!
//! Rendezvous hashing gives each slot of a table a backend. If a backend comes or goes, only the flows that it gains or
//! loses move. Replies get the virtual address again. Both directions need no state for flows:
//!
//!     cargo run --release --example balancer -- --seconds 3              # on generated traffic
//!     cargo run --release --example balancer -- --config my-ports.toml   # on two ports, with [balancer]
//!
//! SIGHUP reads the file again. Workers read the table without locks while the control thread replaces it.

use std::net::Ipv4Addr;
use std::sync::Arc;

use wirepath::prelude::*;
use wirepath::wire::entropy;

const DEMONSTRATION: &str = "
[[port]]
name = 'clients'
driver = 'null'
[port.null]
source = 'udp4'             # datagrams to 192.168.2.1, port 2000
flows = 1000

[[port]]
name = 'backends'
driver = 'null'

[balancer]
address = '192.168.2.1'
port = 2000
[[balancer.backend]]
address = '10.0.0.1'
mac = '02:00:00:00:00:01'
[[balancer.backend]]
address = '10.0.0.2'
mac = '02:00:00:00:00:02'
";

const SLOTS: usize = 4096;
/// Port that leads to the backends.
const BACKENDS: PortId = PortId::new(1);

/// A server behind the virtual address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Backend {
    pub(crate) address: Ipv4Addr,
    pub(crate) mac: MacAddr,
}

/// The table `[balancer]`, with the backend of each slot.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    address: Ipv4Addr,
    port: u16,
    backends: Vec<Backend>,
    slots: Vec<Backend>,
}

impl AppSettings for Service {
    fn read(top: &Settings<'_>, ports: &[String]) -> Result<Self, ConfigError> {
        if ports.len() != 2 {
            top.record(top.error_in("port", format!("found {}, expected two", ports.len())));
        }
        top.required_table("balancer")?.complete(|table| {
            let address = table.required_parsed("address", "an IPv4 address");
            let port = table.required_integer("port", 1..=65_535);
            let backends = table.each("backend", |backend| {
                let address = backend.required_parsed("address", "an IPv4 address");
                let mac = backend.required_parsed("mac", "a MAC address such as \"02:00:00:00:00:01\"");
                Ok(Backend { address: address?, mac: mac? })
            })?;
            if backends.is_empty() {
                return Err(table.error_in("backend", "missing, expected at least one table [[balancer.backend]]"));
            }
            Ok(Self { address: address?, port: port?, slots: slots(&backends), backends })
        })
    }
}

/// Returns the backend of each slot: the one with the highest score, whatever the order of the backends.
fn slots(backends: &[Backend]) -> Vec<Backend> {
    let best = |slot| backends.iter().copied().max_by_key(|backend| score(slot, backend.address));
    (0..SLOTS as u64).filter_map(best).collect()
}

/// Mixes a slot and a backend into a number that looks random (half of the finalizer of `SplitMix64`).
fn score(slot: u64, backend: Ipv4Addr) -> u64 {
    let mixed = (slot << 32 | u64::from(backend.to_bits())).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ mixed >> 31
}

/// The stage, and on the control thread the part that replaces the service.
#[derive(Clone)]
pub(crate) struct Balancer(pub(crate) Arc<Shared<Service>>);

impl Stage for Balancer {
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        let service = self.0.read(context.guard());
        context.parse_each(batch, |_, mut packet, headers| {
            packet.set_out_port(packet.in_port().map(PortId::paired));
            // Fragments have no ports and pass unchanged, as all other traffic does.
            if let Some(flow) = FiveTuple::of(packet.data(), headers.outer()) {
                let slot = entropy(packet.data(), headers.outer()) as usize % SLOTS;
                if packet.in_port() == Some(BACKENDS) {
                    service.restore_source(flow, packet.headers_mut(headers));
                } else if flow.dst() == service.address && flow.dst_port() == service.port {
                    redirect(packet.headers_mut(headers), service.slots[slot]);
                }
            }
            Some(packet)
        });
    }
}

/// Gives a packet to a backend. The setters keep the checksums of IP, TCP and UDP right.
fn redirect(mut headers: HeadersMut<'_>, backend: Backend) -> Option<()> {
    headers.ipv4()?.set_dst(backend.address);
    headers.ethernet()?.set_dst(backend.mac);
    Some(())
}

impl Service {
    /// Makes a reply of a backend come from the virtual address.
    fn restore_source(&self, flow: FiveTuple, mut headers: HeadersMut<'_>) -> Option<()> {
        if flow.src_port() == self.port && self.backends.iter().any(|it| flow.src() == it.address) {
            headers.ipv4()?.set_src(self.address);
        }
        Some(())
    }
}

impl Control for Balancer {}

fn main() -> ExitCode {
    wirepath::main(|| {
        let app = App::<Service>::from_args("balancer", "Distributes flows among backends.", DEMONSTRATION)?;
        let build = |runtime: &mut Runtime, service: &mut Service| {
            let shared = Balancer(runtime.share(service.clone()));
            let stage = shared.clone();
            Ok((move |_: &_| stage.clone(), shared))
        };
        app.run_changeable(build, &["balancer"], |balancer, service, _| balancer.0.replace(service))
    })
}
