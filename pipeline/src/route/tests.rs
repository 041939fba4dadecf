use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::AtomicBool;

use fastrand::Rng;

use super::*;

/// Routes of one VRF in a map. It finds the longest match by trying all lengths.
#[derive(Default)]
struct Oracle(BTreeMap<NetworkPrefix, u32>);

impl Oracle {
    fn lookup(&self, address: IpAddr) -> u32 {
        let width = if address.is_ipv4() { 32 } else { 128 };
        let networks = (0..=width).rev().filter_map(|len| NetworkPrefix::new(address, len));
        networks.filter_map(|network| self.0.get(&network)).next().copied().unwrap_or(NO_ROUTE)
    }
}

fn prefix(text: &str) -> NetworkPrefix {
    text.parse().unwrap()
}

fn address_of(is_v6: bool, bits: u128) -> IpAddr {
    if is_v6 { IpAddr::V6(bits.into()) } else { IpAddr::V4(((bits >> 96) as u32).into()) }
}

fn lookup(view: &RouteView<'_>, vrf: u16, address: IpAddr) -> u32 {
    match address {
        IpAddr::V4(v4) => view.lookup4(vrf, v4.to_bits()),
        IpAddr::V6(v6) => view.lookup6(vrf, v6.to_bits()),
    }
}

/// Returns addresses near the edges of a network, and in it.
fn near(random: &mut Rng, prefix: NetworkPrefix) -> [IpAddr; 4] {
    let host = u128::MAX.checked_shr(prefix.len().into()).unwrap_or(0);
    let unit = if prefix.is_ipv6() { 1 } else { 1 << 96 };
    let bits = prefix.bits();
    [bits | host, bits.wrapping_sub(unit), (bits | host).wrapping_add(unit), bits | random.u128(..) & host]
        .map(|bits| address_of(prefix.is_ipv6(), bits))
}

/// Returns a prefix that is often nested in others: few values for each part of the address.
fn random_prefix(random: &mut Rng) -> NetworkPrefix {
    let is_v6 = random.bool();
    let width = if is_v6 { 128 } else { 32 };
    let mut bits = 0;
    for _ in 0..width / 8 {
        bits = bits << 8 | *random.choice(&[0, 0, 1, 0x80, 0xff, 0x55]).unwrap();
    }
    if random.u8(..4) == 0 {
        bits ^= random.u128(..) >> (128 - width);
    }
    bits <<= 128 - width;
    let len = match random.u8(..8) {
        0 => random.u8(..=3),
        1 => width as u8,
        _ => random.u8(..=width as u8),
    };
    NetworkPrefix::new(address_of(is_v6, bits), len).unwrap()
}

