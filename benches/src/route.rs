//! The routing tables alone: lookups in bulk that all find a route, and insertions.

use std::hint::black_box;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::Serialize;
use wirepath::cli::Failure;
use wirepath_pipeline::clock;
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::route::{NetworkPrefix, RouteLimits, RouteWriter};

use crate::measure::{Results, Spread, Timing, count, cpu_time, pin};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Number of routes of each VRF
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = count(1..=10_000_000))]
    routes: u32,

    /// Routes and addresses of IPv6
    #[arg(long)]
    ipv6: bool,

    /// Number of VRFs, all with the same routes; each address is looked up in a random one
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count(1..=10_000))]
    vrfs: u32,

    #[command(flatten)]
    timing: Timing,

    /// Write the routes and addresses to a file for benches/peers/route-tables.c, and measure nothing
    #[arg(long, value_name = "FILE")]
    export: Option<PathBuf>,
}

/// Figures in cycles of the time-stamp counter.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    /// Lookup of a random address that has a route, 64 at a time. The median of windows of 16384
    /// addresses, of which most see no other program on the core, and of these the median of the rounds.
    lookup_cycles: f64,
    /// The same by round.
    lookup: Spread,
    /// Insertion of a route while the tables grow to their size, including the read of the counter: the median.
    insert_cycles: u64,
    /// The insertion that 1 % exceed.
    slow_insert_cycles: u64,
    /// Bytes of memory of one VRF.
    bytes_per_vrf: usize,
    /// Bytes of memory of all tables.
    bytes: usize,
    routes: u32,
    vrfs: u32,
    /// Fraction of the time in which the program had a processor. Below 1 the figures are too high.
    cpu_share: f64,
}

impl Results for Figures {
    fn text(&self) -> String {
        format!(
            "{:.1} cycles/lookup ({:.1} to {:.1} in {} rounds), {} cycles/insert (1 % above {}), {} KiB for each \
             VRF, {} KiB",
            self.lookup_cycles,
            self.lookup.min,
            self.lookup.max,
            self.lookup.rounds,
            self.insert_cycles,
            self.slow_insert_cycles,
            self.bytes_per_vrf >> 10,
            self.bytes >> 10
        )
    }

    fn cpu_share(&self) -> Option<f64> {
        Some(self.cpu_share)
    }

    fn spread(&self) -> Option<f64> {
        Some(self.lookup.spread)
    }
}

/// Prefix lengths of the Internet's IPv4 table in parts of 1000, with 2 % of longer prefixes.
const LENGTHS4: &[(u8, u32)] = &[
    (8, 1),
    (10, 1),
    (11, 1),
    (12, 2),
    (13, 4),
    (14, 6),
    (15, 8),
    (16, 14),
    (17, 9),
    (18, 15),
    (19, 26),
    (20, 45),
    (21, 50),
    (22, 110),
    (23, 100),
    (24, 588),
    (25, 2),
    (26, 2),
    (27, 2),
    (28, 3),
    (29, 4),
    (30, 3),
    (32, 4),
];

/// Numbers of prefixes by length, of the IPv6 table.
const LENGTHS6: &[(u8, u32)] = &[
    (20, 2),
    (24, 4),
    (28, 12),
    (29, 40),
    (30, 6),
    (32, 200),
    (33, 10),
    (34, 8),
    (35, 5),
    (36, 40),
    (38, 10),
    (40, 60),
    (42, 10),
    (44, 80),
    (46, 30),
    (47, 12),
    (48, 450),
    (56, 10),
    (64, 11),
];

fn random_len(random: &mut fastrand::Rng, lengths: &[(u8, u32)]) -> u8 {
    let mut at = random.u32(..lengths.iter().map(|(_, weight)| *weight).sum::<u32>());
    for (len, weight) in lengths {
        match at.checked_sub(*weight) {
            None => return *len,
            Some(rest) => at = rest,
        }
    }
    0
}

/// Returns different random routes, uniform over the unicast addresses.
fn routes(random: &mut fastrand::Rng, ipv6: bool, count: u32) -> Vec<(NetworkPrefix, u32)> {
    let mut known = std::collections::HashSet::new();
    let mut routes = vec![];
    while routes.len() < count as usize {
        let (address, len) = if ipv6 {
            (IpAddr::V6((1 << 125 | random.u128(..) >> 3).into()), random_len(random, LENGTHS6))
        } else {
            (IpAddr::V4(random.u32(1 << 24..224 << 24).into()), random_len(random, LENGTHS4))
        };
        let value = random.u32(..1000);
        routes.extend(NetworkPrefix::new(address, len).filter(|it| known.insert(*it)).map(|it| (it, value)));
    }
    routes
}

