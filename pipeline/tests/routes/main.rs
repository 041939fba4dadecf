//! Routing tables beside DPDK's, and their memory.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use fastrand::Rng;
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::route::{NetworkPrefix, NextHopGroup, RouteLimits, RouteView, RouteWriter};
use wirepath_testlab::{CountingAllocator, Requirement, allocations, require, retained_bytes};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const VRF: u16 = 3;

/// Prefix lengths and how often they occur.
type Lengths = &'static [(u8, u32)];

/// Like those of the Internet, with some longer ones.
const LENGTHS4: Lengths = &[
    (0, 1),
    (8, 3),
    (12, 5),
    (14, 8),
    (16, 20),
    (18, 20),
    (20, 80),
    (22, 150),
    (23, 100),
    (24, 570),
    (26, 15),
    (28, 15),
    (31, 5),
    (32, 8),
];
const LENGTHS6: Lengths = &[
    (0, 1),
    (12, 5),
    (20, 20),
    (28, 60),
    (29, 60),
    (32, 250),
    (36, 60),
    (40, 80),
    (44, 80),
    (48, 330),
    (56, 20),
    (64, 30),
    (127, 2),
    (128, 2),
];

fn pick(random: &mut Rng, lengths: Lengths) -> u8 {
    let mut at = random.u32(..lengths.iter().map(|(_, weight)| *weight).sum::<u32>());
    for (len, weight) in lengths {
        match at.checked_sub(*weight) {
            None => return *len,
            Some(rest) => at = rest,
        }
    }
    0
}

/// Returns a unicast address; IPv6: in `2000::/3`. Some lie close together.
///
/// `rte_fib` of DPDK 22.11 would fill the whole table with the value of `0.0.0.0/0` if another route ended at
/// 255.255.255.255.
fn random_address(random: &mut Rng, is_v6: bool) -> IpAddr {
    match is_v6 {
        false if random.bool() => IpAddr::V4(random.u32(..224 << 24).into()),
        false => IpAddr::V4((10 << 24 | random.u32(..1 << 20)).into()),
        true => {
            let front = u128::from(if random.bool() { random.u32(..) } else { random.u32(..1 << 10) << 16 });
            IpAddr::V6((1 << 125 | front << 93 | random.u128(..) >> 35).into())
        }
    }
}

enum Operation {
    Insert(NetworkPrefix, u32),
    Remove(NetworkPrefix),
    Lookup(IpAddr),
}

/// Rounds of changes, each with lookups after it. Addresses of lookups are mostly those of routes.
fn operations(seed: u64, is_v6: bool, rounds: usize, changes: usize, lookups: usize) -> Vec<Operation> {
    let mut random = Rng::with_seed(seed);
    let mut networks: Vec<NetworkPrefix> = vec![];
    let mut operations = vec![];
    for _ in 0..rounds {
        for _ in 0..changes {
            let known = random.choice(&networks).copied();
            match known {
                Some(network) if random.u8(..4) == 0 => operations.push(Operation::Remove(network)),
                Some(network) if random.u8(..8) == 0 => {
                    operations.push(Operation::Insert(network, random.u32(..1 << 20)));
                }
                _ => {
                    let len = pick(&mut random, if is_v6 { LENGTHS6 } else { LENGTHS4 });
                    let network = NetworkPrefix::new(random_address(&mut random, is_v6), len).unwrap();
                    networks.push(network);
                    operations.push(Operation::Insert(network, random.u32(..1 << 20)));
                }
            }
        }
        for _ in 0..lookups {
            let network = random.choice(&networks).unwrap();
            let host = random.u128(..).checked_shr(network.len().into()).unwrap_or(0);
            operations.push(Operation::Lookup(match network.address() {
                _ if random.u8(..8) == 0 => random_address(&mut random, is_v6),
                IpAddr::V4(v4) => IpAddr::V4((v4.to_bits() | (host >> 96) as u32).into()),
                IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() | host).into()),
            }));
        }
    }
    operations
}

/// Writes operations for `route-tables.c`.
fn encode(operations: &[Operation]) -> Vec<u8> {
    let mut bytes = vec![];
    for operation in operations {
        let (kind, len, value, address) = match operation {
            Operation::Lookup(address) => (0, 0, 0, *address),
            Operation::Insert(network, value) => (1, network.len(), *value, network.address()),
            Operation::Remove(network) => (2, network.len(), 0, network.address()),
        };
        bytes.extend([kind, len, 0, 0]);
        bytes.extend(value.to_ne_bytes());
        match address {
            IpAddr::V4(v4) => {
                bytes.extend(v4.to_bits().to_ne_bytes());
                bytes.extend([0; 12]);
            }
            IpAddr::V6(v6) => bytes.extend(v6.octets()),
        }
    }
    bytes
}

/// Returns the answers of our tables.
fn answers(operations: &[Operation]) -> Vec<u32> {
    let domain = Domain::new();
    let mut writer = RouteWriter::new(&domain, RouteLimits::default());
    let tables = writer.tables();
    let mut reader = domain.join();
    let mut answers = vec![];
    for operation in operations {
        match operation {
            Operation::Insert(network, value) => drop(writer.insert(VRF, *network, *value).unwrap()),
            Operation::Remove(network) => drop(writer.remove(VRF, *network)),
            Operation::Lookup(address) => {
                reader.quiescent();
                let view = tables.view(reader.guard());
                answers.push(match address {
                    IpAddr::V4(v4) => view.lookup4(VRF, v4.to_bits()),
                    IpAddr::V6(v6) => view.lookup6(VRF, v6.to_bits()),
                });
            }
        }
    }
    answers
}