#[test]
fn random_changes_agree_with_the_oracle() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = Rng::with_seed(seed);
    let domain = Domain::new();
    let mut reader = domain.join();
    let mut writer = RouteWriter::new(&domain, RouteLimits::default());
    let tables = writer.tables();
    let empty = writer.memory();
    let mut oracles: [Oracle; 3] = Default::default();
    let mut known: Vec<NetworkPrefix> = vec![];
    for step in 0..60_000 {
        let vrf = random.usize(..3);
        let oracle = &mut oracles[vrf];
        // Phases of growth and of shrinking.
        let grows = step / 6_000 % 2 == 0;
        let network = match random.choice(&known) {
            Some(known) if random.u8(..4) < if grows { 1 } else { 3 } => *known,
            _ => random_prefix(&mut random),
        };
        if random.u8(..10) < if grows { 8 } else { 2 } {
            let value = match random.u8(..4) {
                0 | 1 => random.u32(..4),
                // Half cells hold values below 32767.
                2 => random.u32(32_764..32_770),
                _ => random.u32(..=MAX_VALUE),
            };
            assert_eq!(writer.insert(vrf as u16, network, value), Ok(oracle.0.insert(network, value)), "{network}");
            known.push(network);
        } else {
            assert_eq!(writer.remove(vrf as u16, network), oracle.0.remove(&network), "{network}");
        }
        assert_eq!(writer.get(vrf as u16, network), oracle.0.get(&network).copied());
        reader.quiescent();
        let view = tables.view(reader.guard());
        for address in near(&mut random, network) {
            assert_eq!(lookup(&view, vrf as u16, address), oracle.lookup(address), "{address} after {network}");
        }
        if step % 1000 == 0 {
            for address in (0..500).flat_map(|_| {
                let network = random_prefix(&mut random);
                near(&mut random, network)
            }) {
                assert_eq!(lookup(&view, vrf as u16, address), oracle.lookup(address), "{address}");
            }
            let all: Vec<_> = oracle.0.iter().map(|(network, value)| (*network, *value)).collect();
            assert!(writer.iter(vrf as u16).eq(all.iter().copied()));
            let after = if random.bool() { network } else { random_prefix(&mut random) };
            let rest = all.iter().copied().filter(|(network, _)| *network > after);
            assert!(writer.iter_after(vrf as u16, Some(after)).eq(rest), "after {after}");
            let v6 = all.iter().filter(|(network, _)| network.is_ipv6()).count();
            assert_eq!(writer.route_count(vrf as u16), (all.len() - v6, v6));
        }
    }
    // Nothing is left of a table without routes, whether they are removed one by one or together.
    for network in oracles[0].0.keys() {
        assert!(writer.remove(0, *network).is_some());
    }
    assert_eq!(writer.iter(0).count(), 0);
    assert_eq!(writer.vrf_memory(0), writer_of_nothing());
    assert!((0..3).all(|vrf| writer.remove_vrf(vrf)) && !writer.remove_vrf(0));
    assert_eq!((writer.vrf_memory(1), writer.vrfs().count()), (0, 0));
    drop(reader);
    writer.reclaim();
    assert_eq!(writer.memory(), empty);
}

/// Memory of a VRF without routes.
fn writer_of_nothing() -> usize {
    let mut writer = RouteWriter::new(&Domain::new(), RouteLimits::default());
    writer.insert(0, prefix("0.0.0.0/0"), 1).unwrap();
    writer.remove(0, prefix("0.0.0.0/0"));
    writer.vrf_memory(0)
}

#[test]
fn many_routes_get_a_larger_direct_table_and_lose_it() {
    let domain = Domain::new();
    let reader = domain.join();
    let mut random = Rng::with_seed(7);
    let mut writer = RouteWriter::new(&domain, RouteLimits::default());
    let tables = writer.tables();
    let mut oracle = Oracle::default();
    for is_v6 in [false, true] {
        let networks: Vec<NetworkPrefix> = (0..20_000)
            .map(|i| {
                let len = [24, 16, 20, 32, 8, 28][i % 6];
                NetworkPrefix::new(address_of(is_v6, random.u128(..)), len).unwrap()
            })
            .collect();
        for (value, network) in (0..).zip(&networks) {
            writer.insert(9, *network, value).unwrap();
            oracle.0.insert(*network, value);
        }
        let check = |oracle: &Oracle| {
            let mut random = Rng::with_seed(8);
            let view = tables.view(reader.guard());
            for network in &networks {
                for address in near(&mut random, *network) {
                    assert_eq!(lookup(&view, 9, address), oracle.lookup(address), "{address}");
                }
            }
        };
        check(&oracle);
        // Short prefixes cover parts of the direct table.
        for (text, value) in [("0.0.0.0/0", 1), ("128.0.0.0/3", 2), ("::/0", 3), ("8000::/2", 4)] {
            writer.insert(9, prefix(text), value).unwrap();
            oracle.0.insert(prefix(text), value);
        }
        check(&oracle);
        for network in &networks[100..] {
            assert_eq!(writer.remove(9, *network), oracle.0.remove(network));
        }
        check(&oracle);
        for network in oracle.0.keys() {
            assert!(writer.remove(9, *network).is_some());
        }
        oracle.0.clear();
        check(&oracle);
    }
}