/// Returns a random address of a network.
fn address_in(random: &mut fastrand::Rng, network: NetworkPrefix) -> IpAddr {
    let host = random.u128(..).checked_shr(network.len().into()).unwrap_or(0);
    match network.address() {
        IpAddr::V4(v4) => IpAddr::V4((v4.to_bits() | (host >> 96) as u32).into()),
        IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() | host).into()),
    }
}

/// Writes routes and addresses as `route-tables.c` reads them.
fn export(routes: &[(NetworkPrefix, u32)], addresses: &[IpAddr]) -> Vec<u8> {
    let mut bytes = vec![];
    let mut add = |kind: u8, len: u8, value: u32, address: IpAddr| {
        bytes.extend([kind, len, 0, 0]);
        bytes.extend(value.to_ne_bytes());
        match address {
            IpAddr::V4(v4) => {
                bytes.extend(v4.to_bits().to_ne_bytes());
                bytes.extend([0; 12]);
            }
            IpAddr::V6(v6) => bytes.extend(v6.octets()),
        }
    };
    routes.iter().for_each(|(network, value)| add(1, network.len(), *value, network.address()));
    addresses.iter().for_each(|address| add(0, 0, 0, *address));
    bytes
}

/// Number of addresses.
const ADDRESSES: usize = 1 << 20;

/// Number of addresses between two reads of the clock.
const WINDOW: usize = 1 << 14;

/// Runs the measurement; `None` if it only writes the file for the peers.
pub(crate) fn run(arguments: &Arguments) -> Result<Option<Figures>, Failure> {
    pin(arguments.timing.core)?;
    let mut random = fastrand::Rng::with_seed(1);
    let routes = routes(&mut random, arguments.ipv6, arguments.routes);
    let addresses: Vec<IpAddr> = (0..ADDRESSES)
        .map(|_| {
            let (network, _) = routes[random.usize(..routes.len())];
            address_in(&mut random, network)
        })
        .collect();
    if let Some(path) = &arguments.export {
        std::fs::write(path, export(&routes, &addresses))
            .map_err(|error| Failure::failed(format!("{}: {error}", path.display())))?;
        return Ok(None);
    }

    let started = (Instant::now(), cpu_time());
    let vrfs: Vec<u16> = (0..ADDRESSES).map(|_| random.u32(..arguments.vrfs) as u16).collect();
    let domain = Domain::new();
    let mut writer = RouteWriter::new(&domain, RouteLimits::default());
    let mut inserts = Vec::with_capacity(routes.len() * arguments.vrfs as usize);
    for vrf in 0..arguments.vrfs as u16 {
        for (network, value) in &routes {
            let from = clock::ticks();
            writer.insert(vrf, *network, *value).map_err(Failure::failed)?;
            inserts.push(clock::ticks() - from);
        }
    }
    inserts.sort_unstable();

    let (tables, reader) = (writer.tables(), domain.join());
    let view = tables.view(reader.guard());
    let (mut v4, mut v6) = (vec![], vec![]);
    for address in &addresses {
        match address {
            IpAddr::V4(address) => v4.push(address.to_bits()),
            IpAddr::V6(address) => v6.push(address.to_bits()),
        }
    }
    let mut values = [0; 64];
    let mut look_up = |length: Duration| {
        let mut windows = vec![];
        let until = Instant::now() + length;
        while windows.is_empty() || Instant::now() < until {
            for window in (0..ADDRESSES).step_by(WINDOW) {
                let bursts = (window..window + WINDOW).step_by(64).map(|at| at..at + 64);
                let from = clock::ticks();
                for burst in bursts {
                    match (arguments.ipv6, arguments.vrfs) {
                        (false, 1) => view.lookup4_batch(0, &v4[burst], &mut values),
                        (true, 1) => view.lookup6_batch(0, &v6[burst], &mut values),
                        (false, _) => view.lookup4_vrfs(&vrfs[burst.clone()], &v4[burst], &mut values),
                        (true, _) => view.lookup6_vrfs(&vrfs[burst.clone()], &v6[burst], &mut values),
                    }
                    black_box(&mut values);
                }
                windows.push((clock::ticks() - from) as f64 / WINDOW as f64);
            }
        }
        Spread::new(windows).median
    };
    let timing = &arguments.timing;
    look_up(Duration::from_secs_f64(timing.warm_up));
    let lookup = Spread::new((0..timing.rounds).map(|_| look_up(timing.round())));
    let cpu_share = (cpu_time() - started.1) / started.0.elapsed().as_secs_f64();
    Ok(Some(Figures {
        lookup_cycles: lookup.median,
        lookup,
        insert_cycles: inserts[inserts.len() / 2],
        slow_insert_cycles: inserts[inserts.len() * 99 / 100],
        bytes_per_vrf: writer.vrf_memory(0),
        bytes: writer.memory(),
        routes: arguments.routes,
        vrfs: arguments.vrfs,
        cpu_share: cpu_share.min(1.0),
    }))
}
