//! Random sequences of steps for a gateway and its reference model.

use wirepath_packet::Pool;

use crate::model::{self, Tally};

/// Sequences of each run.
const SEQUENCES: u64 = 2000;

/// Further sequences, which found errors: a neighbour that a reload forgot and that is asked anew was given up early.
const FOUND: [u64; 1] = [12_682];

/// Prints the seed of a sequence that fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("the seed is {}", self.0);
        }
    }
}

fn run(seed: u64, pool: &Pool) -> Tally {
    let _printed = Seed(seed);
    let mut random = fastrand::Rng::with_seed(seed);
    let len = random.usize(20..600);
    let data: Vec<u8> = (0..len).map(|_| random.u8(..)).collect();
    model::run(&data, pool)
}

/// Effects that the sequences must reach, and how often at least: about half of what they do.
const EFFECTS: &[(&str, u64)] = &[
    ("Fragmentation Needed", 300),
    ("Packet Too Big", 400),
    ("TTL over IPv4", 100),
    ("answered ARP request", 100),
    ("answered solicitation", 60),
    ("binding learned", 7000),
    ("binding that aged", 1000),
    ("binding that moved", 400),
    ("bridged from a port, IPv6", 5000),
    ("bridged from a tunnel, IPv6", 4000),
    ("broadcast above its limit", 100),
    ("divided by a router", 300),
    ("error of a bridge, IPv4", 100),
    ("error of a bridge, IPv6", 400),
    ("error of a router, IPv4", 1000),
    ("error of a router, IPv6", 2000),
    ("flooded within a limit", 3000),
    ("flow that keeps its member", 400),
    ("flow whose member has failed", 1),
    ("hop limit over IPv6", 100),
    ("link-local address or group", 200),
    ("member that has failed", 300),
    ("multicast above its limit", 90),
    ("new flow of a group", 200),
    ("packet to a host that has failed", 100),
    ("routed into a tunnel, IPv4", 200),
    ("routed into a tunnel, IPv6", 100),
    ("routed, IPv4", 1000),
    ("routed, IPv6", 900),
    ("silent host, IPv4", 300),
    ("silent host, IPv6", 200),
    ("too long for a port", 1000),
    ("too long for a remote", 3000),
    ("unknown unicast above its limit", 70),
    ("unresolved neighbour, IPv4", 100),
    ("unresolved neighbour, IPv6", 100),
    ("waiting packet that was refused", 500),
];

#[test]
fn random_sequences_agree_with_the_model() {
    let (pool, mut all) = (model::pool(), Tally::new());
    // More sequences than those of each run search for what they do not find.
    let seeds = std::env::var("WIREPATH_MODEL_SEEDS").ok().map(|seeds| {
        let (first, end) = seeds.split_once("..").expect("FIRST..END");
        first.parse().expect("a number")..end.parse().expect("a number")
    });
    for seed in seeds.clone().unwrap_or(0..SEQUENCES).chain(FOUND) {
        for (effect, count) in run(seed, &pool) {
            *all.entry(effect).or_default() += count;
        }
    }
    let count = |effect: &str| all.get(effect).copied().unwrap_or(0);
    let rare: Vec<_> = EFFECTS.iter().filter(|(effect, least)| seeds.is_none() && count(effect) < *least).collect();
    assert!(rare.is_empty(), "rarer than expected: {rare:?} of {all:#?}");
    let unlisted: Vec<_> = all.keys().filter(|effect| !EFFECTS.iter().any(|(it, _)| it == *effect)).collect();
    assert!(unlisted.is_empty(), "without a minimum: {unlisted:?} of {all:#?}");
}