#[test]
fn batches_find_what_single_lookups_do() {
    let domain = Domain::new();
    let reader = domain.join();
    let mut random = Rng::with_seed(3);
    let mut writer = RouteWriter::new(&domain, RouteLimits::default());
    let networks: Vec<NetworkPrefix> = (0..3000).map(|_| random_prefix(&mut random)).collect();
    for (value, network) in (0..).zip(&networks) {
        writer.insert(value as u16 % 5, *network, value).unwrap();
    }
    let tables = writer.tables();
    let view = tables.view(reader.guard());
    for count in [0, 1, 2, 63, 64] {
        let near: Vec<IpAddr> = (0..256).flat_map(|i| near(&mut random, networks[i])).collect();
        let v4: Vec<u32> =
            near.iter().filter_map(|ip| if let IpAddr::V4(ip) = ip { Some(ip.to_bits()) } else { None }).collect();
        let v6: Vec<u128> =
            near.iter().filter_map(|ip| if let IpAddr::V6(ip) = ip { Some(ip.to_bits()) } else { None }).collect();
        let vrfs: Vec<u16> = (0..count).map(|_| random.u16(..7)).collect();
        let (v4, v6) = (&v4[..count], &v6[..count]);
        let mut values = vec![77; count];
        view.lookup4_batch(2, v4, &mut values);
        assert!(v4.iter().map(|address| view.lookup4(2, *address)).eq(values.iter().copied()));
        view.lookup6_batch(2, v6, &mut values);
        assert!(v6.iter().map(|address| view.lookup6(2, *address)).eq(values.iter().copied()));
        view.lookup4_vrfs(&vrfs, v4, &mut values);
        assert!((0..count).map(|i| view.lookup4(vrfs[i], v4[i])).eq(values.iter().copied()));
        view.lookup6_vrfs(&vrfs, v6, &mut values);
        assert!((0..count).map(|i| view.lookup6(vrfs[i], v6[i])).eq(values.iter().copied()));
    }
}

#[test]
fn unknown_vrfs_and_large_values_are_refused() {
    let domain = Domain::new();
    let reader = domain.join();
    let mut writer = RouteWriter::new(&domain, RouteLimits::default());
    let tables = writer.tables();
    let view = tables.view(reader.guard());
    for vrf in [0, 1, u16::MAX] {
        assert_eq!((view.lookup4(vrf, 1), view.lookup6(vrf, u128::MAX)), (NO_ROUTE, NO_ROUTE));
        assert_eq!(writer.remove(vrf, prefix("::/0")), None);
        assert_eq!((writer.iter(vrf).count(), writer.route_count(vrf), writer.vrf_memory(vrf)), (0, (0, 0), 0));
    }
    assert_eq!(writer.insert(u16::MAX, prefix("::/0"), NO_ROUTE), Err(RouteError::Value(NO_ROUTE)));
    assert_eq!(writer.insert(u16::MAX, prefix("::/0"), MAX_VALUE), Ok(None));
    assert_eq!((view.lookup4(u16::MAX, 1), view.lookup6(u16::MAX, 1)), (NO_ROUTE, MAX_VALUE));
    assert!(writer.vrfs().eq([u16::MAX]));
}

#[test]
fn insertions_stop_at_the_memory_limit() {
    let mut writer = RouteWriter::new(&Domain::new(), RouteLimits { bytes: 1 << 20 });
    let mut inserted = 0;
    let refused = loop {
        let network = NetworkPrefix::new(IpAddr::V4((inserted << 8).into()), 24).unwrap();
        match writer.insert(1, network, inserted) {
            Ok(_) => inserted += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, RouteError::Full { bytes } if bytes >= 1 << 20), "{refused}");
    assert!(inserted > 10_000, "{inserted} routes, and no direct table that exceeds the limit");
    assert!(writer.remove(1, prefix("0.0.0.0/24")).is_some());
}