/// Compiles `route-tables.c`.
fn compile(folder: &Path) -> PathBuf {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../benches/peers/route-tables.c");
    let flags = Command::new("pkg-config").args(["--cflags", "--libs", "libdpdk"]).output().unwrap();
    assert!(flags.status.success(), "{}", String::from_utf8_lossy(&flags.stderr));
    let program = folder.join("route-tables");
    let flags = String::from_utf8(flags.stdout).unwrap();
    let done = Command::new("gcc").args(["-O2", source, "-o"]).arg(&program).args(flags.split_whitespace()).output();
    let done = done.unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    program
}

/// Compares our answers with those of DPDK's `rte_fib` or `rte_fib6`.
fn agree_with_dpdk(table: &str, operations: &[Operation]) {
    let folder = std::env::temp_dir().join(format!("wirepath-routes-{}-{table}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let program = compile(&folder);
    let (input, output) = (folder.join("operations"), folder.join("answers"));
    std::fs::write(&input, encode(operations)).unwrap();
    let eal = ["--no-pci", "--no-huge", "--no-shconf", "--no-telemetry", "-m", "3072", "-l", "0"];
    let done = Command::new(program).args([table, "answers"]).args([&input, &output]).args(eal).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let expected = std::fs::read(&output).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let expected: Vec<u32> =
        expected.chunks_exact(4).map(|bytes| u32::from_ne_bytes(*bytes.first_chunk().unwrap())).collect();
    let found = answers(operations);
    assert_eq!(found.len(), expected.len());
    let addresses = operations.iter().filter_map(|operation| match operation {
        Operation::Lookup(address) => Some(*address),
        _ => None,
    });
    for ((address, found), expected) in addresses.zip(found).zip(expected) {
        assert_eq!(found, expected, "{address}");
    }
}

const DPDK: [Requirement; 3] =
    [Requirement::Program("gcc"), Requirement::Program("pkg-config"), Requirement::File("/usr/include/dpdk/rte_fib.h")];

#[test]
fn a_million_ipv4_routes_are_those_of_dpdk() {
    require!(all DPDK);
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    agree_with_dpdk("fib", &operations(seed, false, 10, 100_000, 100_000));
}

#[test]
fn ipv6_routes_are_those_of_dpdk() {
    require!(all DPDK);
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    agree_with_dpdk("fib6", &operations(seed, true, 10, 10_000, 50_000));
}

fn insert_random(writer: &mut RouteWriter, vrf: u16, routes: usize, seed: u64) {
    let mut random = Rng::with_seed(seed);
    while writer.route_count(vrf).0 < routes {
        let len = pick(&mut random, LENGTHS4);
        let network = NetworkPrefix::new(random_address(&mut random, false), len).unwrap();
        writer.insert(vrf, network, random.u32(..100)).unwrap();
    }
}

#[test]
fn lookups_allocate_nothing() {
    let domain = Domain::new();
    let mut writer = RouteWriter::new(&domain, RouteLimits::default());
    insert_random(&mut writer, VRF, 10_000, 1);
    let (tables, reader) = (writer.tables(), domain.join());
    let group = NextHopGroup::new(256, &[]);
    let look = |view: &RouteView<'_>| {
        let mut values = [0; 64];
        view.lookup4_batch(VRF, &[0x0a00_0001; 64], &mut values);
        view.lookup6_vrfs(&[VRF; 64], &[7; 64], &mut values);
        view.lookup4(VRF, 1).wrapping_add(view.lookup6(VRF, 1)).wrapping_add(group.select(7))
    };
    assert_eq!(allocations(|| assert_eq!(look(&tables.view(reader.guard())), look(&tables.view(reader.guard())))), 0);
}

#[test]
fn the_heap_holds_no_routes() {
    let domain = Domain::new();
    let mut writer = RouteWriter::new(&domain, RouteLimits::default());
    insert_random(&mut writer, VRF, 1000, 1);
    let ((), heap) = retained_bytes(|| {
        for round in 0..20 {
            for vrf in 0..10 {
                insert_random(&mut writer, vrf, 2000, round);
            }
            (0..10).for_each(|vrf| assert!(writer.remove_vrf(vrf)));
            writer.reclaim();
        }
    });
    // The lists of free blocks stay.
    assert!((0..1 << 20).contains(&heap), "{heap} bytes");
}

#[test]
fn a_thousand_routes_take_less_than_130_kib() {
    let domain = Domain::new();
    let mut writer = RouteWriter::new(&domain, RouteLimits::default());
    for vrf in 0..100 {
        insert_random(&mut writer, vrf, 1000, vrf.into());
        assert!(writer.vrf_memory(vrf) < 130 << 10, "{} bytes", writer.vrf_memory(vrf));
    }
    let sum: usize = (0..100).map(|vrf| writer.vrf_memory(vrf)).sum();
    writer.reclaim();
    assert!(writer.memory() < sum + (1 << 20), "{} bytes, tables {sum}", writer.memory());
}