/// The removal of a route with a small value, above one with a large value, makes nearly all blocks longer. The array
/// has room for that, also if the kernel has refused a larger one.
#[test]
fn removals_fit_beside_a_full_table() {
    let domain = Domain::new();
    let memory = || Cells::reserve(16 << 20);
    let mut writer = RouteWriter::with_memory(&domain, RouteLimits { bytes: 1 << 30 }, memory(), memory());
    writer.insert(1, prefix("0.0.0.0/0"), 40_000).unwrap();
    writer.insert(1, prefix("0.0.0.0/1"), 1).unwrap();
    // Seven routes between eight gaps in each block of 64.
    let networks = (0..1 << 23).filter(|n| n % 64 % 9 == 4);
    let mut inserted = 0u32;
    for network in networks {
        let network = NetworkPrefix::new(IpAddr::V4((network << 8).into()), 24).unwrap();
        match writer.insert(1, network, 2) {
            Ok(_) => inserted += 1,
            Err(error) => {
                assert!(matches!(error, RouteError::Full { .. }));
                break;
            }
        }
    }
    assert!((100_000..1 << 23).contains(&inserted), "{inserted}");
    assert_eq!(writer.remove(1, prefix("0.0.0.0/1")), Some(1));
    let (tables, reader) = (writer.tables(), domain.join());
    let view = tables.view(reader.guard());
    assert_eq!([0, 4 << 8, 5 << 8].map(|address| view.lookup4(1, address)), [40_000, 2, 40_000]);
}

#[test]
fn readers_see_old_or_new_routes_during_changes() {
    let domain = Domain::new();
    let mut writer = RouteWriter::new(&domain, RouteLimits::default());
    let tables = writer.tables();
    // The value of a route is its length, so a lookup must return a length of a route that covers the address.
    let cover = |is_v6: bool, address: u128, found: u32| {
        let (base, width) = if is_v6 { (0xfd << 120, 128) } else { (10 << 120, 32) };
        assert!((8..=width).contains(&found), "{found} is the length of no route");
        assert_eq!(address >> 120, base >> 120);
        let inside = (address ^ base).leading_zeros() >= found;
        assert!(inside || found == 8, "a route of another network");
    };
    writer.insert(5, prefix("10.0.0.0/8"), 8).unwrap();
    writer.insert(5, prefix("fd00::/8"), 8).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let (tables, stop, mut reader) = (&tables, &stop, domain.join());
            scope.spawn(move || {
                let mut random = Rng::with_seed(seed);
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let view = tables.view(reader.guard());
                    let near = |random: &mut Rng, base: u128| base | random.u128(..) >> random.u8(8..128);
                    let v4: Vec<u128> = (0..64).map(|_| near(&mut random, 10 << 120)).collect();
                    let v6: Vec<u128> = (0..64).map(|_| near(&mut random, 0xfd << 120)).collect();
                    let mut found = [0; 64];
                    let short: Vec<u32> = v4.iter().map(|bits| (bits >> 96) as u32).collect();
                    view.lookup4_batch(5, &short, &mut found);
                    short.iter().zip(found).for_each(|(v4, found)| cover(false, u128::from(*v4) << 96, found));
                    view.lookup6_batch(5, &v6, &mut found);
                    v6.iter().zip(found).for_each(|(v6, found)| cover(true, *v6, found));
                    reader.quiescent();
                }
            });
        }
        let mut random = Rng::with_seed(9);
        for _ in 0..100_000 {
            let is_v6 = random.bool();
            let len = random.u8(9..=if is_v6 { 128 } else { 32 });
            let base = address_of(is_v6, if is_v6 { 0xfd << 120 } else { 10 << 120 });
            let network = NetworkPrefix::new(base, len).unwrap();
            if random.bool() {
                writer.insert(5, network, len.into()).unwrap();
            } else {
                writer.remove(5, network);
            }
            // Routes elsewhere make the direct tables grow and shrink.
            let other = NetworkPrefix::new(address_of(is_v6, 0x80 << 120 | random.u128(..) >> 4), 24).unwrap();
            let next = writer.iter_after(5, Some(other)).next();
            if random.bool() {
                writer.insert(5, other, 99).unwrap();
            } else if let Some((other, _)) = next
                && ![prefix("fd00::/8"), prefix("10.0.0.0/8")].contains(&other)
            {
                writer.remove(5, other);
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}
